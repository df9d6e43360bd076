"""What hostile code in a sandbox tries, each judged by its real effect on the host, on others and on itself.

Limits are small, so that a bomb that met none of them would still be one that this machine survives.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prime_hpc.envs.sandbox import guest
from prime_hpc.envs.sandbox.bubblewrap import NOBODY
from prime_hpc.envs.sandbox.makers import MAKERS
from prime_hpc.envs.sandbox.sandbox_process import Ended, SandboxFailed
from tests.support.sandboxes import IMAGE, RUNTIME, hold, members, namespace_of, needs_sandboxes, play, sandbox

pytestmark = needs_sandboxes()

TRY = """
def attempt(name, action):
    try:
        print(name, 'DONE', action())
    except BaseException as error:
        print(name, 'no:', type(error).__name__)
"""
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.fixture
def host() -> Iterator[Path]:
    """A folder of the host in which every user may do everything."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="host-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def nothing_done(ended: Ended, num: int) -> None:
    said = ended.stdout.decode()
    assert ended.verdict == "passed", ended
    assert "DONE" not in said and said.count(" no: ") == num, said


async def _gone(namespace: str) -> None:
    async with asyncio.timeout(200):
        while members(namespace, living=True):
            await asyncio.sleep(0.02)


def test_a_fork_bomb_stays_within_its_number_and_is_gone_afterwards() -> None:
    bomb = (
        "import os\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "    except OSError:\n"
        "        pass\n"
    )

    async def run() -> None:
        most = 0
        async with sandbox(processes=20) as box:
            namespace = namespace_of(box)
            for wall_s in (1.5, 30.0):  # a busy machine may be long to begin
                running = asyncio.create_task(box.run(program=bomb, wall_s=wall_s))
                while not running.done():
                    most = max(most, len(members(namespace)))
                    await asyncio.sleep(0.02)
                ended = await running
                assert ended.ended_by in ("wall", "cpu", "processes") and not ended.verdict
                if most > 10:
                    break
            assert 10 < most <= 21, most
            assert len(members(namespace)) == 1
            after = await box.run(program="print('fine')")
            assert after.verdict == "passed", after
        await _gone(namespace)

    asyncio.run(run())


_MANY = (
    "import os, time\n{one}\n"
    "for _ in range(12):\n    if os.fork() == 0:\n        {each}\n        time.sleep(60)\n"
    "time.sleep(60)"
)


def test_a_command_that_begins_late_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # until it becomes the command it is a copy of the guest, which nobody may look into; a busy machine takes long
    runtime = RUNTIME.get("runtime", "bubblewrap")
    text, begin = Path(guest.__file__).read_text(), "    try:\n        os.setsid()\n"
    assert text.count(begin) == 1
    late = text.replace(begin, begin.replace("os.setsid()", "time.sleep(4 * HIDDEN_S); os.setsid()"))
    code = compile(late, "guest.py", "exec") if runtime == "bubblewrap" else late
    monkeypatch.setitem(MAKERS, runtime, replace(MAKERS[runtime], guest=lambda: code))

    async def run() -> list[Ended]:
        async with sandbox() as box:
            return [await box.run(program="print('fine')"), await box.run(["echo", "fine"])]

    assert [(ended.stdout, ended.ended_by) for ended in asyncio.run(run())] == [(b"fine\n", "")] * 2


@pytest.mark.parametrize(
    ("bomb", "ended_by", "said"),
    [
        ("x = bytearray(1 << 30)", "", "failed: MemoryError"),
        ("import mmap\nx = mmap.mmap(-1, 1 << 30)", "", "failed: OSError"),
        (_MANY.format(one="", each="x = bytearray(40 << 20)"), "memory", ""),
        (_MANY.format(one="import mmap", each="x = mmap.mmap(-1, 40 << 20); x.write(b'1' * (40 << 20))"), "memory", ""),
        (
            "import os, time\nfor n in range(40):\n    fd = os.memfd_create('x')\n    os.write(fd, b'1' * (6 << 20))\n"
            "time.sleep(60)",
            "memory",
            "",
        ),
        (
            f"{LIBC}import time\nlibc.shmat.restype = ctypes.c_void_p\nlibc.shmdt.argtypes = [ctypes.c_void_p]\n"
            "for n in range(40):\n    at = libc.shmat(libc.shmget(0, 6 << 20, 0o1666), None, 0)\n"
            "    ctypes.memset(at, 1, 6 << 20)\n    libc.shmdt(at)\ntime.sleep(60)",
            "memory",
            "",
        ),
        ("import ctypes, time\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\ntime.sleep(60)", "hidden", ""),
        (
            "import ctypes, os, threading, time\n"
            "if os.fork() == 0:\n"
            "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
            "    ctypes.CDLL(None).pthread_exit(None)\n"
            "time.sleep(60)",
            "hidden",
            "",
        ),
    ],
    ids=["one", "shared", "many", "many-shared", "unnamed-files", "system-v", "hidden", "first-thread-ended"],
)
def test_memory_has_a_bound(bomb: str, ended_by: str, said: str) -> None:
    settle = "import time; time.sleep(0.1); print('fine')"  # nothing of the bomb counts any more
    ended, after = play(bomb, settle)
    assert ended.ended_by == ended_by and ended.verdict.startswith(said) and ended.verdict != "passed", ended
    assert after.stdout == b"fine\n", after


