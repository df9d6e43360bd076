"""Result of one submit of a sweep."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.launch.sweep.prepare import Job
from prime_hpc.launch.sweep.progress import PointView
from prime_hpc.launch.sweep.state import PointRow, Sweep
from prime_hpc.slurm.sbatch_errors import SlurmRefused

OK, BAD_POINTS, SLURM_REFUSED = 0, 1, SlurmRefused.exit_code


@dataclass
class Report:
    """It did this, or (dry run) would do it."""

    sweep: Sweep
    views: list[PointView]
    """The points as they were before."""
    jobs: list[Job]
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Arrays and jobs: kind, points, job id, dependency."""
    code: int = OK
    warnings: list[str] = field(default_factory=list)
    is_local: bool = False

    @property
    def invalid(self) -> list[PointRow]:
        """Current points that cannot run."""
        return [row for row in self.sweep.current if row.reason is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sweep": str(self.sweep.dir),
            "points": len(self.sweep.current),
            "sent": [job.row.name for job in self.jobs],
            "parts": self.parts,
            "invalid": [{"name": row.name, "values": row.values, "reason": row.reason} for row in self.invalid],
            "left": dict(Counter(view.state for view in self.left)),
            "exit_code": self.code,
        }

    @property
    def left(self) -> list[PointView]:
        """Points that were left as they are."""
        sent = {job.row.index for job in self.jobs}
        bad = {row.index for row in self.invalid}
        return [view for view in self.views if view.row.index not in sent | bad]
