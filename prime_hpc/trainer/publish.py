"""Publishing a weight version, all ranks at once, as an artifact that Hugging Face and vLLM load as it is.

Called by `rl.py` and `sft.py` after an optimizer step. With `model.lora` a version is the adapter alone, see
`lora.files.AdapterPublisher`. Else parameters are gathered one by one; parameter i stays with rank
i mod world size, which writes its share as one safetensors shard. Rank 0 adds the index, config.json and the tokenizer
of the source model, and commits.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from prime_hpc.store import files as store_files
from prime_hpc.store.artifact import FileEntry, Manifest, commit_stage, hash_files, prepare_stage, stage_dir
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.lora.files import AdapterPublisher
from prime_hpc.trainer.model import SAFETENSORS_FILE, SAFETENSORS_INDEX, Policy

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SKIPPED = {"config.json", "manifest.json", ".gitattributes", "README.md"}


class VersionPublisher(Protocol):
    """Writes weight versions."""

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`; the manifest on rank 0. Collective."""


def build_publisher(
    policy: Policy, source: Path, paths: RunPaths, *, dtype: torch.dtype, incarnation: int, model_name: str
) -> VersionPublisher:
    """What fits the policy; arguments as `Publisher`'s."""
    if policy.adapters is not None:
        return AdapterPublisher(policy, source, paths, incarnation=incarnation, model_name=model_name)
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

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`.

        Returns:
            the manifest on rank 0, None elsewhere.

        Raises:
            StoreError: disk full, fenced, or other content has this name.
        """
        final = self._paths.weights_step(version)
        stage = stage_dir(final, self._incarnation)
        try:
            if self._rank == 0:
                prepare_stage(final, self._incarnation, run=self._paths)
            dist.barrier()  # the stage exists
            entries, names = self._write_shard(stage)
            gathered: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
            dist.gather_object((entries, names), gathered)
            if gathered is None:
                return None
            return self._commit(version, final, stage, gathered)
        except BaseException:
            if self._rank == 0:  # whatever ended this, nothing half-written stays behind
                store_files.remove_tree(stage)
            raise

    def _write_shard(self, stage: Path) -> tuple[dict[str, FileEntry], dict[str, int]]:
        """Write this rank's tensors; returns its file entries, and tensor name -> bytes."""
        from safetensors.torch import save_file

        named = self._policy.named_weights()
        num_shards = min(self._world_size, len(named))
        own: dict[str, torch.Tensor] = {}
        for i, (name, tensor) in enumerate(named):
            whole = self._gather(tensor)
            if i % self._world_size == self._rank:
                own[name] = whole.cpu().contiguous()
        if not own:
            return {}, {}
        file = SAFETENSORS_FILE
        if num_shards > 1:
            file = f"model-{self._rank + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file(own, stage / file, metadata={"format": "pt"})
        return hash_files(stage, [file]), {name: t.numel() * t.element_size() for name, t in own.items()}

    @torch.no_grad()
    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor in the published dtype; cast before communication, which it may halve."""
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _commit(
        self, version: int, final: Path, stage: Path, shards: list[tuple[dict[str, FileEntry], dict[str, int]]]
    ) -> Manifest:
        """Rank 0: everything besides the tensors, then the manifest and the rename."""
        entries = {name: entry for part, _ in shards for name, entry in part.items()}
        extra = self._copy_source_files(stage)
        if len(entries) > 1:
            weight_map = {name: file for part, names in shards for file in part for name in names}
            total = sum(size for _, names in shards for size in names.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (stage / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            extra.append(SAFETENSORS_INDEX)
        entries |= hash_files(stage, extra)
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

    def _copy_source_files(self, stage: Path) -> list[str]:
        """config.json with the published dtype, generation config, tokenizer, remote code; returns the names."""
        config = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        names = ["config.json"]
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.name not in _SKIPPED and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(path, stage / path.name)
                names.append(path.name)
        return names
