"""Costs from measured runs: episodes, the engines' batching curve, the trainer's tokens/s, publishing and loading.

The curve. An episode of L tokens beside n requests in flight at its engine takes `c + a L + b L n` seconds: `a` of a
token alone, `b` more for every request beside it, `c` outside of sampling. Least squares over all measured episodes,
no value below 0. What an episode took longer or shorter than others of its step is kept with its length: waits for
tools, prompts that are computed. Of what a whole step took longer the mean is kept, since its episodes wait for each
other, not for the worst of all steps. Where neither lengths nor requests in flight vary, the parts cannot be told
apart: the curve is then known at that load alone, and shapes with another one are marked.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prime_hpc.config import Experiment
from prime_hpc.launch.estimate.forward_passes import looked_at_for
from prime_hpc.simulate.costs import Costs
from prime_hpc.simulate.measured import Measured
from prime_hpc.simulate.setting import Setting

LEAST_EPISODES = 16
MOST_ROLLOUTS = 20_000
MOST_DROPPED = 0.9
SPREAD = 1.3
"""Ratio of the 95th to the 5th percentile from which on a fit has something to go by."""
BEYOND = 1.25
"""A load is beyond what was measured from this ratio on."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Engines' speed over requests in flight."""

    token_s: float
    shared_token_s: float
    least: float
    most: float
    """Requests in flight at one engine between which it was measured."""

    def tokens_per_s(self, in_flight: float) -> float:
        """Of one engine."""
        return in_flight / max(1e-12, self.token_s + self.shared_token_s * in_flight)

    def covers(self, in_flight: float) -> bool:
        """Return whether it was measured near that load."""
        return self.least / BEYOND <= max(in_flight, 1.0) <= self.most * BEYOND

    def bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return `a` and `b` of the two extremes through the middle of what was measured: a token takes as long at any
        load, and an engine gives as many tokens/s at any load. Every curve of this form lies between them."""
        middle = (self.least * self.most) ** 0.5
        token_s = self.token_s + self.shared_token_s * middle
        return (token_s, 0.0), (0.0, token_s / middle)


@dataclass(frozen=True)
class Calibration:
    """Everything that runs have told."""

    runs: tuple[Measured, ...]
    costs: Costs
    curve: Curve
    start_s: float | None
    write_s: float | None
    absent: tuple[str, ...]
    """Costs that no run measured; the prediction goes without them."""


@dataclass(frozen=True)
class Missing:
    """Things without which nothing is predicted, each in one line."""

    lines: tuple[str, ...]


def fit_nonnegative(features: Array, values: Array) -> Array:
    """Least squares with no coefficient below 0.

    Args:
        features: [N, F], F at most 4.
        values: [N]

    Returns:
        [F]; of several that fit as well the one with the fewest other than 0, those of the first columns.
    """
    size = features.shape[1]
    best, best_error = np.zeros(size), float(values @ values)
    tolerance = 1e-9 * best_error + 1e-15
    for count in range(1, size + 1):
        for chosen in itertools.combinations(range(size), count):
            part = features[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, values, rcond=None)
            if rank < count or (found < 0).any():
                continue
            error = float(((part @ found - values) ** 2).sum())
            if error < best_error - tolerance:
                best, best_error = np.zeros(size), error
                best[list(chosen)] = found
    return best


def calibrate(runs: Sequence[Measured]) -> Calibration | Missing:
    """Pool the runs; what is missing is named, never guessed."""
    lacking = _lacking(runs)
    if lacking:
        return Missing(tuple(lacking))
    curve, rollouts = _fit_engines(runs)
    fixed, per_token = _fit_trainer(runs)
    means = {
        "publish_s": _mean(run.publish_s for run in runs),
        "load_s": _mean(run.load_s for run in runs),
        "save_s": _mean(run.save_s for run in runs),
    }
    absent = []
    if means["publish_s"] is None or means["load_s"] is None:
        absent.append("publishing and loading weights")
    if means["save_s"] is None:
        absent.append("saving checkpoints")
    groups = sum(run.groups for run in runs)
    costs = Costs(
        rollouts=rollouts,
        token_s=curve.token_s,
        shared_token_s=curve.shared_token_s,
        trained_per_sampled=_mean(run.trained_per_sampled for run in runs) or 0.0,
        train_fixed_s=fixed,
        train_token_s=per_token,
        other_s=_mean(run.other_s for run in runs) or 0.0,
        handover_s=_mean(run.handover_s for run in runs) or 0.0,
        pause_s=_mean(run.pause_s for run in runs) or 0.0,
        dropped_share=sum(run.groups_dropped for run in runs) / groups if groups else 0.0,
        **{name: value or 0.0 for name, value in means.items()},
    )
    starts = [run.start_s for run in runs if run.start_s is not None]
    return Calibration(
        runs=tuple(runs),
        costs=costs,
        curve=curve,
        start_s=sum(starts) / len(starts) if starts else None,
        write_s=_mean(run.write_s for run in runs),
        absent=tuple(absent),
    )


def _lacking(runs: Sequence[Measured]) -> list[str]:
    found = []
    num_episodes = sum(len(run.episodes) for run in runs)
    if num_episodes < LEAST_EPISODES or not any(run.trained_per_sampled for run in runs):
        found.append(
            f"episodes' lengths and the engines' tokens/s over requests in flight: {num_episodes} episodes with their "
            f"times were found, at least {LEAST_EPISODES} are needed (rows `episode_sample` of "
            "metrics/orchestrator.jsonl, which versions before this one did not write)"
        )
    elif not any(row[1] > 0 for run in runs for row in run.episodes):
        found.append("the engines' tokens/s: no measured episode has sampled a token")
    if not any(tokens > 0 for run in runs for tokens, _ in run.train):
        found.append("the trainer's tokens/s: no measured step of a trainer was found (metrics/trainer.jsonl)")
    groups = sum(run.groups for run in runs)
    if groups and sum(run.groups_dropped for run in runs) / groups > MOST_DROPPED:
        found.append("groups that train: nearly all were dropped or rejected, as the runs' logs say")
    return found


def _mean(lists: Iterable[Iterable[float]]) -> float | None:
    values = list(itertools.chain.from_iterable(lists))
    return float(np.mean(values)) if values else None


def _fit_engines(runs: Sequence[Measured]) -> tuple[Curve, tuple[tuple[float, float], ...]]:
    """Return the curve, and the episodes: tokens, and seconds beside what the curve explains."""
    rows = np.array(
        [(*row, run.setting.max_num_seqs or np.inf, i) for i, run in enumerate(runs) for row in run.episodes], float
    )
    seconds, tokens, in_flight, step, room, of_run = rows.T
    turns = np.maximum(1.0, in_flight / room)
    features = np.stack([tokens * turns, tokens * in_flight, np.ones_like(tokens)], 1)
    coefficients = fit_nonnegative(features, seconds)
    token_s, shared_s, _ = coefficients.tolist()
    if token_s == shared_s == 0:  # times do not grow with tokens: they are those of the environment
        rest = seconds
    else:
        rest = seconds - features[:, :2] @ coefficients[:2]
        target = max(0.0, float(rest.mean()))
        _, place = np.unique(np.stack([of_run, step]), axis=1, return_inverse=True)
        rest = rest - (np.bincount(place, rest) / np.bincount(place))[place] + target
        rest = np.maximum(0.0, rest)
        if rest.sum() > 0:  # what was cut off at 0 is taken off the others: the mean stays
            rest *= target / rest.mean()
    every = max(1, -(-len(rows) // MOST_ROLLOUTS))
    least, most = (float(value) for value in np.percentile(in_flight, (5, 95)))
    pairs = zip(tokens[::every].tolist(), rest[::every].tolist(), strict=True)
    return Curve(token_s, shared_s, max(1.0, least), max(1.0, most)), tuple(pairs)


def _fit_trainer(runs: Sequence[Measured]) -> tuple[float, float]:
    """Seconds of an update whatever its tokens, and of one token on one rank."""
    rows = np.array([row for run in runs for row in run.train if row[0] > 0], float)
    tokens, seconds = rows.T
    optim = _mean(run.optim_s for run in runs) or 0.0
    low, high = np.percentile(tokens, (5, 95))
    if high >= SPREAD * low:
        per_token, fixed = fit_nonnegative(np.stack([tokens, np.ones_like(tokens)], 1), seconds).tolist()
        if per_token > 0:
            return fixed + optim, per_token
    return optim, float(seconds.sum() / tokens.sum())


def shortened(costs: Costs, setting: Setting) -> tuple[Costs, float]:
    """Cut the measured episodes to what the setting lets them sample; returns also the share that is cut."""
    if setting.max_turns is None:
        return costs, 0.0
    most = float(setting.max_tokens * setting.max_turns)
    cut = sum(tokens > most for tokens, _ in costs.rollouts) / len(costs.rollouts)
    if not cut:
        return costs, 0.0
    return replace(costs, rollouts=tuple((min(tokens, most), rest) for tokens, rest in costs.rollouts)), cut


def differences(run: Measured, experiment: Experiment) -> list[str]:
    """Name what makes a run's costs those of something else: model, machine, what is computed."""
    theirs, ours = _facts(run.experiment), _facts(experiment)
    facts = ((key, theirs[key], ours[key]) for key in ours)
    return [  # `auto` may come to the same
        f"{key} {_word(then)}, here {_word(now)}"
        for key, then, now in facts
        if then != now and "auto" not in (then, now)
    ]


