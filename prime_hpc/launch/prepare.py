"""Before a run: what of an evaluation follows from files, and the run directory, which never takes in a second run."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem, write_snapshot
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML, STOP
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.evals.episodes import RESULTS
from prime_hpc.evals.settings import refuse_others
from prime_hpc.evals.versions import adapter_rank, check_published, find_versions
from prime_hpc.launch.checks import check
from prime_hpc.launch.child_commands import follow_parent
from prime_hpc.launch.estimate.micro_batch import with_micro_batch
from prime_hpc.launch.lint.attention_rules import REMEDY, flash_problem
from prime_hpc.launch.monitor.diff import config_changes, flatten, package_changes, stated_config
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.slurm.submission_record import LOCK
from prime_hpc.store.attempts import is_held, read_attempts, runs_elsewhere, saved_claims
from prime_hpc.store.checkpoint.newest import read_pointer
from prime_hpc.store.child_runs import list_children
from prime_hpc.store.errors import StoreError
from prime_hpc.store.model.config import read_config
from prime_hpc.store.run_dirs import read_json
from prime_hpc.store.run_paths import RunPaths, list_steps, refuse_other_owner
from prime_hpc.supervisor.attempt.start import run_paths

MOST_CHANGES = 20
"""Keys of a run that goes on that are named."""
MOST_PACKAGES = 8
MOST_CHARACTERS = 200
"""Of a value of theirs."""
_OF_THE_START = ("clean", "ckpt.resume_step", "launch", "output_dir", "name")
"""Keys that say how a run is started, not what it is."""
_OF_A_RUN = ("rollouts", "weights", "checkpoints", "metrics", ATTEMPTS_JSONL)


def prepare_run(loaded: Loaded, site: SiteConfig | None = None) -> Path:
    """Check the experiment, make its run directory and write what was asked into it.
    `site`: profile of the cluster that it runs on; None: on this machine.
    Raises ConfigError: the experiment cannot run here, or its run directory holds another run."""
    loaded = for_evaluation(loaded)
    check(loaded, is_here=site is None)
    if site is None and (problem := flash_problem(loaded.experiment, is_here=True)):
        raise ConfigError(Problem(f"{problem}; {REMEDY}", "model.attn", loaded.provenance.get("model.attn")))
    run_dir = loaded.experiment.run_dir.resolve()
    refuse_anothers(run_dir)
    if run_dir.exists():
        from prime_hpc.slurm.queue import refuse_if_queued

        refuse_if_queued(run_dir)
    claim_directory(loaded.experiment, run_dir)
    write(replace(loaded, experiment=with_micro_batch(loaded.experiment, site)[0]), run_dir, is_in_job=site is not None)
    return run_dir


def refuse_anothers(run_dir: Path) -> None:
    """Raise where a directory that exists is another user's. Raises ConfigError: it is; nothing in it was changed."""
    if run_dir.exists():
        try:
            refuse_other_owner(run_dir)
        except StoreError as error:
            raise ConfigError(str(error), "name") from error


