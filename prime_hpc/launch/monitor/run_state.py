"""The state of a run, decided from its directory and Slurm's answer.

The run itself is not asked: it may be dead. What it wrote last, whether its job (or, without Slurm, its process) still
exists, and how long it has been silent decide.
"""

import math
import socket
from typing import TYPE_CHECKING, Any

from prime_hpc.launch.monitor.run_facts import Evidence, Queue, RunStatus, integer, number, span
from prime_hpc.launch.monitor.run_progress import last_row_time
from prime_hpc.slurm.submission_record import local_controller
from prime_hpc.store.run_dirs import IN_PLACE, AttemptRow, SubmissionRecord, by_hand

if TYPE_CHECKING:
    from prime_hpc.slurm.jobs import JobInfo

QUIET_S = 60.0
"""A supervisor writes every few seconds; after so long without a word this is said."""
SILENT_S = 300.0
"""After so long without a word a run of which nobody else can tell counts as lost."""
SUBMITTING_S = 120.0
"""So long a submission may take before a record without an answer counts as interrupted."""
_ASK_AGAIN_S = 86_400.0
"""A run that failed less than this ago may still come back, so Slurm is asked."""
_OVER = {"completed": "completed", "stopped": "stopped", "interrupted": "stopped"}
"""Outcomes after which no job brings the run back, and the run's state then."""
_LIVE_WORDS = {
    "preflight": "starting",
    "starting": "starting",
    "running": "running",
    "saving": "saving",
    "ended": "ending",
}


def is_sending(one: Evidence) -> bool:
    """Return whether the run was sent to Slurm and sbatch's answer was never written down."""
    return one.record is not None and one.record.get("state") == "sending" and _is_newer(one)


def jobs_in_doubt(one: Evidence, now: float) -> set[str]:
    """Ids of the jobs that decide a run's state; none where its directory says it all."""
    record, last = one.record or {}, one.last
    ids = [record.get("job_id"), record.get("successor")] if record.get("state") == "sent" else []
    if last is not None:
        ended = number(last.get("ended"))
        if ended is not None and not _is_newer(one):
            doubtful = now - ended < _ASK_AGAIN_S or _is_to_come_back(last)
            if last.get("outcome") in _OVER or not doubtful:
                return set()
        ids.append(last.get("job_id"))
    return {str(i) for i in ids if i}


def _is_newer(one: Evidence) -> bool:
    """Return whether the submission is later than every attempt: the run was submitted again, and has not begun."""
    if one.record is None:
        return False
    last = one.last
    if last is None:
        return True
    ended, sent = number(last.get("ended")), number(one.record.get("time"))
    if ended is None or sent is None or sent <= ended:
        return False
    known = {str(row.get("job_id")) for row in one.attempts}
    return one.record.get("state") == "local" or str(one.record.get("job_id")) not in known


def judge(one: Evidence, queue: Queue, now: float) -> RunStatus:
    """Return the state of a run and why; besides these two, processes of this host and the trainer's rows are looked
    at."""
    record, last, word = one.record or {}, one.last, one.word or {}
    status = RunStatus(one.path.name, str(one.path), "not started", since=one.since or None)
    if record.get("job_id") is not None and record.get("state") != "local":
        status.job_id = str(record["job_id"])
    status.word = number(word.get("time"))
    if last is not None:
        status.attempt, status.why = last["attempt"], last.get("why")
        status.host, status.pid = last.get("host"), last.get("pid")
        own = word if word.get("attempt") == last["attempt"] else {}
        status.nodes = _hosts(own.get("nodes") or last.get("nodes"), last)
        _take_word(status, own)
    over = next((row for row in reversed(one.attempts) if row.get("ended") is not None), None)
    if over is not None:
        status.cause, status.outcome, status.ended = over.get("cause"), over.get("outcome"), number(over["ended"])
    status.step, status.max_steps = integer(word.get("step")), integer(word.get("max_steps"))
    if last is None or _is_newer(one):
        status.nodes, status.roles = {}, {}
        _judge_submission(status, one, queue, now)
        if one.unreadable is not None and not status.is_under_way:  # by what it wrote it may be anything
            status.state, status.note = "unreadable", one.unreadable
    elif last.get("ended") is None:
        _judge_open(status, one, queue, now)
    else:
        _judge_ended(status, one, queue)
    status.no_successor = record.get("no_successor")
    if status.is_final:
        status.time_left_s, status.no_successor = None, None
        status.servers, status.gpus, status.doing = {}, {}, {}
    elif isinstance(stall := word.get("stall"), dict):
        step, seconds = integer(stall.get("step")) or 0, number(stall.get("seconds")) or 0.0
        status.stall = f"step {step + 1} for {span(seconds)}: {stall.get('headline')}"
        status.stall += f"; see {stall.get('file')}"
    return status


