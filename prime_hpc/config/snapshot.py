"""The resolved experiment and its lockfile in the run directory, and the way back.

`launch` writes a snapshot before it starts anything; every role reads `run.yaml` with `load_run`.

    run.yaml             the resolved tree
    secrets/             its keys and tokens, readable by their owner alone; the other files name these
    configs/<role>.toml  the role's view; `rl --trainer @ configs/trainer.toml --orchestrator @ ...` loads them
    lock.json            code version, installed packages (also the engines' own), command line, time, host
"""

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.config.absolute import from_the_root
from prime_hpc.config.engine_groups import SECTIONS
from prime_hpc.config.errors import ConfigError, Origin
from prime_hpc.config.experiment import ALONE, COMPONENTS, Experiment
from prime_hpc.config.renamed_keys import renew
from prime_hpc.config.run_files import LOCK_JSON, RUN_YAML
from prime_hpc.config.schema import Node, members, resolve
from prime_hpc.config.secret import OF_SITE, anchored, masked_command, put_back, without_known, written_secrets
from prime_hpc.config.sources.coerce import NULL
from prime_hpc.config.sources.files import dump_yaml, parse_yaml
from prime_hpc.config.sources.interpolate import escape, unescape
from prime_hpc.config.validate import validate
from prime_hpc.runtime.atomic_write import write_atomic

RUN_YAML_VARIABLE = "PRIMEHPC_RUN_YAML"
"""Environment variable that names another file to read instead: that of a role which was started by hand, and
shares the run directory with roles started from other files."""
CONFIGS = "configs"
_GIT_TIMEOUT_S = 5
_MAX_DIFF_BYTES = 1_000_000


@dataclass
class Shared:
    """The common part of many like experiments' snapshots, made once: a sweep writes thousands."""

    lock: str
    """Text of every `lock.json`; with the working tree's diff it can be a megabyte."""
    lock_file: Path | None = None
    """A file with this text on the same file system: linked instead of written again."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """An interpreter of engines' own (`inference.python`) -> its part of the lock."""
    texts: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """(role of a TOML, or `yaml`; top-level key; its value as JSON) -> its part of the file."""


def write_snapshot(exp: Experiment, run_dir: Path, command: list[str], shared: Shared | None = None) -> None:
    """Write `run.yaml`, `configs/*.toml` and `lock.json` into the run directory, each atomically.

    Secrets are written into `secrets/`, for their owner's eyes alone; the other files name those.

    Args:
        run_dir: the run directory; made if absent.
        command: the command line as it was typed; unused with `shared`.
        shared: from `share`, where several experiments are written by one command.

    Raises:
        OSError: the directory cannot be written.
    """
    sync = shared is None  # thousands of files forced to the disk one by one would take minutes
    shared = shared or share(command)
    exp = from_the_root(exp)
    tree, texts = put_back(escape(exp.model_dump(mode="json")), exp)
    from_below, _ = put_back(escape(exp.model_dump(mode="json")), exp, above="../") if texts else (tree, texts)
    configs = run_dir / CONFIGS
    configs.mkdir(parents=True, exist_ok=True)
    with written_secrets(run_dir, texts, keep=OF_SITE):
        for component in COMPONENTS:
            target = configs / f"{component}.toml"
            view = None if component in ALONE and component != exp.kind else _view(from_below, component)
            if view is None:
                target.unlink(missing_ok=True)  # of an earlier attempt: loading it would switch the section on
            else:
                write_atomic(target, _dump_toml(view, component, shared.texts), sync=sync)
        lock = _with_engines(exp, shared)
        if lock != shared.lock or not _link(shared.lock_file, run_dir / LOCK_JSON):
            write_atomic(run_dir / LOCK_JSON, without_known(lock), sync=sync)
        # last: a run directory with it is whole
        write_atomic(run_dir / RUN_YAML, _dump_yaml(tree, shared.texts), sync=sync)


