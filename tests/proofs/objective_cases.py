"""Random ragged batches, the objectives' settings that are proved, and our side of each comparison."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.config.sections.trainer import CorrectionConfig, CovarianceConfig, KLConfig, LossConfig
from prime_hpc.store.batch.rank_batch import RankBatch, select_micro_batches
from prime_hpc.trainer.batching.micro_batches import batch_facts, make_micro_batch, objective_part
from prime_hpc.trainer.objectives import echo_loss, normalization, rl_loss, sft_loss, target_weights
from prime_hpc.trainer.objectives.covariance import high_covariance
from prime_hpc.trainer.objectives.second_moment import beyond_second_moment
from tests.proofs.reference import Sequence, Setting, kink_distance

CONSTANT = 37
"""`batch_tokens` of the cases normalised per batch."""


@dataclass(frozen=True)
class Case:
    """One row of the table: our config, the reference's setting."""

    name: str
    config: LossConfig
    setting: Setting
    token_advantages: bool = False
    """Advantages differ within a sequence."""


def _case(name: str, setting: Setting, *, token_advantages: bool = False, **config: object) -> Case:
    kl, correction = setting.kl, setting.correction
    tree = {"batch_tokens": CONSTANT} | config
    if kl is not None:
        tree["kl"] = KLConfig(target=kl[0], estimator=kl[1], coef=kl[2], unbiased=setting.unbiased)
    if setting.covariance is not None:
        tree["covariance"] = dict(zip(("type", "share", "low", "high", "coef"), setting.covariance, strict=True))
    if correction is not None:
        (form, level, low, high), (least, most) = correction, setting.geometric or (0.0, None)
        bounds: dict[str, object] = {"low": low, "high": high, "geometric_low": least, "geometric_high": most}
        if setting.reject is not None:
            bounds["reject"] = dict(zip(("estimator", "over", "above"), setting.reject, strict=True))
        tree["correction"] = CorrectionConfig.model_validate({"type": form, "level": level, **bounds})
    return Case(name, LossConfig.model_validate(tree), setting, token_advantages)