def _take_word(status: RunStatus, own: dict[str, Any]) -> None:
    """Take what the supervisor says of the roles; what another version says in another form is left out."""
    alarms, servers, doing = own.get("alarms"), own.get("servers"), own.get("doing")
    status.roles, status.runs = _texts(own.get("roles")), _texts(own.get("runs"))
    status.alarms = [str(text) for text in alarms] if isinstance(alarms, list) else []
    if isinstance(servers, dict):
        status.servers = {str(k): load for k, load in servers.items() if isinstance(load, dict)}
    if isinstance(gpus := own.get("gpus"), dict):
        status.gpus = {str(host): use for host, use in gpus.items() if isinstance(use, dict)}
    for role, rows in doing.items() if isinstance(doing, dict) else ():
        status.doing[str(role)] = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _judge_submission(status: RunStatus, one: Evidence, queue: Queue, now: float) -> None:
    """Judge a run that was submitted (or only prepared) and of which no attempt has begun."""
    record = one.record
    if record is None and (roles := by_hand(one.path)):
        status.state, status.note = "by hand", f"nobody supervises what was started here: {', '.join(roles)}"
        return
    if record is None:
        status.note = "it was prepared, but nothing has started it"
        return
    state, age = record.get("state"), now - (number(record.get("time")) or now)
    if state == "failed":
        status.state, status.note = "failed", str(record.get("error") or "sbatch refused the job")
        _stay_as_before(status, one)
    elif state == "local":
        is_here = record.get("host") == socket.gethostname()
        lives = local_controller(one.path.resolve()) is not None if is_here else age < QUIET_S
        gone = "ended before an attempt began" if is_here else f"began no attempt in {span(age)}"
        status.state, status.note = ("starting", "as a local job") if lives else ("lost", f"the local job {gone}")
        if status.state == "lost":
            _stay_as_before(status, one)
    elif state == "sending" and (job := _sent(record, queue)) is None:
        status.state = "submitting" if queue.trouble or (age < SUBMITTING_S and _client_lives(record)) else "lost"
        status.note = (
            f"Slurm cannot be asked whether the job arrived: {queue.trouble}"
            if queue.trouble
            else "sbatch has not answered yet"
            if status.state == "submitting"
            else "the submission was interrupted, and Slurm has no job with its token: submit it again"
        )
        if status.state == "lost":
            _stay_as_before(status, one)
    else:
        job = job if state == "sending" else _find(queue, record, record.get("job_id"))
        _judge_waiting(status, job, queue, age, is_cancelled=_was_cancelled(record, job, number(record.get("time"))))


def _stay_as_before(status: RunStatus, one: Evidence) -> None:
    """Have a run that was over remain so where it was submitted again and no job came of it."""
    outcome = str((one.last or {}).get("outcome"))
    if outcome in _OVER:
        status.state, status.note = _OVER[outcome], f"submitted again since, in vain: {status.note}"


def _sent(record: SubmissionRecord, queue: Queue) -> "JobInfo | None":
    """Return the job of a submission whose answer was lost; of an array all tasks have the token, so that it names
    none."""
    return None if record.get("array") else queue.by_token(record.get("token"))


def _client_lives(record: SubmissionRecord) -> bool:
    """Return whether the command that is sending the job may still be at work (on another host nobody can tell)."""
    import psutil

    pid = integer(record.get("pid"))
    return pid is None or record.get("host") != socket.gethostname() or psutil.pid_exists(pid)


def _judge_waiting(status: RunStatus, job: "JobInfo | None", queue: Queue, age: float, *, is_cancelled: bool) -> None:
    """Judge a job that was sent and has not begun an attempt."""
    if job is not None and job.is_pending:
        _take_job(status, job, "pending")
        status.note = _why_pending(job)
    elif job is not None and job.is_active:
        _take_job(status, job, "starting")
        status.note = f"its nodes are {job.state.lower()}, no attempt has begun yet" if job.state != "RUNNING" else ""
    elif is_cancelled:
        status.state, status.note = "stopped", "cancelled before an attempt began"
    elif job is not None:
        _take_job(status, job, "lost")
        status.note = f"job {job.job_id} ended ({job.state}) before an attempt began"
        status.note += "; see its output (logs --role slurm)" if job.nodes else ""
    elif queue.trouble:
        status.state, status.note = "pending", f"Slurm cannot be asked: {queue.trouble}"
    else:
        status.state = "lost"
        status.note = f"job {status.job_id} is gone from Slurm and began no attempt (sent {span(age)} ago)"


