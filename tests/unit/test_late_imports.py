"""What verifiers is imported without, and that it is there when it is used. Each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
WITHOUT = ("anthropic", "math_verify", "sympy", "mcp")
FORKS = """
import json, os, sys, traceback
import prime_hpc.envs.episode_runner
for line in sys.stdin:
    code, output = json.loads(line)
    if (pid := os.fork()) == 0:
        ended = 1
        try:
            for number in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            exec(code, {"sys": sys})
            ended = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(ended)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Run = Callable[[str], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """What code prints after the episodes' part of a role is imported: by forks of a process that did nothing else."""
    folder = tmp_path_factory.mktemp("said")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, text=True, cwd=TOP) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(code: str) -> str:
            output = folder / str(len(list(folder.iterdir())))
            print(json.dumps([code, str(output)]), file=process.stdin, flush=True)
            ended = process.stdout.readline()  # type: ignore[union-attr]
            assert ended == "0\n", output.read_text()
            return output.read_text().strip()

        yield ask


def test_episodes_need_none_of_it(run: Run) -> None:
    """A bundled environment is found and made."""
    code = f"""
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.task_sources import EnvSource
EnvSource(EnvConfig(id="reverse-text"), "train", 0).task(0)
print([name for name in {WITHOUT!r} if name in sys.modules])
"""
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "from verifiers.v1.dialects import DIALECTS\nprint(DIALECTS[2].routes[0])",
        "from verifiers.v1.dialects.anthropic import AnthropicDialect\nprint(AnthropicDialect().routes[0])",
        "from verifiers.v1.dialects.anthropic import ModdedUsage, AnthropicDialect\nprint(AnthropicDialect.routes[0])",
        "from verifiers.v1.dialects import AnthropicDialect\nclass Own(AnthropicDialect): ...\nprint(Own.routes[0])",
    ],
)
def test_the_dialect_is_there_when_it_is_used(run: Run, code: str) -> None:
    """However it is come by."""
    assert run(code) == "/v1/messages"


def test_the_dialect_is_one_thing_before_and_after(run: Run) -> None:
    """Types compare, and what was imported before is what is imported later."""
    code = """
from verifiers.v1.dialects import DIALECTS, AnthropicDialect, ChatDialect
before = [isinstance(one, AnthropicDialect) for one in DIALECTS]
DIALECTS[2].routes
from verifiers.v1 import dialects
from verifiers.v1.dialects.anthropic import AnthropicDialect as Later
print(before, isinstance(Later(), AnthropicDialect), dialects.AnthropicDialect is Later, isinstance(DIALECTS[2], Later))
print(issubclass(Later, AnthropicDialect), (AnthropicDialect | None) == (Later | None) == (None | AnthropicDialect))
"""
    assert run(code) == "[False, False, True] True True True\nTrue True"


def test_a_harness_elsewhere_is_answered(run: Run) -> None:
    """verifiers' own server knows the dialect's routes: a stranger is refused, not unknown."""
    code = """
import asyncio, aiohttp
from prime_hpc.envs.interception import PolicyInterception
async def main():
    server = PolicyInterception({}, serve_http=True)
    async with server, aiohttp.ClientSession() as session:
        found = []
        for route in ("messages", "chat/completions", "elsewhere"):
            async with session.post(f"{server.base_url}/v1/{route}", json={}) as answer:
                found.append(answer.status)
        print(found)
asyncio.run(main())
"""
    assert run(code) == "[401, 401, 404]"


def test_answers_are_compared_on_any_thread(run: Run) -> None:
    """By verifiers' function, in a process that can be killed, and by a package that imports math-verify itself."""
    code = """
import sys, threading
import verifiers.v1 as vf
found = []
def check():
    found.append(vf.verify_boxed_math_answer("\\\\boxed{\\\\frac{2}{4}}", "\\\\frac{1}{2}"))
    found.append(vf.verify_boxed_math_answer("\\\\boxed{3}", "\\\\frac{1}{2}"))
thread = threading.Thread(target=check)
thread.start()
thread.join()
found.append("sympy" in sys.modules)
import math_verify.grader, prime_hpc.envs.patches.math_deadlines as ours
print(found, math_verify.grader.timeout is ours._deadline)
"""
    assert run(code) == "[1.0, 0.0, False] True"


def test_bundled_members_are_there(run: Run) -> None:
    """The packages whose members nobody looks at."""
    code = """
from verifiers.v1.tasksets import HarborTaskset
import verifiers.v1.harnesses as harnesses
from verifiers.v1.utils.loaders import harness_class
print(HarborTaskset.__name__, harnesses.NullHarness is harness_class("null"), hasattr(harnesses, "NoSuchHarness"))
"""
    assert run(code) == "HarborTaskset True False"


@pytest.mark.parametrize("name", ["harnesses", "tasksets"])
def test_threads_that_ask_at_once_all_find_it(run: Run, name: str) -> None:
    """Training's and evaluation's environments are loaded side by side."""
    code = f"""
import importlib, threading
package = importlib.import_module("verifiers.v1.{name}")
member = {{"harnesses": "NullHarness", "tasksets": "HarborTaskset"}}["{name}"]
begin, found = threading.Barrier(8), []
def ask():
    begin.wait()
    found.append(getattr(package, member, None))
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), len(set(found)), None in found)
"""
    assert run(code) == "8 1 False"


def test_bundled_members_are_listed(run: Run) -> None:
    """For `import *`, and for whoever looks what there is."""
    code = """
from verifiers.v1.tasksets import *
import verifiers.v1.harnesses as harnesses
print(HarborTaskset.__name__, "NullHarness" in dir(harnesses), "__getattr__" in vars(harnesses))
"""
    assert run(code) == "HarborTaskset True False"


def test_a_package_that_cannot_be_run_says_so_each_time(run: Run) -> None:
    """Not once, and then that it has no such member."""
    code = """
sys.modules["verifiers.v1.tasksets.harbor"] = None
import verifiers.v1.tasksets as tasksets
for _ in range(2):
    try:
        tasksets.HarborTaskset
    except ImportError as error:
        print("halted" in str(error))
del sys.modules["verifiers.v1.tasksets.harbor"]
print(tasksets.HarborTaskset.__name__)
"""
    assert run(code) == "True\nTrue\nHarborTaskset"
