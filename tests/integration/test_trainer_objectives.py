"""The real trainer with other objectives and optimizers: one rank against two, exact resume, refused steps, replay."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import list_versions
from prime_hpc.trainer.batching.micro_batches import read_local_batch, redistribute
from tests.integration.test_trainer import assert_done, environment, full_batch, run_trainer, weights, write_run
from tests.support import forked
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

GSPO = {
    "type": "gspo",
    "clip_low": 0.5,
    "clip_high": 0.5,
    "kl": {"target": "reference", "estimator": "k3", "coef": 0.5, "unbiased": True},
    "covariance": {"type": "clip", "share": 0.2, "low": 0.01},
    "correction": {"type": "truncate", "high": 5.0, "batch_normalize": True},
}
UPDATES = {"num_mini_batches": 2, "epochs_per_batch": 2}
CORRECTED = {"type": "dr_grpo", "correction": {"type": "mask", "low": 0.2, "high": 5.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def trainer(loss: dict, optim: str, **more: object) -> dict:
    return {"loss": loss, "optim": {"type": optim, "lr": 2e-3}, "threads_per_rank": 1, "keep_weights": 9} | more


def write_batches(paths: RunPaths, steps: range, num_ranks: int, change: object = None) -> None:
    for step in steps:
        whole = full_batch(step)
        if callable(change):
            whole = RankBatch(**{**whole.__dict__, **change(whole)})
        write_batch(paths, step, [redistribute([whole], r, num_ranks) for r in range(num_ranks)], state={"step": step})


def in_mini_batches(batch: RankBatch) -> dict[str, object]:
    micro = np.repeat(np.arange(batch.num_micro_batches), np.diff(batch.micro_offsets))
    return {"mini_batches": (micro == 1).astype(np.int32)}


def compare_rows(one: RunPaths, two: RunPaths, num_steps: int) -> list[dict]:
    """The first steps' metrics of both runs are alike; returns those of `one`."""
    rows = [read_metrics(p.metrics("trainer"))[:num_steps] for p in (one, two)]
    for a_row, b_row in zip(*rows, strict=True):
        keys = {"loss", "grad_norm", "ratio", "kl", "entropy", "clipped", "kl_penalty", "corrected", "high_covariance"}
        keys |= {"correction_mean"} & set(b_row)
        for key in keys & set(a_row):
            assert a_row[key] == pytest.approx(b_row[key], rel=2e-3, abs=1e-6), key
    return rows[0]


@pytest.mark.exhaustive
def test_gspo_with_a_reference_and_muon_on_two_ranks_equal_one_and_resume(tmp_path: Path, model: Path) -> None:
    """In four updates a batch, of mini-batches of which a rank may have nothing."""
    config, saved = trainer(GSPO, "muon", **UPDATES), {"interval": 2}
    one = write_run(tmp_path / "one", model, max_steps=3, trainer=config, ckpt=saved)
    write_batches(one, range(1, 4), 1, in_mini_batches)
    assert_done(run_trainer(one), one)
    two = write_run(tmp_path / "two", model, max_steps=2, trainer=config, ckpt=saved)
    write_batches(two, range(1, 4), 2, in_mini_batches)
    dealt = [read_local_batch(two.rollouts_step(1), r, 2).values("mini_batches").tolist() for r in range(2)]
    assert any(len(set(own)) == 1 for own in dealt)
    assert_done(run_trainer(two, 2), two)
    first, second = compare_rows(one, two, 2)
    # the reference is the model that training began with
    assert 0 < first["kl_penalty"] < second["kl_penalty"] and first["num_updates"] == 4
    assert first["high_covariance"] > 0.02
    for name, tensor in weights(one, 2).items():
        torch.testing.assert_close(weights(two, 2)[name], tensor, rtol=1e-4, atol=2e-5)

    # From step 2 to 3 again: after the same ranks the same bits, after two ranks nearly so.
    for run in (one, two):
        later = write_run(tmp_path / f"after-{run.root.name}", model, max_steps=3, trainer=config, ckpt={})
        write_batches(later, range(1, 4), 1, in_mini_batches)
        shutil.copytree(run.checkpoint_step(2), later.checkpoint_step(2))
        assert_done(run_trainer(later, PRIMEHPC_RESUME_STEP="2"), later)
        for name, tensor in weights(one, 3).items():
            rtol, atol = (0.0, 0.0) if run is one else (1e-4, 5e-5)
            torch.testing.assert_close(weights(later, 3)[name], tensor, rtol=rtol, atol=atol)


