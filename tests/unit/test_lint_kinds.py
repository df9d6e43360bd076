"""Which rules of lint are for which kinds of runs: stated once more, so that none is left out unseen."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.lint import effect_rules
from prime_hpc.launch.lint import lint as lint_module
from prime_hpc.launch.lint.lint import RULES, examine
from prime_hpc.launch.lint.lint_finding import Finding, Rule, Subject
from tests.support.lint import LLAMA_8B, SITE, findings, good, merged

TRAINING = "rl sft"
EVERY = "rl sft eval synthesize"
KINDS = {
    ("backend_rules", EVERY): "abilities offloaded transport",
    (
        "model_rules",
        EVERY,
    ): "tensor_parallel pipeline context context_of_others known tokenizer engines adapters scores layout router_dtype",
    ("model_rules", TRAINING): "precision trainer_memory weights families router_replay",
    ("model_rules", "sft"): "vocabulary",
    ("vision_rules", TRAINING): "model layout",
    ("vision_rules", "sft"): "data",
    ("vision_rules", EVERY): "prompts",
    ("attention_rules", TRAINING): "attention_kernel float32_on_gpus",
    ("parallel_rules", TRAINING): "tensor_parallel context_parallel expert_parallel nodes",
    ("run_rules", "rl"): "groups sampling stale concurrency learning curriculum echo evaluation runs",
    ("run_rules", TRAINING): "batch learning_rate checkpoints",
    ("run_rules", EVERY): "sandboxes alarms offline on_the_hub output variables",
    ("sft_rules", "sft"): "data epochs rate",
    ("env_rules", "rl eval synthesize"): "workers",
    ("env_rules", "rl"): "demonstrations",
    ("env_rules", EVERY): "installed arguments rows benchmarks keys",
    ("own_code_rules", "rl"): "found",
    ("own_code_rules", EVERY): "rewards renderer asked_reward_model",
    ("effect_rules", TRAINING): "resumed",
    ("effect_rules", EVERY): "unused by_hand unknown_sampling",
    ("effect_rules", "eval"): "evaluated",
    ("effect_rules", "sft"): "margins",
    ("sharing_rules", TRAINING): "shared_gpus sleeping",
    ("slurm_rules", EVERY): "placed renders partitions sizes resources handed_on values paths networks",
    ("container_rules", EVERY): "image paths packed_environment",
    ("network_rules", EVERY): "port_ranges ports_of_one_machine",
    ("file_rules", EVERY): "without_internet before_a_purge",
    ("time_rules", EVERY): "limits warned_in_time coming_back",
    ("time_rules", TRAINING): "attempt_length",
}
OF_SLURM = ("slurm_rules", "container_rules", "network_rules", "file_rules", "time_rules")
OF_PODS = ("backend_rules", "model_rules", "parallel_rules")


def alone(kind: str, **change: Any) -> dict[str, Any]:
    """Changes that make the good experiment one that trains nothing."""
    section = {"environment_ids": ["reverse-text"], **change.pop(kind, {})}
    return {"kind": kind, "trainer": None, "ckpt": None, "orchestrator": None, kind: section, **change}


def test_each_rule_is_for_the_kinds_that_are_stated() -> None:
    stated = {
        f"{module}.{name}": (
            tuple(kinds.split()),
            module in OF_SLURM and name != "ports_of_one_machine",
            module in OF_PODS or name == "networks",
        )
        for (module, kinds), names in KINDS.items()
        for name in names.split()
    }
    assert {name: (rule.kinds, rule.slurm, rule.pods) for name, rule in RULES.items()} == stated


def test_no_check_of_its_modules_is_left_without_a_kind() -> None:
    for module in lint_module._MODULES:
        checks = [
            name
            for name, found in vars(module).items()
            if inspect.isgeneratorfunction(found) and not name.startswith("_") and found.__module__ == module.__name__
        ]
        assert set(checks) <= {"unknown"}, module  # of backends: asked before all rules
    files = {path.stem for path in Path(str(lint_module.__file__)).parent.glob("*_rules.py")}
    assert files == {name.partition(".")[0] for name in RULES}


@pytest.mark.parametrize("kind", EVERY.split())
def test_a_rule_is_asked_for_its_kinds_alone(model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(name: str, rule: Rule) -> Rule:
        def check(subject: Subject) -> Iterator[Finding]:
            asked.append(name)
            yield from ()

        return replace(rule, check=check)

    monkeypatch.setattr(lint_module, "RULES", {name: noted(name, rule) for name, rule in RULES.items()})
    findings(model, alone(kind) if kind in ("eval", "synthesize") else {"kind": kind})
    assert asked == [name for name, rule in RULES.items() if kind in rule.kinds]
    asked.clear()
    findings(model, {"launch": "local"} | (alone(kind) if kind in ("eval", "synthesize") else {"kind": kind}))
    assert asked == [name for name, rule in RULES.items() if kind in rule.kinds and not rule.slurm]


@pytest.mark.parametrize("kind", ["eval", "synthesize"])
def test_a_run_that_trains_nothing_is_held_to_what_its_engines_and_its_job_can_do(model: Path, kind: str) -> None:
    def said(**change: Any) -> set[tuple[str, str, str | None]]:
        return {(f.code, f.severity, f.key) for f in findings(model, alone(kind, **change))}

    assert said() == set()
    assert said(seq_len=16384) == {("PH104", "error", "seq_len")}
    assert said(inference={"max_model_len": 9000}) == {("PH104", "error", "inference.max_model_len")}
    assert said(inference={"max_model_len": 4096}, seq_len=16384) == set()  # of samples that nobody trains on
    assert said(model={"router_dtype": "float32"}) == {("PH127", "error", "model.router_dtype")}
    assert said(slurm={"time": "10"}) >= {("PH310", "error", "slurm.restart.signal_lead_s")}
    attached = {"inference": None, kind: {"client": {"base_url": "http://localhost:8000/v1"}}}
    assert said(**attached) == {("PH312", "warning", f"{kind}.client.base_url")}
    monitors = {"wandb": {}, "mlflow": {}, "tensorboard": True, "ckpt": {}}
    assert said(**monitors) == {("PH241", "warning", key) for key in monitors}, "nothing writes them"
    training = {"trainer": {"optim": {"lr": 1.0}}, "max_steps": 7, "async_level": 0, "sft": {"data": {"path": "x"}}}
    assert said(**training) == {("PH241", "warning", key) for key in training}
    sampling = {"extra": {"stopp": ["x"], "stop": ["x"], "seed": 3}}
    assert said(**{kind: {"sampling": sampling}}) == {("PH241", "warning", f"{kind}.sampling.extra.stopp")}
    of_api = {"client": {"base_url": "https://api.example.com/v1"}, "sampling": {"extra": {"reasoning_effort": "low"}}}
    assert said(**{"inference": None, kind: of_api}) == set(), "vLLM has no say"
    weighed = {kind: {"env": [{"id": "calculator", "ratio": 2}]}}
    assert said(**weighed) == {("PH241", "warning", f"{kind}.env.0.ratio")}
    rules = [{"metric": "trainer.kl", "above": 1}, {"metric": "run.stall_s", "above": 1}]
    assert said(alarms={"rules": rules}) == {("PH240", "warning", "alarms.rules.0.metric")}


def test_environments_of_another_kind_are_told_of(model: Path) -> None:
    """As PRIME-RL's [eval] of an orchestrator: nobody would evaluate, without a word."""
    told = {
        (f.code, f.severity, f.key) for f in findings(model, {"kind": "rl", "eval": {"environment_ids": ["math500"]}})
    }
    assert ("PH241", "warning", "eval.environment_ids") in told


