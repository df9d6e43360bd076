"""Filters: of all conversations those that become rows. Each of the others is counted once, under the first reason in
`REASONS`."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.config.sections.synthesize import SynthesizeConfig
from prime_hpc.evals.episodes import FAILED, TIMEOUT, Key, Record
from prime_hpc.evals.synthesis.sampled import Sampled

REASONS = {
    "failed": "server, API or environment failed",
    "timeout": "cut off by the environment's timeout_s",
    "truncated": "cut short by a limit (synthesize.finished)",
    "unparsed": "a reply is empty or broken (synthesize.parsed)",
    "reward": "reward below synthesize.min_reward",
    "metric": "a metric below synthesize.min_metrics",
    "too_short": "below synthesize.min_completion_tokens",
    "too_long": "above synthesize.max_completion_tokens",
    "duplicate": "said before (synthesize.drop_duplicates)",
    "not_best": "not among the task's best (synthesize.n_best)",
}
_ROUNDING = 1e-9
"""A reward of 0.1 + 0.2 is at least 0.3."""

Place = tuple[Key, int]
"""An episode, and which of its conversations."""


@dataclass
class Selection:
    """Rows in the order of environments, tasks and rollouts, and counts of the rest by reason."""

    kept: list[Place] = field(default_factory=list)
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By environment: reason -> conversations; an episode without one counts as one."""
    kept_of: Counter[str] = field(default_factory=Counter)
    """By environment."""


def reason_of_episode(record: Record, config: SynthesizeConfig) -> str | None:
    """Return why nothing of an episode becomes a row; None where that depends on its conversations."""
    if record.state == FAILED:
        return "failed"
    if record.state == TIMEOUT:
        return "timeout"
    return "truncated" if record.truncated and config.finished else None


def reason_of(record: Sampled, row: Mapping[str, Any], config: SynthesizeConfig) -> str | None:
    """Return why a conversation of an episode that went well becomes no row, whatever else there is; None: it may."""
    if config.parsed and not row["parsed"]:
        return "unparsed"
    if config.min_reward is not None and not row["reward"] >= config.min_reward - _ROUNDING:
        return "reward"
    missing = float("-inf")
    if any(not record.metrics.get(k, missing) >= low - _ROUNDING for k, low in config.min_metrics.items()):
        return "metric"
    tokens = row["completion_tokens"]
    if config.min_completion_tokens is not None and tokens < config.min_completion_tokens:
        return "too_short"
    if config.max_completion_tokens is not None and tokens > config.max_completion_tokens:
        return "too_long"
    return None


def num_passing(record: Sampled, config: SynthesizeConfig) -> int:
    """Conversations of an episode that may become rows: duplicates and the best of k are not told yet."""
    if reason_of_episode(record, config) is not None:
        return 0
    return sum(reason_of(record, row, config) is None for row in record.conversations)


def select(records: Sequence[Sampled], config: SynthesizeConfig) -> Selection:
    """Apply the filters.
    `records`: the episodes that were asked for, in the order of environments, tasks and rollouts."""
    found = Selection()
    candidates: dict[tuple[str, int], list[tuple[float, int, int, Place]]] = defaultdict(list)
    known: set[str] = set()
    for record in records:
        reason = reason_of_episode(record, config)
        if reason is not None or not record.conversations:
            found.dropped[record.env][reason or "unparsed"] += 1
            continue
        for number, row in enumerate(record.conversations):
            reason = reason_of(record, row, config)
            if reason is None and config.drop_duplicates and row["digest"] in known:
                reason = "duplicate"
            if reason is not None:
                found.dropped[record.env][reason] += 1
                continue
            known.add(row["digest"])
            rank = (-row["reward"], row["completion_tokens"], record.rollout, (record.key, number))
            candidates[record.env, record.task].append(rank)
    for (env, _), ranks in candidates.items():
        best = {rank[3] for rank in sorted(ranks)[: config.n_best]}
        found.kept += [rank[3] for rank in ranks if rank[3] in best]
        found.kept_of[env] += len(best)
        if len(best) < len(ranks):
            found.dropped[env]["not_best"] += len(ranks) - len(best)
    return found
