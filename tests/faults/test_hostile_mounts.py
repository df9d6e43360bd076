"""Two nodes as two FUSE mounts, with the kernel's own caches: batches, versions, leases, lives, errors of the disk.

Delays are shortened (the tool's are 5 s for names and 30 s for misses: `tools/bench latency`); nothing asserts a time.
"""

import errno
import gzip
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
import zstandard
from loguru import logger
from pyarrow import parquet

from prime_hpc.config.sections.sft import SFTDataConfig, SFTSourceConfig
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.batch.rank_files import read_rank_batches, write_batch
from prime_hpc.store.batches import read_state
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.errors import ArtifactTimeout, StoreError
from prime_hpc.store.io import retry_reads
from prime_hpc.store.io.files import make_dir
from prime_hpc.store.leases import min_floor, set_floor
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import Handover, HandoverServer
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import list_versions, prune_weights
from prime_hpc.trainer.data.messages import DataChangedError
from prime_hpc.trainer.data.sources import ArrowRows, JsonLines, open_rows
from tests.support.hostile.mount import Node, hostile_mounts, why_not
from tests.unit.test_store_batches import assert_equal, make_rank

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"hostile mounts: {why_not()}")
NAMES_S, MISSES_S = 1.0, 2.0
WAIT_S = 200.0


def names(directory: Path) -> list[str]:
    """By a listing, which asks for no name."""
    return [path.name for path in directory.iterdir()]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with hostile_mounts(
        tmp_path_factory.mktemp("hostile"), names_s=NAMES_S, misses_s=MISSES_S, attributes_s=1.0
    ) as mounted:
        yield mounted


@pytest.fixture
def pair(nodes: list[Node], request: pytest.FixtureRequest) -> tuple[RunPaths, RunPaths]:
    """One run as the two nodes name it."""
    return tuple(RunPaths(node.path / request.node.name.partition("[")[0]) for node in nodes)  # type: ignore[return-value]