@pytest.mark.parametrize("kind", EVERY.split())
def test_a_model_that_nobody_may_fetch(model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    for name in ("TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    here = {"launch": "local", "slurm": None, "model": {"name": "someone/unheard-of"}}
    change = here | (alone(kind) if kind in ("eval", "synthesize") else {"kind": kind})
    for text, said in (("1", [("warning", "model.name")]), ("0", [])):
        monkeypatch.setenv("HF_HUB_OFFLINE", text)
        assert [(f.severity, f.key) for f in findings(model, change) if f.code == "PH329"] == said


def test_an_unstated_length_is_bounded_by_the_models_own(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 1024}))
    assert findings(model, alone("eval", seq_len=None)) == []


def test_versions_that_are_not_there(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**config: Any) -> list[tuple[str, str, str | None]]:
        found = findings(model, alone("eval", eval=config))
        return [(f.code, f.severity, f.key) for f in found]

    assert said(weights_dir=str(tmp_path / "none")) == [("PH243", "warning", "eval.weights_dir")]
    version = tmp_path / "run" / "weights" / "step_000010"
    version.mkdir(parents=True)  # somebody's own: engines would refuse it when its turn comes
    assert said(weights_dir=str(tmp_path / "run")) == [("PH243", "error", "eval.weights_dir")]
    (version / "manifest.json").touch()
    assert said(weights_dir=str(tmp_path / "run")) == []
    assert said(weights_dir=str(tmp_path / "run"), steps=[20]) == [("PH243", "error", "eval.steps")]
    for waits in ({"dependency": "afterok:7"}, {"inference": {"dependency": "afterok:7"}}):
        made_yet = alone("eval", eval={"weights_dir": str(tmp_path / "run"), "steps": [20]}, slurm=waits)
        assert [(f.code, f.severity) for f in findings(model, made_yet)] == [("PH243", "warning")]

    def denied(config: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(effect_rules, "find_versions", denied)
    assert said(weights_dir=str(tmp_path / "run")) == [("PH243", "warning", "eval.weights_dir")]


def test_servers_that_a_run_attaches_to(model: Path) -> None:
    def keys(change: dict[str, Any]) -> list[str]:
        one = Experiment.model_validate(merged(good(model), change))
        return list(examine(one, SiteConfig.model_validate(SITE)).attached)

    assert keys({}) == [] == keys({"kind": "sft", "inference": None})
    assert keys({"inference": None}) == ["orchestrator.client"]
    evaluates = {"kind": "sft", "inference": None, "orchestrator": {"eval": {"env": [{"id": "wordle"}]}}}
    assert keys(evaluates) == ["orchestrator.client"]
    taught = {"advantage": {"type": "sft"}, "teacher": {"base_url": "http://other:8000/v1"}}
    imitates = {"inference": None, "orchestrator": taught, "trainer": {"loss": {"type": "nll"}}}
    assert keys(imitates) == ["orchestrator.teacher"]
    assert keys(alone("synthesize", inference=None, synthesize={"client": {}})) == ["synthesize.client"]
