"""Finds what an experiment needs on disk, as a node without a network would; asks no hub.

A model counts as there when the hub's cache holds a config, a tokenizer and every safetensors file of the version that
`refs/main` names, or a directory does; of a teacher that others serve the tokenizer is enough. A data set counts as
there when the cache of `datasets` has prepared its split.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from prime_hpc.config import Experiment
from prime_hpc.config.absolute import local_directory
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.envs.benchmarks.registry import BENCHMARKS, fetch_command, file_of, folder
from prime_hpc.launch.checks import taskset_module
from prime_hpc.launch.fetch.download import is_loaded
from prime_hpc.launch.fetch.needs import Need, needs_of
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.model.config import has_tokenizer, hub_cache, hub_folder, hub_home, hub_snapshot
from prime_hpc.store.model.files import INDEX


@dataclass
class Presence:
    """One need and what of it is there."""

    need: Need
    path: Path | None = None
    lacks: list[str] = field(default_factory=list)
    num_bytes: int | None = None
    """Of what is there."""
    can_fetch: bool = True
    """False: nobody but the user can bring it."""
    remedy: str = ""
    """Advice to the user."""
    is_new: bool = False
    """True if it was fetched just now."""
    problem: str = ""

    @property
    def is_there(self) -> bool:
        """True if nothing is missing."""
        return not self.lacks


def job_environ(experiment: Experiment, site: SiteConfig) -> dict[str, str]:
    """Return the environment that the roles of a Slurm job will have, as far as it is known before."""
    stated = revealed({**site.env, **experiment.slurm.env})
    return {**os.environ, **{name: str(value) for name, value in stated.items()}}


def missing_of(experiment: Experiment, environ: Mapping[str, str]) -> list[Presence]:
    """Return what a node without a network would not find; asks no hub."""
    return [one for one in (look(need, environ) for need in needs_of(experiment)) if not one.is_there]


def absent_models(experiment: Experiment, environ: Mapping[str, str]) -> set[str]:
    """Return the keys of the hub's models of which nothing is on disk: of others the engines may make do with what is
    there, with a pinned revision or weights of another format."""
    models = [one for one in missing_of(experiment, environ) if one.need.kind == "model" and one.can_fetch]
    return {one.need.key for one in models if one.path is not None and not one.path.exists()}


def look(need: Need, environ: Mapping[str, str]) -> Presence:
    """Say whether a need is there. `environ`: of the job's roles: which caches they use."""
    try:
        return _look(need, environ)
    except OSError as error:  # another user's directory, a share that is away
        place = None if error.filename is None else Path(error.filename)
        said = f"it cannot be read ({error.strerror or error})"
        return Presence(need, place, [said], can_fetch=False, remedy="make it readable, or name another place")


def _look(need: Need, environ: Mapping[str, str]) -> Presence:
    if need.kind == "model":
        return _model(need, hub_cache(environ))
    if need.kind == "dataset":
        return _dataset(need, datasets_cache(environ))
    if need.kind == "benchmark":
        return _benchmark(need, environ)
    if need.kind == "files":
        return _files(need)
    command = f"pip install {taskset_module(need.name).partition('.')[0].replace('_', '-')}"
    if "/" in need.name:
        command = f"prime env install {need.name}"
    return Presence(need, lacks=["not installed"], can_fetch=False, remedy=f"install it: `{command}`")


def datasets_cache(environ: Mapping[str, str]) -> Path:
    """Return where `datasets` keeps what it has prepared (HF_DATASETS_CACHE)."""
    stated = environ.get("HF_DATASETS_CACHE")
    return Path(stated).expanduser() if stated else hub_home(environ) / "datasets"


def _model(need: Need, cache: Path) -> Presence:
    local = local_directory(need.name)
    if local is not None or need.name.count("/") > 1:
        path = local or Path(need.name)
        remedy = "copy the model there, or name another"
        if not path.is_dir():
            return Presence(need, path, ["the directory"], can_fetch=False, remedy=remedy)
        return Presence(need, path, list(_lacks(path, need)), folder_bytes(path), can_fetch=False, remedy=remedy)
    path_of = hub_snapshot(need.name, cache)
    if path_of is None:
        return Presence(need, hub_folder(need.name, cache), ["a tokenizer" if need.only_tokenizer else "all of it"])
    return Presence(need, path_of, list(_lacks(path_of, need)), folder_bytes(path_of))


def _lacks(folder: Path, need: Need) -> Iterator[str]:
    """Yield what a model's directory lacks."""
    if not need.only_tokenizer and not (folder / "config.json").is_file():
        yield "config.json"
    names = {path.name for path in folder.iterdir() if path.is_file()}  # a broken link is no file
    if not has_tokenizer(folder):
        yield "a tokenizer"
    if need.only_tokenizer:
        return
    try:
        wanted = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        if not any(name.endswith(".safetensors") and is_loaded(name) for name in names):
            yield "weights (*.safetensors)"
        return
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        yield f"a readable {INDEX}"
        return
    if missing := wanted - names:
        yield f"{len(missing)} of {len(wanted)} files of weights"


def folder_bytes(folder: Path) -> int:
    """Return the size of a directory's own files, links followed."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _dataset(need: Need, cache: Path) -> Presence:
    """Look for what `datasets` has prepared: OWNER___NAME/CONFIGURATION/VERSION/HASH/dataset_info.json."""
    wanted = _plain(need.name.replace("/", "___"))
    folders = [path for path in cache.iterdir() if _plain(path.name) == wanted] if cache.is_dir() else []
    for found in folders:
        for info in sorted(found.glob("*/*/*/dataset_info.json")):
            if need.subset is not None and info.parts[-4] != need.subset:
                continue
            if (num_bytes := _prepared(info, need.split)) is not None:
                return Presence(need, info.parent, num_bytes=num_bytes)
    what = f"split {need.split}" if need.split and folders else "all of it"
    return Presence(need, folders[0] if folders else cache, [what])


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _prepared(info: Path, split: str | None) -> int | None:
    """Return the bytes of a prepared data set; None where it lacks the split."""
    try:
        splits = json.loads(info.read_text(encoding="utf-8")).get("splits") or {}
    except (OSError, ValueError, AttributeError):
        return None
    named = {part.strip().partition("[")[0] for part in split.split("+")} if split else set()
    if not splits or not named <= {*splits, "all"}:
        return None
    return folder_bytes(info.parent)


def _benchmark(need: Need, environ: Mapping[str, str]) -> Presence:
    path = benchmark_file(need, environ)
    source = BENCHMARKS[need.name].source
    if path.is_file():
        return Presence(need, path, num_bytes=path.stat().st_size)
    if source.startswith("package:"):
        there = need.data is None and find_spec(source.removeprefix("package:")) is not None
        remedy = f"install it: `{fetch_command(need.name)}`"
        return Presence(need, None, [] if there else ["its package"], can_fetch=False, remedy=remedy)
    note = BENCHMARKS[need.name].note
    return Presence(need, path, ["all of it"], remedy=note)


def benchmark_file(need: Need, environ: Mapping[str, str]) -> Path:
    """Return where the nodes look for a benchmark's rows."""
    if need.data:
        return file_of(need.name, need.data)
    return folder(environ) / f"{need.name}.jsonl"


def _files(need: Need) -> Presence:
    try:
        found = find_data(SFTSourceConfig(path=need.name)).files
    except ValueError:
        remedy = "copy it there, or name another"
        return Presence(need, Path(need.name), ["the files"], can_fetch=False, remedy=remedy)
    return Presence(need, Path(need.name), num_bytes=sum(path.stat().st_size for path in found if path.is_file()))
