"""How runs are: from what a run directory holds and what Slurm says.

Nothing is asked of the run itself. Of each directory three small files are read (`submit.json`, `attempts.jsonl`,
`status.json`), of the runs that are shown also the ends of their metrics; Slurm is asked once for all of them, and
only about runs whose directory leaves a doubt. Works without accounting, and without Slurm at all.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from prime_hpc.config.run_files import ATTEMPTS_JSONL, STATUS_JSON, SUBMIT_JSON
from prime_hpc.config.site import cluster_name, has_accounting
from prime_hpc.launch.monitor.run_facts import Evidence, Queue, RunStatus, read_evidence
from prime_hpc.launch.monitor.run_progress import add_checkpoint, add_figures, add_service, log_paths
from prime_hpc.launch.monitor.run_state import ENDED_BY, is_sending, jobs_in_doubt, judge
from prime_hpc.launch.purge import purge_warning
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.slurm.client import SlurmError, asked_cluster, on_cluster
from prime_hpc.slurm.submission_record import cluster_of
from prime_hpc.store.run_dirs import run_name

_THREADS = 16
_SHARE = 20.0
"""Of the time, Slurm is busy with the questions of one who looks again and again for at most one part in so many."""

Ask = Callable[[set[str], bool], Queue]
"""Answers about these job ids; with True also about all jobs of this user (to look for a token)."""


def ask_slurm(wanted: set[str], by_token: bool) -> Queue:
    """One squeue call (see `Ask`); trouble is part of the answer, never an exception."""
    if not wanted and not by_token:
        return Queue()
    from prime_hpc.slurm.jobs import jobs

    asked = time.time()
    try:
        found = jobs(None) if by_token else {}  # a token can only be looked for among all of the user's jobs
        missing = wanted - found.keys()  # also other users' jobs: their runs can be looked at too
        found |= jobs(missing, of_others=by_token)
    except SlurmError as error:
        said = (error.stderr.splitlines() or ["it said nothing"])[-1].removeprefix("slurm_load_jobs error: ")
        return Queue(trouble="there is no squeue here" if error.is_missing else said, asked=asked)
    return Queue(found, asked=asked)


class PatientAsk:
    """`ask_slurm` for those who look again and again: it asks only every few seconds, or about other jobs.

    A controller that takes long to answer is asked less often.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._known: dict[str | None, tuple[set[str], bool, float, Queue]] = {}
        """By cluster: what it was asked about, until when its answer holds, and the answer."""

    def __call__(self, wanted: set[str], by_token: bool) -> Queue:
        """Answer as `ask_slurm` does."""
        now, cluster = time.monotonic(), asked_cluster()
        known = self._known.get(cluster)
        if known is None or known[:2] != (wanted, by_token) or now >= known[2]:
            answer = ask_slurm(wanted, by_token)
            asked = time.monotonic()
            pause_s = max(self._every_s, min(_SHARE * (asked - now), 60.0)) * random.uniform(0.8, 1.2)
            known = self._known[cluster] = wanted, by_token, asked + pause_s, answer
        return known[3]


