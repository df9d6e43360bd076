"""The time for which a Slurm job held its nodes for each attempt, so that the accounting is that of the allocation.

The supervisor begins after the batch script and Python have started and writes its last word before the job is over.
Slurm's accounting knows both ends; without it the environment of the job tells its begin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL
from prime_hpc.config.site import cluster_name, has_accounting
from prime_hpc.report.series import number_of, section_of
from prime_hpc.slurm.client import on_cluster
from prime_hpc.slurm.queue_facts.job_lives import JobLife, job_lives
from prime_hpc.store.run_dirs import IN_PLACE, read_record, read_rows

CLOCKS_DIFFER_S = 5.0
"""At most, between the controller and a node."""


@dataclass(frozen=True)
class Held:
    """An attempt's share of its job's time."""

    since: float | None = None
    """Epoch seconds; None: nobody says, it is the attempt's own."""
    until: float | None = None
    life: JobLife | None = None

    def widened(self, began: float, end: float) -> tuple[float, float]:
        """Return begin and end of the attempt with the job's time before and behind it."""
        since = began if self.since is None else min(began, self.since)
        until = end if self.until is None else self.until
        return since, max(since, until)


def held_spans(attempts: Sequence[Mapping[str, Any]], lives: Sequence[JobLife]) -> list[Held]:
    """Return the span of each attempt.

    Attempts of the same life of a job follow each other without a gap: the first one has its begin, the last one its
    end.
    """
    found = [_life_of(attempt, lives) for attempt in attempts]
    spans = []
    for index, (attempt, life) in enumerate(zip(attempts, found, strict=True)):
        follows = index > 0 and attempts[index - 1].get("next") == IN_PLACE
        if life is None:
            spans.append(Held(None if follows else number_of(section_of(attempt, "allocated").get("since"))))
            continue
        later = next((i for i in range(index + 1, len(attempts)) if found[i] is life), None)
        until = life.end if later is None else number_of(attempts[later].get("began"))
        spans.append(Held(life.start if life not in found[:index] else None, until, life))
    return spans


def _life_of(attempt: Mapping[str, Any], lives: Sequence[JobLife]) -> JobLife | None:
    began = number_of(attempt.get("began"))
    if began is None:
        return None
    mine = [life for life in lives if attempt.get("job_id") in life.names and life.start <= began + CLOCKS_DIFFER_S]
    latest = max(mine, key=lambda life: life.start, default=None)
    # a life ends for Slurm when it is told to: its processes have some seconds more
    return latest if latest is None or latest.end is None or began <= latest.end + CLOCKS_DIFFER_S else None


def own_lives(
    lives: Sequence[JobLife], attempts: Sequence[Mapping[str, Any]], submission: Mapping[str, Any]
) -> list[JobLife]:
    """Return those lives of jobs with a run's ids that are the run's: Slurm gives an id to other jobs, too, once its
    counter begins anew, and every cluster has a counter of its own.

    Args:
        submission: of `read_record`; {} where there is none.

    Returns:
        those in which an attempt began, those that began between the submission and the last attempt's end, and those
        of the newest submission's jobs: such a job may come again after that end, or its successor may come, and fail
        before any attempt begins.
    """
    claimed = {id(span.life) for span in held_spans(attempts, lives)}
    newest = {str(submission.get(key)) for key in ("job_id", "successor")}
    sent = number_of(submission.get("time"))
    began = [moment for row in attempts if (moment := number_of(row.get("began"))) is not None]
    ended = [moment for row in attempts if (moment := number_of(row.get("ended"))) is not None]
    first = min([*began, *([] if sent is None else [sent])], default=float("inf")) - CLOCKS_DIFFER_S

    def is_own(life: JobLife) -> bool:
        if id(life) in claimed or first <= life.start <= max(ended, default=0.0):
            return True
        return sent is not None and bool(life.names & newest) and life.start >= sent - CLOCKS_DIFFER_S

    return [life for life in lives if is_own(life)]


def ask_lives(runs: Sequence[Path]) -> dict[Path, list[JobLife]]:
    """Ask Slurm's accounting about the jobs of runs, each cluster once; a run without Slurm has no lives."""
    ids: dict[Path, tuple[str | None, set[str]]] = {}
    for path in runs:
        submission = read_record(path) or {}
        known = [row.get("job_id") for row in read_rows(path / ATTEMPTS_JSONL)]
        known += [submission.get("job_id"), submission.get("successor")]
        words = {str(word) for word in known if word and str(word).replace("_", "").isdigit()}
        if words and has_accounting(path):
            ids[path] = submission.get("other_cluster"), words
    found: dict[Path, list[JobLife]] = {}
    for cluster in {cluster for cluster, _ in ids.values()}:
        mine = {path: words for path, (where, words) in ids.items() if where == cluster}
        with on_cluster(None if cluster == cluster_name() else cluster):
            lives = job_lives(set().union(*mine.values()))
        found |= {path: [life for life in lives if life.names & words] for path, words in mine.items()}
    return found
