"""Look at the processes of a run on this node, without their help: states, CPU, their own words, their stacks.

Nothing here opens a file outside of /proc, or a part of /proc that waits for the process (its command line and its
environment do, where it hangs in its memory). See `prime_hpc.runtime.activity` for the words. The supervisor
and its agents look when a step stands still, and so does `prime-hpc why`.
"""

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.runtime.activity import ANSWER, CALL, DUMP_SIGNAL, STACKS, TOKEN_BYTES, WORD, WORD_BYTES

BETWEEN_LOOKS_S = 0.6
ANSWER_WITHIN_S = 2.0
STACKS_WITHIN_S = 1.0
PROBE_WITHIN_S = 3.0
"""A run directory that cannot be listed for so long hangs."""
MAX_STACKS = 16_000
_TICKS = os.sysconf("SC_CLK_TCK")
_TRAPS = ("do_freezer_trap", "get_signal")
"""Functions of the kernel that hold a thread that cgroups v2 have frozen; the second of kernels that have the first
inlined. Stopped threads, which wait there as well, have another state."""
Row = dict[str, Any]


@dataclass
class _Stat:
    comm: str
    state: str
    parent: int
    ticks: int
    started: int


@dataclass
class _Seen:
    """A process of the run."""

    pid: int
    stat: _Stat
    word: Row = field(default_factory=dict)
    calls: int = 0
    files: dict[str, int] = field(default_factory=dict)
    """Numbers of its descriptors for the anonymous files."""
    threads: dict[int, _Stat] = field(default_factory=dict)
    token: str = ""
    offset: int = 0
    row: Row = field(default_factory=dict)


def look(run_dir: str | None = None, pids: Collection[int] = ()) -> list[Row]:
    """Look at a run's processes on this node; takes 1 to 4 s, whatever hangs.

    Args:
        run_dir: all that say to be this run's, and what they started; compared as text, no file system is asked.
        pids: these, and what they started.

    Returns:
        a row a process: `host`, `pid`, `parent`, `comm`, `state` (R, S, D: uninterruptible, T: stopped or frozen, Z:
        zombie; as seen twice), `cpu` (share of a core), `waits` ({thread: where in the kernel} of threads that stand
        still in an uninterruptible state), `word`, `call` (of those that tell: `name` and `since` of the call in which
        they are, `begun`: calls that began between two looks), `answer` (`threads`, `tasks`, `details`), `stacks`
        (where it did not answer).
    """
    seen = _members(run_dir, pids)
    before = time.monotonic()
    time.sleep(BETWEEN_LOOKS_S)
    for one in seen:
        _look_again(one, max(time.monotonic() - before, 1e-3))
    _ask_all(seen)
    return [one.row for one in seen]


def probe(folder: str | os.PathLike[str], within_s: float = PROBE_WITHIN_S) -> Row:
    """Ask the file system of a directory for a listing and for the directory's own entry, in a thread.
    Returns `{"seconds"}`, `{"error"}`, or `{"hangs": seconds}` where it did not answer within `within_s`."""
    found: Row = {}
    path = Path(folder)

    def ask() -> None:
        began = time.monotonic()
        try:
            for name in sorted(path.iterdir())[:3]:
                name.lstat()
            found["seconds"] = round(time.monotonic() - began, 3)
        except OSError as error:
            found["error"] = error.strerror or str(error)

    thread = threading.Thread(target=ask, name="probe", daemon=True)
    thread.start()
    thread.join(within_s)
    return dict(found) if found else {"hangs": within_s}


def words_here(run_dir: str) -> list[Row]:
    """Return the words of all processes on this node that say to be a run's; compared as text, nothing is waited for.
    Returns the words (`role`, `index`, `began`, ...), `pid` being the process's id out here, not in its container."""
    return [{**one.word, "pid": one.pid} for one in _own_processes().values() if one.word.get("run_dir") == run_dir]


# ------------------------------------------------------------------------------------------------ /proc


