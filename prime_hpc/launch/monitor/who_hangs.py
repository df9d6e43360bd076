"""`prime-hpc why`: who holds a run up now, asked in ways of which each has a deadline.

The run directory is read in a thread that is given up when its file system hangs. The processes are looked at by
another process (`supervisor.stalls.on_node`), here or through srun on the nodes of the job; where that is not possible
the supervisor is asked by a file, and asks its agents. Nobody who could not end the run's processes can ask them.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.monitor.run_facts import Queue, RunStatus, read_evidence
from prime_hpc.launch.monitor.status import ask_slurm, status_of
from prime_hpc.slurm.client import SlurmError, clean_environment
from prime_hpc.slurm.hostlist import compress_hosts, expand_hosts
from prime_hpc.slurm.jobs import JobInfo, jobs
from prime_hpc.slurm.submission_record import cluster_of
from prime_hpc.store.run_dirs import find_run, outputs_folder
from prime_hpc.store.run_paths import other_owner
from prime_hpc.supervisor.stalls.collect import WHY, Seen, from_lines, report

READ_WITHIN_S = 8.0
"""A run directory that cannot be read for so long hangs."""
ASK_WITHIN_S = 90.0
"""For so long at most Slurm's commands, which have deadlines of their own, may be silent."""
_MODULE = "prime_hpc.supervisor.stalls.on_node"
T = TypeVar("T")


class GaveUpError(Exception):
    """No answer within a deadline."""


@dataclass(frozen=True)
class Target:
    """A run that may be looked at; `status` is None where its directory does not answer."""

    path: Path
    status: RunStatus | None
    job: JobInfo | None = None


def within(seconds: float, question: Callable[[], T]) -> T:
    """Ask in a thread, and give up on it after so long. Raises what the question raises, or GaveUpError."""
    answer: list[T] = []
    trouble: list[Exception] = []

    def ask() -> None:
        try:
            answer.append(question())
        except Exception as error:  # noqa: BLE001 - raised again below
            trouble.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if trouble:
        raise trouble[0]
    if not answer:
        raise GaveUpError
    return answer[0]


def find_target(word: str) -> Target:
    """Find the run; where its file system hangs, what is known of it without.
    Raises ConfigError: there is no such run, or it is another user's, who lets nobody ask."""

    def read() -> Path:
        path = find_run(word).absolute()
        read_evidence(path)
        return path

    def ask(path: Path) -> Target:
        answers: list[Queue] = []

        def heard(wanted: set[str], by_token: bool) -> Queue:
            answers.append(ask_slurm(wanted, by_token))
            return answers[-1]

        status = status_of(path, ask=heard)
        theirs = other_owner(path) if os.geteuid() and not why_idle(status) else None  # root may look at all
        if theirs and not os.access(path, os.W_OK):  # who may write there asks by a file
            raise ConfigError(
                f"{theirs}, who alone can look at its processes; `status` and `logs` say what its files say"
            )
        job_id = None if why_idle(status) or cluster_of(path) is not None else status.job_id  # srun reaches no other
        # not asked again: a controller that is silent would be so for as long once more
        return Target(path, status, next((one.jobs.get(job_id) for one in answers), None) if job_id else None)

    try:
        path = within(READ_WITHIN_S, read)
        return within(READ_WITHIN_S + ASK_WITHIN_S, lambda: ask(path))  # a silent controller is no silent file system
    except GaveUpError:
        path = Path(word) if Path(word).is_absolute() or "/" in word else outputs_folder() / word
        return Target(path.absolute(), None, _job_by_name(path.name))


def why_idle(status: RunStatus) -> str:
    """Return why nothing of the run can be looked at; "" where its processes should be there."""
    note = f": {status.note}" if status.note else ""
    if status.is_final:
        return f"the run is over ({status.state}){note}"
    if status.state in ("pending", "requeued", "submitting"):
        return f"the run waits in the queue, {status.state}{note}"
    if status.slurm is not None and status.slurm.startswith("CONFIGURING"):
        return "its nodes are being started (CONFIGURING), and nothing of the run is there yet: `scontrol show node`"
    if status.state in ("not started", "by hand", "unreadable"):
        return f"the run is {status.state}{note}"
    return ""


def _job_by_name(name: str) -> JobInfo | None:
    """Find the job of a run whose directory cannot be read, among this user's."""
    try:
        mine = jobs(None).values()
    except SlurmError:
        return None
    return next((job for job in mine if name in (job.name, job.job_id) and job.is_active), None)