def _judge_open(status: RunStatus, one: Evidence, queue: Queue, now: float) -> None:
    """Judge an attempt that wrote no end: alive, or gone without a word."""
    last, record = one.last or {}, one.record or {}
    reported = [t for t in (number(last.get("began")), status.word) if t is not None]
    silent = max(0.0, now - max(reported, default=0.0))
    if last.get("job_id") is None:
        status.job_id = None
        _judge_local(status, one, silent)
        return
    job = _find(queue, record, last.get("job_id"), record.get("job_id"))
    if job is None or not job.is_active:
        later = _find(queue, record, record.get("successor"))
        job = later if later is not None and _may_start(later) else job
    status.job_id = job.job_id if job else str(last["job_id"])
    if max(reported, default=0.0) > queue.asked and (job is None or job.is_pending):
        _alive(status, one, silent)  # the answer is of a moment before this attempt began
    elif job is None:
        if silent < (SILENT_S if queue.trouble else QUIET_S / 4):
            _alive(status, one, silent)
        else:
            status.state = "lost"
            gone = f"Slurm cannot be asked ({queue.trouble})" if queue.trouble else f"job {status.job_id} is gone"
            status.note = f"{gone}, and attempt {status.attempt} wrote no end; last word {span(silent)} ago"
    elif job.is_pending:
        _take_job(status, job, "requeued")
        status.note = "; ".join(filter(None, [f"attempt {status.attempt} wrote no end", _why_pending(job)]))
    elif not job.is_active:
        _take_job(status, job, "lost")
        status.note = f"Slurm says {job.state}{f' ({job.reason})' if job.reason else ''}"
        status.note += f", attempt {status.attempt} wrote no end"
    elif _is_next_attempt(job, last) and job.state == "COMPLETING":
        _take_job(status, job, "requeued")
        status.note = (
            f"Slurm still ends the last attempt on {job.nodes}; if that takes minutes, a node does not answer: it "
        )
        status.note += "must come back, or be set down by an admin, before the job starts again"
    elif _is_next_attempt(job, last):
        _take_job(status, job, "starting")
        status.note = f"a new attempt of job {job.job_id} (restart {job.restarts}); the last one wrote no end"
    else:
        _take_job(status, job, "running")
        _alive(status, one, silent)
        if job.state == "SUSPENDED":
            status.note = "suspended by Slurm; it goes on where it was when it is resumed"


def _judge_local(status: RunStatus, one: Evidence, silent: float) -> None:
    """Judge an open attempt without Slurm: its process is looked at where it is on this host."""
    from prime_hpc.store.attempts import is_held

    last = one.last or {}
    here = last.get("host") == socket.gethostname()
    known = last.keys() >= {"ended", "host", "pid", "began"}
    if (known and is_held(last)) if here else silent < SILENT_S:
        _alive(status, one, silent)
        return
    status.state = "lost"
    status.note = (
        f"process {last.get('pid')} is gone, and attempt {status.attempt} wrote no end"
        if here
        else f"no word from {last.get('host')} for {span(silent)}"
    )


def _alive(status: RunStatus, one: Evidence, silent: float) -> None:
    """State how an attempt goes on, by its own word."""
    word, last = one.word or {}, one.last or {}
    own = word.get("attempt") == last.get("attempt")
    # a supervisor that writes no status.json: the trainer's first row tells
    status.state = _LIVE_WORDS.get(str(word.get("state")), "running") if own else "starting"
    if not own and (last_row_time(one.path) or 0.0) >= (number(last.get("began")) or 0.0):
        status.state = "running"
    if own and word.get("state") == "preflight":
        status.note = "preflight"
    if own and silent > QUIET_S:
        status.note = f"no word from the supervisor for {span(silent)}"


