"""A real run that was archived and brought back elsewhere goes on to the last bit as one that was left alone."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs import command, rows
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run_dir, "trainer")}


def test_a_restored_run_resumes(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    experiment: dict[str, Any] = {
        "kind": "sft",
        "output_dir": str(tmp_path / "out"),
        "launch": "local",
        "seq_len": 64,
        "max_steps": 6,
        "model": {"name": str(tmp_path / "model"), "dtype": "float32"},
        "ckpt": {"interval": 3},
        "trainer": {"num_ranks": 1, "threads_per_rank": 1, "scheduler": {"type": "constant"}},
        "sft": {"data": {"type": "fake", "batch_size": 8}},
    }
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(experiment))
    for name, steps in (("whole", 6), ("half", 3)):
        done = command("sft", "@", tmp_path / "exp.yaml", "--name", name, "--max-steps", steps)
        assert done.returncode == 0, done.stderr
    half = tmp_path / "out" / "half"
    done = command("prime-hpc", "archive", half, tmp_path / "kept", "--delete-source")
    assert done.returncode == 0 and not half.exists(), done.stderr
    (packed,) = (tmp_path / "kept").iterdir()
    done = command("prime-hpc", "archive", "--restore", packed, tmp_path / "back" / "half")
    assert done.returncode == 0, done.stderr
    done = command("prime-hpc", "resume", tmp_path / "back" / "half", "--max-steps", 6, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "back" / "half") == losses(tmp_path / "out" / "whole")
