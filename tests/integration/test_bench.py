"""`--bench` of the trainer in real processes: RL on a given shape and on the orchestrator's, SFT on fake rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config.experiment import Experiment
from prime_hpc.launch.monitor.diff import run_figures
from prime_hpc.observe.bench import build_report, mean_of, read_report, write_report
from prime_hpc.orchestrator.bench import batch_shape, bench_report
from prime_hpc.starter.make import make_starter
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from prime_hpc.trainer.data.fake import RankShape
from tests.integration.test_trainer import assert_done, run_trainer, write_run
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bench") / "model")


def bench(folder: Path, model: Path, num_ranks: int = 1, **changes: Any) -> tuple[RunPaths, dict[str, Any]]:
    paths = write_run(folder / "run", model, **changes)
    assert_done(run_trainer(paths, num_ranks), paths)
    report = read_report(paths.root, "trainer")
    assert report is not None
    assert not paths.weights.exists() and not paths.checkpoints.exists()  # a bench publishes and saves nothing
    return paths, report


def test_fake_rl_batches(tmp_path: Path, model: Path) -> None:
    fake = {"batch_size": 8, "seq_len": 16, "micro_batch_size": 2}
    trainer = {"bench": True, "data": {"fake": fake}, "threads_per_rank": 1}
    paths, report = bench(
        tmp_path, model, trainer=trainer, max_steps=3, ckpt={"interval": 1}, wandb={"offline": True}, name="short"
    )
    figures = report["figures"]
    assert (report["num_warm"], report["num_steps"], len(report["steps"])) == (1, 2, 3)
    assert figures["tokens/step"] == 8 * 16
    training = report["phases"]["forward_backward"] + report["phases"]["optim"]
    assert 0 < training <= figures["s/step"]
    assert figures["tokens/s overall"] <= figures["tokens/s"]
    assert figures["memory, GiB"] > 0.05 and 0 < figures["mfu of measured"] < 1.5
    assert run_figures(paths.root)["bench trainer: tokens/s"] == figures["tokens/s"]
    (table,) = (paths.root / "wandb").rglob("*.table.json")
    assert ["tokens/s", figures["tokens/s"]] in json.loads(table.read_text())["data"]
    sent = b"".join(path.read_bytes() for path in (paths.root / "wandb").rglob("*.wandb"))
    assert b"bench/tokens/s" in sent and b"short-trainer-bench" in sent
    assert not list((paths.root / "wandb").glob("*.id"))


def test_sft_rows(tmp_path: Path, model: Path) -> None:
    data = {"type": "fake", "batch_size": 4, "seq_len": 12, "length": "variable"}
    trainer = {"bench": True, "threads_per_rank": 1}
    _, report = bench(tmp_path, model, kind="sft", sft={"data": data}, trainer=trainer, max_steps=2)
    assert report["kind"] == "sft" and 4 * 3 <= report["figures"]["tokens/step"] <= 4 * 12
    assert "reward" not in report["steps"][0]


def orchestrator_batch() -> list[RankBatch]:
    """Two ranks with ragged sequences, one of them empty of trained tokens."""
    ranks = []
    for lengths, prompts, micro in (([9, 5, 7], [3, 5, 2], [[0, 1], [2]]), ([6], [1], [[0], []])):
        ids = [np.arange(n, dtype=np.int32) for n in lengths]
        masks = [np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
        ranks.append(build_rank_batch(micro, ids, masks))
    return ranks


def test_the_orchestrators_shape(tmp_path: Path, model: Path) -> None:
    """Both halves of `rl --bench`: what the orchestrator's bench wrote is what the trainer's bench trains on."""
    ranks = orchestrator_batch()
    changes = {"trainer": {"bench": True, "num_ranks": 2, "threads_per_rank": 1}, "max_steps": 2}
    experiment = Experiment.model_validate({**changes, "orchestrator": {"bench": True, "env": [{"id": "x"}]}})
    write_report(tmp_path / "run", bench_report(experiment, [], batch_shape(ranks), incarnation=0))
    _, report = bench(tmp_path, model, 2, orchestrator={"bench": True}, **changes)
    assert report["figures"]["tokens/step"] == sum(rank.num_tokens for rank in ranks) == 27
    assert report["steps"][0]["num_targets"] == 6 + 0 + 5 + 5
    assert "orchestrator" in report["setting"]["data"]


def test_a_shape_makes_the_same_batch_again() -> None:
    (shape, _) = (RankShape(**rank) for rank in batch_shape(orchestrator_batch()))
    one, again, other = shape.batch(50, 0, 1, 0), shape.batch(50, 0, 1, 0), shape.batch(50, 0, 2, 0)
    assert np.array_equal(one.token_ids, again.token_ids) and not np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.seq_offsets, orchestrator_batch()[0].seq_offsets)
    assert np.array_equal(one.loss_mask, orchestrator_batch()[0].loss_mask)
    assert one.num_micro_batches == 2


def test_means_of_rates_count_the_seconds() -> None:
    rows = [{"rate": 99.0, "s": 9.0}, {"rate": 10.0, "s": 1.0}, {"rate": 1.0, "s": 2.0}]
    assert mean_of(rows, "s") == 1.5 and mean_of(rows, "rate", "s") == pytest.approx(12 / 3)
    assert mean_of(rows[:1], "rate") == 99 and mean_of(rows, "none", "none") == 0


def test_a_report_of_another_schema_is_none(tmp_path: Path) -> None:
    report = build_report("trainer", kind="rl", setting={}, figures={}, phases={}, rows=[])
    write_report(tmp_path, report | {"schema": 0})
    assert read_report(tmp_path, "trainer") is None and read_report(tmp_path, "orchestrator") is None


@pytest.mark.exhaustive
def test_a_whole_bench_measures_both_sides(tmp_path: Path) -> None:
    """`rl --bench` with real engines: rollouts as a run has them, then the trainer on batches of their shape."""
    make_starter(tmp_path / "starter")
    tree = {
        "kind": "rl",
        "name": "whole",
        "model": {"name": str(tmp_path / "starter" / "model"), "dtype": "float32", "renderer": "qwen3"},
        "seq_len": 128,
        "async_level": 1,
        "orchestrator": {
            "batch_size": 16,
            "rollouts_per_example": 4,
            "env": [{"id": "reverse-text"}],
            "sampling": {"max_tokens": 24},
        },
        "inference": {"backend": "transformers", "server": {"port": 0}},
        "trainer": {"threads_per_rank": 1},
    }
    (tmp_path / "exp.yaml").write_text(json.dumps(tree))
    argv = ["rl", "@", str(tmp_path / "exp.yaml"), "--bench", "--output-dir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "prime_hpc.cli", *argv], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rollouts, training = (read_report(tmp_path / "whole", role) for role in ("orchestrator", "trainer"))
    assert rollouts is not None and training is not None
    assert rollouts["setting"]["in flight at most"] == 32 and (rollouts["num_warm"], rollouts["num_steps"]) == (2, 3)
    assert (
        all(row["episodes/per_second"] > 0 for row in rollouts["steps"][2:]) and rollouts["figures"]["rollouts/s"] > 0
    )
    assert "orchestrator" in training["setting"]["data"] and training["figures"]["tokens/s"] > 0
    for role in ("orchestrator", "trainer"):
        assert f"{role} bench (rl)" in ended.stdout + ended.stderr
    assert not list(RunPaths(tmp_path / "whole").weights.iterdir())
