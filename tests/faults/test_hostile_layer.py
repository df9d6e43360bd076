"""The store's promises under drawn schedules: several nodes with old views, lives that overlap, kills, full disks.

Promises (prime_hpc/README.md, "Nothing is lost"): an artifact is whole or not there; a reader gets the right one before
its deadline or an error that names the file; nothing is deleted that a registered reader or a whole checkpoint needs; a
new attempt goes on from a whole checkpoint; an older attempt harms nothing of a newer one.
"""

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loguru import logger

from prime_hpc.store.artifact import ArtifactWriter, clean_stale_stages, hash_files, prepare_stage
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.batches import prune_batches, remove_batches_after
from prime_hpc.store.checkpoint.checkpoints import (
    commit_checkpoint,
    move_checkpoints_aside,
    newest_first,
    prune_checkpoints,
)
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.io.files import make_dir, write_file
from prime_hpc.store.leases import set_floor
from prime_hpc.store.manifest import read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, list_steps
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import prune_weights, remove_versions_after
from tests.support.hostile.layer import Client, Killed, World
from tests.unit.test_store_batches import assert_equal, make_rank

NODES = ("n1", "n2", "n3")
DEADLINE_S = 120.0
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of little files: no disk is needed to show anything here."""
FAULTS = st.one_of(
    st.none(),
    st.tuples(st.just("kill"), st.integers(0, 25)),
    st.tuples(st.sampled_from([errno.ENOSPC, errno.EIO, errno.EDQUOT]), st.integers(0, 25)),
)
KINDS = {"batch": "rollouts", "weights": "weights", "checkpoint": "checkpoints"}


class Life:
    """One attempt of the run: its processes live on one node."""

    def __init__(self, client: Client, incarnation: int, step: int) -> None:
        self.client, self.incarnation, self.step = client, incarnation, step
        self.paths = RunPaths(client.root / "run")
        self.dead = False

    @property
    def rank(self):
        """What its batches hold: differs from every other attempt's."""
        return make_rank([3, 4], [1, 1], seed=1000 * self.incarnation + self.step)