def _stat(folder: Path) -> _Stat | None:
    """Read `stat` of a process or thread, see proc(5); None where it is gone."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    comm = head.partition("(")[2]
    return _Stat(comm, fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))


def _members(run_dir: str | None, pids: Collection[int]) -> list[_Seen]:
    """Find this user's processes that belong to the run, with the first of two looks at them."""
    table = _own_processes(pids)
    roots = set(pids) | {p for p, one in table.items() if run_dir is not None and one.word.get("run_dir") == run_dir}
    members = [one for one in table.values() if _ancestors(one.pid, table) & roots]
    for one in members:
        one.threads = _threads(one.pid)
    return members


def _own_processes(pids: Collection[int] = ()) -> dict[int, _Seen]:
    """Return this user's processes, and these, with what they say of themselves."""
    table: dict[int, _Seen] = {}
    own = os.getuid()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = _stat(folder) if folder.stat().st_uid == own or int(folder.name) in pids else None
            if stat is not None:
                table[int(folder.name)] = _Seen(int(folder.name), stat)
    for one in table.values():
        _find_word(one)
    return table


def _ancestors(pid: int, table: dict[int, _Seen]) -> set[int]:
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].stat.parent
    return found


def _threads(pid: int) -> dict[int, _Stat]:
    found: dict[int, _Stat] = {}
    with contextlib.suppress(OSError):
        for folder in Path(f"/proc/{pid}/task").iterdir():
            stat = _stat(folder)
            if stat is not None:
                found[int(folder.name)] = stat
    return found