def ask_why(target: Target, *, patience_s: float, timeout_s: float) -> dict[str, Any]:
    """Look at the run's processes and name who holds it up; see `stalls.collect.report`.
    `patience_s`: a wait that has lasted longer is a hang."""
    facts: dict[str, Any] = {"slurm": _slurm(target.job)}
    status = target.status
    if status is not None:
        facts |= {"state": status.state, "step": status.step, "attempt": status.attempt, "stall": status.stall}
    nodes, silent, trouble = _look(target, timeout_s)
    if not any(seen["rows"] for seen in nodes) and status is not None:
        answer = _ask_supervisor(target.path, status, timeout_s)
        if answer is not None:
            return {**answer, **facts}
    if status is None:
        silent_files = {"hangs": READ_WITHIN_S}
        nodes = nodes or [{"host": socket.gethostname(), "rows": [], "probe": silent_files, "gpus": []}]
        nodes[0]["probe"] = nodes[0]["probe"] if "hangs" in nodes[0]["probe"] else silent_files
    document = report(target.path, nodes, patience_s=patience_s, facts=facts, silent=silent)
    if trouble:
        document["diagnosis"]["evidence"].append(trouble)
    return document


def _slurm(job: JobInfo | None) -> str:
    if job is None:
        return ""
    left = f", {job.time_left_s:.0f} s of its time are left" if job.time_left_s is not None else ""
    return f"job {job.job_id} is {job.state}{f' ({job.reason})' if job.reason else ''} on {job.nodes}{left}"


def _look(target: Target, timeout_s: float) -> tuple[list[Seen], list[str], str]:
    """Return what the nodes have seen, those that said nothing, and what went wrong."""
    job = target.job
    if job is None or not job.nodes:
        pids = _supervisor_here(target.status)
        words = [sys.executable, "-P", "-m", _MODULE, str(target.path), *map(str, pids)]
        nodes, trouble = _run(words, dict(os.environ), timeout_s)
        return nodes, [], trouble
    parts = job.components or (job,)
    results: dict[int, tuple[list[Seen], str]] = {}
    hosts = {n: expand_hosts(part.nodes) for n, part in enumerate(parts)}

    def ask(number: int) -> None:
        group = number if len(parts) > 1 else None
        command = _srun(job.raw_id or job.job_id, hosts[number], group, target.path)
        results[number] = _run(command, clean_environment(os.environ), timeout_s)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 5.0)
    nodes = [seen for found, _ in results.values() for seen in found]
    spoken = {seen["host"] for seen in nodes}
    silent = [host for group in hosts.values() for host in group if host not in spoken]
    return nodes, silent, "; ".join(trouble for _, trouble in results.values() if trouble)


def _supervisor_here(status: RunStatus | None) -> list[int]:
    """Return the process of a supervisor on this machine, for runs whose processes say nothing of themselves."""
    if status is None or status.pid is None or status.host != socket.gethostname():
        return []
    return [status.pid]


def _srun(job_id: str, hosts: Sequence[str], group: int | None, path: Path) -> list[str]:
    """Return the command that looks at each node of a job, beside whatever runs there."""
    count = len(hosts)
    command = ["srun", f"--jobid={job_id}", *([] if group is None else [f"--het-group={group}"]), "--overlap"]
    command += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={compress_hosts(hosts)}"]
    command += ["--cpu-bind=none", "--input=none", "--export=ALL", "--kill-on-bad-exit=0", "--chdir=/"]
    return [*command, "--job-name=why", sys.executable, "-P", "-m", _MODULE, str(path)]


def _run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> tuple[list[Seen], str]:
    """Run a look and return what came, also of one that had to be given up; and what it complained of."""
    try:
        process = subprocess.Popen(
            command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return [], f"{command[0]}: {error.strerror or error}"
    trouble = ""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        trouble = f"not every node answered within {timeout_s:g} s"
        try:
            output, errors = process.communicate(timeout=2.0)
        except subprocess.TimeoutExpired as error:  # held by the kernel: not even SIGKILL ends it
            output, errors = error.output or b"", b""
    nodes = from_lines(output.decode(errors="replace").splitlines())
    if not trouble and process.returncode:
        trouble = (errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return nodes, trouble


def _ask_supervisor(path: Path, status: RunStatus, timeout_s: float) -> dict[str, Any] | None:
    """Have the supervisor ask its agents: by a file, as for SAVE; None where no answer comes."""
    folder = path / "logs" / f"attempt_{status.attempt}" / "stalls"

    def ask() -> dict[str, Any]:
        before = set(folder.glob("asked_*.json"))  # by name: its node's clock may be behind this one's
        (path / WHY).touch()
        while not (answers := set(folder.glob("asked_*.json")) - before):
            time.sleep(0.5)
        document: dict[str, Any] = json.loads(max(answers).read_text(encoding="utf-8"))
        return document

    try:
        return within(timeout_s, ask)
    except (GaveUpError, OSError, ValueError):
        return None
