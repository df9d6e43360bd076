"""The short form of `tools/faults`: a few points of every way in which a run can break. The full sweep is the tool's.

In a process of its own: the harness replaces `subprocess.Popen` and forks.
"""

import atexit
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tests.faults import fork

ROOT = Path(__file__).resolve().parents[2]
HOWS = "kill,kill-all,stop,twins,ENOSPC"
SAMPLE = 5


READS = 40
"""Of some 5,000: the sample holds some of each kind of run, error and duration."""


def test_no_read_that_fails_deletes_or_starts_over() -> None:
    flags = ["--reads", "--json", "--sample", str(READS), "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "faults"), *flags], cwd=ROOT, capture_output=True, text=True, timeout=290
    )
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    wrong = {key: figures[key] for key in ("deleted_whole", "started_over", "skipped", "duplicated", "mismatches")}
    assert not any(wrong.values()) and not figures["failed"], f"{wrong}\n{done.stderr[-6000:]}"
    assert done.returncode == 0 and set(figures["kinds"]) == {"rl", "sft", "path", "many"}
    assert figures["never_reached"] <= 2 and figures["ended"] > READS // 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile", ["async", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mask", "images"))]
)
def test_a_run_broken_in_every_way_loses_nothing(profile: str, tmp_path: Path) -> None:
    flags = ["--how", HOWS, "--roles", "orchestrator,rank0,rank1", "--sample", str(SAMPLE), "--profiles", profile]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "faults"), "--json", *flags, "--keep", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    wrong = {key: figures[key] for key in ("skipped", "duplicated", "mismatches", "broken", "failed")}
    assert not any(wrong.values()), f"{wrong}\n{done.stderr[-6000:]}"
    assert done.returncode == 0 and figures["bad_points"] == []
    # a seeded sample of a list that grows with the product: some of each
    assert min(figures[key] for key in ("kill_points", "two_lives", "error_points")) >= 1
    assert figures["never_reached"] <= 2


def test_a_fork_does_what_it_is_to_do_at_its_end_and_nothing_of_its_parents(tmp_path: Path) -> None:
    class Kept:
        """Something of the parent's."""

    kept = Kept()
    finalizer = weakref.finalize(kept, (tmp_path / "parents").touch)
    if (pid := os.fork()) == 0:
        fork.begin_anew()
        atexit.register((tmp_path / "own").touch)
        fork.leave(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["own"] and finalizer.alive