def share(command: list[str], folder: Path | None = None) -> Shared:
    """Return the lock, gathered once for all the snapshots that `command` writes.
    `folder`: gets a `lock.json` of its own, to which those of the run directories are hard links."""
    lock = without_known(json.dumps(gather_lock(command), indent=1)) + "\n"
    if folder is None:
        return Shared(lock)
    write_atomic(folder / LOCK_JSON, lock)
    return Shared(lock, folder / LOCK_JSON)


def _with_engines(exp: Experiment, shared: Shared) -> str:
    """Return the lock with the environments of engines that have one of their own, by their section."""
    pythons = {}
    for section in SECTIONS.values():
        if (servers := getattr(exp, section)) is not None and servers.python is not None:
            own = shared.environments.get(servers.python) or _environment_of(servers.python)
            pythons[section] = shared.environments[servers.python] = own
    return json.dumps(json.loads(shared.lock) | {"engines": pythons}, indent=1) + "\n" if pythons else shared.lock


def _environment_of(executable: str) -> dict[str, Any]:
    """Return what is in an interpreter's own environment, as its folders tell: it may be one of the nodes alone, and
    is not started. `packages` is empty, and `python` null, where these cannot be seen."""
    folders = sorted(Path(executable).parent.parent.glob("lib/python3*/site-packages"))
    packages: dict[str, str] = {}
    with suppress(OSError):
        packages = _packages(list(map(str, folders))) if folders else {}
    python = folders[0].parent.name.removeprefix("python") if folders else None
    return {"executable": executable, "python": python, "packages": packages}


def _link(source: Path | None, target: Path) -> bool:
    """Make `target` another name of `source`; False where that cannot be."""
    if source is None:
        return False
    try:
        target.unlink(missing_ok=True)  # of an earlier submit: never written through
        os.link(source, target)
    except OSError:  # the file system has no hard links, or no more of them for this file
        return False
    return True


def load_run(run_dir: Path) -> Experiment:
    """Read a run directory's experiment back (see also `RUN_YAML_VARIABLE`).

    Raises ConfigError when it is missing or not valid.
    """
    return read_experiment(Path(os.environ.get(RUN_YAML_VARIABLE) or Path(run_dir) / RUN_YAML))


def read_experiment(path: Path) -> Experiment:
    """Read one `run.yaml`. Raises ConfigError when it is missing or not valid."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; is {path.parent} a run directory?") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text: {error.reason} at byte {error.start}") from error
    values, lines = parse_yaml(text, str(path))
    values = anchored(unescape(values), path.parent)
    provenance = {".".join(key): Origin("file", str(path), line) for key, line in lines.items()}
    values, problems = renew(values, provenance)
    experiment = validate(values, provenance, problems)
    if experiment is None:
        raise ConfigError(problems)
    return experiment


def stated_text(exp: Experiment) -> str:
    """Return the experiment as a file that states what differs from the defaults; its secrets are masked."""
    return dump_yaml({"kind": exp.kind, **escape(exp.model_dump(mode="json", exclude_defaults=True))})


def _view(tree: dict[str, Any], component: str) -> dict[str, Any] | None:
    """Return what one role sees: the shared keys and its own section's (SFT: and the trainer's), None if it is off."""
    own = tree[component]
    if own is None:
        return None
    shared = {name: value for name, value in tree.items() if name not in COMPONENTS}
    trainer = {"trainer": tree["trainer"]} if component == "sft" else {}
    return shared | own | trainer


def _dump_toml(view: dict[str, Any], component: str, texts: dict[tuple[str, str, str], str]) -> str:
    parts = [_toml_text(texts, component, name, value) for name, value in view.items()]
    # Tables after plain values: TOML has no way back to the root.
    return "".join(sorted(parts, key=lambda text: text.startswith("\n")))


def _toml_text(texts: dict[tuple[str, str, str], str], component: str, name: str, value: Any) -> str:
    """One top-level key of a role's view as TOML; a table begins with an empty line, a null default is left out."""
    key = (component, name, json.dumps(value))
    if key not in texts:
        import tomlkit

        home = (component, name) if resolve((component, name)) is not None else (name,)
        plain = _without_null(value, resolve(home))
        text = "" if plain is None else tomlkit.dumps({name: plain})
        texts[key] = f"\n{text}" if _is_table(plain) else text
    return texts[key]


