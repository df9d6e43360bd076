"""GPUs that are stated are GPUs that are used: counts follow from them, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.supervisor.roles.spec import split_gpus

ENV = ["--orchestrator.env", '[{"id": "reverse-text"}]']


def load(*flags: str) -> Experiment:
    return load_experiment([*ENV, "--inference", *flags], "rl", {}).experiment


def counts(exp: Experiment) -> tuple[int, int]:
    assert exp.inference is not None
    return exp.inference.data_parallel_size, exp.trainer.num_ranks


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--inference-gpus", "6", "--trainer-gpus", "2"], (6, 2)),
        (["--inference-gpus", "8", "--inference.tensor-parallel-size", "2"], (4, 1)),
        (["--inference.tensor-parallel-size", "2", "--inference-gpus=8", "--inference.num-replicas", "2"], (2, 1)),
        (["--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7"], (6, 2)),
        (["--inference-gpu-ids", "0,1,2,3", "--inference.tensor-parallel-size", "4"], (1, 1)),
        (["--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"], (1, 1)),
        (["--inference.data-parallel-size", "2", "--inference-gpu-ids", "0,1"], (2, 1)),
    ],
)
def test_counts_follow_from_gpus(flags: list[str], expected: tuple[int, int]) -> None:
    assert counts(load(*flags)) == expected


def test_a_size_that_is_another_keys_divides_the_gpus_like_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text('trainer: {num_ranks: 2}\ninference: {tensor_parallel_size: "${trainer.num_ranks}"}\n')
    exp = load("@", str(path), "--inference-gpus", "8")
    assert exp.inference is not None and (exp.inference.num_gpus, exp.inference.tensor_parallel_size) == (8, 2)
    exp = load("@", str(path), "--inference-gpu-ids", "0,1,2,3", "--trainer-gpu-ids", "4,5")
    assert exp.inference is not None and exp.inference.num_gpus == 4
    with pytest.raises(ConfigError, match="7 GPUs do not divide among 1 servers"):
        load("@", str(path), "--inference-gpus", "7")


def test_the_documented_line_uses_all_eight_gpus() -> None:
    exp = load("--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7")
    serving, training = split_gpus(exp, list("01234567"))
    assert (serving["inference"], training) == ([list("012345")], list("67"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--inference-gpus", "7", "--inference.tensor-parallel-size", "2"], "7 GPUs do not divide among 1 servers"),
        (["--inference-gpu-ids", "0,1,2", "--inference.num-replicas", "2"], "3 GPUs do not divide"),
        (
            ["--trainer-gpu-ids", "6,7", "--trainer.num-ranks", "1"],
            "names 2 GPUs, but .*num_ranks uses 1",
        ),
        (["--inference-gpu-ids", "0,1", "--inference.data-parallel-size", "1"], "names 2 GPUs, but inference uses 1"),
        (["--inference.pipeline-parallel-size", "2"], "set tensor_parallel_size instead"),
        (["--tp", "auto"], "auto is known of servers that have this machine to themselves"),
        (["--inference.tensor-parallel-size", "auto"], "state the GPUs of one engine"),
        (["--pp.rank", "0", "--pp.world-size", "2"], "there is no such key: stages of an engine find each other"),
        (["--pp.iroh-seed", "1"], "there is no such key: .*--inference.pipeline-parallel-size says how many"),
        (["--pp.iroh-peer-id", "ff87"], "one job.* starts them all"),
        (["--inference.vllm.pipeline-parallel-size", "2"], "state it as inference.pipeline_parallel_size"),
    ],
)
def test_gpus_that_would_stay_idle_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(*flags)


@pytest.mark.parametrize(
    ("flags", "gpus", "size"),
    [
        (["--tp", "auto"], "0,1", 2),
        (["--tp", "auto", "--dp", "2"], "0,1,2,3", 2),
        (["--tensor-parallel-size", "auto", "--pp", "2", "--dp", "2"], "0,1,2,3", 1),
        (["--tp", "auto", "--inference-gpu-ids", "0,1", "--dp", "1"], "0,1,2,3", 2),
        (["--tp", "auto"], "", 1),
        (["--tp", "auto", "--device", "cpu"], "0,1", 1),
    ],
)
def test_an_engines_tensors_go_over_the_gpus_of_this_machine(flags: list[str], gpus: str, size: int) -> None:
    alone = ["--model.name", "m", "--environment-ids", "gsm8k"]
    for entrypoint, more in {"inference": [], "eval": alone, "synthesize": alone}.items():
        flag = [f.replace("--tensor", "--inference.tensor") if entrypoint != "inference" else f for f in flags]
        exp = load_experiment([*more, *flag], entrypoint, {"CUDA_VISIBLE_DEVICES": gpus}).experiment
        assert exp.inference is not None and exp.inference.tensor_parallel_size == size


def test_gpus_of_this_machine_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="auto: 3 GPUs do not divide among 2"):
        load_experiment(["--tp", "auto", "--dp", "2"], "inference", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    argv = ["--model.name", "m", "--environment-ids", "gsm8k", "--tp", "auto", "--slurm.gpus-per-node", "8"]
    with pytest.raises(ConfigError, match="state the GPUs of one engine"):
        load_experiment(argv, "synthesize", {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_counts_of_a_sweep_are_those_of_its_base(tmp_path: Path) -> None:
    from prime_hpc.launch.sweep.resolve import load_base, load_stored, resolve_points

    tree: dict[str, Any] = {"orchestrator": {"env": [{"id": "reverse-text"}]}, "inference": {"tensor_parallel_size": 2}}
    (tmp_path / "e.json").write_text(json.dumps(tree))
    sweep = {"experiment": "e.json", "axes": {"product": {"seed": [1, 2]}}, "output_dir": str(tmp_path)}
    (tmp_path / "s.json").write_text(json.dumps(sweep))
    base = load_base(tmp_path / "s.json", ["--inference-gpus", "8"], {})
    kept = tmp_path / "sweep.yaml"
    kept.write_text(json.dumps(base.stored()))
    for one in (base, load_stored(kept)):
        points = resolve_points(one)
        assert [counts(point.loaded.experiment) for point in points if point.loaded] == [(4, 1)] * 2
