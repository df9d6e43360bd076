"""Proofs can fail: every objective, correction, KL and normalisation is broken on purpose, and a claim must not hold.

A mutation is a change of one place of the source; the changed module runs in the real one's stead.
"""

import importlib
import types
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.config import named_code
from prime_hpc.config.sections import trainer as trainer_section
from prime_hpc.orchestrator.algorithms import scorer
from prime_hpc.trainer.objectives import rl
from tests.proofs import objective_cases, prove_algorithms
from tests.proofs.objective_cases import cases
from tests.proofs.prove_objectives import PROPERTIES
from tests.support.sampled import sampled

TRIALS = 40
"""A mutation that shifts one threshold a little needs a token in between; the first few batches notice the others."""
OBJECTIVES = "prime_hpc.trainer.objectives."
ALGORITHMS = "prime_hpc.orchestrator.algorithms."
TABLE = "prime_hpc.config.named_code"

MUTATIONS = [
    # module, place, change, case that must notice, claim that must notice
    ("aipo", "-ratio * targets", "ratio * targets", "aipo", "value"),
    ("aipo", "max=min(", "min=min(", "aipo", "value"),
    ("aipo", "math.log(config.delta)", "math.log(1 + config.delta)", "aipo", "gradient"),
    ("aipo", "targets.logprobs.detach()", "targets.logprobs", "aipo", "gradient"),
    ("reinforce", "-targets.advantages", "targets.advantages", "reinforce", "gradient"),
    ("reinforce", "* targets.logprobs", "* targets.logprobs.exp()", "reinforce", "gradient"),
    ("ppo_clip", "torch.minimum(free, inside)", "torch.maximum(free, inside)", "ppo_clip", "value"),
    (
        "policy_gradient.ppo_clip",
        "1 - bounds.low, 1 + bounds.high",
        "1 - bounds.high, 1 + bounds.low",
        "ppo_clip high",
        "gradient",
    ),
    ("ppo_clip", "torch.minimum(free, inside)", "inside", "ppo_clip", "gradient"),
    ("ppo_clip", "Terms(-gain", "Terms(gain", "ppo_clip", "value"),
    ("ppo_clip", "(advantages < 0) &", "(advantages > 0) &", "ppo_clip dual", "value"),
    ("ppo_clip", "torch.where(bounded, floor, gain)", "gain", "ppo_clip dual", "value"),
    ("grpo", "targets.log_ratio()", "-targets.log_ratio()", "grpo", "value"),
    (TABLE, '.grpo:grpo", "sequence"', '.grpo:grpo", "token"', "grpo", "value"),
    (TABLE, 'dr_grpo", "batch"', 'dr_grpo", "sequence"', "dr_grpo", "value"),
    ("grpo", "targets.log_ratio()", "targets.log_ratio().detach()", "dr_grpo", "gradient"),
    ("gspo", "sequence_mean", "sequence_sum", "gspo", "value"),
    (TABLE, "Bounds(3e-4, 4e-4)", "Bounds(4e-4, 3e-4)", "gspo", "value"),
    ("gspo", " + (targets.logprobs - targets.logprobs.detach())", "", "gspo", "gradient"),
    (
        "policy_gradient.gspo",
        "targets.logprobs - targets.anchor)[",
        "targets.anchor - targets.logprobs)[",
        "gspo wide",
        "value",
    ),
    ("gmpo", "sequence_mean", "sequence_sum", "gmpo", "value"),
    (
        "gmpo",
        "clamp(max=bounds.high), log_ratio.clamp(min=-bounds.low)",
        "clamp(-bounds.low, bounds.high), log_ratio",
        "gmpo",
        "value",
    ),
    ("gmpo", " + (kept - kept.detach())", "", "gmpo", "gradient"),
    ("gmpo", "max=bounds.high", "max=bounds.low", "gmpo uneven", "value"),
    ("sapo", "> 0, positive, negative", "> 0, negative, positive", "sapo sharp", "value"),
    ("sapo", "* 4 / tau", "* 4", "sapo sharp", "gradient"),
    ("sapo", "(1 - ratio)", "ratio", "sapo", "value"),
    ("vespo", "sequence_sum", "sequence_mean", "vespo flat", "value"),
    ("vespo", "c2 * (1 - log_w.exp())", "-c2 * log_w.exp()", "vespo", "value"),
    ("vespo", "full_like(log_w, up)", "full_like(log_w, down)", "vespo", "value"),
    ("vespo", "(c1 * log_w + c2 * (1 - log_w.exp())).exp()", "log_w.exp()", "vespo", "gradient"),
    (
        "correction",
        "(targets.advantages < 0) &",
        "(targets.advantages > 0) &",
        "ppo_clip + off-policy mask",
        "value",
    ),
    ("correction", "(behaviour - targets", "-(behaviour - targets", "ppo_clip + off-policy mask", "value"),
    (TABLE, "Bounds(1.0, 4.0)", "Bounds(0.5, 4.0)", "cispo", "value"),
    ("cispo", "math.log(1 + bounds.high)", "math.log(bounds.high)", "cispo", "gradient"),
    ("cispo", "difference.clamp(low, ", "difference.clamp(-99, ", "cispo both", "value"),
    ("cispo", "-weight *", "weight *", "cispo", "value"),
    ("cispo", "targets.logprobs.detach() -", "targets.logprobs -", "cispo", "gradient"),
    ("dppo", "(advantages > 0) & rises", "(advantages > 0) & falls", "dppo tv", "value"),
    ("dppo", "(divergence > bounds.low)", "(divergence > bounds.high)", "dppo tv uneven", "value"),
    ("dppo", "zeros_like(gain), -gain", "zeros_like(gain), gain", "dppo tv", "value"),
    ("dppo", "_binary_kl(log_mu, log_pi)", "_binary_kl(log_pi, log_mu)", "dppo kl", "value"),
    ("dppo", "this + rest_mu", "this - rest_mu", "dppo kl", "value"),
    (TABLE, "Bounds(0.05, 0.05)", "Bounds(0.2, 0.2)", "dppo kl", "value"),
    ("ipo", "moved < -bounds.low", "moved < -bounds.high", "ipo uneven", "value"),
    ("ipo", "(moved > bounds.high) | ", "", "ipo", "value"),
    ("ipo", "zeros_like(gain), -gain", "zeros_like(gain), gain", "ipo", "value"),
    ("nll", "-targets.logprobs", "-targets.logprobs * targets.advantages", "nll", "value"),
    ("nll", "-(weights", "(weights", "sft", "value"),
    ("kl", "logprobs - other", "other - logprobs", "grpo + k1 reference", "value"),
    ("kl", "square() / 2", "square()", "grpo + k2 behaviour", "gradient"),
    (
        "kl",
        "expm1(-difference) + difference",
        "expm1(difference) - difference",
        "grpo + k3 reference",
        "value",
    ),
    ("correction", "ratio.clamp(max=config.high)", "ratio", "reinforce + truncate token", "value"),
    ("correction", " | (ratio < config.low)", "", "reinforce + mask token", "value"),
    ("correction", "ratio.clamp(max=config.high))", "ratio / ratio)", "grpo + mask token", "value"),
    (
        "correction",
        "geometric < config",
        "geometric > config",
        "ppo_clip + truncate token + geometric",
        "value",
    ),
    ("correction", "| (geometric > ", "| (difference > ", "ppo_clip + mask token + geometric", "value"),
    ("correction", "left_out | outside", "outside", "ppo_clip + mask token + geometric", "value"),
    (
        "correction",
        "targets.anchor - behaviour",
        "targets.logprobs - behaviour",
        "aipo + truncate token",
        "gradient",
    ),
    (
        "correction",
        'level == "geometric" else',
        'level == "sequence" else',
        "reinforce + mask sequence",
        "value",
    ),
    ("correction", "> config.above", "< config.above", "aipo + reject mean k3", "value"),
    ("correction", "square() / 2", "square()", "aipo + reject max k2", "value"),
    ("correction", "expm1(difference) - d", "expm1(-difference) + d", "aipo + reject sum k3", "value"),
    (
        "correction",
        '"max": targets.sequence_max',
        '"max": targets.sequence_sum',
        "aipo + reject max k2",
        "value",
    ),
    ("covariance", "log_mu * advantages", "-log_mu * advantages", "ppo_clip + covariance clip", "value"),
    ("covariance", "total / max(count, 1)", "0", "cispo + covariance kl", "value"),
    ("covariance", "(covariance <= config.high)", "True", "ppo_clip + covariance clip", "value"),
    ("covariance", "(score >= threshold)", "(score > threshold)", "cispo + covariance kl", "value"),
    ("covariance", "losses + config.coef * ", "", "cispo + covariance kl", "gradient"),
    ("covariance", ".abs()", "", "cispo + covariance kl", "gradient"),
    (
        "rl",
        "ratio.detach() if",
        "ratio if",
        "grpo + unbiased k2 reference",
        "gradient",
    ),
    (
        "rl",
        "else ratio)",
        "else ratio.detach())",
        "grpo + unbiased k3 reference",
        "gradient",
    ),
    ("rl", "return logprobs.detach() if", "return micro.behaviour_logprobs if", "grpo + truncate token", "value"),
    ("rl", "micro.far, torch.zeros_like(per_target)", "micro.far, per_target", "m2po", "value"),
    ("second_moment", "moment > bound", "moment < bound", "m2po", "value"),
    ("second_moment", "limit * sums[1]", "limit", "m2po", "value"),
    ("second_moment", "away.square()", "away.abs()", "m2po", "value"),
    ("rl", "config.kl.coef * penalty", "penalty", "grpo + k3 reference", "value"),
    ("normalize", "1.0 / max(num_targets, 1)", "1.0 / max(len(sequence), 1)", "aipo", "split"),
    ("normalize", "1.0 / max(num_targets, 1)", "1.0 / max(len(sequence), 1)", "aipo", "ranks"),
    ("normalize", "max(num_sequences, 1))\n    if", "len(targets_of_sequence))\n    if", "grpo", "ranks"),
    ("normalize", "(max(num_sequences, 1) * batch_tokens)", "batch_tokens", "dr_grpo", "value"),
]
ALGORITHM_MUTATIONS = [
    ("grpo", "np.mean(delta**2)", "np.mean(np.abs(delta))", "grpo", "value"),
    ("grpo", "return centered(group.rewards)", "return group.rewards", "dr_grpo", "shift"),
    ("rloo", "size / (size - 1)", "1", "rloo", "value"),
    ("rloo", "group.rewards - group.greedy", "group.rewards - 0 * group.greedy", "remax", ""),
    ("base", "if trace.agent == role", "", "remax", ""),
    ("scorer", "all_rewards[-1:], lengths", "rewards[:1], lengths", "remax", ""),
    ("opo", "weights=weights", "weights=None", "opo", "mean"),
    ("opo", "if all_equal(group.rewards):", "if False:", "opo", "equal"),
    ("opo", "np.cumsum(", "np.array(", "optimal_token_baseline", ""),
    ("opo", "-np.expm1(np.minimum(", "np.exp(np.minimum(", "optimal_token_baseline", ""),
    ("opo", "gaps @ weights / weights", "gaps @ reaches / reaches", "optimal_token_baseline", ""),
    ("opo", "left[key][count:]", "left[key]", "optimal_token_baseline", ""),
    ("max_rl", "/ mean if", "if", "max_rl", "value"),
    ("pass_at_k", "comb(p, k - 1) / num_own", "comb(p, k - 1) / num_all", "pass_at_k", "value"),
    ("pass_at_k", "+ tail - mean", "- mean", "pass_at_k", "value"),
    ("pass_at_k", "comb(j - 1, k - 2)", "comb(j, k - 2)", "pass_at_k", "value"),
    ("pass_at_k", "k * (gaps @ second)", "gaps @ second", "pkpo", "value"),
    ("pass_at_k", "comb(j, k - 2) / num", "comb(j, k - 1) / num", "pkpo", "value"),
    ("reinforce", "group.rewards.copy()", "-group.rewards", "reinforce", "value"),
    ("gdpo", "total += weight *", "total +=", "gdpo", ""),
    ("gdpo", "values / weight", "values + others", "gdpo", ""),
    ("gdpo", "scores * weights", "scores * np.abs(weights)", "gdpo", ""),
    ("gdpo", "total + grpo(", "total + 0 * grpo(", "gdpo", ""),
    ("rae", "trace.reward - new", "trace.reward - old", "rae", ""),
    ("rae", "self._decay * old +", "old +", "rae", ""),
    ("rae", "baselines[trace.agent] = new", "baselines[_ANY] = new", "rae", ""),
    ("rae", "float(b) for role, b in", "0.0 for role, b in", "rae", ""),
    ("reinforce", "(sample.loss_mask)[-1:]", "(sample.loss_mask)[:1]", "gae", ""),
    ("reinforce", "rewards[i, sample.trace]", "rewards[i, 0]", "gae", ""),
    ("sft_distill", "np.ones_like", "np.zeros_like", "sft", "value"),
    ("opd", "scores.astype(np.float64) - sample.logprobs", "sample.logprobs - scores", "opd", ""),
    ("opd", "-self._max_gap, self._max_gap", "-self._max_gap, np.inf", "opd", ""),
    ("opd", "self._weight * centered", "centered", "opd", ""),
    ("hierarchical_grpo", "trace.episode if trace.agent in solvers else -1", "-1", "hierarchical_grpo", ""),
    ("hierarchical_grpo", "if count > 1", "if count > 0", "hierarchical_grpo", ""),
    ("penalties", "max(1, int(values.max()))", "max(1, int(values.sum()))", "length penalty", ""),
    ("penalties", "max(0.0, float(rewards.mean()))", "1.0", "length penalty", ""),
    ("penalties", "1.0 - len(np.unique(every, axis=0))", "len(np.unique(every, axis=0))", "repetition penalty", ""),
    ("penalties", "limit - buffer)", "limit)", "soft overlong", ""),
    ("penalties", 'config.per == "turn"', 'config.per == "episode"', "soft overlong", ""),
]


