"""The plan of a Slurm job: what it says, and that its numbers are those of the placement."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc import cli
from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.for_slurm import is_for_slurm
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.plan.plan import local_plan, slurm_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.launch.plan.this_machine import launcher, resolve_launch

SITE: dict[str, Any] = {
    "name": "test",
    "scratch": "/shared",
    "partitions": {
        "h100": {"nodes": 2000, "gpus_per_node": 8, "gpu_memory_gib": 80},
        "spot": {"gpus_per_node": 8, "preempt": "requeue"},
        "firm": {"gpus_per_node": 8, "preempt": "cancel"},
        "gang": {"gpus_per_node": 8, "preempt": "suspend"},
        "cpu": {},
    },
}
MODEL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def tree(model: Path, **values: Any) -> dict[str, Any]:
    base = {
        "name": "x",
        "output_dir": "/shared/runs",
        "launch": "slurm",
        "model": {"name": str(model)},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
        "inference": {"data_parallel_size": 16},
        "trainer": {"num_ranks": 16},
        "ckpt": {"interval": 10},
        "slurm": {"partition": "h100", "time": "12:00:00"},
    }
    return {**base, **values}


def test_a_trainer_of_many_runs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x" / "run_a").mkdir(parents=True)
    trainer, lora = {"num_ranks": 16, "max_concurrent_runs": 4}, {"name": str(model), "lora": {}}
    one = tree(model, output_dir=str(tmp_path), orchestrator={}, trainer=trainer) | {"model": lora}
    experiment = Experiment.model_validate(one)
    text = plan_text(slurm_plan(experiment, SiteConfig.model_validate(SITE)))
    assert "at most 4 at once, an adapter and an orchestrator each; 1 below it: run_a" in text
    assert "steps  " not in text and "step 1" not in text
    assert "each run's own, below its directory; interval 10 where it states nothing else" in text
    assert "everyone saves and the same job is requeued and goes on from each run's newest checkpoint" in text


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_interval_with_its_expected_loss(model: Path, tmp_path: Path) -> None:
    """Measured steps and saves, and the failures that this run and its neighbours had."""
    out = tmp_path / "runs"
    steps = [{"step": n, "loss": 0.1, "time/step": 30.0} for n in range(1, 5)]
    steps[1] |= {"ckpt/write_s": 90.0, "ckpt/stall_s": 2.0, "time/checkpoint": 2.0}
    write_rows(out / "x" / "metrics" / "trainer.jsonl", steps)
    ckpt = {"interval": 10, "save_async": True}
    plan, text = planned(model, output_dir=str(out), ckpt=ckpt)
    found = plan["checkpoints"]
    assert (plan["pace"]["save_s"], plan["pace"]["stall_s"]) == (90.0, 2.0)
    nodes, rate = plan["num_nodes"], 6.5
    mtbf = 1000 * 86400 / rate / nodes
    assert found["mtbf_s"] == pytest.approx(mtbf, rel=1e-3)
    # stall / interval, half an interval and what the write takes repeated, the restart
    by_hand = 100 * (2 / 300 + (300 / 2 + 88 + found["restart_s"]) / mtbf)
    assert found["set_loss_percent"] == pytest.approx(by_hand, abs=2e-3)
    assert found["best_loss_percent"] <= found["set_loss_percent"]
    assert f"expected loss {found['set_loss_percent']:.2f} %; Young/Daly: {found['best_loss_percent']:.2f} %" in text
    assert "holds training up for 2 s" in text
    auto, text = planned(model, output_dir=str(out), ckpt={**ckpt, "interval": "auto"})
    assert auto["checkpoints"]["set_loss_percent"] == found["best_loss_percent"] and "every auto" not in text

    # ten days in which a neighbour on as many nodes lost five: saves come more often
    hosts = [f"n{i}" for i in range(nodes)]
    lives = [
        {"attempt": n, "job_id": "7", "began": n * 172_800.0, "ended": (n + 1) * 172_800.0, "outcome": "node_lost"}
        | {"nodes": {"trainer": hosts}}
        for n in range(5)
    ]
    write_rows(out / "neighbour" / "attempts.jsonl", lives)
    worse, text = planned(model, output_dir=str(out), ckpt=ckpt)
    assert worse["checkpoints"]["mtbf_s"] == pytest.approx((mtbf + 5 * 172_800) / 6, rel=1e-3)
    assert worse["checkpoints"]["best_interval_s"] < found["best_interval_s"]
    assert "5 in 10 days of 5 attempts" in text

    # a notice too short for a step and a save makes every time limit a failure
    short, text = planned(
        model, output_dir=str(out), ckpt=ckpt,
        slurm={"partition": "h100", "time": "12:00:00", "restart": {"signal_lead_s": 60}},
    )  # fmt: skip
    assert short["checkpoints"]["mtbf_s"] < 12 * 3600 and "its end counts too" in text


def test_no_interval_is_longer_than_the_run_or_its_time_limit(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "runs")
    plan, text = planned(model, output_dir=out, ckpt={"interval": 10}, max_steps=40)
    assert plan["checkpoints"]["best_steps"] == 40 and "every 40 steps" in text
    assert "at most 40 steps: the run" in text
    assert plan["checkpoints"]["best_interval_s"] == round(40 * plan["pace"]["step_s"])
    slurm = {"partition": "h100", "time": "00:30:00"}
    plan, text = planned(model, output_dir=out, ckpt={"interval": 10}, max_steps=10_000, slurm=slurm)
    assert plan["checkpoints"]["best_steps"] <= int(1800 / plan["pace"]["step_s"])


def planned(model: Path, site: dict[str, Any] | None = None, **values: Any) -> tuple[dict[str, Any], str]:
    one = Experiment.model_validate(tree(model, **values))
    plan = slurm_plan(one, SiteConfig.model_validate({**SITE, **(site or {})}))
    return plan.as_dict(), plan_text(plan)


def events(model: Path, site: dict[str, Any] | None = None, **slurm: Any) -> dict[str, str]:
    plan, _ = planned(model, site, slurm={"partition": "h100", "time": "12:00:00", **slurm})
    result: dict[str, str] = plan["restart"]["events"]
    return result


def test_what_it_says(model: Path) -> None:
    plan, text = planned(model)
    assert (plan["layout"], plan["num_nodes"]) == ("packed", 4)
    assert "layout       packed: all roles ask for the same nodes" in text
    assert "0 all           4 nodes     partition h100, time 12:00:00, gres gpu:8" in text
    assert "inference     2 vLLM server(s) on 2 nodes (nodes 2-3 of component 0), data parallel 8" in text
    assert "16 FSDP2 ranks on 2 nodes (nodes 0-1 of component 0), 8 a node; cuda: GPUs 0-7" in text
    assert "8.03 B parameters" in text
    assert "/shared/runs/x/job.sbatch" in text
    assert "bytes of KV cache a token" in text


def test_json_is_the_same_plan(model: Path) -> None:
    plan, _ = planned(model)
    assert json.loads(json.dumps(plan)) == plan
    assert [role["role"] for role in plan["roles"]] == ["orchestrator", "trainer", "inference[0]", "inference[1]"]
    assert plan["memory"]["trainer_gib"]["state"] == pytest.approx(16 * 8_030_261_248 / 16 / 2**30, abs=0.01)
    assert plan["memory"]["gpu_gib"] == {"trainer": 80, "inference": 80}


def test_the_layout_of_the_ranks(model: Path) -> None:
    plan, text = planned(model, trainer={"num_ranks": 16, "parallel": {"tp": 4, "cp": 2}})
    trainer = next(role for role in plan["roles"] if role["role"] == "trainer")
    assert trainer["parallel"] == {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 4, "ep": 1}
    assert "16 FSDP2 ranks (dp_shard 2 x cp 2 x tp 4) on " in text
    assert "FSDP2 ranks on " in planned(model)[1]


def test_without_checkpoints_it_warns(model: Path) -> None:
    plan, text = planned(model, ckpt=None)
    assert "checkpoints  OFF: an attempt that ends leaves nothing to come back to" in text
    assert "goes on from step 1" in plan["restart"]["events"]["time limit"]
    assert any(f["code"] == "PH205" for f in plan["findings"])


def test_the_time_limit(model: Path) -> None:
    assert "Slurm warns 300 s before it: everyone saves" in events(model, restart={"signal_lead_s": 300})["time limit"]
    assert "same job is requeued" in events(model)["time limit"]
    assert "afternotok" in events(model, {"requeue": False})["time limit"]
    assert "prime-hpc resume" in events(model, restart={"how": "off"})["time limit"]


def test_preemption(model: Path) -> None:
    assert "are not preempted" in events(model)["preemption"]
    assert "requeued" in events(model, partition="spot")["preemption"]
    assert "successor" in events(model, partition="firm")["preemption"]
    assert events(model, partition="gang")["preemption"].startswith("all processes are stopped and go on later")
    assert "is cancelled" in events(model, partition="firm", restart={"how": "requeue"})["preemption"]
    assert "does not say" in events(model, {"partitions": {}}, gpus_per_node=8)["preemption"]


def test_a_lost_inference_node(model: Path) -> None:
    assert "trainer goes on with the other servers" in events(model)["lost inference node"]
    assert "on its node, then as a job of its own" in events(model)["lost inference node"]
    assert "on a spare node, else" in events(model, spare_nodes=1)["lost inference node"]
    assert "ends a het job" in events(model, layout="het")["lost inference node"]
    one, _ = planned(model, inference={}, trainer={"num_ranks": 1})
    assert "it is the trainer's node too" in one["restart"]["events"]["lost inference node"]
    only, _ = planned(model, inference={"data_parallel_size": 8})
    many, _ = planned(model, inference={"num_replicas": 8})
    for one_node in (only, many):
        words = one_node["restart"]["events"]["lost inference node"]
        assert words.startswith("no server is elsewhere: the attempt ends; the same job is requeued")
    spare, _ = planned(model, inference={"data_parallel_size": 8}, slurm={"partition": "h100", "spare_nodes": 1})
    assert "they start on a spare node" in spare["restart"]["events"]["lost inference node"]


def test_a_teacher_of_the_runs_own(model: Path) -> None:
    opd = {"env": [{"id": "reverse-text"}], "advantage": {"type": "opd"}, "teacher": {"model": str(model)}}
    values: dict[str, Any] = {"orchestrator": opd, "teacher_inference": {"tensor_parallel_size": 8}}
    plan, text = planned(model, **values)
    assert plan["num_nodes"] == 5 and plan["roles"][-1]["role"] == "teacher[0]"
    assert f"teacher       1 vLLM server(s) of {model} on 1 node (node 4 of component 0)" in text
    assert plan["memory"]["teacher_engine"]["weights_gib"] < plan["memory"]["engine"]["weights_gib"]
    assert "no server is elsewhere" in plan["restart"]["events"]["lost teacher node"]
    _, attached = planned(model, orchestrator={**opd, "teacher": {"base_url": "http://node7:8000/v1"}})
    assert "teacher       attached: http://node7:8000/v1" in attached
    one = Experiment.model_validate(tree(model, **values, launch="local"))
    assert f"teacher       1 vLLM server(s) of {model} on 1 node (node 0 of component 0), data" in plan_text(
        local_plan(one)
    )


def test_crashes_and_bad_nodes(model: Path) -> None:
    words = events(model, restart={"max_crashes": 2, "max_attempts": 9, "exclude_bad_nodes": True, "bad_node_days": 3})
    assert "not after 3 attempts in a row that saved nothing new, nor after 9 attempts" in words["crash"]
    assert "forgotten after 3 days" in words["bad node"]
    assert "bad node" not in events(model)
    assert "begins inside the job" in words["crash"] and "servers serve on; the second time" in words["crash"]
    for one in (events(model, restart={"in_place": False}), events(model, restart={"how": "off"})):
        assert "inside the job" not in one["crash"]
    assert words["lost trainer node"].startswith("the attempt ends")
    assert events(model, spare_nodes=1)["lost trainer node"].startswith("a spare node takes its place inside the job")


def test_supervised_and_attached(model: Path) -> None:
    plan, text = planned(model, kind="sft", inference=None, sft={"data": {"type": "fake"}})
    assert "inference" not in text
    assert "lost inference node" not in plan["restart"]["events"]
    _, attached = planned(model, inference=None)
    assert "attached: http://127.0.0.1:8000/v1" in attached


def test_a_thousand_nodes(model: Path) -> None:
    plan, text = planned(model, trainer={"num_ranks": 4000}, inference={"num_replicas": 500, "data_parallel_size": 8})
    assert plan["num_nodes"] == 1000
    assert len(plan["roles"]) == 502
    assert len(text.splitlines()) < 60


def test_what_cannot_be_placed_is_an_error(model: Path) -> None:
    with pytest.raises(ConfigError, match="evenly"):
        planned(model, trainer={"num_ranks": 9})


def test_where_a_job_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(value: str) -> str:
        return resolve_launch(Experiment.model_validate({"launch": value}))

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "slurm.conf").write_text("ClusterName=here\n")
    assert (launch("auto"), launch("slurm"), launch("local")) == ("local", "slurm", "local")
    assert "there is no sbatch on PATH" in launcher()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    assert (launch("auto"), launch("slurm"), launch("local")) == ("slurm", "slurm", "local")
    assert "there is a Slurm here" in launcher()


def test_for_slurm_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # else the model that is not here is told of
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    plain = Experiment.model_validate({})
    assert not is_for_slurm(plain, GENERIC)
    assert is_for_slurm(plain, SiteConfig.model_validate(SITE))
    assert is_for_slurm(Experiment.model_validate({"slurm": {"time": "60"}}), GENERIC)
    assert is_for_slurm(Experiment.model_validate({"launch": "slurm"}), GENERIC)
    assert not is_for_slurm(Experiment.model_validate({"launch": "local", "slurm": {"time": "60"}}), GENERIC)
    assert not [f for f in lint(plain, GENERIC) if f.code.startswith("PH3")]


def _shape(value: Any) -> Any:
    """Keys of a plan, without those that name options and events."""
    if isinstance(value, list):
        return [_shape(value[0])] if value and isinstance(value[0], dict) else []
    if not isinstance(value, dict):
        return None
    return {key: _shape(part) for key, part in value.items() if key not in ("options", "events", "findings")}


def test_the_verbs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, file, script = (tmp_path / name for name in ("site.yaml", "exp.yaml", "job.sbatch"))
    site.write_text(yaml.safe_dump(SITE))
    file.write_text(yaml.safe_dump(tree(model)))
    monkeypatch.setenv("PRIMEHPC_SITE", str(site))
    assert cli.main(["plan", str(file)]) == 0
    assert "layout       packed" in capsys.readouterr().out
    assert cli.main(["plan", str(file), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert there["layout"] == "packed"
    assert cli.main(["plan", str(file), "--launch", "local", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["launch"] == here["layout"] == "local" and _shape(here) == _shape(there)
    assert cli.main(["submit", str(file), "--launch", "local", "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry == {"dry_run": True, "plan": here, "script": None}

    assert cli.main(["render", str(file), "--max-steps", "7"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].endswith(f"/shared/runs/x -- {file} --max-steps 7")
    assert cli.main(["render", str(file), "--max-steps", "7", "--output", str(script)]) == 0
    assert capsys.readouterr().out == ""
    assert script.read_text() == printed
    assert cli.main(["render", str(file), "--array", "4"]) == 0
    assert "#SBATCH --array=0-3\n" in capsys.readouterr().out
    assert cli.main(["render", str(file), "--array", "none"]) == 2
    assert cli.main(["render", str(file), "--output", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