def _find_word(one: _Seen) -> None:
    names = {f"/memfd:{name} (deleted)": name for name in (WORD, ANSWER, STACKS)}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{one.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = names.get(str(link.readlink()))
                if name is not None:
                    one.files[name] = int(link.name)
    if WORD in one.files:
        word = _read_json(one, WORD) or {}
        if word.get("pid") == _inner_pid(one.pid):  # else its parent's: it was forked and has not introduced itself
            one.word = word
            one.calls = (_read_call(one) or {"number": 0})["number"]


def _inner_pid(pid: int) -> int:
    """Return a process's id as it knows itself, in a container maybe another one."""
    return int(_status(pid).get("NSpid", str(pid)).split()[-1])


def _status(pid: int) -> dict[str, str]:
    """Read `status`, see proc(5); {} where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(":\t") for line in text.splitlines())}


def _read(one: _Seen, name: str, offset: int = 0) -> bytes:
    with open(f"/proc/{one.pid}/fd/{one.files[name]}", "rb") as file:  # noqa: PTH123 - a link that no path resolves
        file.seek(offset)
        return file.read()


def _read_json(one: _Seen, name: str) -> Row | None:
    """Read what the process wrote last; None where it is being written, or gone."""
    for _ in range(3):
        try:
            value = json.loads(_read(one, name)[: WORD_BYTES if name == WORD else None])
        except OSError:
            return None
        except ValueError:
            continue
        return value if isinstance(value, dict) else None
    return None


def _read_call(one: _Seen) -> Row | None:
    """Read the call in which the process is; None where it tells none, or has begun none yet."""
    with contextlib.suppress(OSError):
        data = _read(one, WORD, WORD_BYTES)
        if len(data) == CALL.size:
            number, since, name = CALL.unpack(data)
            return {"number": number, "since": since, "name": name.rstrip(b"\0").decode(errors="replace")}
    return None


def _look_again(one: _Seen, seconds: float) -> None:
    now = _stat(Path(f"/proc/{one.pid}"))
    gone = now is None or now.started != one.stat.started
    state = "gone" if gone or now is None else now.state
    if state != one.stat.state and not gone:  # in two states it does not stand still
        state = "S" if "S" in (state, one.stat.state) else "R"
    threads = {} if gone else _threads(one.pid)
    waits = {
        str(thread): _kernel_place(one.pid, thread)
        for thread, stat in threads.items()
        if stat.state == "D" and one.threads.get(thread, stat).state == "D" and stat.ticks == _ticks(one, thread)
    }
    if one.word and threads and (len(waits) == len(threads) or _is_trapped(one.pid, threads)):
        # The thread that answers waits for no device, so Slurm has frozen the job; a signal would be handled when all
        # threads go on at once, and kill it.
        state = state if _is_killed(one.pid, threads) else "T"
    one.row = {
        "host": one.word.get("host") or socket.gethostname(),
        "pid": one.pid,
        "parent": one.stat.parent,
        "comm": one.stat.comm,
        "state": state,
        "cpu": round((now.ticks - one.stat.ticks) / _TICKS / seconds, 2) if now is not None else 0.0,
        "waits": waits,
        "word": one.word,
    }
    call = _read_call(one) if one.word else None
    if call is not None and call["number"]:
        one.row["call"] = {"name": call["name"], "since": call["since"], "begun": call["number"] - one.calls}


def _ticks(one: _Seen, thread: int) -> int:
    return one.threads[thread].ticks if thread in one.threads else -1


def _is_trapped(pid: int, threads: Mapping[int, _Stat]) -> bool:
    """Return whether cgroups v2 have frozen a process: its threads sleep on the way back from the kernel, where they
    look for signals (v1's wait as if for a device)."""
    return all(stat.state == "S" and _kernel_place(pid, thread) in _TRAPS for thread, stat in threads.items())


def _is_killed(pid: int, threads: Iterable[int]) -> bool:
    """Return whether SIGKILL waits for a thread that a driver or a file system holds: the others are gone."""
    kill = 1 << signal.SIGKILL - 1
    with contextlib.suppress(OSError, ValueError):
        for thread in threads:
            lines = Path(f"/proc/{pid}/task/{thread}/status").read_text(encoding="ascii", errors="replace").splitlines()
            pending = [line.split()[1] for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
            if any(int(mask, 16) & kill for mask in pending):
                return True
    return False


def _kernel_place(pid: int, thread: int) -> str:
    """Return the kernel's function in which a thread waits; "" where this kernel does not tell."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{thread}/wchan").read_text(encoding="ascii").strip()
        return "" if text == "0" else text
    return ""


# ------------------------------------------------------------------------------------------------ answers


def _ask_all(seen: Iterable[_Seen]) -> None:
    """Have all answer at once; who does not has its stacks dumped."""
    asked = [one for one in seen if one.word and one.row["state"] not in ("T", "Z", "gone") and _ask(one)]
    end = time.monotonic() + ANSWER_WITHIN_S
    while asked and time.monotonic() < end:
        asked = [one for one in asked if not _has_answered(one)]
        time.sleep(0.02)
    dumped = [one for one in asked if _dump(one)]
    end = time.monotonic() + STACKS_WITHIN_S
    while dumped and time.monotonic() < end:
        time.sleep(0.1)
        dumped = [one for one in dumped if not _has_dumped(one)]


def _ask(one: _Seen) -> bool:
    one.token = secrets.token_hex(TOKEN_BYTES // 2)
    try:
        door = os.open(f"/proc/{one.pid}/fd/{one.word['door']}", os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, KeyError):
        return False
    try:
        os.write(door, one.token.encode())
    except BlockingIOError:
        pass  # it has not answered hundreds of questions
    except OSError as error:
        return error.errno != errno.EPIPE
    finally:
        os.close(door)
    return True


def _has_answered(one: _Seen) -> bool:
    answer = _read_json(one, ANSWER) if ANSWER in one.files else None
    if answer is None or answer.get("token") != one.token:
        return False
    one.row["answer"] = {key: answer.get(key) for key in ("threads", "tasks", "details")}
    return True


def _dump(one: _Seen) -> bool:
    """Ask for its stacks by the signal, if it catches that."""
    with contextlib.suppress(OSError, ValueError):
        caught = int(_status(one.pid).get("SigCgt", "0"), 16)
        if caught >> (DUMP_SIGNAL - 1) & 1 and STACKS in one.files:
            one.offset = Path(f"/proc/{one.pid}/fd/{one.files[STACKS]}").stat().st_size
            os.kill(one.pid, DUMP_SIGNAL)
            return True
    return False


def _has_dumped(one: _Seen) -> bool:
    try:
        text = _read(one, STACKS, one.offset).decode(errors="replace")
    except OSError:
        return True
    if text:
        one.row["stacks"] = text[:MAX_STACKS]
    return bool(text)