def module_of(name: str) -> str:
    """The module of an objective, or of what stands beside them."""
    if name == TABLE:
        return TABLE
    entry = named_code.OBJECTIVES.get(name)
    return OBJECTIVES + name if entry is None else entry.place.partition(":")[0]


def mutated(name: str, place: str, change: str) -> types.ModuleType:
    """Make a module from the changed source."""
    original = importlib.import_module(name)
    assert original.__file__ is not None
    source = Path(original.__file__).read_text(encoding="utf-8")
    assert source.count(place) >= 1, f"{name} does not hold {place!r} any more: mend the mutation"
    module = types.ModuleType(name)
    module.__file__ = original.__file__
    exec(compile(source.replace(place, change), name, "exec"), module.__dict__)
    return module


def stands_in(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType) -> None:
    """Put the changed module's names in the place of the real one's, there and where others imported them."""
    changed = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    if module.__name__ == TABLE:
        changed["OBJECTIVES"] = module.OBJECTIVES
    users = [importlib.import_module(module.__name__), trainer_section, rl, objective_cases, scorer, prove_algorithms]
    users += [importlib.import_module(module_of(n)) for n in ("grpo", "gspo")]
    for user in users:
        for key in changed.keys() & vars(user).keys():
            monkeypatch.setattr(user, key, changed[key])


