"""The trainer under torchrun on CPU: RL on scripted batches, publishing, checkpoints, SFT, failures."""

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import holds_changes, list_versions
from prime_hpc.trainer.batching.micro_batches import redistribute
from prime_hpc.weight_transport.delta_image import restore
from tests.support import forked
from tests.support.tiny_model import make_tiny_model, random_rank_batch

pytestmark = pytest.mark.slow
REPO = Path(__file__).resolve().parents[2]
LENGTHS = [[17, 40, 9], [60], [33, 5], [50, 12]]
"""Micro-batches of a step, for one rank."""
KEEP_ALL = {"optim": {"lr": 1e-3}, "threads_per_rank": 1, "keep_weights": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def write_run(run_dir: Path, model: Path, **changes: object) -> RunPaths:
    tree: dict = {
        "kind": "rl",
        "name": run_dir.name,
        "output_dir": str(run_dir.parent),
        "max_steps": 3,
        "seq_len": 64,
        "model": {"name": str(model), "dtype": changes.pop("dtype", "float32")},
        "orchestrator": {"sampling": {"max_tokens": 16}},
        "trainer": {"optim": {"lr": 1e-3}, "threads_per_rank": 1, "batch_timeout_s": 20},
    } | changes
    write_snapshot(Experiment.model_validate(tree), run_dir, ["test"])
    return RunPaths(run_dir)


def full_batch(step: int) -> RankBatch:
    return random_rank_batch(LENGTHS, seed=step, step=step)


def write_batches(paths: RunPaths, steps: range, num_ranks: int) -> None:
    for step in steps:
        whole = full_batch(step)
        ranks = [redistribute([whole], r, num_ranks) for r in range(num_ranks)]
        write_batch(paths, step, ranks, state={"step": step})


def command(paths: RunPaths, num_ranks: int, module: str = "prime_hpc.trainer.main") -> list[str]:
    """What follows `python -m`. One rank runs without torchrun, which the trainer allows: it saves seconds a run."""
    torchrun = ["prime_hpc.trainer.torchrun", f"--nproc-per-node={num_ranks}", "-m"] if num_ranks > 1 else []
    return [*torchrun, module, str(paths.root)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | extra


def run_trainer(
    paths: RunPaths, num_ranks: int = 1, module: str = "prime_hpc.trainer.main", **extra: str
) -> subprocess.CompletedProcess[str]:
    return forked.run(command(paths, num_ranks, module), env=environment(**extra))


def weights(paths: RunPaths, version: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(paths.weights_step(version).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_done(result: subprocess.CompletedProcess[str], paths: RunPaths) -> None:
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and status["state"] == "done"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunPaths:
    """An uninterrupted run of six steps on one rank, every version kept."""
    paths = write_run(tmp_path_factory.mktemp("runs") / "one", model, max_steps=6, trainer=KEEP_ALL)
    write_batches(paths, range(1, 7), 1)
    assert_done(run_trainer(paths), paths)
    return paths


def test_rollouts_are_kept_with_the_probabilities_of_both_sides(model: Path, one: RunPaths) -> None:
    """Of the first step by the model that it began with, in another forward pass; nothing else is as large."""
    logged = [row for row in read_metrics(one.metrics("tokens")) if row["step"] == 1]
    assert {row["step"] for row in read_metrics(one.metrics("tokens"))} == set(range(1, 7)) and len(logged) == 2
    part = full_batch(1).micro_batch(0)
    rewards = sorted(part.rewards.tolist())
    assert [row["reward"] for row in logged] == pytest.approx([rewards[-1], rewards[0]])
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in logged:
        sequence = part.sample_ids.tolist().index(row["sample"])
        window = slice(*part.seq_offsets[sequence : sequence + 2].tolist())
        assert row["ids"] == part.token_ids[window].tolist()
        trained = np.flatnonzero(part.target_mask()[window])
        assert np.flatnonzero(row["trained"]).tolist() == trained.tolist() and len(trained)
        with torch.no_grad():
            logits = policy(torch.tensor([row["ids"]])).logits[0].double() / row["temperature"]
        expected = logits.log_softmax(-1)[trained - 1, [row["ids"][i] for i in trained]]
        found = [row["trainer"][i] for i in trained]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=2e-5)
        engine = [row["logprobs"][i] for i in trained]
        assert engine == pytest.approx(part.logprobs[window][trained].tolist(), abs=2e-5)


def test_two_ranks_equal_one_and_versions_load(tmp_path: Path, model: Path, one: RunPaths) -> None:
    two = write_run(tmp_path / "two", model, trainer=KEEP_ALL | {"publish_beside": True})
    write_batches(two, range(1, 4), 2)
    assert_done(run_trainer(two, 2), two)
    for rank in (0, 1):  # each rank has a log of its own, and a file for what libraries write to standard error
        (log,) = two.root.glob(f"logs/attempt_1/trainer/rank_{rank}.log")
        assert f"trainer[{rank}]" in log.read_text()
        assert log.with_name(f"rank_{rank}.stderr.log").exists()
    base = load_file(model / "model.safetensors")
    assert list_versions(one) == [1, 2, 3, 4, 5, 6] and list_versions(two) == [1, 2, 3]
    for version in list_versions(two):
        a, b = weights(one, version), weights(two, version)
        assert a.keys() == b.keys() == base.keys()
        assert any(not torch.equal(a[k], base[k]) for k in a)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-6, msg=partial("{}: {}".format, name))
    told: Any = AutoModelForCausalLM.from_pretrained(two.weights_step(3), output_loading_info=True)
    loaded, info = told  # its signature knows only the form without the second
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (two.weights_step(3) / "tokenizer.json").exists()
    mine = weights(two, 3)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, mine[name]), name
    rows_one, rows_two = (read_metrics(p.metrics("trainer"))[:3] for p in (one, two))
    assert [r["step"] for r in rows_two] == [1, 2, 3]
    for a_row, b_row in zip(rows_one, rows_two, strict=True):
        for key in ("loss", "grad_norm", "ratio", "kl", "entropy", "logprob_diff_max", "lag_mean", "num_targets"):
            assert a_row[key] == pytest.approx(b_row[key], rel=1e-4), key
    assert_first_step(model, full_batch(1), rows_one[0])


def assert_first_step(model: Path, batch: RankBatch, row: dict[str, float]) -> None:
    """Loss and gradient norm of step 1 against one sequence at a time, without packing, sharding or our losses."""
    hf = AutoModelForCausalLM.from_pretrained(model).eval()
    loss, count = torch.zeros(()), 0
    for s in range(batch.num_sequences):
        part = slice(int(batch.seq_offsets[s]), int(batch.seq_offsets[s + 1]))
        ids = torch.from_numpy(batch.token_ids[part].astype(np.int64))
        logits = hf(input_ids=ids[None]).logits[0] / batch.temperatures[s]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(np.array(batch.loss_mask[part][1:]))
        mu, advantage = (torch.from_numpy(np.array(x[part][1:])) for x in (batch.logprobs, batch.advantages))
        ratio = (logprobs.detach() - mu).exp().clamp(max=8.0)
        loss = loss - (ratio * advantage * logprobs)[mask].sum()
        count += int(mask.sum())
    (loss / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters() if p.grad is not None])
    assert row["loss"] == pytest.approx(loss.item() / count, rel=1e-4)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert row["num_targets"] == count


