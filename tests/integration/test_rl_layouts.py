"""RL from end to end under tensor, expert and context parallelism: what one attempt saved goes on under the next one's
layout, and all steps are those of a single rank on the same batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from prime_hpc.store.run_paths import RunPaths
from tests.support.rl_layouts import LAYOUTS, STEPS_A_LIFE
from tests.support.runs import ENVIRONMENT, ROOT, rows

pytestmark = pytest.mark.slow
NOISE = 1e-5
"""Relative difference to one rank: sums in another order, float32, after a few updates."""


def shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name -> shape of a model directory."""
    found: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.mark.exhaustive
def test_three_layouts_are_one_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rl_layouts", str(tmp_path)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    many, one = ({r["step"]: r for r in rows(tmp_path / name, "trainer") if "loss" in r} for name in ("run", "one"))
    assert sorted(many) == sorted(one) == list(range(1, STEPS_A_LIFE * len(LAYOUTS) + 1)), done.stdout
    for step, row in many.items():
        for name in ("loss", "grad_norm", "entropy", "num_tokens"):
            assert row[name] == pytest.approx(one[step][name], rel=NOISE, abs=NOISE), (step, name)
        assert row["grad_norm"] > 0.1
    attempts = [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]
    assert [(a["outcome"], a["resume_step"]) for a in attempts] == [("completed", n) for n in (None, 2, 4)]
    wanted = shapes(tmp_path / "model")
    for step in (STEPS_A_LIFE * (n + 1) for n in range(len(LAYOUTS))):
        assert shapes(RunPaths(tmp_path / "run").weights_step(step)) == wanted
