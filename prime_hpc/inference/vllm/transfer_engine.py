"""vLLM's weight-transfer interface over a process group with each of the trainer's ranks (`weights.transport: gloo`,
`nccl`). Imported where the worker's extension is, by which vLLM knows it.

vLLM's own `nccl` engine has one sender, a rendezvous that unpickles what the network brings, and no deadline.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.utils.nccl import unpinned_nccl_env

from prime_hpc.inference.tensor_file import DTYPES
from prime_hpc.inference.vllm import reloads
from prime_hpc.inference.vllm.args import TRANSFER_ENGINE
from prime_hpc.weight_transport.network.group import Group, connect
from prime_hpc.weight_transport.network.layout import buckets, read_layout

LM_HEAD = "lm_head.weight"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """The groups to join, in the order of the version's parts."""

    backend: str = "gloo"
    size: int = 0
    """Of each: the rank that sends, and all workers of the server."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """`host`, `port`, `name` of each."""


@dataclass
class PartInfo(WeightTransferUpdateInfo):
    """One part of a version."""

    index: int = 0
    """Of its group."""
    layout: str = ""
    """File that begins with its header."""
    xxh3: str = ""
    """Of its values."""


class TransferEngine(WeightTransferEngine[JoinInfo, PartInfo]):
    """One worker's end."""

    init_info_cls = JoinInfo
    update_info_cls = PartInfo
    _groups: tuple[Group, ...] = ()

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join, instead of what was joined before. Raises a RuntimeError where not all come in time."""
        self.shutdown()
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        try:
            for where in init_info.groups:
                store = connect(where["host"], where["port"])
                group = Group(store, where["name"], rank, init_info.size, init_info.backend, where["host"], self.device)
                self._groups += (group,)
            with unpinned_nccl_env():  # what vLLM states for its own engines alone
                for group in self._groups:  # not before all are there: each may take NCCL a second
                    group.connect()
        except BaseException:
            self.shutdown()
            raise

    def start_weight_update(self) -> None:
        """Make layers ready to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PartInfo) -> None:
        """Receive a part, bucket by bucket, into the model.
        Raises RuntimeError: the sender or another worker is gone, or what came is not what was sent."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        model: Any = self.model
        with disable_mtp_completeness_check(), reloads.writes_arrive(model):
            model.load_weights(self._received(update_info))

    def _received(self, part: PartInfo) -> Iterator[tuple[str, torch.Tensor]]:
        group, entries = self._groups[part.index], read_layout(Path(part.layout))
        tied = self.model_config.hf_text_config.tie_word_embeddings
        is_host = group.device.type == "cpu"
        summed = xxhash.xxh3_64()
        for bucket in buckets(entries):
            first = bucket[0].begin
            values = torch.empty(bucket[-1].end - first, dtype=torch.uint8, device=group.device)
            group.broadcast(values)
            if is_host:  # what comes over a socket of the host; NCCL's own ways have no memory to sum here
                summed.update(values.numpy().data)
            for entry in bucket:
                if not (tied and entry.name == LM_HEAD):
                    content = values[entry.begin - first : entry.end - first]
                    yield entry.name, content.view(DTYPES[entry.dtype]).view(entry.shape)
        if is_host and summed.hexdigest() != part.xxh3:
            raise RuntimeError(f"the values came with sum {summed.hexdigest()} instead of {part.xxh3}")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, on every device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """All parts are here. Raises `reloads.NotLoadedError`."""
        reloads.finish(self.model, self.model_config)

    def abandon_weight_update(self) -> None:
        """Not all parts will be here: the model is undefined until it is loaded again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the groups."""
        groups, self._groups = self._groups, ()
        for group in groups:
            group.close()


def register() -> None:
    """Make vLLM know the engine; a second time does no harm."""
    if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_ENGINE, TransferEngine)
