"""Ranks of one node meet without a port that others can reach; checkpoints are read without running what they say."""

import contextlib
import enum
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.runtime.role_context import LED
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.supervisor.roles.spec import trainer_spec
from prime_hpc.trainer import main, ranks
from prime_hpc.trainer import trainer as trainer_module
from prime_hpc.trainer.checkpointing.dcp_state import load_state, read_metadata
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.trainer import Signal, Trainer
from tests.support.ranks import spawn

ENDED = """
import os, signal, sys, time
from pathlib import Path

out = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not (out / "ready").exists():
        time.sleep(0.01)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (out / "SIGTERM").touch())
def leave(*_):
    (out / "SIGINT").touch()
    os._exit(1)
signal.signal(signal.SIGINT, leave)
(out / "ready").touch()
while True:
    time.sleep(0.01)
"""
RANK = """
import json, os, socket, sys
import torch, torch.distributed as dist
from pathlib import Path
from prime_hpc.config.experiment import Experiment
from prime_hpc.trainer.main import start_process_group
from prime_hpc.store.messaging.listeners import shut_listeners

start_process_group(Experiment.model_validate({"kind": "sft", "trainer": {"backend": "gloo"}}))
dist.barrier()
assert shut_listeners() >= 1
dist.barrier()


def listeners():
    inodes = {p.readlink().name for p in Path("/proc/self/fd").iterdir() if p.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            field = row.split()
            if field[3] == "0A" and f"socket:[{field[9]}]" in inodes:
                found.append(field[1].split(":"))
    return found


total = torch.ones(1)
dist.all_reduce(total)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.getpid())
assert sys.flags.safe_path
said = [total.item(), listeners(), os.environ["PRIMEHPC_RANKS_FILE"]]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(said))
dist.barrier()
if dist.get_rank() == 0:
    for _, port in listeners():
        try:
            socket.create_connection(("127.0.0.1", int(port, 16)), 0.3)
        except TimeoutError:
            continue
        raise SystemExit("a stranger could connect")
dist.barrier()
dist.destroy_process_group()
"""


DEAF = """
import socket
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.listeners import shut_listeners
from prime_hpc.store.messaging.proven_server import ProvenRequest, ProvenServer

anyones, proven = sockets.listen("127.0.0.1"), sockets.listen("127.0.0.1")
server = ProvenServer(proven, ProvenRequest, None, "secret", "weights")
assert shut_listeners() == 1
socket.create_connection(proven.getsockname(), 30).close()
try:
    socket.create_connection(anyones.getsockname(), 0.3)
except TimeoutError:
    print("deaf")
"""


def test_what_asks_for_a_proof_goes_on_to_be_reached(tmp_path: Path) -> None:
    """By it a rank on a CPU sends weights (`weights.transport: gloo`): engines would never get the second version."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", DEAF], env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout == "deaf\n", done.stderr


def test_led_ranks_are_ended_by_what_they_heed_when_one_fails(tmp_path: Path) -> None:
    """SIGTERM is Slurm's warning to them: torchrun would wait 30 s, and kill them."""
    (tmp_path / "rank.py").write_text(ENDED)
    command = [sys.executable, "-P", "-m", "prime_hpc.trainer.torchrun", "--nproc-per-node", "2", "--max-restarts", "0"]
    command += ["--signals-to-handle", "SIGINT", str(tmp_path / "rank.py"), str(tmp_path)]
    environment = os.environ | {LED: "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert (tmp_path / "SIGINT").exists() and not (tmp_path / "SIGTERM").exists()


@pytest.mark.exhaustive
def test_ranks_meet_over_a_file_and_listen_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "some_rank.py").write_text(RANK)
    command = [sys.executable, "-P", "-m", "prime_hpc.trainer.torchrun", "--nproc-per-node", "2", "--max-restarts", "0"]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "TMPDIR": str(tmp_path / "temporary"),
    }
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [*command, "-m", "some_rank", str(tmp_path)], env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in "01":
        total, listeners, file = json.loads((tmp_path / rank).read_text())
        assert total == 2.0 and listeners
        assert {address for address, _ in listeners} == {"0100007F"}  # the loopback interface alone
        assert not Path(file).parent.exists()
    assert not list((tmp_path / "temporary").iterdir())