def cases() -> list[Case]:
    """Every objective with its paper's settings and its options, normalisations, KL terms and corrections."""
    s = Setting
    found = [
        _case("sft", s("sft")),
        _case("aipo", s("aipo", delta=2.0), type="aipo", delta=2.0, token_advantages=True),
        _case("reinforce", s("reinforce"), type="reinforce", token_advantages=True),
        _case("nll", s("nll"), type="nll", token_advantages=True),
        _case("nll / sequence", s("nll", normalize="sequence"), type="nll", normalize="sequence"),
        _case("ppo_clip", s("ppo_clip"), type="ppo_clip", token_advantages=True),
        _case("ppo_clip high", s("ppo_clip", low=0.1, high=0.28), type="ppo_clip", clip_low=0.1, clip_high=0.28),
        _case("ppo_clip dual", s("ppo_clip", dual=1.5), type="ppo_clip", dual_clip=1.5, token_advantages=True),
        _case("grpo", s("grpo", normalize="sequence"), type="grpo"),
        _case("dr_grpo", s("dr_grpo", normalize="batch", constant=CONSTANT), type="dr_grpo"),
        _case("gspo", s("gspo", low=3e-4, high=4e-4, normalize="sequence"), type="gspo"),
        _case(
            "gspo wide",
            s("gspo_token", low=0.1, high=0.2, normalize="sequence"),
            type="gspo",
            clip_low=0.1,
            clip_high=0.2,
            token_advantages=True,
        ),
        _case("gmpo", s("gmpo", low=0.4, high=0.4, normalize="sequence"), type="gmpo"),
        _case(
            "gmpo uneven", s("gmpo", low=0.1, high=0.3, normalize="sequence"), type="gmpo", clip_low=0.1, clip_high=0.3
        ),
        _case("sapo", s("sapo", normalize="sequence"), type="sapo", token_advantages=True),
        _case(
            "sapo sharp", s("sapo", tau_pos=1.5, tau_neg=2.0), type="sapo", normalize="token", tau_pos=1.5, tau_neg=2
        ),
        _case("vespo", s("vespo"), type="vespo", token_advantages=True),
        _case(
            "vespo flat",
            s("vespo", gamma_pos=(1.0, 0.5), gamma_neg=(1.2, 0.9), normalize="sequence"),
            type="vespo",
            gamma_pos=(1.0, 0.5),
            gamma_neg=(1.2, 0.9),
            normalize="sequence",
        ),
        *_left_out_cases(),
        _case("cispo", s("cispo", low=1.0, high=4.0), type="cispo", token_advantages=True),
        _case("cispo both", s("cispo", low=0.3, high=0.5), type="cispo", clip_low=0.3, clip_high=0.5),
        _case("dppo tv", s("dppo"), type="dppo", token_advantages=True),
        _case("dppo tv uneven", s("dppo", low=0.1, high=0.25), type="dppo", clip_low=0.1, clip_high=0.25),
        _case("dppo kl", s("dppo", low=0.05, high=0.05, divergence="kl"), type="dppo", divergence="kl"),
        _case("ipo", s("ipo", low=0.1, high=0.1), type="ipo", token_advantages=True),
        _case("ipo uneven", s("ipo", low=0.05, high=0.2), type="ipo", clip_low=0.05, clip_high=0.2),
    ]
    for kind, low, high in (("grpo", 0.2, 0.2), ("gspo", 3e-4, 4e-4), ("aipo", 0.2, 0.2)):
        for normalize in ("token", "sequence", "batch"):
            setting = s(kind, low=low, high=high, normalize=normalize, constant=CONSTANT)
            found.append(_case(f"{kind} / {normalize}", setting, type=kind, normalize=normalize))
    for target in ("reference", "behaviour"):
        for estimator in ("k1", "k2", "k3"):
            setting = s("grpo", normalize="sequence", kl=(target, estimator, 0.3))
            found.append(_case(f"grpo + {estimator} {target}", setting, type="grpo"))
    found.append(_case("dppo + k2 behaviour", s("dppo", kl=("behaviour", "k2", 2e-3)), type="dppo"))
    for target in ("reference", "behaviour"):
        for estimator in ("k1", "k2", "k3"):
            setting = s("grpo", normalize="sequence", kl=(target, estimator, 0.3), unbiased=True)
            found.append(_case(f"grpo + unbiased {estimator} {target}", setting, type="grpo"))
    for kind, covariance in (("ppo_clip", ("clip", 1.0, 0.3, 2.0, 1.0)), ("cispo", ("kl", 0.15, 1.0, 5.0, 0.7))):
        setting = s(kind, low=0.2, high=0.5, covariance=covariance)
        found.append(_case(f"{kind} + covariance {covariance[0]}", setting, type=kind, clip_low=0.2, clip_high=0.5))
    return found + _corrected_cases()


def _left_out_cases() -> list[Case]:
    """Tokens of which the policy has moved away do not train."""
    s = Setting
    return [
        _case("ppo_clip + off-policy mask", s("ppo_clip", off_policy=0.1), type="ppo_clip", off_policy_mask=0.1),
        _case(
            "m2po",
            s("ppo_clip", low=1.0, high=1000.0, second_moment=0.04),
            type="ppo_clip",
            clip_low=1,
            clip_high=1000,
            second_moment=0.04,
            token_advantages=True,
        ),
        _case(
            "reinforce + off-policy mask + truncate",
            s("reinforce", off_policy=0.1, correction=("truncate", "token", 0.7, 1.4)),
            type="reinforce",
            off_policy_mask=0.1,
            token_advantages=True,
        ),
    ]