def test_a_full_disk_is_its_own_and_nothing_else_can_be_written(host: Path) -> None:
    fill = (
        "import os\n"
        "def fill(folder):\n"
        "    total = 0\n"
        "    try:\n"
        "        for n in range(100):\n"
        "            with open(f'{folder}/f{n}', 'wb') as file:\n"
        "                total += file.write(b'1' * (1 << 20))\n"
        "    except OSError as error:\n"
        "        return total >> 20, error.errno\n"
        "print(fill('/work'), fill('/tmp'), fill('/dev/shm'))\n"
        "print(sorted(f for f, _, _ in os.walk('/') if not f.startswith('/proc') and os.access(f, os.W_OK)))\n"
    )
    many = "for n in range(10**6): open(f'/dev/shm/{n}', 'w').close()"
    filled, refused, answers = play(
        fill, many, "open('/work/f0', 'w').write('again'); import time; time.sleep(0.1); print('fine')"
    )
    assert filled.stdout.decode().split("\n")[0] == "(8, 28) (0, 28) (16, 28)", filled
    writable = filled.stdout.decode().split("\n")[1]
    assert writable.replace("'/dev/pts', ", "") == "['/dev/shm', '/work', '/work/.tmp']", writable
    assert refused.ended_by == "files" and answers.stdout == b"fine\n"
    script = (
        f"{TRY}import os, sys\n"
        f"for folder in ({str(host)!r}, '/usr', '/etc', '', sys.base_prefix, '/var', '/dev', '/dev/pts'):\n"
        "    attempt(folder, lambda: open(folder + '/x', 'w').write('x'))\n"
    )
    (ended,) = play(script)
    nothing_done(ended, 8)
    assert list(host.iterdir()) == []


def test_links_lead_nowhere_on_the_host(host: Path) -> None:
    secret = host / "secret"
    secret.write_text("the host's")
    secret.chmod(0o666)
    make = (
        f"import os\nos.symlink({str(secret)!r}, 'link')\nos.symlink({str(host)!r}, 'folder')\nos.mkfifo('fifo')\n"
        "os.symlink('/proc/1/root', 'root')\nos.symlink('../../../../../..', 'up')"
    )

    async def run() -> None:
        async with sandbox() as box:
            assert (await box.run(program=make)).verdict == "passed"
            for path in (
                "link",
                "folder/secret",
                f"root{secret}",
                f"up{secret}",
                "fifo",
                str(secret),
                "../" * 9 + "etc/shadow",
            ):
                with pytest.raises(SandboxFailed):
                    await box.read(path)
            for path in ("link", "folder/new"):
                with contextlib.suppress(SandboxFailed):
                    await box.write(path, b"from inside")

    asyncio.run(run())
    assert secret.read_text() == "the host's" and os.listdir(host) == ["secret"]  # noqa: PTH208


