"""How many metadata calls one RL step costs the shared file system, by role, at 32 trainer ranks. Upper bounds.

prime_hpc/README.md names these numbers. Each role's share is played with the store's own functions in the order in
which the role calls them (`orchestrator/loop.py`, `trainer/rl.py`, `trainer/weights/publish.py`,
`orchestrator/weight_sync.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.artifact import commit_stage, hash_files, prepare_stage
from prime_hpc.store.batch.rank_files import read_rank_batches, write_batch
from prime_hpc.store.batches import prune_batches
from prime_hpc.store.leases import set_floor
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import Handover, HandoverServer
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import prune_weights
from tests.support.hostile.count import Calls, counted
from tests.unit.test_store_batches import make_rank

NUM_RANKS = 32
SOURCE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WAIT_S = 200.0


class Roles:
    """Everybody of one run, in one process."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        for directory in (self.paths.rollouts, self.paths.weights, self.paths.leases):
            directory.mkdir(parents=True)
        claim_incarnation(self.paths)
        self.hub = BusServer()
        self.writer, self.reader = (BusClient(self.hub.address, role) for role in ("orchestrator", "trainer"))
        self.writer.publish("hello")
        assert self.writer.wait("hello", lambda _: True, WAIT_S) is not None
        self.server = HandoverServer(self.writer)
        self.handover = Handover(self.reader, "batch", "step")
        self.ranks = [make_rank([20, 30], [1, 1], seed=r) for r in range(NUM_RANKS)]

    def close(self) -> None:
        self.server.close()
        self.writer.close()
        self.reader.close()
        self.hub.close()

    def write_batch(self, step: int) -> None:
        """The orchestrator, when a batch is full."""
        manifest = write_batch(self.paths, step, self.ranks, state={"step": step}, incarnation=1)
        source = self.server.offer(self.paths.rollouts_step(step))
        self.writer.publish("batch", step=step, digest=manifest.digest, source=source)
        assert self.reader.wait("batch", lambda m: m["step"] >= step, WAIT_S) is not None

    def take_batch(self, step: int, rank: int, handover: Handover | None) -> None:
        """A trainer rank, at the beginning of a step."""
        directory = self.paths.rollouts_step(step)
        if rank == 0:
            wait_for_artifact(
                directory,
                deadline_s=WAIT_S,
                bus=self.reader,
                topic="batch",
                key={"step": step},
                names=(),
                handover=handover,
                min_incarnation=1,
            )
        read_rank_batches(directory, lambda _: [rank], handover=handover)

    def begin_version(self, step: int) -> Path:
        """Trainer rank 0, before anybody writes."""
        return prepare_stage(self.paths.weights_step(step), 1, run=self.paths)

    def write_shard(self, stage: Path, rank: int) -> dict:
        """A trainer rank's part of a version (the bytes by safetensors, which opens the file once)."""
        name = f"model-{rank + 1:05d}-of-{NUM_RANKS:05d}.safetensors"
        save_file({}, stage / name)
        return hash_files(stage, [name])

    def commit_version(self, stage: Path, step: int, entries: dict) -> None:
        """Trainer rank 0, after all: small files, manifest, rename, retention."""
        for name in SOURCE_FILES:
            (stage / name).write_text("{}")
        entries = entries | hash_files(stage, SOURCE_FILES)
        manifest = Manifest("weights", step, step, "trainer", 1, entries)
        commit_stage(stage, self.paths.weights_step(step), manifest, run=self.paths)
        self.writer.publish("weights", version=step, digest=manifest.digest)
        assert self.reader.wait("weights", lambda m: m["version"] >= step, WAIT_S) is not None
        prune_weights(self.paths, 2, 1)
        prune_batches(self.paths, 4, step, 1)

    def serve(self, step: int) -> None:
        """The orchestrator, when a version is announced and served."""
        wait_for_artifact(
            self.paths.weights_step(step),
            deadline_s=WAIT_S,
            bus=self.reader,
            topic="weights",
            key={"version": step},
            names=(),
            min_incarnation=1,
        )
        set_floor(self.paths, "orchestrator", step)


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(tmp_path / "run")
    yield roles
    roles.close()


def one_step(roles: Roles, step: int, *, by_files: bool = False) -> dict[str, Calls]:
    """All roles' shares of a step."""
    handover = None if by_files else roles.handover
    shares: dict[str, Calls] = {}
    with counted(roles.paths.root) as shares["orchestrator writes the batch"]:
        roles.write_batch(step)
    with counted(roles.paths.root) as shares["rank 0 takes it"]:
        roles.take_batch(step, 0, handover)
    with counted(roles.paths.root) as shares["another rank takes it"]:
        roles.take_batch(step, 1, handover)
    with counted(roles.paths.root) as shares["rank 0 begins a version"]:
        stage = roles.begin_version(step)
    entries: dict = {}
    for rank in range(NUM_RANKS):
        with counted(roles.paths.root) as shares["a rank writes its shard"]:
            entries |= roles.write_shard(stage, rank)
    with counted(roles.paths.root) as shares["rank 0 commits and prunes"]:
        roles.commit_version(stage, step, entries)
    with counted(roles.paths.root) as shares["orchestrator serves it"]:
        roles.serve(step)
    return shares


BOUNDS = {  # handed over, and with the bus's short way shut
    "orchestrator writes the batch": (90, 90),
    "rank 0 takes it": (3, 12),  # handed over: the writer opens the files on its own node, ranks ask for nothing
    "another rank takes it": (2, 10),
    "rank 0 begins a version": (6, 6),
    "a rank writes its shard": (5, 5),
    "rank 0 commits and prunes": (210, 210),  # 70 of them remove an old version's and an old batch's files
    "orchestrator serves it": (10, 10),
}


@pytest.mark.parametrize("by_files", [False, True])
def test_a_step_of_32_ranks_stays_below_its_bounds(roles: Roles, by_files: bool) -> None:
    for step in range(1, 8):  # retention is at work by then
        shares = one_step(roles, step, by_files=by_files)
    found = {share: calls.total for share, calls in shares.items()}
    print(json.dumps({share: [calls.total, dict(calls.kinds)] for share, calls in shares.items()}, indent=1))
    for share, bounds in BOUNDS.items():
        assert found[share] <= bounds[by_files], (share, found[share], shares[share].paths)


def test_sixty_seconds_of_heartbeats_of_a_rank_cost_little(tmp_path: Path, roles: Roles) -> None:
    context = RoleContext(role="trainer", run_dir=tmp_path / "run", index=5)
    status = RoleStatus(context, roles.writer)
    status.ready()
    with counted(tmp_path) as calls:
        for _ in range(12):
            status.heartbeat()
    assert calls.total == 0  # the bus carries them
    with counted(tmp_path) as calls:
        RoleStatus(context, BusClient(None, "trainer")).heartbeat()
    assert 0 < calls.total <= 4
    writer = MetricsWriter(tmp_path / "run" / "metrics" / "trainer.jsonl")
    with counted(tmp_path) as calls:
        writer.log(1, loss=0.5)
    writer.close()
    assert calls.total <= 1
