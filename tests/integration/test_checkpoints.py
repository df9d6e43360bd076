"""Checkpoints of real trainer processes: background saves, other numbers of ranks, requests, failures, replay."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from prime_hpc.config import load_run
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.store.weights import list_versions
from prime_hpc.supervisor.attempt.start import begin_attempt
from prime_hpc.trainer.batching.micro_batches import redistribute
from tests.integration.test_trainer import (
    assert_done,
    command,
    environment,
    full_batch,
    run_trainer,
    weights,
    write_run,
)
from tests.support import forked
from tests.support.runs import wait_until
from tests.support.sampled import sampled
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
TRAINER: dict[str, Any] = {"optim": {"lr": 1e-3}, "threads_per_rank": 1}
NOISE = 2e-6
"""Relative difference of a loss between numbers of ranks: sums in another order, float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def checkpoints(paths: RunPaths) -> list[int]:
    return list_steps(paths.checkpoints, digits=0)


def write_batches(paths: RunPaths, numbers: range, num_ranks: int, incarnation: int = 0) -> None:
    """Scripted batches with the state that belongs to them."""
    for step in numbers:
        ranks = [redistribute([full_batch(step)], rank, num_ranks) for rank in range(num_ranks)]
        write_batch(paths, step, ranks, state={"step": step}, incarnation=incarnation)


def tensors(paths: RunPaths, step: int, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    file = scratch / f"{paths.root.name}-{step}.pt"
    dcp_to_torch_save(resolve_resume(paths.checkpoints, step).trainer_dir, file)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunPaths:
    """Six steps on two ranks, saved synchronously every two."""
    trainer = TRAINER | {"num_ranks": 2}
    paths = write_run(
        tmp_path_factory.mktemp("runs") / "sync", model, max_steps=6, ckpt={"interval": 2}, trainer=trainer
    )
    write_batches(paths, range(1, 7), 2)
    assert_done(run_trainer(paths, 2), paths)
    return paths


def test_background_saves_hold_what_synchronous_ones_do(tmp_path: Path, model: Path, uninterrupted: RunPaths) -> None:
    ckpt = {"interval": 1, "save_async": True, "keep_last": 1, "keep_interval": 4}
    paths = write_run(tmp_path / "async", model, max_steps=6, ckpt=ckpt, trainer=TRAINER | {"keep_weights": 1})
    write_batches(paths, range(1, 7), 2)
    assert_done(run_trainer(paths, 2), paths)
    assert checkpoints(uninterrupted) == [2, 4, 6]
    assert checkpoints(paths) == [4, 6]
    assert set(checkpoints(paths)) <= set(list_versions(paths))
    assert not [p for p in paths.checkpoints.iterdir() if p.name.startswith(".")]
    for step in (4, 6):
        mine, theirs = tensors(paths, step, tmp_path), tensors(uninterrupted, step, tmp_path)
        assert mine.keys() == theirs.keys() and any(k.startswith("optimizer.") for k in mine)
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)
        info = resolve_resume(paths.checkpoints, step)
        state = info.orchestrator_state
        assert state is not None and json.loads(state.read_text()) == {"step": step}
        assert info.manifest.meta["optimizer"] == "adamw", "who goes back to it with another one is told at once"
    saved = [row for row in read_metrics(paths.metrics("trainer")) if "ckpt/step" in row]
    assert [row["ckpt/step"] for row in saved] == [1, 2, 3, 4, 6], "the last one is whole before its step is told"
    assert all(row["ckpt/write_s"] >= row["ckpt/stall_s"] > 0 and row["ckpt/bytes"] > 0 for row in saved)

    # The same command again, for more steps: retention holds after the resume, and for what it finds.
    write_batches(paths, range(7, 9), 2)
    again = {"interval": 50, "keep_last": 1, "resume_step": "latest"}
    write_run(tmp_path / "async", model, max_steps=7, ckpt=again, trainer=TRAINER | {"keep_weights": 1})
    assert_done(run_trainer(paths, 2), paths)
    assert checkpoints(paths) == [7]


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", sampled([4, 1], 2))
def test_another_number_of_ranks_goes_on(tmp_path: Path, model: Path, uninterrupted: RunPaths, num_ranks: int) -> None:
    trainer = TRAINER | {"num_ranks": num_ranks}
    ckpt = {"resume_step": str(uninterrupted.checkpoint_step(4))}
    paths = write_run(tmp_path / "other", model, max_steps=6, ckpt=ckpt, trainer=trainer)
    attempt = begin_attempt(load_run(paths.root), paths.root)
    assert attempt.resume_step == 4 and list_versions(paths) == [4]
    write_batches(paths, range(5, 7), num_ranks, incarnation=1)
    assert_done(run_trainer(paths, num_ranks, PRIMEHPC_RESUME_STEP="4", PRIMEHPC_INCARNATION="1"), paths)
    then = {row["step"]: row["loss"] for row in read_metrics(uninterrupted.metrics("trainer"))}
    now = {row["step"]: row["loss"] for row in read_metrics(paths.metrics("trainer"))}
    assert sorted(now) == [5, 6]
    for step, loss in now.items():
        assert loss == pytest.approx(then[step], rel=NOISE)
    a, b = weights(uninterrupted, 6), weights(paths, 6)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=5e-6)