def test_processes_outside_can_neither_be_seen_nor_signalled() -> None:
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    victim = subprocess.Popen(["sleep", "600"], **who)  # type: ignore[call-overload] # of the same user as the sandbox
    try:
        script = (
            f"{TRY}import os, signal\n"
            f"attempt('kill', lambda: os.kill({victim.pid}, signal.SIGKILL))\n"
            f"attempt('pidfd', lambda: os.pidfd_open({victim.pid}))\n"
            f"attempt('see', lambda: open('/proc/{victim.pid}/status').read())\n"
            "attempt('trigger', lambda: os.open('/proc/sysrq-trigger', os.O_WRONLY))\n"
            "attempt('pattern', lambda: os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))\n"
            "attempt('memory', lambda: open('/proc/1/mem', 'rb').read(1))\n"
            "attempt('files', lambda: os.listdir('/proc/1/fd'))\n"
            "attempt('variables', lambda: open('/proc/1/environ').read())\n"
            "attempt('kernel', lambda: open('/proc/kcore', 'rb').read(1))\n"
            "assert {int(n) for n in os.listdir('/proc') if n.isdigit()} == {1, os.getpid()}\n"
        )
        storm = (
            "import os, signal\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\n"
            f"for pid in (*range(2, 400), {victim.pid}):\n"
            "    try: pid != os.getpid() and os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
            "os.kill(-1, signal.SIGKILL)"
        )
        tried, _, after = play(script, storm, "print('fine')")
        nothing_done(tried, 9)
        assert after.stdout == b"fine\n" and victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_no_sockets_of_the_host_and_all_of_them_where_the_network_is_allowed(host: Path) -> None:
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        named.bind(str(host / "socket"))
        (host / "socket").chmod(0o777)
        name = f"\0{host}"
        abstract.bind(name)
        for unix in (named, abstract):
            unix.listen()
        script = (
            f"{TRY}import socket, os\n"
            "def connect(family, address):\n"
            "    with socket.socket(family) as it:\n        it.settimeout(2)\n        it.connect(address)\n"
            f"attempt('tcp', lambda: connect(socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]})))\n"
            "attempt('far', lambda: connect(socket.AF_INET, ('192.0.2.1', 80)))\n"
            f"attempt('abstract', lambda: connect(socket.AF_UNIX, {name!r}))\n"
            f"attempt('named', lambda: connect(socket.AF_UNIX, {str(host / 'socket')!r}))\n"
            "attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))\n"
        )
        own = (
            "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
            "socket.create_connection(server.getsockname())\nprint('fine')"
        )
        shut, inside = play(script, own)
        (open_,) = play(script, network=True)
    nothing_done(shut, 5)
    assert inside.stdout == b"fine\n", inside
    said = open_.stdout.decode()
    assert "tcp DONE" in said and "abstract DONE" in said and "named no" in said and "raw no" in said, said


def test_no_powers_and_no_way_to_get_any() -> None:
    script = (
        f"{LIBC}{TRY}import subprocess\n"
        "def call(name, *arguments):\n"
        "    if getattr(libc, name)(*arguments) == -1:\n        raise OSError(ctypes.get_errno())\n"
        "attempt('attach', lambda: call('ptrace', 16, 1, None, None))\n"
        "attempt('user', lambda: call('unshare', 0x10000000))\n"
        "attempt('mounts', lambda: call('unshare', 0x20000))\n"
        "attempt('mount', lambda: call('mount', b'none', b'/work', b'tmpfs', 0, None))\n"
        "attempt('writable', lambda: call('mount', None, b'/usr', None, 32 | 4096, None))\n"
        "attempt('unmount', lambda: call('umount2', b'/proc', 2))\n"
        "attempt('root', lambda: os.setuid(0))\n"
        "attempt('chroot', lambda: os.chroot('/work'))\n"
        "attempt('device', lambda: os.mknod('/work/disk', 0o60666, os.makedev(254, 0)))\n"
        "attempt('hostname', lambda: call('sethostname', b'x', 1))\n"
        "attempt('clock', lambda: __import__('time').clock_settime(0, 1.0))\n"
        "status = open('/proc/self/status').read()\n"
        "assert status.count('0000000000000000') >= 5 and 'NoNewPrivs:\\t1' in status, status\n"
        "assert os.getuid() == 1000 and os.getgroups() in ([], [1000], [65534]), os.getgroups()\n"
    )
    (ended,) = play(script)
    nothing_done(ended, 11)


def test_children_that_escape_their_parents_end_with_the_command() -> None:
    escape = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork():\n"
        "            os._exit(0)\n"
        "        for number in range(1, 32):\n"
        "            import signal\n"
        "            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "        while True:\n"
        "            open('alive', 'a').write('.')\n"
        "            time.sleep(0.01)\n"
        "while not os.path.exists('alive'): time.sleep(0.01)\n"
    )
    count = (
        "import os, time\nfirst = os.path.getsize('alive')\ntime.sleep(0.2)\nprint(os.path.getsize('alive') - first)"
    )

    async def run() -> None:
        async with sandbox() as box:
            namespace = namespace_of(box)
            assert (await box.run(program=escape)).verdict == "passed"
            assert len(members(namespace)) == 1
            assert (await box.run(program=count)).stdout == b"0\n"
            ended = await box.run(["sh", "-c", "setsid sleep 600 & nohup sleep 600 & echo left"])
            assert ended.stdout == b"left\n" and len(members(namespace)) == 1
        await _gone(namespace)

    asyncio.run(run())


