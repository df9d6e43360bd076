"""The trainer's section: ranks, optimizer, schedule, objective, batch shape."""

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.named_code import OBJECTIVES, Bounds, ObjectiveEntry
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import ObjectiveName
from prime_hpc.config.sections.parallel import ParallelConfig, ParallelDims


class OptimConfig(Section):
    """Optimizer and gradient clipping."""

    type: Literal["adamw", "muon", "signsgd"] = "adamw"
    """`muon`: matrices (of fused ones each part) by Muon, embeddings, output head, convolutions and vectors by AdamW;
    `signsgd`: the gradient's sign alone."""
    lr: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Peak learning rate; 0 is allowed (the log-probability self-test). `muon` takes AdamW's rates."""
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    """Decoupled weight decay, of all but vectors: norms, biases (also stacks of them), a state space's rates."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's exponential decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator term."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Momentum of `muon` (default 0.95) and of `signsgd` (default 0: no optimizer state)."""
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 measures without clipping."""
    offload: bool = False
    """Keep the optimizer's state in host memory, on the GPU only while it is used."""

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"both must lie in [0, 1), got {list(betas)}")
        return betas

    @property
    def state(self) -> str:
        """Kind of the state that a checkpoint holds: another optimizer cannot go on from it."""
        return "signsgd with momentum" if self.type == "signsgd" and self.momentum else self.type


class SchedulerConfig(Section):
    """Learning-rate schedule over steps: batches, however many updates each makes."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; `wsd` is constant, then a linear decay."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up from 0."""
    decay_steps: int | None = Field(None, ge=0)
    """Length of the decay; default: all steps after the warm-up (`wsd`: the last tenth, two at least)."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that the decay falls to: the step after its last one would have it."""


class KLConfig(Section):
    """A penalty on the distance to another policy, beside the objective."""

    target: Literal["reference", "behaviour"] = "reference"
    """`reference`: a frozen model that the trainer holds as well; `behaviour`: the policy that sampled the tokens."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per token, d = log pi - log target: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (GRPO's)."""
    coef: float = Field(1e-3, ge=0)
    """Weight of the penalty; 0 only measures it."""
    model: str | None = None
    """The reference: a directory or hub name; default: the model that training began with."""
    unbiased: bool = False
    """Times the ratio pi/mu to the policy that sampled, so that stale tokens leave no bias (DeepSeek-V3.2)."""
    in_rewards: bool = False
    """With `trainer.critic`: taken off each token's reward, once a batch and of the policy that sampled it, in place of
    a term of the loss (PPO's of RLHF, with `k1`)."""
    target_kl: float | None = Field(None, gt=0, allow_inf_nan=False)
    """`in_rewards`: control the weight so that the mean estimate, in nats a token, comes to this (Ziegler et al. 2019);
    `coef` is the one that it begins with. Off when absent: the weight stays."""
    horizon: float = Field(10_000, gt=0, allow_inf_nan=False)
    """`target_kl`: sequences in which the weight changes by a fifth of itself at most."""


class EntropyConfig(Section):
    """A bonus for the policy's entropy at the trained tokens, beside the objective."""

    coef: float = Field(1e-3, ge=0, allow_inf_nan=False)
    """Weight of the bonus; with `target` the one that its control begins with."""
    target: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Control the weight so that the mean entropy in nats a token does not stay below this (Skywork-OR1): while it is
    not above, the weight rises by `delta` a step, else it falls by that, and there is no bonus. Choose it near the
    entropy (the metric `entropy`) of the first steps; off when absent: the weight stays."""
    delta: float = Field(0.005, gt=0, allow_inf_nan=False)
    """`target`: change of the weight from step to step."""
    max_coef: float = Field(1.0, gt=0, allow_inf_nan=False)
    """`target`: largest weight."""

    @model_validator(mode="after")
    def _begins_below(self) -> "EntropyConfig":
        if self.target is not None and self.coef > self.max_coef:
            raise ValueError(
                f"coef ({self.coef:g}), with which its control begins, exceeds max_coef ({self.max_coef:g})"
            )
        return self


class CovarianceConfig(Section):
    """The few tokens whose log-probability and advantage vary together most, which drive the entropy down (arXiv
    2505.22617)."""

    type: Literal["clip", "kl"] = "clip"
    """`clip` (Clip-Cov): of the tokens between `low` and `high` some, drawn at random, do not train; `kl` (KL-Cov):
    those of highest covariance get a penalty on their distance to the policy that sampled them."""
    share: float = Field(2e-4, gt=0, le=1)
    """How many, as a share of the batch's tokens, over all ranks (verl has this for both)."""
    low: float = Field(1.0, gt=0, allow_inf_nan=False)
    """`clip`: least covariance of a token that may be drawn."""
    high: float = Field(5.0, gt=0)
    """`clip`: greatest one."""
    coef: float = Field(1.0, ge=0, allow_inf_nan=False)
    """`kl`: weight of the penalty (verl has 0.1)."""

    @model_validator(mode="after")
    def _ordered(self) -> "CovarianceConfig":
        if self.type == "clip" and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g}), or no token is drawn")
        return self