def _dump_yaml(tree: dict[str, Any], texts: dict[tuple[str, str, str], str]) -> str:
    parts = []
    for name, value in tree.items():
        key = ("yaml", name, json.dumps(value))
        if key not in texts:
            texts[key] = dump_yaml({name: value})
        parts.append(texts[key])
    return "".join(parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _without_null(value: Any, node: Node | None) -> Any:
    """Return a value in TOML's terms, which has no null.

    A null key is left out (None) where null is its default, else it is the text "none"; a free mapping that holds
    one travels as JSON text, which every source accepts for a mapping.
    """
    assert node is not None
    if value is None:
        return None if _default_is_null(node) else "none"
    if node.kind == "section":
        inner = {name: _without_null(v, resolve((*node.path, name))) for name, v in value.items()}
        inner = {name: v for name, v in inner.items() if v is not None}
        return dict(sorted(inner.items(), key=lambda item: _is_table(item[1])))
    if node.kind == "sections" and isinstance(value, list):  # not a word in their place (`slurm.shapes: auto`)
        return [_without_null(v, resolve((*node.path, str(i)))) for i, v in enumerate(value)]
    if node.kind == "free":
        return json.dumps(value) if _holds_null(value) else value
    if isinstance(value, str) and value.lower() in NULL and node.optional:
        raise ConfigError(f"the text {value!r} means null in a config; choose another", node.dotted)
    return value


def _default_is_null(node: Node) -> bool:
    parent: Any = Experiment
    if len(node.path) > 1:
        above = resolve(node.path[:-1])
        assert above is not None
        parent = above.annotation
    fields = [m.model_fields for m in members(parent) if hasattr(m, "model_fields")]
    return any(node.path[-1] in f and f[node.path[-1]].default is None for f in fields)


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_holds_null(v) for v in (value.values() if isinstance(value, dict) else value))
    return value is None


def gather_lock(command: list[str]) -> dict[str, Any]:
    """Collect what a run was made with. Takes well under a second and imports nothing heavy.

    Keys: `command`, `time` (UTC, ISO 8601), `host`, `cwd`, `python`, `executable`, `platform`, `packages`
    (name -> version), `git` (`sha`, `status`, `diff`, `diff_truncated`; null outside a checkout). In a run directory
    also `engines` (section -> `executable`, `python`, `packages`) of those with an environment of their own.
    """
    import platform
    import socket
    from datetime import UTC, datetime

    return {
        "command": masked_command(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "git": _git_state(Path(__file__).resolve().parents[2]),
        "packages": _packages(sys.path),
    }


def _packages(folders: list[str]) -> dict[str, str]:
    """Distributions installed in folders by name, as importlib.metadata finds them."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for distribution in distributions(path=folders):
        # Two header lines by hand: the e-mail parser behind `.metadata` takes 1 ms a package.
        try:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except UnicodeDecodeError as error:  # an old package, whose author's name is in Latin-1
            text = error.object.decode(errors="replace")
        name, version = (re.search(rf"^{key}: *(\S+)", text, re.M) for key in ("Name", "Version"))
        if name and version:  # a half-removed package leaves an empty directory
            found.setdefault(name[1], version[1])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _git_state(checkout: Path) -> dict[str, Any] | None:
    """SHA, diff against it and changed or untracked names of the checkout; None where there is none."""
    if not (checkout / ".git").exists():
        return None
    diff = _git(checkout, "diff", "HEAD") or ""
    truncated = len(diff) > _MAX_DIFF_BYTES
    return {
        "sha": (_git(checkout, "rev-parse", "--verify", "-q", "HEAD") or "").strip() or None,
        "status": (_git(checkout, "status", "--porcelain") or "").splitlines(),
        "diff": diff[:_MAX_DIFF_BYTES],
        "diff_truncated": truncated,
    }


def _git(checkout: Path, *arguments: str) -> str | None:
    """Return a git command's output, or None where git is missing, fails or is slow: the lock then says less."""
    import subprocess

    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            # another user's, as an image's and a shared installation's are: its code is being run all the same
            ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), *arguments],
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None
