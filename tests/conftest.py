"""For all tests: the folder above is importable (pytest puts it on the path), so that tests share `tests.support`; and
how `tools/test` deals them out to several processes. Most of the slow ones wait for processes of their own.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.forked import WORKER_SERVER

# No test fails for being slow (several run at once, on machines of any load), nor by luck: the draws are the same each
# time, unless PRIME_HPC_TEST_DRAWS=new looks for more.
settings.register_profile("tests", deadline=None, derandomize=os.environ.get("PRIME_HPC_TEST_DRAWS") != "new")
settings.load_profile("tests")

OWN_CLUSTERS = ("tests/slurm/test_stalls.py", "tests/slurm/test_suites.py")
FIRST_CLUSTER = ("tests/slurm/test_jobs.py", "tests/slurm/test_submit.py", "tests/slurm/test_shell.py")
"""About as long as all other files of tests/slurm, which share the second one: they mostly wait."""
EXHAUSTIVE_TIMEOUT_S = 900
"""They are long, and are run beside others; what hangs is still found."""
LONGEST_FIRST = ("gpu", "slurm", "integration", "faults", "proofs", "unit")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C reaches what the tests start, though a shell started them in the background (SIGINT is ignored there).

    Tests are the CPU's: a GPU of this machine is hidden from them, unless tests/gpu, or its marker `gpu`, is asked for.
    """
    if not _is_for_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(config.getoption("tx", None) or ()) > 1 and set(config.option.tx) == {"popen"}:
        config.option.tx = [_forked_worker(config)] * len(config.option.tx)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """What a test ignores, as `requeue` does in a job that ends, programs that later tests start would ignore."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _forked_worker(config: pytest.Config) -> str:
    """Start the server of which the workers are forks; how pytest-xdist starts one."""
    folder = Path(tempfile.mkdtemp(prefix="workers-", dir="/tmp"))  # socket paths must stay short
    path = folder / "s"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker_server", str(path), *config.args],
            cwd=config.rootpath,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder)

    config.add_cleanup(end)
    while not path.exists():
        if server.poll() is not None:
            said = (folder / "log").read_text()[-3000:]
            raise pytest.UsageError(f"the process of which the workers are to be forks has ended:\n{said}")
        time.sleep(0.1)
    os.environ[WORKER_SERVER] = str(path)
    return f"popen//python={sys.executable} {config.rootpath / 'tests/support/worker_start.py'} {path}"


def _is_for_gpus(config: pytest.Config) -> bool:
    asked = "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr
    return asked or any(word.startswith("tests/gpu") for word in config.args)


def _room(nodeid: str) -> str:
    return nodeid.split("/")[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`."""
    parser.addoption("--all", action="store_true", help="also the tests marked `exhaustive`")


def _takes_all(config: pytest.Config) -> bool:
    """Asked for all of them, or for some by name or marker."""
    return config.getoption("--all") or "exhaustive" in config.option.markexpr or any("::" in a for a in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests, in the order in which several processes end at about the same time."""
    if not _takes_all(config):
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(EXHAUSTIVE_TIMEOUT_S))
    items.sort(key=lambda item: LONGEST_FIRST.index(_room(item.nodeid)))


def pytest_collection_finish() -> None:
    """Thousands of items stay until the end: no collection of garbage goes through them, a tenth of a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share a process, for they share fixtures; so do those of all files that share a cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if _room(nodeid) != "slurm" or file in OWN_CLUSTERS:
                return file
            return f"cluster {1 + (file not in FIRST_CLUSTER)}"

    return ByFile(config, log)
