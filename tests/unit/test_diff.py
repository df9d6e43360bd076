"""`prime-hpc diff`: runs made by the product's own writers, compared by the product."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from prime_hpc import cli
from prime_hpc.config import load_experiment, write_snapshot
from prime_hpc.config.sections.standalone_eval import StandaloneEvalConfig
from prime_hpc.evals.episodes import COMPLETED, Record
from prime_hpc.evals.summary import summarize, write_summary
from prime_hpc.evals.versions import Version
from prime_hpc.launch.monitor.diff import beside, compare_runs, differences, flatten, run_figures
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.table import align
from tests.support.metric_rows import write_rows


def make(path: Path, *flags: str, rewards: list[float] | None = None) -> Path:
    argv = ["--orchestrator.env", '[{"id": "reverse-text"}]', "--name", path.name, "--output-dir", str(path.parent)]
    loaded = load_experiment([*argv, *flags], "rl")
    path.mkdir()
    write_snapshot(loaded.experiment, path, ["rl", *flags])
    trainer, orchestrator = (MetricsWriter(path / "metrics" / f"{r}.jsonl") for r in ("trainer", "orchestrator"))
    for step, reward in enumerate(rewards or [], 1):
        orchestrator.log(step, **{"reward/mean": reward, "lag/mean": 1.0, "tokens/sampled_per_second": 100.0 * step})
        trainer.log(step, **{"time/step": 60.0 if step == 1 else 2.0, "loss": -reward, "tokens_per_s": 10.0})
    if rewards:
        orchestrator.log(0, **{"eval/reverse-text/mean_reward": 0.1})
        orchestrator.log(len(rewards), **{"eval/reverse-text/mean_reward": 0.8})
    return path


def test_flatten_and_differences() -> None:
    flat = flatten({"a": {"b": 1, "c": {}}, "l": [{"x": 1}, {"x": 2}], "p": [1, 2], "n": None})
    assert flat == {"a.b": 1, "a.c": {}, "l.0.x": 1, "l.1.x": 2, "p": [1, 2], "n": None}
    assert differences({"a": 1, "b": 2, "n": None}, {"b": 3, "c": 4}) == {"a": (1, None), "b": (2, 3), "c": (None, 4)}
    environments = [{"id": "x"}, {"id": "y"}]
    for empty, other in (([], environments), ({}, {"x": 1, "y": 2})):
        found = differences(flatten({"env": empty, "envs": empty}), flatten({"env": other, "envs": None}))
        assert list(found) == ["envs", *(key for key in flatten({"env": other}))], "what is empty is said once"
    assert beside({"x": 2.0, "zero": 0.0, "only": 1.0}, {"x": 3.0, "zero": 1.0}) == {
        "x": {"a": 2.0, "b": 3.0, "ratio": 1.5},
        "zero": {"a": 0.0, "b": 1.0, "ratio": None},
        "only": {"a": 1.0, "b": None, "ratio": None},
    }


def test_columns_are_as_wide_as_a_terminal_shows_them() -> None:
    """A wide character takes two cells, a combining one none; rich's measure holds."""
    cells = ["数学-α", "e\u0301te", "🙂", "plain-name", "한국어"]
    for right in (False, True):
        lines = align([(cell, cell, "|") for cell in cells], right=right)
        assert len({cell_len(line) for line in lines}) == 1 and all(line.endswith("|") for line in lines)


def test_of_the_metrics_of_a_long_run_only_what_is_compared_is_held(tmp_path: Path) -> None:
    run = make(tmp_path / "long")
    others = {f"phase/{i}": i / 7 for i in range(100)}
    both = {"time/step": 2.0, "loss": 1.0, "reward/mean": 0.5, "lag/mean": 1.0}
    for role in ("trainer", "orchestrator"):
        write_rows(run / "metrics" / f"{role}.jsonl", [{"step": step, **both, **others} for step in range(1, 2001)])
    run_figures(tmp_path)  # what it needs is imported
    tracemalloc.start()
    figures = run_figures(run)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert figures["steps"] == 2000 and figures["loss (last step)"] == 1.0 and most < 4e6  # all values: 20 MB a file


