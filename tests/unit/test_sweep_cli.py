"""The `sweep` verb: what it is given, what it prints, what it says when that is wrong. No Slurm, nothing is run."""

import json
from pathlib import Path

import pytest

from prime_hpc.cli import main
from prime_hpc.launch.sweep.resolve import load_base, resolve_points
from prime_hpc.launch.sweep.state import Sweep, merge_points, write_text
from prime_hpc.slurm import client
from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of 3 x 2 points that was submitted, of which some have metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path / "out"))
    (tmp_path / "exp.yaml").write_text(
        f"output_dir: {tmp_path / 'out'}\norchestrator: {{env: [{{id: reverse-text}}]}}\n"
    )
    (tmp_path / "lr.yaml").write_text(
        "experiment: exp.yaml\nlast: 2\naxes: {product: {trainer.optim.lr: [1e-5, 1e-4, 1e-3], async_level: [0, 2]}}\n"
    )
    base = load_base(tmp_path / "lr.yaml", [], {})
    sweep = Sweep(base.sweep_dir)
    sweep.dir.mkdir(parents=True)
    merge_points(sweep, resolve_points(base))
    sweep.write_points()
    from prime_hpc.config.sources.files import dump_yaml

    write_text(sweep.dir / "sweep.yaml", dump_yaml(base.stored()))
    for number, row in enumerate(sweep.rows[:4]):
        metrics = sweep.run_dir(row) / "metrics"
        metrics.mkdir(parents=True)
        lines = [json.dumps({"step": step, "reward/mean": number / 10}) + "\n" for step in (1, 2, 3)]
        (metrics / "orchestrator.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("word", ["lr.yaml", "lr", "out/lr", "out/lr/sweep.yaml"])
def test_a_sweep_is_found_by_file_directory_and_name(
    folder: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "status", word, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sweep"] == str(folder / "out" / "lr")
    assert [point["state"] for point in said["points"]] == ["missing"] * 6
    assert said["points"][3]["values"] == {"trainer.optim.lr": 1e-4, "async_level": 2}


def test_results_have_a_row_a_point_and_say_what_the_value_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "results", "lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sweep lr: reward/mean: mean over the last 2 steps, highest first"
    assert lines[1].split() == ["POINT", "REWARD/MEAN", "STEP", "STATE", "VALUES"]
    assert [line.split()[:4] for line in lines[2:]] == [
        ["-", "lr0.0001-async_level2", "0.3", "3"],
        ["-", "lr0.0001-async_level0", "0.2", "3"],
        ["-", "lr1e-05-async_level2", "0.1", "3"],
        ["-", "lr1e-05-async_level0", "0", "3"],
        ["-", "lr0.001-async_level0", "-", "-"],
        ["-", "lr0.001-async_level2", "-", "-"],
        [],
        ["-:", "4", "not", "completed:"],
    ]


def test_results_rank_what_is_completed_before_what_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "lr0.0001-async_level2", "lr1e-05-async_level2", "lr1e-05-async_level0"
    for name, outcome in zip(names, ("failed", "completed", "completed"), strict=True):
        row = {"attempt": 1, "began": 1.0, "ended": 2.0, "outcome": outcome, "host": "h", "pid": 1, "cause": "test"}
        (folder / "out" / "lr" / name / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["sweep", "results", "lr"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:5] for line in lines[:4]] == [
        ["1", "lr1e-05-async_level2", "0.1", "3", "completed"],
        ["2", "lr1e-05-async_level0", "0", "3", "completed"],
        ["-", "lr0.0001-async_level2", "0.3", "3", "failed"],
        ["-", "lr0.0001-async_level0", "0.2", "3", "missing"],
    ]


def test_results_as_json_by_another_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "results", "lr", "--json", "--metric", "reward/mean"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["metric"]["goal"] == "max"
    assert [row["value"] for row in said["results"]] == pytest.approx([0.3, 0.2, 0.1, 0.0, None, None])
    assert main(["sweep", "results", "lr", "--metric", "reward/meen"]) == 2
    assert "did you mean reward/mean" in capsys.readouterr().err


def test_plot_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["sweep", "results", "lr", "--plot", str(folder / "p.svg")]) == 0
    assert (folder / "p.svg").read_text().startswith("<?xml")
    assert f"plot: {folder / 'p.svg'}" in capsys.readouterr().out


def test_table_of_many_points_is_cut(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)  # lint would refuse a model that is not on this disk
    (folder / "many.yaml").write_text("experiment: exp.yaml\nseeds: 300\n")
    assert main(["sweep", "submit", "many.yaml", "--dry-run", "--launch", "local"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "and 100 more (--all)"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "what is to be done?"),
        (["statsu", "lr"], "sweep knows no 'statsu'; did you mean status"),
        (["lr.yaml"], "did you mean sweep submit lr.yaml?"),
        (["status"], "name the sweep right after the verb"),
        (["status", "l"], "no sweep 'l'; did you mean lr"),
        (["status", "nothing-like-it"], "out holds lr"),
        (["status", "lr", "--verbose"], "unknown option --verbose"),
        (["status", "lr", "--now"], "unknown option --now; usage"),
        (["status", "lr", "more"], "too many arguments: lr more"),
        (["status", "new.yaml", "--output-dir", "there", "--name", "other"], "/there/other"),
        (["status", "gone.yaml"], "gone.yaml: no such file"),
        (["submit", "exp.yaml"], "exp.yaml is no sweep file"),
        (["submit", "out/lr", "--max-steps", "3"], "to change keys (--max-steps) submit its file"),
        (["submit", "lr.yaml", "--max-step", "3"], "did you mean --max-steps"),
        (["results", "lr", "--plot"], "--plot needs a value"),
        (["results", "lr", "--plot", "p.png", "--metric", "x"], "no point has a metric 'x'"),
        (["cancel", "lr", "--timeout", "soon"], "--timeout soon: must be a number"),
        (["resume", "new.yaml"], "was not submitted yet"),
    ],
)
def test_wrong_usage_is_told(folder: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "new.yaml").write_text("experiment: exp.yaml\nseeds: 2\n")
    assert main(["sweep", *argv]) == 2
    assert words in capsys.readouterr().err


def test_cancel_of_a_sweep_of_which_nothing_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "cancel", "lr"]) == 0
    assert "nothing to cancel" in capsys.readouterr().out


def test_help_names_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("submit|status|results|cancel|resume", "--plot", "--metric", "--dry-run"))


def test_that_there_is_no_slurm_conf_is_said_once(
    folder: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    monkeypatch.setattr(client, "cluster_name", lambda environ: None)
    fake.behave("sinfo", code=1, stderr="sinfo: fatal: Could not establish a configuration source")
    main(["sweep", "submit", "lr.yaml", "--dry-run", "--launch", "auto"])
    assert capsys.readouterr().err.count("no slurm.conf is in force") == 1
