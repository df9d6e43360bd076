"""`plan --when` and `submit --best` by simulated steps, and `slurm.shapes: auto`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc.cli.verbs.experiment import lint as lint_verb
from prime_hpc.cli.verbs.experiment import plan as plan_verb
from prime_hpc.cli.verbs.experiment import submit as submit_verb
from prime_hpc.config import ConfigError, Loaded, load_experiment, load_run
from prime_hpc.simulate.auto_shapes import derive_shapes
from prime_hpc.simulate.step_times import StepTimes, find_predictor
from tests.support.fake_slurm import FakeSlurm
from tests.support.measured_runs import make_measured, tree_of
from tests.support.submissions import use_fake_slurm

BALANCED = {"name": "balanced", "overrides": {"trainer.num_ranks": 2, "inference.data_parallel_size": 2}}
STARVED = {"name": "starved", "overrides": {"trainer.num_ranks": 3, "inference.data_parallel_size": 1}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return use_fake_slurm(tmp_path, monkeypatch)


def write(tmp_path: Path, shapes: Any, partition: dict[str, Any] | None = None, **changes: Any) -> Path:
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    site: dict[str, Any] = {"scratch": str(tmp_path), "startup_s": 60}
    site["partitions"] = {"gpu": {"nodes": 2, "gpus_per_node": 4, **(partition or {})}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    tree = tree_of("r", tmp_path / "out", **{"launch": "slurm", **changes})
    tree["slurm"] = {"site": str(tmp_path / "site.yaml"), "time": "4:00:00", "partition": "gpu", "shapes": shapes}
    tree["slurm"] |= {"gpus_per_node": 4, "exclusive": True}
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def load(config: Path, *words: str) -> Loaded:
    return load_experiment([str(config), *words], "submit")


def ranked(config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert plan_verb.run([str(config), "--when", "--json", *words], "plan") == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_steps_that_nobody_measured_are_simulated_from_the_newest_run_like_it(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, [STARVED, BALANCED])
    assert ranked(config, capsys)["by"] == "start", "nothing was measured anywhere"
    make_measured(tmp_path / "out" / "old")
    make_measured(tmp_path / "out" / "another", model__name=str(tmp_path / "out" / "other-model"))
    said = ranked(config, capsys)
    assert (said["by"], [row["name"] for row in said["shapes"]]) == ("result", ["balanced", "starved"])
    best, worse = said["shapes"]
    assert 60 < best["run_s"] < worse["run_s"], "one engine gives half as many tokens"
    assert "simulated from old, own error " in best["run_from"] and "%" in best["run_from"]
    assert "another" not in json.dumps(said), "a run of another model says nothing"
    assert plan_verb.run([str(config), "--when"], "plan") == 0
    assert "ranked by the time of the last step" in capsys.readouterr().out


def test_a_step_that_is_stated_is_not_simulated(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, [{**STARVED, "step_s": 0.5}, BALANCED])
    make_measured(tmp_path / "out" / "old")
    found = {row["name"]: row for row in ranked(config, capsys)["shapes"]}
    assert found["starved"]["run_s"] == 60 + 40 * 0.5 and "as slurm.shapes states" in found["starved"]["run_from"]
    assert "simulated from old" in found["balanced"]["run_from"]
    every = write(tmp_path, [{**STARVED, "step_s": 0.5}, {**BALANCED, "step_s": 0.25}])
    said = ranked(every, capsys)
    assert (said["best"], said["notes"]) == ("balanced", []), "nothing is simulated"


def test_a_run_can_be_named_and_what_it_differs_in_is_said(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, [STARVED, BALANCED])
    far = make_measured(tmp_path / "elsewhere" / "far", seq_len=512)
    said = ranked(config, capsys, "--from", str(far))
    assert all("simulated from far" in row["run_from"] for row in said["shapes"])
    assert any(note.startswith("far was measured with") and "seq_len 512" in note for note in said["notes"])
    torn = make_measured(tmp_path / "elsewhere" / "torn", steps=[])
    with pytest.raises(ConfigError, match="--from .*not measured there: .*the trainer's tokens/s"):
        plan_verb.run([str(config), "--when", "--from", str(torn)], "plan")
    with pytest.raises(ConfigError, match="--from belongs to --when"):
        plan_verb.run([str(config), "--from", str(far)], "plan")
    with pytest.raises(ConfigError, match="--from belongs to --best"):
        submit_verb.run([str(config), "--from", str(far)], "submit")


def test_why_nothing_is_simulated_is_said(fake: FakeSlurm, tmp_path: Path) -> None:
    experiment = load(write(tmp_path, [])).experiment
    assert "no run of this model and these environments was measured below" in str(find_predictor(experiment, []))
    make_measured(tmp_path / "out" / "empty", steps=[])
    assert isinstance(find_predictor(experiment, []), str)
    make_measured(tmp_path / "out" / "whole")
    found = find_predictor(experiment, [])
    assert isinstance(found, StepTimes) and found.source == "whole" and found.error is not None and found.error < 0.5


def test_best_takes_the_shape_that_is_done_first(fake: FakeSlurm, tmp_path: Path) -> None:
    config = write(tmp_path, [STARVED, BALANCED], device="cpu")
    make_measured(tmp_path / "out" / "old")
    assert submit_verb.run([str(config), "--best", "--no-follow"], "submit") == 0
    run_dir = tmp_path / "out" / "r"
    assert load_run(run_dir).slurm.shape == "balanced"
    kept = json.loads((run_dir / "shapes.json").read_text())
    assert kept["by"] == "result" and "simulated from old" in kept["shapes"][0]["run_from"]


# --- auto -------------------------------------------------------------------------------------------------------


def names(config: Path) -> list[str]:
    shapes = derive_shapes([str(config)], load(config)).loaded.experiment.slurm.shapes
    return [shape.name for shape in shapes if not isinstance(shape, str)]


def test_auto_derives_splits_and_sizes_that_fit(fake: FakeSlurm, tmp_path: Path) -> None:
    config = write(tmp_path, "auto")
    assert names(config) == ["t2-i2", "t1-i1", "t4-i4", "t1-i3", "t3-i1"]
    derived = derive_shapes([str(config)], load(config))
    wide = load_experiment([*derived.words, "--slurm.shape", "t4-i4"], "submit").experiment
    assert wide.inference is not None
    assert (wide.trainer.num_ranks, wide.inference.num_gpus, wide.slurm.shapes) == (4, 4, [])


def test_what_cannot_be_is_left_out_with_the_reason(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, "auto", {"nodes": 1})
    assert "t4-i4" not in names(config), "the partition has one node of four GPUs"
    said = ranked(config, capsys)
    assert any(note.startswith("left out: t4-i4: ") and "PH" in note for note in said["notes"])
    assert {row["name"] for row in said["shapes"]} == {"t2-i2", "t1-i1", "t1-i3", "t3-i1"}


def test_a_gpu_s_memory_counts(fake: FakeSlurm, tmp_path: Path) -> None:
    big: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    big |= {"num_key_value_heads": 8, "vocab_size": 128_000, "intermediate_size": 14_336}
    big |= {"architectures": ["LlamaForCausalLM"]}
    config = write(tmp_path, "auto", {"gpu_memory_gib": 80.0})
    (tmp_path / "out" / "model" / "config.json").write_text(json.dumps(big | {"model_type": "llama"}))
    derived = derive_shapes([str(config)], load(config))
    assert "t1-i1" not in names(config) and any("GiB" in why and "t1-i1" in why for why in derived.left_out)


def test_best_of_auto_keeps_its_shape_in_the_run(fake: FakeSlurm, tmp_path: Path) -> None:
    config = write(tmp_path, "auto", device="cpu")
    make_measured(tmp_path / "out" / "old")
    assert submit_verb.run([str(config), "--best", "--no-follow"], "submit") == 0
    run_dir = tmp_path / "out" / "r"
    kept = json.loads((run_dir / "shapes.json").read_text())
    assert kept["by"] == "result" and kept["best"] == kept["shapes"][0]["name"]
    run = load_run(run_dir)
    assert run.slurm.shape == kept["best"] and run.slurm.shapes == [] and run.inference is not None
    assert kept["best"] == f"t{run.trainer.num_ranks}-i{run.inference.num_gpus}"


def test_auto_for_a_run_without_shapes_is_refused_when_it_is_asked(fake: FakeSlurm, tmp_path: Path) -> None:
    config = write(tmp_path, "auto", kind="sft", sft={"data": {"type": "fake"}})
    with pytest.raises(ConfigError, match="auto derives no shapes here: .*only kind: rl"):
        derive_shapes([str(config)], load(config))
    assert load(config).experiment.slurm.shapes == "auto"
    chosen = write(tmp_path, "auto")
    tree = yaml.safe_load(chosen.read_text())
    tree["slurm"]["shape"] = "t2-i2"
    chosen.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="it is t2-i2, and slurm.shapes = auto derives others"):
        derive_shapes([str(chosen)], load(chosen))
    with pytest.raises(ConfigError, match=r"slurm\.shapes: expected .*auto"):
        load(write(tmp_path, "automatic"))


def test_lint_and_a_plain_submit_take_it_as_it_stands(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, "auto", device="cpu")
    assert lint_verb.run([str(config)], "lint") == 0
    assert submit_verb.run([str(config), "--no-follow"], "submit") == 0
    assert load_run(tmp_path / "out" / "r").trainer.num_ranks == 2