class RejectConfig(Section):
    """Sequences that an importance correction leaves out as a whole, by how far their tokens are from the engine."""

    estimator: Literal["k2", "k3"] = "k3"
    """Per token, d = log(pi/mu): k2 = d^2 / 2, k3 = exp(d) - 1 - d (the metric `kl`)."""
    over: Literal["mean", "sum", "max"] = "mean"
    """How a sequence's tokens are put together."""
    above: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Greatest value of a sequence that trains, in nats."""


class CorrectionConfig(Section):
    """Importance correction of the trainer's policy against the engine's, decoupled from the objective's own ratio."""

    type: Literal["truncate", "mask"] = "truncate"
    """Ratio c = pi/mu: `truncate` weighs by min(c, high) (TIS); `mask` by c inside [low, high], by 0 outside (MIS)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, of its whole sequence (the product), or the sequence's geometric mean."""
    low: float = Field(0.5, ge=0)
    """`mask`: smallest ratio kept."""
    high: float = Field(2.0, gt=0)
    """Largest ratio kept (`mask`) or used (`truncate`)."""
    geometric_low: float = Field(0.0, ge=0)
    """Beside either, at any level: leave out sequences the geometric mean of whose tokens' ratios is smaller."""
    geometric_high: float | None = Field(None, gt=0)
    """The same for those where it is greater (verl's Geo-RS has 0.999 and 1.001); off when absent."""
    reject: RejectConfig | None = None
    """Beside either, at any level: leave out sequences by a divergence that is never negative; off when absent."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole batch (self-normalised importance sampling), so that truncation
    and what is left out do not make the step smaller; with one update a batch one more forward pass."""

    @model_validator(mode="after")
    def _ordered(self) -> "CorrectionConfig":
        if self.type == "mask" and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g}), or every token is masked")
        if self.geometric_high is not None and self.geometric_low >= self.geometric_high:
            stated = f"geometric_low ({self.geometric_low:g}) must be below geometric_high ({self.geometric_high:g})"
            raise ValueError(f"{stated}, or every sequence is left out")
        return self


class MismatchConfig(Section):
    """Alarm on the distance between the trainer's and the engine's log-probabilities (the metric `kl`)."""

    warn: float | None = Field(0.1, gt=0)
    """Warn when the mean KL per token in nats exceeds this; null: never."""
    stop: float | None = Field(None, gt=0)
    """Stop the run, before the update, when it exceeds this."""


NO_SYNC_BYTES = 1 << 30
"""`trainer.no_sync` is on by default where whole gradients take no more than this on a rank."""
SMALL_LOGITS = 1 << 24
"""So many logits (64 MiB) are no reason to work in chunks: a small vocabulary's are kept for the backward pass."""


