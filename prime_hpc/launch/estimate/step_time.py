"""How long a step and a save take: from an earlier attempt of the run where there was one, else a stated assumption.

For what needs a time before anything ran: does an attempt of the job get anywhere at all,
and is Slurm's warning early enough for a save?
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.launch.estimate.model_facts import GIB, ModelFacts
from prime_hpc.launch.estimate.trainer_memory import checkpoint_gib
from prime_hpc.launch.monitor.run_progress import tail_rows
from prime_hpc.observe.metric_files import metrics_file

ASSUMED_STEP_S = 60.0
ASSUMED_SAVE_S = 60.0
"""The figure for a model of unknown size."""
LEAST_SAVE_S = 5.0
SAVE_BYTES_PER_NODE_S = 230e6
"""Write speed of a distributed checkpoint to a shared file system (seen in VeOmni issue 1164)."""
COPY_BYTES_PER_S = 5e9
"""One rank's copy of its state to host memory, before a save was measured."""
_LAST = 20  # steps of the earlier attempt that count


@dataclass(frozen=True)
class Pace:
    """Times of one step and one save, and where they come from."""

    step_s: float
    step_from: str
    save_s: float
    """From the state that is saved until its checkpoint is whole."""
    save_from: str
    stall_s: float
    """By how much a save delays training: all of it, or with `ckpt.save_async` the copy alone."""


def pace(experiment: Experiment, facts: ModelFacts | None, trainer_nodes: int = 1) -> Pace:
    """Measured by an earlier attempt of the same run directory, else assumed.

    Args:
        experiment: names the run directory.
        trainer_nodes: nodes that write together.
    """
    rows = tail_rows(metrics_file(experiment.run_dir, "trainer"))
    steps = step_seconds(rows)
    stalls = [seconds for seconds in _seconds(rows, "time/checkpoint") if seconds > 0]
    saves, stalls = _seconds(rows, "ckpt/write_s") or stalls, _seconds(rows, "ckpt/stall_s") or stalls
    step_s, step_from = ASSUMED_STEP_S, "assumed"
    if steps:
        step_s, step_from = median(steps), f"median of the last {len(steps)} steps of this run"
    if saves:
        return Pace(step_s, step_from, max(saves), f"longest of {len(saves)} saves of this run", max(stalls))
    size = checkpoint_gib(experiment, facts) if facts else None
    if size is None:
        return Pace(step_s, step_from, ASSUMED_SAVE_S, "assumed", ASSUMED_SAVE_S)
    seconds = size * GIB / (SAVE_BYTES_PER_NODE_S * trainer_nodes)
    source = f"{size:.1f} GiB at an assumed {SAVE_BYTES_PER_NODE_S / 1e6:.0f} MB/s a node"
    save_s = max(LEAST_SAVE_S, seconds)
    is_async = experiment.ckpt is not None and experiment.ckpt.save_async
    stall_s = size * GIB / experiment.trainer.num_ranks / COPY_BYTES_PER_S if is_async else save_s
    return Pace(step_s, step_from, save_s, source, stall_s)


def step_seconds(rows: list[dict[str, Any]]) -> list[float]:
    """Return how long the last steps took, of a trainer's rows."""
    return _seconds(rows[-_LAST:], "time/step")


def _seconds(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
