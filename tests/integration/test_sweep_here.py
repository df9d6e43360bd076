"""Sweeps without Slurm, with real trainers: so many at a time in the foreground, a failed point again alone, Ctrl-C."""

import json
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.runs import background, command, rows, wait_until
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and an experiment on random data."""
    path = tmp_path_factory.mktemp("sweep")
    make_tiny_model(path / "model")
    tree = {
        "kind": "sft",
        "launch": "local",
        "output_dir": str(path / "out"),
        "max_steps": 2,
        "seq_len": 32,
        "model": {"name": str(path / "model"), "dtype": "float32"},
        "trainer": {"num_ranks": 1, "threads_per_rank": 1},
        "sft": {"data": {"type": "fake", "batch_size": 2, "micro_batch_size": 2}},
        "supervisor": {"grace_s": 2},
    }
    (path / "exp.yaml").write_text(yaml.safe_dump(tree))
    return path


def attempts(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]


def states(path: Path) -> dict[str, str]:
    done = command("prime-hpc", "sweep", "status", path, "--json")
    assert done.returncode == 0, done.stderr
    return {point["name"]: point["state"] for point in json.loads(done.stdout)["points"]}


@pytest.mark.parametrize("seeds, throttle", [(2, 1), (3, 2)])
def test_a_failed_point_stops_no_other_and_runs_again_alone(folder: Path, seeds: int, throttle: int) -> None:
    """The one before the last fails; never more than `throttle` at a time, and so many where there are so many."""
    path = folder / f"seeds{seeds}.yaml"
    path.write_text(f"experiment: exp.yaml\nseeds: {seeds}\nthrottle: {throttle}\n")
    homes = [folder / "out" / path.stem / f"seed{seed}" for seed in range(seeds)]
    bad = homes[-2]
    bad.mkdir(parents=True)
    (bad / "metrics").write_text("in the way: the trainer can make no directory of this name")
    done = command("prime-hpc", "sweep", "submit", path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{seeds} points run here, in the foreground, {throttle} at a time" in done.stderr
    assert states(path) == {home.name: "failed" if home == bad else "completed" for home in homes}
    firsts = [attempts(home)[0] for home in homes]
    for index in range(throttle, seeds):
        assert firsts[index]["began"] > min(one["ended"] for one in firsts[:index])
    for index in range(1, throttle):
        assert firsts[index]["began"] < firsts[0]["ended"]
    (bad / "metrics").unlink()
    again = command("prime-hpc", "sweep", "submit", path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"1 run; left alone: {seeds - 1} completed" in again.stdout
    assert [len(attempts(home)) for home in homes] == [2 if home == bad else 1 for home in homes]


def test_interrupt_ends_what_runs_and_resume_takes_the_rest(folder: Path) -> None:
    path = folder / "long.yaml"
    path.write_text("experiment: exp.yaml\nseeds: 2\noverrides: {max_steps: 1000000, ckpt.interval: 1000000}\n")
    run_dir = folder / "out" / "long" / "seed0"
    with background("prime-hpc", "sweep", "submit", path, log=folder / "long.log") as process:
        wait_until(lambda: len(rows(run_dir, "trainer")) > 2 or process.poll() is not None, 200, "the point trains")
        supervisor = psutil.Process(attempts(run_dir)[0]["pid"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=280) == 130, (folder / "long.log").read_text()
    assert not supervisor.is_running()
    said = (folder / "long.log").read_text()
    assert said.index("warning: ") < said.index("started as local job"), "not hours later"
    assert "2 run" not in said
    assert states(path) == {"seed0": "stopped", "seed1": "missing"}
    for action, sent in (("submit", ["seed1"]), ("resume", ["seed0", "seed1"])):
        done = command("prime-hpc", "sweep", action, path, "--dry-run", "--json")
        assert json.loads(done.stdout)["sent"] == sent


def test_cancel_from_another_shell_saves_and_starts_no_other(folder: Path) -> None:
    path = folder / "stop.yaml"
    path.write_text("experiment: exp.yaml\nseeds: 2\noverrides: {max_steps: 1000000, ckpt.interval: 1000000}\n")
    run_dir = folder / "out" / "stop" / "seed0"
    with background("prime-hpc", "sweep", "submit", path, log=folder / "stop.log") as process:
        wait_until(lambda: len(rows(run_dir, "trainer")) > 2 or process.poll() is not None, 200, "the point trains")
        done = command("prime-hpc", "sweep", "cancel", path)
        assert done.returncode == 0, done.stderr
        assert "1 saved and ended" in done.stdout
        process.wait(timeout=200)
    assert list((run_dir / "checkpoints").glob("step_*/manifest.json"))
    assert states(path) == {"seed0": "stopped", "seed1": "stopped"}