def test_one_machine_runs_have_no_rendezvous_port(tmp_path: Path) -> None:
    command = trainer_spec(Experiment.model_validate({}), tmp_path, []).command
    assert "prime_hpc.trainer.torchrun" in command
    assert not [word for word in command if "rdzv" in word or "master" in word]


def test_the_meeting_place_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks.meeting_file() as path:
        assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("PRIMEHPC_RANKS_FILE", raising=False)
    assert ranks.file_store(1) is None
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("PRIMEHPC_RANKS_FILE", str(tmp_path / "open" / "store"))
    with pytest.raises(OSError, match="others may write"):
        ranks.file_store(1)


def leave_a_meeting_place(_: int, folder: str, is_agent: bool) -> None:
    """End as an agent does that was killed, or a task of srun."""
    ranks._NODE_LOCAL, ranks.stay_on_loopback = Path(folder), lambda **_: None
    meeting: Any = ranks.meeting_file()
    meeting.__enter__() if is_agent else ranks.file_store(1)
    os._exit(0)


def test_a_meeting_place_whose_processes_were_killed_goes_when_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_NODE_LOCAL", tmp_path)
    monkeypatch.setenv("PRIMEHPC_RANKS_FILE", str(tmp_path / "prime-hpc-ranks-own" / "store"))
    monkeypatch.setattr(ranks, "stay_on_loopback", lambda **_: None)
    for is_agent in (True, False):
        spawn(leave_a_meeting_place, (str(tmp_path), is_agent), 1)
        assert len(list(tmp_path.iterdir())) == 1
        with ranks.meeting_file() as path:
            assert list(tmp_path.iterdir()) == [path.parent]
            ranks.scratch.remove_leftovers(tmp_path, "prime-hpc-ranks-")
            assert path.parent.exists()


def test_a_meeting_place_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there is no space, and not where: /tmp is nowhere in a run's config."""
    store = tmp_path / "own" / "store"
    store.parent.mkdir(mode=0o700)
    store.symlink_to("/dev/full")
    monkeypatch.setenv("PRIMEHPC_RANKS_FILE", str(store))
    monkeypatch.setattr(ranks, "stay_on_loopback", lambda **_: None)
    with pytest.raises(dist.DistStoreError, match=f"{store}: No space left on device"):
        ranks.file_store(1)


@pytest.mark.parametrize(("transport", "interface"), [("files", "lo"), ("nccl", None)])
def test_engines_on_other_nodes_reach_a_rank_that_sends_over_nccl(
    transport: str, interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has one interface a process: on the loopback one no other node's worker would find the sender."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_NO_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "PRIMEHPC_RANKS_FILE": f"{tmp_path}/own/store"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(main, "select_device", lambda _: (torch.device("cuda", 0), "nccl"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    ranks.stay_on_loopback(engines_join=True)  # as torchrun's agent does, which does not know
    main.start_process_group(Experiment.model_validate({"weights": {"transport": transport}}))
    assert os.environ.get("NCCL_SOCKET_IFNAME") == interface and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert ("NCCL_NO_CACHE" in os.environ) == (transport == "nccl")  # see `network.nccl`


# ---------------------------------------------------------------------------------------------------- checkpoints


class Payload:
    """What an attacker's pickle says."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def save(folder: Path) -> dict[str, torch.Tensor]:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return state


def test_a_checkpoint_of_tensors_is_read(tmp_path: Path) -> None:
    state = save(tmp_path)
    found, expected = read_metadata(tmp_path), dcp.FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata and found.storage_data == expected.storage_data
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_state(tmp_path, again)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


class PicklerOf3112(pickle.Pickler):
    """As Python 3.11.2 (Debian 12's own) pickles members of enumerations, or what looks like one."""

    def __init__(self, file: io.BytesIO, attribute: str | None = None) -> None:
        super().__init__(file)
        self.attribute = attribute

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), self.attribute or value.name)
        return NotImplemented


def test_a_checkpoint_of_a_python_that_names_getattr_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    expected = dcp.FileSystemReader(tmp_path).read_metadata()
    file = io.BytesIO()
    PicklerOf3112(file).dump(expected)
    assert b"getattr" in file.getvalue()
    (tmp_path / ".metadata").write_bytes(file.getvalue())
    assert read_metadata(tmp_path).state_dict_metadata == expected.state_dict_metadata
    file = io.BytesIO()
    PicklerOf3112(file, "__subclasses__").dump(expected)
    (tmp_path / ".metadata").write_bytes(file.getvalue())
    with pytest.raises(ArtifactError, match="something else than an enumeration's member"):
        read_metadata(tmp_path)


