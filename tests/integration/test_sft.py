"""SFT on CPU: the data room in real trainer processes, exact resumes, held-out loss, two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.report import write_report
from prime_hpc.observe.role_status import read_status
from prime_hpc.store.leases import last_version
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import list_versions
from tests.integration.test_trainer import assert_done, run_trainer, weights, write_run
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
STEPS, HALF = 12, 7
TRAINER = {"optim": {"lr": 5e-3}, "threads_per_rank": 1, "scheduler": {"type": "constant", "warmup_steps": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("sft") / "model").parent
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    rows: list[Any] = [{"prompt": f"reverse {w} {i % 3}", "completion": w[::-1]} for i, w in enumerate(words * 8)]
    rows.insert(5, {"prompt": "b" * 100, "completion": "too long"})
    rows.insert(9, {"messages": [{"role": "user", "content": "nothing to train here"}]})
    own = AutoTokenizer.from_pretrained(folder / "model").chat_template
    (folder / "own.jinja").write_text("{#- of one's own -#}" + own, encoding="utf-8")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (folder / "held.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:15]), encoding="utf-8")
    return folder


def run(folder: Path, name: str, num_ranks: int = 1, *, data: dict[str, Any] | None = None, **changes: Any) -> RunPaths:
    own = {"path": str(folder / "data.jsonl"), "chat_template": str(folder / "own.jinja"), "batch_size": 16}
    sft = {"data": own | (data or {})}
    if changes.pop("held_out", False):
        sft["eval"] = {"path": str(folder / "held.jsonl"), "interval": 5}
    changes = {"kind": "sft", "sft": sft, "trainer": TRAINER, "max_steps": STEPS} | changes
    paths = write_run(folder / name, folder / "model", **changes)
    assert_done(run_trainer(paths, num_ranks), paths)
    return paths


def rows_of(paths: RunPaths) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in read_metrics(paths.metrics("trainer"))}


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunPaths:
    """An uninterrupted run with held-out evaluations."""
    return run(folder, "whole", held_out=True)


@pytest.fixture(scope="module")
def half(folder: Path) -> RunPaths:
    """The first steps, with a checkpoint; rows are tokenised in a process of their own."""
    return run(folder, "half", max_steps=HALF, ckpt={}, data={"num_workers": 1})


def test_the_loss_falls_on_held_out_rows_too(whole: RunPaths) -> None:
    rows = rows_of(whole)
    assert rows[STEPS]["loss"] < 0.5 * rows[1]["loss"]
    assert [step for step in sorted(rows) if "eval/loss" in rows[step]] == [0, 5, 10, 12]
    assert rows[12]["eval/loss"] < 0.5 * rows[0]["eval/loss"]
    assert rows[12]["eval/perplexity"] < rows[0]["eval/perplexity"]
    assert rows[1]["data/rows"] >= 16 and rows[12]["data/overlong"] >= 4 and rows[12]["data/untrained"] >= 4
    assert rows[12]["data/epoch"] == pytest.approx((16 * 12) / 40, abs=0.3)
    assert list_versions(whole) == [STEPS]


def test_rows_that_do_not_train_are_told_of(whole: RunPaths) -> None:
    log = (whole.logs(1, "trainer") / "rank_0.log").read_text(encoding="utf-8")
    words = "longer than seq_len and dropped (sft.data.overlong)"
    assert log.count(words) > 1
    [told] = [line for line in write_report(whole.root, "whole", "sft") if words in line]
    assert "rows so far: 5 longer" in told and "5 without anything to train" in told


def test_a_template_of_ones_own_is_published_with_the_weights(folder: Path, whole: RunPaths) -> None:
    own = (folder / "own.jinja").read_text(encoding="utf-8")
    assert AutoTokenizer.from_pretrained(whole.weights_step(STEPS)).chat_template == own
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template != own


def test_resumed_equals_uninterrupted_to_the_last_bit(folder: Path, whole: RunPaths, half: RunPaths) -> None:
    resumed = run(folder, "resumed", ckpt={"resume_step": str(half.root)})
    a, b = weights(whole, STEPS), weights(resumed, STEPS)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert rows_of(resumed)[STEPS]["data/rows"] == rows_of(whole)[STEPS]["data/rows"]


@pytest.mark.exhaustive
def test_resumed_on_two_ranks_trains_the_same_samples(folder: Path, whole: RunPaths, half: RunPaths) -> None:
    two = run(folder, "two", 2, held_out=True, ckpt={"resume_step": str(half.root)})
    mine, theirs = rows_of(whole), rows_of(two)
    for step in range(HALF + 1, STEPS + 1):
        for key in ("loss", "grad_norm"):
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=1e-4), (step, key)
        for key in ("num_tokens", "num_targets", "data/rows", "data/overlong"):
            assert theirs[step][key] == mine[step][key], (step, key)
    assert theirs[STEPS]["eval/loss"] == pytest.approx(mine[STEPS]["eval/loss"], rel=1e-4)
    assert theirs[STEPS]["eval/num_tokens"] == mine[STEPS]["eval/num_tokens"]


def test_epochs_decide_the_steps_and_the_schedule(folder: Path) -> None:
    """42 rows, of which one is too long and one holds nothing to train: 40 samples, 16 a step."""
    trainer = TRAINER | {"scheduler": {"type": "linear"}}
    one = run(folder, "epochs", data={"num_epochs": 2}, max_steps=100, trainer=trainer, ckpt={"interval": 3})
    rows = rows_of(one)
    assert sorted(rows) == [1, 2, 3, 4, 5] and list_versions(one) == [5] and last_version(one) == 5
    assert [row["lr"] / 5e-3 for row in rows.values()] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rows[5]["data/epoch"] == 2 and rows[5]["data/rows"] == 84 and rows[5]["run/max_steps"] == 5
    two = run(folder, "epochs_two", 2, data={"num_epochs": 2}, max_steps=100, trainer=trainer)
    for step, row in rows_of(two).items():
        assert row["num_targets"] == rows[step]["num_targets"] and row["lr"] == rows[step]["lr"]
        assert row["loss"] == pytest.approx(rows[step]["loss"], rel=1e-4)
    resume = {"resume_step": str(one.root / "checkpoints" / "step_3")}
    resumed = run(folder, "epochs_on", data={"num_epochs": 2}, max_steps=100, trainer=trainer, ckpt=resume)
    assert sorted(rows_of(resumed)) == [4, 5]
    a, b = weights(one, 5), weights(resumed, 5)
    assert all(torch.equal(a[name], b[name]) for name in a)
    resume = {"resume_step": str(one.root / "checkpoints" / "step_5")}
    longer = run(folder, "epochs_more", data={"num_epochs": 2.5}, max_steps=100, trainer=trainer, ckpt=resume)
    assert sorted(rows_of(longer)) == [6, 7]


def test_a_part_of_an_epoch_without_a_sample_is_said(folder: Path) -> None:
    rows = [{"prompt": "b" * 100, "completion": "too long"}] + [{"prompt": "a", "completion": "b"}] * 9
    (folder / "first.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"path": str(folder / "first.jsonl"), "num_epochs": 0.1, "shuffle": False}
    with pytest.raises(AssertionError, match=r"nothing to train in the first 1 rows of num_epochs"):
        run(folder, "first", data=data, max_steps=100)


def test_a_bench_counts_no_epochs(folder: Path) -> None:
    cache = folder / "bench_cache"
    data = {"num_epochs": 0.5, "cache_dir": str(cache)}
    run(folder, "benched", data=data, max_steps=100, trainer=TRAINER | {"bench": True})
    assert list(cache.glob("*.npy")) and not list(cache.glob("lengths-*"))


@pytest.mark.exhaustive
def test_a_mixture_is_the_same_on_two_ranks_and_after_a_resume(folder: Path) -> None:
    """Of 42 and 15 rows with 0.6 and 0.4: until all are used up an epoch has 42 and 28."""
    data = {"path": [str(folder / "data.jsonl"), str(folder / "held.jsonl")], "probabilities": [0.6, 0.4]}
    one = run(folder, "mixed", data=data | {"num_epochs": 1}, max_steps=100, ckpt={"interval": 2})
    rows = rows_of(one)
    last = max(rows)
    assert last == 4 and rows[last]["data/share/0"] == pytest.approx(0.6, abs=0.01)
    resume = {"resume_step": str(one.root / "checkpoints" / "step_2")}
    two = rows_of(run(folder, "mixed_two", 2, data=data | {"num_epochs": 1}, max_steps=100, ckpt=resume))
    assert sorted(two) == [3, 4]
    for step, row in two.items():
        assert row["num_targets"] == rows[step]["num_targets"] and row["data/share/1"] == rows[step]["data/share/1"]
        assert row["loss"] == pytest.approx(rows[step]["loss"], rel=1e-4)


def test_padded_rows_train_the_same(folder: Path, whole: RunPaths) -> None:
    data = {"pack": False, "micro_batch_size": 3, "pad_multiple": 16}
    mine, theirs = rows_of(whole), rows_of(run(folder, "padded", data=data, max_steps=4))
    for step in range(1, 5):
        assert theirs[step]["loss"] == pytest.approx(mine[step]["loss"], rel=1e-4)
        assert theirs[step]["num_tokens"] == mine[step]["num_tokens"] and theirs[step]["data/pad_share"] > 0


def test_other_data_than_the_checkpoints_is_refused(folder: Path, half: RunPaths) -> None:
    data = {"path": str(folder / "held.jsonl"), "batch_size": 4}
    changes = {"kind": "sft", "sft": {"data": data}, "trainer": TRAINER, "ckpt": {"resume_step": str(half.root)}}
    paths = write_run(folder / "other", folder / "model", max_steps=8, **changes)
    assert run_trainer(paths).returncode == 1
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and "sft.data.on_change = restart" in status["error"]


def test_a_checkpoint_beyond_the_last_step_is_not_published_as_it(folder: Path, half: RunPaths) -> None:
    data = {"path": str(folder / "data.jsonl"), "chat_template": str(folder / "own.jinja"), "batch_size": 16}
    changes = {"kind": "sft", "sft": {"data": data}, "trainer": TRAINER, "ckpt": {"resume_step": str(half.root)}}
    paths = write_run(folder / "fewer", folder / "model", max_steps=HALF - 2, **changes)
    assert run_trainer(paths).returncode == 1
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and f"max_steps = {HALF - 2}" in status["error"]
    assert not list_versions(paths)


@pytest.mark.exhaustive
def test_held_out_evaluations_leave_a_model_with_dropout_as_it_was(folder: Path, tmp_path: Path) -> None:
    """One run evaluates before its first step, the other begins after its second and does not: same bits."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    shape: Any = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": len(tokenizer)}
    dropout: Any = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    GPT2LMHeadModel(GPT2Config(**shape, **dropout)).save_pretrained(tmp_path / "model")
    for name in ("data.jsonl", "held.jsonl", "own.jinja"):
        (tmp_path / name).symlink_to(folder / name)
    whole = run(tmp_path, "whole", held_out=True, max_steps=4)
    half = run(tmp_path, "half", max_steps=2, ckpt={})
    resumed = run(tmp_path, "resumed", max_steps=4, ckpt={"resume_step": str(half.root)})
    assert [step for step, row in rows_of(whole).items() if "eval/loss" in row] == [0, 4]
    a, b = weights(whole, 4), weights(resumed, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
