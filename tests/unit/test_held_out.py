"""The loss on held-out rows under an adapter: the merged model's, and the adapter is gathered once for all rows."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_hpc.config import Experiment
from prime_hpc.trainer.data.eval_loss import HeldOut
from prime_hpc.trainer.lora import Adapters
from tests.support.lora import fill_randomly, lora_policy, lora_train_step, merged_model
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots, as often as they are gathered."""
    slots: list[int] = []
    gather = Adapters._gather

    def noted(self: Adapters, slot: int) -> list[torch.Tensor]:
        slots.append(slot)
        return gather(self, slot)

    monkeypatch.setattr(Adapters, "_gather", noted)
    return slots


def write_rows(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


def held_out(folder: Path, ids: Sequence[str] = ()) -> tuple[HeldOut, Any]:
    """An evaluation of 12 rows in several micro-batches, or of so many sets; its trainer's train step."""
    rows = [{"prompt": f"number {n}", "completion": "lower " * (1 + n % 4)} for n in range(12)]
    file = write_rows(folder / "held.jsonl", rows)
    sets = [{"id": one, "path": str(write_rows(folder / one, rows[n :: len(ids)]))} for n, one in enumerate(ids)]
    data = {"path": str(file)}
    sft = {"data": data, "eval": {"sets": sets} if sets else data}
    tree = {"kind": "sft", "output_dir": str(folder / "out"), "seq_len": 64, "sft": sft}
    policy = lora_policy(folder)
    train_step, cpu = lora_train_step(policy), torch.device("cpu")
    trainer = SimpleNamespace(
        experiment=Experiment.model_validate(tree), last_step=9, source=folder, part=(0, 1), rank=0,
        train_step=train_step, device=cpu, parallel=policy.parallel, vocab_size=policy.hf.config.vocab_size,
    )  # fmt: skip
    return HeldOut(trainer), train_step  # type: ignore[arg-type]


def test_an_adapter_is_gathered_once_an_evaluation(group: None, tmp_path: Path, gathered: list[int]) -> None:
    evaluation, train_step = held_out(make_tiny_model(tmp_path))
    policy = train_step.policy
    untrained = evaluation.evaluate()
    tensors = fill_randomly(policy, 0, seed=1)
    gathered.clear()
    found = evaluation.evaluate()
    micros = [train_step.micro_batch(b, i) for b in evaluation._batches[0] for i in range(b.num_micro_batches)]
    assert len(micros) > 1 and gathered == [0]

    merged, nats, num = merged_model(tmp_path, tensors, scale=2.0), 0.0, 0
    for micro in micros:
        first = 0
        for length in micro.packing.lengths.tolist():
            logits = merged(micro.input_ids[:, first : first + length]).logits[0].detach().log_softmax(-1)
            here = (micro.target_index >= first) & (micro.target_index < first + length)
            nats -= float(logits[micro.target_index[here] - first, micro.targets[here]].sum())
            first, num = first + length, num + int(here.sum())
    assert found["eval/num_tokens"] == num
    assert found["eval/loss"] == pytest.approx(nats / num, rel=1e-4)
    assert found["eval/loss"] != pytest.approx(untrained["eval/loss"], rel=2e-3)


def test_each_of_several_sets_has_a_loss_of_its_own(group: None, tmp_path: Path) -> None:
    folder, ids = make_tiny_model(tmp_path), ["one.jsonl", "two.jsonl", "three.jsonl"]
    whole, several = (held_out(folder, of)[0].evaluate() for of in ((), ids))
    assert not [key for key in whole if key.count("/") > 1]
    tokens = [several[f"eval/{name}/num_tokens"] for name in ids]
    losses = [several[f"eval/{name}/loss"] for name in ids]
    assert sum(tokens) == several["eval/num_tokens"] == whole["eval/num_tokens"] and len(set(losses)) == 3
    assert [several[f"eval/{name}/perplexity"] for name in ids] == pytest.approx([math.exp(loss) for loss in losses])
    mean = sum(num * loss for num, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    assert several["eval/loss"] == pytest.approx(mean, rel=1e-9)
    assert several["eval/loss"] == pytest.approx(whole["eval/loss"], rel=1e-5)
