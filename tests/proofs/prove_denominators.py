"""Objective x claim: a step's loss over all G x N rollouts, as the papers write it, though part is never computed.

A drawn step goes the real way: advantages, groups without signal left out, packed for two ranks, through the bytes of a
batch file, laid out again for another number of ranks. The reference sums over every rollout of every group. Rollouts
may be in pieces (a turn each), and some groups have no signal.

`value`, `gradient`: against the reference. `keep`: the same with `advantage.zero = keep`. A KL penalty to a reference
keeps all groups by itself.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from prime_hpc.config import Experiment
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.batching.batch_builder import (
    build_ranks,
    count_rollouts,
    score_groups,
    train_samples,
    zero_groups,
)
from prime_hpc.orchestrator.rollouts.episodes import Episode, to_episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.batch.rank_batch import RankBatch, decode_rank, encode_rank
from prime_hpc.trainer.batching.micro_batches import redistribute
from tests.proofs import Proof
from tests.proofs import reference_algorithms as algorithms
from tests.proofs.objective_cases import CONSTANT, Case, ours
from tests.proofs.reference import Sequence, Setting, gradient, kink_distance, loss, size
from tests.support.episodes import make_result

BOUND = 1e-6

CASES = (
    Case("grpo", LossConfig(type="grpo"), Setting("grpo", normalize="sequence")),
    Case(
        "dr_grpo",
        LossConfig(type="dr_grpo", batch_tokens=CONSTANT),
        Setting("dr_grpo", normalize="batch", constant=CONSTANT),
    ),
    Case("ppo_clip", LossConfig(type="ppo_clip"), Setting("ppo_clip")),
    Case("aipo", LossConfig(type="aipo", delta=2.0), Setting("aipo", delta=2.0)),
    Case(
        "gspo",
        LossConfig(type="gspo", clip_low=0.1, clip_high=0.2),
        Setting("gspo_token", low=0.1, high=0.2, normalize="sequence"),
    ),
    Case(
        "grpo + k3",
        LossConfig.model_validate({"type": "grpo", "kl": {"coef": 0.3, "estimator": "k3", "target": "behaviour"}}),
        Setting("grpo", normalize="sequence", kl=("behaviour", "k3", 0.3)),
    ),
)


class Step:
    """N groups of G rollouts: what the orchestrator has of them, and the reference's sequences."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.groups: list[Group] = []
        self.sequences: list[Sequence] = []
        theta: list[float] = []
        size = int(rng.integers(2, 4))
        silent = rng.random(int(rng.integers(2, 5))) < 0.5
        silent[0] = False
        for position, is_silent in enumerate(silent.tolist()):
            rewards = [1.0] * size if is_silent else rng.permutation([1.0] + [0.0] * (size - 1)).tolist()
            advantages = algorithms.dr_grpo(rewards, [1] * size)
            slots: list[Episode | None] = []
            for reward, advantage in zip(rewards, advantages, strict=True):
                rollout = position * size + len(slots)
                pieces = [self._piece(rng, theta, advantage, rollout) for _ in range(int(rng.integers(1, 4)))]
                slots.append(to_episode(make_result(samples=pieces, reward=reward), 10_000))
            self.groups.append(Group(Prompt(position, 0, position, position), 0, 0, slots, num_ended=size))
        self.theta = np.array(theta)

    def _piece(self, rng: np.random.Generator, theta: list[float], advantage: float, rollout: int) -> Sample:
        """A prompt and a few sampled tokens; a token's id is its place in theta."""
        prompt, sampled = int(rng.integers(1, 3)), int(rng.integers(1, 5))
        index = np.arange(len(theta), len(theta) + prompt + sampled)
        theta += np.log(rng.uniform(0.05, 0.95, len(index))).tolist()
        mask = np.arange(len(index)) >= prompt
        own = np.array(theta)[index]
        mu = np.minimum(own + rng.normal(0, 0.3, len(index)), np.log(0.99)).astype(np.float32)
        self.sequences.append(
            Sequence(index, mask, mu.astype(np.float64), np.full(len(index), advantage), own, rollout=rollout)
        )
        return Sample(
            token_ids=index.astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, mu, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            num_turns=1,
            reward=0.0,
        )

    def ranks(self, case: Case, zero: str = "auto", num_ranks: int = 2) -> list[RankBatch]:
        """The batch as `num_ranks` trainer ranks read it."""
        advantage = {"type": "dr_grpo", "zero": zero}
        experiment = Experiment.model_validate(
            {"orchestrator": {"advantage": advantage}, "trainer": {"loss": case.config}}
        )
        scorer = Scorer(AdvantageConfig(type="dr_grpo"), max_tokens=100)
        scored = score_groups(self.groups, scorer, zero=zero_groups(experiment))
        written = build_ranks(
            train_samples(scored),
            num_ranks=2,
            micro_batch_tokens=24,
            sampling=SamplingConfig(),
            share_prefixes=False,
            totals=count_rollouts(scored),
        )
        files = [b"".join(bytes(memoryview(part).cast("B")) for part in encode_rank(batch)) for batch in written]
        read = [decode_rank(np.frombuffer(raw, np.uint8), Path("rank")) for raw in files]
        return [redistribute(read, rank, num_ranks) for rank in range(num_ranks)]


def draw(case: Case, seed: int) -> Step:
    """A step away from the objective's kinks."""
    for attempt in range(100):
        step = Step(np.random.default_rng([seed, attempt]))
        if kink_distance(case.setting, step.sequences, step.theta) > 1e-4:
            return step
    raise AssertionError(f"no step away from the kinks of {case.name} in 100 draws")


def value_error(case: Case, seed: int) -> float:
    """The loss against the reference's sum over all rollouts."""
    step = draw(case, seed)
    value, _, _ = ours(case, step.ranks(case, num_ranks=1 + seed % 3), [], step.theta)
    wanted = loss(case.setting, step.sequences, step.theta, step.theta)
    return abs(value - wanted) / size(case.setting, step.sequences, step.theta)


def gradient_error(case: Case, seed: int) -> float:
    """Its gradient against central differences of the reference."""
    step = draw(case, seed)
    _, found, _ = ours(case, step.ranks(case), [], step.theta)
    wanted = gradient(case.setting, step.sequences, step.theta)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def keep_error(case: Case, seed: int) -> float:
    """The same with the groups without signal in the batch."""
    step = draw(case, seed)
    _, left_out, _ = ours(case, step.ranks(case), [], step.theta)
    _, kept, _ = ours(case, step.ranks(case, "keep"), [], step.theta)
    return float(np.abs(left_out - kept).max() / np.abs(kept).max())


CLAIMS = {"value": value_error, "gradient": gradient_error, "keep": keep_error}


def prove(trials: int) -> Iterable[Proof]:
    """Every case against every claim, `trials` random steps each."""
    for case in CASES:
        for claim, check in CLAIMS.items():
            errors = [check(case, seed) for seed in range(trials)]
            yield Proof(case.name, claim, len(errors), float(np.max(errors)), BOUND)
