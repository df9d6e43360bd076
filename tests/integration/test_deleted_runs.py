"""A run that its user deletes while a trainer trains it beside others: before each operation on its files, in turn."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.child_runs import ChildState, read_state
from prime_hpc.store.io import files
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.multi.loop import MultiTrainer
from tests.support.many_runs import make_child, make_parent, put_batches
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.fixture
def group() -> Iterator[None]:
    """One gloo rank, without a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def operations_of_a_run(
    parent_dir: Path, after: dict[str, int], seen: Counter[str], saved: set[str] | None = None
) -> files.Observer:
    """Counts each run's operations, and deletes a run before its `after`-th one; `saved` gets those that had their last
    checkpoint then."""

    def observe(operation: str, path: Path) -> None:
        if not path.is_relative_to(parent_dir) or path.parent == parent_dir:
            return
        name = path.relative_to(parent_dir).parts[0]
        seen[name] += 1
        if seen[name] == after.get(name):
            if saved is not None and RunPaths(parent_dir / name).checkpoint_step(STEPS).is_dir():
                saved.add(name)
            while (parent_dir / name).exists():  # another thread that writes there stops a removal half-way
                shutil.rmtree(parent_dir / name, ignore_errors=True)

    return observe


@pytest.mark.parametrize("every", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("save_async", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_it_ends_itself_alone_whatever_is_being_written(
    tmp_path: Path, group: None, save_async: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = make_tiny_model(tmp_path / "model"), tmp_path / "parent"
    parent = make_parent(directory, model, slots=2)
    ended: dict[str, str] = {}

    def add(name: str) -> None:
        child = make_child(
            parent, directory, name, max_steps=STEPS, ckpt={"interval": 1, "keep_last": 1, "save_async": save_async}
        )
        put_batches(child, 0, range(1, STEPS + 1))

    def note(self: MultiTrainer, name: str, state: ChildState) -> None:
        ended[name] = state.phase

    monkeypatch.setattr(MultiTrainer, "_announce", note)

    def train(incarnation: int) -> None:
        context = RoleContext("trainer", directory, incarnation=incarnation, attempt=incarnation)
        bus = BusClient(None, "test")
        MultiTrainer(parent, context, torch.device("cpu"), bus, RoleStatus(context, bus)).run()

    seen: Counter[str] = Counter()
    add("run_whole")
    with files.observe_operations(operations_of_a_run(directory, {}, seen)):
        train(1)
    assert ended == {"run_whole": "done"}
    number = seen["run_whole"]
    assert number > 50
    deleted = {f"run_{k:03}": k for k in range(1 + every // 2 * save_async, number + 1, every)}
    for name in [*deleted, "run_last"]:
        add(name)
    saved: set[str] = set()
    counts: Counter[str] = Counter()
    with files.observe_operations(operations_of_a_run(directory, deleted, counts, saved)):
        train(2)
    assert ended.pop("run_whole") == "done" and ended.pop("run_last") == "done"
    assert ended.keys() == deleted.keys()
    late = {name for name, phase in ended.items() if phase != "removed"}
    late -= {name for name in late if counts[name] < deleted[name]}  # its threads met otherwise: it was not deleted
    assert {ended[name] for name in late} <= {"done"}, ended
    assert late <= saved, "only old checkpoints are removed after the last one"
    last = read_state(directory / "run_last")
    assert last is not None and last.step == STEPS
