"""The directories below a parent: whole, half-written, foreign, twice, deleted, waiting; no model and no ranks."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, write_snapshot
from prime_hpc.config.child_config import as_child, check_child
from prime_hpc.config.snapshot import share
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.batches import list_batches
from prime_hpc.store.checkpoint.newest import Choice
from prime_hpc.store.child_runs import STATE, ChildState, child_name, list_children, read_state, write_state
from prime_hpc.store.errors import FencedError, NoRoom, Unreadable
from prime_hpc.store.io import room
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, current_incarnation
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.trainer.multi import admission, run_slots
from prime_hpc.trainer.multi.run_slots import ENDED_LOOK_S, LOOK_S, UNCHANGED_S, UNREAD_S, Leave, RunSlots
from tests.support.checkpoints import make_checkpoint

SHARED = share(["test"])
BROKEN = Unreadable("c", "Input/output error")


class World:
    """A parent directory with a roster of two slots and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        tree = {
            "output_dir": str(root.parent),
            "name": root.name,
            "seq_len": 64,
            "model": {"name": "m", "lora": {}},
            "orchestrator": {"sampling": {"max_tokens": 16}},
            "trainer": {"max_concurrent_runs": 2},
        }
        self.parent = Experiment.model_validate(tree)
        self.said: list[tuple[str, ChildState]] = []
        self.roster = self.begin(1)

    def begin(self, incarnation: int) -> RunSlots:
        """A new trainer."""
        said = lambda name, state: self.said.append((name, state))  # noqa: E731
        self.roster = RunSlots(self.parent, self.root, incarnation, said, lambda: self.now)
        return self.roster

    def child(self, name: str, **changes: object) -> Path:
        """A whole child."""
        experiment = as_child(self.parent.model_copy(update=changes), self.root, name)
        write_snapshot(experiment, self.root / name, ["test"], SHARED)
        return self.root / name

    def look(self, after: float = LOOK_S) -> list[Leave]:
        """The roster's look after so many seconds."""
        self.now += after
        return self.roster.look()

    def admit(self) -> str | None:
        """Who is admitted next."""
        admission = self.roster.admit()
        if admission is None:
            return None
        self.roster.began(admission, 0, {})
        return admission.name

    def phase(self, name: str) -> str | None:
        """What the child's directory says."""
        state = read_state(self.root / name)
        return None if state is None else state.phase


@pytest.fixture
def world(tmp_path: Path) -> World:
    root = tmp_path / "parent"
    root.mkdir()
    return World(root)


