"""The trainer's state through torch DCP: what is saved under which name, who writes which part, and how it is read.

Tensors carry their global shape, so a checkpoint loads under any number of ranks and any
sharding. The plan of who writes what is made once in an attempt, collectively; a save itself needs no torch collective:
each rank writes its own file from tensors that may long have left the device.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.direct_writer import SummedFile, open_summed
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.retry_reads import as_unreadable
from prime_hpc.trainer.checkpointing.dcp_metadata import PlainReader
from prime_hpc.trainer.model.policy import Policy

MODEL, OPTIMIZER = "model.", "optimizer.state."


def named_state(
    policy: Policy, optimizer: torch.optim.Optimizer, slot: int = 0, owner: str = ""
) -> dict[str, torch.Tensor]:
    """Parameters, persistent buffers and the optimizer's tensors under the names that DCP gives them, detached.

    The tensors are the live ones: loading into them is loading into the policy. Of a policy with adapters they are
    those of one slot, under names that do not say which; the frozen model is not among them. `owner`: what the names
    of another model than the policy begin with.
    """
    names = _parameter_names(policy, slot)
    if policy.adapters is not None:
        state = {f"{MODEL}{name}": parameter.detach() for parameter, name in names.items()}
    else:
        state = {f"{MODEL}hf.{name}": tensor.detach() for name, tensor in policy.named_weights()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{names[parameter]}.{key}"] = value.detach()
    return {f"{owner}{name}": tensor for name, tensor in state.items()}


def _parameter_names(policy: Policy, slot: int) -> dict[torch.Tensor, str]:
    """Names of the parameters that may train, as they are saved."""
    if policy.adapters is not None:
        return {parameter: f"lora.{name}" for name, parameter in policy.adapters.named_parameters(slot).items()}
    return {parameter: name for name, parameter in policy.named_parameters()}


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the tensors that its first step would make. Parameters must be loaded afterwards."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def drop_unsaved_state(
    policy: Policy, optimizer: torch.optim.Optimizer, metadata: Metadata, slot: int = 0, owner: str = ""
) -> None:
    """Take away the state of each parameter of which a checkpoint holds none at all.

    Optimizers make a parameter's state with its first gradient: there is none before the first step, or of the vision
    tower of a model that has seen text alone. It is made when a gradient comes, as if the run had not been resumed.
    """
    prefix = f"{owner}{OPTIMIZER}"
    names = [name for name in metadata.state_dict_metadata if name.startswith(prefix)]
    saved = {name.removeprefix(prefix).rpartition(".")[0] for name in names}
    for parameter, name in _parameter_names(policy, slot).items():
        if name not in saved:
            optimizer.state.pop(parameter, None)


class _Planner(DefaultSavePlanner):
    """Takes what is written from `parts`, not from the tensors that the plan was made of."""

    parts: Mapping[str, torch.Tensor]

    def lookup_object(self, index: Any) -> Any:
        """Return this rank's part of a tensor: with DTensors there is exactly one."""
        return self.parts[index.fqn]


class _SummedFiles(FileSystem):
    """DCP's file operations through the store: durable and summed as they are written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: list[SummedFile] = []

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with open_summed(Path(path)) as file:
            yield file
        self.written.append(file)

    def entries(self, prefix: str) -> dict[str, FileEntry]:
        """Entries of the files so far, named below the artifact."""
        return {f"{prefix}/{f.path.name}": f.entry for f in self.written if f.entry is not None}


class ShardPlan:
    """The plan of which rank writes what. Made collectively by `plan_shards`; good as long as names and shapes stay."""

    def __init__(self, planner: _Planner, plan: SavePlan, metadata: Metadata | None) -> None:
        self._planner, self._plan, self._metadata = planner, plan, metadata

    @property
    def names(self) -> list[str]:
        """Tensors of which this rank writes a part."""
        return list(dict.fromkeys(item.index.fqn for item in self._plan.items))

    def write(self, directory: Path, parts: Mapping[str, torch.Tensor]) -> tuple[dict[str, FileEntry], list[Any]]:
        """Write this rank's file, durably.

        Args:
            directory: exists.
            parts: this rank's part of each of `names`, on the device or in host memory.

        Returns:
            entries of the files; results for `write_metadata`.

        Raises:
            StoreError: disk full, I/O error.
        """
        writer, sink = _writer(directory)
        if all(part.device.type == "cpu" for part in parts.values()):
            writer.per_thread_copy_ahead = 0  # nothing to copy: DCP would wait for the device's stream in vain
        self._planner.parts = parts
        # Every file has its own sum: torch's CRC of each tensor would cost as much again.
        torch.serialization.set_crc32_options(False)
        # DCP would make an empty file of nothing; the manifest would name it and nobody read it.
        results = writer.write_data(self._plan, self._planner).wait() if self._plan.items else []
        return sink.entries(directory.name), results

    def write_metadata(self, directory: Path, results: list[list[WriteResult]]) -> dict[str, FileEntry]:
        """Rank 0: what is where, from all ranks' results."""
        assert self._metadata is not None
        writer, sink = _writer(directory)
        writer.finish(copy.copy(self._metadata), results)
        (entry,) = sink.entries(directory.name).values()
        return {f"{directory.name}/.metadata": entry}  # DCP writes a temporary file and renames it


