"""From an `EnvConfig` to a verifiers environment config: names, arguments, splits, defaults, and helpful errors.

verifiers finds plugins by importing a module of the id's name, without dots; what
prime-hpc ships, and any dotted module path, is therefore entered into `sys.modules` under a flat name first.
"""

import difflib
import importlib
import shlex
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prime_hpc.config.env_files import short_id
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.orchestrator import EnvConfig, SandboxConfig
from prime_hpc.envs.benchmarks.registry import BENCHMARKS, find_benchmark
from prime_hpc.envs.errors import EnvError

BUNDLED: dict[str, str] = {
    "reverse-text": "prime_hpc.envs.tasksets.reverse_text",
    "guess-number": "prime_hpc.envs.tasksets.guess_number",
    "calculator": "prime_hpc.envs.tasksets.calculator",
    "reasoning-gym": "prime_hpc.envs.tasksets.reasoning_gym",
    "prompts": "prime_hpc.envs.rows.prompts",
    "rows": "prime_hpc.envs.rows.taskset",
    "word-sorting": "prime_hpc.envs.tasksets.word_sorting",
    "alphabet-sort": "prime_hpc.envs.tasksets.alphabet_sort",
    "countdown": "prime_hpc.envs.tasksets.countdown",
    "simple-math": "prime_hpc.envs.tasksets.simple_math",
    "shapes": "prime_hpc.envs.tasksets.shapes",
    "wordle": "prime_hpc.envs.tasksets.wordle",
    "tic-tac-toe": "prime_hpc.envs.tasksets.tic_tac_toe",
    "python-tool": "prime_hpc.envs.tasksets.python_tool",
    "long-tail": "prime_hpc.envs.tasksets.long_tail",
}
"""Short names of the tasksets that prime-hpc brings; they win over an installed package of the same name."""
NEED_SANDBOX = {"python-tool"}
"""Of these, those whose harness has a sandbox, stated or not (`needs_sandbox`): known where nothing is imported."""
BENCHMARK_TASKSETS = {
    "math": "prime_hpc.envs.tasksets.math_questions",
    "choice": "prime_hpc.envs.tasksets.choices",
    "code": "prime_hpc.envs.tasksets.code_problems",
}
"""Kind of a benchmark -> the taskset that plays it; benchmarks' names are short names too."""

HARNESS_MODULE = "prime_hpc.envs.harness"
LEGACY_TASKSET = "prime_hpc.envs.legacy.taskset"
IN_PROCESS = "in-process"
"""Name of prime-hpc's own harness in `EnvConfig.harness`."""


def flat_id(module_name: str) -> str:
    """Import a module and make it importable under a name without dots, which is returned.
    Raises ImportError: as the import does."""
    alias = module_name.replace(".", "_").lower()
    if alias not in sys.modules:
        sys.modules[alias] = importlib.import_module(module_name)
    return alias


@dataclass(frozen=True)
class FoundTaskset:
    """A taskset by the id under which verifiers finds it."""

    ident: str
    legacy: ModuleType | None = None
    """The package with `load_environment` that the taskset of this id plays; None: it is a v1 taskset itself."""
    benchmark: str | None = None
    """The benchmark that the taskset of this id plays."""


def resolve_taskset(name: str) -> FoundTaskset:
    """Find the taskset `name`: a bundled short name, an installed module, a dotted path; v1 or `load_environment`.
    Raises EnvError: not installed, a dependency of it missing, or neither kind of environment."""
    from verifiers.v1.taskset import Taskset
    from verifiers.v1.utils.loaders import import_taskset, taskset_class

    from prime_hpc.envs.legacy.loading import is_legacy
    from prime_hpc.envs.legacy.surface import install

    short = short_id(name)
    benchmark = find_benchmark(name)
    bundled = BENCHMARK_TASKSETS[benchmark.kind] if benchmark is not None else BUNDLED.get(short)
    if bundled is None:
        install()
    try:
        if bundled is not None:
            ident = flat_id(bundled)
        elif "." in name and "/" not in name and "@" not in name:  # `owner/name@1.2` is an id of the hub
            ident = flat_id(name)
        else:
            ident = name
            import_taskset(name)
    except ModuleNotFoundError as error:
        raise _not_importable(name, error) from error
    except (ImportError, AttributeError) as error:
        raise EnvError(f"taskset {name!r} is installed, but importing it fails: {error}") from error
    except EnvError as error:
        raise EnvError(f"taskset {name!r} cannot be played: {error}") from error
    except (Exception, SystemExit) as error:  # other people's code
        raise EnvError(
            f"taskset {name!r} is installed, but importing it fails: {type(error).__name__}: {error}{_place(error)}"
        ) from error
    try:
        assert issubclass(taskset_class(ident), Taskset)
    except (AttributeError, TypeError, ValueError) as error:
        module = import_taskset(ident)
        if is_legacy(module):
            return FoundTaskset(flat_id(LEGACY_TASKSET), module)
        raise EnvError(
            f"module {name!r} is not a verifiers v1 taskset: {error}. It has no `load_environment` function either"
        ) from error
    return FoundTaskset(ident, benchmark=benchmark.name if benchmark is not None else None)


