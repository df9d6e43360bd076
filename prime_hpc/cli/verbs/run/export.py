"""`prime-hpc export RUN`: the run's rollouts as one Parquet file; with `--merged STEP` a version as a whole model (an
adapter with its base model in it; one that holds only what changed, with what it stands against).

Exit codes: 0 written; 1 broken off: the disk is full, or the merge was killed; 2 there is nothing to export, a batch or
a version is damaged, or pyarrow is not installed.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.cli.common import Given, parse, print_json, say, step_range
from prime_hpc.config import Experiment, load_run
from prime_hpc.config.errors import ConfigError
from prime_hpc.store.batches import list_batches
from prime_hpc.store.errors import StoreError
from prime_hpc.store.export import COMPRESSIONS, export_batches
from prime_hpc.store.io.disk import is_full
from prime_hpc.store.run_dirs import find_run
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import holds_changes, list_versions, went_over_network
from prime_hpc.weight_transport.delta_image import restore

OF_ROLLOUTS, OF_WEIGHTS = ("--steps", "--compression", "--json"), ("--dtype",)
DTYPES = ("float32", "bfloat16", "float16")
MERGE_TIMEOUT_S = 24 * 3600.0
"""A model of hundreds of gigabytes from a busy file system."""


def run(argv: list[str], program: str) -> int:
    """Export; prints what was written."""
    given = parse("export", argv)
    [word] = given.arguments(1, least=1)

    run_dir = find_run(word)
    paths = RunPaths(run_dir)
    _refuse_idle_flags(given)
    if "--merged" in given:
        return _merge(load_run(run_dir), paths, given.flags)
    steps = _chosen(given.get("--steps"), list_batches(paths), run_dir)
    output = given.path("--output") or run_dir / "rollouts.parquet"
    compression = given.get("--compression") or "zstd"
    if compression not in COMPRESSIONS:
        raise ConfigError(f"--compression {compression}: must be one of {', '.join(COMPRESSIONS)}")
    names = [env.label for env in load_run(run_dir).orchestrator.env]
    with _refused():
        done = export_batches(paths, steps, output, names, compression=compression)
    if "--json" in given:
        facts = {"path": str(done.path), "steps": [steps[0], steps[-1]], "num_steps": done.num_steps}
        facts |= {"num_sequences": done.num_sequences, "num_tokens": done.num_tokens, "num_bytes": done.num_bytes}
        print_json(facts)
    else:
        print(
            f"{done.path}: {done.num_sequences:,} sequences, {done.num_tokens:,} tokens of {done.num_steps} steps, "
            f"{done.num_bytes / 2**20:.1f} MiB ({done.num_bytes / max(done.num_tokens, 1):.1f} bytes a token)"
        )
    return 0


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Refuse to export what is absent or damaged; a full disk is no fault of what was asked for."""
    try:
        yield
    except StoreError as error:
        if is_full(error):
            raise
        raise ConfigError(str(error)) from error


def _refuse_idle_flags(given: Given) -> None:
    """Raise a ConfigError for a flag that would change nothing."""
    others = OF_ROLLOUTS if "--merged" in given else OF_WEIGHTS
    for flag in others:
        if flag in given:
            kind = "rollouts: it does not go with --merged" if "--merged" in given else "weights: it goes with --merged"
            raise ConfigError(f"{flag} is for {kind}")


def _merge(experiment: Experiment, paths: RunPaths, values: dict[str, str]) -> int:
    """Write a version as one model directory; an adapter's in a process of its own: it needs torch."""
    versions, wanted = list_versions(paths), values["--merged"]
    version = max(versions, default=None) if wanted == "latest" else int(wanted) if wanted.isdecimal() else None
    if version is not None and version in versions and went_over_network(paths.weights_step(version)):
        raise ConfigError(
            f"version {version} went to the engines over the network alone; of a run with weights.transport = "
            f"{experiment.weights.transport} the versions of checkpoints and the last are whole"
        )
    if version is None or version not in versions:
        there = ", ".join(map(str, versions)) or "none"
        raise ConfigError(f"--merged {wanted}: no such version in {paths.weights}; there are {there}")
    is_whole = experiment.model.lora is None or experiment.trains_reward_model  # whose adapter is merged at once
    if is_whole and not holds_changes(paths.weights_step(version)):
        raise ConfigError(f"{paths.weights_step(version)} is a model directory as it is: nothing is to be merged")
    output = Path(values.get("--output") or paths.root / f"merged_{version:06d}").expanduser()
    if output.exists():
        raise ConfigError(f"{output} exists: name another directory with --output")
    if is_whole:
        return _restore(paths, version, output, values)
    dtype = values.get("--dtype")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    options = [] if dtype is None else ["--dtype", dtype]
    command = [sys.executable, "-P", "-m", "prime_hpc.trainer.weights.merge_lora"]
    command += [str(paths.weights_step(version)), experiment.model.name, str(output), *options]
    say(f"merging version {version} into {experiment.model.name}")  # torch takes a while
    code = subprocess.run(command, check=False, timeout=MERGE_TIMEOUT_S).returncode
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else -code  # most real-time ones have none
        say(f"the merge was ended by signal {name}")
    return code if code >= 0 else 1


def _restore(paths: RunPaths, version: int, output: Path, values: dict[str, str]) -> int:
    """Write the whole version that a chain of changes stands for."""
    if "--dtype" in values:
        raise ConfigError("--dtype is for adapters: a version is written as it was published")
    with _refused():
        restore(paths.weights_step(version), output)
    print(f"{output}: version {version}, whole")
    return 0


def _chosen(text: str | None, there: list[int], run_dir: Path) -> list[int]:
    """Return the stored steps within those that are asked for."""
    if not there:
        raise ConfigError(f"{run_dir}: no rollouts are stored; episodes of an evaluation are in results/episodes.jsonl")
    first, last = step_range(text, there)
    chosen = [step for step in there if first <= step <= last]
    if not chosen:
        raise ConfigError(f"--steps {text}: there are {there[0]}..{there[-1]}")
    return chosen
