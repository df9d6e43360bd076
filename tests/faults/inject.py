"""What goes wrong in one process of a run, and where: read from the environment by the harness's own entry, not by
prime_hpc.

`FAULTS` is a `Plan` as JSON. Every process of the attempt is told the same plan; the role that it names carries it out
at the n-th time that it does this operation on this path. Roles: supervisor (with the command `rl` around it),
orchestrator, rank0, rank1; torchrun and the reaper change no file. Nor do env_host and env_worker, which play episodes
in the profile `envs`: their operations are the messages that they take and say, for as long as nobody was struck (all
workers are told the same plan).

Called by `fork` in each child, and by `site/sitecustomize.py` in processes that are really started anew.
"""

import errno
import functools
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTS = "FAULTS"
ROLES = ("supervisor", "orchestrator", "rank0", "rank1", "env_host", "env_worker")
_WRITER = re.compile(r"-[A-Za-z0-9.]+-\d+-[0-9a-f]{8}(?=/|$)")
_LIFE = re.compile(r"-i\d{4}(?=-|/|$)")
UPDATE = "update"
"""Operation of a rank that changes no file: an optimizer step."""
WITHOUT_SPACE = ("create", "write", "torn", "fsync", "mkdir")
"""Operations that a full disk refuses; it still renames and removes."""


@dataclass(frozen=True)
class Plan:
    """One fault, or a record of where there could be one."""

    scratch: str
    """Directory of the life: pids, the record, the mark `reached`."""
    run_dir: str
    role: str = ""
    """Who; empty: only record."""
    operation: str = ""
    path: str = ""
    """Normalised, see `normal`."""
    number: int = 1
    """Which time."""
    how: str = "kill"
    """`kill` this process; `kill-all`; `stop` this process and all others (SIGSTOP); ENOSPC, EDQUOT or EIO from then
    on; `once:ENOSPC` and so on only there; `read:EIO/once`, `read:EIO/for-ever` of a read (`operation` open, read,
    stat, list, `path` beginning with `run/`)."""
    host: str = ""
    """Name of the machine that this attempt's supervisor believes to be on; empty: the real one."""

    def environment(self) -> dict[str, str]:
        """What a process of the attempt is told."""
        return {FAULTS: json.dumps(asdict(self))}


def normal(path: Path, run_dir: str) -> str:
    """A path below the run directory without what differs between attempts and writers."""
    text = os.path.relpath(path, run_dir)
    return _LIFE.sub("-i*", _WRITER.sub("-*", text))


def role_of(module: str) -> str:
    """The role that `python -m module` plays."""
    if module in ("tests.faults.entry", "prime_hpc.supervisor.main"):
        return "supervisor"
    if module == "prime_hpc.trainer.main":
        return f"rank{os.environ.get('RANK', '0')}"
    return {
        "prime_hpc.orchestrator.main": "orchestrator",
        "prime_hpc.trainer.torchrun": "torchrun",
        "prime_hpc.envs.workers.host": "env_host",
    }.get(module, "other")


def begin(module: str) -> None:
    """Take part in the plan, if there is one."""
    from prime_hpc.store import attempts
    from prime_hpc.store.io import files

    files._observers.clear()  # a fork's parent's own
    text = os.environ.get(FAULTS)
    if text is None:
        return
    plan = Plan(**json.loads(text))
    if plan.host and role_of(module) == "supervisor":
        attempts.Attempt = functools.partial(attempts.Attempt, host=plan.host)  # type: ignore[misc,assignment]
    _take_part(plan, role_of(module))


def _take_part(plan: Plan, role: str) -> "Fault":
    """Be counted among the attempt's processes, and watch this one."""
    (Path(plan.scratch) / "pids" / str(os.getpid())).write_text(role)
    if (Path(plan.scratch) / "all").exists():  # forked while all were being ended
        os.kill(os.getpid(), signal.SIGKILL)
    fault = Fault(plan, role)
    fault.arm()
    if role.startswith("rank"):
        _watch_updates(plan, fault)
    return fault