def test_floods_of_output_and_of_files_are_cut() -> None:
    flood = "import sys\nfor _ in range(16):\n    sys.stdout.write('x' * (1 << 20))\n    sys.stderr.write('y' * 1000)"
    endless = "import os\nwhile True: os.write(2, b'z' * 65536)"
    exhaust = (
        "import os\nfds = []\n"
        "try:\n    while True: fds.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError as error: print(len(fds) <= 64, error.errno)"
    )

    async def run() -> list[Ended]:
        async with sandbox(output_kib=16, open_files=64) as box:
            first = [await box.run(program=flood), await box.run(program=endless, wall_s=2.0)]
            return [*first, await box.run(program=exhaust), await box.run(program="print('fine')")]

    cut, stopped, files, after = asyncio.run(run())
    assert (len(cut.stdout), len(cut.stderr)) == (16 << 10, 16_000) and cut.verdict == "passed"
    assert cut.dropped == (16 << 20) - (16 << 10)
    assert stopped.ended_by in ("cpu", "wall") and len(stopped.stderr) == 16 << 10
    assert files.stdout == b"True 24\n" and after.stdout == b"fine\n"


def test_no_file_variable_or_key_of_the_host_is_there(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden-word")
    var = tempfile.mkdtemp(dir="/var/tmp") if IMAGE else "/var"  # an image has a /var of its own
    (host / "key").write_text("hidden-word")
    (host / "key").chmod(0o644)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(250, 1, None)  # a session keyring of this test's own (x86_64)
    added = libc.syscall(248, b"user", b"prime-hpc-test", b"hidden-word", 11, -3)
    script = (
        f"{LIBC}{TRY}import glob\n"
        f"attempt('file', lambda: open({str(host / 'key')!r}).read())\n"
        "attempt('shadow', lambda: open('/etc/shadow').read())\n"
        "attempt('users', lambda: open('/etc/passwd').read())\n"
        f"attempt('home', lambda: os.listdir({str(Path.home() / '.ssh')!r}))\n"
        f"attempt('checkout', lambda: os.listdir({str(Path(__file__).parent)!r}))\n"
        f"attempt('logs', lambda: os.listdir({var!r}))\n"
        "attempt('run', lambda: os.listdir('/run'))\n"
        "found = libc.syscall(250, 10, -3, b'user', b'prime-hpc-test', 0)\n"
        "print('key no: ' if found == -1 else 'key DONE')\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: assert 'hidden-word' not in open(path).read()\n    except PermissionError: pass\n"
        "assert 'hidden-word' not in str(os.environ)\n"
    )
    (ended,) = play(script)
    if IMAGE:
        Path(var).rmdir()
    assert added > 0 or ctypes.get_errno(), "a kernel without keys has none to hide"
    nothing_done(ended, 8)


def test_one_that_spoils_its_first_process_spoils_itself() -> None:
    """It can shorten that process's limits: then the sandbox is over, and the program has not passed."""
    spoil = (
        "import resource, os\n"
        "resource.prlimit(1, resource.RLIMIT_AS, (1, 1))\n"
        "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\n"
        "while True: os.kill(1, 17)"
    )

    async def run() -> list[Ended]:
        async with sandbox(command_s=5) as box:
            return [await box.run(program=spoil), await box.run(program="print('fine')")]

    for ended in asyncio.run(run()):
        assert ended.ended_by and ended.verdict != "passed", ended


def test_a_killed_host_leaves_nothing_behind(host: Path) -> None:
    script = (
        "import asyncio\n"
        "from tests.support.sandboxes import namespace_of, sandbox\n"
        "async def main():\n"
        "    async with sandbox(command_s=600) as box:\n"
        "        print(namespace_of(box), flush=True)\n"
        "        await box.run(program='import os, time\\nos.setsid\\nos.fork()\\ntime.sleep(600)')\n"
        "asyncio.run(main())"
    )
    variables = {**os.environ, "TMPDIR": str(host)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        namespace = process.stdout.readline().strip()

        async def end() -> None:
            async with asyncio.timeout(200):
                while len(members(namespace)) < 3:
                    await asyncio.sleep(0.02)
            hold(members(namespace)[0])
            process.send_signal(signal.SIGKILL)
            await _gone(namespace)

        asyncio.run(end())
    assert not list(host.iterdir()), "nor any file"
