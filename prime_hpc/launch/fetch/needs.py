"""Things from elsewhere that an experiment's nodes will look for: models, data sets, benchmarks, environments.

Read from the config alone, and from the sources of installed environments; nothing is imported, nothing is asked for.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import MODELS, engine_roles, served_by, trained_names
from prime_hpc.config.env_files import ROWS, named_files, short_id
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.benchmarks.registry import find_benchmark
from prime_hpc.envs.env_config import BUNDLED
from prime_hpc.launch.checks import is_installed, key_of_id, stated_environments, taskset_module
from prime_hpc.launch.fetch.named_datasets import datasets_named_in
from prime_hpc.store.model.config import is_local_path


@dataclass(frozen=True)
class Need:
    """One thing that is looked for, as the config names it."""

    kind: Literal["model", "dataset", "files", "benchmark", "environment"]
    key: str
    """Key of the config that names it."""
    name: str
    """Of the hub, or a path."""
    subset: str | None = None
    """Of a data set: one of its configurations."""
    split: str | None = None
    """Of a data set; None: all."""
    data: str | None = None
    """Of a benchmark: the file or folder that the environment states."""
    only_tokenizer: bool = False
    """Of a model: its weights are elsewhere."""


def needs_of(experiment: Experiment) -> list[Need]:
    """Return what a run of it will look for, each thing once."""
    found = [*_models(experiment), *_rows(experiment), *_environments(experiment)]
    first: dict[tuple[Any, ...], Need] = {}
    for need in found:
        first.setdefault((need.kind, need.name, need.subset, need.split, need.data), need)  # whole models come first
    return list(first.values())


def _models(experiment: Experiment) -> Iterator[Need]:
    """Models that are trained, served, compared with, or draft for one that is served."""
    names = trained_names(experiment) if experiment.trains else {}
    for role in engine_roles(experiment):
        view = served_by(experiment, role)
        names[MODELS[role]] = view.model.name
        extra = view.inference.vllm if view.inference is not None else {}
        draft = extra.get("speculative_config")
        if isinstance(draft, str):
            draft = _object(draft)
        if isinstance(draft, dict) and isinstance(draft.get("model"), str):
            names[f"{role}.vllm.speculative_config.model"] = draft["model"]
        if isinstance(short := extra.get("spec_model"), str):  # vLLM's other way to state it
            names[f"{role}.vllm.spec_model"] = short
    for key, name in names.items():
        yield Need("model", key, name)
    teacher, key = experiment.orchestrator.teacher, MODELS["teacher"]
    if experiment.kind != "rl" or teacher is None or not teacher.model or key in names:
        return
    if teacher.tokenizer == "own" or is_local_path(teacher.model):  # others serve it
        yield Need("model", key, teacher.model, only_tokenizer=True)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _rows(experiment: Experiment) -> Iterator[Need]:
    """Rows of supervised fine-tuning."""
    if experiment.kind != "sft":
        return
    for key, source in experiment.sft.sources.items():
        if source.type == "fake":
            continue
        if source.name is not None:
            yield Need("dataset", f"{key}.name", source.name, source.subset, source.split)
        for path in source.paths:
            yield Need("files", f"{key}.path", path)
    if (template := experiment.sft.data.template_file) is not None:
        yield Need("files", "sft.data.chat_template", str(template))


def _environments(experiment: Experiment) -> Iterator[Need]:
    """Environments that are not installed, and the data of those that are."""
    for key, env in stated_environments(experiment):
        for name, path in named_files(env.id, env.args):
            yield Need("files", f"{key}.args.{name}", path)
        if short_id(env.id) == ROWS and env.args.get("dataset"):
            subset, split = env.args.get("subset"), env.args.get("dataset_split", "train")
            yield Need("dataset", f"{key}.args.dataset", str(env.args["dataset"]), subset, split)
        if (need := _benchmark(key, env)) is not None:
            yield need
        elif not is_installed(env.id):
            yield Need("environment", key_of_id(key), env.id)
        elif short_id(env.id) not in BUNDLED:
            for named in datasets_named_in(_sources(env.id), env.args):
                yield Need("dataset", key_of_id(key), named.name, named.subset, named.split)


def benchmarks_of(experiment: Experiment) -> list[Need]:
    """Return the benchmarks among the environments that it states."""
    found = [_benchmark(key, env) for key, env in stated_environments(experiment)]
    return [need for need in found if need is not None]


def _benchmark(key: str, env: EnvConfig) -> Need | None:
    data, benchmark = env.args.get("data"), find_benchmark(env.id)
    if benchmark is None:
        return None
    return Need("benchmark", key_of_id(key), benchmark.name, data=str(data) if data else None)


def _sources(identifier: str) -> list[Path]:
    """Return the Python files of an installed environment; of a module path that module's alone."""
    module = taskset_module(identifier)
    package, _, inner = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return [origin]
    if not inner:
        return sorted(origin.parent.rglob("*.py"))
    path = origin.parent.joinpath(*inner.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
