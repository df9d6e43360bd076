"""Lint: every code has a config that provokes it and one that does not."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.envs.env_config import BUNDLED, NEED_SANDBOX
from prime_hpc.launch.estimate.step_time import pace
from prime_hpc.launch.lint.lint import CODES, lint, lint_errors
from tests.support.lint import LLAMA_8B, SITE, findings, good, merged
from tests.support.lint_table import FOLLOWS, MANY, ON_ONE_GPU, OPD, PROVOKED, SLEEPING, SLURM


def test_nothing_to_say_about_a_good_one(model: Path) -> None:
    assert findings(model, {}) == []
    few = {"orchestrator": {"batch_size": 16, "max_concurrent": 256}}  # episodes in flight by default
    assert not [finding for finding in findings(model, few) if "more than the" in finding.message]


def test_a_mixture_of_experts_is_told_to_follow_the_engines_choice(model: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    (model / "config.json").write_text(json.dumps(LLAMA_8B | experts))

    def found(changes: dict[str, Any]) -> list[tuple[str, str | None]]:
        return [(f.severity, f.key) for f in findings(model, changes) if f.code == "PH127"]

    assert found({}) == [("info", "trainer.router_replay")]
    assert found({"trainer": FOLLOWS, "model": {"router_dtype": "float32"}}) == []
    assert found({"trainer": FOLLOWS, "model": {"lora": {}}}) == [("error", "trainer.router_replay")]
    assert found({"trainer": FOLLOWS, "kind": "sft"}) == [("error", "trainer.router_replay")]
    (model / "config.json").write_text(json.dumps(LLAMA_8B | experts | {"model_type": "phimoe"}))
    assert found({}) == [] and found({"trainer": FOLLOWS}) == [("error", "trainer.router_replay")]


@pytest.mark.parametrize(
    ("code", "severity", "change", "site", "words"), PROVOKED, ids=[f"{p[0]}-{p[4]}" for p in PROVOKED]
)
def test_what_lint_says(
    model: Path, code: str, severity: str, change: dict[str, Any], site: dict[str, Any], words: str
) -> None:
    found = [f for f in findings(model, change, **site) if f.code == code and words in f.message]
    assert [f.severity for f in found[:1]] == [severity], findings(model, change, **site)
    assert all(f.remedy for f in found)


def test_a_backend_whose_module_raises_is_a_finding(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_typed_engine.py").write_text("class Mine(:\n")
    found = findings(model, {"inference": {"backend": "half_typed_engine:MINE"}})
    assert [f.message for f in found if f.code == "PH125" and "SyntaxError: invalid syntax" in f.message]


def test_roles_that_share_nodes_are_named_together_for_gpus_that_nobody_uses(model: Path) -> None:
    few = {
        "trainer": {"num_ranks": 2},
        "inference": {"num_replicas": 1, "data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    found = [f for f in findings(model, few) if f.code == "PH317"]
    assert [f.message.partition(" GPUs")[0] for f in found] == ["trainer and inference: 8"]


def test_groups_of_engines_on_one_port_of_one_machine_are_named(model: Path) -> None:
    """Else the run is refused when its supervisor starts them."""

    def found(policy: int | None, judge: int) -> list[str | None]:
        servers = {"num_replicas": 2, "server": {"port": policy} if policy else {}}
        judges = {"model": str(model), "server": {"port": judge}}
        change = {"inference": servers, "judge_inference": judges, "launch": "local"}
        experiment = Experiment.model_validate(merged(good(model), change))
        return [f.key for f in lint(experiment, SiteConfig(name="test")) if f.code == "PH327" and f.severity == "error"]

    assert found(9000, 9001) == found(None, 8001) == ["judge_inference.server.port"]
    assert found(9000, 9002) == found(9000, 0) == []


def test_a_started_teacher_is_held_to_what_the_policys_engines_are(model: Path) -> None:
    """Every finding names the teacher's own key."""
    known = {"orchestrator": {**OPD, "teacher": {"model": str(model)}}}

    def said(servers: dict[str, Any], **change: Any) -> set[tuple[str, str, str | None]]:
        found = findings(model, known | {"teacher_inference": servers} | change)
        return {(f.code, f.severity, f.key) for f in found}

    assert said({"num_replicas": 8}) == set()
    assert said({}, slurm={"layout": "het"}) == {("PH317", "warning", "slurm.gpus_per_node")}  # one engine, 8 GPUs
    assert ("PH101", "error", "teacher_inference.tensor_parallel_size") in said({"tensor_parallel_size": 3})
    assert ("PH104", "error", "seq_len") in said({}, seq_len=8192)
    assert ("PH104", "error", "teacher_inference.max_model_len") in said({"max_model_len": 9000})
    assert ("PH106", "error", "teacher_inference.tensor_parallel_size") in said({"gpu_memory_utilization": 0.1})
    assert ("PH320", "warning", "teacher_inference.data_parallel_size_local") in said({"data_parallel_size_local": 1})
    assert ("PH308", "error", "slurm.teacher.nodes") in said({"data_parallel_size": 9}, slurm={"teacher": {"nodes": 1}})
    unknown = findings(model, {"orchestrator": OPD, "teacher_inference": {"data_parallel_size": 8}})
    assert [(f.code, f.severity, f.key) for f in unknown] == [("PH107", "info", "orchestrator.teacher.model")]