def write(loaded: Loaded, run_dir: Path, *, is_in_job: bool = False) -> None:
    """Write the snapshot and lockfile; runs below it follow. A STOP that came after the last attempt had ended goes: it
    would end this one.
    `is_in_job`: by a job, or pods, that waited: a STOP is for these.
    Raises ConfigError: the disk is full or not writable, or a run below it cannot go on with this."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if is_parent(loaded.experiment):
            follow_parent(loaded.experiment, run_dir)
        if not is_in_job:
            (run_dir / STOP).unlink(missing_ok=True)
        before, lock = dict[str, Any](), dict[str, Any]()
        known: dict[str, Any] = {}
        with suppress(ConfigError, ValueError):  # a damaged one is replaced
            before = stated_config(run_dir) if (run_dir / ATTEMPTS_JSONL).exists() else {}
            lock = read_json(run_dir / LOCK_JSON) or {}
            known = flatten(read_experiment(run_dir / RUN_YAML).model_dump(mode="json")) if before else {}
        write_snapshot(loaded.experiment, run_dir, sys.argv)
        if before:
            changes = config_changes(before, stated_config(run_dir), but=_OF_THE_START)
            _tell_changes({key: pair for key, pair in changes.items() if not _is_of_version(known, key, pair)})
            _tell_packages(package_changes(lock, read_json(run_dir / LOCK_JSON) or {}) if lock else {})
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written: {error.strerror}", "output_dir") from error


def _is_of_version(known: Mapping[str, Any], key: str, pair: Sequence[Any]) -> bool:
    """Return whether nobody asked for a change: of a key that came, or went, with another version of the suite, or of
    an empty table that has keys now. `known`: the config as it was, as this version reads it."""
    before, after = pair
    if before is None or after is None:
        return known.get(key) == after or (before if after is None else after) in ({}, [])
    return False


def _tell_changes(changes: Mapping[str, Sequence[object]]) -> None:
    """Say what is asked otherwise than before of a run that goes on: what it has done so far was of the former."""
    for key, pair in list(changes.items())[:MOST_CHANGES]:
        words = " -> ".join(_shortened(json.dumps(value, default=str, ensure_ascii=False)) for value in pair)
        print(f"changed since this run was last started: {key}: {words}", file=sys.stderr)
    if len(changes) > MOST_CHANGES:
        print(f"and {len(changes) - MOST_CHANGES} more keys, all of them in run.yaml", file=sys.stderr)


def _tell_packages(changes: Mapping[str, Sequence[object]]) -> None:
    """Say which packages are others than those of the run so far: the ones that compute first."""
    weighs = ("vllm", "torch", "transformers", "verifiers")
    names = sorted(changes, key=lambda name: name.partition(" (")[0] not in weighs)
    if names:
        versions = {name: " -> ".join(str(v or "none") for v in changes[name]) for name in names[:MOST_PACKAGES]}
        told = ", ".join(f"{name} {text}" for name, text in versions.items())
        more = f" and {len(names) - MOST_PACKAGES} more" if len(names) > MOST_PACKAGES else ""
        print(f"packages changed since this run was last started: {told}{more}", file=sys.stderr)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


def claim_directory(experiment: Experiment, run_dir: Path) -> None:
    """Use a directory that already holds a run only to resume it, or to start over where that was asked for.

    The caller has made sure that no Slurm job of it waits or runs (`slurm.queue`).
    Raises ConfigError: it is in use, or was not asked for.
    """
    if not any((run_dir / name).exists() for name in _OF_A_RUN):
        return
    attempts = read_attempts(run_dir / ATTEMPTS_JSONL)
    for row in attempts:
        if (signs := runs_elsewhere(run_dir, row)) is not None:
            raise ConfigError(f"{run_dir}: {signs}; or choose another --name", "name")
    held = [row for row in attempts if is_held(row)]
    if held:
        raise ConfigError(f"{run_dir}: a run is going on there (process {held[-1]['pid']})", "name")
    if experiment.clean:
        refuse_to_delete(experiment.run_dir.absolute())
        _delete(run_dir)
        return
    if not any(_holds_something(run_dir / name) for name in _OF_A_RUN):
        return
    # one that ended as it started has no results yet
    is_one = (run_dir / RESULTS).is_dir() or line_of(run_dir / RUN_YAML, "kind: ") == experiment.kind
    if not experiment.trains and is_one:
        refuse_others(experiment, run_dir)
        return  # it goes on with the episodes that are missing
    if is_parent(experiment):
        if _holds_something(run_dir / "rollouts"):
            words = f"{run_dir} holds one run, which is none of many: leave it out, or choose another --name"
            raise ConfigError(words, "trainer.max_concurrent_runs")
        return  # it goes on with the runs below it: those that are not over
    if experiment.ckpt is None or experiment.ckpt.resume_step is None:
        places = (run_paths(experiment, run_dir).checkpoints, read_pointer(RunPaths(run_dir)))
        has_saved = saved_claims(attempts) or any(list_steps(place, digits=0) for place in places if place is not None)
        words = "; resume it with --ckpt.resume-step latest," if has_saved else ", which saved no checkpoint;"
        words = f"{run_dir} already holds a run{words} choose another --name, or delete it with --clean"
        raise ConfigError(words, "name")


def refuse_to_delete(run_dir: Path) -> None:
    """Raise where a directory is anything but one run of this user's. Raises ConfigError: saying what it is."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{run_dir} {what}, so it is not deleted; choose another --name", "clean")

    if run_dir.is_symlink():
        raise refuse(f"is a link to {run_dir.resolve()}")
    if not (run_dir / RUN_YAML).is_file():
        raise refuse("holds no run.yaml: it is no run of ours")
    if run_dir.stat().st_uid != os.geteuid():
        raise refuse(f"belongs to another user (uid {run_dir.stat().st_uid})")
    if Path.home().resolve().is_relative_to(run_dir.resolve()):
        raise refuse("holds your home directory")
    if any((run_dir / name).exists() for name in ("sweep.yaml", "points.jsonl")):
        raise refuse("is a sweep's")
    own = set(list_children(run_dir))
    others = sorted(path.parent.name for path in run_dir.glob("*/run.yaml") if path.parent.name not in own)
    if others:
        raise refuse(f"holds other runs ({', '.join(others[:5])})")


def _holds_something(path: Path) -> bool:
    """Return whether it is a file or a directory that is not empty: an attempt that ended at once leaves empty ones."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _delete(run_dir: Path) -> None:
    """All that is in it, but the lock of the submit that deletes it; run.yaml last: killed half-way, it is a run's."""
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == RUN_YAML):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def for_evaluation(loaded: Loaded, *, waits: bool = False) -> Loaded:
    """Return the experiment with what follows from its files; other kinds pass through unchanged.

    Called before anything is checked, planned or written.

    `seq_len`, where nobody states it, is at most the model's own context; `model.lora` has the rank of the adapters in
    `eval.weights_dir`, so that the engines have room for them.

    `waits`: its job waits for another one (`slurm.dependency`), which may make the versions.
    Raises ConfigError: versions that are asked for are not there."""
    experiment = loaded.experiment
    if experiment.trains:
        return loaded
    changes: dict[str, object] = {}
    try:
        versions = find_versions(experiment.eval)
    except ConfigError:
        if not waits or experiment.eval.weights_dir is None:
            raise
        rank = _rank_to_come(experiment.eval.weights_dir)
    else:
        check_published(versions)
        rank = adapter_rank(versions)
    if rank is not None and experiment.model.lora is None and experiment.eval.client is None:
        changes["model"] = experiment.model.model_copy(update={"lora": LoraConfig(rank=rank)})
    limit = (read_config(experiment.model.name) or {}).get("max_position_embeddings")
    if "seq_len" not in loaded.provenance and isinstance(limit, int) and limit < experiment.seq_len:
        changes["seq_len"] = limit
    if not changes:
        return loaded
    return replace(loaded, experiment=experiment.model_copy(update=changes))


def _rank_to_come(weights_dir: Path) -> int | None:
    """Return the rank of the adapters that a run will make, as its own config says; None: none, or nobody knows."""
    for run_dir in (weights_dir, weights_dir.parent):
        with suppress(ConfigError):
            lora = read_experiment(run_dir / RUN_YAML).model.lora
            return None if lora is None else lora.rank
    return None