class Fault:
    """The plan in one process."""

    def __init__(self, plan: Plan, role: str) -> None:
        self._plan, self.role = plan, role
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._broken = False
        self._record = -1
        if not plan.role:
            name = Path(plan.scratch) / f"record.{role}"
            self._record = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def arm(self) -> None:
        """Watch this process's operations until it ends."""
        from prime_hpc.store.io import files

        if self.role == self._plan.role and self._plan.how.startswith("read:"):
            self._break_reads()
        elif self.role == "env_host":
            _watch_messages(self._plan, self)
        elif self.role != "env_worker" and (self.role == self._plan.role or not self._plan.role):
            files._observers.append(self.observe)

    def _break_reads(self) -> None:
        """See `reads`; waits of minutes are moments."""
        from prime_hpc.supervisor.attempt import early_end
        from tests.faults.reads import Fault as ReadFault
        from tests.faults.reads import ReadFaults

        plan = self._plan
        how, _, duration = plan.how.removeprefix("read:").partition("/")
        fault = ReadFault(plan.operation, plan.path, plan.number, how, duration == "for-ever")
        faults = ReadFaults({"run": Path(plan.run_dir)}, fault)
        faults.on_strike = (Path(plan.scratch) / "reached").touch
        faults.install()
        early_end.LOAD_S = 1.0
        if self.role.startswith("rank"):
            from prime_hpc.trainer.checkpointing import resume, verify

            resume.READ_S = verify.READ_S = 1.0

    def message(self, operation: str, op: str) -> None:
        """A message was taken, or is about to be said."""
        is_meant = not self._plan.role or self.role == self._plan.role
        if op != "beat" and is_meant and not (Path(self._plan.scratch) / "reached").exists():  # beats: as status.json
            self.observe(operation, Path(self._plan.run_dir) / "messages" / op)

    def observe(self, operation: str, path: Path) -> None:
        """An operation is about to happen (`torn`: a write is half done)."""
        plan = self._plan
        where = normal(path, plan.run_dir)
        if where.removeprefix(".tmp-").startswith("status.json"):  # every few seconds: how often, the machine decides
            return
        with self._lock:
            self._counts[operation, where] += 1
            number = self._counts[operation, where]
        if self._record >= 0:
            os.write(self._record, (json.dumps([operation, where, number]) + "\n").encode())
            return
        kind = plan.how.removeprefix("once:")
        if self._broken:
            self._refuse(kind, operation, path)
        if (operation, where, number) == (plan.operation, plan.path, plan.number):
            (Path(plan.scratch) / "reached").touch()
            if plan.how in ("kill", "kill-all", "stop"):
                self._strike(plan.how)
            else:
                self._broken = not plan.how.startswith("once:")
                self._refuse(kind, operation, path)

    def _refuse(self, kind: str, operation: str, path: Path) -> None:
        if kind == "EIO" or operation in WITHOUT_SPACE:
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number), str(path))

    def _strike(self, how: str) -> None:
        number = signal.SIGSTOP if how == "stop" else signal.SIGKILL
        scratch = Path(self._plan.scratch)
        if how != "kill":
            (scratch / "all").touch()
            strike_all(scratch, number)
        os.kill(os.getpid(), number)
        if number == signal.SIGKILL:
            time.sleep(60)  # a signal to oneself comes at the next chance


def _watch_updates(plan: Plan, fault: Fault) -> None:
    """In a rank of the trainer: see each optimizer step before it is taken. Nothing is written, so no disk fails."""
    from prime_hpc.trainer.train_step import TrainStep

    update = TrainStep._update

    def seen(*arguments: Any) -> None:
        fault.observe(UPDATE, Path(plan.run_dir) / "updates")
        update(*arguments)

    if not plan.role or (plan.operation == UPDATE and plan.role == fault.role):
        TrainStep._update = seen  # type: ignore[method-assign,assignment]


def _watch_messages(plan: Plan, of_host: Fault) -> None:
    """In a host of environments' workers: see its messages, and those of the workers that it forks."""
    from prime_hpc.envs.workers import frames, worker

    current = [of_host]
    feed, pack, work = frames.Unpacker.feed, frames.pack, worker.work

    def seen_feed(unpacker: frames.Unpacker, data: bytes) -> list[dict[str, Any]]:
        found = feed(unpacker, data)
        for message in found:
            current[0].message("take", message["op"])
        return found

    def seen_pack(op: str, **fields: Any) -> bytes:
        current[0].message("say", op)
        return pack(op, **fields)

    def seen_work(*arguments: Any) -> None:
        current[0] = _take_part(plan, "env_worker")
        work(*arguments)

    frames.Unpacker.feed = seen_feed  # type: ignore[method-assign,assignment]
    frames.pack = worker.pack = seen_pack
    worker.work = seen_work  # type: ignore[assignment]


def strike_all(scratch: Path, number: int) -> None:
    """Signal every process of the attempt but this one."""
    for pid in living(scratch):
        if pid != os.getpid():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def living(scratch: Path) -> list[int]:
    """Processes of the attempt that are there and no zombies."""
    found = []
    for entry in (scratch / "pids").iterdir():
        try:
            state = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found.append(int(entry.name))
    return found
