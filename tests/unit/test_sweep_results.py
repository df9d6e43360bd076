"""Results of a sweep: the value of a point, the order, means over seeds, the picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.launch.monitor import run_progress
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.launch.sweep.plot import curves, draw
from prime_hpc.launch.sweep.progress import PointView
from prime_hpc.launch.sweep.results import Metric, choose_metric, collect_results, over_seeds, read_series
from prime_hpc.launch.sweep.spec import SweepFile
from prime_hpc.launch.sweep.state import PointRow, Sweep
from prime_hpc.observe.metrics import parse_row
from tests.support.metric_rows import write_rows

REWARD = Metric("reward/mean", "max", 2)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "sweep")


def add(sweep: Sweep, name: str, rows: list[dict] | None = None, role: str = "orchestrator", **values: object) -> None:
    """A point with metrics rows of one role; None: it never wrote any."""
    row = PointRow(len(sweep.rows), name, name, name, values, "0" * 32)
    sweep.rows.append(row)
    if rows is not None:
        folder = sweep.dir / name / "metrics"
        folder.mkdir(parents=True)
        (folder / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewards(*values: float | str) -> list[dict]:
    return [{"step": step, "time": 0.0, "reward/mean": value} for step, value in enumerate(values, 1)]


def results(sweep: Sweep, metric: Metric = REWARD, **options: bool) -> list:
    return collect_results(
        sweep,
        [PointView(row, "running", RunStatus(row.name, str(sweep.dir / row.name), "running")) for row in sweep.rows],
        metric,
        **options,
    )


def test_best_first_and_those_without_a_value_last(sweep: Sweep) -> None:
    add(sweep, "low", rewards(0.9, 0.1, 0.2))
    add(sweep, "none")
    add(sweep, "high", rewards(0.0, 0.4, 0.6))
    add(sweep, "one", rewards(0.3))
    found = results(sweep)
    assert [(r.view.row.name, r.value, r.step, r.num_values) for r in found] == [
        ("high", 0.5, 3, 2),
        ("one", 0.3, 1, 1),
        ("low", pytest.approx(0.15), 3, 2),
        ("none", None, None, 0),
    ]
    lowest = results(sweep, Metric("reward/mean", "min", 1))
    assert [r.view.row.name for r in lowest] == ["low", "one", "high", "none"]


def test_evaluations_count_by_the_last_one(sweep: Sweep) -> None:
    evals = [{"step": version, "eval/x/mean_reward": value} for version, value in ((0, 0.9), (2, 0.5))]
    add(sweep, "a", [evals[0], *rewards(0.1, 0.2), evals[1]])
    metric = Metric("eval/x/mean_reward", "max", 5)
    assert [(r.value, r.step) for r in results(sweep, metric)] == [(0.5, 2)]
    assert "last evaluation" in metric.describe()
    assert "mean over the last 2 steps" in REWARD.describe()


def test_steps_done_again_after_a_restart_replace_the_earlier_ones(sweep: Sweep) -> None:
    add(sweep, "a", [*rewards(0.1, 0.2, 0.3, 0.4), *rewards(0.0, 0.5, 0.6)[1:]])
    assert read_series(sweep.dir / "a", "reward/mean", None) == ([1, 2, 3], [0.1, 0.5, 0.6])


def test_torn_lines_and_values_that_are_no_numbers(sweep: Sweep) -> None:
    add(sweep, "a", rewards(0.1, "nan", 0.3))
    path = sweep.dir / "a" / "metrics" / "orchestrator.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "rew')
    assert read_series(sweep.dir / "a", "reward/mean", None) == ([1, 3], [0.1, 0.3])
    add(sweep, "diverged", rewards("nan", "nan"))
    assert results(sweep)[-1].value is None


def test_trainer_metrics_are_found(sweep: Sweep) -> None:
    add(sweep, "a", [{"step": 1, "loss": 2.0, "time/step": 1.0}, {"step": 2, "loss": 1.0, "time/step": 1.0}], "trainer")
    assert results(sweep, Metric("loss", "min", 1))[0].value == 1.0


def test_of_long_runs_the_ends_of_all_files_are_read_before_all_of_one(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is the trainer's: it was looked for in all that the orchestrator had written."""
    add(sweep, "a", rewards(*[0.5] * 9000))
    losses = [{"step": step, "loss": 2.0, "time/step": 1.0} for step in range(1, 9001)]
    write_rows(sweep.dir / "a" / "metrics" / "trainer.jsonl", losses)
    read: list[bytes] = []

    def parse(line: bytes) -> dict[str, Any] | None:
        read.append(line)
        return parse_row(line)

    monkeypatch.setattr(run_progress, "parse_row", parse)
    assert results(sweep, Metric("loss", "min", 1))[0].value == 2.0
    assert sum(map(len, read)) < 600_000  # the ends of both; the orchestrator's rows are 430 kB