def _word(value: object) -> str:
    return "not stated" if value is None else str(value)


def _facts(experiment: Experiment) -> dict[str, object]:
    model, config = experiment.model, experiment.orchestrator
    engines, dims = experiment.inference, experiment.trainer.parallel_dims
    facts: dict[str, object] = {
        "model.name": _model_name(model.name),
        "model.dtype": model.dtype,
        "model.lora": "on" if model.lora is not None else "off",
        "orchestrator.env": ", ".join(env.id for env in config.env),
        "orchestrator.sampling.max_tokens": config.sampling.max_tokens,
        "seq_len": experiment.seq_len,
        "trainer.micro_batch_tokens": experiment.micro_batch_tokens,
        "forward passes before a batch's first update": int(bool(looked_at_for(experiment))),
        "trainer.critic": "on" if experiment.trainer.critic is not None else "off",
        "trainer.parallel.tp x cp": dims.tp * dims.cp,
        "trainer.threads_per_rank": experiment.trainer.threads_per_rank,
        "device": experiment.device,
        "slurm.gpu_type": experiment.slurm.gpu_type,
        "slurm.partition": experiment.slurm.partition,
    }
    for name in ("backend", "tensor_parallel_size", "pipeline_parallel_size", "cpu_threads", "max_num_seqs"):
        facts[f"inference.{name}"] = getattr(engines, name) if engines is not None else "attached"
    return facts


def _model_name(name: str) -> str:
    """Name a directory the same however it is written: a run's snapshot states whole paths."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name