def test_two_evaluations(tmp_path: Path) -> None:
    for name, tasks in (("one", {0: 1.0, 1: 0.0}), ("two", {0: 1.0, 1: 0.5})):
        records = [
            Record(step, "gsm8k", task, k, COMPLETED, reward / (41 - step), completion_tokens=8)
            for step in (20, 40)
            for task, reward in tasks.items()
            for k in (0, 1)
        ]
        config = StandaloneEvalConfig.model_validate({"env": [{"id": "gsm8k"}], "rollouts_per_example": 2})
        by_key = {record.key: record for record in records}
        versions = [(Version(s, tmp_path), [key for key in by_key if key.step == s]) for s in (20, 40)]
        (tmp_path / name / "results").mkdir(parents=True)
        write_summary(tmp_path / name, summarize(versions, by_key, config, {}, "owner/model"), [])
    figures = compare_runs(tmp_path / "one", tmp_path / "two")["figures"]
    assert figures["score of gsm8k (last version)"] == {"a": 0.5, "b": 0.75, "ratio": 1.5}
    assert figures["pass@1 of gsm8k"]["a"] == 0.5 and figures["completion tokens of gsm8k (mean)"]["b"] == 8.0


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    make(tmp_path / "one", rewards=[0.1, 0.2, 0.3])
    make(tmp_path / "two", "--trainer.optim.lr", "0.5", "--ckpt", rewards=[0.2, 0.4])
    lock = json.loads((tmp_path / "two" / "lock.json").read_text())
    lock["packages"]["numpy"] = "0.1"
    lock["git"] = {"sha": "f00", "status": ["M a.py"], "diff": "+x", "diff_truncated": False}
    (tmp_path / "two" / "lock.json").write_text(json.dumps(lock))

    assert cli.main(["diff", "one", "two", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["config"]["trainer.optim.lr"][1] == 0.5
    assert found["config"]["ckpt.interval"] == [None, 50]
    assert not {"name", "output_dir"} & found["config"].keys()
    assert list(found["packages"]) == ["numpy"] and found["packages"]["numpy"][1] == "0.1"
    assert found["code"]["sha"][1] == "f00" and found["code"]["same_changes"] is False
    assert found["figures"]["reward (last step)"] == {"a": 0.3, "b": 0.4, "ratio": pytest.approx(4 / 3)}
    assert found["figures"]["s/step (median)"]["a"] == 2.0
    assert found["figures"]["held-out reward of reverse-text (last)"]["b"] == 0.8
    assert found["missing"] == []

    assert cli.main(["diff", "one", "two"]) == 0
    page = capsys.readouterr().out
    assert "trainer.optim.lr" in page and "-> 0.5" in page
    assert "code: differs" in page and "1 file(s) changed" in page
    assert "packages: 1 differ" in page
    assert "  b  rl --trainer.optim.lr 0.5 --ckpt" in page


def test_a_run_with_itself_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "one")
    assert cli.main(["diff", str(run), str(run)]) == 0
    page = capsys.readouterr().out
    for what in ("config", "code", "packages", "environment", "command"):
        assert f"{what}: the same" in page
    assert "steps  0  0" in page


def test_a_second_life_counts_its_steps_once(tmp_path: Path) -> None:
    run = make(tmp_path / "one", rewards=[0.1, 0.2, 0.3])
    again = MetricsWriter(run / "metrics" / "orchestrator.jsonl")
    again.log(2, **{"reward/mean": 0.9})
    again.log(3, **{"reward/mean": 0.3})
    rows = [
        {"attempt": 1, "began": 1000.0, "ended": 1100.0, "seconds": {"useful": 60.0}},
        {"attempt": 2, "began": 1300.0, "ended": 1400.0, "seconds": {"useful": 90.0}},
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = run_figures(run)
    assert figures["steps"] == 3
    assert figures["reward (mean of last 10)"] == pytest.approx((0.1 + 0.9 + 0.3) / 3)
    assert figures["effective training time (share)"] == pytest.approx(150 / 400)
    assert (figures["attempts"], figures["hours"]) == (2, pytest.approx(400 / 3600))


def test_what_a_run_went_back_behind_does_not_count(tmp_path: Path) -> None:
    run = make(tmp_path / "one", rewards=[0.1, 0.2, 0.3, 0.9, 0.9])  # no checkpoint after step 2, and so
    orchestrator, trainer = (MetricsWriter(run / "metrics" / f"{role}.jsonl") for role in ("orchestrator", "trainer"))
    orchestrator.log(3, **{"eval/reverse-text/mean_reward": 0.4})
    orchestrator.log(3, **{"reward/mean": 0.35})
    trainer.log(3, **{"time/step": 4.0, "loss": -0.35, "tokens_per_s": 10.0})
    figures = run_figures(run)
    assert (figures["steps"], figures["reward (last step)"], figures["loss (last step)"]) == (3.0, 0.35, -0.35)
    assert figures["held-out reward of reverse-text (last)"] == 0.4


def test_environments_of_one_owner_are_two_figures(tmp_path: Path) -> None:
    run = make(tmp_path / "one", rewards=[0.1])
    rewards = {"eval/lab/one/mean_reward": 0.25, "eval/lab/two/mean_reward": 0.75}
    MetricsWriter(run / "metrics" / "orchestrator.jsonl").log(1, **rewards)
    found = {key: value for key, value in run_figures(run).items() if "lab" in key}
    assert found == {"held-out reward of lab/one (last)": 0.25, "held-out reward of lab/two (last)": 0.75}


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    one = make(tmp_path / "one", "--inference.api-key", "hunter2")
    two = make(tmp_path / "two", "--inference.api-key", "hunter3")
    found = compare_runs(one, two)
    assert "inference.api_key" in found["config"]
    assert "hunter" not in json.dumps(found)


def test_half_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "attempts.jsonl").write_text("{")
    assert cli.main(["diff", str(one), str(tmp_path / "two")]) == 0
    assert f"missing: {tmp_path / 'two' / 'run.yaml'}" in capsys.readouterr().out


def test_figures_of_a_bench_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "bench").mkdir(parents=True)
        (tmp_path / name / "run.yaml").write_text(f"name: {name}\n")
        figures = {"loss": float("nan"), "s/step": float("inf"), "steps": 3.0}
        report = {"schema": 1, "figures": figures, "phases": {}}
        (tmp_path / name / "bench" / "trainer.json").write_text(json.dumps(report))
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    words = [line.split()[-3:-1] for line in capsys.readouterr().out.splitlines() if "bench trainer" in line]
    assert words[-1] == ["3", "3"]


def test_benchmark_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"seconds": {"plan": 0.2}, "device": "cpu", "ok": true}')
    (tmp_path / "b.txt").write_text('plan   0.1 s\n{"seconds": {"plan": 0.1}, "device": "gpu", "ok": true}\n')
    assert cli.main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.txt")]) == 0
    page = capsys.readouterr().out
    assert "seconds.plan" in page and "0.500" in page and "cpu -> gpu" in page
    (tmp_path / "c.txt").write_text("no figures\n")
    assert cli.main(["diff", str(tmp_path / "a.json"), str(tmp_path / "c.txt")]) == 2
    assert cli.main(["diff", str(tmp_path / "a.json"), str(tmp_path)]) == 2
    assert cli.main(["diff", "x"]) == 2