def test_every_mutation_has_its_place_and_its_case() -> None:
    """Of most the other tests here take a sample alone."""
    for module, place, change, _, _ in MUTATIONS:
        mutated(module_of(module), place, change)
    for module, place, change, _, _ in ALGORITHM_MUTATIONS:
        mutated(ALGORITHMS + module, place, change)
    assert {case for *_, case, _ in MUTATIONS} <= {case.name for case in cases()}
    assert all(claim in PROPERTIES for *_, claim in MUTATIONS)
    assert all(
        claim in prove_algorithms.CLAIMS or subject in prove_algorithms.OTHERS
        for *_, subject, claim in ALGORITHM_MUTATIONS
    )


@pytest.mark.parametrize(("module", "place", "change", "case", "claim"), sampled(MUTATIONS, 5))
def test_a_broken_objective_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: str, place: str, change: str, case: str, claim: str
) -> None:
    [subject] = [c for c in cases() if c.name == case]
    check, bound = PROPERTIES[claim]
    stands_in(monkeypatch, mutated(module_of(module), place, change))
    assert any(not check(subject, seed) < bound for seed in range(TRIALS))
    monkeypatch.undo()
    assert max(check(subject, seed) for seed in range(2)) < bound


@pytest.mark.parametrize(("module", "place", "change", "subject", "claim"), sampled(ALGORITHM_MUTATIONS, 4))
def test_a_broken_algorithm_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: str, place: str, change: str, subject: str, claim: str
) -> None:
    def holds(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        check = prove_algorithms.CLAIMS[claim][0] if claim else None
        error = check(subject, rng) if check else prove_algorithms.OTHERS[subject](rng)
        return error < (prove_algorithms.BOUND if claim != "equal" else prove_algorithms.EXACT)

    stands_in(monkeypatch, mutated(ALGORITHMS + module, place, change))
    assert not all(holds(seed) for seed in range(TRIALS))
    monkeypatch.undo()
    assert all(holds(seed) for seed in range(3))