def test_progress_is_written_on_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` would show the same step for as long as the clock went back."""
    world = World(tmp_path / "parent")
    path = world.child("run_a")
    world.look()
    assert world.admit() == "run_a"
    now = run_slots.time.time()
    monkeypatch.setattr(run_slots.time, "time", lambda: now - 3600)
    for step in (1, 2):
        world.roster.trained("run_a", step, 8 * step, 100)
    state = read_state(path)
    assert state is not None and state.step == 1  # the second comes within `STATE_S` of the first


def test_slots_are_given_first_come_first_served_and_freed(world: World) -> None:
    for name in ("run_b", "run_c"):
        world.child(name)
    world.look()
    world.child("run_a")
    world.look()
    assert [world.admit(), world.admit(), world.admit()] == ["run_b", "run_c", None]
    assert world.roster.training == ["run_b", "run_c"] and world.roster.waiting == ["run_a"]
    assert [world.phase(n) for n in ("run_a", "run_b")] == ["waiting", "training"]
    assert current_incarnation(RunPaths(world.root / "run_b")) == 1
    world.roster.ended("run_b", "done", None)
    assert world.admit() == "run_a" and world.roster.state("run_a").slot == 0
    assert world.phase("run_b") == "done"
    assert world.look() == [] and world.admit() is None  # what is done stays done


def test_half_written_foreign_and_linked_directories_are_passed_over(world: World) -> None:
    (world.root / "run_half").mkdir()
    (world.root / "run_half" / "configs").mkdir()
    (world.root / "runaway").mkdir()
    (world.root / ".stage-run_x").mkdir()
    world.child("run_a")
    (world.root / "run_link").symlink_to(world.root / "run_a")
    (world.root / "run_file").write_text("")
    assert list_children(world.root) == ["run_a", "run_file", "run_half", "run_link"]
    world.look()
    assert [world.admit(), world.admit()] == ["run_a", None]
    world.child("run_half")  # now whole
    world.look()
    assert world.admit() == "run_half"
    assert not (world.root / "run_link" / "nothing").exists() and world.phase("run_a") == "training"


def test_a_config_that_is_being_written_is_waited_for_and_a_wrong_one_fails_alone(world: World) -> None:
    world.child("run_good")
    bad = world.root / "run_bad"
    bad.mkdir()
    (bad / "run.yaml").write_text("trainer: {optim: {lr: much}}")
    world.look()
    assert world.phase("run_bad") is None
    (bad / "run.yaml").write_text("trainer: [")
    world.look(UNCHANGED_S)
    assert world.phase("run_bad") is None  # it changed: wait again
    world.look(UNCHANGED_S)
    state = read_state(bad)
    assert state is not None and state.phase == "failed" and "run.yaml" in (state.reason or "")
    assert world.admit() == "run_good"
    (bad / "run.yaml").unlink()
    world.child("run_bad")
    world.look(ENDED_LOOK_S)
    assert world.admit() is None  # it failed: only `runs resume` brings it back
    (bad / STATE).unlink()
    world.look(ENDED_LOOK_S)
    assert world.admit() == "run_bad"


def test_a_copied_directory_is_not_the_same_run_twice(world: World) -> None:
    path = world.child("run_a")
    world.look()
    assert world.admit() == "run_a"
    shutil.copytree(path, world.root / "run_b")
    world.look()
    assert world.look(UNCHANGED_S) == []
    state = read_state(world.root / "run_b")
    assert state is not None and state.phase == "failed" and "copied" in (state.reason or "")
    assert world.phase("run_a") == "training" and world.roster.training == ["run_a"]


def test_deleted_or_replaced_while_training(world: World) -> None:
    paths = [world.child("run_a"), world.child("run_b")]
    world.look()
    assert [world.admit(), world.admit()] == ["run_a", "run_b"]
    shutil.rmtree(paths[0])
    (leave,) = world.look()
    assert (leave.name, leave.phase) == ("run_a", "removed")
    world.roster.ended(leave.name, leave.phase, leave.reason)
    assert not paths[0].exists() and world.roster.training == ["run_b"]
    shutil.rmtree(paths[1])
    world.child("run_b")  # the same id again, another run
    (leave,) = world.look()
    assert leave.name == "run_b"
    world.roster.ended(leave.name, leave.phase, leave.reason)
    world.look()
    assert world.admit() == "run_b" and world.phase("run_b") == "training"


def test_a_deletion_that_failed_a_step_half_way_is_a_deletion(world: World) -> None:
    path, waiting = world.child("run_a"), world.child("run_b")
    world.look()
    assert world.admit() == "run_a"
    world.roster.ended("run_a", "failed", "No such file: weights")  # its run.yaml was deleted last
    assert world.phase("run_a") == "failed"
    for other in path.iterdir():
        if other.name != STATE:
            other.unlink() if other.is_file() else shutil.rmtree(other)
    shutil.rmtree(waiting)
    world.said.clear()
    world.look()
    assert {(name, state.phase) for name, state in world.said} == {("run_a", "removed"), ("run_b", "removed")}
    assert not path.exists() and not waiting.exists()
    world.child("run_a")
    world.look()
    assert world.admit() == "run_a"


def test_a_run_put_back_in_the_midst_of_its_deletion_is_gone(world: World) -> None:
    path = world.child("run_a")
    world.look()
    admission = world.roster.admit()
    assert admission is not None
    world.roster.put_back("run_a", BROKEN)
    shutil.rmtree(path)
    path.mkdir()
    write_state(path, ChildState("waiting"))  # the trainer's word came after the deletion
    world.said.clear()
    world.look()
    assert [(name, state.phase) for name, state in world.said] == [("run_a", "removed")]
    assert not path.exists() and world.roster.waiting == []
    world.child("run_a")
    world.look()
    assert world.admit() == "run_a"


def test_a_run_that_waits_again_or_is_stopped_meanwhile_keeps_its_progress(world: World) -> None:
    path = world.child("run_a")
    write_state(path, ChildState("training", slot=1, incarnation=3, step=6, num_tokens=70))
    world.begin(2)
    world.look()
    state = read_state(path)
    assert state is not None and (state.phase, state.slot, state.step, state.num_tokens) == ("waiting", None, 6, 70)
    (path / "STOP").touch()
    world.look()
    state = read_state(path)
    assert state is not None and (state.phase, state.step, state.incarnation) == ("stopped", 6, 3)


def test_a_run_that_cannot_be_read_is_tried_less_and_less_often(world: World) -> None:
    """All ranks try at once, and no other run takes a step meanwhile."""
    world.child("run_a")
    world.look()
    tried: list[float] = []
    while world.now < 400 and len(tried) < 7:
        if world.roster.admit() is not None:
            tried.append(world.now)
            world.roster.put_back("run_a", BROKEN)
        world.now += 1
    assert [after - before for before, after in pairwise(tried)] == [5, 10, 20, 40, 60, 60]
    world.now += 100
    assert world.admit() == "run_a"  # now it can be read
    world.roster.put_back("run_a", BROKEN)
    world.now += 5
    assert world.roster.admit() is not None


@pytest.mark.parametrize("error", [BROKEN, NoRoom("c: disk full")])
def test_that_nothing_can_be_read_or_begun_ends_the_attempt(world: World, error: NoRoom | Unreadable) -> None:
    world.child("run_a")
    world.look()
    with pytest.raises(type(error), match=r"^c: .*; waited 600 s \(supervisor.read_timeout_s\)"):
        for _ in range(20):
            if world.roster.admit() is not None:
                world.roster.put_back("run_a", error)
            world.now += 60


def test_a_full_disk_fails_no_run_that_would_begin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.child("run_a")
    world.look()
    claim, full = admission.claim_incarnation, [True]

    def refuse(*args: Any, **more: Any) -> int:
        if full:
            raise NoRoom("c: disk full") from OSError(28, "No space left on device")
        return claim(*args, **more)

    monkeypatch.setattr(admission, "claim_incarnation", refuse)
    assert world.admit() is None
    assert world.said[-1][1].phase == "waiting" and world.said[-1][1].reason == "c: disk full"
    full.clear()
    world.now += UNREAD_S
    assert world.admit() == "run_a"


def test_a_run_begins_once_there_is_room_for_all_that_it_writes_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.child("run_a")
    world.look()
    assert world.roster.admit() is not None
    world.roster.put_back("run_a", NoRoom("c: disk full; it takes about 10 B", 10))
    free = [5]
    monkeypatch.setattr(room, "free_bytes", lambda path: free[0])
    world.now += UNREAD_S
    assert world.roster.admit() is None and world.phase("run_a") == "waiting"
    free[0] = 10
    world.now += UNREAD_S
    assert world.roster.admit() is None, "it is looked for less and less often"
    world.now += UNREAD_S
    assert world.admit() == "run_a"


def test_stop_file(world: World) -> None:
    path = world.child("run_a")
    world.look()
    world.admit()
    (path / "STOP").touch()
    assert world.look() == [Leave("run_a", "stopped", "the file STOP was found", save=True)]
    assert world.look() == [] and (path / "STOP").exists(), "its last save may have no room, and the trainer be killed"
    world.roster.ended("run_a", "stopped", "the file STOP was found")
    assert not (path / "STOP").exists() and world.phase("run_a") == "stopped"


def test_an_end_that_had_no_room_to_be_written_is_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was found again as one that trains, and trained on."""
    path = world.child("run_a")
    world.look()
    world.admit()
    (path / "STOP").touch()
    world.look()

    def refuse(*args: Any) -> None:
        raise NoRoom("state.json: disk full")

    with monkeypatch.context() as full:
        full.setattr(run_slots, "write_state", refuse)
        world.roster.ended("run_a", "stopped", "asked")
        world.look()
    assert world.phase("run_a") == "training" and world.admit() is None and (path / "STOP").exists()
    world.look(ENDED_LOOK_S)
    assert world.phase("run_a") == "stopped" and world.admit() is None and not (path / "STOP").exists()


def test_a_stop_that_waited_for_the_next_trainer_is_obeyed(world: World) -> None:
    """`runs remove` leaves it there while the parent waits in the queue."""
    path = world.child("run_a")
    world.look()
    world.admit()
    (path / "STOP").touch()
    world.begin(2)
    world.look()
    assert world.admit() == "run_a"
    assert world.look() == [Leave("run_a", "stopped", "the file STOP was found", save=True)]


def test_a_new_trainer_takes_up_what_the_old_one_left(world: World) -> None:
    a, b = world.child("run_a", max_steps=7), world.child("run_b")
    world.look()
    assert [world.admit(), world.admit()] == ["run_a", "run_b"]
    world.roster.ended("run_b", "stopped", "asked")
    paths = RunPaths(a)
    for step in (1, 2, 3):  # without a checkpoint these are of no use to a new attempt
        with ArtifactWriter(
            paths.weights_step(step), kind="weights", step=step, version=step, writer="t", incarnation=1
        ) as writer:
            writer.write("x", [b"1"])
    world.begin(2)
    world.look()
    assert [world.admit(), world.admit()] == ["run_a", None]
    assert not list(paths.weights.iterdir()) and current_incarnation(paths) == 2
    state = read_state(a)
    assert state is not None and (state.parent_incarnation, state.incarnation, state.max_steps) == (2, 2, 7)
    assert world.phase("run_b") == "stopped" and b.exists()


def overtake(world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Something happens elsewhere when a trainer has chosen where a child goes on."""
    choose = admission.choose_newest

    def choose_and_stall(*args: Any, **named: Any) -> Choice:
        choice = choose(*args, **named)
        monkeypatch.setattr(admission, "choose_newest", choose)
        meanwhile()
        return choice

    monkeypatch.setattr(admission, "choose_newest", choose_and_stall)


def test_an_old_trainer_takes_no_run_over_from_the_new_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parent = world.child("run_a"), RunPaths(world.root)
    old, new = world.roster, World(world.root).begin(2)
    claim_incarnation(parent)
    for roster in (old, new):
        roster.look()

    def new_trainer() -> None:
        claim_incarnation(parent)
        admitted = new.admit()
        assert admitted is not None
        new.began(admitted, 0, {})

    overtake(world, monkeypatch, new_trainer)
    with pytest.raises(FencedError, match="incarnation 2"):
        old.admit()
    old.ended("run_a", "failed", "its writes are refused")
    state = read_state(path)
    assert state is not None and (state.phase, state.parent_incarnation) == ("training", 2)
    assert current_incarnation(RunPaths(path)) == 1


def test_a_run_that_an_old_trainer_has_just_claimed_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world.child("run_a")
    world.look()
    overtake(world, monkeypatch, lambda: claim_incarnation(RunPaths(path)))
    assert world.admit() is None and world.phase("run_a") == "waiting"
    world.now += UNREAD_S
    assert world.admit() == "run_a" and current_incarnation(RunPaths(path)) == 2


@pytest.mark.parametrize("saved", [0, 1])
def test_batches_that_no_attempt_wrote_outlive_one_that_was_killed(world: World, saved: int) -> None:
    paths = RunPaths(world.child("run_a"))
    for step in (1, 2, 3):
        write_batch(paths, step, [RankBatch.empty(1)], state={"step": step})
    world.look()
    assert world.admit() == "run_a"
    for step in range(1, saved + 1):
        make_checkpoint(paths, step, incarnation=1)
    write_batch(paths, 4, [RankBatch.empty(1)], state={}, incarnation=1)
    world.begin(2)
    world.look()
    assert world.admit() == "run_a" and list_batches(paths) == [1, 2, 3]
    assert wait_for_artifact(paths.rollouts_step(saved + 1), deadline_s=0.1, min_incarnation=2).incarnation == 0


def test_what_a_child_shares_must_be_its_parents(world: World) -> None:
    child = as_child(world.parent, world.root, "run_a")
    check_child(world.parent, child)
    own = {"seed": 3, "max_steps": 5, "async_level": 0, "seq_len": 32}
    check_child(world.parent, child.model_copy(update=own))
    updates = child.trainer.model_copy(update={"num_mini_batches": 2, "epochs_per_batch": 3})
    check_child(world.parent, child.model_copy(update={"trainer": updates}))
    other = child.model_copy(
        update={
            "seq_len": 128,
            "model": child.model.model_copy(update={"name": "other"}),
            "trainer": child.trainer.model_copy(update={"num_ranks": 4}),
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_child(world.parent, other)
    assert {p.key for p in caught.value.problems} == {
        "model.name",
        "trainer.num_ranks",
        "seq_len",
        "trainer.micro_batch_tokens",
    }
    with pytest.raises(ConfigError, match="leave it out"):
        check_child(world.parent, world.parent)


def test_names() -> None:
    assert child_name("a") == "run_a" and child_name("run_a.1-b") == "run_a.1-b"
    assert [child_name(bad) for bad in ("", "run_", "../x", "a/b", "a b", ".a", "x" * 200)] == [None] * 7


def test_a_broken_state_file_is_no_state(world: World) -> None:
    path = world.child("run_a")
    (path / STATE).write_text('{"phase": "do')
    world.look()
    assert world.admit() == "run_a"