@pytest.mark.exhaustive
def test_versions_as_changes_are_those_of_whole_ones_also_after_a_resume(tmp_path: Path, model: Path) -> None:
    """In bfloat16 at a small learning rate; a checkpoint at a version that holds changes, and little retention."""
    trainer = {"optim": {"lr": 1e-6}, "threads_per_rank": 1, "batch_timeout_s": 20, "keep_weights": 1}
    small: dict[str, Any] = {"dtype": "bfloat16", "ckpt": {"interval": 4}}
    whole = write_run(tmp_path / "whole", model, **small, max_steps=8, trainer=trainer | {"keep_weights": 9})
    write_batches(whole, range(1, 9), 2)
    assert_done(run_trainer(whole, 2), whole)
    delta = tmp_path / "delta"
    for steps, beside in ((4, True), (8, False)):
        more = {"max_steps": steps, "weights": {"transport": "delta"}, "trainer": trainer | {"publish_beside": beside}}
        paths = write_run(delta, model, **small, **more)
        if steps == 4:
            write_batches(paths, range(1, 9), 2)
            assert_done(run_trainer(paths, 2), paths)
        else:
            assert_done(run_trainer(paths, 2, PRIMEHPC_RESUME_STEP="4"), paths)
        assert holds_changes(paths.weights_step(steps))
        restore(paths.weights_step(steps), tmp_path / f"restored{steps}")
        for file in whole.weights_step(steps).iterdir():
            if file.name != "manifest.json":
                assert (tmp_path / f"restored{steps}" / file.name).read_bytes() == file.read_bytes(), (steps, file)
    assert list_versions(paths) == [2, 3, 4, 6, 7, 8]  # the checkpoints' versions and the newest, each with its chain


