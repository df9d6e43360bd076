"""Every form that a flag can have."""

from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment


def load(*argv: str, entrypoint: str = "trainer") -> Experiment:
    return load_experiment(list(argv), entrypoint, {}).experiment


def value(experiment: Experiment, dotted: str) -> Any:
    found: Any = experiment
    for name in dotted.split("."):
        found = found[int(name)] if name.isdigit() else found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def problem(*argv: str, entrypoint: str = "trainer") -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(list(argv), entrypoint, {})
    (only,) = caught.value.problems
    return str(only)


@pytest.mark.parametrize(
    ("argv", "dotted", "expected"),
    [
        (["--trainer.optim.weight-decay", "0.5"], "trainer.optim.weight_decay", 0.5),
        (["--trainer.optim.weight_decay", "0.5"], "trainer.optim.weight_decay", 0.5),
        (["--trainer.optim.weight-decay=0.5"], "trainer.optim.weight_decay", 0.5),
        (["--max-steps=3"], "max_steps", 3),
        (["--inference.vllm.a", "-5"], "inference.vllm", {"a": -5}),
        (["--inference.vllm.a=-5"], "inference.vllm", {"a": -5}),
        (["--trainer.optim.lr", "1e-4"], "trainer.optim.lr", 1e-4),
        (["--trainer.optim.betas", "0.8,0.9"], "trainer.optim.betas", (0.8, 0.9)),
        (["--trainer.optim.betas", "[0.8, 0.9]"], "trainer.optim.betas", (0.8, 0.9)),
        (["--trainer.optim.betas", "(0.8, 0.9)"], "trainer.optim.betas", (0.8, 0.9)),
        (["--inference-gpu-ids", "0,1,2"], "inference_gpu_ids", [0, 1, 2]),
        (["--inference-gpu-ids", "3"], "inference_gpu_ids", [3]),
        (["--model.compile"], "model.compile", True),
        (["--model.compile", "true"], "model.compile", True),
        (["--model.compile", "no"], "model.compile", False),
        (["--model.compile", "--seed", "1"], "model.compile", True),
        (["--no-trainer.reshard-after-forward"], "trainer.reshard_after_forward", False),
        (["--no_trainer.reshard_after_forward"], "trainer.reshard_after_forward", False),
        (["--no-reshard-after-forward"], "trainer.reshard_after_forward", False),
        (["--ckpt"], "ckpt.interval", 50),
        (["--ckpt", "--ckpt.interval", "3"], "ckpt.interval", 3),
        (["--ckpt.interval", "3", "--ckpt"], "ckpt.interval", 3),
        (["--ckpt", "{'interval': 4}"], "ckpt.interval", 4),
        (["--ckpt", "on"], "ckpt.interval", 50),
        (["--ckpt.interval", "3", "--no-ckpt"], "ckpt", None),
        (["--ckpt", "none"], "ckpt", None),
        (["--ckpt.resume-step", "10"], "ckpt.resume_step", 10),
        (["--ckpt.resume-step", "latest"], "ckpt.resume_step", "latest"),
        (["--wandb"], "wandb.project", "prime-hpc"),
        (["--model.ac"], "model.ac.freq", 1),
        (["--exp-id", "x"], "name", "x"),
        (["--name", "x"], "name", "x"),
        (["--wandb.project=--x"], "wandb.project", "--x"),
        (["--name", "3"], "name", "3"),
        (["--trainer-gpus", "4"], "trainer.num_ranks", 4),
        (["--inference-gpus", "2"], "inference.data_parallel_size", 2),
        (["--trainer.data.fake", "{'micro_batch_size': 2, 'seq-len': 64}"], "trainer.data.fake.seq_len", 64),
        (["--trainer.data.fake", '{"micro_batch_size": 2}'], "trainer.data.fake.micro_batch_size", 2),
        (
            ["--orchestrator.client.base-url", "http://a,http://b"],
            "orchestrator.client.base_url",
            ["http://a", "http://b"],
        ),
        (["--orchestrator.client.base-url", "http://a"], "orchestrator.client.base_url", "http://a"),
        (["--inference.vllm.max-num-batched-tokens", "8"], "inference.vllm.max_num_batched_tokens", 8),
        (
            ["--inference.vllm", "{'a': {'b': 1}}", "--inference.vllm.a.c", "x"],
            "inference.vllm",
            {"a": {"b": 1, "c": "x"}},
        ),
        (["--kubernetes.requests.ephemeral-storage", "1Gi"], "kubernetes.requests", {"ephemeral-storage": "1Gi"}),
        (["--kubernetes.node_selector.node-pool=a", "--no-ckpt"], "kubernetes.node_selector", {"node-pool": "a"}),
        (["--inference.vllm.hf-overrides.rope-Scaling", "1"], "inference.vllm", {"hf_overrides": {"rope-Scaling": 1}}),
        (["--slurm.extra", '{"export": "NONE"}'], "slurm.extra", {"export": "NONE"}),
        (["--slurm.extra.export", "none"], "slurm.extra", {"export": None}),
        (["--inference.vllm", '{"a": "${seq_len}", "b": ["${seed}"]}'], "inference.vllm", {"a": 2048, "b": [0]}),
        (["--inference.vllm.a", "{'b': '${seq_len}'}"], "inference.vllm", {"a": {"b": 2048}}),
        (["--inference.vllm.a", "${seq_len}"], "inference.vllm", {"a": 2048}),
        (["--inference-gpu-ids", '["${seed}", 1]'], "inference_gpu_ids", [0, 1]),
        (["--ckpt", '{"interval": "${max_steps}"}'], "ckpt.interval", 100),
        (["--orchestrator.env", '[{"id": "${name}"}]', "--name", "x"], "orchestrator.env.0.id", "x"),
        (["--inference.vllm.enable-x"], "inference.vllm.enable_x", True),
        (["--orchestrator.max-failed-share", ".5"], "orchestrator.max_failed_share", 0.5),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--trainer.model.ac.freq", "3"], "model.ac.freq", 3),
        (["--inference.server.port", "0"], "inference.server.port", 0),
    ],
)
def test_forms(argv: list[str], dotted: str, expected: Any) -> None:
    assert value(load(*argv), dotted) == expected


