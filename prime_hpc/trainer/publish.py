"""Publishing a weight version, all ranks at once, as an artifact that Hugging Face and vLLM load as it is.

Called by `rl.py` and `sft.py` after an optimizer step. With `model.lora` a version is the adapter alone, see
`lora.files.AdapterPublisher`. Else parameters are gathered one by one; each has one rank that writes it into its own
safetensors shard while the next are gathered. Rank 0 adds the index, config.json and the tokenizer of the source model,
and commits.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from prime_hpc.store import files as store_files
from prime_hpc.store.artifact import FileEntry, Manifest, commit_stage, prepare_stage, stage_dir
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.lora.files import AdapterPublisher
from prime_hpc.trainer.model import Policy
from prime_hpc.trainer.safetensors_file import TensorSpec, in_file_order, open_safetensors
from prime_hpc.trainer.stored import SAFETENSORS_FILE, SAFETENSORS_INDEX, Piece, checkpoint_files, pieces

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SKIPPED = {"config.json", "manifest.json", ".gitattributes", "README.md"}


class VersionPublisher(Protocol):
    """Writes weight versions."""

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`; the manifest on rank 0. Collective."""


def build_publisher(
    policy: Policy,
    source: Path,
    paths: RunPaths,
    *,
    dtype: torch.dtype,
    incarnation: int,
    model_name: str,
    slot: int = 0,
) -> VersionPublisher:
    """What fits the policy; arguments as `Publisher`'s, and of a policy with adapters whose it is."""
    if policy.adapters is not None:
        return AdapterPublisher(policy, source, paths, incarnation=incarnation, model_name=model_name, slot=slot)
    return Publisher(policy, source, paths, dtype=dtype, incarnation=incarnation, model_name=model_name)


class Publisher:
    """Writes weight versions of one policy. All methods are collective."""

    def __init__(
        self, policy: Policy, source: Path, paths: RunPaths, *, dtype: torch.dtype, incarnation: int, model_name: str
    ) -> None:
        """
        Args:
            policy: sharded model.
            source: directory of the model that training began with (config, tokenizer).
            paths: the run.
            dtype: floating-point dtype of the published weights.
            incarnation: life of the run.
            model_name: for the manifest.
        """
        self._policy, self._source, self._paths = policy, source, paths
        self._dtype, self._incarnation, self._model_name = dtype, incarnation, model_name
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        files = checkpoint_files(source)  # under these names the tensors came, and under these they leave
        self._pieces = {name: pieces(name, t.shape, files) or [Piece(name)] for name, t in policy.named_weights()}

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`.

        Returns:
            the manifest on rank 0, None elsewhere.

        Raises:
            StoreError: disk full, fenced, or other content has this name.
        """
        final = self._paths.weights_step(version)
        stage = stage_dir(final, self._incarnation)
        source_files: Future[dict[str, FileEntry]] | None = None
        try:
            if self._rank == 0:
                prepare_stage(final, self._incarnation, run=self._paths, file_bytes=self._shard_bytes())
            dist.barrier()  # the stage exists
            self._await_stage(stage)
            with ThreadPoolExecutor(1, thread_name_prefix="publish") as beside:
                if self._rank == 0:
                    source_files = beside.submit(self._copy_source_files, stage)
                entries, names = self._write_shard(stage)
            gathered: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
            dist.gather_object((entries, names), gathered)
            if gathered is None or source_files is None:
                return None
            return self._commit(version, final, stage, gathered, source_files.result())
        except BaseException:
            if self._rank == 0:  # whatever ended this, nothing half-written stays behind
                store_files.clear_away(stage)
            raise

    def _await_stage(self, stage: Path) -> None:
        """Until the stage is visible on every node: one rank a node looks. Collective."""
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        if local_size < self._world_size:
            if self._rank != 0 and os.environ.get("LOCAL_RANK", "0") == "0":
                store_files.await_name(stage)
            dist.barrier()

    def _write_shard(self, stage: Path) -> tuple[dict[str, FileEntry], dict[str, int]]:
        """Write this rank's tensors as they are gathered; returns its file entries, and tensor name -> bytes."""
        tensors = dict(self._policy.named_weights())
        order = in_file_order([self._spec(name, tensor) for name, tensor in tensors.items()])
        owners = share_out([spec.nbytes for spec in order], self._world_size)
        own = [
            part for spec, owner in zip(order, owners, strict=True) if owner == self._rank for part in self._parts(spec)
        ]
        num_shards = len(set(owners))
        file = SAFETENSORS_FILE
        if num_shards > 1:
            file = f"model-{self._rank + 1:05d}-of-{num_shards:05d}.safetensors"
        with open_safetensors(stage / file, own) if own else contextlib.nullcontext() as writer:
            for spec, owner in zip(order, owners, strict=True):
                whole = self._gather(tensors[spec.name])
                if writer is not None and owner == self._rank:
                    for piece in self._pieces[spec.name]:
                        writer.add(piece.of(whole))
        if writer is None:
            return {}, {}
        assert writer.file.entry is not None
        return {file: writer.file.entry}, {spec.name: spec.nbytes for spec in own}

    def _shard_bytes(self) -> int:
        """About the size of one shard."""
        specs = [self._spec(name, tensor) for name, tensor in self._policy.named_weights()]
        return sum(spec.nbytes for spec in specs) // self._world_size

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(name, tuple(tensor.shape), self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _parts(self, spec: TensorSpec) -> list[TensorSpec]:
        """The tensors as which one of the model's is written."""
        return [TensorSpec(piece.name, piece.shape(spec.shape), spec.dtype) for piece in self._pieces[spec.name]]

    @torch.no_grad()
    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the published dtype; cast before communication, which it may halve."""
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _commit(
        self,
        version: int,
        final: Path,
        stage: Path,
        shards: list[tuple[dict[str, FileEntry], dict[str, int]]],
        source_files: dict[str, FileEntry],
    ) -> Manifest:
        """Rank 0: everything besides the tensors, then the manifest and the rename."""
        entries = {name: entry for part, _ in shards for name, entry in part.items()}
        if len(entries) > 1:
            weight_map = {name: file for part, names in shards for file in part for name in names}
            total = sum(size for _, names in shards for size in names.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            content = json.dumps(index, indent=1).encode()
            entries[SAFETENSORS_INDEX] = store_files.write_file(stage / SAFETENSORS_INDEX, [content])
        entries |= source_files
        manifest = Manifest(
            kind="weights",
            step=version,
            version=version,
            writer="trainer",
            incarnation=self._incarnation,
            files=entries,
            meta={"model": self._model_name, "dtype": str(self._dtype).removeprefix("torch.")},
        )
        return commit_stage(stage, final, manifest, run=self._paths)

    def _copy_source_files(self, stage: Path) -> dict[str, FileEntry]:
        """config.json with the published dtype, generation config, tokenizer, remote code; returns their entries."""
        config = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        content = (json.dumps(config, indent=2) + "\n").encode()
        entries = {"config.json": store_files.write_file(stage / "config.json", [content])}
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.name not in _SKIPPED and not path.name.endswith(_WEIGHT_SUFFIXES):
                entries[path.name] = store_files.write_file(stage / path.name, [path.read_bytes()])
        return entries


def share_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that writes each tensor, so that all write about as much: each goes to the one with the least so far.

    Ranks that get something come first.
    """
    load = [0] * num_ranks
    owners = []
    for size in sizes:
        rank = load.index(min(load))
        owners.append(rank)
        load[rank] += max(size, 1)
    return owners
