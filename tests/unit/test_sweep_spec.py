"""Sweep files: what is accepted, what is refused and how it is said, points and their names."""

from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sources.files import dump_yaml
from prime_hpc.launch.sweep.naming import default_pattern, point_name, value_text
from prime_hpc.launch.sweep.resolve import Base, Point, load_base, load_stored, resolve_points
from prime_hpc.launch.sweep.spec import is_sweep_file, read_spec

EXPERIMENT = """
name: base
output_dir: {out}
max_steps: 4
model: {{name: owner/model}}
orchestrator: {{batch_size: 16, rollouts_per_example: 4, env: [{{id: reverse-text}}]}}
"""
AXES = "axes: {product: {trainer.optim.lr: [1e-5, 3e-5, 1e-4], orchestrator.rollouts_per_example: [4, 8]}}\n"


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "exp.yaml").write_text(EXPERIMENT.format(out=tmp_path / "out"))

    def write(text: str, name: str = "sweep.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text if name.endswith("toml") else f"experiment: exp.yaml\n{text}")
        return path

    return write


def points(path: Path, *argv: str) -> list[Point]:
    return resolve_points(load_base(path, list(argv), {}))


def experiments(path: Path, *argv: str) -> list:
    return [point.loaded.experiment for point in points(path, *argv) if point.loaded]


def experiment_of(point: Point) -> Experiment:
    assert point.loaded is not None, point.reason
    return point.loaded.experiment


def test_product_is_every_combination_and_the_last_axis_is_fastest(write) -> None:
    found = experiments(write(AXES + "overrides: {max_steps: 7, ckpt.interval: 3, model: {dtype: float32}}"))
    assert [(e.trainer.optim.lr, e.orchestrator.rollouts_per_example) for e in found] == [
        (lr, group) for lr in (1e-5, 3e-5, 1e-4) for group in (4, 8)
    ]
    assert {(e.max_steps, e.ckpt.interval, e.model.dtype, e.model.name) for e in found} == {
        (7, 3, "float32", "owner/model")
    }


def test_zip_list_and_seeds_multiply(write) -> None:
    path = write(
        "axes:\n"
        "  product: {trainer: {optim: {lr: [1, 2]}}}\n"
        "  zip: {seq-len: [600, 700], trainer.micro_batch_tokens: [1200, 1400]}\n"
        "  list: [{async_level: 0}, {async_level: 2, model: {dtype: float32}}]\n"
        "seeds: 3\n"
    )
    found = experiments(path)
    assert len(found) == 2 * 2 * 2 * 3
    assert {(e.seq_len, e.trainer.micro_batch_tokens) for e in found} == {(600, 1200), (700, 1400)}
    assert {(e.async_level, e.model.dtype) for e in found} == {(0, "bfloat16"), (2, "float32")}
    assert [e.seed for e in found[:4]] == [0, 1, 2, 0]
    assert len({e.name for e in found}) == 24


def test_toml_is_read_too(write) -> None:
    text = 'experiment = "exp.yaml"\nseeds = [3, 5]\n[axes.product]\n"trainer.optim.lr" = [1e-3, 2e-3]\n'
    found = experiments(write(text, "s.toml"))
    assert [(e.trainer.optim.lr, e.seed) for e in found] == [(1e-3, 3), (1e-3, 5), (2e-3, 3), (2e-3, 5)]


def test_a_sweep_builds_on_another(write) -> None:
    write(AXES + "throttle: 2\n", "lr.yaml")
    spec = read_spec(write("base: lr.yaml\nseeds: 2\n", "lr_seeds.yaml"))
    assert (spec.num_points, spec.file.throttle, spec.file.name) == (12, 2, "lr_seeds")


def test_values_are_taken_in_any_spelling_the_config_accepts(write) -> None:
    path = write(
        "axes: {list: [{inference: true}, {inference: {data_parallel_size: '2'}}, {trainer.optim.lr: '1e-4'}]}\n"
        "point_name: '{index}'\n"
    )
    first, second, third = experiments(path)
    assert first.inference.data_parallel_size == 1
    assert second.inference.data_parallel_size == 2
    assert (third.inference, third.trainer.optim.lr) == (None, 1e-4)


def test_order_of_sources(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(AXES + "overrides: {max_steps: 5, async_level: 0}\nname: one\n")
    base = load_base(path, ["--max-steps", "9", "--name", "two"], {"PRIME_SEED": "11", "PRIME_MAX_STEPS": "1"})
    experiment = experiment_of(resolve_points(base)[0])
    assert (experiment.max_steps, experiment.async_level, experiment.seed) == (9, 0, 11)
    assert base.sweep_dir == tmp_path / "out" / "two"
    assert experiment.run_dir == tmp_path / "out" / "two" / "lr1e-05-rollouts_per_example4"
    named = write(AXES + "output_dir: ${oc.env:SWEEPS}/of-${seed}\n", "named.yaml")
    monkeypatch.setenv("SWEEPS", str(tmp_path / "by variable"))
    assert load_base(named, [], {}).sweep_dir == tmp_path / "by variable" / "of-0" / "named"
    elsewhere = load_base(write(AXES + f"output_dir: {tmp_path}/else\n", "three.yaml"), [], {})
    assert elsewhere.sweep_dir == tmp_path / "else" / "three"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("axes: {product: {trainer.optm.lr: [1]}}", r"sweep.yaml:2: axes.product: trainer.optm.lr: .*trainer.optim.lr"),
        ("axes: {zip: {seqlen: [1]}}", r"axes.zip: seqlen: unknown key; did you mean seq_len"),
        ("axes: {list: [{lr: 1}]}", r"axes.list: lr: unknown key; did you mean trainer.optim.lr"),
        ("axes: {product: {trainer_gpus: [1, 2]}}", r"is a flag's name; the key is trainer.num_ranks"),
        ("axes: {products: {seed: [1]}}", r"sweep.yaml:2: axes.products: unknown key; did you mean axes.product"),
        ("axes: {trainer.optim.lr: [1]}", r"axes.trainer.optim.lr: unknown key; did you mean axes.product: {trainer"),
        ("axis: {product: {seed: [1]}}", r"sweep.yaml:2: axis: unknown key; did you mean axes"),
        ("axes: {product: {seq_len: []}}", r"axes.product.seq_len: 0 points"),
        ("axes: {list: []}", r"axes.list: 0 points"),
        ("axes: {list: {seed: [1]}}", r"sweep.yaml:2: axes.list: must be a list of points, each a mapping of keys"),
        ("axes: {list: [{seed: 1}, seed]}", r"sweep.yaml:2: axes.list.1: must be a list of points, each a mapping"),
        ("axes: {product: [{seed: [1]}]}", r"axes.product: must be a mapping of keys to the lists of their values"),
        ("axes: {product: {seq_len: [600, 600]}}", r"points 'seq_len600' and 'seq_len600' are the same experiment"),
        ("seeds: []", r"seeds: 0 points"),
        ("seeds: 0", r"seeds: 0 points"),
        ("axes:\n  product:\n", "0 points: neither `axes` nor `seeds`"),
        ("throttle: 2", "0 points: neither `axes` nor `seeds`"),
        ("axes: {product: {seq_len: 600}}", r"axes.product.seq_len: expected the list of its values, got 600"),
        ("axes: {zip: {seq_len: [1, 2], seed: [1]}}", r"as many values each; seq_len has 2, seed has 1"),
        ("axes: {product: {seed: [1]}}\nseeds: 2", r"seeds: seed: seed is varied by two axes"),
        ("axes: {product: {seq_len: [1], seq-len: [2]}}", r"seq_len is varied by two axes"),
        ("axes: {product: {seq_len: [600]}}\noverrides: {seq_len: 700}", "is an axis of the sweep: it cannot be an ov"),
        ("axes: {product: {name: [a, b]}}", r"axes.product: name: cannot vary"),
        ("seeds: 2\nthrottle: 0", r"sweep.yaml:3: throttle: must be greater than or equal to 1"),
        ("seeds: 2\nname: a/b", r"sweep.yaml:3: name: "),
        ("seeds: 2\npoint_name: 'x{sead}'", r"point_name: \{sead\} is no axis.*did you mean \{seed\}"),
        ("seeds: [1, 2]\npoint_name: x", r"two points would be named 'x'"),
        ("seeds: [1, 1]\npoint_name: '{index}'", r"points '0' and '1' are the same experiment"),
        ("seeds: 2\noverrides: {max_step: 3}", r"sweep.yaml:3: max_step: unknown key; did you mean max_steps"),
        ("axes: {product: {seed: [%s], seq_len: [%s]}}" % (("1," * 400,) * 2), r"160,000 points; at most 100,000"),
    ],
)
def test_a_wrong_file_is_refused_and_the_place_named(write, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        points(write(text))


def test_missing_experiment_and_wrong_flags(write) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml: no such file"):
        load_base(write("experiment: nothing.yaml\nseeds: 2", "a.toml").rename(write("", "b.yaml")), [], {})
    with pytest.raises(ConfigError, match=r"--trainer.optim.lr.*is an axis of the sweep"):
        load_base(write(AXES), ["--trainer.optim.lr", "1"], {})
    with pytest.raises(ConfigError, match=r"did you mean --max-steps"):
        load_base(write(AXES), ["--max-step", "1"], {})
    sizes = write("axes: {product: {inference.tensor_parallel_size: [1, 2]}}", "c.yaml")
    with pytest.raises(ConfigError, match=r"--inference-gpus.*inference.tensor_parallel_size is an axis"):
        load_base(sizes, ["--inference-gpus", "4"], {})


def test_a_bad_point_is_told_and_the_others_stand(write) -> None:
    found = points(write("axes: {product: {orchestrator.rollouts_per_example: [4, 5, 8]}}"))
    assert [point.hash is None for point in found] == [False, True, False]
    assert "must be a multiple of" in str(found[1].reason)


def test_hash_is_of_what_is_computed(write) -> None:
    def hashes(text: str, *argv: str) -> list[str | None]:
        return [point.hash for point in points(write(text), *argv)]

    plain = hashes(AXES)
    assert len(set(plain)) == 6
    same = [
        "--slurm.time",
        "10:00",
        "--name",
        "x",
        "--output-dir",
        "/tmp/y",
        "--log.level",
        "DEBUG",
        "--launch",
        "local",
    ]
    assert hashes(AXES + "point_name: 'n{index}'", *same) == plain
    assert not set(hashes(AXES, "--max-steps", "5")) & set(plain)
    assert hashes(AXES, "--max-steps", "4") == plain
    reversed_ = (
        "axes: {product: {orchestrator.rollouts_per_example: [8, 4], trainer.optim.lr: [0.0001, 0.00001, 3e-5]}}"
    )
    assert set(hashes(reversed_)) == set(plain)


def test_axes_over_the_job_make_different_points(write) -> None:
    found = points(write("axes: {product: {slurm.trainer.nodes: [1, 2, 4]}}"))
    assert len({point.hash for point in found}) == 3


def test_what_is_stored_gives_the_same_points_without_the_files(write, tmp_path: Path) -> None:
    path = write(AXES + "seeds: 2\nthrottle: 2\noverrides: {wandb.name: '${name}'}")
    base = load_base(path, ["--max-steps", "3"], {"PRIME_ASYNC_LEVEL": "1"})
    before = resolve_points(base)
    base.sweep_dir.mkdir(parents=True)
    (base.sweep_dir / "sweep.yaml").write_text(dump_yaml(base.stored()))
    path.unlink()
    (tmp_path / "exp.yaml").unlink()
    again: Base = load_stored(base.sweep_dir / "sweep.yaml")
    after = resolve_points(again)
    assert [(p.name, p.hash, experiment_of(p)) for p in after] == [(p.name, p.hash, experiment_of(p)) for p in before]
    assert (again.sweep_dir, again.name, again.spec.file.throttle) == (base.sweep_dir, base.name, 2)
    wandb = experiment_of(before[3]).wandb
    assert wandb is not None and wandb.name == before[3].name


def test_a_stored_sweep_goes_on_where_it_was_submitted(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    base = load_base(write(AXES), ["--output-dir", "relative"], {})
    base.sweep_dir.mkdir(parents=True)
    (base.sweep_dir / "sweep.yaml").write_text(dump_yaml(base.stored()))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_stored(base.sweep_dir / "sweep.yaml").sweep_dir == tmp_path / "relative" / "sweep"
    assert Path.cwd() == tmp_path / "elsewhere"
    assert load_stored(Path("..", "relative", "sweep", "sweep.yaml"), enter=True).sweep_dir == base.sweep_dir
    assert Path.cwd() == tmp_path


def test_stored_sweep_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is .* a sweep"):
        load_stored(tmp_path / "sweep.yaml")
    (tmp_path / "sweep.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="not written by `sweep submit`"):
        load_stored(tmp_path / "sweep.yaml")


def test_two_thousand_points_read_each_file_once(write, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_hpc.config.sources import files

    opened: list[str] = []
    parse = files._parse

    def counted(path: Path):
        opened.append(path.name)
        return parse(path)

    monkeypatch.setattr(files, "_parse", counted)
    rates = ", ".join(f"{i}e-5" for i in range(1, 51))
    found = points(write(f"axes: {{product: {{trainer.optim.lr: [{rates}]}}}}\nseeds: 40"))
    assert (len(found), len({p.name for p in found}), len({p.hash for p in found})) == (2000, 2000, 2000)
    assert opened == ["sweep.yaml", "exp.yaml"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "1e-05"), (0.1 + 0.2, "0.30000000000000004"), (4, "4"), (True, "true"), (None, "none"), ([1, 2], "1,2")],
)
def test_values_in_names(value: object, text: str) -> None:
    assert value_text(value) == text


def test_names_are_safe_as_directories() -> None:
    assert point_name("{model.name}", {"model.name": "Qwen/Qwen3 0.6B"}, 0) == "Qwen_Qwen3_0.6B"
    assert point_name("{model.name}", {"model.name": "../.."}, 0) == "point0"
    assert point_name("{model.name}", {"model.name": "logs"}, 0) == "point-logs"
    assert point_name("{model.name}", {"model.name": "points.jsonl"}, 0) == "point-points.jsonl"
    long = [point_name("{model.name}", {"model.name": "x" * 300 + end}, 0) for end in "ab"]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 120


def test_default_names_have_the_keys_that_vary() -> None:
    keys = ["trainer.optim.lr", "orchestrator.sampling.temperature", "orchestrator.eval.sampling.temperature"]
    values = [dict(zip(keys, row, strict=True)) for row in ((1e-5, 0.5, 1), (1e-4, 0.7, 0))]
    assert default_pattern(keys, values) == (
        "lr{trainer.optim.lr}-orchestrator.sampling.temperature{orchestrator.sampling.temperature}"
        "-eval.sampling.temperature{orchestrator.eval.sampling.temperature}"
    )
    assert default_pattern(keys, [{**v, "trainer.optim.lr": 1} for v in values]).startswith("orchestrator")


def test_sweep_files_and_experiments_are_told_apart(write, tmp_path: Path) -> None:
    assert is_sweep_file(write(AXES))
    assert not is_sweep_file(tmp_path / "exp.yaml")
    assert not is_sweep_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).resolve().parents[2] / "sweeps").glob("*.yaml")), ids=lambda p: p.name
)
def test_shipped_sweeps_are_valid(path: Path) -> None:
    found = points(path)
    assert all(point.reason is None for point in found), [point.reason for point in found]


def test_an_axis_that_is_named_through_a_section_decides_over_the_experiment(write, tmp_path: Path) -> None:
    base = load_base(write("axes: {product: {trainer.max_steps: [10, 20]}}\n"), [], {})
    assert [experiment_of(point).max_steps for point in resolve_points(base)] == [10, 20]
    (tmp_path / "stored.yaml").write_text(dump_yaml(base.stored()))
    assert [experiment_of(p).max_steps for p in resolve_points(load_stored(tmp_path / "stored.yaml"))] == [10, 20]