def test_the_mounts_are_as_hostile_as_they_say(nodes: list[Node]) -> None:
    one, two = (node.path for node in nodes)
    (one / "a").write_text("first")
    assert (one / "a").read_text() == "first"
    assert "a" not in names(two)
    assert not (two / "b").exists()  # from now on the kernel remembers that
    (one / "b").write_text("x")
    while "b" not in names(two):
        time.sleep(0.02)
    assert (two / "a").read_text() == "first"
    (one / "a.new").write_text("second")
    (one / "a.new").replace(one / "a")
    assert (two / "a").read_text() == "first"
    (one / "d").mkdir()
    assert "d" not in names(two)
    with pytest.raises(FileExistsError):
        (two / "d").mkdir()
    os.close(os.open(two / "c", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    with pytest.raises(FileExistsError):  # the server decides, though this node does not see it
        os.open(one / "c", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


@pytest.mark.parametrize("way", ["handed over", "files", "cut"])
def test_a_batch_reaches_the_other_node(pair: tuple[RunPaths, RunPaths], way: str) -> None:
    written, read = pair
    step = ["handed over", "files", "cut"].index(way) + 1
    hub = BusServer() if way != "cut" else None
    buses = [BusClient(hub.address if hub else None, role) for role in ("orchestrator", "trainer")]
    server = HandoverServer(buses[0])
    handover = Handover(buses[1], "batch", "step") if way == "handed over" else None
    ranks = [make_rank([50, 60], [1, 1], seed=r) for r in range(2)]

    def produce() -> None:
        manifest = write_batch(written, step, ranks, state={"step": step})
        source = server.offer(written.rollouts_step(step))
        buses[0].publish("batch", step=step, digest=manifest.digest, source=source)

    timer = threading.Timer(0.3, produce)
    timer.start()
    try:
        directory = read.rollouts_step(step)
        found = wait_for_artifact(
            directory, deadline_s=WAIT_S, bus=buses[1], topic="batch", key={"step": step}, handover=handover
        )
        batches = read_rank_batches(directory, range, handover=handover, deadline_s=WAIT_S)
        assert found.step == step
        for batch, rank in zip(batches, ranks, strict=True):
            assert_equal(batch, rank)
        assert read_state(directory, deadline_s=WAIT_S) == {"step": step}
    finally:
        timer.join()
        server.close()
        for bus in buses:
            bus.close()
        if hub is not None:
            hub.close()


def test_a_name_that_was_missed_once_is_found_before_the_deadline(pair: tuple[RunPaths, RunPaths]) -> None:
    written, read = pair
    make_dir(written.rollouts)
    while not read.rollouts.is_dir():
        time.sleep(0.1)
    assert not read.rollouts_step(1).exists()  # too early: the kernel remembers the miss
    write_batch(written, 1, [make_rank([4], [1])], state={})
    assert wait_for_artifact(read.rollouts_step(1), deadline_s=WAIT_S).step == 1
    with pytest.raises(ArtifactTimeout, match=r"step_000002 .*neither announced nor listed"):
        wait_for_artifact(read.rollouts_step(2), deadline_s=0.3)


def publish(paths: RunPaths, version: int, incarnation: int = 0) -> None:
    with ArtifactWriter(
        paths.weights_step(version), kind="weights", version=version, writer="trainer", incarnation=incarnation
    ) as writer:
        writer.write("model.safetensors", [bytes([version]) * 5000])


def test_retention_heeds_the_other_nodes_leases(pair: tuple[RunPaths, RunPaths]) -> None:
    trainer, reader = pair
    for version in (1, 2, 3):
        publish(trainer, version)
    while list_versions(reader) != [1, 2, 3]:
        time.sleep(0.1)
    set_floor(reader, "orchestrator", 2)
    while min_floor(trainer) is None:  # registered before anything is deleted
        time.sleep(0.1)
    set_floor(reader, "orchestrator", 3)  # the trainer's node sees the older floor for a while: it keeps more
    assert prune_weights(trainer, 1) in ([1], [1, 2])
    verify_artifact(trainer.weights_step(3), deep=True)
    verify_artifact(reader.weights_step(3), deep=True, deadline_s=WAIT_S)


def test_lives_on_two_nodes_get_two_numbers(pair: tuple[RunPaths, RunPaths]) -> None:
    one, two = pair
    claimed = [claim_incarnation(one)]
    while not two.incarnation.is_dir():
        time.sleep(0.1)
    for _ in range(3):
        claimed += [claim_incarnation(one), claim_incarnation(two)]
    assert claimed == list(range(1, 8))


@pytest.mark.parametrize("op", ["create", "write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EIO"])
def test_errors_of_the_file_system_leave_nothing(
    nodes: list[Node], pair: tuple[RunPaths, RunPaths], op: str, number: str
) -> None:
    paths = RunPaths(pair[0].root / f"{op}-{number}")
    make_dir(paths.weights)
    nodes[0].fail(op=op, errno=number, match="weights/.stage", times=100)
    with pytest.raises(StoreError, match="MiB free"):
        publish(paths, 1)
    nodes[0].ask()
    assert names(paths.weights) == []
    publish(paths, 1)
    verify_artifact(paths.weights_step(1), deep=True)


def test_stale_handles_pass(nodes: list[Node], pair: tuple[RunPaths, RunPaths]) -> None:
    written, read = pair
    rank = make_rank([40], [1])
    write_batch(written, 1, [rank], state={})
    while not (read.rollouts_step(1) / "manifest.json").exists():
        time.sleep(0.2)
    nodes[1].fail(op="open", errno="ESTALE", match="rollouts", times=3)
    assert_equal(read_rank_batches(read.rollouts_step(1), lambda _: [0], deadline_s=WAIT_S)[0], rank)
    assert json.loads(nodes[1].control.read_text())["faults"]
    nodes[1].ask()


@pytest.mark.parametrize("number", ["EIO", "ESTALE"])
def test_rows_that_cannot_be_read_now_are_waited_for(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """The file that SFT trains on: as its index is made, in the middle of the run, and for good."""
    path = nodes[0].path / f"{number}.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 1000, "row": row}) + "\n" for row in range(2000)))
    waited: list[str] = []

    def mend(message: str) -> None:
        waited.append(message)
        nodes[0].ask()

    def refuse() -> None:
        path.open().close()  # the kernel forgets what it had read
        nodes[0].fail(op="read", errno=number, match=path.name, times=10**9)

    sink = logger.add(mend, filter=lambda record: "cannot be read now" in record["message"])
    refuse()
    rows = JsonLines(path, tmp_path)
    refuse()
    assert (rows.num_rows, rows.row(1500)["row"], len(waited)) == (2000, 1500, 2)
    logger.remove(sink)
    monkeypatch.setattr(retry_reads, "FILE_S", 0.1)
    refuse()
    with pytest.raises(OSError, match=path.name) as found:
        rows.row(700)
    assert found.value.errno == getattr(errno, number)
    nodes[0].ask()
    path.with_suffix(".new").write_text('{"row": 0}\n' * 2000)
    path.with_suffix(".new").replace(path)
    with pytest.raises(DataChangedError, match=f"{path.name} has changed since the run began"):
        rows.row(300)
    path.write_text("{}\n")
    assert rows.where(1500).startswith(str(path)), "of a file that is shorter now"


@pytest.mark.parametrize("number", ["EIO", "ESTALE"])
def test_parquet_that_cannot_be_read_now_is_not_taken_for_bad_data(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """A run that ends by bad data stays down."""
    monkeypatch.setattr(retry_reads, "FILE_S", 0.1)
    path = nodes[0].path / f"{number}.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a" * 9] * 999, "completion": ["b"] * 999}), path)
    nodes[0].fail(op="read", errno=number, match=path.name, times=10**9)
    with pytest.raises(OSError) as found:
        ArrowRows(path, tmp_path, SFTSourceConfig())
    assert found.value.errno == getattr(errno, number) and list(tmp_path.glob("*")) == []
    nodes[0].ask()
    assert ArrowRows(path, tmp_path, SFTSourceConfig()).num_rows == 999


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_packed_rows_that_cannot_be_read_now_are_waited_for(nodes: list[Node], tmp_path: Path, suffix: str) -> None:
    """As they are unpacked: by a stale handle nothing more is to be had."""
    rows = [{"prompt": random.Random(row).randbytes(700).hex(), "completion": str(row)} for row in range(5000)]
    path, text = nodes[0].path / f"rows.{suffix}", "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text, 1) if suffix.endswith("gz") else zstandard.compress(text))
    waited: list[str] = []

    def mend(message: str) -> None:
        waited.append(message)
        nodes[0].ask()

    path.open().close()  # the kernel forgets what it had read
    nodes[0].fail(op="read", errno="ESTALE", match=path.name, times=10**9)
    sink = logger.add(mend, filter=lambda record: "cannot be read now" in record["message"])
    source = SFTDataConfig(path=str(path))
    found = open_rows(source, find_data(source), tmp_path)
    logger.remove(sink)
    assert waited and [found.row(index) for index in (0, 4999)] == [rows[0], rows[-1]]