def test_lists_of_sections_can_be_given_and_mended_by_index() -> None:
    envs = '[{"id": "a"}, {"id": "b", "ratio": 2}]'
    experiment = load("--orchestrator.env", envs, "--orchestrator.env.1.ratio", "3", "--orchestrator.env.0.args.n", "4")
    assert [(env.id, env.ratio) for env in experiment.orchestrator.env] == [("a", 1), ("b", 3)]
    assert experiment.orchestrator.env[0].args == {"n": 4}
    assert "the list has 2" in problem("--orchestrator.env", envs, "--orchestrator.env.5.id", "x")


def test_at_file_with_and_without_a_space(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 3\n")
    assert load("@", str(path)).seed == load(f"@{path}").seed == 3


def test_at_file_after_a_section_switches_it_on_and_fills_it(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("interval = 3\n")
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    experiment = load("--ckpt", "@", str(path), "--inference", f"@{empty}")
    assert experiment.ckpt is not None and experiment.ckpt.interval == 3
    assert experiment.inference is not None
    assert load("--inference", f"@{empty}", "--no-inference").inference is None


def test_positional_files_are_for_submit_and_plan(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\norchestrator: {env: [{id: x}]}\n")
    assert load(str(path), "--max-steps", "2", entrypoint="plan").seed == 3
    assert load("--max-steps", "2", str(path), entrypoint="submit").seed == 3
    assert f"write `@ {path}`" in problem(str(path), "--orchestrator.env", '[{"id": "x"}]', entrypoint="rl")


def test_secrets_and_text_that_look_like_other_things() -> None:
    assert load("--name", "1e5").name == "1e5"
    experiment = load("--model.name", "org/model@main")
    assert experiment.model.name == "org/model@main"


def test_a_file_is_no_value(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\n")
    assert "needs a value" in problem("--model.name", f"@{path}")
    assert "needs a value" in problem("--model.name", "@", str(path))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-steps"], "needs a value"),
        (["--max-steps", "--seed", "1"], "needs a value"),
        (["--no-seed"], "cannot be switched off"),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--no-model"], "cannot be switched off"),
        (["--no-ckpt=3"], "takes no value"),
        (["@"], "must be followed by a file name"),
        (["stray"], "unexpected argument 'stray'"),
        (["-x"], "unexpected argument '-x'"),
        (["--trainer.data.fake", "{'a'"], "mapping"),
        (["--ckpt=soon"], "expected a section"),
        (["--model=false"], "cannot be switched off"),
        (["--orchestrator.env", "reverse-text"], "list of mappings"),
    ],
)
def test_what_is_refused(argv: list[str], said: str) -> None:
    assert said in problem(*argv)
