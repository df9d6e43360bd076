"""`eval` of a run's versions by engines of its own: every reply is the greedy one, by transformers, of its version."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.envs.rendering import load_prompt_renderer
from prime_hpc.envs.tasksets.reverse_text_data import build_prompt
from prime_hpc.starter.make import make_starter
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.weights.lora_files import AdapterPublisher
from tests.integration.test_evals import episodes
from tests.support.inference_server import publish, save_model
from tests.support.lora import fill_randomly, lora_policy, merged_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TASKS, TOKENS = 6, 12
TRANSFORMERS = ("--inference.backend", "transformers")
LORA = {"rank": 6, "alpha": 12}


def verb(name: str, model: Path, out: Path, *more: str) -> list[str]:
    common = ("--model.name", str(model), "--model.dtype", "float32", "--model.renderer", "qwen3", "--seq-len", "128")
    engine = ("--inference.cpu-kv-cache-gib", "0.25", "--inference.server.port", "0") if name != "sft" else ()
    return [sys.executable, "-m", "prime_hpc.cli", name, *common, *engine, "--output-dir", str(out), *more]


def done(argv: list[str], expected: int = 0) -> str:
    """What a command said that ended with this exit code."""
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    said = ended.stdout + ended.stderr
    assert ended.returncode == expected, said[-4000:]
    return said


def evaluate(model: Path, out: Path, weights: Path, *more: str) -> None:
    length = ("--num-examples", str(TASKS), "--sampling.max-tokens", str(TOKENS))
    where = ("--environment-ids", "reverse-text", "--weights-dir", str(weights))
    done(verb("eval", model, out, *where, *length, *more))


def greedy_replies(texts: Sequence[str], tokenizer: Path, model: Path) -> list[str]:
    """By transformers' `generate`."""
    renderer = load_prompt_renderer(str(tokenizer), "qwen3", False)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    replies = []
    for text in texts:
        ids = list(renderer.renderer.render(build_prompt(text), add_generation_prompt=True).token_ids)
        made = hf.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=renderer.stop_token_ids
        )
        reply = renderer.renderer.parse_response(made[0, len(ids) :].tolist(), prompt_ids=ids)
        replies.append(reply.content or "")
    return replies


def assert_replies(run_dir: Path, tokenizer: Path, models: Mapping[int, Path]) -> None:
    """Every step's replies are those of its model, which are unlike each other."""
    rows = sorted(episodes(run_dir), key=lambda row: row["task"])
    assert len(rows) == TASKS * len(models) and all(row["state"] == "completed" for row in rows), rows
    found: dict[int, list[str]] = {}
    for step, model in models.items():
        own = [row for row in rows if row["step"] == step]
        texts = [row["prompt"].removeprefix("[user] ") for row in own]
        assert len(set(texts)) == TASKS
        found[step] = [row["completion"] for row in own]
        assert found[step] == greedy_replies(texts, tokenizer, model), step
    assert len(set(map(tuple, found.values()))) == len(models), "the versions say the same"


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    summary = json.loads((run_dir / "results" / "summary.json").read_text())
    return {version["step"]: version["environments"]["reverse-text"] for version in summary["versions"]}


def test_whole_models_are_loaded_one_after_another_and_steps_may_join(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tied=True, seed=0)
    for step in (3, 6, 9):
        publish(save_model(tmp_path / f"m{step}", tied=True, seed=step), tmp_path / "run", step)
    weights, run_dir = tmp_path / "run" / "weights", tmp_path / "out" / "eval"
    evaluate(base, tmp_path / "out", weights, "--steps", "6", "--no-eval-base", *TRANSFORMERS)
    assert_replies(run_dir, base, {6: tmp_path / "m6"})
    before = episodes(run_dir)
    evaluate(base, tmp_path / "out", weights, "--steps", "3,6", *TRANSFORMERS)
    assert episodes(run_dir)[:TASKS] == before
    models = {0: base, 3: tmp_path / "m3", 6: tmp_path / "m6"}
    assert_replies(run_dir, base, models)
    assert set(steps_of(run_dir)) == set(models)
    evaluate(base, tmp_path / "out", weights, "--steps", "3,6", "--confidence", "0.5", *TRANSFORMERS)
    assert not (run_dir / "logs" / "attempt_3" / "inference").exists() and set(steps_of(run_dir)) == set(models)
    gone = ("--weights-dir", str(weights), "--steps", "3,7", "--environment-ids", "reverse-text", *TRANSFORMERS)
    assert "holds no step 7; there are 3, 6, 9" in done(verb("eval", base, tmp_path / "other", *gone), expected=2)