def _corrected_cases() -> list[Case]:
    """Objectives under an importance correction, of each type and level."""
    s = Setting
    found: list[Case] = []
    for kind in ("reinforce", "grpo", "gspo", "aipo", "cispo"):
        for correction in ("truncate", "mask"):
            for level in ("token", "sequence", "geometric"):
                if kind != "reinforce" and level != "token":
                    continue
                low, high = (3e-4, 4e-4) if kind == "gspo" else (1.0, 4.0) if kind == "cispo" else (0.2, 0.2)
                setting = s(
                    "gspo_token" if kind == "gspo" else kind,
                    low=low,
                    high=high,
                    normalize="sequence" if kind in ("grpo", "gspo") else "token",
                    correction=(correction, level, 0.7, 1.4),
                )
                found.append(_case(f"{kind} + {correction} {level}", setting, type=kind))
    for correction, level in (("truncate", "token"), ("truncate", "sequence"), ("mask", "token")):
        setting = s("ppo_clip", correction=(correction, level, 0.7, 1.4), geometric=(0.9, 1.05))
        found.append(_case(f"ppo_clip + {correction} {level} + geometric", setting, type="ppo_clip"))
    for estimator, over, limit in (("k3", "mean", 0.05), ("k2", "mean", 0.05), ("k3", "sum", 0.3), ("k2", "max", 0.2)):
        setting = s("aipo", correction=("truncate", "token", 0.7, 1.4), reject=(estimator, over, limit))
        found.append(_case(f"aipo + reject {over} {estimator}", setting, type="aipo"))
    return found


def random_batch(case: Case, seed: int, lengths: list[int] | None = None) -> tuple[list[Sequence], np.ndarray]:
    """A ragged batch and the policy's log-probabilities of all its tokens; never closer than 1e-4 to a kink."""
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        sizes = lengths if lengths is not None else rng.integers(1, 14, int(rng.integers(2, 9))).tolist()
        batch, theta = _draw(rng, sizes, case.token_advantages)
        if kink_distance(case.setting, batch, theta) > 1e-4:
            return batch, theta
    raise AssertionError(f"no batch away from the kinks of {case.name} in 100 draws")


def _float32(values: np.ndarray) -> np.ndarray:
    """What a batch file would keep of them, as float64."""
    return values.astype(np.float32).astype(np.float64)


def _draw(rng: np.random.Generator, sizes: list[int], token_advantages: bool) -> tuple[list[Sequence], np.ndarray]:
    theta = np.log(rng.uniform(0.02, 0.98, sum(sizes)))
    batch, start = [], 0
    for n in sizes:
        index = np.arange(start, start + n)
        start += n
        # Some sequences are all but on-policy, some far off; a narrow clip needs the one, a wide one the other.
        noise = rng.choice([2e-4, 0.02, 0.4, 1.2])
        mu = np.minimum(theta[index] + rng.normal(0, noise, n), np.log(0.99))
        style = rng.random()
        trained = np.ones(n, bool) if style < 0.3 else np.zeros(n, bool) if style < 0.4 else rng.random(n) < 0.6
        advantages = rng.normal(0, 1, n if token_advantages else 1) * np.ones(n)
        reference = theta[index] + rng.normal(0, 0.5, n)
        batch.append(Sequence(index, trained, _float32(mu), _float32(advantages), reference))
    return batch, theta


def pack(
    batch: list[Sequence],
    micro_batches: list[list[int]],
    *,
    garbage: int | None = None,
    ce_weights: np.ndarray | None = None,
) -> RankBatch:
    """One rank's arrays; a token's id is its place in theta. `garbage` seeds junk at the tokens that do not train,
    `ce_weights` are echo's, by place."""
    order = [batch[i] for micro in micro_batches for i in micro]
    lengths = np.array([len(s.index) for s in order], dtype=np.int64)
    total, num = int(lengths.sum()), len(order)

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(getattr(s, name) for s in order)]).astype(dtype)

    mask, mu, advantages = joined("trained", bool), joined("mu", np.float32), joined("advantages", np.float32)
    if garbage is not None:
        rng = np.random.default_rng(garbage)
        mu = np.where(mask, mu, rng.normal(0, 5, total)).astype(np.float32)
        advantages = np.where(mask, advantages, rng.normal(0, 5, total)).astype(np.float32)
    ids = joined("index", np.int32)
    return RankBatch(
        token_ids=ids,
        loss_mask=mask,
        logprobs=mu,
        versions=np.zeros(total, np.int32),
        advantages=advantages,
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        micro_offsets=np.concatenate([[0], np.cumsum([len(m) for m in micro_batches])]).astype(np.int64),
        temperatures=np.ones(num, np.float32),
        rewards=np.zeros(num, np.float32),
        sample_ids=np.arange(num, dtype=np.int64),
        group_ids=np.arange(num, dtype=np.int64),
        env_ids=np.zeros(num, np.int32),
        ce_weights=None if ce_weights is None else ce_weights[ids].astype(np.float32),
    )


