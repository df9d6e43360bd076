"""The recipes for GPUs: they fit their nodes as far as the config alone tells, and their jobs read as they should.

`PRIMEHPC_UPDATE_GOLDEN=1 pytest tests/unit/test_recipes.py` writes tests/golden anew: read the difference before it is
committed.
"""

import os
from pathlib import Path

import pytest

from prime_hpc.config import Experiment, load_experiment
from prime_hpc.config.site import GENERIC, parse_site
from prime_hpc.envs.benchmarks.registry import BENCHMARKS
from prime_hpc.envs.env_config import BUNDLED
from prime_hpc.inference.transformers.backend import TRANSFORMERS
from prime_hpc.launch.estimate.engine_memory import engine_memory
from prime_hpc.launch.estimate.micro_batch import engine_share, with_micro_batch
from prime_hpc.launch.estimate.model_facts import read_model
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.rehearse import rehearse
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.script import render_job
from tests.support.qwen3_shapes import fake_hub

ROOT = Path(__file__).resolve().parents[2]
SITE = parse_site(ROOT / "slurm" / "sites" / "example.yaml")
RECIPES = sorted([*ROOT.glob("configs/reasoning_gym/*.yaml"), *ROOT.glob("configs/instructions/*.yaml")])
SEEING = sorted(ROOT.glob("configs/vision/*_4b.yaml"))
NODES = {"two_nodes": 2}
NEEDED_GIB = {"rl_0.6b": 24.0, "sft_0.6b": 40.0}
"""Of one GPU: smaller cards than 80 GB that the recipe's first lines promise, with what an engine beside it takes."""


TASKS = sorted([*ROOT.glob("configs/games/*.yaml"), *ROOT.glob("configs/math/*.yaml")])
SIZES = sorted(ROOT.glob("configs/sizes/*.yaml"))
HERE = sorted([*ROOT.glob("configs/word_sorting/*.yaml"), *ROOT.glob("configs/tic_tac_toe/*.yaml")])
HERE += [ROOT / "configs" / "vision" / name for name in ("rl.yaml", "sft.yaml")]


def faults(experiment: Experiment) -> list[str]:
    """What lint says of a recipe, but that this disk lacks its model (PH329)."""
    return [finding.line() for finding in lint(experiment, SITE) if finding.code != "PH329"]


