"""A reward model trained on CPU in real trainer processes: exact resumes, ranks, what transformers and vLLM score."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prime_hpc.envs.rows.reward_model import score
from prime_hpc.store.run_paths import RunPaths
from tests.integration.test_preference import HALF, STEPS, folder, go_on, rows_of, run
from tests.integration.test_trainer import weights
from tests.support.runs import background, free_port, wait_until
from tests.support.sampled import sampled

__all__ = ["folder"]

pytestmark = pytest.mark.slow
BRADLEY_TERRY = {"type": "bradley_terry", "centering_weight": 0.01}
KEY = "a-key-of-this-test"
SHOWN = ("loss", "grad_norm", "rewards/chosen", "rewards/margins")


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunPaths:
    """An uninterrupted run."""
    return run(folder, "reward", preference=BRADLEY_TERRY)


def held_out_scores(folder: Path, version: Path) -> list[float]:
    """What transformers makes of the chosen and of the rejected held-out replies, on average."""
    hf = AutoModelForSequenceClassification.from_pretrained(version, dtype=torch.float32)
    tokenizer, means = AutoTokenizer.from_pretrained(version), []
    held = [json.loads(line) for line in (folder / "held.jsonl").read_text(encoding="utf-8").splitlines()]
    for side in ("chosen", "rejected"):
        talks = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}] for row in held
        ]
        texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
        padded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            means.append(float(hf(input_ids=padded.input_ids, attention_mask=padded.attention_mask).logits.mean()))
    return means


def test_held_out_scores_are_those_of_transformers(folder: Path, whole: RunPaths) -> None:
    rows = rows_of(whole)
    assert rows[STEPS]["eval/loss"] < 0.5 * rows[0]["eval/loss"] and rows[STEPS]["rewards/accuracies"] > 0.8
    assert not whole.reference_sums.exists() and "logps/chosen" not in rows[1]
    expected = [rows[STEPS][f"eval/rewards/{side}"] for side in ("chosen", "rejected")]
    assert held_out_scores(folder, whole.weights_step(STEPS)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.exhaustive
def test_an_adapter_on_two_ranks_is_published_whole_and_resumes_to_the_last_bit(folder: Path) -> None:
    def made(name: str, **changes: Any) -> RunPaths:
        model = {"lora": {"rank": 4}}
        return run(folder, name, 2, preference=BRADLEY_TERRY, model=model, trainer={"num_ranks": 2}, **changes)

    whole, half = made("reward-lora"), made("reward-lora-half", max_steps=HALF, ckpt={})
    go_on(half, 2)
    rows = rows_of(whole)
    assert rows[STEPS]["eval/loss"] < rows[0]["eval/loss"]
    expected = [rows[STEPS][f"eval/rewards/{side}"] for side in ("chosen", "rejected")]
    assert held_out_scores(folder, whole.weights_step(STEPS)) == pytest.approx(expected, abs=1e-5)
    a, b = weights(whole, STEPS), weights(half, STEPS)
    assert "score.weight" in a and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_is_the_same_to_the_last_bit(folder: Path, whole: RunPaths) -> None:
    half = run(folder, "reward-half", preference=BRADLEY_TERRY, max_steps=HALF, ckpt={})
    go_on(half)
    mine, theirs = rows_of(whole), rows_of(half)
    assert all(mine[step][key] == theirs[step][key] for step in range(1, STEPS + 1) for key in SHOWN)
    a, b = weights(whole, STEPS), weights(half, STEPS)
    assert "score.weight" in a and all(torch.equal(a[name], b[name]) for name in a)


def assert_same(mine: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> None:
    for step in range(1, STEPS + 1):
        for key in SHOWN:
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=1e-3, abs=1e-4), (step, key)
    assert theirs[STEPS]["eval/loss"] == pytest.approx(mine[STEPS]["eval/loss"], rel=1e-3)


@pytest.mark.parametrize("parallel", sampled([{"cp": 2}, {}], 2))
def test_two_ranks_train_the_same(folder: Path, whole: RunPaths, parallel: dict[str, int]) -> None:
    trainer = {"num_ranks": 2, "parallel": parallel}
    name = f"reward-two{len(parallel)}"
    assert_same(rows_of(whole), rows_of(run(folder, name, 2, preference=BRADLEY_TERRY, trainer=trainer)))


@pytest.mark.exhaustive
def test_ranks_that_split_matrices_train_the_same(folder: Path) -> None:
    even = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    even.resize_token_embeddings(342)
    even.save_pretrained(folder / "even")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "even")
    model = {"name": str(folder / "even")}
    one = run(folder, "reward-even", preference=BRADLEY_TERRY, model=model)
    trainer = {"num_ranks": 2, "parallel": {"tp": 2}}
    assert_same(
        rows_of(one), rows_of(run(folder, "reward-tp", 2, preference=BRADLEY_TERRY, model=model, trainer=trainer))
    )


@pytest.mark.exhaustive
def test_a_server_by_hand_scores_as_transformers_does_and_writes_no_reply(
    folder: Path, whole: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, version = free_port(), whole.weights_step(STEPS)
    url = f"http://127.0.0.1:{port}/v1"
    stated = ["--model.name", version, "--seq-len", "128", "--model.dtype", "float32", "--device", "cpu"]
    stated += ["--inference.server.port", port, "--inference.api-key", KEY, "--output-dir", tmp_path / "out"]
    for name, value in (("URL", url), ("MODEL", str(version)), ("API_KEY", KEY)):
        monkeypatch.setenv(f"JUDGE_{name}", value)

    def is_ready() -> bool:
        return "is ready at" in (tmp_path / "log").read_text()

    with background("inference", *stated, log=tmp_path / "log"):
        wait_until(is_ready, 300, "a server")
        held = [json.loads(line) for line in (folder / "held.jsonl").read_text(encoding="utf-8").splitlines()]
        for side, expected in zip(("chosen", "rejected"), held_out_scores(folder, version), strict=True):
            talks = [[("user", row["prompt"]), ("assistant", row[side])] for row in held]
            scores = [score([{"role": role, "content": text} for role, text in talk]) for talk in talks]
            assert sum(scores) / len(scores) == pytest.approx(expected, abs=1e-5)
        request = urllib.request.Request(
            f"{url}/chat/completions", b"{}", {"Authorization": f"Bearer {KEY}"}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        said = json.load(refused.value)["error"]["message"]
        assert refused.value.code == 400 and "is a reward model" in said and "POST /classify" in said
