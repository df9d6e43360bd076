"""End a run in good order.

A running job is asked by the file STOP, which its supervisor obeys: it saves and ends. Slurm is told only where that
does not help, or where nothing runs yet. No job is ended that does not carry the run's own token.
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Problem
from prime_hpc.config.run_files import ATTEMPTS_JSONL, STATUS_JSON, STOP
from prime_hpc.kubernetes.job_id import objects_of
from prime_hpc.launch.how_ended import how_it_ended, is_well, last_row, newest_words, own_end, saved_step
from prime_hpc.runtime.clock import Backoff
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, on_cluster, run_slurm
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.slurm.queue import jobs_of
from prime_hpc.slurm.sbatch_errors import SlurmRefused, jobs_of_cut_off_submit
from prime_hpc.slurm.submission_record import (
    SubmissionUnderWay,
    add_to_record,
    cluster_of,
    is_being_sent,
    local_controller,
)
from prime_hpc.store.attempts import is_held, read_attempts
from prime_hpc.store.run_dirs import (
    IN_PLACE,
    AttemptRow,
    SubmissionRecord,
    known_record,
    read_json,
    read_record,
    read_rows,
)
from prime_hpc.store.run_paths import other_owner

POLL_S, LONGEST_POLL_S = 1.0, 10.0
ASK_EVERY_S, LONGEST_ASK_S = 5.0, 30.0
GONE_TIMEOUT_S = 120.0
"""After scancel: KillWait is 30 s on most sites, the epilog comes on top."""
PROCESS_GONE_S = 60.0
_TELL_EVERY_S = 30.0

Say = Callable[[str], None]


@dataclass
class Ended:
    """Result of ending a run."""

    run_dir: str
    ended: bool
    """True if nothing of it waits or runs any more."""
    outcome: str
    """`pending` (never began), `stopped` (saved), `cancelled`, `over` (it ended by itself), or `unknown`: it may be
    there yet."""
    note: str
    job_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def cancel_run(run_dir: Path, *, now: bool, timeout_s: float, say: Say) -> Ended:
    """End a run and its successor.

    Args:
        now: do not let it save.
        timeout_s: so long it may take to save; then it is ended all the same.

    Raises:
        SlurmRefused: Slurm cannot be asked whether there is a job, or be told to end it.
        SubmissionUnderWay: it is being submitted right now.
        ConfigError: its directory cannot be written, so that it cannot be asked to save.
    """
    with on_cluster(cluster_of(run_dir, known_record)):
        return _Cancel(run_dir, now, timeout_s, say).run()


@dataclass(frozen=True)
class _Cancel:
    """The end of one run; arguments as of `cancel_run`."""

    run_dir: Path
    now: bool
    timeout_s: float
    say: Say

    def run(self) -> Ended:
        try:
            active = [info for info in self._all_jobs() if info.is_active]
            return self._jobs(active) if active else self._without_job()
        except SlurmError as error:
            touch = f"touch {shlex.quote(str(self.run_dir / STOP))}"
            stop = f"; `{touch}` has one that runs save and end, without Slurm" if error.is_unreachable else ""
            theirs = None if error.is_unreachable else other_owner(self.run_dir)
            words = f"{self.run_dir}: {error}{stop}" if theirs is None else f"{error}; {theirs}, who alone can end it"
            raise SlurmRefused(Problem(words)) from error

    def _all_jobs(self) -> list[JobInfo]:
        """Return the run's jobs; that of a submit that was cut off may come a moment later."""
        record = known_record(self.run_dir) or SubmissionRecord()
        if record.get("state") != "sending":
            return jobs_of(self.run_dir)
        if is_being_sent(self.run_dir):
            raise SubmissionUnderWay(Problem(f"{self.run_dir} is being submitted right now: try again after that"))
        return jobs_of_cut_off_submit(record["token"], record["time"], self.run_dir, "name")

    def _ended(self, outcome: str, note: str, job_id: str | None = None, *, ended: bool = True) -> Ended:
        return Ended(str(self.run_dir), ended, outcome, note, job_id)

    def _jobs(self, active: list[JobInfo]) -> Ended:
        # a successor takes over whenever the job before it ends otherwise than well: it goes first
        waiting = [info for info in reversed(active) if info.is_waiting]
        for info in waiting:
            run_slurm(["scancel", info.job_id], ASK_TIMEOUT_S)
            self._note_cancel()
        running = [info for info in active if not info.is_waiting]
        if running:
            if running[0].state == "SUSPENDED" and not self.now:
                self._tell(
                    "Slurm has suspended the job: it saves when it goes on; --now ends it at once, without a save"
                )
            return self._running_job(running[0].job_id)
        ids = {info.job_id for info in waiting}
        try:
            there = [info for info in jobs_of(self.run_dir) if info.job_id in ids]
            left = next((info.job_id for info in there if info.is_pending), None)
            if left is not None and self._wait_for_job(left) is not None:  # scancel said nothing, and did nothing
                return self._not_gone(left)
        except (SlurmError, OSError) as error:
            return self._not_gone(waiting[-1].job_id, error)
        began = [info for info in there if info.nodes]
        if began:  # before scancel came: it is ended like one that ran
            return replace(self, now=True)._running_job(began[0].job_id)
        return self._ended("pending", "it was waiting; taken out of the queue", waiting[-1].job_id)

    def _running_job(self, job_id: str) -> Ended:
        row = None if self.now else self._stop_and_wait(f"job {job_id}", job_id)
        if row is None:
            if not self.now:
                self._tell(f"not ended by itself; ending job {job_id}")
            run_slurm(["scancel", job_id], ASK_TIMEOUT_S)
        self._note_cancel()
        try:
            state = self._wait_for_job(job_id)
            is_over = state == "COMPLETING" and row is not None and row.get("next") is None
            if state is not None and row is not None and not is_over:  # another attempt began in it
                self._tell(f"job {job_id} goes on after its attempt ended; ending it")
                run_slurm(["scancel", job_id], ASK_TIMEOUT_S)
                state = self._wait_for_job(job_id)
        except (SlurmError, OSError) as error:
            return self._not_gone(job_id, error)
        if state is not None and not is_over:
            return self._not_gone(job_id)
        step = saved_step(self.run_dir, job_id)
        if row is not None:
            outcome, how = own_end(self.run_dir, row, step)
            return self._ended(outcome, how + ("; Slurm still cleans up its nodes" if is_over else ""), job_id)
        return self._ended("cancelled", f"ended without a new save{newest_words(self.run_dir, step)}", job_id)

    def _not_gone(self, job_id: str, trouble: SlurmError | OSError | None = None) -> Ended:
        """Say that Slurm was told to end a job, and that it is not known to have left its nodes."""
        still = f"still ends after {GONE_TIMEOUT_S:.0f} s; see squeue"
        unknown = f"was asked to end; whether it has cannot be asked: {trouble}"
        return self._ended("unknown", f"job {job_id} {unknown if trouble else still}", job_id, ended=False)

    def _wait_for_job(self, job_id: str) -> str | None:
        """Wait for the job to leave its nodes. Returns the state in which it has not; None: it has. Raises SlurmError,
        OSError where that cannot be told until the deadline."""
        state: str | None = None
        began, pause = time.monotonic(), Backoff(POLL_S, LONGEST_POLL_S)
        trouble: SlurmError | OSError | None = None
        while time.monotonic() - began < GONE_TIMEOUT_S:
            try:
                if (state := self._state_of(job_id)) is None:
                    return None
                trouble = None
            except (SlurmError, OSError) as error:  # a controller that is busy with the end of many, a disk
                trouble = error
            time.sleep(pause.next())
        if trouble is not None:
            raise trouble
        return state

    def _state_of(self, job_id: str) -> str | None:
        """Return the job's state, None: it has ended; what of the run waits meanwhile is taken out of the queue. Raises
        SlurmError."""
        active = [info for info in jobs_of(self.run_dir) if info.is_active]
        for info in active:
            if info.is_pending:  # it had requeued itself a moment before, or queued its successor
                run_slurm(["scancel", info.job_id], ASK_TIMEOUT_S)
        return next((info.state for info in active if info.job_id == job_id), None)

    def _is_on_nodes(self, job_id: str) -> bool:
        """Return whether the job may still have a process on its nodes, as far as can be told now: after its attempt's
        end Slurm may clean up there for long."""
        try:
            active = [info for info in jobs_of(self.run_dir) if info.is_active and not info.is_pending]
        except (SlurmError, OSError):
            return True  # a controller that restarts ends no job
        is_over = self._ended_attempt(job_id) is not None
        return any(info.job_id == job_id and not (is_over and info.state == "COMPLETING") for info in active)

    def _note_cancel(self) -> None:
        if read_record(self.run_dir) is not None:
            add_to_record(self.run_dir, cancelled=time.time(), successor=None)

    def _without_job(self) -> Ended:
        """End a process of this host, where there is one: it may be another's, or nothing at all."""
        from prime_hpc.launch.local import end_local

        rows, controller = read_attempts(self.run_dir / ATTEMPTS_JSONL), local_controller(self.run_dir)
        if not rows and controller is not None:
            end_local(self.run_dir, controller)
            return self._ended("cancelled", "the local job had not begun; ended", str(controller))
        if rows and (name := objects_of(rows[-1].get("job_id"))) is not None and _is_to_go_on(rows[-1]):
            return self._pods(name)
        if not rows or rows[-1].get("job_id") is not None or not is_held(own := rows[-1]):
            return self._ended("over", how_it_ended(self.run_dir, rows))
        row = None if self.now else self._stop_and_wait(f"process {own['pid']}", process=own)
        if row is not None:
            self._wait_for_process(own)
            return self._ended(*own_end(self.run_dir, row, saved_step(self.run_dir)))
        if not is_held(own) and local_controller(self.run_dir) is None:  # it was killed meanwhile
            return self._ended("over", how_it_ended(self.run_dir, read_rows(self.run_dir / ATTEMPTS_JSONL)))
        end_local(self.run_dir, local_controller(self.run_dir))
        if self._wait_for_process(own):
            return self._ended("cancelled", "ended without a new save")
        return self._ended("unknown", f"process {own['pid']} still ends; see ps", ended=False)

    def _pods(self, name: str) -> Ended:
        """End a run in pods, of which nobody here can make sure: it is asked by the file alone."""
        row = None if self.now else self._stop_and_wait(f"the pods of {name}")
        row = row or last_row(self.run_dir)  # it crashed for good meanwhile
        if row is not None and not _is_to_go_on(row):
            return self._ended(*own_end(self.run_dir, row, saved_step(self.run_dir)))
        how = f"kubectl delete job -l app.kubernetes.io/instance={name}"
        return self._ended("unknown", f"Kubernetes alone ends its pods: `{how}`", ended=False)

    def _wait_for_process(self, row: AttemptRow) -> bool:
        """Wait for the supervisor, and for submitit's process that watches it."""
        began = time.monotonic()
        while is_held(row | {"ended": None}) or local_controller(self.run_dir) is not None:
            if time.monotonic() - began > PROCESS_GONE_S:
                return False
            time.sleep(0.2)
        return True

    def _stop_and_wait(
        self, whom: str, job_id: str | None = None, process: AttemptRow | None = None
    ) -> AttemptRow | None:
        """Ask by file; returns the attempt with which the run has ended. None: it has not in time, or cannot any more.

        The file does not outlive the wait: it would stop the run's next attempt at its first step. The newest attempt
        may be over before it is asked: of a job that was requeued under its id, and has not written its new attempt's
        line yet. After a crash another attempt may follow in the same job, which its line says a moment later.

        Args:
            job_id: of its Slurm job, if it is one.
            process: without Slurm, the open attempt whose process it is.
        """
        stop, over_before = self.run_dir / STOP, (self._ended_attempt(job_id) or {}).get("attempt")
        try:
            stop.touch()
        except OSError as error:
            without = f"`prime-hpc cancel --now {shlex.quote(str(self.run_dir))}` does without"
            theirs = other_owner(self.run_dir)
            hint = without if theirs is None else f"{theirs}, who alone can end it"
            raise ConfigError(f"{stop} cannot be written: {error.strerror}; {hint}") from error
        self._tell(f"asked {whom} to save and end; waiting up to {self.timeout_s:.0f} s")
        began = asked = told = time.monotonic()
        pause, ask_pause = Backoff(POLL_S, ASK_EVERY_S), Backoff(ASK_EVERY_S, LONGEST_ASK_S)
        next_ask_s = ask_pause.next()
        try:
            while (passed := time.monotonic() - began) < self.timeout_s:
                lives = process is None or is_held(process)
                if job_id is not None and time.monotonic() - asked >= next_ask_s:
                    asked, next_ask_s = time.monotonic(), ask_pause.next()
                    lives = self._is_on_nodes(job_id)  # not: requeued meanwhile, or killed; scancel makes sure
                row = self._ended_attempt(job_id)  # read last: it may be the last word of a process
                if row is not None and row.get("next") == IN_PLACE:
                    stop.touch()  # the attempt that follows is asked as well
                elif row is not None and row["attempt"] != over_before and (_is_last(row) or not lives):
                    return row
                if not lives:  # of a row that stood there before: the run had ended, and its job was on its way out
                    return row if row is not None and row.get("next") is None else None
                if time.monotonic() - told >= _TELL_EVERY_S:
                    told = time.monotonic()
                    word = read_json(self.run_dir / STATUS_JSON) or {}
                    self._tell(f"{word.get('state', 'running')}, step {word.get('step', '?')}, {passed:.0f} s")
                time.sleep(pause.next())
            return None
        finally:
            stop.unlink(missing_ok=True)

    def _ended_attempt(self, job_id: str | None) -> AttemptRow | None:
        """Return the newest attempt, if it is this job's and over."""
        row = last_row(self.run_dir, job_id)
        return row if row is not None and row.get("ended") is not None else None

    def _tell(self, words: str) -> None:
        self.say(f"{self.run_dir}: {words}")


def _is_to_go_on(row: AttemptRow) -> bool:
    """Return whether an attempt has no end, or was to be followed by another one."""
    return row.get("ended") is None or row.get("next") is not None


def _is_last(row: AttemptRow) -> bool:
    """Return whether an attempt that has ended says how the run goes on: after a crash that comes a moment later."""
    return is_well(row) or row.get("next") is not None
