"""Artifacts that the bus announces; and that are found without it."""

import threading
import time
from types import SimpleNamespace

import pytest

from prime_hpc.store import waiting
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import ArtifactWatch, wait_for_artifact
from tests.support.buses import WAIT_S, until


def write(final, content=b"x"):
    with ArtifactWriter(final, kind="batch", step=1, writer="pytest") as w:
        w.write("a.bin", [content])
    return w.manifest


def test_wait_for_artifact_by_announcement(hub, bus, tmp_path):
    final = RunPaths(tmp_path).rollouts_step(1)
    one, two = bus(hub.address), bus(hub.address)

    def produce():
        manifest = write(final)
        one.publish("batch", step=1, path=str(final), digest=manifest.digest)

    timer = threading.Timer(0.2, produce)
    timer.start()
    manifest = wait_for_artifact(final, deadline_s=WAIT_S, bus=two, topic="batch", key={"step": 1})
    assert manifest.kind == "batch"
    timer.join()


def test_an_announced_artifact_is_found_where_listings_are_stale(hub, bus, tmp_path, monkeypatch):
    final = RunPaths(tmp_path).rollouts_step(1)
    one = bus(hub.address)
    looked = []
    verify = waiting.verify_artifact

    def look(path, **_):
        looked.append(time.monotonic())
        return verify(path)

    monkeypatch.setattr(waiting.files, "list_dir", lambda path: [])
    monkeypatch.setattr(waiting, "verify_artifact", look)
    announced = []

    def produce():
        write(final)
        announced.append(time.monotonic())
        one.publish("batch", step=1)

    timer = threading.Timer(0.3, produce)
    timer.start()
    wait_for_artifact(final, deadline_s=WAIT_S, bus=one, topic="batch", key={"step": 1})
    timer.join()
    assert min(looked) >= announced[0]  # never before: a network file system would cache the miss


def test_a_bus_that_works_spares_the_listings(hub, bus, tmp_path, monkeypatch):
    final = RunPaths(tmp_path).rollouts_step(1)
    one, real, listed = bus(hub.address), files.list_dir, []
    until(lambda: one.connected)

    def list_dir(path):
        listed.append(path)
        return real(path)

    monkeypatch.setattr(files, "list_dir", list_dir)
    clock = [1000.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = ArtifactWatch(final, bus=one, topic="batch", key={"step": 1})

    def listings(seconds):
        before = len(listed)
        for _ in range(10 * seconds):
            clock[0] += 0.1
            assert watch.poll() is None
        return len(listed) - before

    listings(120)
    assert 3 <= listings(120) <= 5  # one in 30 s, should an announcement ever be lost
    hub.close()
    until(lambda: not one.connected)
    assert 40 <= listings(120) <= 60


def test_a_lost_bus_falls_back_to_listing(hub, bus, tmp_path):
    final = RunPaths(tmp_path).rollouts_step(1)
    two = bus(hub.address)
    until(lambda: two.connected)
    hub.close()
    timer = threading.Timer(0.2, write, [final])
    timer.start()
    wait_for_artifact(final, deadline_s=WAIT_S, bus=two, topic="batch", key={"step": 1})
    timer.join()


def test_other_content_than_announced_is_refused(hub, bus, tmp_path):
    final = RunPaths(tmp_path).rollouts_step(1)
    one = bus(hub.address)
    write(final)
    one.publish("batch", step=1, digest="0123456789abcdef")
    one.wait("batch", lambda m: True, WAIT_S)
    with pytest.raises(ArtifactError, match="digest 0123456789abcdef"):
        wait_for_artifact(final, deadline_s=0.1, bus=one, topic="batch", key={"step": 1})
    one.publish("batch", step=2, digest="0123456789abcdef")  # about another one: this one exists all the same
    one.wait("batch", lambda m: m["step"] == 2, WAIT_S)
    wait_for_artifact(final, deadline_s=0.1, bus=one, topic="batch", key={"step": 1})
