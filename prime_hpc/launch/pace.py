"""How long a step and a save take: from an earlier life of the run where there was one, else a stated assumption.

Called by `plan` and `lint`, for what needs a time before anything ran: does a life of the job get anywhere at all, and
is Slurm's warning early enough for a save?
"""

from dataclasses import dataclass
from statistics import median

from prime_hpc.config import Experiment
from prime_hpc.launch.estimate import GIB, ModelFacts, checkpoint_gib
from prime_hpc.launch.figures import tail_rows

ASSUMED_STEP_S = 60.0
ASSUMED_SAVE_S = 60.0
"""Where not even the model's size is known."""
LEAST_SAVE_S = 5.0
SAVE_BYTES_PER_NODE_S = 230e6
"""Write speed of a distributed checkpoint to a shared file system (seen in VeOmni issue 1164)."""
_LAST = 20  # steps of the earlier life that count


@dataclass(frozen=True)
class Pace:
    """Times of one step and one save, and where they come from."""

    step_s: float
    step_from: str
    save_s: float
    save_from: str


def pace(experiment: Experiment, facts: ModelFacts | None, trainer_nodes: int = 1) -> Pace:
    """Measured by an earlier life of the same run directory, else assumed.

    Args:
        experiment: names the run directory.
        facts: of the model, where they are known.
        trainer_nodes: nodes that write together.
    """
    rows = tail_rows(experiment.run_dir / "metrics" / "trainer.jsonl")
    steps = [float(row["time/step"]) for row in rows[-_LAST:] if isinstance(row.get("time/step"), int | float)]
    saves = [float(row["time/checkpoint"]) for row in rows if isinstance(row.get("time/checkpoint"), int | float)]
    saves = [seconds for seconds in saves if seconds > 0]
    step_s, step_from = ASSUMED_STEP_S, "assumed"
    if steps:
        step_s, step_from = median(steps), f"median of the last {len(steps)} steps of this run"
    if saves:
        return Pace(step_s, step_from, max(saves), f"longest of {len(saves)} saves of this run")
    size = checkpoint_gib(experiment, facts) if facts else None
    if size is None:
        return Pace(step_s, step_from, ASSUMED_SAVE_S, "assumed")
    seconds = size * GIB / (SAVE_BYTES_PER_NODE_S * trainer_nodes)
    source = f"{size:.1f} GiB at an assumed {SAVE_BYTES_PER_NODE_S / 1e6:.0f} MB/s a node"
    return Pace(step_s, step_from, max(LEAST_SAVE_S, seconds), source)
