"""SFT's section: the data and its batch shape. Optimizer and ranks are the trainer's."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from prime_hpc.config.sections.base import Section


class SFTDataConfig(Section):
    """Prompt-completion or messages data for supervised fine-tuning."""

    type: Literal["jsonl", "fake"] = "jsonl"
    """A JSON-lines file, or random tokens."""
    path: Path | None = None
    """The JSON-lines file: rows with `prompt` and `completion`, or with `messages` (and `tools`)."""
    batch_size: int = Field(64, ge=1)
    """Samples a step, over all ranks."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples of one micro-batch of fake data (real data is packed to `micro_batch_tokens`)."""
    length: Literal["fixed", "variable"] = "fixed"
    """Lengths of fake samples."""
    seq_len: int | None = Field(None, ge=2)
    """Longest sample in tokens; default: the tree's `seq_len`."""
    shuffle: bool = True
    """Shuffle every epoch, by seed."""
    loss_roles: tuple[str, ...] = ("assistant",)
    """Messages of these roles are trained on."""
    overlong: Literal["error", "drop", "truncate"] = "drop"
    """What happens to a sample longer than `seq_len`."""


class SFTConfig(Section):
    """Supervised fine-tuning."""

    data: SFTDataConfig = SFTDataConfig()
    """The data."""
    save_interval: int | None = Field(None, ge=1)
    """Publish weights every so many steps besides the last."""
