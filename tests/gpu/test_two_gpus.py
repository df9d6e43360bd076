"""Two ranks on two GPUs: NCCL's sums against one rank's, and asynchronous saves that leave the other's GPU alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
pytestmark = pytest.mark.gpu_count(2)


def start(folder: Path, model: Path, name: str, num_ranks: int, **change: Any) -> "subprocess.Popen[bytes]":
    tree = {
        "kind": "sft",
        "name": name,
        "output_dir": str(folder),
        "device": "cuda",
        "launch": "local",
        "max_steps": 6,
        "seq_len": 256,
        "model": {"name": str(model), "dtype": "float32"},
        "trainer": {"num_ranks": num_ranks, "micro_batch_tokens": 1024, "optim": {"lr": 1e-3}},
        "sft": {"data": {"type": "fake", "batch_size": 16, "seq_len": 256, "length": "variable"}},
        **change,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    log = (folder / f"{name}.log").open("wb")
    command = [sys.executable, "-m", "prime_hpc.cli", "sft", "@", str(folder / f"{name}.yaml")]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.inference_server import save_model

    return save_model(tmp_path_factory.mktemp("model"), tied=False, seed=0)


def test_fsdp_over_nccl_trains_as_one_rank_does(model: Path, tmp_path: Path) -> None:
    for name, num_ranks in (("one", 1), ("two", 2)):
        assert start(tmp_path, model, name, num_ranks).wait(600) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and one == pytest.approx(two, rel=1e-4)


def test_a_background_save_makes_no_context_on_another_ranks_gpu(model: Path, tmp_path: Path) -> None:
    ckpt = {"interval": 1, "save_async": True, "keep_last": 1}
    process = start(tmp_path, model, "saves", 2, ckpt=ckpt, max_steps=40)
    seen: dict[str, set[str]] = {}
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    while process.poll() is None:
        for line in subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines():
            pid, gpu = (part.strip() for part in line.split(","))
            seen.setdefault(pid, set()).add(gpu)
        time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "saves.log").read_text()[-3000:]
    if not seen:
        pytest.skip("nvidia-smi shows no processes here (a container's own process ids)")
    assert all(len(gpus) == 1 for gpus in seen.values()), seen