def _high_covariance(config: CovarianceConfig, ranks: list[RankBatch]) -> SequenceOf[torch.Tensor]:
    """Which targets of each micro-batch of all ranks are chosen: ranks that hold all of it know as much as one."""
    parts = [(rank, i) for rank in ranks for i in range(rank.num_micro_batches)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = select_micro_batches(parts, len(parts))
        return high_covariance(config, whole, 1, torch.device("cpu"), counts=True)
    finally:
        dist.destroy_process_group()


def _far(config: LossConfig, ranks: list[RankBatch], policy: torch.Tensor) -> SequenceOf[torch.Tensor]:
    """Which targets of each micro-batch of all ranks the second moment leaves out."""
    assert config.second_moment is not None
    micros = [make_micro_batch(rank, i) for rank in ranks for i in range(rank.num_micro_batches)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        old = [policy.detach()[micro.targets] for micro in micros]
        return beyond_second_moment(config.second_moment, micros, old, counts=True)
    finally:
        dist.destroy_process_group()


def ours(
    case: Case, ranks: list[RankBatch], batch: list[Sequence], theta: np.ndarray, dtype: torch.dtype = torch.float64
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, its gradient in theta, and the summed statistics, over all ranks and micro-batches as the train step does;
    with echo where the ranks' batches have its weights."""
    policy = torch.tensor(theta, dtype=dtype, requires_grad=True)
    reference = torch.zeros_like(policy, requires_grad=False)
    for s in batch:
        reference[torch.from_numpy(s.index)] = torch.from_numpy(s.reference).to(dtype)
    facts = [batch_facts(rank, 1) for rank in ranks]
    num_targets, num_sequences = sum(f.num_targets for f in facts), sum(f.num_trained_sequences for f in facts)
    num_echo = sum(f.num_echo for f in facts)
    totals = next((rank.totals for rank in ranks if rank.totals is not None), None)
    counts_all = case.config.denominators == "all"
    if counts_all and totals is not None:
        num_targets, num_sequences = totals.tolist()
    marks = iter(() if case.config.covariance is None else _high_covariance(case.config.covariance, ranks))
    far = iter(() if case.config.second_moment is None else _far(case.config, ranks, policy))
    total = torch.zeros((), dtype=dtype)
    sums: dict[str, float] = {}
    for rank in ranks:
        for i in range(rank.num_micro_batches):
            micro = make_micro_batch(rank, i)
            micro.behaviour_logprobs, micro.advantages = micro.behaviour_logprobs.to(dtype), micro.advantages.to(dtype)
            micro.reference_logprobs = reference[micro.targets]
            micro.high_covariance, micro.far = next(marks, None), next(far, None)
            logprobs = policy[micro.targets]
            if micro.trained is not None:
                assert micro.ce_weights is not None
                micro.ce_weights = micro.ce_weights.to(dtype)
                if num_echo:
                    total = total + echo_loss(micro, logprobs, num_echo)
                logprobs, micro = logprobs[micro.trained], objective_part(micro)
            rollouts = micro.targets_of_rollout if counts_all else None
            weights = target_weights(
                micro.sequence,
                micro.targets_of_sequence if rollouts is None else rollouts,
                normalization(case.config),
                num_targets,
                num_sequences,
                case.config.batch_tokens or 1,
            )
            if case.setting.objective == "sft":
                loss, stats = sft_loss(None, logprobs, weights)
            else:
                loss, stats = rl_loss(case.config, micro, logprobs, weights)
            total = total + loss
            for name, value in stats.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    if total.requires_grad:  # a loss that lost its graph has gradient 0
        total.backward()
    grad = policy.grad if policy.grad is not None else torch.zeros_like(policy)
    return float(total.detach()), grad.double().numpy(), sums