def _judge_ended(status: RunStatus, one: Evidence, queue: Queue) -> None:
    """Judge an attempt that wrote its end: over, or about to come back."""
    last, record = one.last or {}, one.record or {}
    outcome = str(last.get("outcome"))
    status.job_id = None if last.get("job_id") is None else str(last["job_id"])
    status.note = "" if outcome == "completed" else str(last.get("cause") or outcome)
    if outcome in _OVER:
        status.state = _OVER[outcome]
        return
    status.state = "failed"
    job = _coming_back(queue, last, record)
    next_job = _find(queue, record, record.get("successor")) or job
    if job is not None and job.is_pending and _may_start(job):
        _take_job(status, job, "requeued")
        status.note = "; ".join(filter(None, [_why_pending(job), f"ended by: {status.note}"]))
    elif job is not None and job.is_active and not job.is_pending:
        if _is_next_attempt(job, last) and job.state == "COMPLETING":
            _take_job(status, job, "requeued")
            status.note = f"Slurm still ends the last attempt; ended by: {status.note}"
        elif _is_next_attempt(job, last):
            _take_job(status, job, "starting")
        elif last.get("next") == IN_PLACE:
            status.state = "starting"
        elif outcome != "failed" or _is_to_come_back(last):
            status.state = "requeued"
    elif _is_to_come_back(last) and _was_cancelled(record, next_job, number(last.get("ended"))):
        status.state = "stopped"
        status.note = f"cancelled before it came back; ended by: {status.note}"
    elif _is_to_come_back(last) and queue.trouble:
        status.state = "requeued"
        status.note += f"; Slurm cannot be asked: {queue.trouble}"
    elif _is_to_come_back(last):
        status.state = "lost"
        status.note = f"it was to come back ({status.note}), but job {status.job_id} is gone: cancelled?"


def _was_cancelled(record: SubmissionRecord, job: "JobInfo | None", since: float | None) -> bool:
    """Return whether a job that is over was taken out of the queue, by `cancel` (after `since`) or by scancel."""
    if job is not None and not job.is_active and job.state.startswith("CANCELLED"):
        return True
    return (number(record.get("cancelled")) or 0.0) > (since or math.inf)


def _is_to_come_back(last: AttemptRow) -> bool:
    """Return whether the supervisor had the job come back (it says so after it has written the attempt's end)."""
    return bool(last.get("next", last.get("outcome") == "requeued"))


def _find(queue: Queue, record: SubmissionRecord, *job_ids: Any) -> "JobInfo | None":
    """Return the first of these jobs that Slurm still knows and that is this run's.

    Slurm can use a job id again: the job must carry the token of the submission (one sent by hand has none).
    """
    tokens = {record.get("token"), record.get("successor_token")} - {None}
    known = (queue.jobs.get(str(i)) for i in job_ids if i is not None)
    return next((job for job in known if job is not None and (not tokens or job.token in tokens)), None)


def _coming_back(queue: Queue, last: AttemptRow, record: SubmissionRecord) -> "JobInfo | None":
    """Return the job that may bring a run back: one that waits before one that runs before one that ended."""
    ids = (last.get("job_id"), record.get("job_id"), record.get("successor"))
    found = [job for i in ids if (job := _find(queue, record, i)) is not None]
    return min(found, key=lambda job: (not job.is_pending, not job.is_active), default=None)


def _is_next_attempt(job: "JobInfo", last: AttemptRow) -> bool:
    """Return whether a running job is later than the attempt: another job, or the same one restarted."""
    known, restarts = str(last.get("job_id")), integer(last.get("restarts"))
    if job.job_id != known and "_" not in job.job_id:  # of an array's task the attempt knows the plain id
        return True
    return restarts is not None and job.restarts > restarts


def _may_start(job: "JobInfo") -> bool:
    """Return whether a job runs or can still come to run."""
    return job.is_active and job.reason != "DependencyNeverSatisfied"


def _take_job(status: RunStatus, job: "JobInfo", state: str) -> None:
    status.state, status.job_id = state, job.job_id
    status.slurm = f"{job.state} ({job.reason})" if job.reason else job.state
    if job.is_pending:
        status.starts = job.start
        status.nodes, status.roles = {}, {}
    elif job.is_active:
        status.time_left_s = job.time_left_s


def _why_pending(job: "JobInfo") -> str:
    held = " (held: `scontrol release` lets it go)" if "Held" in job.reason or job.state == "REQUEUE_HOLD" else ""
    return (job.reason or ("" if job.state == "PENDING" else job.state)) + held


def _hosts(nodes: Any, last: AttemptRow) -> dict[str, list[str]]:
    if isinstance(nodes, dict) and nodes:
        return {str(label): [str(h) for h in hosts] for label, hosts in nodes.items() if isinstance(hosts, list)}
    return {"supervisor": [str(last["host"])]} if last.get("host") else {}