def test_resume_is_exact_also_with_other_ranks(tmp_path: Path, model: Path, one: RunPaths) -> None:
    halves = write_run(tmp_path / "halves", model, max_steps=3, ckpt={"interval": 50})
    write_batches(halves, range(1, 7), 1)
    assert_done(run_trainer(halves), halves)
    assert json.loads((halves.checkpoint_step(3) / "orchestrator" / "state.json").read_text()) == {"step": 3}
    beside = {"optim": {"lr": 1e-3}, "threads_per_rank": 1, "batch_timeout_s": 20, "publish_beside": True}
    write_run(tmp_path / "halves", model, max_steps=6, ckpt={"interval": 50}, trainer=beside)
    assert_done(run_trainer(halves, PRIMEHPC_RESUME_STEP="3"), halves)
    assert list_versions(halves) == [3, 5, 6]  # keep_weights = 2, and the one that a checkpoint needs
    assert [r["step"] for r in read_metrics(halves.metrics("trainer"))] == [1, 2, 3, 4, 5, 6]
    a, b = weights(one, 6), weights(halves, 6)
    assert all(torch.equal(a[name], b[name]) for name in a)

    # The same checkpoint under two ranks, on batches that were packed for one.
    wider = write_run(tmp_path / "wider", model, max_steps=6, ckpt={"path": str(halves.checkpoints)})
    write_batches(wider, range(1, 7), 1)
    halves.checkpoint_step(6).rename(tmp_path / "moved")
    assert resolve_resume(halves.checkpoints, "latest").step == 3
    assert_done(run_trainer(wider, 2, PRIMEHPC_RESUME_STEP="3"), wider)
    c = weights(wider, 6)
    for name in a:
        torch.testing.assert_close(a[name], c[name], rtol=1e-4, atol=5e-6)


def test_nan_stops_before_publishing(tmp_path: Path, model: Path) -> None:
    # weights that are whole, finite numbers, whose squares are not
    paths = write_run(tmp_path / "nan", model, trainer={"optim": {"lr": 1e30}, "threads_per_rank": 1})
    write_batches(paths, range(1, 4), 1)
    result = run_trainer(paths)
    assert result.returncode != 0
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and status["state"] == "failed"
    assert "step 2" in status["error"] and "rank 0" in status["error"] and "NonFiniteError" in status["error"]
    assert list_versions(paths) == [1]


def test_missing_batch_and_sigterm_end_the_process(tmp_path: Path, model: Path) -> None:
    short = {"optim": {"lr": 1e-3}, "threads_per_rank": 1, "batch_timeout_s": 1}
    paths = write_run(tmp_path / "nobatch", model, trainer=short)
    assert run_trainer(paths).returncode != 0
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and "batch 1" in status["error"] and "batch_timeout_s" in status["error"]

    paths = write_run(tmp_path / "term", model, trainer=short | {"batch_timeout_s": 600})
    child = forked.start(command(paths, 2), env=environment())
    try:
        wait_for_state(paths, "ready")
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=280)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and status["state"] == "failed" and "SIGTERM" in status["error"]


def wait_for_state(paths: RunPaths, state: str) -> None:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        status = read_status(paths.logs(1, "trainer"))
        if status is not None and status["state"] == state:
            return
        time.sleep(0.1)
    raise AssertionError(f"no state {state} within 200 s")
