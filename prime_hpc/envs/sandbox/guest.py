"""The first process of a sandbox: carries out what the host asks for, and sees that the limits hold.

A plain script without site-packages, which the host compiles once and sends to each (`guest_code` in
`sandbox_process.py`); it imports little, for that is most of a start. As
process 1 of its namespace no signal from inside reaches it, orphans become its children, and with it everything ends.
It shares its user with what it runs, so the host believes nothing that it says but what concerns this sandbox.

Frames, both ways, on standard input: two big-endian 32-bit lengths, a head, bytes. Heads to the guest are marshalled
(it trusts the host), those to the host are lines of text; an answer begins with the number of its order:

    host -> guest  {"op": "run", "argv" | "program": length of its source, "env", "word", "may_exit", "wall_s", "cpu_s",
                    "output": bytes kept of its output},
                   {"op": "write", "path"}, {"op": "read", "path", "most", "whole"}; all of them: "number"
    guest -> host  number; "ok"; "error", why; "ended", exit code, ended_by, length of the first output, dropped bytes,
                   verdict

`ended_by` is the limit that ended a command, or empty. The kernel holds processes (with threads), address space and CPU
time of each process, sizes of files and of the folder; the sums over all processes are looked at every `TICK_S`.
"""

from __future__ import annotations

import _signal as signal  # `signal` itself imports `enum`
import builtins
import ctypes
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs a start 5 ms
    from typing import Any

TICK_S = 0.025
HIDDEN_S = 0.5
"""A process that keeps its memory from being looked at (no dumps) for so long is ended."""
FOLDER = "/work"
VERDICT = 3
"""File of a Python program's process through which it tells the guest how it ended."""
CONTROL = 100
"""Number of the connection to the host, above those that commands get."""
PAGE = resource.getpagesize()
CLOCK = os.sysconf("SC_CLK_TCK")
PR_SET_DUMPABLE = 4
KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
LIMITS: dict[str, int] = {}
"""Of `guest_limits`, told with the program."""
LIBC = ctypes.CDLL(None)
OWN_PATH = os.environ.get("PATH", os.defpath)
"""Of an image; the host states it where there is none."""
BEGUN = 4
"""File of a command's process that is closed when it becomes what it was asked to be: until then it hides as we do."""
_hidden: dict[str, float] = {}
_starting: set[str] = set()


def usage(began: float) -> tuple[int, float, int]:
    """Return sums over all processes but this one: bytes of memory, CPU seconds since `began` was taken, threads."""
    memory = threads = 0
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / CLOCK
            threads += int(fields[17])
            memory += int(fields[21]) * PAGE
        except (OSError, ValueError):
            pass
    if memory > LIMITS["memory"]:  # pages that several share were counted for each
        memory = sum(map(share, pids))
    return memory + shared_memory() + sum(unnamed_files(pids).values()), cpu, threads


def share(pid: str) -> int:
    """Return a process's bytes of memory, its share of what it has in common with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return int(file.read().partition(b"\nPss:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        pass
    return 0


def shared_memory() -> int:
    """Bytes of System V segments, attached or not."""
    try:
        with open("/proc/sysvipc/shm", "rb") as file:
            return sum(int(line.split()[14]) for line in file.read().splitlines()[1:])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def unnamed_files(pids: list[str]) -> dict[tuple[int, int], int]:
    """Bytes of files that are in memory alone, by their identity."""
    found: dict[tuple[int, int], int] = {}
    for pid in _hidden.keys() - set(pids):  # collected since the last look
        del _hidden[pid]
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            if pid in _starting or is_over(pid):
                _hidden.pop(pid, None)
            else:
                _hidden.setdefault(pid, time.monotonic())
            continue
        except OSError:
            continue
        _hidden.pop(pid, None)
        for name in names:
            try:
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path).startswith("/memfd:"):
                    facts = os.stat(path)
                    found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
            except OSError:
                pass
    return found


def is_over(pid: str) -> bool:
    """Say whether nothing of a process is left but its exit code, whose files are then root's.

    One whose first thread alone has ended is a zombie too, and has its memory still: it counts two threads.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] == b"Z" and int(fields[17]) == 1
    except (OSError, ValueError, IndexError):
        return False


def exceeded(began: float, cpu_s: float, files_before: int) -> str:
    """Return the limit that is exceeded, or empty."""
    memory, cpu, threads = usage(began)
    if memory > LIMITS["memory"]:
        return "memory"
    if cpu > cpu_s:
        return "cpu"
    if threads > LIMITS["processes"]:
        return "processes"
    if num_files() > max(LIMITS["files"], files_before):
        return "files"
    now = time.monotonic()
    if any(now - since > HIDDEN_S for since in _hidden.values()):
        return "hidden"
    return ""


def num_files() -> int:
    """Files and folders in either place that can be written."""
    facts = [os.statvfs(folder) for folder in (FOLDER, "/dev/shm")]
    return max(fact.f_files - fact.f_ffree for fact in facts)


