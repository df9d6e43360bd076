"""Points into Slurm's queue, exactly once: packed ones as arrays with a throttle, het ones as jobs in lanes.

Slurm refuses arrays of het jobs, so a lane is a chain of jobs of which each waits for the one
before it (`afterany`; not `singleton`, which would make a het job wait for its own components).
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from typing import Any, get_args

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.run_files import JOB_SBATCH
from prime_hpc.config.secret import masked_command
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import cluster_name
from prime_hpc.launch.job import local_job
from prime_hpc.launch.sweep.prepare import Job
from prime_hpc.launch.sweep.progress import PointView
from prime_hpc.launch.sweep.state import SubmitRow, Sweep, log_name, new_submit, open_point_record, write_text
from prime_hpc.slurm.client import SlurmError, is_queue_full
from prime_hpc.slurm.executors import RunExecutor
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.options import SlurmRole
from prime_hpc.slurm.placement import Placement, place_slurm
from prime_hpc.slurm.queue import send
from prime_hpc.slurm.queue_facts.submit_limits import MAX_ARRAY, max_array_size
from prime_hpc.slurm.sbatch_errors import NothingQueued, job_without_answer, jobs_of_cut_off_submit
from prime_hpc.slurm.script import ArrayPart, escape_pattern, interpreter, render_job, restart_mode
from prime_hpc.slurm.submission_record import submission_environment, write_record

_MAX_RANGES = 6000  # characters of --array: sbatch reads at most about 8,000
_SAME_REFUSALS = 3
"""After so many refusals one after another the rest is not tried."""
_THREADS = 4
NOT_TRIED = "not tried"
"""Begins the `error` of a part that was not sent because those before it were refused."""


@dataclass
class Part:
    """One array, or one job of a lane."""

    jobs: list[Job]
    placement: Placement
    experiment: Experiment
    first: int = 0
    """Array: index of the point that task 0 would run."""
    throttle: int | None = None
    lane: int | None = None
    """Lane of a job; None: an array."""
    after: list[str] = field(default_factory=list)
    """Jobs that must end first; parts before this one are added when they are sent."""
    after_part: int | None = None
    """Number of the part that must end first."""

    @property
    def is_array(self) -> bool:
        """An array rather than a lane's job."""
        return self.lane is None

    @property
    def ids(self) -> list[int]:
        """Array ids."""
        return [job.row.index - self.first for job in self.jobs]

    def as_dict(self) -> dict[str, Any]:
        """For JSON and people."""
        return {
            "kind": "array" if self.is_array else "job",
            "layout": self.placement.layout,
            "points": [job.row.index for job in self.jobs],
            "names": [job.row.name for job in self.jobs],
            "array": index_ranges(self.ids) if self.is_array else None,
            "throttle": self.throttle,
            "lane": self.lane,
            "after": self.after,
            "after_part": self.after_part,
        }


def plan_parts(
    sweep: Sweep,
    jobs: Sequence[Job],
    views: Sequence[PointView],
    site: SiteConfig,
    *,
    throttle: int | None,
    lanes: int | None,
) -> list[Part]:
    """Plan the arrays and jobs to send. Points whose jobs would look alike share an array.

    A throttle holds over the whole sweep: arrays of it wait for each other, and for those of an earlier submit.

    Args:
        jobs: valid points that are to run.
        views: all points, for what is under way.
        throttle: packed points that run at once; None: no limit.
        lanes: het points that run at once; None: the throttle; if there is none, no limit.

    Raises:
        ConfigError: a point cannot be placed.
    """
    groups: dict[tuple[str, str], list[Job]] = defaultdict(list)
    placements: dict[tuple[str, str], Placement] = {}
    for job in jobs:
        placement = place_slurm(job.sent, site)
        key = (repr(placement), job.sent.slurm.model_dump_json())
        groups[key].append(job)
        placements[key] = placement
    size = max_array_size(site) if any(p.abilities.takes_arrays for p in placements.values()) else MAX_ARRAY
    parts: list[Part] = []
    lane_jobs: list[tuple[Job, Placement]] = []
    for key, members in groups.items():
        if placements[key].abilities.takes_arrays:
            parts += _arrays(sweep, members, placements[key], size, throttle)
        else:
            lane_jobs += [(job, placements[key]) for job in members]
    live = _live_jobs(sweep, views)
    if throttle is not None:
        for number, part in enumerate(parts):
            part.after = sorted({s.job_id for s in live if s.kind == "array" and s.job_id}) if number == 0 else []
            part.after_part = number - 1 if number else None
    parts += _lanes(lane_jobs, live, lanes or throttle, len(parts))
    for part in parts:
        own = _dependency(part)
        if "?" in own and (part.after or part.after_part is not None):
            words = f"{own}: a job waits for one of these, and cannot wait for the jobs before it in the sweep besides"
            raise ConfigError(f"{words}: `sweep submit --feed` keeps throttle and lanes", "slurm.dependency")
    return parts