class DistillationConfig(Section):
    """The divergence between the teacher's and the policy's whole distributions, beside the objective."""

    top_k: int = Field(64, ge=1, le=4096)
    """The teacher's likeliest tokens at each trained one, over which the two are compared; all other tokens are one
    more. 8 bytes each in the batch."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """`forward_kl`: KL(teacher || policy), which covers all that the teacher says; `reverse_kl`: KL(policy || teacher),
    which keeps to its likeliest; `jsd`: the generalized Jensen-Shannon divergence, between the two."""
    beta: float = Field(0.5, gt=0, lt=1)
    """`jsd`: the teacher's share of the mixture; near 0 it goes as the forward KL, near 1 as the reverse one."""
    coef: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of the divergence, against the objective."""

    @property
    def batch_bytes(self) -> int:
        """Bytes that it adds to a token of the batch: ids and log-probabilities."""
        return 8 * self.top_k


class LossConfig(Section):
    """The RL objective."""

    type: ObjectiveName = "aipo"
    """Objective by name (`prime_hpc/trainer/objectives/policy_gradient`), or your own as `module:function`."""
    delta: float = Field(8.0, gt=0)
    """`aipo`: upper clip of the importance ratio pi/mu."""
    clip_low: float | None = Field(None, ge=0)
    """How far below 1 the ratio may fall; default 0.2, `gspo` 3e-4, `cispo` 1 (no lower clip). `gmpo`: how far its
    logarithm may fall; default 0.4. `dppo` and `ipo`: how far the token's probability may fall; default 0.2 and 0.1
    (`dppo` with `divergence = kl`: 0.05)."""
    clip_high: float | None = Field(None, ge=0)
    """The same above 1; default 0.2, `gspo` 4e-4, `cispo` 4; `gmpo`, `dppo` and `ipo` as `clip_low`."""
    dual_clip: float | None = Field(None, gt=1)
    """`ppo_clip`, `grpo`, `dr_grpo`: bound of the ratio where the advantage is negative (dual-clip PPO); off."""
    tau_pos: float = Field(1.0, gt=0)
    """`sapo`: temperature of the gate where the advantage is positive; the greater, the sooner an off-policy token
    counts less."""
    tau_neg: float = Field(1.05, gt=0)
    """`sapo`: the same where it is negative."""
    gamma_pos: tuple[float, float] = (2.0, 3.0)
    """`vespo`: c1 and c2 of its weight W^c1 exp(c2 (1 - W)) where the advantage is positive, W the ratio of the whole
    sequence."""
    gamma_neg: tuple[float, float] = (3.0, 2.0)
    """`vespo`: the same where it is negative."""
    divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: the trust region's measure, binary total variation or binary KL."""
    normalize: Literal["auto", "token", "sequence", "batch"] = "auto"
    """The divisor of a token's loss: all trained tokens of the batch; its sequence's, then the number of
    sequences; or a constant, sequences x `batch_tokens`. `auto`: as the objective's paper has it."""
    denominators: Literal["all", "trained"] = "all"
    """Rollouts that those divisors count. `all`: every rollout of the step that may train, also those of groups
    without signal (`orchestrator.advantage.zero` leaves them out of the batch, as they add nothing), an episode's
    pieces together: the papers' sums over all groups. `trained`: the sequences in the batch, so that a step of few
    groups with signal weighs each of them the more."""
    batch_tokens: int | None = Field(None, ge=1)
    """`normalize = batch`: the constant number of tokens of a sequence; default `seq_len`."""
    kl: KLConfig | None = None
    """KL penalty; off when absent."""
    correction: CorrectionConfig | None = None
    """Importance correction; off when absent: the objectives' own ratio is to the engine's log-probabilities."""
    off_policy_mask: float | None = Field(None, gt=0)
    """Leave out sequences whose advantage is negative and from which the policy has moved away: by more than this in
    the mean of log mu - log pi over their tokens, in nats (DeepSeek-V3.2; 0.5 is TRL's example); off when absent."""
    second_moment: float | None = Field(None, gt=0, allow_inf_nan=False)
    """M2PO (0.04): greatest mean of (log pi - log mu)^2 over the batch's tokens that train; the farthest are left out.
    Costs one more forward pass over the batch; off when absent."""
    entropy: EntropyConfig | None = None
    """Entropy bonus; off when absent."""
    top_entropy_quantile: float | None = Field(None, gt=0, le=1)
    """Train only this share of the batch's tokens, those of the highest entropy, over all ranks (0.2 in "Beyond the
    80/20 Rule"); a KL penalty and an entropy bonus are of all. Costs one more forward pass over the batch; off when
    absent."""
    covariance: CovarianceConfig | None = None
    """Clip-Cov or KL-Cov; off when absent."""
    distillation: DistillationConfig | None = None
    """Distillation by the teacher's whole distribution, in the place of one token's advantage; off when absent."""
    mismatch: MismatchConfig = MismatchConfig()
    """Alarm on the mismatch to the engine."""

    @property
    def objective(self) -> ObjectiveEntry:
        """Facts of the objective; the defaults for your own."""
        return OBJECTIVES.get(self.type) or ObjectiveEntry(self.type)

    @property
    def is_of_all_tokens(self) -> bool:
        """True if tokens without an advantage change the loss, too."""
        penalized = self.kl is not None and self.kl.coef > 0
        rewarded = self.entropy is not None and (self.entropy.coef > 0 or self.entropy.target is not None)
        return self.objective.imitates or penalized or rewarded or self.distillation is not None

    @property
    def bounds(self) -> Bounds:
        """The configured bounds, with the objective's where none are stated."""
        objective = self.objective
        default = (objective.kl_bounds if self.divergence == "kl" else None) or objective.bounds
        low, high = self.clip_low, self.clip_high
        return Bounds(default.low if low is None else low, default.high if high is None else high)

    @model_validator(mode="after")
    def _fits(self) -> "LossConfig":
        objective = self.objective
        if self.correction is not None and objective.masks_mismatch:
            raise ValueError(f"trainer.loss.type = {self.type} masks by the mismatch itself: leave correction out")
        if self.dual_clip is not None and not objective.dual_clip:
            clipped = ", ".join(name for name, entry in OBJECTIVES.items() if entry.dual_clip)
            raise ValueError(f"dual_clip is of {clipped} only, not of trainer.loss.type = {self.type}")
        if (self.clip_low or 0) > 1 and self.type != "gmpo":  # whose bounds are of logarithms
            raise ValueError(f"clip_low ({self.clip_low:g}) cannot exceed 1: ratios and probabilities end at 0")
        if self.correction is not None and objective.imitates:
            raise ValueError(f"trainer.loss.type = {self.type} has no importance ratio: leave correction out")
        for key, (c1, c2) in (("gamma_pos", self.gamma_pos), ("gamma_neg", self.gamma_neg)):
            if not 0 <= c1 < math.inf or not 0 <= c2 < math.inf or (c1 and not c2):
                raise ValueError(
                    f"{key} = ({c1:g}, {c2:g}): both must be finite and not negative, and c2 above 0 where c1 is, or "
                    "the weight is without bound"
                )
        for key in ("off_policy_mask", "second_moment", "covariance"):
            if getattr(self, key) is not None and objective.imitates:
                raise ValueError(f"trainer.loss.type = {self.type} looks at no advantage: leave {key} out")
        return self


