"""What is in pinned memory before a pause, and that its copies do not wait; with plain memory instead of pinned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from prime_hpc.inference.tensor_file import TensorFile
from prime_hpc.inference.vllm import pinned
from prime_hpc.inference.vllm.pinned import CopyWithoutWaiting, PinnedStage
from prime_hpc.runtime import host_memory


class Recorded(TorchDispatchMode):
    """Below the mode under test: the copies that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.waits.append(not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[TensorFile]]:
    generator = torch.Generator().manual_seed(0)
    first = {"a": torch.randn(64, 8, generator=generator), "b": torch.randn(9, generator=generator).bfloat16()}
    save_file(first, tmp_path / "1.safetensors")
    save_file({"c": torch.randn(100, 16, generator=generator)}, tmp_path / "2.safetensors")
    opened = [TensorFile(tmp_path / f"{n}.safetensors") for n in (1, 2)]
    yield opened


def plain(made: list[int]) -> pinned.Allocate:
    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    return allocate


def test_all_is_there_before_the_pause_in_one_buffer_for_every_version(files: list[TensorFile]) -> None:
    made: list[int] = []
    stage = PinnedStage(1 << 20, plain(made))
    for _ in range(3):
        stage.begin(files)
        stage.wait()
        assert stage.is_done
        for file in files:
            for name in file.names:
                found, expected = stage.tensor(name), file.get_tensor(name)
                assert found is not None and torch.equal(found, expected) and found.dtype == expected.dtype
                assert stage.holds(found) and stage.holds(found[1:]) and not stage.holds(expected)
    assert len(made) == 1


def test_what_does_not_fit_stays_in_its_file(files: list[TensorFile]) -> None:
    made: list[int] = []
    stage = PinnedStage(4096, plain(made))
    stage.begin(files)
    stage.wait()
    assert made == [4096]
    assert stage.tensor("a") is not None and stage.tensor("c") is None


def test_a_file_that_cannot_be_read_is_left_to_who_loads_it(tmp_path: Path) -> None:
    class Broken(TensorFile):
        def get_tensor(self, name: str) -> torch.Tensor:
            raise OSError("stale file handle")

    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    stage = PinnedStage(4096, plain([]))
    stage.begin([Broken(tmp_path / "x.safetensors")])
    stage.wait()
    assert stage.is_done and stage.tensor("a") is None


def test_only_copies_of_what_is_there_do_not_wait(files: list[TensorFile]) -> None:
    stage = PinnedStage(1 << 20, plain([]))
    stage.begin(files)
    stage.wait()
    staged, mapped = stage.tensor("a"), files[0].get_tensor("a")
    assert staged is not None
    parameter = torch.empty(32, 8)
    with Recorded() as below, CopyWithoutWaiting(stage) as mode:
        parameter.copy_(mapped[:32])
        parameter.copy_(staged.narrow(0, 32, 32))  # as a loader of a tensor-parallel rank does
    assert below.waits == [True, False] and mode.num_copies == 1
    assert torch.equal(parameter, mapped[32:])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """60 GiB are free; a job's cgroup may limit it."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {60 << 20} kB\n")
    return tmp_path


def limited(machine: Path, own: str, folder: str, **content: str) -> None:
    (machine / "proc" / "self" / "cgroup").write_text(own)
    (machine / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (machine / "cgroup" / folder / f"memory.{name}").write_text(text)


def test_all_workers_of_a_node_take_a_quarter_of_its_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "num_device_files", lambda: 8)
    for said, num_own, expected in (("8", 1, 8), ("64", 8, 8), ("2", 1, 2), ("1", 1, 1), ("64", 16, 16)):
        assert pinned.workers_of_node(num_own, {pinned.NUM_WORKERS: said}) == expected
        together = expected * pinned.most_bytes(expected)
        assert together <= (60 << 30) // 4 and pinned.most_bytes(expected) <= pinned.MAX_BYTES
    assert pinned.workers_of_node(2, {}) == 2


def test_a_job_has_the_memory_that_its_cgroup_leaves(machine: Path) -> None:
    assert host_memory.available_bytes() == 60 << 30  # no cgroups at all
    stat = f"anon 1\nactive_file {1 << 29}\ninactive_file {1 << 29}\n"
    limited(machine, "0::/job_7/step_0\n", "job_7/step_0", max="max\n", current="5\n", stat=stat)
    assert host_memory.available_bytes() == 60 << 30
    limited(machine, "0::/job_7/step_0\n", "job_7", max=f"{32 << 30}\n", current=f"{30 << 30}\n", stat=stat)
    assert host_memory.available_bytes() == 3 << 30 and pinned.most_bytes(1) == 3 << 28
    v1 = {"limit_in_bytes": str(8 << 30), "usage_in_bytes": str(6 << 30), "stat": f"total_inactive_file {1 << 29}"}
    limited(machine, "9:cpu:/x\n4:memory:/job_7\n0::/\n", "memory/job_7", **v1)
    assert host_memory.available_bytes() == (2 << 30) + (1 << 29)
    limited(machine, "4:memory:/job_7\n", "memory/job_7", usage_in_bytes=str(9 << 30))
    assert host_memory.available_bytes() == 0 == pinned.most_bytes(1)


def test_processes_that_the_kernel_ended_for_want_of_memory_are_counted(machine: Path) -> None:
    assert host_memory.oom_kills() is None  # no cgroups at all
    limited(machine, "0::/job_7/step_0\n", "job_7/step_0", max="max\n")
    assert host_memory.oom_kills() is None  # a kernel that does not say
    limited(machine, "0::/job_7/step_0\n", "job_7/step_0", events="low 0\noom 9\noom_kill 2\noom_group_kill 0\n")
    limited(machine, "0::/job_7/step_0\n", "job_7", events="oom 9\noom_kill 5\n")  # of another step too
    assert host_memory.oom_kills() == 2
    limited(machine, "4:memory:/job_7\n", "memory/job_7", oom_control="under_oom 0\noom_kill 1\n")
    assert host_memory.oom_kills() == 1


def test_what_was_survived_long_ago_is_no_recent_end(machine: Path) -> None:
    now = [0.0]
    unknown = host_memory.RecentOomKills(lambda: now[0])
    assert unknown.count() is None
    limited(machine, "0::/job_7\n", "job_7", events="oom_kill 2\n")
    recent = host_memory.RecentOomKills(lambda: now[0])
    limited(machine, "0::/job_7\n", "job_7", events="oom_kill 3\n")
    found = []
    for now[0] in (0.0, 60.0, 119.0, 120.0):
        recent.look()
        found.append(recent.count())
    assert found == [1, 1, 1, 0] and unknown.count() is None


def test_the_buffer_is_pinned_to_its_size_or_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def page_locked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append((like.nbytes, device))
        return torch.empty_like(like, device="cpu")  # pageable

    monkeypatch.setattr(pinned, "page_locked", page_locked)
    device = torch.device("cuda", 3)
    with pytest.raises(MemoryError, match="cannot be pinned"):
        pinned.pinned_memory(device)(70_001)
    assert asked == [(70_001, device)]
