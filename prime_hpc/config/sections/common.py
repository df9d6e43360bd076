"""Shared sections: the model, checkpoints, W&B, logging. Each is stated once, at the tree's root."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from prime_hpc.config.sections.base import Section

Dtype = Literal["float32", "bfloat16", "float16"]


class ActivationCheckpointConfig(Section):
    """Recompute activations in the backward pass instead of keeping them (`--model.ac`)."""

    freq: int = Field(1, ge=1)
    """Every freq-th transformer block is recomputed."""


class ModelConfig(Section):
    """The policy: which weights, in which precision, which chat template."""

    name: str = "Qwen/Qwen3-0.6B"
    """Local directory or hub name of a Hugging Face causal language model."""
    dtype: Dtype = "bfloat16"
    """Compute precision of the trainer's forward and backward pass, and of the engines."""
    attn: Literal["auto", "flash", "sdpa"] = "auto"
    """Varlen attention of the trainer: flash-attention where installed, else packed sdpa."""
    compile: bool = False
    """torch.compile each transformer block of the trainer."""
    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing; off when absent."""
    trust_remote_code: bool = False
    """Run model code that ships with the weights."""
    renderer: str = "auto"
    """How messages become tokens: a `renderers` name (`qwen3`, `default`, ...); `auto` looks at the model."""
    enable_thinking: bool = False
    """Whether the chat template opens a think section."""


class CkptConfig(Section):
    """Checkpoints. Off unless `--ckpt` (or any `--ckpt.*`) is given."""

    interval: int = Field(50, ge=1)
    """Save every so many steps; the last step is always saved."""
    path: Path | None = None
    """Directory of the checkpoints; default `<run>/checkpoints`."""
    resume_step: int | Literal["latest"] | None = None
    """Resume from this step's checkpoint; `latest` takes the newest whole one."""


class WandbConfig(Section):
    """Weights & Biases. Offline where there is no API key; it can never stop a run."""

    project: str = "prime-hpc"
    """W&B project."""
    name: str | None = None
    """Run name; default the experiment's name. Roles append `-trainer`, `-orchestrator`."""
    id: str | None = None
    """Resume the W&B run with this id."""
    offline: bool | None = None
    """Force offline (or online) mode; default: offline unless WANDB_API_KEY is set."""


class LogConfig(Section):
    """Console and log files."""

    level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is written."""
    json_lines: bool = False
    """Write log files as one JSON object a line."""