class CriticConfig(Section):
    """PPO's value model, trained beside the policy; advantages by generalized advantage estimation."""

    name: str | None = None
    """Directory or hub name of the model that it begins as, of the policy's vocabulary; a reward model keeps its head.
    Default: `model.name`, with a head whose values begin at 0."""
    lr: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Its peak learning rate; the rest of the optimizer and the schedule are the policy's."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which it alone learns, and the policy stays as it is."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of the next token's value."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the advantages: 1 trusts the rewards alone, below 1 the values the more."""
    critic_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that it learns; 1: the rewards to come (VC-PPO's decoupled GAE)."""
    length_adaptive_alpha: float | None = Field(None, gt=0, allow_inf_nan=False)
    """In the place of `lam`, 1 - 1 / (alpha x length) of each sequence (VAPO's 0.05); off when absent."""
    whiten: bool = True
    """Take the mean off the batch's advantages and divide by their standard deviation, over all tokens."""
    value_clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    """With several updates a batch: a value that has moved farther than this from what it was before the first one, and
    towards its return, learns no more from it (PPO's code has 0.2; verl 0.5); off when absent."""


class FakeDataConfig(Section):
    """Random batches of the right shape, to measure the trainer alone (`--data.fake`)."""

    batch_size: int = Field(128, ge=1)
    """Samples a step, over all ranks."""
    seq_len: int = Field(128, ge=2)
    """Tokens of a sample (its upper bound with `length=variable`)."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples packed into one micro-batch."""
    length: Literal["fixed", "variable"] = "fixed"
    """Make samples of different lengths."""


class TrainerDataConfig(Section):
    """The source of the RL trainer's batches."""

    fake: FakeDataConfig | None = None
    """Random data instead of the orchestrator's batches."""


class ProfileConfig(Section):
    """Traces of torch's profiler in `<run>/profile` (`--trainer.profile`), for Perfetto or chrome://tracing."""

    first_step: int = Field(3, ge=1)
    """First step that is traced; earlier ones warm up."""
    last_step: int = Field(4, ge=1)
    """Last one."""
    ranks: list[int] = Field([0], min_length=1)
    """Ranks that trace."""
    stacks: bool = False
    """Python stacks and shapes too: larger, and slower steps. Also in the snapshot of a GPU that runs out of memory."""
    memory: bool = False
    """Allocations too."""

    @model_validator(mode="after")
    def _ordered(self) -> "ProfileConfig":
        if self.last_step < self.first_step:
            raise ValueError(f"last_step ({self.last_step}) comes before first_step ({self.first_step})")
        return self


class TinkerConfig(Section):
    """A service for the `tinker` client (`prime-hpc serve --tinker`): its users train adapters step by step."""

    host: str | None = None
    """Address to listen on; 0.0.0.0 is every address of the machine. Default: 127.0.0.1; as a job of a cluster its
    node's in `network.serving`, or all. Requests are not encrypted: reach another machine through ssh, or in a network
    that you trust."""
    port: int | None = Field(None, ge=0, le=65535)
    """Port; 0 takes a free one. Default: 8780; as a job of a cluster a free one. `<run>/tinker.url` says where the
    service answers, `<run>/tinker.key` holds the key that clients must send."""
    session_timeout_s: float = Field(600, gt=0)
    """A client that gives no sign of life for so long has ended: its adapters give their places back to others."""


class TrainerConfig(Section):
    """FSDP2 training under torchrun, for RL and SFT alike."""

    num_ranks: int = Field(1, ge=1)
    """Processes (GPUs) that train."""
    parallel: ParallelConfig = ParallelConfig()
    """How they share the work; by default all shard one copy of the model (FSDP)."""
    launcher: Literal["torchrun", "srun"] = "torchrun"
    """Under Slurm: torchrun on each node, or one srun task a rank."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Process group: NCCL on CUDA, gloo on CPU."""
    bind_cpus: bool = True
    """On GPUs: keep each rank on the CPUs of its GPU's socket, where the kernel tells which those are."""
    threads_per_rank: int | None = Field(None, ge=1)
    """torch intra-op threads of a rank; default: cores / ranks."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Token budget of one packed micro-batch; default: the largest multiple of `seq_len` that fits the GPU's memory by
    the estimate of `plan`, which says it, kept for the run; `seq_len` on a CPU, and where that memory is not known."""
    rows: Literal["auto", "packed", "single"] = "auto"
    """How samples lie in a micro-batch: `packed` behind each other in one row, or `single`, each in a row of its own,
    padded to the longest, and dealt out by length. `auto`: packed where the model's family allows it, which is faster;
    families whose layers would carry one sample into the next cannot be packed."""
    share_prefixes: bool = True
    """Compute what a group's samples in one micro-batch begin with (their prompt) once, and not for each of them."""
    router_replay: bool = False
    """RL of a mixture of experts: the engines record to which experts they send each token, and the trainer sends it to
    the same ones, so that the two agree as they do for a dense model."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning-rate schedule."""
    loss: LossConfig = LossConfig()
    """RL objective."""
    num_mini_batches: int = Field(1, ge=1)
    """RL: parts of a batch, by prompts drawn at random, each an optimizer step; versions and schedules count
    batches."""
    epochs_per_batch: int = Field(1, ge=1)
    """RL: passes over a batch, in the same order; advantages are made once."""
    critic: CriticConfig | None = None
    """A critic, for `orchestrator.advantage.type = gae`; off when absent."""
    data: TrainerDataConfig = TrainerDataConfig()
    """Batch source."""
    logits_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits (vocabulary-sized rows) exist at once; more where those take less than 64 MiB."""
    dist_timeout_s: float = Field(1200, gt=0)
    """Deadline of a collective; longer than a shared file system may hang, for a rank may wait for it."""
    batch_timeout_s: float = Field(1800, gt=0)
    """Deadline of the wait for one batch."""
    keep_weights: int = Field(2, ge=1)
    """Newest weight versions kept on disk besides those a reader or a checkpoint needs."""
    publish_beside: bool | None = None
    """RL: a weight version is copied to (pinned) host memory and written beside the next step; costs each rank its
    share of the published weights there; where a node has too little, each step waits for its version. Default: on
    GPUs; on a CPU writing is as cheap as the copy. With `async_level` 0 the step waits for the engines all the same."""
    reshard_after_forward: bool = True
    """Free gathered parameters after each block's forward pass (FSDP2 full sharding)."""
    no_sync: bool | None = None
    """Accumulate whole gradients over a step's micro-batches, and reduce and scatter them with the last one only: less
    communication, for 4 bytes a parameter on every rank however many there are. Off: each micro-batch's are reduced and
    scattered at once. Default: on where that is at most 1 GiB."""
    max_concurrent_runs: int = Field(1, ge=1)
    """More than 1: one trainer for many runs, each a `run_<id>` directory below this run's (`prime-hpc runs add`) with
    an adapter, optimizer, schedule, progress and orchestrator of its own; so many train at once, others wait."""
    runs_idle_timeout_s: float = Field(300, ge=0)
    """With `max_concurrent_runs`: end so long after the last run has ended."""
    tinker: TinkerConfig | None = None
    """With `max_concurrent_runs`: no runs of ours, but adapters that clients of the `tinker` package train."""
    deterministic: bool = False
    """Repeat a step to the last bit on CUDA too (resume, replay): kernels without atomics, NCCL rings alone, no
    autotuning; slower, and an operation that has no such kernel is refused. A CPU does without it."""
    profile: ProfileConfig | None = None
    """Trace some steps; off when absent."""
    log_tokens: int = Field(2, ge=0)
    """Rollouts of about 40 steps over the run that are written token by token, with the probabilities of engine and
    trainer, into `metrics/tokens.jsonl` for `report`: so many a step, of rank 0's first micro-batch."""
    bench: bool = False
    """Run a few steps, print a table, end."""

    @property
    def parallel_dims(self) -> ParallelDims:
        """Sizes of the ranks' parallel dimensions."""
        return self.parallel.dims(self.num_ranks)

    @property
    def shares_prefixes(self) -> bool:
        """True if a group's prompt is computed once in a micro-batch: not where ranks split its tokens."""
        return self.share_prefixes and self.parallel_dims.ranks_per_part == 1

    @property
    def for_critic(self) -> "TrainerConfig":
        """The section as the critic's own step takes it."""
        assert self.critic is not None
        optim = self.optim.model_copy(update={"lr": self.critic.lr})
        return self.model_copy(update={"optim": optim, "loss": LossConfig(denominators="trained")})

    def defers_sync(self, whole_bytes: float) -> bool:
        """Return whether gradients stay whole until a step's last micro-batch (`no_sync`).
        `whole_bytes`: of one rank's whole gradients in float32, after tensor and expert parallelism."""
        return whole_bytes <= NO_SYNC_BYTES if self.no_sync is None else self.no_sync

    @model_validator(mode="after")
    def _lays_out(self) -> "TrainerConfig":
        self.parallel.dims(self.num_ranks)
        if self.rows == "single" and self.parallel.cp > 1:
            raise ValueError(
                f"parallel.cp = {self.parallel.cp}: context-parallel ranks cannot split rows of one sample each "
                "(rows = single): set cp to 1, or leave rows out"
            )
        return self