def remove_objects() -> None:
    """Remove System V's segments, semaphores and queues, which outlive processes."""
    for kind, *arguments in (("shm", 0, None), ("sem", 0, 0), ("msg", 0, None)):
        try:
            with open(f"/proc/sysvipc/{kind}", "rb") as file:
                for line in file.read().splitlines()[1:]:
                    getattr(LIBC, f"{kind}ctl")(int(line.split()[1]), *arguments)
        except (OSError, ValueError, IndexError):
            pass


def kill_all() -> None:
    """Kill every process but this one, however often it forks meanwhile, and collect them."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            _hidden.clear()
            remove_objects()
            return


def limit_self(cpu_s: float) -> None:
    """Set the kernel's limits, for a command before it begins."""
    memory = LIMITS["memory"]
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, max(1, int(cpu_s + 0.999))),
        (resource.RLIMIT_FSIZE, LIMITS["disk"]),
        (resource.RLIMIT_NOFILE, LIMITS["open_files"]),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
        (resource.RLIMIT_MSGQUEUE, 1 << 16),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, LIMITS["kernel_processes"]),
    ):
        hard = resource.getrlimit(name)[1]
        if value and hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        if value or name == resource.RLIMIT_CORE:
            resource.setrlimit(name, (value, value))


def become_command(order: dict[str, Any], program: str | None, fds: tuple[int, ...]) -> None:
    """In the child: never returns."""
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(len(fds), 4096)
        os.set_inheritable(BEGUN, False)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):  # the guest may be deaf to them
            signal.signal(number, signal.SIG_DFL)
        os.chdir(FOLDER)
        os.environ.clear()
        os.environ.update({"PATH": OWN_PATH, **order["env"]})
        limit_self(order["cpu_s"])
        if program is None:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.close(VERDICT)
            os.execvpe(order["argv"][0], order["argv"], dict(os.environ))
        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.close(BEGUN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        own = os.getpid()
        reason = judge(program, order["may_exit"])
        if os.getpid() != own:
            os._exit(0)  # a copy that the program has made of itself
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os.write(VERDICT, f"{order['word']} {reason}".encode(errors="replace"))
        os._exit(0)
    except OSError as error:
        os.write(2, f"{order.get('argv', ['program'])[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(125)


def judge(program: str, may_exit: bool) -> str:
    """Run a Python program; `passed`, or how it failed."""
    sys.argv[:] = ["program.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site`, which may not be imported, has them
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    except SystemExit as error:
        return "passed" if may_exit and error.code in (None, 0) else f"failed: exit code {error.code}"
    except BaseException as error:  # noqa: BLE001 - whatever a model's program raises is its verdict
        return f"failed: {type(error).__name__}: {error}"[:300]
    return "passed"


class Kept:
    """The beginning of an output, and the number of bytes behind it."""

    def __init__(self, fd: int, most: int) -> None:
        self.fd, self.most, self.data, self.dropped = fd, most, bytearray(), 0
        os.set_blocking(fd, False)

    def take(self) -> bool:
        """Read what is there; whether the other end may write more."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        room = max(0, self.most - len(self.data))
        self.data += chunk[:room]
        self.dropped += max(0, len(chunk) - room)
        return bool(chunk)

    def take_rest(self) -> None:
        """Read what a pipe can hold."""
        for _ in range(17):
            before = len(self.data) + self.dropped
            if not self.take() or len(self.data) + self.dropped == before:
                break
        os.close(self.fd)


def run(wake: int, order: dict[str, Any], payload: bytes) -> tuple[str, bytes]:
    """Carry out one command: its answer and outputs."""
    program, given = None, payload
    if "program" in order:
        program, given = payload[: order["program"]].decode(errors="surrogatepass"), payload[order["program"] :]
    (in_read, in_write), (out_read, out_write), (err_read, err_write), (word_read, word_write), (begun, begins) = (
        os.pipe() for _ in range(5)
    )
    began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    child = os.fork()
    if child == 0:
        # 0 to 3 are taken by the guest's own files, so none of the pipes has such a number
        become_command(order, program, (in_read, out_write, err_write, word_write, begins))
    _starting.add(str(child))
    try:
        for fd in (in_read, out_write, err_write, word_write, begins):
            os.close(fd)
        os.set_blocking(in_write, False)
        os.set_blocking(word_read, False)
        outputs = {out_read: Kept(out_read, order["output"]), err_read: Kept(err_read, LIMITS["output"])}
        code, ended_by = attend(wake, child, order, outputs, (in_write, given), began, begun)
        kill_all()
        _starting.clear()
        os.close(begun)
        os.close(in_write)
        for kept in outputs.values():
            kept.take_rest()
    except OSError:
        os._exit(1)  # a command can shorten this process's limits: it has ended its own sandbox
    verdict = ""
    try:
        verdict = os.read(word_read, 4096).decode(errors="replace")
    except BlockingIOError:
        pass
    os.close(word_read)
    out, err = (outputs[fd] for fd in (out_read, err_read))
    word = order.get("word", "")
    verdict = verdict.removeprefix(word + " ") if word and verdict.startswith(word + " ") and code == 0 else ""
    if ended_by == "" and code == -signal.SIGXCPU:
        ended_by = "cpu"
    facts = ["ended", code, ended_by, len(out.data), out.dropped + err.dropped, verdict]
    return "\n".join(map(str, facts)), bytes(out.data + err.data)


def attend(
    wake: int,
    child: int,
    order: dict[str, Any],
    outputs: dict[int, Kept],
    pending: tuple[int, bytes],
    began: float,
    begun: int,
) -> tuple[int, str]:
    """Wait for a command's end or a limit; its exit code (or minus its signal) and the limit."""
    in_write, given = pending
    deadline, files_before = time.monotonic() + order["wall_s"], num_files()
    open_outputs, writing, look_at = set(outputs), bool(given), time.monotonic() + TICK_S
    if not given:
        in_write = reopened(in_write)
    while True:
        now = time.monotonic()
        if now >= deadline:
            return -signal.SIGKILL, "wall"
        if now >= look_at:
            ended_by = exceeded(began, order["cpu_s"], files_before)
            if ended_by:
                return -signal.SIGKILL, ended_by
            look_at = time.monotonic() + TICK_S
        wait = max(0.0, min(deadline, look_at) - now)
        heard = [CONTROL, wake, *open_outputs, *([begun] if _starting else [])]
        ready, writable, _ = select.select(heard, [in_write] if writing else [], [], wait)
        if CONTROL in ready and is_disconnected(CONTROL):
            os._exit(0)  # the host is gone
        if wake in ready:
            os.read(wake, 4096)
        if begun in ready:
            _starting.clear()
        for fd in open_outputs & set(ready):
            if not outputs[fd].take():
                open_outputs.discard(fd)
        if writable:
            try:
                given = given[os.write(in_write, given[: 1 << 16]) :]
            except OSError:
                given = b""
            if not given:
                writing = False
                in_write = reopened(in_write)
        code = reap(child)
        if code is not None:
            return code, ""


def reopened(fd: int) -> int:
    """Close a pipe's end, whose number stays taken."""
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
    return fd


def is_disconnected(control: int) -> bool:
    """Say whether the host has closed its end."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    return bool(poll.poll(0))


def reap(child: int) -> int | None:
    """Collect all that have ended; the command's exit code where it is among them."""
    code = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        pass
    return code


def write(order: dict[str, Any], payload: bytes) -> tuple[str, bytes]:
    """Write a file, and the folders above it."""
    path = os.path.join(FOLDER, order["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)  # a pipe would wait for its reader
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not a regular file")
        file.truncate()
        file.write(payload)
    return "ok", b""


def read(order: dict[str, Any], _: bytes) -> tuple[str, bytes]:
    """Read a regular file, `most` bytes of it."""
    fd = os.open(os.path.join(FOLDER, order["path"]), os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not a regular file")
        data = file.read(order["most"])
        if len(data) == order["most"] and order["whole"] and file.read(1):  # some of /proc have no end
            raise OSError(27, "too large")
        return "ok", data


def exactly(fd: int, length: int) -> bytes:
    """So many bytes; the host's end closed ends this process and all others."""
    data = bytearray()
    while len(data) < length:
        chunk = os.read(fd, min(1 << 20, length - len(data)))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


def tell(fd: int, facts: str, payload: bytes = b"") -> None:
    """Send one frame."""
    head = facts.encode(errors="replace")
    data = memoryview(struct.pack(">II", len(head), len(payload)) + head + payload)
    while data:
        data = data[os.write(fd, data) :]


def main(limits: dict[str, int]) -> None:
    """Until the host closes its end."""
    LIMITS.update(limits)
    control = os.dup2(0, CONTROL, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(VERDICT + 1):
        if number != null:
            os.dup2(null, number, inheritable=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, alarm = os.pipe()
    for fd in (wake, alarm):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    keyctl = KEYCTL.get(os.uname().machine)
    if keyctl is not None:
        LIBC.syscall(keyctl, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: none of the host's keys
    tell(control, "0\nok")
    actions = {"write": write, "read": read}
    while True:
        lengths = struct.unpack(">II", exactly(control, 8))
        order, payload = marshal.loads(exactly(control, lengths[0])), exactly(control, lengths[1])
        try:
            facts = run(wake, order, payload) if order["op"] == "run" else actions[order["op"]](order, payload)
        except (OSError, ValueError) as error:  # a name that no file can have, which a model may have chosen
            facts = f"error\n{getattr(error, 'strerror', None) or type(error).__name__}", b""
        tell(control, f"{order['number']}\n{facts[0]}", facts[1])
