"""The state of a run, decided from its directory and Slurm's answer.

The run itself is not asked: it may be dead. What it wrote last, whether its job (or, without Slurm, its process) still
exists, and how long it has been silent decide.
"""

import math
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from prime_hpc.kubernetes.job_id import objects_of
from prime_hpc.launch.monitor.run_facts import UNDER_WAY, Evidence, Queue, RunStatus, integer, number, span
from prime_hpc.launch.monitor.run_progress import last_row_time
from prime_hpc.slurm.submission_record import local_controller
from prime_hpc.store.attempts import is_held, with_last_word
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
ENDED_BY = "; ended by: "
"""In a verdict's note, between what holds the job up and the end of the attempt before."""
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


class _Verdict(NamedTuple):
    """A run's state, and why."""

    state: str
    note: str = ""
    job: "JobInfo | None" = None
    """By which it is told."""


def judge(one: Evidence, queue: Queue, now: float) -> RunStatus:
    """Return the state of a run and why; besides these two, processes of this host and the trainer's rows are looked
    at."""
    record, last, word = one.record or {}, one.last, one.word or {}
    status = RunStatus(one.path.name, str(one.path), "not started", since=one.since or None)
    status.word = number(word.get("time"))
    is_new = _is_newer(one)
    if last is not None:
        status.attempt, status.why = last["attempt"], last.get("why")
        status.host, status.pid = last.get("host"), last.get("pid")
        own = word if word.get("attempt") == last["attempt"] else {}
        status.nodes = _hosts(own.get("nodes") or last.get("nodes"), last)
        _take_word(status, own)
    over = next((row for row in reversed(one.attempts) if row.get("ended") is not None), None)
    if over is not None:
        status.cause, status.outcome, status.ended = over.get("cause"), over.get("outcome"), number(over["ended"])
    status.step = integer(word.get("step"))
    if last is not None and not is_new and word.get("attempt") == last["attempt"]:  # the config may say more since
        status.max_steps = integer(word.get("max_steps"))
    if last is None or is_new:
        status.nodes, status.roles = {}, {}
        job_id = record.get("job_id") if record.get("state") != "local" else None
        verdict = _of_submission(one, queue, now)
    else:
        job_id = last.get("job_id")
        verdict = _of_open_attempt(one, queue, now) if last.get("ended") is None else _of_ended_attempt(one, queue)
        if verdict.state == "lost" and (told := with_last_word(last, one.word)) is not last:
            one.attempts[-1] = told  # a full disk took the end of it
            return judge(one, queue, now)
    if one.unreadable is not None and verdict.state not in UNDER_WAY:  # by what it wrote it may be anything
        verdict = verdict._replace(state="unreadable", note=one.unreadable)
    status.state, status.note, status.job_id = verdict.state, verdict.note, None if job_id is None else str(job_id)
    if verdict.job is not None:
        _take_job(status, verdict.job, max(0.0, now - queue.asked))
    is_over = is_new or status.state == "requeued" or (last is not None and last.get("ended") is not None)
    status.is_between = last is not None and is_over and status.is_under_way
    if status.is_final or status.is_between:
        status.roles, status.servers, status.gpus, status.doing = {}, {}, {}, {}  # what they were last
    if status.is_final:
        status.time_left_s = None
        return status
    status.no_successor = record.get("no_successor")
    if isinstance(stall := word.get("stall"), dict) and not status.is_between:
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


def _of_submission(one: Evidence, queue: Queue, now: float) -> _Verdict:
    """Judge a run that was submitted (or only prepared) and of which no attempt has begun."""
    record = one.record
    if record is None and (roles := by_hand(one.path)):
        return _Verdict("by hand", f"nobody supervises what was started here: {', '.join(roles)}")
    if record is None:
        return _Verdict("not started", "it was prepared, but nothing has started it")
    state, age = record.get("state"), now - (number(record.get("time")) or now)
    if state == "failed":
        return _in_vain(one, "failed", str(record.get("error") or "sbatch refused the job"))
    if state == "local":
        # a sweep's point has its record before its process
        is_told = record.get("host") == socket.gethostname() and record.get("job_id") is not None
        if local_controller(one.path.resolve()) is not None if is_told else age < QUIET_S:
            return _Verdict("starting", "as a local job")
        gone = (
            "ended before an attempt began; see its output (logs --role slurm)"
            if is_told
            else f"began no attempt in {span(age)}"
        )
        return _in_vain(one, "lost", f"the local job {gone}")
    if state != "sending":
        return _of_waiting_job(record, _find(queue, record, record.get("job_id")), queue, age)
    if (job := _sent(record, queue)) is not None:
        return _of_waiting_job(record, job, queue, age)
    if queue.trouble:
        return _Verdict("submitting", f"Slurm cannot be asked whether the job arrived: {queue.trouble}")
    if age < SUBMITTING_S and _client_lives(record):
        return _Verdict("submitting", "sbatch has not answered yet")
    words = "the submission was interrupted, and Slurm has no job with its token: submit it again"
    return _in_vain(one, "lost", words)


