"""`prime-hpc replay RUN`: train again on the stored batches and compare the losses with the recorded ones.

Of `RUN/failed/step_<n>`, which a refused step leaves behind, it computes that step again and lists its worst sequences.

Shows that a run can be reproduced to the last bit on the same machine, and lets one look into a bad step at leisure:
no inference is needed, and the run is not touched.

Exit codes: 0 every compared figure is equal bit for bit; 1 some differ, or a step failed; 2 there is nothing to replay.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.cli.common import parse, step_range
from prime_hpc.config import load_run
from prime_hpc.config.errors import ConfigError
from prime_hpc.observe.console import Tail
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.runtime.gpus import visible_gpus
from prime_hpc.slurm.gpu_split import at_positions
from prime_hpc.store.batches import list_batches
from prime_hpc.store.checkpoint.checkpoints import newest_first
from prime_hpc.store.run_dirs import find_run
from prime_hpc.store.run_paths import RunPaths

TIMEOUT_S = 86_400.0
POLL_S = 0.3
END_GRACE_S = 10.0
TAIL_LINES = 15
_NOT_COMPARED = ("step", "time", "refused")


@dataclass(frozen=True)
class Replay:
    """Steps to train again, and how."""

    run_dir: Path
    first: int
    last: int
    """Steps that are compared."""
    start: int
    """Checkpoint that it begins with; 0: the base model."""
    num_ranks: int
    threads: int | None
    gpus: list[int] | None


def run(argv: list[str], program: str) -> int:
    """Replay, print the comparison."""
    given = parse("replay", argv)
    [word] = given.arguments(1, least=1)

    run_dir = find_run(word)
    if run_dir.resolve().parent.name == "failed":
        if idle := sorted(given.flags.keys() - {"--ranks"}):
            raise ConfigError(f"{idle[0]} is for the steps of a run; {word} is one step, which takes --ranks alone")
        return _kept_step(run_dir.resolve(), given.whole("--ranks", 1))
    what = plan_replay(run_dir, given.get("--steps"), given.whole("--from"), given.whole("--ranks", 1))
    timeout_s = given.positive("--timeout") or TIMEOUT_S
    as_json = "--json" in given
    with _scratch(given.path("--keep")) as scratch:
        if not as_json:
            where = f"the checkpoint of step {what.start}" if what.start else "the base model"
            print(f"steps {what.first}..{what.last} again from {where}, {what.num_ranks} rank(s)", flush=True)
        code, log = _execute(what, scratch, timeout_s, quiet=as_json)
        result = compare(what, _rows(scratch))
    given.tell(lambda: result, lambda: _summary(result))
    if code != 0 and len(result["rows"]) < result["num_steps"]:
        print(f"{program}: the trainer ended with code {code}; the end of its log:\n{log}", file=sys.stderr)
        return 1
    return 0 if result["equal"] else 1


def _kept_step(kept: Path, num_ranks: int | None) -> int:
    """Compute a refused step again, in the foreground; its exit code."""
    experiment = load_run(kept)
    ranks = num_ranks or experiment.trainer.num_ranks
    what = Replay(kept, 0, 0, 0, ranks, experiment.trainer.threads_per_rank, experiment.trainer_gpu_ids)
    return subprocess.run([*_trainer(what), str(kept)], env=_environment(what), check=False).returncode


def plan_replay(run_dir: Path, steps: str | None, start: int | None, num_ranks: int | None) -> Replay:
    """Find the steps that can be trained again, and from where.

    Args:
        steps: `A:B`, `A:`, `:B` or `A`; None: all that were recorded.
        start: checkpoint to begin with, 0 for the base model; None: the nearest one below.
        num_ranks: default the run's.

    Raises:
        ConfigError: no such run, no batches, steps that were not recorded.
    """
    experiment = load_run(run_dir)
    paths = RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)
    recorded = sorted(recorded_rows(run_dir))
    if not recorded:
        raise ConfigError(f"{run_dir}: no step was recorded (metrics/trainer.jsonl)")
    first, last = _range(steps, recorded)
    whole = [info.step for info in newest_first(paths.checkpoints) if info.step < first]
    if start is None:
        start = max(whole, default=0) if steps is not None or recorded[0] > 1 else 0
        if start == 0 and recorded[0] > 1:
            raise ConfigError(
                f"{run_dir}: the record begins at step {recorded[0]}, and no whole checkpoint before step {first} is "
                "left to begin with"
            )
    elif start not in (0, *whole):
        raise ConfigError(
            f"--from {start}: no whole checkpoint of that step before step {first} (there are "
            f"{', '.join(map(str, sorted(whole))) or 'none'}; 0 is the base model)"
        )
    if experiment.kind == "rl":
        there = set(list_batches(paths))
        missing = [step for step in range(start + 1, last + 1) if step not in there]
        if missing:
            raise ConfigError(f"{paths.rollouts}: batch {missing[0]} is gone ({len(missing)} missing); {_span(there)}")
    ranks = num_ranks or experiment.trainer.num_ranks
    threads = experiment.trainer.threads_per_rank
    return Replay(run_dir, first, last, start, ranks, threads, experiment.trainer_gpu_ids)


def _span(steps: set[int]) -> str:
    return f"there are {min(steps)}..{max(steps)}" if steps else "there are none"


def _range(steps: str | None, recorded: list[int]) -> tuple[int, int]:
    first, last = step_range(steps, recorded)
    within = [step for step in recorded if first <= step <= last]
    if steps is not None and (not within or len(within) <= last - first):
        raise ConfigError(f"--steps {steps}: recorded are steps {recorded[0]}..{recorded[-1]}")
    return first, last


def recorded_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the trainer's last word about each step."""
    rows = read_metrics(metrics_file(run_dir, "trainer"))
    return {row["step"]: row for row in rows if "loss" in row}