def recipe(path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Experiment:
    monkeypatch.setenv("HF_HUB_CACHE", str(fake_hub(cache)))
    return load_experiment(["@", str(path), "--output-dir", "/scratch/runs"], "plan", environ={}).experiment


@pytest.mark.parametrize("path", [*RECIPES, *SEEING], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_recipe_fits_its_nodes(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment = recipe(path, monkeypatch, tmp_path)
    assert experiment.kind == path.stem.split("_")[0] and experiment.model.dtype == "bfloat16"
    assert faults(experiment) == []
    placement = place_slurm(experiment, SITE)
    assert placement.num_nodes == next((n for word, n in NODES.items() if word in path.stem), 1)
    facts = read_model(experiment.model.name)
    assert facts is not None
    parts = trainer_gib(experiment, facts)
    assert parts is not None and sum(parts.values()) < NEEDED_GIB.get(path.stem, 0.9 * 80)
    assert ("images" in parts) is (path in SEEING)
    if experiment.kind == "rl":
        memory = engine_memory(experiment, facts, 80.0)
        assert memory is not None and memory.max_tokens is not None
        assert memory.max_tokens > 16 * experiment.seq_len  # a group at full length, at the least, without a preemption


@pytest.mark.parametrize("path", TASKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_task_fits_every_size(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(fake_hub(tmp_path)))
    is_eval = path.stem == "eval"
    for size in [None] if is_eval else [None, *SIZES]:
        argv = ["@", str(path), *(["@", str(size)] if size else []), "--output-dir", "/scratch/runs"]
        experiment = load_experiment(argv, "plan", environ={}).experiment
        assert experiment.kind == ("eval" if is_eval else "rl")
        envs = experiment.eval.environments if is_eval else experiment.orchestrator.env
        assert all(env.id in (*BUNDLED, *BENCHMARKS) for env in envs)
        assert faults(experiment) == [], size
        placement = place_slurm(experiment, SITE)
        stem = size.stem if size else "1_gpu"
        assert placement.num_nodes == NODES.get(stem, 1)
        facts = read_model(experiment.model.name)
        assert facts is not None
        if not is_eval:
            parts = trainer_gib(experiment, facts)
            assert parts is not None and sum(parts.values()) < (24.0 if size is None else 0.9 * 80)


@pytest.mark.parametrize("path", HERE, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_recipe_for_this_machine_lacks_nothing_but_what_make_starter_makes(path: Path) -> None:
    experiment = load_experiment(["@", str(path)], "plan", environ={}).experiment
    assert {finding.code for finding in lint(experiment, GENERIC)} <= {"PH107", "PH207", "PH243"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_rehearsed_fits_its_gpus(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real train step on tensors without values, as the first of the recipe's ranks: peak and estimate agree."""
    experiment = recipe(path, monkeypatch, tmp_path)
    found = rehearse(experiment, NEEDED_GIB.get(path.stem, 80.0))
    assert found["device"] == "cuda" and found["world_size"] == experiment.trainer.num_ranks
    assert found["fits"], found
    facts = read_model(experiment.model.name)
    parts = trainer_gib(experiment, facts) if facts is not None else None
    assert parts is not None
    assert 0.95 < (sum(parts.values()) - parts["context"]) / found["peak_gib"] < 1.25


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["reasoning_gym/rl_8b", "instructions/sft_0.6b"])
def test_the_micro_batch_that_is_chosen_fits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stated = recipe(ROOT / "configs" / f"{name}.yaml", monkeypatch, tmp_path)
    trainer = stated.trainer.model_copy(update={"micro_batch_tokens": None})
    chosen, choice = with_micro_batch(stated.model_copy(update={"trainer": trainer}), SITE)
    assert choice is not None and chosen.micro_batch_tokens > stated.seq_len
    assert rehearse(chosen, choice.gpu_gib)["fits"]


@pytest.mark.parametrize("name", ["rl_0.6b", "rl_30b_a3b_two_nodes"])
def test_a_recipes_job(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment = recipe(ROOT / "configs" / "reasoning_gym" / f"{name}.yaml", monkeypatch, tmp_path)
    text = render_job(
        place_slurm(experiment, SITE), experiment, SITE, python="/opt/prime-hpc/.venv/bin/python", command_tail=[]
    )
    golden = ROOT / "tests" / "golden" / f"recipe_{name}.sbatch"
    if os.environ.get("PRIMEHPC_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(("cache", "clean"), [(8.0, True), (70.0, False)])
def test_a_stated_cache_counts_instead_of_the_share(
    cache: float, clean: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shipped share alone would be fine, 0.9 alone would not."""
    shared = recipe(ROOT / "configs" / "reasoning_gym" / "rl_0.6b.yaml", monkeypatch, tmp_path)
    assert shared.inference is not None
    for share in (0.35, 0.9):
        stated = shared.inference.model_copy(update={"kv_cache_gib": cache, "gpu_memory_utilization": share})
        found = lint(shared.model_copy(update={"inference": stated}), SITE)
        assert ([f.code for f in found if f.code == "PH120"] == []) is clean
    facts = read_model(shared.model.name)
    assert facts is not None
    memory = engine_memory(shared.model_copy(update={"inference": stated}), facts, 80.0)
    assert memory is not None and memory.kv_gib == cache and memory.step_gib == 0
    computed = shared.model_copy(update={"inference": stated.model_copy(update={"backend": "transformers"})})
    beside = engine_memory(computed, facts, 80.0)
    assert beside is not None and beside.kv_gib == cache and beside.step_gib > 0  # its step is not in the cache
    used = beside.weights_gib + TRANSFORMERS.overhead_gib + cache + beside.step_gib
    assert engine_share(computed, facts, 80.0) == pytest.approx(used / 80)


def test_the_engine_comes_first_on_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prime_hpc.supervisor.main import place
    from prime_hpc.supervisor.roles.process import one_after_another

    shared = recipe(ROOT / "configs" / "reasoning_gym" / "rl_0.6b.yaml", monkeypatch, tmp_path)
    assert shared.inference is not None
    server = shared.inference.server.model_copy(update={"port": 0})  # a stated one is promised until this process ends
    shared = shared.model_copy(update={"inference": shared.inference.model_copy(update={"server": server})})
    specs = one_after_another(place(shared, tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})[0])
    assert {spec.label: spec.after for spec in specs}["trainer"] == ("inference[0]",)