class HostileStore(RuleBasedStateMachine):
    """Writers, readers, retention and lives in any order."""

    @initialize(seed=st.integers(0, 2**32 - 1), stale=st.booleans())
    def begin(self, seed: int, stale: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-", dir=MEMORY))
        self.world = World(self.folder, random.Random(seed))
        self.clients = {name: self.world.client(name) for name in NODES}
        self.server = RunPaths(self.world.server / "run")
        self.whole: dict[tuple[str, int], int] = {}  # (kind, step) -> life that committed it and has not removed it
        self.content: dict[tuple[int, int], object] = {}
        self.floor: int | None = None
        self.lives: list[Life] = []
        with self.world.installed():
            paths = RunPaths(self.clients["n1"].root / "run")
            for directory in (paths.rollouts, paths.weights, paths.checkpoints, paths.leases, paths.incarnation):
                make_dir(directory)
            self.world.settle()
            self.lives.append(Life(self.clients["n1"], claim_incarnation(paths), 0))
        self.stale = stale

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def newest(self) -> Life:
        return self.lives[-1]

    def attempt(self, life: Life, fault, work) -> bool:
        """Do `work` as an attempt; what may go wrong goes wrong. Returns whether it was done to its end."""
        if fault is not None and fault[0] == "kill":
            life.client.kill_at(fault[1])
        elif fault is not None:
            life.client.fail_at(fault[1], fault[0])
        life.client.stale_reads = self.stale
        try:
            with self.world.installed():
                work()
            return True
        except Killed:
            for other in self.lives:
                other.dead |= other.client is life.client  # the node went down
            return False
        except FencedError:
            assert life is not self.newest, "the newest life was fenced"
            life.dead = True
            return False
        except (StoreError, OSError) as error:
            # An older attempt may end by anything; the newest one by a fault, and then with words for a user.
            is_clear = isinstance(error, StoreError) or error.errno in (errno.ESTALE, errno.EIO)
            assert is_clear or life is not self.newest, repr(error)
            assert fault is not None or self.stale or life is not self.newest, f"without any fault: {error!r}"
            return False
        finally:
            life.client.revive()
            life.client.stale_reads = False

    def commit(self, life: Life, kind: str, step: int, fault, work) -> bool:
        """`attempt` of something that commits an artifact; what counts is whether the server has it."""
        done = self.attempt(life, fault, work)
        path = (
            self.world.server / "run" / KINDS[kind] / (f"step_{step}" if kind == "checkpoint" else f"step_{step:06d}")
        )
        has = path.exists() and read_manifest(path).incarnation == life.incarnation
        assert has or not done, f"{kind} {step} was reported as committed and is not there"
        if has and life is self.newest:
            self.whole[kind, step] = life.incarnation
        return has

    def pick(self, index: int) -> Life | None:
        alive = [life for life in self.lives if not life.dead]
        return alive[-1 - index % len(alive)] if alive else None

    @rule(which=st.integers(0, 2), fault=FAULTS)
    def step(self, which: int, fault) -> None:
        """A batch, and the version that comes of it."""
        life = self.pick(which)
        if life is None:
            return
        life.step += 1
        n, rank = life.step, life.rank
        if not self.commit(
            life,
            "batch",
            n,
            fault,
            lambda: write_batch(life.paths, n, [rank], state={"step": n}, incarnation=life.incarnation),
        ):
            life.step -= 1
            return
        self.content[life.incarnation, n] = rank

        def publish() -> None:
            final = life.paths.weights_step(n)
            with ArtifactWriter(
                final, kind="weights", step=n, version=n, writer="trainer", incarnation=life.incarnation
            ) as w:
                w.write("model.safetensors", [f"{life.incarnation} {n}".encode() * 50])

        if not life.dead:
            self.commit(life, "weights", n, None, publish)

    @rule(which=st.integers(0, 2), fault=FAULTS)
    def checkpoint(self, which: int, fault) -> None:
        life = self.pick(which)
        if life is None or (life is self.newest and ("weights", life.step) not in self.whole) or life.step == 0:
            return

        def save() -> None:
            stage = prepare_stage(life.paths.checkpoint_step(life.step), life.incarnation, run=life.paths)
            make_dir(stage / "trainer")
            write_file(stage / "trainer" / "shard", [f"{life.incarnation} {life.step}".encode() * 30])
            entries = hash_files(stage, ["trainer/shard"])
            batch_dir = life.paths.rollouts_step(life.step)
            commit_checkpoint(life.paths, life.step, entries, batch_dir, incarnation=life.incarnation)

        self.commit(life, "checkpoint", life.step, fault, save)

    @rule(which=st.integers(0, 2), keep=st.integers(1, 2), fault=FAULTS)
    def retention(self, which: int, keep: int, fault) -> None:
        life = self.pick(which)
        if life is None:
            return

        def prune() -> None:
            prune_checkpoints(life.paths, keep, None, life.incarnation)
            prune_weights(life.paths, keep, life.incarnation)
            prune_batches(life.paths, keep, life.step, life.incarnation)

        before = {kind: set(list_steps(self.world.server / "run" / place, 0 if kind == "checkpoint" else 6))
                  for kind, place in KINDS.items()}  # fmt: skip
        self.attempt(life, fault, prune)
        for kind, place in KINDS.items():
            gone = before[kind] - set(list_steps(self.world.server / "run" / place, 0 if kind == "checkpoint" else 6))
            for n in gone:
                owner = self.whole.get((kind, n))
                assert owner is None or life is self.newest, f"attempt {life.incarnation} removed {kind} {n} of {owner}"
                assert kind != "weights" or self.floor is None or n < self.floor, f"a reader still needs version {n}"
                self.whole.pop((kind, n), None)

    @rule(ahead=st.integers(0, 1))
    def reader_moves_on(self, ahead: int) -> None:
        """The registered reader has read the newest version but `ahead`, and needs no older one."""
        versions = [n for kind, n in self.whole if kind == "weights"]
        if not versions:
            return
        floor = max(self.floor or 0, max(versions) - ahead)
        with self.world.installed():
            set_floor(RunPaths(self.clients["n2"].root / "run"), "orchestrator", floor)
        if self.floor is None:
            self.world.settle()  # registered before anything is deleted: the orchestrator does it at its start
        self.floor = floor

    @rule(node=st.sampled_from(NODES), back=st.integers(0, 2))
    def read(self, node: str, back: int) -> None:
        """A reader on any node gets the newest life's batch, or a clear error where there is none."""
        life, client = self.newest, self.clients[node]
        step = max(1, life.step - back)
        path = RunPaths(client.root / "run").rollouts_step(step)
        client.stale_reads = self.stale
        try:
            with self.world.installed():
                found = wait_for_artifact(path, deadline_s=DEADLINE_S, min_incarnation=life.incarnation)
                batch = read_rank_batch(path, 0, deadline_s=DEADLINE_S)
        except StoreError as error:
            assert ("batch", step) not in self.whole, f"batch {step} is there and was not found: {error}"
            assert str(path) in str(error) or path.name in str(error)
            return
        finally:
            client.stale_reads = False
        assert found.incarnation == life.incarnation
        assert_equal(batch, self.content[life.incarnation, step])

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        with self.world.installed():
            self.world.sleep(seconds)

    @rule(node=st.sampled_from(NODES), fault=FAULTS)
    def new_life(self, node: str, fault) -> None:
        """Another attempt begins, perhaps on another node, while the former one may still write."""
        client = self.clients[node]
        paths = RunPaths(client.root / "run")
        former = [life for life in self.lives if life.client is not client]
        life = Life(client, 0, 0)

        def rise() -> None:
            life.incarnation = claim_incarnation(paths)
            self.lives = [*former, life]
            self.floor = None
            self.whole = {}
            life.step = next((info.step for info in newest_first(paths.checkpoints, deep=True)), 0)
            move_checkpoints_aside(paths, life.step, life.incarnation)
            remove_batches_after(paths, life.step, life.incarnation)
            remove_versions_after(paths, life.step, life.incarnation)
            for parent in (paths.checkpoints, paths.rollouts, paths.weights):
                clean_stale_stages(parent)

        self.lives = former  # one node runs one attempt at a time
        done = self.attempt_to_rise(life, fault, rise)
        if not done:  # the next try, undisturbed
            self.attempt_to_rise(life, None, rise)
        assert self.lives[-1] is life

    def attempt_to_rise(self, life: Life, fault, rise) -> bool:
        self.lives = [*[other for other in self.lives if other is not life], life]
        life.dead = False
        stale, self.stale = self.stale, self.stale and fault is not None
        try:
            return self.attempt(life, fault, rise)
        finally:
            self.stale = stale
            life.dead = False

    @invariant()
    @precondition(lambda self: hasattr(self, "server"))
    def everything_with_a_name_is_whole(self) -> None:
        for kind, place in KINDS.items():
            parent = self.world.server / "run" / place
            for n in list_steps(parent, 0 if kind == "checkpoint" else 6):
                verify_artifact(parent / (f"step_{n}" if kind == "checkpoint" else f"step_{n:06d}"), deep=True)

    @invariant()
    @precondition(lambda self: hasattr(self, "server"))
    def nothing_of_the_newest_life_is_lost(self) -> None:
        for (kind, n), incarnation in self.whole.items():
            parent = self.world.server / "run" / KINDS[kind]
            manifest = read_manifest(parent / (f"step_{n}" if kind == "checkpoint" else f"step_{n:06d}"))
            assert manifest.incarnation == incarnation, (
                f"{kind} {n} of attempt {incarnation} is now {manifest.incarnation}'s"
            )
            if kind == "checkpoint":
                assert ("weights", n) in self.whole or n not in list_steps(self.server.weights), n
                assert n in list_steps(self.server.weights), f"the weights of checkpoint {n} are gone"


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of warnings about things that are tried on purpose."""
    logger.disable("prime_hpc")
    yield
    logger.enable("prime_hpc")


TestHostileStore = HostileStore.TestCase
TestHostileStore.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