def test_masked_correction_and_sign_descent_resume_exactly_and_warn_once(tmp_path: Path, model: Path) -> None:
    config = trainer(CORRECTED | {"mismatch": {"warn": 1e-3}}, "signsgd")
    whole = write_run(tmp_path / "whole", model, max_steps=3, trainer=config, ckpt={"interval": 2})
    write_batches(whole, range(1, 4), 1)
    result = run_trainer(whole)
    assert_done(result, whole)
    assert (result.stderr + result.stdout).count("above trainer.loss.mismatch.warn") == 1
    rows = read_metrics(whole.metrics("trainer"))
    assert [r["mismatch_alarm"] for r in rows] == [1.0] * 3 and all(0 < r["corrected"] < 1 for r in rows)
    later = write_run(tmp_path / "later", model, max_steps=3, trainer=config, ckpt={})
    write_batches(later, range(1, 4), 1)
    shutil.copytree(whole.checkpoint_step(2), later.checkpoint_step(2))
    assert_done(run_trainer(later, PRIMEHPC_RESUME_STEP="2"), later)
    a, b = weights(whole, 3), weights(later, 3)
    assert all(torch.equal(a[k], b[k]) for k in a)


def replay(kept: Path) -> subprocess.CompletedProcess[str]:
    return forked.run(["tests.faults.entry", "prime-hpc", "replay", str(kept), "--ranks", "1"], env=environment())


def test_a_mismatch_above_the_limit_stops_before_publishing_and_is_kept(tmp_path: Path, model: Path) -> None:
    config = trainer({"mismatch": {"warn": 1e-6, "stop": 1e-3}}, "adamw")
    paths = write_run(tmp_path / "run", model, trainer=config)
    write_batches(paths, range(1, 4), 2)
    result = run_trainer(paths, 2)
    assert result.returncode != 0
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and "MismatchError" in status["error"] and "mismatch.stop = 0.001" in status["error"]
    assert list_versions(paths) == []
    kept = paths.failed_step(1)
    assert f"prime-hpc replay {kept}" in result.stderr + result.stdout
    again = replay(kept)  # two ranks' batch on one rank
    assert again.returncode == 1, again.stderr
    assert "mismatch.stop" in again.stdout and "8 sequences with targets" in again.stdout
    assert forked.run(["prime_hpc.trainer.replay", str(paths.root)], env=environment()).returncode == 2


def test_labels_all_masked_leave_the_weights_as_they_are(tmp_path: Path, model: Path) -> None:
    paths = write_run(tmp_path / "run", model, max_steps=1, trainer=trainer({"type": "gspo"}, "muon"))
    write_batches(paths, range(1, 2), 2, lambda b: {"loss_mask": np.zeros_like(b.loss_mask)})
    result = run_trainer(paths, 2)
    assert_done(result, paths)
    assert "every label is masked" in result.stderr + result.stdout
    [row] = read_metrics(paths.metrics("trainer"))
    assert row["loss"] == 0 and row["grad_norm"] == 0 and row["num_targets"] == 0
    from safetensors.torch import load_file

    base, mine = load_file(model / "model.safetensors"), weights(paths, 1)
    assert all(torch.equal(base[k], mine[k]) for k in base)


def test_a_rank_without_any_sequence_takes_part(tmp_path: Path, model: Path) -> None:
    def first_only(batch: RankBatch) -> dict:
        mask = batch.loss_mask.copy()
        mask[batch.seq_offsets[3] :] = False
        return {"loss_mask": mask}

    one = write_run(tmp_path / "one", model, max_steps=1, trainer=trainer(GSPO, "adamw"))
    write_batches(one, range(1, 2), 1, first_only)
    assert_done(run_trainer(one), one)
    two = write_run(tmp_path / "two", model, max_steps=1, trainer=trainer(GSPO, "adamw"))
    whole = RankBatch(**{**full_batch(1).__dict__, **first_only(full_batch(1))})
    write_batch(two, 1, [whole, RankBatch.empty(whole.num_micro_batches)], state={})
    assert_done(run_trainer(two, 2), two)
    [a_row], [b_row] = (read_metrics(p.metrics("trainer")) for p in (one, two))
    for key in ("loss", "grad_norm", "num_targets", "kl"):
        assert a_row[key] == pytest.approx(b_row[key], rel=1e-4, abs=1e-7), key
    a, b = weights(one, 1), weights(two, 1)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-5)


def test_nan_keeps_batch_and_weights_and_the_replay_says_where(tmp_path: Path, model: Path) -> None:
    # after the first step the weights are finite, their squares are not
    paths = write_run(tmp_path / "nan", model, trainer={"optim": {"lr": 1e30}, "threads_per_rank": 1})
    write_batches(paths, range(1, 3), 1)
    assert run_trainer(paths).returncode != 0
    assert list_versions(paths) == [1]
    kept = paths.failed_step(2)
    assert json.loads((kept / "rollouts" / "step_000002" / "manifest.json").read_text())["step"] == 2
    again = replay(kept)
    assert again.returncode == 1, again.stderr
    assert "grad_norm = nan" in again.stdout and "stopped before version 2" in again.stdout
