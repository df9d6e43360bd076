"""The micro-batch that a plan chooses where none is stated: what decides it, what it never exceeds, where it lies."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment, Loaded, load_run
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.micro_batch import MOST_TOKENS, choose, with_micro_batch
from prime_hpc.launch.estimate.model_facts import model_facts
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.plan.plan import local_plan, slurm_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.launch.prepare import write
from prime_hpc.runtime.gpus import memory_gib
from tests.support.lint import LLAMA_8B, SITE, good, merged

SMI = "0, GPU-aa11, 81559 MiB\n1, GPU-bb22, 40960 MiB\n"


def experiment(folder: Path, /, **changes: Any) -> Experiment:
    return Experiment.model_validate(merged(good(folder), changes))


def site(gib: float | None = 80) -> SiteConfig:
    return SiteConfig.model_validate(merged(SITE, {"partitions": {"h100": {"gpu_memory_gib": gib}}}))


def tokens(one: Experiment, gib: float | None = 80) -> int:
    return with_micro_batch(one, site(gib))[0].micro_batch_tokens


def test_the_largest_that_fits_and_no_larger(model: Path) -> None:
    one, facts = experiment(model, orchestrator={"batch_size": 4096}), model_facts(LLAMA_8B)
    assert facts is not None
    for gib in (24.0, 40.0, 80.0):
        found = choose(one, facts, gib)
        need = {}
        for samples in (found.tokens // 4096, found.tokens // 4096 + 1):
            trainer = one.trainer.model_copy(update={"micro_batch_tokens": samples * 4096})
            parts = trainer_gib(one.model_copy(update={"trainer": trainer}), facts)
            need[samples] = sum((parts or {}).values())
        at, beyond = need.values()
        assert found.tokens % 4096 == 0 and at == pytest.approx(found.need_gib) and at <= 0.9 * gib
        assert beyond > 0.9 * gib or found.tokens == MOST_TOKENS
    assert tokens(one, 24) < tokens(one, 40) < tokens(one, 80)
    assert tokens(one, 80) == tokens(one, 80)


def test_no_more_than_a_rank_gets(model: Path) -> None:
    few = experiment(model, orchestrator={"batch_size": 32})
    assert tokens(few) == 2 * 4096  # of 16 ranks each
    assert tokens(experiment(model, orchestrator={"batch_size": 32}, trainer={"parallel": {"cp": 2}})) == 4 * 4096
    assert tokens(experiment(model, orchestrator={"batch_size": 4096}), 10_000) == MOST_TOKENS


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"trainer": {"backend": "gloo"}},
        {"trainer": {"bench": True}},
        {"trainer": {"micro_batch_tokens": 4096}},
        {"model": {"name": "owner/unheard-of"}},
    ],
)
def test_it_is_left_alone(changes: dict[str, Any], model: Path) -> None:
    one = experiment(model, **changes)
    assert with_micro_batch(one, site()) == (one, None) and one.micro_batch_tokens == one.seq_len


def test_unknown_memory(model: Path) -> None:
    one = experiment(model)
    assert with_micro_batch(one, site(None)) == (one, None)


def test_an_engine_on_the_same_gpu_takes_its_share(model: Path) -> None:
    shared = {
        "model": {"lora": {}},
        "trainer": {"num_ranks": 1},
        "inference": {"num_replicas": 1, "gpu_memory_utilization": 0.5},
        "slurm": {"gpus_per_node": 1, "trainer": None, "inference": None},
        "orchestrator": {"batch_size": 4096},
    }
    alone = experiment(model, **merged(shared, {"slurm": {"gpus_per_node": 2}}))
    both = experiment(model, **shared, trainer_gpu_ids=[0], inference_gpu_ids=[0])
    assert tokens(both) < tokens(alone)
    chosen = with_micro_batch(both, site())[1]
    assert chosen is not None and chosen.limit_gib == pytest.approx(0.9 * 40) and "engines leave 50%" in chosen.words()
    nodes = merged(shared, {"slurm": {"trainer": {"nodes": 1}}})  # the same position, of another node
    assert tokens(experiment(model, **nodes, trainer_gpu_ids=[0], inference_gpu_ids=[0])) == tokens(alone)


def test_an_engine_that_sleeps_leaves_nearly_all(model: Path) -> None:
    shared = {
        "async_level": 0,
        "model": {"lora": {}},
        "trainer": {"num_ranks": 1},
        "inference": {"num_replicas": 1, "gpu_memory_utilization": 0.5, "sleep": True},
        "slurm": {"gpus_per_node": 1},
        "orchestrator": {"batch_size": 4096},
        "trainer_gpu_ids": [0],
        "inference_gpu_ids": [0],
    }
    asleep, awake = experiment(model, **shared), experiment(model, **merged(shared, {"inference": {"sleep": False}}))
    chosen = with_micro_batch(asleep, site())[1]
    assert chosen is not None and chosen.limit_gib == pytest.approx(0.9 * 78)
    assert tokens(awake) < tokens(asleep)
    assert [f for f in lint(asleep, site()) if f.code == "PH120"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"async_level": 1}, "needs async_level 0: with 1 engines sample beside the trainer"),
        ({"kind": "sft"}, "is for RL, this is sft"),
        ({"model": {"lora": {}}, "trainer": {"max_concurrent_runs": 2}}, "max_concurrent_runs > 1"),
    ],
)
def test_where_engines_cannot_sleep(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Experiment.model_validate({"async_level": 0, "inference": {"sleep": True}} | changes)


def test_the_plan_says_it_and_lint_has_nothing_against_it(model: Path) -> None:
    one = experiment(model)
    plan = slurm_plan(one, site())
    chosen, text = plan.as_dict()["micro_batch"], plan_text(plan)
    assert chosen["chosen"] and chosen["tokens"] > one.seq_len
    assert f"micro-batches of {chosen['tokens']} tokens" in text and f"{chosen['tokens']} tokens, chosen: " in text
    assert [f for f in lint(one, site()) if f.code == "PH105"] == []
    stated = experiment(model, trainer={"micro_batch_tokens": 4096})
    assert "chosen" not in plan_text(slurm_plan(stated, site()))


def test_one_sample_that_does_not_fit_is_told(model: Path) -> None:
    one = experiment(model, seq_len=8192, model={"ac": None})
    (finding,) = [f for f in lint(one, site(40)) if f.code == "PH105"]
    assert "with micro-batches of one sample of 8192 tokens" in finding.message and "seq_len" in finding.remedy
    assert "does not fit" in plan_text(slurm_plan(one, site(40)))


def test_on_one_machine_the_gpus_decide_and_run_yaml_keeps_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_hpc.launch.estimate import micro_batch

    def smi(*_: object) -> tuple[int, str]:
        return 0, SMI

    local = {"device": "cuda", "launch": "local", "output_dir": str(tmp_path), "slurm": None, "inference": None}
    one = experiment(model, **local | {"trainer": {"num_ranks": 1}, "model": {"lora": {}}})
    sizes = {}
    for gpu in ("0", "1"):
        decided, chosen = with_micro_batch(one, None, {"CUDA_VISIBLE_DEVICES": gpu}, smi)
        assert chosen is not None
        sizes[gpu] = decided.micro_batch_tokens
        write(Loaded(decided, {}, [], "rl"), tmp_path / gpu)
        assert load_run(tmp_path / gpu).trainer.micro_batch_tokens == sizes[gpu]
    assert sizes["1"] < sizes["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(micro_batch, "memory_gib", lambda gpus, run: memory_gib(gpus, smi))
    text = plan_text(local_plan(one))
    assert f"micro-batches of {sizes['1']} tokens" in text and "chosen" in text


def test_memory_of_gpus() -> None:
    def answers(code: int, text: str = SMI) -> Any:
        return lambda argv, timeout_s: (code, text)

    assert memory_gib(["0"], answers(0)) == pytest.approx(79.6, abs=0.1)
    assert memory_gib(["0", "GPU-bb"], answers(0)) == 40
    assert memory_gib(["MIG-cc"], answers(0)) is None and memory_gib(["0", "7"], answers(0)) is None
    assert memory_gib(["0"], answers(9)) is None and memory_gib([], answers(0)) is None
    assert memory_gib(["0"], answers(0, "0, GPU-aa11, [N/A]\n")) is None

    def hangs(*_: object) -> tuple[int, str]:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    assert memory_gib(["0"], hangs) is None
