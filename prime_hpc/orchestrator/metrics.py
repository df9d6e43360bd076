"""Counts between two batches, and the row of `metrics/orchestrator.jsonl` that they become. Pure but for the sample
log's file."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config.sections.common import WandbConfig
from prime_hpc.envs.samples import EpisodeState
from prime_hpc.observe.line_file import LineFile
from prime_hpc.orchestrator.algorithms.base import all_equal, centered
from prime_hpc.orchestrator.batching.batch_builder import ScoredGroup
from prime_hpc.orchestrator.evaluation import texts
from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.groups import GroupCounts

MOST_SPANS = 64
"""Waits and loads of one step, each with its place; above that neighbours become one."""
Span = tuple[str, float, float]
"""A name, its begin and its end on the loop's clock."""


def joined(spans: Sequence[Span], most: int = MOST_SPANS) -> list[Span]:
    """Return spans in order, those of one name that lie near each other as one, so that at most `most` are left."""
    ordered, gap = sorted(spans, key=lambda span: span[1]), 0.02
    while True:
        found: list[Span] = []
        last: dict[str, int] = {}
        for name, begin, end in ordered:
            index = last.get(name)
            if index is not None and begin - found[index][2] <= gap:
                found[index] = (name, found[index][1], max(end, found[index][2]))
            else:
                last[name] = len(found)
                found.append((name, begin, end))
        if len(found) <= most:
            return found
        ordered, gap = found, gap * 4


class StepStats:
    """Counters since the last batch. Every ended training episode is added exactly once."""

    def __init__(self, clock: float) -> None:
        """`clock` is now, in seconds of a monotonic clock."""
        self._start = clock
        self._states: Counter[str] = Counter()
        self._usable = 0
        self._truncated = 0
        self._prompt_tokens = 0
        self._sampled_tokens = 0
        self._greedy, self._greedy_tokens = 0, 0
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add_episode(self, episode: Episode, *, is_greedy: bool = False) -> None:
        """One training episode ended; a greedy one is counted by itself, but for what the engines do a second."""
        if is_greedy:
            self._greedy, self._greedy_tokens = self._greedy + 1, self._greedy_tokens + episode.num_sampled_tokens
            return
        self._states[episode.result.state.value] += 1
        self._usable += episode.usable
        self._truncated += episode.result.truncated
        self._prompt_tokens += episode.num_prompt_tokens
        self._sampled_tokens += episode.num_sampled_tokens
        for name, seconds in episode.result.seconds.items():
            self._seconds[name].append(seconds)

    def add_wait(self, reason: str, begin: float, end: float) -> None:
        """Add time in which the loop could only wait, for `weights`, `servers` or `rollouts`."""
        self._waited[reason] += end - begin
        name, last = f"wait_{reason}", self._spans[-1] if self._spans else None
        if last is not None and last[0] == name and begin - last[2] < 0.02:
            self._spans[-1] = (name, last[1], end)
        else:
            self._spans.append((name, begin, end))
            if len(self._spans) > 16 * MOST_SPANS:
                self._spans = joined(self._spans)

    def drain(self, clock: float, others: Sequence[Span] = ()) -> dict[str, Any]:
        """Return the counters as metrics, per step and per second; then start anew.

        `spans` are the waits and `others`, each as [name, seconds before now, seconds long].
        """
        seconds = max(clock - self._start, 1e-9)
        row: dict[str, Any] = {f"episodes/{s.value}": self._states[s.value] for s in EpisodeState}
        row |= {
            "episodes/usable": self._usable,
            "episodes/truncated": self._truncated,
            "episodes/per_second": (sum(self._states.values()) + self._greedy) / seconds,
            "tokens/prompt": self._prompt_tokens,
            "tokens/sampled": self._sampled_tokens,
            "tokens/sampled_per_second": (self._sampled_tokens + self._greedy_tokens) / seconds,
            "time/step": seconds,
        }
        if self._greedy:
            row |= {"episodes/greedy": self._greedy, "tokens/greedy": self._greedy_tokens}
        row |= {f"time/wait_{reason}": self._waited[reason] for reason in ("weights", "rollouts", "servers")}
        for name, seconds_each in self._seconds.items():
            row[f"episode_time/{name}_mean"] = float(np.mean(seconds_each))
            row[f"episode_time/{name}_p99"] = float(np.percentile(seconds_each, 99))
        spans = joined([*self._spans, *others])
        row["spans"] = [[name, round(clock - begin, 3), round(end - begin, 3)] for name, begin, end in spans]
        StepStats.__init__(self, clock)
        return row


