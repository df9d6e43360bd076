"""`slurm.shapes`: each checked like a whole experiment, at most one in force, and a run keeps its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Loaded, load_experiment, load_run, write_snapshot

SHAPES = """
  shapes:
    - {name: small, overrides: {trainer.num_ranks: 1, slurm.time: "8:00:00"}}
    - name: wide
      overrides: {trainer: {num_ranks: 4}, slurm: {trainer: {nodes: 2}, time: "2:00:00"}}
      step_s: 3.5
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path, SHAPES)


def write(folder: Path, shapes: str) -> Path:
    path = folder / "exp.yaml"
    path.write_text(
        f"kind: sft\nname: r\noutput_dir: {folder}\nsft: {{data: {{type: fake}}}}\n"
        f"slurm:\n  partition: gpu\n  time: '1:00:00'{shapes}"
    )
    return path


def load(config: Path, *flags: str) -> Loaded:
    return load_experiment([str(config), *flags], "submit", {})


def facts(loaded: Loaded) -> tuple[Any, ...]:
    experiment = loaded.experiment
    return experiment.trainer.num_ranks, experiment.slurm.time, experiment.slurm.trainer.nodes, experiment.slurm.shape


def refused(config: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, *flags)
    return str(caught.value)


def test_none_is_in_force_until_one_is_named(config: Path) -> None:
    loaded = load(config)
    assert facts(loaded) == (1, "1:00:00", None, None)
    assert not isinstance(loaded.experiment.slurm.shapes, str)
    assert [(shape.name, shape.step_s) for shape in loaded.experiment.slurm.shapes] == [("small", None), ("wide", 3.5)]
    assert facts(load(config, "--slurm.shape", "wide")) == (4, "2:00:00", 2, "wide")
    assert facts(load(config, "--slurm.shape", "small")) == (1, "8:00:00", None, "small")


def test_the_command_line_wins_over_the_shape_and_the_shape_over_the_file(config: Path) -> None:
    loaded = load(config, "--slurm.shape", "wide", "--slurm.time", "0:30:00")
    assert facts(loaded) == (4, "0:30:00", 2, "wide")
    assert loaded.provenance["trainer.num_ranks"].line == 11, "where the shape states it"


def test_a_run_keeps_the_shape_that_it_began_with(config: Path, tmp_path: Path) -> None:
    begun = load(config, "--slurm.shape", "wide", "--slurm.time", "0:30:00").experiment
    assert begun.slurm.shapes == []
    write_snapshot(begun, tmp_path / "r", ["submit"])
    assert load_run(tmp_path / "r") == begun
    again = load(tmp_path / "r" / "run.yaml")
    assert facts(again) == (4, "0:30:00", 2, "wide"), "what the command line said then holds as well"
    assert "a run keeps the shape that it was started with" in refused(
        tmp_path / "r" / "run.yaml", "--slurm.shape", "small"
    )


def test_shapes_survive_the_files_of_the_roles(config: Path, tmp_path: Path) -> None:
    experiment = load(config).experiment
    write_snapshot(experiment, tmp_path / "r", ["submit"])
    assert load_run(tmp_path / "r") == experiment
    roles = load_experiment(["@", str(tmp_path / "r" / "configs" / "sft.toml")], "sft", {}).experiment
    assert roles.slurm.shapes == experiment.slurm.shapes


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("[{name: a, overrides: {slurm.tmie: 5}}]", "shape 'a': unknown key; did you mean slurm.time?"),
        ("[{name: a, overrides: {trainer.num_ranks: -1}}]", "shape 'a': "),
        ("[{name: a, overrides: {trainer.num_ranks: many}}]", "shape 'a': expected an integer"),
        ("[{name: a, nodes: 2}]", "slurm.shapes.0.nodes: unknown key"),
        ("[{overrides: {}}]", "slurm.shapes.0.name: must be stated"),
        ("[{name: a b}]", "slurm.shapes.0.name"),
        ("[{name: a}, {name: a, overrides: {seed: 2}}]", "two shapes are named 'a'"),
        ("[{name: a, overrides: {seed: 2}}, {name: b, overrides: {seed: 2}}]", "shapes 'a' and 'b' are the same"),
        ("[{name: a, overrides: {slurm.partition: gpu}}, {name: b}]", "shapes 'a' and 'b' are the same"),
        ("[{name: a, overrides: {name: other}}]", "shape 'a': is the run's, whatever its shape"),
        ("[{name: a, overrides: {slurm: {shape: a}}}]", "shape 'a': is the run's, whatever its shape"),
        ("[{name: a, overrides: {slurm.env: {HF_TOKEN: x1}}}]", "slurm.env"),
        ("[{name: a, overrides: '${trainer}'}]", "shape 'a': its keys are stated"),
        ("[{name: a, step_s: 0}]", "slurm.shapes.0.step_s"),
        ("5", "slurm.shapes"),
    ],
)
def test_what_is_wrong_with_a_shape_is_said_by_its_name(tmp_path: Path, shapes: str, words: str) -> None:
    config = write(tmp_path, f"\n  shapes: {shapes}\n")
    said = refused(config)
    assert words in said, said
    assert "exp.yaml:" in said and "HF_TOKEN: x1" not in said


def test_a_secret_is_no_shapes(tmp_path: Path) -> None:
    config = write(tmp_path, "\n  shapes: [{name: a, overrides: {slurm: {env: {HF_TOKEN: x1}}}}]\n")
    assert "a secret cannot be a shape's" in refused(config)


def test_unknown_shapes_are_answered_with_those_that_there_are(config: Path, tmp_path: Path) -> None:
    assert "no shape 'widd'; did you mean wide? there are small, wide" in refused(config, "--slurm.shape", "widd")
    plain = write(tmp_path, "\n")
    assert "no shape 'wide': slurm.shapes states none here" in refused(plain, "--slurm.shape", "wide")


def test_a_flag_that_makes_two_shapes_one_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path, "\n  shapes: [{name: a, overrides: {slurm.time: 5}}, {name: b}]\n")
    load(config)
    assert "shapes 'a' and 'b' are the same experiment" in refused(config, "--slurm.time", "60")


def test_shapes_on_the_command_line(tmp_path: Path) -> None:
    config = write(tmp_path, "\n")
    shapes = json.dumps([{"name": "a", "overrides": {"trainer.num_ranks": 2}}])
    assert facts(load(config, "--slurm.shapes", shapes, "--slurm.shape", "a"))[0] == 2