def test_adapters_are_those_of_the_run(tmp_path: Path) -> None:
    """They are the trainer's own files; the expected replies are those of W + scale B A, by transformers."""
    base = save_model(tmp_path / "base", tied=True, seed=0)
    merged = {0: base}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = lora_policy(base, num_slots=3, lora=LoraConfig.model_validate(LORA))
        for step in (1, 2):
            tensors = fill_randomly(policy, step, seed=step)
            paths = RunPaths(tmp_path / "run")
            AdapterPublisher(policy, base, paths, incarnation=0, model_name=str(base), slot=step).publish(step)
            merged[step] = tmp_path / f"merged{step}"
            merged_model(base, tensors, 2.0).save_pretrained(merged[step])
    finally:
        dist.destroy_process_group()
    evaluate(base, tmp_path / "out", tmp_path / "run" / "weights", "--steps", "1,2")
    assert_replies(tmp_path / "out" / "eval", base, merged)


def test_an_engine_of_two_pipeline_stages_gives_the_model_s_replies(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tied=True, seed=0)
    length = ("--num-examples", str(TASKS), "--sampling.max-tokens", str(TOKENS), "--pp", "2")
    done(verb("eval", base, tmp_path / "out", "--environment-ids", "reverse-text", *length))
    assert_replies(tmp_path / "out" / "eval", base, {0: base})


def test_a_student_learns_from_a_teacher_s_best_replies(tmp_path: Path) -> None:
    """`sft` warms a model up, `synthesize` keeps its best replies, `sft` trains it on them, `eval` plays both."""
    make_starter(tmp_path / "starter")
    train = ("--data.batch-size", "64", "--trainer.micro-batch-tokens", "4096", "--trainer.threads-per-rank", "1")

    def sft(name: str, model: Path, data: Path, steps: int, rate: str, *more: str) -> Path:
        argv = ("--name", name, "--data.path", str(data), "--max-steps", str(steps), "--trainer.optim.lr", rate)
        done(verb("sft", model, tmp_path, *argv, *train, *more))
        return tmp_path / name / "weights" / f"step_{steps:06d}"

    slowly = ("--trainer.scheduler.type", "cosine", "--trainer.scheduler.warmup-steps", "30")
    teacher = sft("warm", tmp_path / "starter" / "model", tmp_path / "starter" / "sft.jsonl", 300, "4e-3", *slowly)
    filters = ("--num-examples", "384", "--rollouts-per-example", "4", "--n-best", "1", "--min-reward", "0.7")
    env = ("--environment-ids", "reverse-text", "--sampling.max-tokens", "24")
    done(verb("synthesize", teacher, tmp_path, *env, *filters))
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "synthesize" / "data" / "rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert 64 < len(rows) <= 384 and all(row["provenance"]["reward"] >= 0.7 for row in rows)
    sft("again", teacher, tmp_path / "synthesize" / "data", 60, "1e-3")
    scoring = ("--num-examples", "64", "--rollouts-per-example", "4", "--sampling.temperature", "1")
    done(verb("eval", teacher, tmp_path, "--weights-dir", str(tmp_path / "again" / "weights"), *env, *scoring))
    before, after = (steps_of(tmp_path / "eval")[step]["avg"] for step in (0, 60))
    assert after["interval"][0] > before["interval"][1], (before, after)