def _in_vain(one: Evidence, state: str, note: str) -> _Verdict:
    """Judge a submission of which no job came: a run that was over remains so."""
    outcome = str((one.last or {}).get("outcome"))
    if outcome in _OVER:
        return _Verdict(_OVER[outcome], f"submitted again since, in vain: {note}")
    return _Verdict(state, note)


def _sent(record: SubmissionRecord, queue: Queue) -> "JobInfo | None":
    """Return the job of a submission whose answer was lost; of an array all tasks have the token, so that it names
    none."""
    return None if record.get("array") else queue.by_token(record.get("token"))


def _client_lives(record: SubmissionRecord) -> bool:
    """Return whether the command that is sending the job may still be at work (on another host nobody can tell)."""
    import psutil

    pid = integer(record.get("pid"))
    return pid is None or record.get("host") != socket.gethostname() or psutil.pid_exists(pid)


def _of_waiting_job(record: SubmissionRecord, job: "JobInfo | None", queue: Queue, age: float) -> _Verdict:
    """Judge a job that was sent and has not begun an attempt."""
    if job is not None and job.is_pending:
        return _Verdict("pending", _why_pending(job), job)
    if job is not None and job.is_active:
        is_up = job.state == "RUNNING"
        note = "its nodes are being started" if job.is_waiting else f"its nodes are {job.state.lower()}"
        note = "" if is_up else f"{note}, no attempt has begun yet"
        return _Verdict("starting", note, job)
    if _was_cancelled(record, job, number(record.get("time"))):
        return _Verdict("stopped", "cancelled before an attempt began")
    if job is not None:
        note = f"job {job.job_id} ended ({job.state}) before an attempt began"
        return _Verdict("lost", note + ("; see its output (logs --role slurm)" if job.nodes else ""), job)
    if queue.trouble:
        return _Verdict("pending", f"Slurm cannot be asked: {queue.trouble}")
    return _Verdict(
        "lost", f"job {record.get('job_id')} is gone from Slurm and began no attempt (sent {span(age)} ago)"
    )


def _of_open_attempt(one: Evidence, queue: Queue, now: float) -> _Verdict:
    """Judge an attempt that wrote no end: alive, or gone without a word."""
    last, record = one.last or AttemptRow(), one.record or SubmissionRecord()
    heard = max(number(last.get("began")) or 0.0, one.heard)
    silent, no_end = max(0.0, now - heard), f"attempt {last['attempt']} wrote no end"
    if last.get("job_id") is None or objects_of(last["job_id"]) is not None:
        return _of_process(one, silent, no_end)
    job = _find(queue, record, last.get("job_id"), record.get("job_id"))
    if job is None or not job.is_active:
        later = _find(queue, record, record.get("successor"))
        job = later if later is not None and _may_start(later) else job
    if heard > queue.asked and (job is None or job.is_pending):
        return _alive(one, silent)  # the answer is of a moment before this attempt began
    asked = f"Slurm cannot be asked ({queue.trouble})" if queue.trouble else ""
    was_cancelled = (job is None or not job.is_active) and _was_cancelled(record, job, number(last.get("began")))
    if job is None and silent < (SILENT_S if queue.trouble else QUIET_S / 4):
        verdict = _alive(one, silent)
        words = ["cancelled" if was_cancelled else "", verdict.note, asked if verdict.note or was_cancelled else ""]
        return verdict._replace(note="; ".join(filter(None, words)))
    if was_cancelled and (job is not None or not asked):  # while Slurm had suspended it
        return _Verdict("stopped", f"cancelled, and {no_end}", job)
    if job is None:
        gone = asked or f"job {last['job_id']} is gone"
        return _Verdict("lost", f"{gone}, and {no_end}; last word {span(silent)} ago")
    if job.is_pending:
        return _Verdict("requeued", "; ".join(filter(None, [no_end, _why_pending(job)])), job)
    if not job.is_active:
        return _Verdict("lost", f"Slurm says {job.state}{f' ({job.reason})' if job.reason else ''}, {no_end}", job)
    if _is_next_attempt(job, last) and job.state == "COMPLETING":
        note = f"Slurm still ends the last attempt on {job.nodes}; if that takes minutes, a process there cannot be "
        note += "killed, and Slurm drains its node by itself, or a node does not answer: it must come back, or be set "
        note += "down by an admin, before the job starts again"
        return _Verdict("requeued", note, job)
    if _is_next_attempt(job, last):
        note = f"a new attempt of job {job.job_id} (restart {job.restarts}); the last one wrote no end"
        return _Verdict("starting", note, job)
    verdict = _alive(one, silent, job)
    if job.state == "SUSPENDED":
        return verdict._replace(note="suspended by Slurm; it goes on where it was when it is resumed")
    return verdict