@contextmanager
def running(paths: RunPaths, num_ranks: int, hub: BusServer, **extra: str) -> Iterator[forked.ForkedProcess]:
    """A trainer that hears the hub."""
    process = forked.start(command(paths, num_ranks), env=environment(PRIMEHPC_BUS=hub.address, **extra))
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


@contextmanager
def listening() -> Iterator[tuple[BusServer, list[dict[str, Any]]]]:
    """A hub, and the "saved" messages that came."""
    saved: list[dict[str, Any]] = []

    def heard(topic: str, payload: dict[str, Any]) -> None:
        if topic == "saved":
            saved.append(payload)

    hub = BusServer(on_message=heard)
    try:
        yield hub, saved
    finally:
        hub.close()


def steps(paths: RunPaths) -> list[int]:
    return [row["step"] for row in read_metrics(paths.metrics("trainer"))]


def test_saves_on_request_and_stops_at_the_boundary_though_checkpoints_are_off(tmp_path: Path, model: Path) -> None:
    paths = write_run(tmp_path / "asked", model, max_steps=50, trainer=TRAINER | {"batch_timeout_s": 600})
    assert begin_attempt(load_run(paths.root), paths.root).incarnation == 1
    paths.attempts.write_text(paths.attempts.read_text().replace('"ended": null', '"ended": 1.0'))
    write_batches(paths, range(1, 3), 2, incarnation=1)
    with listening() as (hub, saved), running(paths, 2, hub, PRIMEHPC_INCARNATION="1") as process:
        wait_until(lambda: steps(paths) == [1, 2], 200, "two steps")
        hub.publish("save", id=5)  # while it waits for a batch
        wait_until(lambda: saved, 200, "the save")
        assert (saved[0]["step"], saved[0]["ids"]) == (2, [5]) and checkpoints(paths) == [2]
        hub.publish("save", id=5)  # heard before
        hub.publish("save", id=6)  # nothing new to save: answered at once
        wait_until(lambda: len(saved) > 1, 200, "the answer")
        assert (saved[1]["step"], saved[1]["ids"]) == (2, [6])
        write_batches(paths, range(3, 4), 2, incarnation=1)
        wait_until(lambda: steps(paths) == [1, 2, 3], 200, "it went on")
        hub.publish("stop", reason="test", save=True)
        write_batches(paths, range(4, 9), 2, incarnation=1)
        assert process.wait(200) == 0
    assert checkpoints(paths) == [2, steps(paths)[-1]]
    assert steps(paths)[-1] < 8
    assert saved[-1]["step"] == steps(paths)[-1]
    status = read_status(paths.logs(1, "trainer"))
    assert status is not None and status["state"] == "done"
    assert begin_attempt(load_run(paths.root), paths.root).resume_step == steps(paths)[-1]


def test_a_stop_that_was_there_first_takes_no_batch(tmp_path: Path, model: Path) -> None:
    paths = write_run(tmp_path / "stopped", model, max_steps=50, trainer=TRAINER)
    write_batches(paths, range(1, 4), 1)
    with listening() as (hub, _):
        hub.publish("save", id=1)
        hub.publish("stop", reason="test", save=True)
        with running(paths, 1, hub) as process:
            assert process.wait(200) == 0
    assert steps(paths) == [] and checkpoints(paths) == []


def test_a_background_write_without_room_on_another_rank_is_put_off_by_all(tmp_path: Path, model: Path) -> None:
    ckpt = {"interval": 1, "save_async": True}
    paths = write_run(tmp_path / "full", model, max_steps=4, ckpt=ckpt, trainer=TRAINER)
    write_batches(paths, range(1, 5), 2)
    line = [word.replace("prime_hpc.trainer.main", "tests.support.faulty_trainer") for word in command(paths, 2)]
    result = forked.run(line, env=environment(FAULT="1:create:checkpoints/.stage-step_1-"))
    assert result.returncode == 0, result
    log = result.stdout + result.stderr + "".join(path.read_text() for path in paths.logs(1, "trainer").glob("*.log"))
    assert re.search(r"the checkpoint of step 1 was not saved: rank 1: .*disk full.*Training goes on", log)
    assert checkpoints(paths) == [2, 3, 4] and steps(paths) == [1, 2, 3, 4]
    assert not [p for p in paths.checkpoints.iterdir() if p.name.startswith(".stage")]


