"""The settings of an environment as a worker is told them, plain values, and the pool that it makes of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.target import ChatOptions
from prime_hpc.envs.workers.frames import pack


@dataclass(frozen=True)
class PlainSampling:
    """Sampling parameters by vLLM's names."""

    stated: dict[str, Any]

    def parameters(self) -> dict[str, Any]:
        """By vLLM's names."""
        return dict(self.stated)


def env_to_plain(config: EnvConfig) -> dict[str, Any]:
    """Return an environment's own keys, secrets revealed: no default that was not stated, for that differs."""
    stated = {name: getattr(config, name) for name in EnvConfig.model_fields if name in config.model_fields_set}
    if config.sandbox is not None:
        stated["sandbox"] = config.sandbox.model_dump()
    return revealed(stated | {"workers": 0})


def pool_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a worker's `EnvPool`.

    Args:
        plain: of `plain_options`.
    """
    chat = plain.pop("chat")
    return plain | {
        "envs": [EnvConfig(**env) for env in plain["envs"]],
        "beside": [EnvConfig(**env) for env in plain["beside"]],
        "sampling": PlainSampling(plain["sampling"]),
        "chat": ChatOptions(**chat) if chat is not None else None,
    }


def plain_options(env: EnvConfig, beside: Sequence[EnvConfig], chat: ChatOptions | None, **rest: Any) -> dict[str, Any]:
    """Return what a worker must know to play an environment as the caller's own process would.

    Args:
        env: the environment.
        beside: those of the other split.
        chat: of an API.
        rest: further arguments of `EnvPool`, plain values; `sampling` by vLLM's names.
    """
    plain_chat = asdict(chat) if chat is not None else None
    return rest | {"envs": [env_to_plain(env)], "beside": list(map(env_to_plain, beside)), "chat": plain_chat}


def refuse_unsendable(name: str, options: dict[str, Any]) -> None:
    """Refuse what cannot be told to a worker before one is started.

    Args:
        name: of the environment.
        options: of `plain_options`.

    Raises:
        EnvError: a value is neither plain nor a number of 64 bits; names the argument.
    """
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