def batch_metrics(
    scored: Sequence[ScoredGroup], env_names: Sequence[str], step: int, good: float = 1.0
) -> dict[str, float]:
    """Rewards, groups, lengths and lag of one batch (all its groups, also those without signal). A rollout whose reward
    is `good` or more has solved its task."""
    episodes = [e for entry in scored for e in entry.episodes]
    rewards = np.array([e.result.reward for e in episodes])
    sampled = np.array([e.num_sampled_tokens for e in episodes if e.result.samples])
    prompts = np.array([e.num_prompt_tokens for e in episodes if e.result.samples])
    spreads = np.array([_spread(entry.episodes) for entry in scored])
    # A token's lag: how many updates the policy of this batch (version step - 1) is ahead of the one that sampled it.
    lags = [step - 1 - e.min_version for e in episodes if e.min_version is not None]
    versions, num_stale = sum(e.version_sum for e in episodes), sum(e.num_stale_tokens for e in episodes)
    row: dict[str, float] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/trained": sum(entry.trains for entry in scored),
        "groups/with_signal": sum(entry.has_signal for entry in scored),
        "groups/zero_signal": int((spreads == 0).sum()),
        "groups/unscorable": sum(bool(entry.problem) for entry in scored),
        "reward/shaped_mean": float(np.mean([r for entry in scored for r in entry.rewards])),
        "rollouts/masked": sum(_num_masked(entry) for entry in scored),
        "groups/reward_spread": float(spreads.mean()),
        "completion/tokens_mean": float(sampled.mean()),
        "completion/tokens_max": int(sampled.max()),
        **{f"completion/tokens_p{p}": float(np.percentile(sampled, p)) for p in (10, 90)},
        "prompt/tokens_mean": float(prompts.mean()),
        "prompt/tokens_max": int(prompts.max()),
        "lag/mean": step - 1 - versions / max(1, int(sampled.sum()) - num_stale) if lags else 0.0,
        "lag/max": max(lags, default=0),
        "tokens/stale": num_stale / max(1, int(sampled.sum())),
        "completion/truncated": float(np.mean([e.result.truncated for e in episodes])),
        **_lengths(scored),
        **{f"groups/{kind}": count for kind, count in _solved(scored, good).items()},
    }
    if greedy := [entry.group.greedy.result.reward for entry in scored if entry.group.greedy is not None]:
        row["reward/greedy"] = float(np.mean(greedy))
    if any(entry.references for entry in scored):
        row |= _of_teacher(scored)
    for source, name in enumerate(env_names):
        own = [entry for entry in scored if entry.group.prompt.source == source]
        values = [e.result.reward for entry in own for e in entry.episodes]
        if values:
            row |= {f"reward/{name}/mean": float(np.mean(values)), f"reward/{name}/std": float(np.std(values))}
            row |= {f"groups/{name}/{kind}": count for kind, count in _solved(own, good).items()}
    return row | _env_metrics(scored, env_names)


