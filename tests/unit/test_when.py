"""`plan --when` and `submit --best`: every shape is asked about, ranked, and the first is submitted.

sbatch is a stand-in that names the times it is told to; the real one is in tests/slurm.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc.cli.verbs.experiment import lint as lint_verb
from prime_hpc.cli.verbs.experiment import plan as plan_verb
from prime_hpc.cli.verbs.experiment import submit as submit_verb
from prime_hpc.config import ConfigError, load_run
from prime_hpc.launch.plan import when
from prime_hpc.launch.plan.when import ask_when, best_shape
from prime_hpc.launch.resume import load_to_resume
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.store.run_dirs import read_record
from prime_hpc.store.run_paths import RunPaths
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import load, run_dir, use_fake_slurm, write_config

NARROW = {"name": "narrow", "overrides": {"slurm.time": "4:00:00"}}
WIDE = {"name": "wide", "overrides": {"slurm.trainer.nodes": 2, "trainer.num_ranks": 2, "slurm.time": "2:00:00"}}
FAR = {"name": "far", "overrides": {"slurm.partition": "other"}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return use_fake_slurm(tmp_path, monkeypatch)


def config_with(tmp_path: Path, *shapes: dict[str, Any], **keys: Any) -> Path:
    path = write_config(tmp_path)
    tree = json.loads(path.read_text()) | keys
    tree["slurm"]["shapes"] = list(shapes)
    path.write_text(yaml.safe_dump(tree))
    return path


def asked(config: Path, **options: Any) -> when.Ranking:
    return ask_when([str(config)], load(config), **options)


def test_the_shape_that_starts_first_is_first(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, WIDE, NARROW, FAR)
    fake.expect("--nodes=2", after=7200, nodes="n[1-2]")
    fake.expect("--partition=other", after=600)
    assert plan_verb.run([str(config), "--when", "--json"], "plan") == 0
    said = json.loads(capsys.readouterr().out)
    assert [shape["name"] for shape in said["shapes"]] == ["narrow", "far", "wide"]
    assert (said["by"], said["best"]) == ("start", "narrow")
    first, _, last = said["shapes"]
    assert (first["word"], first["nodes"], first["partition"], first["time"]) == ("starts", 1, "gpu", "4:00:00")
    assert (last["nodes"], last["nodes_expected"], last["is_earliest"]) == (2, "n[1-2]", False)
    assert 7000 < last["start"] - said["asked"] < 7300
    assert plan_verb.run([str(config), "--when"], "plan") == 0
    table = capsys.readouterr().out
    lines = table.splitlines()
    assert lines[1].startswith("1  narrow  packed") and "(now)" in lines[1]
    assert "(in 02:00:0" in lines[3] or "(in 01:59:" in lines[3]
    assert "ranked by start; `sbatch --test-only` says when" in table
    assert fake.jobs() == [], "nothing is submitted"
    assert not run_dir(config).exists()


def test_without_shapes_the_experiment_itself_is_asked_about(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert plan_verb.run([str(config), "--when"], "plan") == 0
    assert "1  as stated" in capsys.readouterr().out


def test_shapes_with_known_steps_are_ranked_by_the_last_step(fake: FakeSlurm, tmp_path: Path) -> None:
    config = config_with(tmp_path, {**NARROW, "step_s": 100}, {**WIDE, "step_s": 10}, max_steps=50)
    fake.expect("--nodes=2", after=1800)
    ranking = asked(config)
    assert (ranking.by, [row.name for row in ranking.rows]) == ("result", ["wide", "narrow"])
    wide, narrow = ranking.rows
    assert (wide.run_s, narrow.run_s) == (300 + 500, 300 + 5000), "startup_s of the site profile comes on top"
    assert "50 steps of 10 s (as slurm.shapes states)" in wide.run_from
    assert "time limit" not in wide.run_from
    assert "ranked by the time of the last step" in ranking.text()


def test_one_shape_without_a_known_step_leaves_the_start_to_decide(fake: FakeSlurm, tmp_path: Path) -> None:
    config = config_with(tmp_path, {**WIDE, "step_s": 1}, NARROW)
    fake.expect("--nodes=2", after=60)
    ranking = asked(config)
    assert (ranking.by, [row.name for row in ranking.rows]) == ("start", ["narrow", "wide"])
    assert "how long a step takes is not known of narrow" in ranking.text()


def test_a_time_limit_before_the_last_step_is_said(fake: FakeSlurm, tmp_path: Path) -> None:
    config = config_with(tmp_path, {**WIDE, "step_s": 100}, max_steps=200)
    (row,) = asked(config).rows
    assert "its time limit of 2:00:00 ends before: it waits in the queue 2 more times" in row.run_from


def test_each_attempt_makes_steps_until_slurm_warns_it(fake: FakeSlurm, tmp_path: Path) -> None:
    made = asked(config_with(tmp_path, {**WIDE, "step_s": 1})).rows[0].made
    assert made is not None
    first = 7200 - made.experiment.slurm.restart.signal_lead_s
    later = first - made.site.startup_s
    said = [when._returns(made, run_s) for run_s in (first, first + 1, first + later, first + later + 1)]
    assert said[0] == ""
    assert [int(text.split("queue ")[1].split()[0]) for text in said[1:]] == [1, 1, 2]


def test_an_earlier_measurement_counts_for_the_shape_that_it_was_made_in(fake: FakeSlurm, tmp_path: Path) -> None:
    config = config_with(tmp_path, WIDE, NARROW, max_steps=100)
    submit_verb.run([str(config), "--slurm.shape", "wide"], "submit")
    fake.change(fake.jobs()[0]["id"], state="COMPLETED")
    metrics = run_dir(config) / "metrics"
    metrics.mkdir()
    rows = [{"step": step, "time/step": 2.0 + step % 2} for step in range(1, 11)]
    (metrics / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {row.name: row for row in asked(config).rows}
    assert found["wide"].run_s == 300 + 100 * 2.5 and "measured in this run directory" in found["wide"].run_from
    assert found["narrow"].run_s is None


@pytest.mark.parametrize(
    ("asked", "left"), [([], 100), (["latest"], 95), (["5"], 95), (["2"], 98), (["ELSEWHERE"], 97), (["4"], 96)]
)
def test_steps_that_a_run_need_not_make_again_count_for_no_shape(
    fake: FakeSlurm, tmp_path: Path, asked: list[str], left: int
) -> None:
    """Ten steps were trained; the run goes back to its checkpoint of step 5, whatever shape measured a step."""
    config = config_with(tmp_path, {**WIDE, "step_s": 10}, NARROW, FAR, max_steps=100)
    submit_verb.run([str(config), "--slurm.shape", "narrow"], "submit")
    fake.change(fake.jobs()[0]["id"], state="COMPLETED")
    for step in (2, 4, 5):
        make_checkpoint(RunPaths(run_dir(config)), step, kind="sft")
    make_checkpoint(RunPaths(tmp_path / "other"), 3, kind="sft")
    (run_dir(config) / "metrics").mkdir()
    rows = "".join(json.dumps({"step": step, "time/step": 2.0}) + "\n" for step in range(1, 11))
    (run_dir(config) / "metrics" / "trainer.jsonl").write_text(rows)
    words = [word.replace("ELSEWHERE", str(tmp_path / "other" / "checkpoints")) for word in asked]
    argv = [str(config), *(f"--ckpt.resume-step={word}" for word in words)]
    ranking = ask_when(argv, load(config, *argv[1:]), step_of=lambda one: (4.0, "simulated"))
    expected = {"wide": 300 + left * 10, "narrow": 300 + left * 2, "far": 300 + left * 4}
    assert {row.name: row.run_s for row in ranking.rows} == expected


def test_each_shape_has_its_own_word(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = {"slurm.trainer.nodes": 2, "trainer.num_ranks": 2, "slurm.constraint": "x"}
    config = config_with(
        tmp_path,
        {"name": "bad", "overrides": {"slurm.trainer.nodes": 64, "trainer.num_ranks": 64}},
        {"name": "late", "overrides": {"slurm.partition": "silent"}},
        {"name": "riddle", "overrides": {"slurm.partition": "riddles"}},
        {"name": "lint", "overrides": {"slurm.time": "0"}},
        {"name": "nowhere", "overrides": {"slurm.nodelist": "n1", "slurm.trainer.nodes": 2, "trainer.num_ranks": 3}},
        {"name": "twice", "overrides": twice},
        NARROW,
    )
    fake.expect("--nodes=64", code=1, say="allocation failure: Requested node configuration is not available")
    fake.expect("--partition=silent", code=1, say="sbatch: error: Unable to contact slurm controller")
    fake.expect("--partition=riddles", say="sbatch: Granted in spirit")
    fake.expect("--constraint=x", nodes="n1", after=60)
    assert plan_verb.run([str(config), "--when", "--json"], "plan") == 0
    said = json.loads(capsys.readouterr().out)
    found = {shape["name"]: shape for shape in said["shapes"]}
    words = {name: shape["word"] for name, shape in found.items()}
    assert words == {
        "narrow": "starts",
        "twice": "starts",
        "bad": "refused",
        "late": "no answer",
        "riddle": "unclear",
        "lint": "refused",
        "nowhere": "refused",
    }
    assert said["best"] == "narrow"
    assert "Requested node configuration is not available" in found["bad"]["why"]
    assert "Unable to contact" in found["late"]["why"] and "Granted in spirit" in found["riddle"]["why"]
    assert "PH305" in found["lint"]["why"]
    assert "trainer.num_ranks" in found["nowhere"]["why"]
    assert found["twice"]["is_earliest"], "two nodes are asked for, one was named"


def test_a_slurm_that_is_away_is_said_for_every_shape(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, WIDE, NARROW)
    fake.behave("sbatch", code=1, stderr="sbatch: error: Unable to contact slurm controller (connect failure)")
    assert plan_verb.run([str(config), "--when"], "plan") == 3
    said = capsys.readouterr().out
    assert said.count("no answer: `sbatch --test-only` failed") == 2
    with pytest.raises(SlurmRefused, match=r"for no shape, nothing was submitted.*--slurm.shape NAME"):
        best_shape([str(config)], load(config))
    fake.behave("sbatch")
    fake.remove("sbatch")
    assert plan_verb.run([str(config), "--when"], "plan") == 3


def test_more_shapes_than_a_silent_slurm_has_time_for(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(when, "AT_ONCE", 1)
    config = config_with(tmp_path, *({"name": f"s{i}", "overrides": {"slurm.time": str(30 + i)}} for i in range(5)))
    fake.expect("", hang=True)
    rows = asked(config, timeout_s=0.5).rows
    assert {row.answer.word for row in rows} == {"no answer"}
    assert any("no answer within" in row.answer.why for row in rows)
    assert sum(row.answer.why.startswith("not asked") for row in rows) >= 2


def test_best_is_submitted_recorded_and_kept(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, NARROW, WIDE)
    fake.expect("--nodes=1", after=3600)
    assert submit_verb.run([str(config), "--best"], "submit") == 0
    out = capsys.readouterr().out
    assert "shape wide: the first of 2 by start, expected to start at" in out and "narrow" in out
    assert "(packed, 2 nodes, shape wide)" in out
    (job,) = fake.jobs()
    assert "#SBATCH --nodes=2" in job["text"] and "--slurm.shape wide" in job["text"]
    kept = load_run(run_dir(config))
    assert (kept.slurm.shape, kept.slurm.shapes, kept.trainer.num_ranks) == ("wide", [], 2)
    record = read_record(run_dir(config))
    assert record is not None and record["shape"] == "wide"
    ranking = json.loads((run_dir(config) / "shapes.json").read_text())
    assert ranking["best"] == "wide" and [shape["name"] for shape in ranking["shapes"]] == ["wide", "narrow"]

    (run_dir(config) / "checkpoints").mkdir()  # the run goes on in its shape, whatever starts first now
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        load_to_resume(run_dir(config), [])
    with pytest.raises(ConfigError, match="a run keeps the shape that it was started with"):
        load_to_resume(run_dir(config), ["--slurm.shape", "narrow"])


def test_best_of_a_dry_run_and_as_json(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, NARROW, WIDE)
    fake.expect("--nodes=1", after=3600)
    assert submit_verb.run([str(config), "--best", "--dry-run"], "submit") == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert fake.jobs() == [] and not run_dir(config).exists()
    assert submit_verb.run([str(config), "--best", "--json"], "submit") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["shape"] == "wide" and "shape wide: the first" in said.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--launch", "local"], "--best asks a queue"),
        (["--slurm.shape", "wide"], "slurm.shape = wide is chosen already"),
        (["--slurm.shapes", "[]"], "slurm.shapes states none"),
    ],
)
def test_best_of_nothing_is_refused(fake: FakeSlurm, tmp_path: Path, flags: list[str], words: str) -> None:
    config = config_with(tmp_path, NARROW, WIDE)
    with pytest.raises(ConfigError, match=words):
        submit_verb.run([str(config), "--best", *flags], "submit")
    assert fake.jobs() == []


def test_lint_looks_at_every_shape(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, NARROW, {"name": "never", "overrides": {"slurm.time": "0"}})
    assert lint_verb.run([str(config)], "lint") == 2
    said = capsys.readouterr().out
    assert "shape 'never'" in said and "PH305" in said and "shape 'narrow'" not in said


def test_flags_that_belong_to_when(fake: FakeSlurm, tmp_path: Path) -> None:
    config = config_with(tmp_path, NARROW)
    with pytest.raises(ConfigError, match="--timeout belongs to --when"):
        plan_verb.run([str(config), "--timeout", "5"], "plan")
    with pytest.raises(ConfigError, match="two questions"):
        plan_verb.run([str(config), "--when", "--rehearse"], "plan")
    with pytest.raises(ConfigError, match="--when asks a queue"):
        plan_verb.run([str(config), "--when", "--launch", "local"], "plan")