def _writer(directory: Path) -> tuple[dcp.FileSystemWriter, _SummedFiles]:
    writer = dcp.FileSystemWriter(directory, sync_files=False)
    sink = _SummedFiles(directory)
    writer.fs = sink
    return writer, sink


def plan_shards(state: dict[str, torch.Tensor]) -> ShardPlan:
    """Agree on who writes what. Collective over the default process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    planner = _Planner()
    planner.set_up_planner(state_dict=state, storage_meta=None, is_coordinator=rank == 0)
    gathered: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(planner.create_local_plan(), gathered)
    plans: list[Any] | None = None
    metadata = None
    if gathered is not None:
        plans, metadata = planner.create_global_plan(gathered)
        plans = dcp.FileSystemWriter(".").prepare_global_plan(plans)
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans)
    plan = planner.finish_plan(own[0])
    planner.state_dict = {}  # or it would keep these tensors for ever
    return ShardPlan(planner, plan, metadata)


def signature(state: Mapping[str, torch.Tensor]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return what a plan depends on."""
    return tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items())


def read_metadata(directory: Path) -> Metadata:
    """Read what a checkpoint holds. Raises ArtifactError: the file holds something else than a checkpoint's metadata,
    or names objects that are no tensors."""
    return PlainReader(directory).read_metadata()


def load_state(directory: Path, state: dict[str, torch.Tensor]) -> None:
    """Fill tensors in place from a checkpoint, whatever ranks wrote it. Collective.

    Raises:
        StoreError: a tensor is missing or has another size.
        Unreadable: a file cannot be read now. Either on all ranks alike; some tensors may be filled.
    """
    try:
        with torch.no_grad():
            dcp.load(state, storage_reader=PlainReader(directory))
    except CheckpointException as error:  # no `Exception`: whoever contains errors would let it through
        failures = [(rank, failure) for rank, (failure, _) in sorted(error.failures.items())]
        unread = [found for found in (as_unreadable(failure) for _, failure in failures) if found is not None]
        if unread and len(unread) == len(failures):
            raise unread[0] from error
        rank, failure = next((rank, failure) for rank, failure in failures if as_unreadable(failure) is None)
        raise StoreError(f"{directory} cannot be loaded: rank {rank}: {failure}") from error


def differences(
    metadata: Metadata, state: Mapping[str, torch.Tensor], *, with_optimizer: bool = True, owner: str = ""
) -> list[str]:
    """Why a checkpoint does not fit the policy and optimizer of this run, as sentences; [] where it does.
    `owner`: see `named_state`."""
    saved = metadata.state_dict_metadata
    found = []
    parts_of = (
        (f"{owner}{MODEL}", "another model", f"it was made from another {'trainer.critic' if owner else 'model'}.name"),
        (
            f"{owner}{OPTIMIZER}",
            "another optimizer's state",
            "resume with the optimizer, and the prime-hpc, that it was saved with",
        ),
    )
    for prefix, what, cure in parts_of if with_optimizer else parts_of[:1]:
        then = {name for name in saved if name.startswith(prefix)}
        now = {name for name in state if name.startswith(prefix)}
        absent, extra = sorted(now - then), sorted(then - now)
        if absent or extra:
            parts = [f"lacks {absent[0]}"] if absent else []
            parts += [f"holds {extra[0]}, which is not wanted here"] if extra else []
            count = len(absent) + len(extra)
            found.append(f"it is of {what}: it {' and '.join(parts)} ({count} tensors differ); {cure}")
            continue
        for name in sorted(now):
            md = saved[name]
            if isinstance(md, TensorStorageMetadata) and tuple(md.size) != tuple(state[name].shape):
                found.append(
                    f"it is of {what}: {name.removeprefix(prefix)} is {list(md.size)} there and "
                    f"{list(state[name].shape)} here; {cure}"
                )
                break
        if found:  # another model has another optimizer state too: say it once
            break
    return found
