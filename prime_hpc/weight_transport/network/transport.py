"""`weights.transport: gloo` and `nccl`: see the package."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.store.errors import StoreError
from prime_hpc.weight_transport.network.sender import NetworkSender
from prime_hpc.weight_transport.transport import Receiver, Sender, WholeFile


class NoFilesReceiver:
    """For readers of files: a version that has none."""

    def fetch(self, folder: Path) -> Path:
        """Refuse. Raises StoreError: always."""
        raise StoreError(
            f"{folder} holds no weights: it went to the engines over the network; whole versions come every "
            "weights.whole_interval versions, with every checkpoint and at the end"
        )


@dataclass(frozen=True)
class NetworkTransport:
    """Both sides, over process groups of one kind."""

    backend: str
    gathers: bool = True

    def sender(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int) -> Sender:
        """Return what keeps an image and sends it. Raises ValueError: `nccl` without a GPU."""
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise ValueError("weights.transport = nccl, but the trainer has no GPU; use gloo, or files")
        return NetworkSender(config, files, rank, self.backend)

    def receiver(self, scratch: Path) -> Receiver:
        """Return what says that there are no files: engines receive by themselves."""
        return NoFilesReceiver()


GLOO = NetworkTransport("gloo")
NCCL = NetworkTransport("nccl")