def collect(
    paths: Iterable[Path], folder: Path, *, ask: Ask = ask_slurm, limit: int | None = None
) -> tuple[list[RunStatus], int]:
    """Return the status of many runs: those under way first, then the newest.

    Args:
        folder: names are given relative to it.
        ask: how Slurm is asked, once.
        limit: at most so many, but every one that is under way; None: all.

    Returns:
        the runs shown, and how many were left out.
    """
    found = list(paths)
    # on a shared file system an open costs a round trip to its server: several at a time
    with ThreadPoolExecutor(min(_THREADS, max(1, len(found) // 8))) as pool:
        evidence = list(pool.map(read_evidence, found))
        now = time.time()
        queues = _ask_about(evidence, ask)
        judged = [judge(one, _shown_of(one, queues), now) for one in evidence]
        pairs = sorted(zip(evidence, judged, strict=True), key=lambda p: (not p[1].is_under_way, -p[0].since))
        under_way = sum(status.is_under_way for _, status in pairs)
        shown = pairs if limit is None else pairs[: max(limit, under_way)]
        for _, status in shown:
            status.name = run_name(Path(status.path), folder)
        list(pool.map(lambda pair: add_figures(pair[1], pair[0], brief=True), shown))
    return [status for _, status in shown], len(pairs) - len(shown)


def status_of(path: Path, *, ask: Ask = ask_slurm, details: bool = True) -> RunStatus:
    """Return the status of one run; `details`: its figures, checkpoint and logs too."""
    evidence = read_evidence(path)
    queue = _shown_of(evidence, _ask_about([evidence], ask))
    status = judge(evidence, queue, time.time())
    if details:
        add_figures(status, evidence)
        add_checkpoint(status, path)
        add_service(status, path)
        status.logs = log_paths(path, status.attempt)
        status.purge = purge_warning(path)
        if status.state in ("pending", "requeued") and (job := queue.jobs.get(status.job_id or "")) is not None:
            from prime_hpc.slurm.queue_facts.waiting import limit_of

            with on_cluster(cluster_of(path)):
                limit = limit_of(job, queue.asked)
            if limit is not None:
                reason, *end = status.note.partition(ENDED_BY)
                status.note = "".join([reason, f": {limit.words}", *end])
        status.note = "; ".join(dict.fromkeys(filter(None, [status.note, *_unreadable(path)])))
        if status.state == "lost" and status.job_id and not queue.trouble and status.job_id not in queue.jobs:
            with on_cluster(cluster_of(path)):
                status.note += _from_accounting(status.job_id) if has_accounting(path) else ""
    return status


def _unreadable(path: Path) -> Iterator[str]:
    """Say which of a run's files are there and cannot be read: they were taken for absent."""
    if (logs := path / "logs").is_dir() and not os.access(logs, os.R_OK | os.X_OK):
        yield f"{logs} cannot be read: Permission denied"
    names = SUBMIT_JSON, ATTEMPTS_JSONL, STATUS_JSON
    for file in [*(path / name for name in names), *(metrics_file(path, role) for role in ("trainer", "orchestrator"))]:
        try:
            with file.open("rb") as stream:
                stream.read(1)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                yield f"{file} cannot be read: {error.strerror}"


def _cluster(one: Evidence) -> str | None:
    """Return the other cluster of the site that a run was sent to; None: this one."""
    other = (one.record or {}).get("other_cluster")
    return None if other is None else str(other)


def _ask_about(evidence: list[Evidence], ask: Ask) -> dict[str | None, Queue]:
    """Each cluster's answer about its runs."""
    answers: dict[str | None, Queue] = {}
    for cluster in {_cluster(one) for one in evidence}:
        wanted: set[str] = set()
        by_token = False
        for one in evidence:
            if _cluster(one) == cluster:
                wanted |= jobs_in_doubt(one, time.time())
                by_token |= is_sending(one)
        with on_cluster(None if cluster == cluster_name() else cluster):
            answers[cluster] = ask(wanted, by_token) if wanted or by_token else Queue()
    return answers


def _shown_of(one: Evidence, answers: dict[str | None, Queue]) -> Queue:
    """Return the answer about a run. That Slurm shows nothing of another user's job need not mean that it is gone."""
    queue, user = answers[_cluster(one)], os.geteuid()
    if queue.trouble or user == 0 or jobs_in_doubt(one, time.time()) <= queue.jobs.keys():
        return queue
    try:
        is_own = (one.path / SUBMIT_JSON).stat().st_uid == user
    except OSError:  # nobody has sent it
        return queue
    if is_own:
        return queue
    from prime_hpc.slurm.jobs import hides_others

    with on_cluster(cluster_of(one.path)):
        trouble = "it shows nobody the jobs of others (PrivateData)" if hides_others() else None
    return replace(queue, trouble=trouble)


def _from_accounting(job_id: str) -> str:
    """Say what sacct knows of a job that left the queue, as the end of a sentence; empty without accounting."""
    from prime_hpc.slurm.jobs import history

    runs = history(job_id)
    return f"; the accounting says {runs[-1].state}, exit code {runs[-1].exit_code}" if runs else ""