def _not_importable(name: str, error: ModuleNotFoundError) -> EnvError:
    """Tell a taskset that is not installed from one whose dependency is not."""
    cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if cause.name is not None and cause.name.split(".")[0] not in (module.split(".")[0], "verifiers"):
        return EnvError(f"taskset {name!r} needs the Python module {cause.name!r}: pip install {cause.name}")
    known = [*BUNDLED, *BENCHMARKS, *_verifiers_tasksets()]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return EnvError(
        f"taskset {name!r} is not installed: no bundled taskset has this name and no module {module!r} can be "
        f"imported.{hint} Bundled: {', '.join([*BUNDLED, *BENCHMARKS])}. To use another one, install it "
        "into this Python, e.g. "
        f"`{shlex.quote(sys.executable)} -m pip install {name.rsplit('/', 1)[-1]}` or `-m pip install -e path/to/it`"
    )


def _place(error: BaseException) -> str:
    """Return where an import failed, for the message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    if isinstance(error, SyntaxError) or not frames:  # which says it itself
        return ""
    return f" (in {frames[-1].filename}, line {frames[-1].lineno})"


def _verifiers_tasksets() -> list[str]:
    """Tasksets inside verifiers itself (most need extras)."""
    import pkgutil

    from verifiers.v1 import tasksets

    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(tasksets.__path__)]


def build_env_config(config: EnvConfig, split: str, seed: int) -> Any:
    """Return the verifiers config of an environment, all its seats running here.

    The taskset gets `split` and `seed` where it has such arguments and `config.args` does not set them.
    Raises EnvError: the taskset cannot be found, or does not accept the arguments.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config, taskset_config_type

    found = resolve_taskset(config.id)
    ident = found.ident
    label = config.label
    arguments = taskset_config_type(ident).model_fields
    if found.legacy is not None:
        config, legacy = _legacy_taskset(config, found.legacy, split)
        taskset = {"id": ident, **legacy}
    else:
        preset = {} if found.benchmark is None else {"benchmark": found.benchmark}
        taskset = {"id": ident, **preset, **revealed(config.args)}
        for name, value in (("split", split), ("seed", seed)):
            if name in arguments:
                taskset.setdefault(name, value)
    sandboxed = sandbox_of(config) is not None
    if sandboxed and "in_sandbox" in arguments:
        taskset["in_sandbox"] = True
    try:
        env_type = env_config_type(ident, config.env_args.get("id", ""))
    except (ImportError, TypeError, AttributeError, ValueError) as error:
        raise EnvError(f"environment {label!r}: env_args.id: {error}") from error
    raw: dict[str, Any] = {**revealed(config.env_args), "taskset": taskset}
    for role, role_field in env_type.model_fields.items():
        if isinstance(role_field.default, AgentConfig):
            raw[role] = _seat(config, ident, role_field.default, raw.get(role) or {})
            if sandboxed:
                raw[role]["runtime"] = _sandbox_seat(label, split, raw[role])
    try:
        return resolve_env_config(raw)
    except ValidationError as error:
        problems = "; ".join(_explain(item, list(arguments), list(env_type.model_fields)) for item in error.errors())
        raise EnvError(f"environment {label!r}: {problems}") from error
    except (ImportError, TypeError, AttributeError) as error:
        raise EnvError(f"environment {label!r}: {error}") from error