def _of_process(one: Evidence, silent: float, no_end: str) -> _Verdict:
    """Judge an open attempt without Slurm: its process is looked at where it is on this host."""
    last = one.last or AttemptRow()
    here = last.get("host") == socket.gethostname()
    if is_held(last) if here else silent < SILENT_S:
        return _alive(one, silent)
    if here and _was_sent_since(one, last) and local_controller(one.path.resolve()) is not None:
        return _Verdict("starting", "as a local job")
    if here:
        return _Verdict("lost", f"process {last.get('pid')} is gone, and {no_end}")
    return _Verdict("lost", f"no word from {last.get('host')} for {span(silent)}")


def _was_sent_since(one: Evidence, last: AttemptRow) -> bool:
    return (number((one.record or {}).get("time")) or 0.0) > (number(last.get("began")) or 0.0)


def _alive(one: Evidence, silent: float, job: "JobInfo | None" = None) -> _Verdict:
    """Say how an attempt goes on, by its own word."""
    word, last = one.word or {}, one.last or {}
    own = word.get("attempt") == last.get("attempt")
    # a supervisor that writes no status.json: the trainer's first row tells
    state = _LIVE_WORDS.get(str(word.get("state")), "running") if own else "starting"
    if not own and (last_row_time(one.path) or 0.0) >= (number(last.get("began")) or 0.0):
        state = "running"
    note = "preflight" if own and word.get("state") == "preflight" else ""
    if own and silent > QUIET_S:
        note = f"no word from the supervisor for {span(silent)}"
    return _Verdict(state, note, job)


def _of_ended_attempt(one: Evidence, queue: Queue) -> _Verdict:
    """Judge an attempt that wrote its end: over, or about to come back."""
    last, record = one.last or AttemptRow(), one.record or SubmissionRecord()
    outcome = str(last.get("outcome"))
    cause = "" if outcome == "completed" else str(last.get("cause") or outcome)
    if outcome in _OVER:
        return _Verdict(_OVER[outcome], cause)
    job, comes_back = _coming_back(queue, last, record), _is_to_come_back(last)
    if job is not None and job.is_pending and _may_start(job):
        return _Verdict("requeued", f"{_why_pending(job)}{ENDED_BY}{cause}".removeprefix("; "), job)
    if job is not None and job.is_active and not job.is_pending:
        if _is_next_attempt(job, last) and job.state == "COMPLETING":
            return _Verdict("requeued", f"Slurm still ends the last attempt{ENDED_BY}{cause}", job)
        if _is_next_attempt(job, last):
            return _Verdict("starting", cause, job)
        if last.get("next") == IN_PLACE:
            return _Verdict("starting", cause)
        return _Verdict("requeued" if outcome != "failed" or comes_back else "failed", cause)
    if not comes_back:
        return _Verdict("failed", cause)
    if objects_of(last.get("job_id")) is not None:
        return _Verdict("requeued", f"its pod is made again{ENDED_BY}{cause}")
    next_job = _find(queue, record, record.get("successor")) or job
    if _was_cancelled(record, next_job, number(last.get("ended"))):
        return _Verdict("stopped", f"cancelled before it came back{ENDED_BY}{cause}")
    if queue.trouble:
        return _Verdict("requeued", f"{cause}; Slurm cannot be asked: {queue.trouble}")
    if next_job is not None and not next_job.is_active:
        over = f"it was to come back ({cause}), but job {next_job.job_id} is over ({next_job.state})"
        is_forgotten = last.get("next") == "requeue" and next_job.state == "FAILED"
        why = ": Slurm has forgotten the requeue, as a controller does that is killed in its first seconds"
        return _Verdict("lost", f"{over}{why if is_forgotten else ''}; `prime-hpc resume` goes on")
    return _Verdict("lost", f"it was to come back ({cause}), but job {last.get('job_id')} is gone: cancelled?")


def _was_cancelled(record: SubmissionRecord, job: "JobInfo | None", since: float | None) -> bool:
    """Return whether a job that is over was cancelled, by `cancel` (after `since`) or by scancel."""
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
    was_sent_by_hand = record.get("command") == [] and not record.get("array")
    tokens |= {None} if was_sent_by_hand else set()  # its successor has one
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


def _take_job(status: RunStatus, job: "JobInfo", age_s: float) -> None:
    """Take over what Slurm said of the job so long ago."""
    status.job_id = job.job_id
    status.slurm = f"{job.state} ({job.reason})" if job.reason else job.state
    if job.is_pending:
        status.starts = job.start
        status.nodes, status.roles = {}, {}
    elif job.is_active and job.time_left_s is not None:
        status.time_left_s = max(0.0, job.time_left_s - (age_s if job.state == "RUNNING" else 0.0))


def _why_pending(job: "JobInfo") -> str:
    from prime_hpc.slurm.queue_facts.waiting import hint

    remedy = f" ({words})" if (words := hint(job)) else ""
    return (job.reason or ("" if job.state == "PENDING" else job.state)) + remedy


def _hosts(nodes: Any, last: AttemptRow) -> dict[str, list[str]]:
    if isinstance(nodes, dict) and nodes:
        return {str(label): [str(h) for h in hosts] for label, hosts in nodes.items() if isinstance(hosts, list)}
    return {"supervisor": [str(last["host"])]} if last.get("host") else {}
