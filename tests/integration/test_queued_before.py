"""A job that an earlier version queued: its run directory and script, frozen as that version wrote them, run by a
stand-in Slurm with the code of today."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_dirs import read_json
from tests.support.fake_slurm import FakeSlurm
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "data" / "queued_before"
"""What `prime-hpc submit` of commit f779602 (2026-11-22) left; `@ROOT@` and `@PYTHON@` stand for paths."""
SRUN = """#!/bin/bash
# one task on this machine, without srun's own options
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=n1
exec "$@"
"""


def _thaw(root: Path) -> Path:
    """Write the frozen run below `root`; returns its directory."""
    run_dir = root / "outputs" / "queued"
    for file in FROZEN.rglob("*.*"):
        text = file.read_text().replace("@ROOT@", str(root)).replace("@PYTHON@", shlex.quote(sys.executable))
        path = run_dir / file.relative_to(FROZEN)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return run_dir


@pytest.mark.exhaustive
def test_its_script_runs_the_job_to_its_end(tmp_path: Path) -> None:
    run_dir = _thaw(tmp_path)
    make_tiny_model(tmp_path / "model")
    slurm = FakeSlurm(tmp_path)
    (slurm.bin / "srun").write_text(SRUN)
    assert slurm.add(state="RUNNING", name="queued", script=str(run_dir / "job.sbatch")) == "100"
    job = {"SLURM_JOB_ID": "100", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}
    environ = {**slurm.environ, **job, "PYTHONPATH": str(ROOT)}
    script = ["bash", str(run_dir / "job.sbatch")]
    done = subprocess.run(script, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (attempt,) = read_attempts(run_dir / "attempts.jsonl")
    assert (attempt["outcome"], attempt["job_id"], attempt["saved_step"]) == ("completed", "100", 2)
    assert (run_dir / "weights" / "step_000002").is_dir()
    record = read_json(run_dir / "submit.json")
    assert record is not None and record["job_id"] == "100"  # the job is the one that was sent, and says so
