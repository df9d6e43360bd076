"""The start of sandboxes: warm ones, packages, deadlines, and nodes that make none: refused with the reason."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError, EnvNodeError
from prime_hpc.envs.sandbox import bubblewrap, sandbox_process
from prime_hpc.envs.sandbox.bubblewrap import explain_refusal, find_bwrap
from prime_hpc.envs.sandbox.sandbox_process import Sandbox, SandboxFailed, first_inside
from prime_hpc.envs.sandbox.warm_pool import WarmPool
from prime_hpc.runtime import slurm_warning
from prime_hpc.runtime.role_context import LED
from tests.support.sandboxes import members, namespace_of, needs_sandboxes, play, sandbox

pytestmark = needs_sandboxes()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is looked up first for programs, and that every user can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{name}:{os.environ['PATH']}")
        yield Path(name)


def pretend(folder: Path, script: str) -> None:
    """Put a bwrap there that is none."""
    bwrap = folder / "bwrap"
    bwrap.write_text(f"#!/bin/sh\n{script}\n")
    bwrap.chmod(0o755)


async def until(condition: "object") -> None:
    async with asyncio.timeout(200):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="the paths are mounted for root alone")
def test_paths_whose_file_system_hangs_are_not_waited_for(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = programs / "unshare"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "ANSWER_S", 0.1)
    with pytest.raises(EnvNodeError, match=r"cannot be mounted within 0\.1 s .* \(/opt\)"):
        bubblewrap.Stage(["/opt"])


def test_sandboxes_wait_and_each_is_used_once() -> None:
    async def run() -> None:
        pool = WarmPool(SandboxConfig(warm=2))
        await pool.open()
        await until(lambda: len(pool._warm) == 2)
        waiting = list(pool._warm)
        first = await pool.take()
        assert first is waiting[0]
        namespaces = [namespace_of(first)]
        assert (await first.run(program="open('mine', 'w').write('x')")).verdict == "passed"
        pool.give_back(first)
        await until(lambda: len(pool._warm) == 2 and not first.is_alive())
        dead = list(pool._warm)  # none of them is given out
        for box in dead:
            namespaces.append(namespace_of(box))
            box.kill()
        await until(lambda: not any(box.is_alive() for box in dead))
        second = await pool.take()
        assert second not in dead
        namespaces.append(namespace_of(second))
        assert (await second.run(["ls", "-A"])).stdout == b".tmp\n"
        await pool.close()
        assert not any(map(members, namespaces)) and not pool._tasks

    asyncio.run(run())


@pytest.mark.parametrize(
    "program",
    [
        "import os\nchild = os.fork()\nif child == 0: os._exit(0)\ntime.sleep(0.1)\nos.waitpid(child, 0)",
        "import subprocess\nkept = subprocess.Popen(['true'])",
        "import subprocess\nfor _ in range(100): subprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.set_start_method('fork')\nwith multiprocessing.Pool(4) as pool:\n"
        "    pool.map(abs, range(4))\n    pool.close()\n    time.sleep(0.2)\n    pool.join()",
    ],
    ids=["collected-late", "never-collected", "many", "pool"],
)
def test_children_that_have_ended_are_not_taken_for_ones_that_hide(program: str) -> None:
    (ended,) = play(f"import time\n{program}\ntime.sleep(1)\nprint('fine')", command_s=60)
    assert (ended.ended_by, ended.verdict, ended.stdout) == ("", "passed", b"fine\n"), ended


def test_commands_get_input_variables_and_their_python() -> None:
    async def run() -> None:
        async with sandbox() as box:
            given = b"x" * (3 << 20)
            ended = await box.run(["sh", "-c", "wc -c; echo $WORD $HOME; exit 3"], given=given, env={"WORD": "w"})
            assert (ended.code, ended.stdout) == (3, b"3145728\nw /work\n")
            ended = await box.run(["python3", "-c", "import sys; print(sys.version_info[:2], sys.stdin.read())"])
            assert ended.stdout.decode() == f"{sys.version_info[:2]} \n"
            for name in ("python", "python3"):  # also where no file of this name lies beside the interpreter
                ended = await box.run([name, "-c", "import os, sys; print(os.path.realpath(sys.executable))"])
                assert ended.stdout.decode().strip() == str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
            assert (await box.run(["no-such-program"])).code == 127
            assert (await box.run(["sh", "-c", "kill -9 $$"])).code == -9
            await box.write("a/b", bytes(range(256)))
            assert await box.read("a/b") == bytes(range(256)) and await box.read("a/b", 3) == b"\0\1\2"
            program = "from typing import get_type_hints\nclass A:\n    x: int\nassert A.__annotations__['x'] is int"
            assert (await box.run(program=program)).verdict == "passed"  # none of the guest's own settings
            copies = "import os\nif os.fork(): assert 0, 'the first one'\n"
            assert (await box.run(program=copies)).verdict == "failed: AssertionError: the first one"

    asyncio.run(run())


def test_packages_and_named_paths_are_there_when_they_are_asked_for(programs: Path) -> None:
    (programs / "data").write_text("for all")
    script = f"import numpy\nprint(numpy.arange(3).sum(), open({str(programs / 'data')!r}).read())"
    (without,) = play(script)
    (with_packages,) = play(script, packages=True, read_only=[str(programs)], memory_mib=1024)
    assert without.verdict.startswith("failed: ModuleNotFoundError") and with_packages.stdout == b"3 for all\n"
    (written,) = play(f"open({str(programs / 'new')!r}, 'w')", read_only=[str(programs)])
    assert "Read-only" in written.verdict
    with pytest.raises(EnvError, match="sandbox.read_only: /nothing-here is not there"):
        play("pass", read_only=["/nothing-here"])


def test_a_start_that_hangs_has_a_deadline_of_its_own_and_holds_up_nobody(programs: Path) -> None:
    real = shutil.which("bwrap")
    pretend(programs, f'[ "$1" = --version ] && exec {real} --version\nexec sleep 600')
    with pytest.raises(EnvError, match=r"did not answer within 0.3 s \(sandbox.start_s\)"):
        play("pass", start_s=0.3)

    async def run() -> None:
        """One of the starts hangs, and the commands of the others do not wait for it."""
        flag = programs / "flag"
        flag.touch()
        pretend(programs, f'[ "$1" = --version ] || [ -e {flag} ] && exec {real} "$@"\nexec sleep 600')
        pool = WarmPool(SandboxConfig(warm=0, start_s=20, parallel=1))
        await pool.open()
        one = await pool.take()
        flag.unlink()
        stuck = asyncio.create_task(pool.take())
        assert (await one.run(program="pass")).verdict == "passed" and not stuck.done()
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        await pool.close()

    asyncio.run(run())


def test_nodes_that_make_none_say_why(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(programs, "echo bubblewrap 0.4.1")
    with pytest.raises(EnvError, match=r"is bubblewrap 0.4.1; sandboxes need 0.8.0"):
        find_bwrap()
    pretend(programs, '[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit; echo "bwrap: out of beans" >&2; exit 1')
    with pytest.raises(EnvError, match=r"cannot be started: bwrap: out of beans"):
        play("pass")
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(EnvError, match=r"no bubblewrap \(bwrap\) on .*apt-get install bubblewrap"):
        find_bwrap()
    assert "gives users no namespaces" in explain_refusal("bwrap: No permissions to create new namespace")


def test_a_process_that_may_have_no_namespaces_gets_the_reason_and_runs_nothing() -> None:
    """For real: inside a sandbox that shows the whole machine, where user namespaces are used up."""
    script = (
        "import asyncio\n"
        "from prime_hpc.config.sections.orchestrator import SandboxConfig\n"
        "from prime_hpc.envs.sandbox.warm_pool import WarmPool\n"
        "asyncio.run(WarmPool(SandboxConfig()).open())"
    )
    inner = [sys.executable, "-c", script]
    outer = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--uid", "1000", "--disable-userns", "--", *inner]
    tried = subprocess.run(outer, capture_output=True, text=True, timeout=120, check=False)
    assert tried.returncode == 1
    assert "namespaces exceeded" in tried.stderr and "this node gives users no namespaces" in tried.stderr, tried.stderr


@pytest.mark.parametrize("number", slurm_warning.WARNINGS)
def test_slurm_s_warning_ends_no_sandbox_and_what_it_ends_is_no_outcome(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A signal to every process of the job: this one, what holds the sandbox, and the command in it."""
    monkeypatch.setenv(LED, "1")
    before = {warning: signal.getsignal(warning) for warning in slurm_warning.WARNINGS}
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # of other tests: a cluster, say
    slurm_warning.outlive()

    async def warn(box: Sandbox, *, us: bool) -> None:
        namespace = namespace_of(box)
        async with asyncio.timeout(200):
            while len(members(namespace)) < 2:
                await asyncio.sleep(0.01)
        ours = {process.pid for process in psutil.Process().children(recursive=True)} - others
        for pid in {*ours, *members(namespace), *([os.getpid()] if us else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def run() -> None:
        pool = WarmPool(SandboxConfig(warm=1, command_s=50))
        await pool.open()
        box = await pool.take()
        own = await box.run(["sh", "-c", "trap 'exit 7' USR1; kill -USR1 $$; exit 8"])
        assert own.code == 7, "a command may use the signal itself"
        for us in (False, True):
            running = asyncio.create_task(box.run(["sleep", "600"]))
            await warn(box, us=us)
            if us:
                with pytest.raises(SandboxFailed, match="Slurm's warning"):
                    await running
            else:  # nobody warned the job: the command did it to itself
                assert (await running).code == -number
        assert (await box.run(["true"])).code == 0
        assert (await (await pool.take()).run(["true"])).code == 0, "others can still be started"
        await pool.close()

    try:
        asyncio.run(run())
    finally:
        for warning, handler in before.items():
            signal.signal(warning, handler)


def test_a_cancelled_command_ends_its_sandbox() -> None:
    async def run() -> None:
        async with sandbox() as box:
            namespace = namespace_of(box)
            running = asyncio.create_task(box.run(program="import time; time.sleep(600)"))
            await until(lambda: len(members(namespace)) == 2)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(lambda: not members(namespace))
            with pytest.raises(SandboxFailed, match="gone"):
                await box.read("x")

    asyncio.run(run())


def test_no_answer_is_taken_for_that_to_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that comes too late would be followed by the verdict of the program before."""

    async def run() -> None:
        async with sandbox() as box:
            first = first_inside(box.pid)
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            monkeypatch.setattr(sandbox_process, "GRACE_S", -box.config.command_s)
            with pytest.raises(SandboxFailed, match="gone"):
                await box.read("x")
            monkeypatch.undo()
            with contextlib.suppress(ProcessLookupError):  # it was ended with the sandbox
                os.kill(first, signal.SIGCONT)
            assert not box.is_alive()
            with pytest.raises(SandboxFailed, match="gone"):
                await box.run(program="assert False")
        async with sandbox() as box:
            box._num_orders += 1
            answer = box._receive
            monkeypatch.setattr(box, "_receive", lambda number: answer(number - 1))
            ended = await box.run(program="x = 1")
            assert (ended.ended_by, ended.verdict, box.is_alive()) == ("gone", "", False)

    asyncio.run(run())


def test_what_is_no_file_is_not_written() -> None:
    async def run() -> None:
        async with sandbox() as box:
            await box.run(program="import os; os.mkfifo('pipe'); os.symlink('/dev/null', 'null')")
            await box.write("file", b"longer")
            await box.write("file", b"short")
            for name in ("pipe", "null", ".", "no\0name"):
                with pytest.raises(SandboxFailed):
                    await box.write(name, b"x")
            assert await box.read("file") == b"short" and await box.read("file", 2) == b"sh"
            ended = await box.run(program="print(1)\nexit()", may_exit=True)
            assert (ended.verdict, ended.stdout) == ("passed", b"1\n")

    asyncio.run(run())


def test_a_file_beyond_what_can_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(sandbox_process, "MOST_ANSWER", 1 << 20)
        async with sandbox() as box:
            await box.run(program="open('large', 'wb').truncate(1 << 20)")
            with pytest.raises(SandboxFailed, match="too large"):
                await box.read("large")
            await box.write("file", b"x")
            assert await box.read("file") == b"x"

    asyncio.run(run())