def _arrays(sweep: Sweep, jobs: Sequence[Job], placement: Placement, size: int, throttle: int | None) -> list[Part]:
    """Alike points as few arrays: an array id is below `size`, and the ids' list is not too long for sbatch."""
    changes = {"name": sweep.dir.name, "output_dir": sweep.dir.parent}
    experiment = jobs[0].sent.model_copy(update=changes)
    blocks: dict[int, list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.row.index):
        blocks[job.row.index // size * size].append(job)
    parts = []
    for first, members in blocks.items():
        while members:
            count = len(members)
            while len(index_ranges([job.row.index - first for job in members[:count]])) > _MAX_RANGES:
                count //= 2
            parts.append(Part(members[:count], placement, experiment, first, throttle))
            members = members[count:]
    return parts


def _live_jobs(sweep: Sweep, views: Sequence[PointView]) -> list[SubmitRow]:
    """Return submits of which a point is still under way, in the order in which they were begun, with the job in which
    it is now: a point that came back as a job of its own has a row of its own."""
    last = sweep.last_submits()
    now: dict[str, set[str]] = defaultdict(set)
    for view in views:
        if view.is_under_way and (row := last.get(view.row.index)) is not None:
            job_id = view.status.job_id or row.job_id
            now[row.token] |= {job_id.partition("_")[0]} if job_id is not None else set()
    rows = [row for row in sweep.submits if row.kind != "local"]
    return [replace(row, job_id=job_id) for row in rows for job_id in sorted(now[row.token])]


def _lanes(
    jobs: Sequence[tuple[Job, Placement]], live: Sequence[SubmitRow], lanes: int | None, before: int
) -> list[Part]:
    """Jobs dealt to the lanes, each behind the last of its lane; what an earlier submit left there counts.

    Args:
        live: submits under way, in the order in which they were begun.
        lanes: how many; None: every job has its own.
    """
    count = lanes or len(jobs) + len(live)
    queued: Counter[int] = Counter(dict.fromkeys(range(count), 0))
    tails: dict[int, str] = {}
    for row in (row for row in live if row.lane is not None):
        lane = (row.lane or 0) % count
        queued[lane] += 1
        tails[lane] = str(row.job_id)
    parts: list[Part] = []
    last: dict[int, int] = {}
    # the shortest first, of those as long as each other that whose last job was sent earlier
    waiting = [(queued[lane], -1, lane) for lane in range(count)]
    heapify(waiting)
    for job, placement in sorted(jobs, key=lambda pair: pair[0].row.index):
        length, _, lane = waiting[0]
        part = Part([job], placement, job.sent, lane=lane)
        if lane in last:
            part.after_part = last[lane]
        elif lane in tails:
            part.after = [tails[lane]]
        last[lane] = before + len(parts)
        heapreplace(waiting, (length + 1, last[lane], lane))
        parts.append(part)
    return parts


def send_parts(sweep: Sweep, parts: Sequence[Part], site: SiteConfig) -> list[dict[str, Any]]:
    """Submit them in order; what is sent is on disk before sbatch is called. A refused part does not stop the others.
    Returns the parts as JSON, with their job ids; those that Slurm refused have an `error`.
    Raises SlurmRefused: Slurm cannot be reached or did not answer; parts before stay sent, later ones are not."""
    sent: list[str | None] = []
    told: list[dict[str, Any]] = []
    refusals: list[str] = []
    for part in parts:
        if len(refusals) >= _SAME_REFUSALS or any(map(is_queue_full, refusals)):
            sent.append(None)
            told.append(part.as_dict() | {"job_id": None, "error": f"{NOT_TRIED}: what came before it was refused"})
            continue
        if (before := _before(parts, part, sent)) is not None:
            part.after = [before]
        job_id, error = _send(sweep, part, site)
        sent.append(job_id)
        refusals = [*refusals, error] if error is not None else []
        told.append(part.as_dict() | {"job_id": job_id, "error": error})
    return told


def _before(parts: Sequence[Part], part: Part, sent: Sequence[str | None]) -> str | None:
    """Return the job that a part must wait for, those that were refused left out."""
    number = part.after_part
    while number is not None and sent[number] is None:
        part.after = part.after or parts[number].after
        number = parts[number].after_part
    return sent[number] if number is not None else None


def _send(sweep: Sweep, part: Part, site: SiteConfig) -> tuple[str | None, str | None]:
    """Submit one part: its job id, or why Slurm refused it. Raises SlurmRefused where it cannot be known."""
    experiment = _depending(part)
    placement = place_slurm(experiment, site)
    indices = [job.row.index for job in part.jobs]
    submit = new_submit("array" if part.is_array else "job", indices, first=part.first, lane=part.lane)
    text = render_job(
        placement,
        experiment,
        site,
        python=interpreter(),
        command_tail=[],
        token=submit.token,
        array=_array_part(sweep, part) if part.is_array else None,
    )
    if part.is_array:
        _keep_successors(sweep, part, site)
    sweep.record(submit)
    run_dir = sweep.run_dir(part.jobs[0].row)
    try:
        if part.is_array:
            job_id = _send_array(sweep, part, text, submit.token)
        else:
            job_id = send(
                run_dir,
                text,
                token=submit.token,
                layout=placement.layout,
                command=masked_command(sys.argv),
                function=local_job,
            )
    except NothingQueued as error:  # any other refusal: the next submit looks for its token
        sweep.update(submit, state="failed", error=str(error))
        return None, str(error)
    _note_sent(sweep, submit, job_id)
    return job_id, None


def _send_array(sweep: Sweep, part: Part, text: str, token: str) -> str:
    executor = RunExecutor(sweep.dir, text, environment=submission_environment(sweep.dir, token))
    points = {job.row.index - part.first: sweep.run_dir(job.row) for job in part.jobs}
    try:
        return executor.submit_points(points)[0].job_id.partition("_")[0]
    except SlurmError as error:
        return job_without_answer(token, error, part.placement.layout).job_id.partition("_")[0]


def _array_part(sweep: Sweep, part: Part) -> ArrayPart:
    pattern = f"{escape_pattern(str(sweep.dir / 'logs'))}/{log_name('%A', '%a')}"
    return ArrayPart(sweep.array_of(part.first), part.ids, part.throttle, pattern)


def _depending(part: Part) -> Experiment:
    """Return the experiment of a part whose job waits until those before it have ended, however they do."""
    if not part.after:
        return part.experiment
    own, slurm = _dependency(part), part.experiment.slurm
    changes: dict[str, Any] = {"dependency": ",".join([*([own] if own else []), f"afterany:{':'.join(part.after)}"])}
    for role in get_args(SlurmRole):  # what a role states would take its place
        if (group := getattr(slurm, role)) is not None:
            changes[role] = group.model_copy(update={"dependency": None})
    return part.experiment.model_copy(update={"slurm": slurm.model_copy(update=changes)})


def _dependency(part: Part) -> str:
    """Return what the job of a part waits for by its own config; empty: nothing."""
    return str(part.placement.components[0].options.get("dependency", ""))


def _keep_successors(sweep: Sweep, part: Part, site: SiteConfig) -> None:
    """Keep, where a point comes back as a job of its own, that job's script in its run directory."""
    if restart_mode(part.experiment, site, part.placement) != "successor":
        return
    for job in part.jobs:
        text = render_job(part.placement, job.sent, site, python=interpreter(), command_tail=[])
        write_text(sweep.run_dir(job.row) / JOB_SBATCH, text)


def _note_sent(sweep: Sweep, submit: SubmitRow, job_id: str) -> None:
    """Write down the job of a submit: the points' records first, so that who is cut off here looks for it again."""
    if submit.kind == "array":
        _write_point_records(sweep, submit, job_id)
    sweep.update(submit, state="sent", job_id=job_id)


def _write_point_records(sweep: Sweep, submit: SubmitRow, job_id: str) -> None:
    command, cluster = masked_command(sys.argv), cluster_name()

    def write(index: int) -> None:
        task = f"{job_id}_{index - submit.first}"
        run_dir = sweep.run_dir(sweep.rows[index])
        open_point_record(run_dir, sweep.dir, submit, job_id=task, command=command, cluster=cluster)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, submit.points))


def resolve_pending_submits(sweep: Sweep) -> None:
    """Find out what became of submits that were cut off before sbatch's answer was written down.
    Raises SlurmRefused: Slurm cannot be asked; nothing was changed."""
    for submit in [row for row in sweep.submits if row.state == "sending"]:
        if submit.kind in ("array", "job"):
            found = jobs_of_cut_off_submit(submit.token, submit.time, sweep.dir, "launch")
            if not found:
                sweep.update(submit, state="failed", error="the submit was cut off, and its job never reached Slurm")
                continue
            job_id = found[0].job_id.partition("_")[0]
            if submit.kind == "job":
                write_record(sweep.run_dir(sweep.rows[submit.points[0]]), state="sent", job_id=job_id)
            _note_sent(sweep, submit, job_id)
        else:
            sweep.update(submit, state="sent")
