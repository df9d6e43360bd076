"""A value means the same wherever it is stated, and what cannot be meant is refused."""

from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment

ENV = ["--orchestrator.env", '[{"id": "reverse-text"}]']


def load(argv: list[str], entrypoint: str = "rl", environ: dict[str, str] | None = None) -> Experiment:
    return load_experiment([*(ENV if entrypoint == "rl" else []), *argv], entrypoint, environ or {}).experiment


def refused(argv: list[str], words: str, entrypoint: str = "rl", environ: dict[str, str] | None = None) -> None:
    with pytest.raises(ConfigError, match=words):
        load(argv, entrypoint, environ)


def file_(folder: Path, text: str, name: str = "exp.yaml") -> list[str]:
    (folder / name).write_text(text)
    return ["@", str(folder / name)]


@pytest.mark.parametrize("section", ["env", "eval.env"])
def test_two_environments_of_one_label_are_refused(section: str) -> None:
    envs = '[{"id": "a"}, {"id": "b", "name": "a"}]'
    refused([f"--orchestrator.{section}", envs], "two environments are called a; give one of them a name")
    load([f"--orchestrator.{section}", '[{"id": "a"}, {"id": "a", "name": "b"}]'])


def test_a_reference_is_of_its_keys_type_whatever_stated_it(tmp_path: Path) -> None:
    args = 'n: "${seq_len}", d: "${trainer.deterministic}", lr: "${trainer.optim.lr}", ids: "${trainer_gpu_ids}"'
    text = (
        f'orchestrator: {{env: [{{id: a, args: {{{args}}}}}], sampling: {{max_tokens: 24}}}}\nname: "x-${{seq_len}}"\n'
    )
    path = file_(tmp_path, text)
    flags = ["--seq-len", "64", "--trainer.deterministic", "false", "--trainer.optim.lr", "1e-5"]
    ranks = ["--trainer-gpu-ids", "0,1"]
    expected = {"n": 64, "d": False, "lr": 1e-5, "ids": [0, 1]}
    one = load_experiment([*path, *flags, *ranks], "rl", {}).experiment
    assert one.orchestrator.env[0].args == expected and type(one.orchestrator.env[0].args["n"]) is int
    assert one.name == "x-64"
    environ = {
        "PRIME_SEQ_LEN": "64",
        "PRIME_TRAINER__DETERMINISTIC": "false",
        "PRIME_TRAINER__OPTIM__LR": "1e-5",
        "PRIME_TRAINER_GPU_IDS": "0,1",
    }
    assert load_experiment(path, "rl", environ).experiment.orchestrator.env[0].args == expected


@pytest.mark.parametrize("text", ["12.10", "1e3", "0x10", "false", "none", "[1,2]", "'quoted'", "010"])
def test_texts_of_a_mapping_of_texts_stay_as_they_were_typed(text: str) -> None:
    exp = load(["--slurm.env.A", text, "--kubernetes.requests.cpu", text, "--kubernetes.image", "i"])
    assert exp.slurm.env == {"A": text}
    assert exp.kubernetes is not None and exp.kubernetes.requests == {"cpu": text}
    assert load([], environ={"PRIME_SLURM__ENV__A": text}).slurm.env == {"A": text}


def test_what_is_no_text_says_so(tmp_path: Path) -> None:
    refused(file_(tmp_path, "slurm: {env: {A: false}}\n"), r"slurm\.env\.A: expected text, got false")
