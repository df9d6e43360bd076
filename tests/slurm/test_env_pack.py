"""A real job whose processes all start from a packed environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import rows
from tests.support.slurm import DEVCLUSTER, Cluster
from tests.support.small_jobs import attempts, make_folder, small_tree

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]


def test_a_job_from_a_packed_environment(cluster: Cluster) -> None:
    """A small environment that looks into this one's packages stands for a large one."""
    folder = make_folder(cluster, {"node_local": str(cluster.shared / "local" / "$SLURM_JOB_ID")})
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    here = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    site = next(venv.glob("lib/python3*/site-packages"))
    (site / "others.pth").write_text(f"{DEVCLUSTER.parents[1]}\n{here}\n")
    cli = [str(venv / "bin" / "python"), "-m", "prime_hpc.cli"]
    made = cluster.x([*cli, "env", "pack", "--format", "tar.gz", "--json"])
    assert made.returncode == 0, made.stderr
    pack = json.loads(made.stdout)
    data = {"data": {"type": "fake", "batch_size": 8}}
    slurm = {"partition": "gpu", "env_pack": pack["path"]}
    tree = small_tree(folder, slurm, kind="sft", seq_len=64, sft=data, max_steps=2)
    (folder / "exp.yaml").write_text(yaml.safe_dump(tree))
    done = cluster.x([*cli, "submit", str(folder / "exp.yaml"), "--name", "packed", "--json"])
    assert done.returncode == 0, done.stderr
    job, run_dir = json.loads(done.stdout)["job_id"], folder / "out" / "packed"
    cluster.wait_state(job, "COMPLETED", timeout=280)
    assert [life["outcome"] for life in attempts(run_dir)] == ["completed"]
    assert [row["step"] for row in rows(run_dir, "trainer")] == [1, 2]
    log = (run_dir / "logs" / "attempt_1" / "trainer" / "trainer.log").read_text()
    started = next(line for line in log.splitlines() if "] $ " in line)
    own = cluster.shared / "local" / job
    assert f"$ {own}/prime-hpc-" in started and f"/env-{pack['hash']}/bin/python -P -m prime_hpc.trainer" in started
    output = (run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert f"brought {pack['path']} to {own}/" in output, "once a node: by the batch script"
    assert "brought" not in log
