"""The console's lines: figures of a step from both sides, files that cannot be read, runs of one trainer."""

import errno
import math
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.observe.console import CURVE, Console, Doing, Tail, in_seconds
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.runtime.clock import AwakeClock
from tests.support.metric_rows import trainer_row, write_rows


def test_console_joins_both_sides_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    setup_logger("supervisor")
    console = Console(tmp_path, 40, kind="rl")
    rollouts = {
        "step": 1,
        "reward/mean": 0.25,
        "lag/mean": 0.5,
        "lag/max": 2,
        "tokens/sampled_per_second": 3000,
        "time/wait_weights": 0.1,
    }
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", [rollouts])
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1)])
    console.tick({})
    line = capsys.readouterr().out
    for part in (
        "1/40",
        "reward 0.250",
        "ratio 1.000",
        "lag 0.5/2",
        "train 1.5k gen 3.0k",
        "trainer waits for rollouts 50%",
        "1.0 s/step",
    ):
        assert part in line
    assert console.seconds() == {"useful": 1.0, "waiting": 1.0, "saving": 0.0}


def test_it_is_said_who_does_what_while_no_step_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("supervisor")
    now = [0.0]
    console = Console(tmp_path, 40, kind="sft", clock=AwakeClock(lambda: now[0], max_gap_s=math.inf))
    doing: Doing = {
        "trainer": [{"phase": "data", "awaits": "", "count": 2}],
        "x": [{"phase": "wait", "awaits": "weights 3"}],
    }

    def lines_until(end: float) -> list[str]:
        while now[0] < end:
            now[0] += 1.0
            console.tick({}, lambda: doing)
        return capsys.readouterr().out.splitlines()

    first, second = lines_until(200)
    assert "no step for 1:00: trainer data, x wait (waits for weights 3)" in first and "no step for 2:00" in second
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1) | {"time/step": 50.0, "time/wait": 0.0}])
    step, *rest = lines_until(450)
    assert "1/40" in step and [line.partition(": ")[0].split("no ")[1] for line in rest] == ["step after 1 for 2:30"]
    console.close()
    assert not capsys.readouterr().out


def test_console_says_where_nothing_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward function that never finds anything looked like a run: reward 0.000, loss 0.0000."""
    setup_logger("supervisor")
    console = Console(tmp_path, 40, kind="rl")
    rows = [{"step": s, "reward/mean": 0.0, "groups/with_signal": n} for s, n in ((1, 0), (2, 1))]
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", rows)
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1), trainer_row(2)])
    console.tick({})
    first, second = capsys.readouterr().out.splitlines()
    assert "(no group has a signal)" in first and "signal" not in second


def test_console_shows_figures_that_are_not_finite_and_slow_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are text in the file; a line for people ends no run."""

    setup_logger("supervisor")
    console = Console(tmp_path, 3, kind="sft")
    metrics = MetricsWriter(tmp_path / "metrics" / "trainer.jsonl")
    metrics.log(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, tokens_per_s=1.0, **{"time/step": 1.0})
    console.tick({})
    said = capsys.readouterr().out
    assert "loss nan" in said and "grad inf" in said and "lr -inf" in said and "slow" not in said
    slow = {"time/step": 1.0, "ranks/slow": 2.0}
    metrics.log(2, loss=1.0, grad_norm=1.0, lr=1.0, tokens_per_s=1.0, **slow)
    metrics.close()
    console.tick({})
    assert "slow ranks: 2 (trainer's log)" in capsys.readouterr().out


def test_console_goes_on_where_a_file_cannot_be_read_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    real, failing = Path.open, set[str]()

    def open_(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.name in failing:
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return real(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_)
    setup_logger("supervisor")
    console = Console(tmp_path, 40, kind="rl")
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1)])
    failing |= {"trainer.jsonl", "orchestrator.jsonl"}
    console.tick({})
    console.tick({})
    console.close()
    failing -= {"trainer.jsonl"}
    console.tick({})  # what one file has is shown though the other cannot be read
    said = capsys.readouterr().out
    assert said.count("Stale file handle") == 1 and said.count("step    1/40") == 1
    failing.clear()
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(2)])
    console.tick({})
    assert "step    2/40" in capsys.readouterr().out and console.progress()["step"] == 2


def test_a_tail_whose_file_cannot_be_asked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n')

    def stat(self: Path, **named: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        tail = Tail(path)
        with pytest.raises(OSError):
            tail.rows()
    assert tail.rows() == []  # of an earlier attempt
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    assert tail.rows() == [{"a": 2}]


def test_console_shows_the_runs_of_one_trainer_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    setup_logger("supervisor")
    console = Console(tmp_path, 40, kind="rl")
    for run, reward in (("run_a", 0.25), ("run_b", 0.75)):
        write_rows(
            tmp_path / run / "metrics" / "orchestrator.jsonl",
            [{"step": n, "reward/mean": reward + n / 100, "lag/mean": 0.5, "lag/max": n} for n in (1, 2, 3)],
        )
    turns = [("run_a", 1), ("run_b", 1), ("run_b", 2), ("run_a", 2)]
    write_rows(
        tmp_path / "metrics" / "trainer.jsonl",
        [trainer_row(n) | {"run": run, "run/step": s, "run/max_steps": 9} for n, (run, s) in enumerate(turns, 1)],
    )
    console.tick({})
    lines = [line.split("supervisor ")[1].split("  loss")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run_a step    1/9  reward 0.260 ▁"
    assert lines[2:] == ["run_b step    2/9  reward 0.770 ▁█", "run_a step    2/9  reward 0.270 ▁█"]


def test_console_takes_the_last_step_from_a_trainer_that_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    setup_logger("supervisor")
    console = Console(tmp_path, None, kind="sft")
    assert console.progress()["max_steps"] is None
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1) | {"run/max_steps": 9}])
    console.tick({})
    assert console.progress()["max_steps"] == 9
    line = capsys.readouterr().out
    assert "step    1/9" in line and "ETA" in line


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_console_keeps_what_a_line_shows_however_long_the_run_is(kind: Any, tmp_path: Path) -> None:
    console = Console(tmp_path, 300, kind=kind)
    steps = range(1, 301)
    rollouts = [{"step": n, "reward/mean": n / 300} for n in steps] if kind == "rl" else []
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", rollouts)
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(n) for n in steps])
    console.tick({})
    assert console.progress() == {"step": 300, "max_steps": 300} | ({"reward": 1.0} if kind == "rl" else {"loss": -0.1})
    lengths = [len(console._losses), *map(len, console._rewards.values()), len(console._times)]
    assert 0 < max(lengths) <= CURVE and not any(console._rollouts.values())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (4.267, "4.27 s"), (427.3, "427 s"), (999.7, "1000 s"), (1534.2, "1534 s")]
)
def test_seconds_are_shown_without_an_exponent(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text
