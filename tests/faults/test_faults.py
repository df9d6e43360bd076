"""The short form of `tools/faults`: a few points of every way in which a run can break. The full sweep is the tool's.

In a process of its own: the harness replaces `subprocess.Popen` and forks.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOWS = "kill,kill-all,stop,twins,ENOSPC"
SAMPLE = 5
READS = 40
"""Of some 5,000: the sample holds some of each kind of run, error and duration."""
LIMIT_S, EXHAUSTIVE_LIMIT_S = 290, 880
"""A little before pytest's own."""


def swept(*flags: str, limit_s: float = EXHAUSTIVE_LIMIT_S) -> tuple[dict[str, Any], str]:
    """The tool's figures, and what it said of each point that went wrong; it found none."""
    command = [sys.executable, str(ROOT / "tools" / "faults"), "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and figures["bad_points"] == [], f"{figures}\n{done.stderr[-6000:]}"
    return figures, done.stderr[-6000:]


def test_no_read_that_fails_deletes_or_starts_over() -> None:
    figures, said = swept("--reads", "--sample", str(READS), "--jobs", "2", limit_s=LIMIT_S)
    wrong = {key: figures[key] for key in ("deleted_whole", "started_over", "skipped", "duplicated", "mismatches")}
    assert not any(wrong.values()) and not figures["failed"], f"{wrong}\n{said}"
    assert set(figures["kinds"]) == {"rl", "sft", "path", "many"}
    assert figures["never_reached"] <= 2 and figures["ended"] > READS // 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile, limit_s",
    [
        ("async", LIMIT_S),
        *(pytest.param(name, EXHAUSTIVE_LIMIT_S, marks=pytest.mark.exhaustive) for name in ("mask", "images")),
    ],
)
def test_a_run_broken_in_every_way_loses_nothing(profile: str, limit_s: float, tmp_path: Path) -> None:
    flags = ["--how", HOWS, "--roles", "orchestrator,rank0,rank1", "--sample", str(SAMPLE), "--profiles", profile]
    figures, said = swept(*flags, "--keep", str(tmp_path), limit_s=limit_s)
    wrong = {key: figures[key] for key in ("skipped", "duplicated", "mismatches", "broken", "failed")}
    assert not any(wrong.values()), f"{wrong}\n{said}"
    # a seeded sample of a list that grows with the product: some of each
    assert min(figures[key] for key in ("kill_points", "two_lives", "error_points")) >= 1
    assert figures["never_reached"] <= 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_batch_that_was_left_between_two_updates_is_done_again(tmp_path: Path) -> None:
    flags = ["--how", "kill,kill-all", "--roles", "rank0,rank1", "--sample", "2", "--profiles", "updates"]
    figures, said = swept(*flags, "--match", "update updates", "--keep", str(tmp_path))
    assert figures["kill_points"] == 2 and figures["mismatches"] == 0, said


def test_a_fork_has_its_own_files_and_its_own_end_and_nothing_of_its_parents(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forking_parent", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at-its-end", "own", "parents"]
    assert (tmp_path / "own").read_text() == "whole"
