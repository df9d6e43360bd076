"""The checks of tools/gpu-check, one test each, on the first GPU; see there what each holds against what."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NAMES = (
    *("machine", "kernels", "head", "combinations", "syncs", "resume", "agreement", "sharing", "replay", "restart"),
    *("mfu", "memory"),
)
"""`sharing` and `replay` look at the run of `agreement`, `memory` at the figures of `mfu`."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    before = list(sys.path)
    sys.path[:0] = [str(TOOLS / "gpu_checks"), str(TOOLS / "benchmarks")]
    import _runner

    yield _runner
    sys.path[:] = before


@pytest.fixture(scope="module")
def setting(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runner.Setting("cuda", str(tmp_path_factory.mktemp("checks")), os.environ.get("PRIME_HPC_GPU_MODEL"))


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, runner: Any, setting: Any) -> None:
    check = next(check for check in runner.CHECKS if check.name == name)
    outcome = runner.in_child(check, setting, check.deadline_s)
    print(outcome.figures)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.summary)
    assert outcome.verdict == "pass", outcome.summary


def test_every_check_is_a_test(runner: Any) -> None:
    assert set(NAMES) == {check.name for check in runner.CHECKS}