def sandbox_of(config: EnvConfig) -> SandboxConfig | None:
    """Return the sandboxes of an environment's episodes: those that it states, or, where its harness runs what a model
    writes, the usual ones. Raises EnvError: what the environment runs would not run in them."""
    from verifiers.v1.utils.loaders import default_harness_id, harness_class

    found = resolve_taskset(config.id)
    if found.legacy is not None:
        if config.sandbox is not None:
            raise EnvError(
                f"environment {config.label!r}: sandbox: a `load_environment` package runs what it runs "
                "by itself, in the process that plays it: a sandbox would protect nothing; leave it out"
            )
        return None
    name = _harness_of(config, found.ident) or default_harness_id(found.ident)
    try:
        own = harness_class(name)
    except (ImportError, AttributeError, TypeError, ValueError):
        return config.sandbox  # whoever makes the harness says what is wrong with it
    if config.sandbox is not None and not config.sandbox.network and not harness_is_in_process(own):
        raise EnvError(
            f"environment {config.label!r}: harness {name!r} is a program that runs in the sandbox and "
            "asks the model over the network, which is shut: sandbox.network = true, or a harness of this process"
        )
    needed = getattr(own, "needs_sandbox", False)
    return SandboxConfig() if needed and config.sandbox is None else config.sandbox


def _harness_of(config: EnvConfig, taskset_id: str) -> str | None:
    """Return the id of the harness of an environment's seats, None for the seats' or the taskset's own."""
    from verifiers.v1.utils.loaders import default_harness_id

    if config.harness is not None:
        return flat_id(HARNESS_MODULE) if config.harness == IN_PROCESS else config.harness
    return flat_id(HARNESS_MODULE) if default_harness_id(taskset_id) == "bash" else None


def _sandbox_seat(label: str, split: str, seat: dict[str, Any]) -> Any:
    """Return the runtime of a seat whose episodes have sandboxes."""
    from prime_hpc.envs.sandbox.sandbox_runtime import SandboxSeat

    stated = seat.get("runtime") or {}
    if stated != {"type": "subprocess"}:
        raise EnvError(
            f"environment {label!r}: it has a sandbox and a runtime of its own ({stated}): state one of them"
        )
    return SandboxSeat(pool=f"{label}/{split}")


def _legacy_taskset(config: EnvConfig, module: ModuleType, split: str) -> tuple[EnvConfig, dict[str, Any]]:
    """Return the config and the arguments of the taskset that plays a `load_environment` package.

    Without evaluation tasks both splits are the same list, so that a tenth of it is held out; see `sources`. Its own
    limit of turns holds where the config states none.
    """
    from prime_hpc.envs.legacy.loading import environment, key_of

    label = config.label
    if config.harness is not None:
        raise EnvError(
            f"environment {label!r}: harness {config.harness!r} cannot play a `load_environment` package, whose rounds "
            "are its own: leave `harness` out"
        )
    arguments: dict[str, Any] = revealed(config.args)
    env = environment(module, label, arguments)
    if split == "train" and not env.has("train"):
        raise EnvError(
            f"environment {label!r} has evaluation tasks alone (its load_environment() gives no dataset): name it in "
            "orchestrator.eval.env"
        )
    if "max_turns" not in config.model_fields_set and env.turn_limit:
        config = config.model_copy(update={"max_turns": env.turn_limit})
    own = split if env.has(split) else "train"
    return config, {"module": module.__name__, "environment": key_of(module.__name__, arguments), "split": own}


def _seat(config: EnvConfig, taskset_id: str, default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """One agent's settings: on this machine, in this process unless the taskset or the user says otherwise."""
    seat: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    harness = _harness_of(config, taskset_id)
    if harness is not None and (config.harness is not None or default.harness is None):
        seat["harness"] = {"id": harness}
    if config.max_turns is not None and default.max_turns is None:
        seat["max_turns"] = config.max_turns
    return _merge(seat, given)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _explain(item: ErrorDetails, arguments: list[str], env_arguments: list[str]) -> str:
    """One validation problem in the config's own terms (`args.x`, `env_args.y`), with the nearest valid name."""
    path = [str(part) for part in item["loc"]]
    if path[:1] == ["taskset"]:
        where, known = ".".join(["args", *path[1:]]), [name for name in arguments if name not in ("id", "task")]
    else:
        where, known = ".".join(["env_args", *path]), env_arguments
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg']} (got {item['input']!r})"
    nearest = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{where}: no such argument{hint} (arguments: {', '.join(known)})"


def harness_is_in_process(harness_type: type) -> bool:
    """Return whether a harness calls the model from this process, through `PolicyInterception.complete`."""
    module: ModuleType = importlib.import_module(HARNESS_MODULE)
    return issubclass(harness_type, module.InProcessHarness)
