"""An older attempt whose node sees the world late harms nothing of the newer one. Schedules by hand, through the
layer."""

import random
from pathlib import Path

import pytest

from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.errors import FencedError
from prime_hpc.store.io.files import make_dir
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, current_incarnation
from prime_hpc.store.weights import list_versions, prune_weights, remove_versions_after
from tests.support.hostile.layer import World


def publish(paths: RunPaths, version: int, incarnation: int) -> None:
    final = paths.weights_step(version)
    with ArtifactWriter(final, kind="weights", version=version, writer="trainer", incarnation=incarnation) as w:
        w.write("model.safetensors", [f"{incarnation} {version}".encode()])


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, random.Random(0))
    for name in ("n1", "n2"):
        world.client(name)
    return world


def two_lives(world: World) -> tuple[RunPaths, RunPaths]:
    """Attempt 1 on n1 made versions 1 to 3; attempt 2 on n2 began again and made 1 and 2; n1 has seen nothing of it."""
    old, new = (RunPaths(world.clients[name].root / "run") for name in ("n1", "n2"))
    for directory in (old.weights, old.incarnation, old.checkpoints):
        make_dir(directory)
    assert claim_incarnation(old) == 1
    for version in (1, 2, 3):
        publish(old, version, 1)
    world.settle()
    assert claim_incarnation(new) == 2
    remove_versions_after(new, 0, 2)
    publish(new, 1, 2)
    publish(new, 2, 2)
    assert current_incarnation(old) == 1 and list_versions(old) == [1, 2, 3]
    return old, new


def test_retention_of_an_older_life_gives_back_what_is_not_its_own(world: World) -> None:
    with world.installed():
        old, new = two_lives(world)
        with pytest.raises(FencedError, match="incarnation 2"):
            prune_weights(old, 1, 1)
        assert list_versions(new) == [1, 2]
        for version in (1, 2):
            assert verify_artifact(new.weights_step(version), deep=True).incarnation == 2


def test_a_commit_of_an_older_life_does_not_replace_a_newer_one(world: World) -> None:
    with world.installed():
        old, new = two_lives(world)
        # A name that nobody holds can be taken by the older attempt; the newer one puts its own in that place, and
        # readers, who know in which life they are, never take the other.
        publish(old, 4, 1)
        world.settle_one("n2")
        publish(new, 4, 2)
        assert verify_artifact(new.weights_step(4), deep=True).incarnation == 2
        # A name that the newer attempt holds, though n1 does not see it.
        world._forget(world.clients["n1"].root / "run" / "weights" / "step_000002")
        with pytest.raises(FencedError, match="incarnation 2"):
            publish(old, 2, 1)
        assert verify_artifact(new.weights_step(2), deep=True).incarnation == 2


def test_two_lives_that_begin_at_once_get_two_numbers(world: World) -> None:
    with world.installed():
        old, new = (RunPaths(world.clients[name].root / "run") for name in ("n1", "n2"))
        make_dir(old.incarnation)
        world.settle()
        numbers = [claim_incarnation(old), claim_incarnation(new), claim_incarnation(old), claim_incarnation(new)]
        assert numbers == [1, 2, 3, 4]
