"""Versions as what changed: exact to the bit for every type, chains, retention, damage, servers that missed some."""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.inference import check_version
from prime_hpc.inference.check_version import receive_version
from prime_hpc.inference.policy import UnavailableError
from prime_hpc.launch.checks import _folder
from prime_hpc.store.artifact import commit_stage, prepare_stage, stage_dir
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.manifest import Manifest, read_manifest
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import link_of, list_versions, prune_weights, read_chain
from prime_hpc.supervisor.attempt.resume import _weights_of
from prime_hpc.weight_transport import delta, delta_codec, delta_image, transport
from prime_hpc.weight_transport.delta import DELTA, DeltaSender
from prime_hpc.weight_transport.delta_image import restore
from prime_hpc.weight_transport.transport import Place, VersionReader, WholeFile, node_lock, transport_of

NUM_RANKS = 2
FILE = "model.safetensors"
HEADER = b"a header"
SPECIAL = np.array([0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001], np.uint16)
"""bfloat16: NaNs of three payloads, both infinities, -0.0, 0.0, the smallest number."""


@settings(deadline=None, max_examples=60)
@given(data=st.data(), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_changes_are_exact_for_every_bit_pattern(data: st.DataObject, itemsize: int) -> None:
    dtype = f"<u{itemsize}"
    size = data.draw(st.integers(0, 200))
    old, new = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    same = data.draw(hnp.arrays(bool, size))
    new = np.where(same, old, new).astype(dtype)
    before, after, kept = (np.frombuffer(bytearray(a.tobytes()), np.uint8) for a in (old, new, old))
    change = delta_codec.encode(kept, after, itemsize)
    assert change.num_changed == int((old != new).sum()) and kept.tobytes() == new.tobytes()
    row = np.array(
        [(0, itemsize, 0, len(after), change.num_changed, len(change.frame), change.xxh3)], delta_codec.CHUNK
    )
    image = before.copy()
    assert delta_codec.apply(image, row[0], change.frame) and image.tobytes() == new.tobytes()
    if change.num_changed:  # to other values it leads nowhere, and says so
        assert not delta_codec.apply(image, row[0], change.frame)


def test_floats_that_compare_equal_or_not_at_all_are_kept_apart() -> None:
    old = np.tile(SPECIAL, 8)
    new = np.repeat(SPECIAL, 8)
    image = np.frombuffer(bytearray(old.tobytes()), np.uint8)
    change = delta_codec.encode(image.copy(), new.view(np.uint8), 2)
    row = np.array([(0, 2, 0, 128, change.num_changed, len(change.frame), change.xxh3)], delta_codec.CHUNK)
    assert delta_codec.apply(image, row[0], change.frame) and image.tobytes() == new.tobytes()


class Trainer:
    """Two ranks that write halves of one file; no torch."""

    def __init__(self, paths: RunPaths, incarnation: int = 0, size: int = 60_000, **config: Any) -> None:
        self.paths, self.incarnation = paths, incarnation
        self.random = np.random.default_rng(0)
        self.values = self.random.integers(0, 1 << 16, (NUM_RANKS, size), np.uint16)
        whole = len(HEADER) + self.values.nbytes
        weights = WeightsConfig(transport="delta", **config)
        files = [[WholeFile(FILE, whole, HEADER, rank == 0)] for rank in range(NUM_RANKS)]
        self.senders = [DELTA.sender(weights, files[rank], rank) for rank in range(NUM_RANKS)]

    def step(self, share: float) -> None:
        """Change a share of all elements to their neighbours."""
        self.values += (self.random.random(self.values.shape) < share).astype(np.uint16)

    def publish(self, version: int) -> Manifest:
        final = self.paths.weights_step(version)
        prepare_stage(final, self.incarnation, run=self.paths)
        stage = stage_dir(final, self.incarnation)
        with contextlib.ExitStack() as stack:
            form = self.senders[0].plan(version)
            for rank, sender in enumerate(self.senders):
                sender.open(form, stage, stack)
                offset = len(HEADER) + rank * self.values[rank].nbytes
                sender.write(Place(FILE, offset, 2), self.values[rank].view(np.uint8))
            sealed = [sender.finalize() for sender in reversed(self.senders)]
        entries = {name: entry for part, _ in sealed for name, entry in part.items()}
        meta = self.senders[0].meta([facts for _, facts in sealed])
        manifest = Manifest("weights", version, version, "trainer", self.incarnation, entries, meta)
        manifest = commit_stage(stage, final, manifest, run=self.paths)
        self.senders[0].sent(manifest)
        return manifest

    def run(self, versions: Sequence[int], share: float = 0.02) -> None:
        for version in versions:
            self.step(share)
            self.publish(version)

    @property
    def content(self) -> bytes:
        return HEADER + self.values.tobytes()


def fetch(reader: VersionReader, paths: RunPaths, version: int) -> bytes:
    folder = paths.weights_step(version)
    return (reader.fetch(folder, transport_of(read_manifest(folder))) / FILE).read_bytes()


def wholes(paths: RunPaths) -> list[int]:
    return [v for v in list_versions(paths) if link_of(read_manifest(paths.weights_step(v))) is None]


def test_a_server_follows_versions_bit_by_bit_and_few_bytes_are_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, reader = Trainer(paths, whole_interval=4), VersionReader(tmp_path / "scratch")
    other = VersionReader(tmp_path / "scratch")  # a further process of the server
    for version in range(1, 10):
        trainer.run([version])
        assert fetch(reader, paths, version) == fetch(other, paths, version) == trainer.content
    assert wholes(paths) == [1, 2, 6]
    manifest = read_manifest(paths.weights_step(3))
    assert manifest.total_size < len(trainer.content) * 0.05 and 0.015 < manifest.meta["changed"] < 0.025


def test_a_server_whose_temporary_directory_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre mounted without `flock`: versions come all the same, and its processes still wait for each other."""

    def none(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    inside, waits, sleep = [0], threading.Event(), time.sleep

    def slept(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    def enter(scratch: Path) -> int:
        with node_lock(scratch):
            inside[0] += 1
            together = inside[0]
            assert together > 1 or waits.wait(60)
            inside[0] -= 1
        return together

    monkeypatch.setattr(transport.fcntl, "flock", none)
    paths = RunPaths(tmp_path / "run")
    trainer = Trainer(paths)
    trainer.run([1, 2, 3])
    assert fetch(VersionReader(tmp_path / "scratch"), paths, 3) == trainer.content
    monkeypatch.setattr(transport.time, "sleep", slept)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(enter, [tmp_path / "scratch"] * 2)) == [1, 1]


def test_where_nearly_all_changes_versions_stay_whole_and_nothing_is_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer = Trainer(paths)
    trainer.run(range(1, 6), share=0.9)
    sender = trainer.senders[1]
    assert wholes(paths) == [1, 2, 3, 4, 5] and isinstance(sender, DeltaSender) and not sender._kept
    trainer.run(range(6, 10), share=0.01)  # the learning rate has fallen
    assert wholes(paths) == [1, 2, 3, 4, 5, 6, 7]
    assert fetch(VersionReader(tmp_path / "scratch"), paths, 9) == trainer.content


def test_a_server_that_missed_versions_or_lost_its_image(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, reader = Trainer(paths), VersionReader(tmp_path / "scratch")
    trainer.run([1, 2, 3])
    assert fetch(reader, paths, 3) == trainer.content
    trainer.run([4, 5, 6, 7])
    assert fetch(reader, paths, 7) == trainer.content  # missed three
    trainer.run([8])
    (tmp_path / "scratch" / "image.json").unlink()  # killed in the middle of a change
    assert fetch(reader, paths, 8) == trainer.content
    trainer.run([9])
    image = tmp_path / "scratch" / "image" / FILE
    image.write_bytes(bytes(len(trainer.content)))  # another program has been at it
    assert fetch(reader, paths, 9) == trainer.content
    assert fetch(VersionReader(tmp_path / "new"), paths, 9) == trainer.content


def test_an_attempt_that_comes_back_is_not_mixed_up_with_the_one_before(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    first, reader = Trainer(paths), VersionReader(tmp_path / "scratch")
    first.run([1, 2, 3, 4, 5])
    assert fetch(reader, paths, 5) == first.content
    for version in (5, 4):
        shutil.rmtree(paths.weights_step(version))
    second = Trainer(paths, incarnation=1)
    second.run([3, 4, 5, 6])  # 3 is published again, with other content
    assert read_manifest(paths.weights_step(3)).incarnation == 1
    assert fetch(reader, paths, 5) == fetch(VersionReader(tmp_path / "new"), paths, 5)
    assert fetch(reader, paths, 6) == second.content


def test_a_version_that_failed_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer = Trainer(paths)
    trainer.run([1, 2, 3])
    trainer.step(0.02)
    trainer.senders[0].plan(4)  # and no more of it: the disk was full
    trainer.run([5, 6])
    assert wholes(paths) == [1, 2, 5]
    assert fetch(VersionReader(tmp_path / "scratch"), paths, 6) == trainer.content


def damage(paths: RunPaths, version: int, how: str) -> None:
    folder = paths.weights_step(version)
    name = next(iter(read_manifest(folder).files))
    content = bytearray((folder / name).read_bytes())
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "short":
        (folder / name).write_bytes(content[:-1])
    elif how == "bit":
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    elif how == "header":  # which no change covers
        content[0] ^= 1
        (folder / name).write_bytes(content)
    else:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 77}), encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "how", "words"),
    [
        (2, "gone", "step_000002.*step_000003 holds only what changed since"),
        (3, "gone", "step_000003.*step_000004 holds only what changed since"),
        (3, "short", "step_000003.*holds only what changed since"),
        (3, "manifest", "step_000003.*holds only what changed since"),
        (3, "bit", "step_000003.*another sum"),
        (2, "bit", "step_000002/model.safetensors: expected .* xxh3"),
        (2, "header", "step_000002/model.safetensors: expected .* xxh3"),
        (4, "bit", "step_000004.*another sum"),
    ],
)
def test_a_damaged_chain_is_refused_with_the_file_at_fault(tmp_path: Path, version: int, how: str, words: str) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, reader = Trainer(paths), VersionReader(tmp_path / "scratch")
    trainer.run([1, 2, 3])
    before = fetch(reader, paths, 3)
    trainer.run([4])
    damage(paths, version, how)
    with pytest.raises(ArtifactError, match=words):
        fetch(VersionReader(tmp_path / "restarted"), paths, 4)
    if version < 4:  # who has version 3 needs nothing older
        assert fetch(reader, paths, 4) == trainer.content != before
    else:
        with pytest.raises(ArtifactError, match=words):
            fetch(reader, paths, 4)


def test_no_chunk_is_written_after_the_image_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "run")
    monkeypatch.setattr(delta_codec, "CHUNK_BYTES", 4000)
    trainer = Trainer(paths)
    trainer.run([1, 2])
    image = tmp_path / "image"
    delta_image.copy_whole(paths.weights_step(2), read_manifest(paths.weights_step(2)), image)
    trainer.run([3])
    apply, numbers_in_use, begun = delta_image._apply, [], []

    def fail_first(opened: Sequence[int], row: Any, frame: memoryview) -> bool:
        begun.append(row)
        if len(begun) == 1:
            raise OSError(5, "I/O error")
        time.sleep(0.02)
        with contextlib.suppress(OSError):
            numbers_in_use.append(os.path.samestat(os.fstat(opened[0]), (image / FILE).stat()))
            return apply(opened, row, frame)
        numbers_in_use.append(False)
        return True

    monkeypatch.setattr(delta_image, "_apply", fail_first)
    with pytest.raises(StoreError, match="I/O error"):
        delta_image.apply_changes(paths.weights_step(3), read_manifest(paths.weights_step(3)), image)
    assert all(numbers_in_use)


def test_the_next_file_of_changes_is_read_while_one_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, reader = Trainer(paths), VersionReader(tmp_path / "scratch")
    trainer.run([1, 2])
    fetch(reader, paths, 2)
    trainer.run([3])
    read, apply_all, all_read, waited = delta_image._read, delta_image._apply_all, threading.Event(), []
    names = list(read_manifest(paths.weights_step(3)).files)
    assert len(names) == NUM_RANKS

    def note_read(path: Path) -> bytes:
        if path.name == names[-1]:
            all_read.set()
        return read(path)

    def wait_for_reading(*arguments: Any) -> Any:
        waited.append(all_read.wait(10))
        return apply_all(*arguments)

    monkeypatch.setattr(delta_image, "_read", note_read)
    monkeypatch.setattr(delta_image, "_apply_all", wait_for_reading)
    assert fetch(reader, paths, 3) == trainer.content and waited == [True] * NUM_RANKS


def test_retention_keeps_the_chain_of_what_it_keeps(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer = Trainer(paths, whole_interval=4)
    removed = []
    for version in range(1, 13):
        trainer.run([version])
        removed += prune_weights(paths, 1, keep={8})
        kept = list_versions(paths)
        assert all(read_chain(paths.weights_step(v)) for v in kept)
    assert wholes(paths) == [6, 10] and kept == [6, 7, 8, 10, 11, 12]
    assert removed == [1, 2, 3, 4, 5, 9]


def test_a_whole_version_is_made_of_changes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer = Trainer(paths)
    trainer.run([1, 2, 3, 4])
    restore(paths.weights_step(4), tmp_path / "whole")
    assert (tmp_path / "whole" / FILE).read_bytes() == trainer.content
    assert [path.name for path in (tmp_path / "whole").iterdir()] == [FILE]
    with pytest.raises(StoreError, match="exists: name another directory"):
        restore(paths.weights_step(4), tmp_path / "whole")
    damage(paths, 3, "bit")
    with pytest.raises(ArtifactError):
        restore(paths.weights_step(4), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


def test_a_disk_that_takes_a_part_of_a_write_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, pwrite = Trainer(paths), os.pwrite
    trainer.run([1, 2, 3])

    def write_a_part(descriptor: int, data: memoryview, offset: int) -> int:
        return pwrite(descriptor, data[: len(data) // 2 + 1], offset)

    monkeypatch.setattr(os, "pwrite", write_a_part)
    restore(paths.weights_step(3), tmp_path / "whole")
    assert (tmp_path / "whole" / FILE).read_bytes() == trainer.content

    def fill_up(descriptor: int, data: memoryview, offset: int) -> int:
        if offset >= 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[: 1000 - offset], offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(StoreError, match="disk full"):
        restore(paths.weights_step(3), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_node_without_memory_for_the_values_sends_whole_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    trainer, reader = Trainer(paths), VersionReader(tmp_path / "node")
    size, free = trainer.values[0].nbytes, iter([10**12, 1])  # rank 1's node has too little
    monkeypatch.setattr(delta, "available_bytes", lambda: next(free, 1))
    for version in (1, 2, 3, 4):
        trainer.run([version])
        assert fetch(reader, paths, version) == trainer.content
    assert wholes(paths) == [1, 2, 3, 4]
    assert not any(isinstance(sender, DeltaSender) and sender._kept for sender in trainer.senders)
    free = iter([size / delta.HEADROOM] * NUM_RANKS)
    enough = Trainer(RunPaths(tmp_path / "other"))
    enough.run([1, 2, 3, 4])
    assert wholes(enough.paths) == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("is_there", [True, False], ids=["changed", "copied"])
def test_a_node_without_room_for_a_version_is_alone_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_there: bool
) -> None:
    """A refusal ends the run; this server plays no episodes until it has the version."""
    paths, pwrite = RunPaths(tmp_path / "run"), os.pwrite
    trainer, reader = Trainer(paths), VersionReader(tmp_path / "node")
    monkeypatch.setattr(check_version, "read_signature", lambda folder: {})
    trainer.run([1, 2, 3])
    if is_there:
        receive_version(reader, paths.weights_step(3), 3, None, tied=False)
    trainer.run([4])

    def fails(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(UnavailableError, match=r"cannot be had on this node: .*/node/image: "):
        receive_version(reader, paths.weights_step(4), 4, None, tied=False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    received = receive_version(reader, paths.weights_step(4), 4, None, tied=False)
    assert (received.folder / FILE).read_bytes() == trainer.content


def test_a_resumed_run_takes_its_checkpoints_version_only_with_its_chain(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    Trainer(paths).run([1, 2, 3, 4])
    info = CheckpointInfo(4, paths.checkpoint_step(4), Manifest("checkpoint", 4, None, "trainer", 0, {}))
    assert _weights_of(info, paths.root, is_foreign=False) == paths.weights_step(4)
    assert _weights_of(info, paths.root, is_foreign=True) is None  # only whole ones are taken over from another run
    damage(paths, 3, "gone")
    assert _weights_of(info, paths.root, is_foreign=False) is None  # so the trainer publishes it anew


def test_a_version_that_is_no_model_is_named_as_such(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    Trainer(paths).run([1, 2, 3])
    [problem] = _folder(str(paths.weights_step(3)), "model.name")
    assert "holds only what changed" in problem.message and "--merged 3" in problem.message
    with pytest.raises(ValueError, match=r"'deltas' is not a weight transport: did you mean delta\?"):
        WeightsConfig(transport="deltas")
