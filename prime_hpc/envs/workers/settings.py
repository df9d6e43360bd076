"""The settings of a pool as a worker is told them: plain values."""

from dataclasses import asdict, fields
from typing import Any

from prime_hpc.config.secret import Secret, hide, revealed
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.pool_settings import ChatOptions, PoolSettings
from prime_hpc.envs.workers.frames import pack


def env_to_plain(config: EnvConfig) -> dict[str, Any]:
    """Return an environment's own keys, secrets revealed: no default that was not stated, for that differs."""
    stated = {name: getattr(config, name) for name in EnvConfig.model_fields if name in config.model_fields_set}
    if config.sandbox is not None:
        stated["sandbox"] = config.sandbox.model_dump()
    return revealed(stated | {"workers": 0})


def settings_to_plain(settings: PoolSettings) -> dict[str, Any]:
    """Return settings as values that can be sent."""
    plain = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return plain | {
        "envs": list(map(env_to_plain, settings.envs)),
        "beside": list(map(env_to_plain, settings.beside)),
        "samplings": list(settings.samplings),
        "urls": list(settings.urls),
        "chat": asdict(settings.chat) if settings.chat is not None else None,
    }


def settings_from_plain(plain: dict[str, Any]) -> PoolSettings:
    """Return the settings that `settings_to_plain` made these values of."""
    chat = plain["chat"]
    made = {
        "envs": list(map(_env_from_plain, plain["envs"])),
        "beside": list(map(_env_from_plain, plain["beside"])),
        "chat": ChatOptions(**chat) if chat is not None else None,
    }
    return PoolSettings(**(plain | made))


def _env_from_plain(plain: dict[str, Any]) -> EnvConfig:
    """Return the environment of such keys; a secret that begins with `@` names no file here."""
    return EnvConfig(**{k: hide(v, make=Secret) if k in ("args", "env_args") else v for k, v in plain.items()})


def refuse_unsendable(name: str, options: dict[str, Any]) -> None:
    """Refuse what cannot be told to a worker before one is started.
    Raises EnvError: a value is neither plain nor a number of 64 bits; names the argument."""
    stated = {
        f"{key}.{argument}": value
        for env in (*options["envs"], *options["beside"])
        for key in ("args", "env_args")
        for argument, value in (env.get(key) or {}).items()
    }
    for argument, value in (stated | {"the options": options}).items():
        try:
            pack("open", value=value)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvError(f"environment {name!r}: {argument} cannot be told to a worker process: {error}") from error