def test_a_point_of_many_runs_has_the_mean_of_theirs(sweep: Sweep) -> None:
    """Its own rows are of one run after the other."""
    rows = [{"step": step, "run": f"run_{'ab'[step % 2]}", "loss": float(step), "ours": 1.0} for step in (1, 2, 3)]
    add(sweep, "point", rows, "trainer")
    of = Sweep(sweep.dir / "point")
    add(of, "run_a", [{"step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 4.0), (3, 2.0))], "trainer")
    add(of, "run_b", [{"step": 1, "loss": 5.0}], "trainer")
    add(of, "run_c")
    (found,) = results(sweep, Metric("loss", "min", 2))
    assert (found.value, found.step, found.num_values) == (4.0, 3, 3)
    assert (found.steps, found.series) == ([1, 2, 3], [7.0, 4.0, 2.0])
    assert results(sweep, Metric("ours", "max", 2))[0].value == 1.0, "which the point alone has"


def test_a_long_file_is_read_from_its_end(sweep: Sweep) -> None:
    rows = [{**row, "text": "x" * 1000} for row in rewards(*(i / 1000 for i in range(1000)))]
    add(sweep, "a", [{"step": 0, "eval/x/mean_reward": 0.25}, *rows])
    assert results(sweep)[0].value == pytest.approx(0.9985)
    assert len(results(sweep)[0].series) < 300
    assert len(results(sweep, whole=True)[0].series) == 1000
    assert results(sweep, Metric("eval/x/mean_reward", "max", 1))[0].value == 0.25  # before the end that was read


def test_unknown_metric_is_refused_with_the_near_one(sweep: Sweep) -> None:
    add(sweep, "a", rewards(0.1))
    with pytest.raises(ConfigError, match=r"metric: no point has a metric 'reward/men'; did you mean reward/mean"):
        results(sweep, Metric("reward/men", "max", 1))


def test_points_that_evaluate_have_the_score_of_all_their_episodes(sweep: Sweep) -> None:
    metric = choose_metric(SweepFile(name="s", experiment="e", metric="reward/calculator"), "eval")
    for name, value in (("low", 0.2), ("high", 0.6)):
        rows = [
            {"step": step, "version": "base", "total": 8, "reward/calculator": value / (9 - step)} for step in (4, 8)
        ]
        add(sweep, name, rows, role="eval")
    assert [(r.view.row.name, r.value, r.step) for r in results(sweep, metric)] == [("high", 0.6, 8), ("low", 0.2, 8)]


def test_nothing_ran_yet(sweep: Sweep, tmp_path: Path) -> None:
    add(sweep, "a")
    assert [r.value for r in results(sweep)] == [None]
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(results(sweep), REWARD, "t", tmp_path / "p.png")


@pytest.mark.parametrize(
    ("stated", "kind", "asked", "expected"),
    [
        ({}, "rl", None, ("reward/mean", "max")),
        ({}, "sft", None, ("loss", "min")),
        ({"metric": "eval/x/mean_reward"}, "rl", None, ("eval/x/mean_reward", "max")),
        ({"metric": "entropy", "goal": "min"}, "rl", None, ("entropy", "min")),
        ({"metric": "entropy", "goal": "min"}, "rl", "reward/mean", ("reward/mean", "max")),
        ({"goal": "min"}, "rl", None, ("reward/mean", "min")),
        ({}, "rl", "time/step", ("time/step", "min")),
        ({}, "rl", "kl", ("kl", "min")),
        ({}, "rl", "teacher/reverse_kl", ("teacher/reverse_kl", "min")),
        ({}, "sft", "eval/perplexity", ("eval/perplexity", "min")),
    ],
)
def test_which_metric_and_which_end_is_best(stated: dict, kind: str, asked: str | None, expected: tuple) -> None:
    metric = choose_metric(SweepFile(name="s", experiment="e", **stated), kind, asked)
    assert (metric.name, metric.goal) == expected


def test_means_over_seeds(sweep: Sweep) -> None:
    for lr, seed, value in ((1, 0, 0.2), (1, 1, 0.4), (2, 0, 0.9), (2, 1, 0.7), (3, 0, 1.0)):
        add(sweep, f"{lr}-{seed}", rewards(value), lr=lr, seed=seed)
    add(sweep, "3-1", None, lr=3, seed=1)
    groups = over_seeds(results(sweep), "max")
    assert [(g.values, g.num_seeds, round(g.mean, 6), round(g.std, 6)) for g in groups] == [
        ({"lr": 3}, 1, 1.0, 0.0),
        ({"lr": 2}, 2, 0.8, 0.141421),
        ({"lr": 1}, 2, 0.3, 0.141421),
    ]
    assert over_seeds([r for r in results(sweep) if r.view.row.values["seed"] == 0], "max") == []
    failed = results(sweep)
    for result in failed:
        if result.view.row.name == "1-1":
            result.view.state = "failed"
    assert [(g.values["lr"], g.num_seeds) for g in over_seeds(failed, "max")] == [(3, 1), (2, 2), (1, 1)]


def test_seeds_of_a_point_are_one_line_in_a_band(sweep: Sweep) -> None:
    """At the steps that all of them have; others are lines of their own, under the ends of their keys."""
    add(sweep, "0", rewards(0.0, 0.2, 0.4), "orchestrator", **{"seed": 0, "trainer.optim.lr": 1, "model.lora.rank": 8})
    add(sweep, "1", rewards(0.2, 0.6), "orchestrator", **{"seed": 1, "trainer.optim.lr": 1, "model.lora.rank": 8})
    add(sweep, "2", rewards(0.9, 0.9), "orchestrator", **{"seed": 0, "trainer.optim.lr": 2, "model.lora.rank": 8})
    best, pair = curves(results(sweep, Metric("reward/mean", "max", 1), whole=True), Metric("reward/mean", "max", 1))
    assert best.label == "rank=8 lr=2 (0.9, 1 seed)" and best.means == best.lows == best.highs == [0.9, 0.9]
    assert pair.label == "rank=8 lr=1 (0.5, 2 seeds)" and pair.steps == [1, 2]
    assert (pair.means, pair.lows, pair.highs) == (pytest.approx([0.1, 0.4]), [0.0, 0.2], [0.2, 0.6])
    lines = curves([r for r in results(sweep, whole=True) if r.view.row.values["seed"] == 0], REWARD)
    assert [line.label.split()[0] for line in lines] == ["2", "0"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_picture(sweep: Sweep, tmp_path: Path, suffix: str, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b", "c"):
        add(sweep, name, rewards(*(0.1 * step for step in range(num_steps))))
    add(sweep, "none")
    path = tmp_path / "new" / f"p.{suffix}"
    draw(results(sweep, whole=True), REWARD, "title", path)
    assert path.stat().st_size > 1000
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(results(sweep), REWARD, "title", tmp_path / "p.nothing")