def test_gpus_of_other_nodes_are_others(model: Path) -> None:
    """Keys name positions: those of a node that both roles use are shared, the same ones of two nodes are not."""
    apart = merged(ON_ONE_GPU, {"slurm": {"trainer": {"nodes": 1}}, "weights": {"transport": "nccl"}})

    def said(change: dict[str, Any]) -> set[str]:
        return {f.code for f in findings(model, change)} & {"PH120", "PH126"}

    assert said(ON_ONE_GPU | {"weights": {"transport": "nccl"}}) == {"PH120", "PH126"}
    assert said(apart) == set()
    sleeps = merged(SLEEPING, {"slurm": {"trainer": {"nodes": 1}}})
    assert [f.message for f in findings(model, sleeps) if f.code == "PH120"] == [
        "engines and trainer have no GPU in common, so that they would sleep for nothing"
    ]


def test_a_sandbox_wants_bubblewrap(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    env: dict[str, Any] = {"id": "humaneval", "sandbox": {}}
    (found,) = findings(model, {"orchestrator": {"env": [env]}})
    assert (found.code, found.severity, found.key) == ("PH212", "warning", "orchestrator.env.0.sandbox")
    assert "apt-get install bubblewrap" in found.message
    allowed = {"id": "humaneval", "args": {"allow_code_execution": True}}
    assert findings(model, {"orchestrator": {"env": [allowed]}}) == []
    (found,) = findings(model, {"orchestrator": {"env": [{"id": "python-tool"}]}})
    assert "apt-get install bubblewrap" in found.message, "it has a sandbox, stated or not"


def test_what_needs_a_sandbox_is_known_without_an_import() -> None:
    def needs(module: str) -> bool:
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        return "needs_sandbox = True" in Path(found.origin).read_text()

    assert {name for name, module in BUNDLED.items() if needs(module)} == NEED_SANDBOX


def test_servers_by_hand_and_a_misspelt_word_are_told_on_one_machine_too(model: Path) -> None:
    change = {"launch": "local", SLURM: None, "inference": {"data_parallel_size_local": 4}}
    step = {"ckpt": {"resume_step": f"{model}/lastest"}}
    found = {f.code: f for f in findings(model, merged(change, step), partitions={})}
    assert "on one machine the run starts all engines there" in found["PH320"].message
    assert found["PH242"].remedy == "did you mean latest?"


def test_a_job_without_a_trainer_is_held_to_its_time_its_engines_and_what_it_runs(model: Path) -> None:
    alone: dict[str, Any] = {"kind": "eval", "trainer": None, "ckpt": None, "orchestrator": None}

    def said(env: str = "reverse-text", **change: Any) -> set[tuple[str, str | None]]:
        return {(f.code, f.key) for f in findings(model, merged({**alone, "eval": {"env": [{"id": env}]}}, change))}

    assert said() == set()
    assert ("PH101", "inference.tensor_parallel_size") in said(inference={"tensor_parallel_size": 3})
    assert said(slurm={"time": "90 mins"}) == {("PH304", "slurm.time")}
    assert said(slurm={"time": "9-00:00:00"}) == {("PH306", "slurm.time")}
    assert said(inference={"num_replicas": 200}) == {("PH303", "slurm.inference.nodes")}
    assert said("humaneval") == {("PH212", "eval.env.0.sandbox")}
    by_name = {**alone, "eval": {"environment_ids": ["humaneval"]}}
    (found,) = findings(model, by_name)
    assert (found.code, found.key) == ("PH212", "eval.environment_ids.0")
    assert "--eval.env.0.id humaneval --eval.env.0.sandbox" in (found.remedy or ""), "what can be typed"


def test_what_supervised_fine_tuning_does_not_read_is_held_to_nothing(model: Path, tmp_path: Path) -> None:
    """Steps in tokens, steps that nobody can count yet, the length of what others sample."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    sft: dict[str, Any] = {"kind": "sft", "inference": None, "orchestrator": None, "max_steps": None}

    def said(data: dict[str, Any], **change: Any) -> set[tuple[str, str | None]]:
        found = findings(model, merged({**sft, "sft": {"data": {"path": str(rows), "batch_size": 8, **data}}}, change))
        return {(f.code, f.key) for f in found if f.severity != "info"} - {("PH224", "trainer.optim.lr")}

    assert ("PH202", "sft.data.batch_size") in said({})
    in_tokens = {"batch_tokens": 100_000, "num_epochs": 2}
    decays = {"trainer": {"scheduler": {"type": "linear", "decay_steps": 10}}}
    assert not {code for code, _ in said(in_tokens, **decays)} & {"PH202", "PH220"}
    assert said({"seq_len": 512, "batch_size": 16}, seq_len=16384) == set()
    assert said({"seq_len": 9000, "batch_size": 16}) == {("PH104", "sft.data.seq_len")}


def test_every_code_is_provoked() -> None:
    in_tests_of_their_own = {
        "PH000",
        "PH113",
        "PH118",
        "PH119",
        "PH121",
        "PH128",
        "PH129",
        "PH130",
        "PH131",
        "PH201",
        "PH214",
        "PH224",
    }
    in_tests_of_their_own |= {"PH215", "PH238", "PH243", "PH332", "PH333"}
    assert {p[0] for p in PROVOKED} | in_tests_of_their_own == set(CODES)


def test_a_trainer_of_many_runs_is_not_held_to_what_they_state(model: Path, tmp_path: Path) -> None:
    assert {f.code for f in findings(model, MANY)} == {"PH210"}
    (tmp_path / "x" / "run_a").mkdir(parents=True)
    assert not {f.code for f in findings(model, {**MANY, "output_dir": str(tmp_path)})} & {"PH204", "PH206", "PH210"}


def test_a_group_of_one(model: Path) -> None:
    one = Experiment.model_validate(good(model))
    # the config refuses it for the objectives that it knows; lint for any to come
    single = one.orchestrator.model_copy(update={"rollouts_per_example": 1})
    found = lint(one.model_copy(update={"orchestrator": single}), SiteConfig.model_validate(SITE))
    assert [(f.code, f.severity) for f in found] == [("PH201", "error")]
    fours = [env.model_copy(update={"rollouts_per_example": 4}) for env in one.orchestrator.env]
    larger = one.model_copy(update={"orchestrator": single.model_copy(update={"env": fours})})
    assert not lint(larger, SiteConfig.model_validate(SITE))
    for algorithm, keys in (("reinforce", []), ("own:fn", ["orchestrator.env.1.rollouts_per_example"])):
        envs = [{"id": "a"}, {"id": "b", "rollouts_per_example": 1, "algorithm": algorithm}]
        assert [f.key for f in findings(model, {"orchestrator": {"env": envs}}) if f.code == "PH201"] == keys
    own = {"rollouts_per_example": 1, "advantage": {"type": "own:fn"}}
    said = [(f.severity, f.message) for f in findings(model, {"orchestrator": own}) if f.code == "PH201"]
    assert [severity for severity, _ in said] == ["warning"] and "may compare" in said[0][1]


def test_a_job_that_nobody_preempts_need_not_come_back(model: Path) -> None:
    assert findings(model, {"slurm": {"restart": {"how": "off", "signal_lead_s": 1200}}}) == []


def test_near_partition_is_named(model: Path) -> None:
    found = findings(model, {"slurm": {"partition": "h10"}})
    assert next(f for f in found if f.code == "PH301").remedy == "did you mean h100?"


def test_errors_come_first_and_are_what_submit_refuses(model: Path) -> None:
    change = {"slurm": {"time": "0", "cpus_per_task": None, "mem": None}}
    severities = [f.severity for f in findings(model, change)]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    one = Experiment.model_validate(merged(good(model), change))
    assert [f.code for f in lint_errors(one, SiteConfig.model_validate(SITE))] == ["PH305"]


@pytest.mark.parametrize(
    "text",
    ["afterok:1", "afterok:1:2,afternotok:3", "afterany:1?afterany:2", "singleton", "after:1+5", "aftercorr:7_*"],
)
def test_dependencies_that_slurm_reads(model: Path, text: str) -> None:
    assert findings(model, {"slurm": {"dependency": text}}) == []


def test_tensor_parallel_sizes_that_vllm_takes(model: Path) -> None:
    for size in (1, 2, 4, 8):
        assert findings(model, {"inference": {"tensor_parallel_size": size, "data_parallel_size": 1}}) == [], size


def test_the_pace_of_an_earlier_life_counts(model: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "x" / "metrics"
    metrics.mkdir(parents=True)
    rows = [{"step": n, "time/step": 900.0 + n, "time/checkpoint": 100.0 * (n == 2)} for n in range(1, 4)]
    (metrics / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = {"output_dir": str(tmp_path / "runs"), "slurm": {"time": "30", "restart": {"signal_lead_s": 700}}}
    one = Experiment.model_validate(merged(good(model), change))
    speed = pace(one, None)
    assert (speed.step_s, speed.save_s) == (902.0, 100.0)
    (found,) = [f for f in lint(one, SiteConfig.model_validate({**SITE, "scratch": "/"})) if f.code == "PH311"]
    assert found.severity == "error" and "median of the last 3 steps" in found.message


def test_roles_of_which_nothing_says_how_many_gpus_they_have_are_named_together(model: Path) -> None:
    found = [f for f in findings(model, {"slurm": {"partition": None}}) if f.code == "PH318"]
    assert [f.key for f in found] == ["slurm.gpus_per_node"]
    assert "so trainer and inference would compute on the CPU" in found[0].message
