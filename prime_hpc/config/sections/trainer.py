"""The trainer's section: ranks, optimizer, schedule, objective, batch shape."""

from typing import Literal

from pydantic import Field

from prime_hpc.config.sections.base import Section


class OptimConfig(Section):
    """AdamW and gradient clipping."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 is allowed (the log-probability self-test)."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's exponential decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator term."""
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 measures without clipping."""


class SchedulerConfig(Section):
    """Learning-rate schedule over steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; `wsd` is constant, then a linear decay."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up from 0."""
    decay_steps: int | None = Field(None, ge=0)
    """Length of the decay; default: all steps after the warm-up (`wsd`: the last tenth)."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""


class LossConfig(Section):
    """The RL objective."""

    type: Literal["aipo"] = "aipo"
    """Token-level AIPO (LlamaRL, arXiv 2505.24034): importance ratio clipped from above."""
    delta: float = Field(8.0, gt=0)
    """Upper clip of the importance ratio pi/mu."""
    normalize: Literal["token", "sequence"] = "token"
    """Divide the summed loss by the batch's trained tokens, or give each sequence equal weight."""


class FakeDataConfig(Section):
    """Random batches of the right shape, to measure the trainer alone (`--data.fake`)."""

    batch_size: int = Field(128, ge=1)
    """Samples a step, over all ranks."""
    seq_len: int = Field(128, ge=2)
    """Tokens of a sample (its upper bound with `length=variable`)."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples packed into one micro-batch."""
    length: Literal["fixed", "variable"] = "fixed"
    """Whether samples differ in length."""


class TrainerDataConfig(Section):
    """Where the RL trainer's batches come from."""

    fake: FakeDataConfig | None = None
    """Random data instead of the orchestrator's batches."""


class TrainerConfig(Section):
    """FSDP2 training under torchrun, for RL and SFT alike."""

    num_ranks: int = Field(1, ge=1)
    """Processes (GPUs) that train."""
    launcher: Literal["torchrun", "srun"] = "torchrun"
    """Under Slurm: torchrun on each node, or one srun task a rank."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Process group: NCCL on CUDA, gloo on CPU."""
    threads_per_rank: int | None = Field(None, ge=1)
    """torch intra-op threads of a rank; default: cores / ranks."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Token budget of one packed micro-batch; default: `seq_len`."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning-rate schedule."""
    loss: LossConfig = LossConfig()
    """RL objective."""
    data: TrainerDataConfig = TrainerDataConfig()
    """Batch source."""
    logits_chunk_tokens: int = Field(2048, ge=1)
    """Tokens whose logits exist at once (vocabulary-sized rows)."""
    dist_timeout_s: float = Field(600, gt=0)
    """Deadline of a collective."""
    batch_timeout_s: float = Field(1800, gt=0)
    """Deadline of the wait for one batch."""
    keep_weights: int = Field(2, ge=1)
    """Newest weight versions kept on disk besides those a reader or a checkpoint needs."""
    reshard_after_forward: bool = True
    """Free gathered parameters after each block's forward pass (FSDP2 full sharding)."""
    bench: bool = False
    """Run a few steps, print a table, end."""