def _lengths(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Average the lengths of rollouts above and below their group's mean reward (is length rewarded?), and of those
    that no limit cut."""
    lengths: dict[str, list[int]] = {"above": [], "below": [], "untruncated": []}
    for entry in scored:
        rewards = np.array([e.result.reward for e in entry.episodes])
        for episode, distance in zip(entry.episodes, centered(rewards), strict=True):
            if distance and episode.result.samples:
                lengths["above" if distance > 0 else "below"].append(episode.num_sampled_tokens)
            if episode.result.samples and not episode.result.truncated:
                lengths["untruncated"].append(episode.num_sampled_tokens)
    return {f"completion/tokens_mean_{side}": float(np.mean(n)) for side, n in lengths.items() if n}


def _solved(scored: Sequence[ScoredGroup], good: float) -> dict[str, int]:
    """Count groups, and those all or none of whose rollouts solved the task: what `none` leaves is pass@k of a group's
    k."""
    solved = [[e.result.reward >= good for e in entry.episodes] for entry in scored]
    none = sum(not any(group) for group in solved)
    return {"in_batch": len(solved), "solved_all": sum(map(all, solved)), "solved_none": none}


def _num_masked(entry: ScoredGroup) -> int:
    """Count the group's rollouts that have tokens, none of which trains although the group may."""
    masks = [[sample.loss_mask.any() for sample in episode.result.samples] for episode in entry.episodes]
    return sum(not kept or (bool(mask) and not any(mask)) for kept, mask in zip(entry.kept, masks, strict=True))


def _spread(episodes: Sequence[Episode]) -> float:
    """Largest difference between rewards that are compared: the rollouts', or where these have several traces, those
    of one role; 0 where it is rounding."""
    by_role: defaultdict[str, list[float]] = defaultdict(list)
    if any(sample.trace for e in episodes for sample in e.result.samples):
        for episode in episodes:
            traces = {sample.trace: sample for sample in episode.result.samples}
            for sample in traces.values():
                by_role[sample.agent].append(sample.reward)
    compared = map(np.array, by_role.values() or [[e.result.reward for e in episodes]])
    return max(0.0 if all_equal(rewards) else float(np.ptp(rewards)) for rewards in compared)


def _of_teacher(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean of log p_policy - log p_teacher over the batch's sampled tokens, also those that do not train: KL(policy ||
    teacher) in nats a token. Of a teacher with a tokenizer of its own those on which it has a word, and their share."""
    gaps, has_word = [], []
    for entry in scored:
        for episode, rows in zip(entry.group.usable, entry.references, strict=True):
            for sample, scores in zip(episode.result.samples, rows, strict=True):
                gaps.append((sample.logprobs - scores)[sample.loss_mask])
                if sample.teacher_gaps is not None:
                    has_word.append(np.isfinite(sample.teacher_gaps)[sample.loss_mask])
    found = np.concatenate(gaps)
    if not has_word:
        return {"teacher/reverse_kl": float(found.mean(dtype=np.float64))}
    known = np.concatenate(has_word)
    mean = float(found[known].mean(dtype=np.float64)) if known.any() else 0.0
    return {"teacher/reverse_kl": mean, "teacher/scored_tokens": float(known.mean())}


def _env_metrics(scored: Sequence[ScoredGroup], env_names: Sequence[str]) -> dict[str, float]:
    """Means of the environments' own metrics, `env/<name>/<metric>`."""
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for entry in scored:
        name = env_names[entry.group.prompt.source]
        for episode in entry.episodes:
            for metric, value in episode.result.metrics.items():
                sums[f"env/{name}/{metric}"].append(value)
    return {key: sum(values) / len(values) for key, values in sums.items()}


def group_metrics(counts: GroupCounts) -> dict[str, int]:
    """Compute what happened to groups since the last batch."""
    return {f"groups/{fate}": count for fate, count in asdict(counts).items()}


class SampleLog:
    """Readable rollouts for people and for the end report: `metrics/samples.jsonl`, one JSON object a line."""

    def __init__(self, path: Path, per_step: int) -> None:
        self._file = LineFile(path)
        self._per_step = per_step

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Append the first `orchestrator.log_samples` rows. Raises as `LineFile.append`."""
        now = round(time.time(), 3)
        whole = ({"step": step, "time": now, **row} for row in rows[: self._per_step])
        self._file.append("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in whole))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def train_rows(scored: Sequence[ScoredGroup], env_names: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Sample rows of a batch: the first episode of its first groups."""
    return [
        {
            "kind": "train",
            "env": env_names[entry.group.prompt.source],
            "task": entry.group.prompt.task,
            "position": entry.group.prompt.position,
            "reward": entry.episodes[0].result.reward,
            "advantage": float(entry.advantages[0]),
            "versions": [entry.episodes[0].min_version, entry.episodes[0].max_version],
            **texts(entry.episodes[0].result),
        }
        for entry in scored[:limit]
    ]


def distributions(scored: Sequence[ScoredGroup]) -> dict[str, list[float]]:
    """Each episode's reward, advantage and sampled tokens over a batch, by name."""
    episodes = [episode for group in scored for episode in group.episodes]
    return {
        "reward": [float(reward) for group in scored for reward in group.rewards],
        "advantage": [float(advantage) for group in scored for advantage in group.advantages],
        "completion_tokens": [float(episode.result.num_completion_tokens) for episode in episodes],
    }


def wandb_extras(
    config: WandbConfig, rows: list[dict[str, Any]], scored: Sequence[ScoredGroup]
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Return the logged rollouts and the distributions of a batch, each empty where W&B is not to have it."""
    return [] if config.samples is False else rows, {} if config.distributions is False else distributions(scored)


def longest_wait(row: dict[str, Any]) -> str:
    """Name what the loop waited for most in this step."""
    return max(("rollouts", "weights", "servers"), key=lambda reason: row[f"time/wait_{reason}"])


def troubles(row: dict[str, Any]) -> str:
    """Return the counts that should be zero, where they are not."""
    names = {"episodes/failed": "failed", "episodes/timeout": "timed out", "groups/dropped": "groups dropped"}
    names |= {"groups/rejected": "groups rejected", "groups/stale": "groups stale", "episodes/truncated": "truncated"}
    parts = [f"{row[key]:.0f} {label}" for key, label in names.items() if row[key]]
    parts += [] if row["groups/with_signal"] else ["no group has a signal"]
    return "; " + ", ".join(parts) if parts else ""