def test_a_checkpoint_of_python_3_13_is_read(tmp_path: Path) -> None:
    """It calls `pathlib` by another name: every checkpoint was taken for a damaged one there."""
    save(tmp_path)
    expected = dcp.FileSystemReader(tmp_path).read_metadata()
    text = pickle.dumps(expected, protocol=2, fix_imports=False).replace(
        b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"
    )
    assert b"cpathlib._local\nPosixPath\n" in text
    (tmp_path / ".metadata").write_bytes(text)
    assert read_metadata(tmp_path).state_dict_metadata == expected.state_dict_metadata


@pytest.mark.parametrize("kind", ["code", "nested code", "other", "damaged", "objects"])
def test_what_is_no_description_of_tensors_is_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    save(tmp_path)
    mark, file = tmp_path / "mark", tmp_path / ".metadata"
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    if kind == "code":
        file.write_bytes(pickle.dumps(Payload(mark)))
    elif kind == "nested code":
        metadata.planner_data = Payload(mark)
        file.write_bytes(pickle.dumps(metadata))
    elif kind == "other":
        file.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "damaged":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        dcp.save(
            {"a": torch.ones(2), "o": {"x"}},
            storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=True),
            no_dist=True,
        )
    with pytest.raises(ArtifactError, match=r"\.metadata: expected (the description|tensors only)"):
        read_metadata(tmp_path)
    assert not mark.exists()
    if "code" in kind:  # what is refused would have run
        with pytest.raises(AttributeError) if kind == "code" else contextlib.nullcontext():
            dcp.FileSystemReader(tmp_path).read_metadata()
        assert mark.exists()


def find_deadlines(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    parallel = build_parallel(ParallelDims(tp=2), "cpu", 77.0)
    for mesh in (parallel.fsdp, parallel.tp, parallel.expert_fsdp):
        assert mesh is not None
        for group in mesh.get_all_groups():
            options: Any = group._get_backend(torch.device("cpu")).options
            assert options._timeout.total_seconds() == 77.0, mesh
    dist.destroy_process_group()


def test_the_groups_of_a_layout_have_the_configs_deadline(tmp_path: Path) -> None:
    """Torch gives each NCCL group that it splits off the default one 10 minutes, whatever the default one has."""
    spawn(find_deadlines, (str(tmp_path),), nprocs=2)


def agree_beside_cuda(rank: int, folder: str) -> None:
    """On a rank that says it is on CUDA, where this machine has none: only over the side group can it be told."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    assert ranks.control_group(torch.device("cpu"), 30.0)._group is None  # the default one
    cuda = torch.device("cuda", rank)
    control = ranks.control_group(cuda, 30.0)
    assert control._group is not None and dist.get_backend(control._group) == "gloo"
    checkpointer = SimpleNamespace(has_ended=rank == 0)
    waited: list[int] = []
    saver = SimpleNamespace(checkpointer=checkpointer, wait_for_save=lambda: waited.append(rank))
    trainer: Any = SimpleNamespace(control=control, saver=saver, beside=None, paths=None)
    assert Trainer.agree(trainer, Signal.SAVE if rank == 0 else Signal.WAIT) is Signal.SAVE
    assert waited == [rank]
    looked: list[Any] = []

    def look(paths: Any) -> list[int]:
        looked.append(paths)
        return [1]

    setattr(trainer_module, "list_versions", look)  # noqa: B010
    assert Trainer.lacks_version(trainer, 2) and not Trainer.lacks_version(trainer, 1)
    assert len(looked) == (2 if rank == 0 else 0)  # of 1,000 ranks one asks the file system

    def gone(*_: Any) -> Any:
        assert rank == 0, "the others are told what it found"
        raise StoreError("no checkpoint")

    trainer.context, trainer.experiment = SimpleNamespace(resume_step=None), None
    setattr(trainer_module, "checkpoint_to_resume", gone)  # noqa: B010
    with pytest.raises(StoreError, match="^no checkpoint$"):  # nobody waits for rank 0 in vain
        Trainer.chosen_checkpoint(trainer)
    dist.destroy_process_group()


def test_a_waiting_rank_is_told_over_gloo_beside_cuda(tmp_path: Path) -> None:
    spawn(agree_beside_cuda, (str(tmp_path),), nprocs=2)