def test_killed_while_a_save_is_in_flight(tmp_path: Path, model: Path) -> None:
    """The half-written checkpoint is gone, the one before it and its weights are there, and the end is the same."""
    settings: dict[str, Any] = {
        "max_steps": 4,
        "ckpt": {"interval": 1, "save_async": True, "keep_last": 1},
        "trainer": TRAINER | {"keep_weights": 1},
    }
    whole = write_run(tmp_path / "whole", model, **settings)
    write_batches(whole, range(1, 5), 1)
    assert_done(run_trainer(whole), whole)

    paths = write_run(tmp_path / "killed", model, **settings)

    def live(number: int, step: int) -> int | None:
        attempt = begin_attempt(load_run(paths.root), paths.root)
        assert attempt.incarnation == number
        paths.attempts.write_text(paths.attempts.read_text().replace('"ended": null', '"ended": 1.0'))
        write_batches(paths, range(step, 5), 1, incarnation=number)
        return attempt.resume_step

    assert live(1, 1) is None
    line = [word.replace("prime_hpc.trainer.main", "tests.support.faulty_trainer") for word in command(paths, 1)]
    fault = environment(FAULT="0:create:checkpoints/.stage-step_3-:hang", PRIMEHPC_INCARNATION="1")
    process = forked.start(line, env=fault)
    try:
        wait_until(lambda: 4 in list_versions(paths), 200, "step 4 while step 3 is being saved")
        time.sleep(1)  # what it prunes after publishing
    finally:
        process.kill()
        process.wait()
    assert checkpoints(paths) == [2]
    assert list_versions(paths) == [2, 3, 4]  # keep_weights is 1: 3 belongs to a checkpoint that has no name yet
    assert [p for p in paths.checkpoints.iterdir() if p.name.startswith(".stage")]
    assert live(2, 3) == 2
    assert not [p for p in paths.checkpoints.iterdir() if p.name.startswith(".")] and list_versions(paths) == [2]
    result = run_trainer(paths, PRIMEHPC_RESUME_STEP="2", PRIMEHPC_INCARNATION="2")
    assert result.returncode == 0, result.stderr[-2000:]
    assert checkpoints(paths) == [4]
    a, b = tensors(whole, 4, tmp_path), tensors(paths, 4, tmp_path)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_stop_is_heard_while_epochs_are_counted(tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2000)
    sft = {"data": {"path": str(tmp_path / "rows.jsonl"), "num_epochs": 2, "cache_dir": str(tmp_path / "cache")}}
    paths = write_run(tmp_path / "sft", model, kind="sft", sft=sft, max_steps=100, ckpt={}, trainer=TRAINER)
    with listening() as (hub, _):
        hub.publish("stop", reason="test", save=True)
        with running(paths, 2, hub) as process:
            assert process.wait(200) == 0
    assert steps(paths) == [] and checkpoints(paths) == [] and list_versions(paths) == []
    assert not list((tmp_path / "cache").glob("lengths-*"))


@pytest.mark.exhaustive  # as an RL run's, above
def test_sft_saves_on_request_and_stops_with_a_save(tmp_path: Path, model: Path) -> None:
    sft = {"data": {"type": "fake", "batch_size": 4, "seq_len": 32}}
    ckpt = {"interval": "auto", "save_async": True}
    paths = write_run(tmp_path / "sft", model, kind="sft", sft=sft, max_steps=100_000, ckpt=ckpt, trainer=TRAINER)
    with listening() as (hub, saved), running(paths, 2, hub) as process:
        wait_until(lambda: len(steps(paths)) >= 3, 200, "three steps")
        hub.publish("save", id=1)
        wait_until(lambda: saved, 200, "the save")
        assert saved[0]["ids"] == [1] and saved[0]["step"] >= 3
        seen = len(steps(paths))
        wait_until(lambda: len(steps(paths)) > seen, 200, "it went on")
        hub.publish("stop", reason="test", save=True)
        assert process.wait(200) == 0
    last = steps(paths)[-1]
    assert checkpoints(paths) == [saved[0]["step"], last]
    assert resolve_resume(paths.checkpoints, "latest").manifest.meta["progress"] == {
        "step": last,
        "num_samples": 4 * last,
    }


def replayed(run: RunPaths, *flags: str, code: int = 0) -> str:
    """`prime-hpc replay`; what it printed."""
    done = forked.run(["tests.faults.entry", "prime-hpc", "replay", str(run.root), *flags], env=environment())
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_replay_is_equal_to_the_last_bit(uninterrupted: RunPaths) -> None:
    whole = json.loads(replayed(uninterrupted, "--json"))
    assert (whole["start"], whole["num_equal"], whole["equal"], whole["max_loss_difference"]) == (0, 6, True, 0.0)
    said = replayed(uninterrupted, "--steps", "5:6")
    assert "from the checkpoint of step 4, 2 rank(s)" in said and "2 steps: every figure equal" in said
    log = uninterrupted.metrics("trainer")
    text = log.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    rows[-1]["grad_norm"] *= 1 + 1e-15
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        worse = json.loads(replayed(uninterrupted, "--steps", "6", "--json", code=1))
    finally:
        log.write_text(text)
    assert worse["first_difference"]["figure"] == "grad_norm" and worse["first_difference"]["step"] == 6