def compare(what: Replay, replayed: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the replayed rows with the recorded ones.

    Returns:
        `equal`: every figure of every step is the same; `max_loss_difference`; `first_difference`: step, figure and
        both values, or None; `rows`: step, loss, recorded loss, equal.
    """
    recorded = recorded_rows(what.run_dir)
    rows, first_difference = [], None
    for row in replayed:
        step = row["step"]
        if not what.first <= step <= what.last or step not in recorded:
            continue
        then = recorded[step]
        keys = [key for key in row if key not in _NOT_COMPARED and key in then]
        differing = [key for key in keys if row[key] != then[key]]
        if "refused" in row:
            rows.append({"step": step, "refused": row["refused"], "recorded_loss": then["loss"], "equal": False})
            continue
        if differing and first_difference is None:
            key = differing[0]
            first_difference = {"step": step, "figure": key, "replayed": row[key], "recorded": then[key]}
        rows.append({"step": step, "loss": row["loss"], "recorded_loss": then["loss"], "equal": not differing})
    losses = [(r["loss"], r["recorded_loss"]) for r in rows if "loss" in r]
    gaps = [0.0 if loss == then else abs(float(loss) - float(then)) for loss, then in losses]  # "nan" equals itself
    num_steps = sum(what.first <= step <= what.last for step in recorded)  # a power cut may have cost a row
    return {
        "run": str(what.run_dir),
        "start": what.start,
        "steps": [what.first, what.last],
        "num_steps": num_steps,
        "num_ranks": what.num_ranks,
        "equal": len(rows) == num_steps and all(r["equal"] for r in rows),
        "num_equal": sum(r["equal"] for r in rows),
        "max_loss_difference": max(gaps, key=lambda gap: (math.isnan(gap), gap), default=None),
        "first_difference": first_difference,
        "rows": rows,
    }


def _summary(result: dict[str, Any]) -> str:
    if result["equal"]:
        return f"{result['num_steps']} steps: every figure equal to the last bit"
    lines = [f"{result['num_equal']} of {result['num_steps']} steps are equal to the last bit"]
    worst = result["first_difference"]
    if worst is not None:
        lines.append(
            f"first difference: step {worst['step']}, {worst['figure']} {worst['replayed']!r}, recorded "
            f"{worst['recorded']!r}; largest difference of a loss {result['max_loss_difference']:.3g}"
        )
        lines.append("(another machine, number of ranks or threads than the run had differs in the last bits)")
    lines += [f"step {row['step']} is refused: {row['refused']}" for row in result["rows"] if "refused" in row]
    return "\n".join(lines)


# --- the process -------------------------------------------------------------------------------------------------


@contextmanager
def _scratch(named: Path | None) -> Iterator[Path]:
    """Make a directory that is deleted afterwards unless the user named it."""
    if named is None:
        with tempfile.TemporaryDirectory(prefix="prime-hpc-replay-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    path = named.absolute()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"--keep {named}: is not empty")
    yield path


def _trainer(what: Replay) -> list[str]:
    torchrun = ["-m", "prime_hpc.trainer.torchrun", f"--nproc-per-node={what.num_ranks}"]
    return [sys.executable, "-P", *(torchrun if what.num_ranks > 1 else []), "-m", "prime_hpc.trainer.replay"]


def _environment(what: Replay) -> dict[str, str]:
    threads = what.threads or max(1, (os.cpu_count() or 1) // what.num_ranks)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if what.gpus is not None:
        own = at_positions(what.gpus, visible_gpus(os.environ), "trainer_gpu_ids")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environment


def _execute(what: Replay, scratch: Path, timeout_s: float, *, quiet: bool) -> tuple[int, str]:
    """Run the trainer; returns its exit code and the end of its log."""
    command = [*_trainer(what), str(what.run_dir), str(scratch), "--after", str(what.start), "--until", str(what.last)]
    log = scratch / "replay.log"
    end = time.monotonic() + timeout_s
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(what), start_new_session=True
        )
    try:
        shown = _progress(scratch, quiet)
        while process.poll() is None and time.monotonic() < end:
            next(shown)
            time.sleep(POLL_S)
        next(shown)
    finally:
        if process.poll() is None:
            _end(process)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    if time.monotonic() >= end and process.returncode != 0:
        tail += f"\nended after --timeout {timeout_s:.0f} s"
    return process.returncode, tail


def _progress(scratch: Path, quiet: bool) -> Iterator[None]:
    """Print a line for each new step; advanced by the caller."""
    tail = Tail(metrics_file(scratch, "trainer"), whole=True)
    while True:
        for row in tail.rows() if not quiet else []:
            if _is_of_step(row):
                print(f"  step {row['step']}: loss {row.get('loss', 'refused')}", flush=True)
        yield


def _rows(scratch: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(metrics_file(scratch, "trainer")) if _is_of_step(row)]


def _is_of_step(row: dict[str, Any]) -> bool:
    return "loss" in row or "refused" in row


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End our own process group, gracefully first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(END_GRACE_S)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
