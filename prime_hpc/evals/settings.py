"""Settings that decide how an episode ends, recorded beside the episodes: an evaluation goes on only with the same.

Steps, numbers of tasks and of rollouts are not part of it: they may grow, and what is there counts. Login nodes import
this.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from prime_hpc.config import ConfigError, Experiment, Problem
from prime_hpc.config.absolute import from_the_root
from prime_hpc.config.env_files import named_files
from prime_hpc.config.experiment import ALONE
from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.evals.episodes import RESULTS, results_file
from prime_hpc.evals.versions import Version, find_versions
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.files import write_atomic
from prime_hpc.store.manifest import MANIFEST, read_manifest
from prime_hpc.store.model.files import chat_template
from prime_hpc.store.model.fingerprint import weights_fingerprint

FILE = "settings.json"
_HERE = ("127.0.0.1", "localhost", "::1")
_STEP = "eval.weights_dir, step "
"""With a number: the key of a version's weights. A run that was begun anew has others of the same number."""
_NOT_DECISIVE = ("num_examples", "rollouts_per_example", "ratio")
FILES = " (contents of its files)"
"""After an environment's label: the key of what is in the files that its arguments name."""
TEMPLATE = "model.name (its chat template)"
NEWER = (FILES, TEMPLATE)
"""Ends of keys that a directory which was begun before may not hold."""


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Key -> value, as plain JSON; nothing secret."""
    experiment = from_the_root(experiment)  # as its roles read it
    config, model, kind = experiment.episodes, experiment.model, experiment.kind
    found: dict[str, Any] = {
        "model.name": model.name,
        "seed": experiment.seed,
        f"{kind}.sampling": config.sampling.model_dump(mode="json"),
    }
    if kind == "eval":
        versions = experiment.eval.weights_dir
        found["eval.weights_dir"] = str(versions) if versions else None
        found |= {f"{_STEP}{v.step}": _weights_of(v.path) for v in _versions(experiment) if v.path is not None}
    else:
        found["synthesize.split"] = experiment.synthesize.split
        if experiment.synthesize.prompts:
            found["synthesize.prompts (their contents)"] = _sum_of(
                [("files", path) for path in experiment.synthesize.prompts], "synthesize.prompts"
            )
    if Path(model.name).is_dir():
        found["model.name (its weights)"] = weights_fingerprint(Path(model.name)) or None
    if config.client is None:
        found |= {"model.dtype": model.dtype, "model.head_dtype": model.head_dtype}
        found["inference.max_model_len"] = experiment.max_model_len
    else:
        found[f"{kind}.client.api"], found[f"{kind}.client.model"] = config.client.api, config.client.model
        urls = config.client.urls
        if any(urlsplit(url).hostname not in _HERE for url in urls):
            found[f"{kind}.client.base_url"] = urls
    if config.client is None or config.client.api != "chat":
        found |= {"model.renderer": model.renderer, "model.enable_thinking": model.enable_thinking}
        from_model = kind != "eval" or experiment.eval.weights_dir is None  # versions bring theirs
        if from_model and model.renderer in ("auto", "default") and (template := chat_template(Path(model.name))):
            found[TEMPLATE] = xxhash.xxh3_64_hexdigest(template)
    for env in config.environments:
        told = {k: v for k, v in env.model_dump(mode="json").items() if k not in _NOT_DECISIVE}
        key = f"{kind}.env.{told.pop('name') or env.id}"
        found[key] = told
        if env in config.env and (named := list(named_files(env.id, env.args))):
            found[f"{key}{FILES}"] = _sum_of(named, key)
    return found


def is_of(key: str, environments: Collection[str], step: int | None) -> bool:
    """Return whether a recorded setting decides how some environments were played under one version.
    `step`: the version; None: several, whose weights differ."""
    if key.startswith(_STEP):
        return key == f"{_STEP}{step}"
    section, _, label = key.removesuffix(FILES).partition(".env.")
    return section not in ALONE or not label or label in environments


def recorded(run_dir: Path) -> dict[str, Any] | None:
    """Read the settings that an evaluation's directory was begun with; None where it holds none.
    Raises ConfigError: the file cannot be read."""
    path = run_dir / RESULTS / FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        message = f"{path}: cannot be read ({error}); choose another --name, or start over with --clean"
        raise ConfigError(message, "name") from error


def refuse_others(experiment: Experiment, run_dir: Path) -> None:
    """Raise where a directory's episodes were played in another way; new environments and versions may join.
    Raises ConfigError: names the file and every key that differs."""
    before = recorded(run_dir)
    if before is None:
        if results_file(run_dir).exists() and results_file(run_dir).stat().st_size:
            message = f"{results_file(run_dir)} is there without {FILE}, which says how its episodes were played"
            raise ConfigError(f"{message}; choose another --name, or start over with --clean", "name")
        return
    now, joins = settings_of(experiment), (f"{experiment.kind}.env.", _STEP, TEMPLATE)
    keys = [key for key in now if key in before or not key.startswith(joins)]
    keys += [key for key in before if key not in now and not key.startswith(joins)]
    problems = [
        Problem(
            f"{run_dir / RESULTS / FILE} records {_short(before.get(key))} for the episodes that are there, now it is "
            f"{_short(now.get(key))}; choose another --name, or start over with --clean",
            key,
        )
        for key in keys
        if before.get(key) != now.get(key)
    ]
    if problems:
        raise ConfigError(problems)


def record(experiment: Experiment, run_dir: Path) -> dict[str, Any]:
    """Write the settings where there are none, and add environments and versions that joined; returns what is recorded.
    Raises StoreError: the directory cannot be written."""
    path = run_dir / RESULTS / FILE
    merged = (recorded(run_dir) or {}) | settings_of(experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(merged, indent=1, ensure_ascii=False).encode() + b"\n")
    return merged


def _versions(experiment: Experiment) -> list[Version]:
    try:
        return find_versions(experiment.eval)
    except ConfigError:
        return []  # whoever plays them says so


def _weights_of(folder: Path) -> str | None:
    """Sum over a version's weights: its manifest's; where it has none, of samples of its files.
    Raises ConfigError: one of these cannot be read: another sum would stand for other weights."""
    try:
        return read_manifest(folder).digest if (folder / MANIFEST).is_file() else weights_fingerprint(folder) or None
    except (StoreError, OSError) as error:
        raise ConfigError(f"{folder}: its weights cannot be told: {error}", "eval.weights_dir") from error


def _sum_of(named: Sequence[tuple[str, str]], key: str) -> str:
    """Sum over files, as `named_files` gives them; `key` names them in the config.
    Raises ConfigError: a file is not there or cannot be read."""
    total = xxhash.xxh3_64()
    try:
        rows = [text for argument, text in named if argument == "files"]  # together: one of them may be empty
        paths = find_data(SFTSourceConfig(path=rows)).files if rows else []
        for path in [*paths, *(Path(text) for argument, text in named if argument != "files")]:
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    total.update(part)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), key) from error
    return total.hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
