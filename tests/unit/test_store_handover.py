"""Files straight from their writer: what comes is checked, and whatever fails is read from disk."""

import json
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch, read_rank_batches, write_batch
from prime_hpc.store.io import files
from prime_hpc.store.manifest import MANIFEST
from prime_hpc.store.messaging import file_transfer
from prime_hpc.store.messaging.auth import prove
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import Handover, HandoverServer
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import wait_for_artifact
from tests.support.runs import free_port
from tests.unit.test_store_batches import assert_equal, make_rank

WAIT_S = 200.0


class Pair:
    """An orchestrator's and a trainer rank's end. The reader sees the run under another name, `seen`."""

    def __init__(self, root: Path) -> None:
        self.written, self.seen = RunPaths(root / "writer"), RunPaths(root / "reader")
        self.hub = BusServer()
        self.writer, self.reader = (BusClient(self.hub.address, role) for role in ("orchestrator", "trainer"))
        assert self.reader.wait("nothing", bool, 0.0) is None
        self.server = HandoverServer(self.writer)
        self.handover = Handover(self.reader, "batch", "step")
        self.ranks = [make_rank([5, 9], [1, 1], seed=r) for r in range(3)]

    def write(self, step: int, **changes: object) -> None:
        """Commit and announce a batch."""
        manifest = write_batch(self.written, step, self.ranks, state={"step": step})
        self.writer.publish("hello")
        assert self.writer.wait("hello", lambda _: True, WAIT_S) is not None  # it knows its own address by now
        source = self.server.offer(self.written.rollouts_step(step))
        self.writer.publish("batch", **({"step": step, "digest": manifest.digest, "source": source} | changes))
        assert self.reader.wait("batch", lambda m: m["step"] >= step, WAIT_S) is not None

    def read(self, step: int, rank: int) -> RankBatch:
        """As a trainer rank does."""
        directory = self.seen.rollouts_step(step)
        return read_rank_batches(directory, lambda _: [rank], handover=self.handover, deadline_s=0.0)[0]

    def close(self) -> None:
        """Everything down."""
        self.server.close()
        for bus in (self.writer, self.reader):
            bus.close()
        self.hub.close()


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_a_batch_that_the_reader_cannot_see_is_handed_over(pair):
    pair.write(1)
    pair.write(2)
    key = {"step": 1}
    found = wait_for_artifact(
        pair.seen.rollouts_step(1),
        deadline_s=WAIT_S,
        bus=pair.reader,
        topic="batch",
        key=key,
        handover=pair.handover,
    )
    assert found.step == 1 and not pair.seen.root.exists()
    for rank in range(3):
        assert_equal(pair.read(1, rank), pair.ranks[rank])
        assert_equal(pair.read(2, rank), pair.ranks[rank])
    batches = read_rank_batches(pair.seen.rollouts_step(2), range, handover=pair.handover)
    assert len(batches) == 3
    with pytest.raises(ValueError, match="packed for 3 ranks"):
        pair.written.root.rename(pair.seen.root)
        pair.read(2, 3)


def test_nothing_is_asked_of_the_file_system(pair, monkeypatch):
    pair.write(1)
    touched: list[object] = []
    monkeypatch.setattr(files, "list_dir", touched.append)
    monkeypatch.setattr(Path, "read_bytes", touched.append)
    pair.read(1, 0)
    assert touched == []


@pytest.mark.parametrize("damage", ["flipped", "short", "manifest", "other", "gone"])
def test_what_is_wrong_is_noticed_and_the_files_are_read(pair, damage):
    """The writer's copy is broken in memory or on its node: the reader's view of the shared file system decides."""
    pair.write(1, **({"digest": "0" * 16} if damage == "other" else {}))
    write_batch(pair.seen, 1, pair.ranks, state={"step": 1})
    mine = pair.written.rollouts_step(1)
    file = mine / (MANIFEST if damage == "manifest" else "rank_0001.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage in ("flipped", "manifest"):
        file.write_bytes(bytes(content))
    elif damage == "short":
        file.write_bytes(bytes(content[:-1]))
    elif damage == "gone":
        file.unlink()
    assert pair.handover.fetch(mine, 1, lambda m: ["rank_0001.safetensors"]) is None
    assert_equal(pair.read(1, 1), pair.ranks[1])


def test_a_source_that_cannot_be_reached_is_left_alone_for_a_while(pair, monkeypatch):
    closed = free_port()
    pair.write(1, source=f"127.0.0.1:{closed}")
    tried = []
    connect = file_transfer._connect

    def try_to_connect(source, secret):
        tried.append(source)
        return connect(source, secret)

    monkeypatch.setattr(file_transfer, "_connect", try_to_connect)
    pair.written.root.rename(pair.seen.root)
    for _ in range(3):
        assert_equal(pair.read(1, 0), pair.ranks[0])
    assert len(tried) == 1
    assert pair.handover._avoid[f"127.0.0.1:{closed}"] > time.monotonic()


def test_only_what_is_on_offer_is_handed_out(pair, tmp_path):
    (tmp_path / "writer").mkdir(exist_ok=True)
    (tmp_path / "writer" / "run.yaml").write_text("api_key: x")
    pair.write(1)

    def ask(**request: object) -> dict:
        host, _, port = pair.reader.latest("batch")["source"].rpartition(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            prove(connection, pair.reader.secret, file_transfer.PURPOSE)
            connection.settimeout(WAIT_S)
            connection.sendall(json.dumps(request).encode() + b"\n")
            return json.loads(connection.makefile("rb").readline())

    assert "size" in ask(artifact="rollouts/step_000001", file=MANIFEST)
    assert "error" in ask(artifact="rollouts/step_000001", file="../../run.yaml")
    assert "error" in ask(artifact="rollouts/step_000002", file=MANIFEST)
    assert "error" in ask(artifact=".", file="run.yaml")
    assert "error" in ask(artifact=None)


def test_old_batches_are_offered_no_more(pair):
    for step in range(1, file_transfer.NUM_OFFERED + 3):
        pair.server.offer(pair.written.rollouts_step(step))
    pair.write(file_transfer.NUM_OFFERED + 3)
    assert pair.handover.fetch(pair.seen.rollouts_step(1), 1, lambda _: ()) is None
    assert not pair.handover._avoid  # that is no reason to avoid it
    assert pair.handover.fetch(pair.seen.rollouts_step(file_transfer.NUM_OFFERED + 3), 1, lambda _: ()) is not None


def test_without_a_bus_the_files_are_read(tmp_path):
    silent = BusClient(None, "orchestrator")
    server = HandoverServer(silent)
    paths = RunPaths(tmp_path)
    rank = make_rank([4], [1])
    write_batch(paths, 1, [rank], state={})
    assert server.offer(paths.rollouts_step(1)) is None
    reader = Handover(silent, "batch", "step")
    assert_equal(read_rank_batches(paths.rollouts_step(1), lambda _: [0], handover=reader)[0], rank)
    assert np.array_equal(read_rank_batch(paths.rollouts_step(1), 0).token_ids, rank.token_ids)
    server.close()
