"""Predictions: of the calibrating runs themselves, which states the error, then of each shape with what it costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.engine_memory import engine_memory
from prime_hpc.launch.estimate.model_facts import read_model
from prime_hpc.launch.estimate.step_time import Pace
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.launch.plan.interval import interval_facts
from prime_hpc.simulate.calibration import Calibration, differences, shortened
from prime_hpc.simulate.events import ROUGH_ROLLOUTS, Outcome, simulate
from prime_hpc.simulate.setting import Setting, other_shapes, reshaped, setting_of, shape_text
from prime_hpc.slurm.placement import place_slurm


@dataclass(frozen=True)
class Check:
    """A calibrating run, predicted and measured."""

    run: str
    predicted: Outcome
    measured_s: float | None
    """Mean of its steps; None: a bench has none of both sides."""
    measured_trainer_idle: float | None
    measured_engines_idle: float | None
    measured_lag: float | None

    @property
    def error(self) -> float | None:
        """Of the predicted step time, relative."""
        return None if not self.measured_s else self.predicted.step_s / self.measured_s - 1


@dataclass(frozen=True)
class Prediction:
    """One shape."""

    shape: str
    setting: Setting
    outcome: Outcome
    range_s: tuple[float, float] | None
    """Of a step, where the engines' load is beyond what was measured: by the two extremes of their curve."""
    hours: float
    """To the last step, with the start where one was measured."""
    device_hours: float
    loss_percent: float | None
    """Expected of the time, for checkpoints and what is done again after failures; None where it is not known."""
    trainer_gib: float | None
    engine_gib: float | None
    """Weights of one engine's GPU, and its overhead; the rest is for the key-value cache."""
    notes: tuple[str, ...]
    is_asked: bool = False

    @property
    def longest_s(self) -> float:
        """Seconds of a step at worst: a shape of which less is known is not the best for that."""
        return self.outcome.step_s if self.range_s is None else self.range_s[1]

    def as_dict(self) -> dict[str, Any]:
        """Return it for scripts."""
        tree = asdict(self)
        tree["devices"] = self.setting.devices
        return tree


def check(calibration: Calibration) -> list[Check]:
    """Predict each calibrating run by what all of them told together."""
    found = []
    for run in calibration.runs:
        costs, _ = shortened(calibration.costs, run.setting)
        outcome = simulate(run.setting, costs, run.experiment.seed)
        measured = None if run.is_bench else _mean(run.step_s)
        idle = sum(run.wait_s) / sum(run.step_s) if run.wait_s and sum(run.step_s) > 0 else None
        found.append(Check(run.name, outcome, measured, idle, _mean(run.idle), _mean(run.lag)))
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def predict(
    experiment: Experiment, calibration: Calibration, shapes: Sequence[Mapping[str, int]], site: SiteConfig | None
) -> list[Prediction]:
    """Predict the experiment as it is and in other shapes, those with the fewest trainer ranks first.

    Args:
        shapes: of `setting.parse_shape`; empty: other splits of as many GPUs, where they can be laid out.
        site: of a Slurm job: failure rate and nodes, for the expected loss.

    Raises:
        ConfigError: a stated shape does not fit.
    """
    asked = setting_of(experiment)
    settings = {asked: experiment}
    for shape in shapes:
        other = reshaped(experiment, shape)
        settings.setdefault(setting_of(other), other)
    for shape in [] if shapes else other_shapes(asked):
        try:
            other = reshaped(experiment, shape)
        except ConfigError:  # a layout that the ranks cannot have: no shape that could be asked for
            continue
        settings.setdefault(setting_of(other), other)
    rows = [_predict(shaped, setting, asked, calibration, site) for setting, shaped in settings.items()]
    return sorted(rows, key=lambda row: (row.setting.ranks, row.setting.inference, row.shape))


def predict_step(
    setting: Setting, calibration: Calibration, seed: int
) -> tuple[Outcome, tuple[float, float] | None, float]:
    """Simulate one shape.

    Returns:
        what comes of it; the least and the most seconds of a step where the engines' load is beyond what was measured;
        the share of measured episodes that are longer than the shape lets them be.
    """
    costs, cut = shortened(calibration.costs, setting)
    outcome = simulate(setting, costs, seed)
    curve = calibration.curve
    if curve.covers(outcome.in_flight / max(1e-9, 1 - outcome.engines_idle)):
        return outcome, None, cut
    extremes = [replace(costs, token_s=a, shared_token_s=b) for a, b in curve.bounds()]
    steps = sorted([outcome.step_s, *(simulate(setting, one, seed, ROUGH_ROLLOUTS).step_s for one in extremes)])
    return outcome, (steps[0], steps[-1]), cut


def _predict(
    experiment: Experiment, setting: Setting, asked: Setting, calibration: Calibration, site: SiteConfig | None
) -> Prediction:
    outcome, range_s, cut = predict_step(setting, calibration, experiment.seed)
    notes = []
    curve = calibration.curve
    if range_s is not None:
        notes.append(
            f"{outcome.in_flight:.1f} requests in flight at an engine, measured {curve.least:.1f} to {curve.most:.1f}: "
            f"a step of {range_s[0]:.3g} to {range_s[1]:.3g} s, as their speed goes on beyond that"
        )
    if cut:
        notes.append(f"{cut:.0%} of the measured episodes are longer than this shape lets them be, and were cut")
    facts = read_model(experiment.model.name)
    parts = trainer_gib(experiment, facts) if facts is not None else None
    engine = engine_memory(experiment, facts, None) if facts is not None else None
    seconds = outcome.step_s * setting.max_steps + (calibration.start_s or 0.0)
    return Prediction(
        shape=shape_text(setting, asked),
        setting=setting,
        outcome=outcome,
        range_s=range_s,
        hours=seconds / 3600,
        device_hours=seconds / 3600 * setting.devices,
        loss_percent=_loss(experiment, outcome, calibration, site, notes),
        trainer_gib=sum(parts.values()) if parts is not None else None,
        engine_gib=engine.weights_gib if engine is not None else None,
        notes=tuple(notes),
        is_asked=setting == asked,
    )


def _loss(
    experiment: Experiment, outcome: Outcome, calibration: Calibration, site: SiteConfig | None, notes: list[str]
) -> float | None:
    """Return the expected loss in percent, as `plan` states it, with this step time and measured saves."""
    if site is None or experiment.ckpt is None or calibration.write_s is None:
        return None
    try:
        num_nodes = place_slurm(experiment, site).num_nodes
    except ConfigError as error:
        notes.append(f"it cannot be placed: {error}")
        return None
    stall = calibration.costs.save_s
    speed = Pace(outcome.step_s, "simulated", max(stall, calibration.write_s), "measured", stall)
    facts = interval_facts(experiment, site, speed, num_nodes, walltime_s=None, in_job=True)
    loss = facts["set_loss_percent"]
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def caveats(experiment: Experiment, calibration: Calibration, host: str) -> list[str]:
    """Name what the prediction goes without, and by what the calibration differs from the experiment."""
    found = [f"not measured by these runs, so left out: {what}" for what in calibration.absent]
    measured = ", ".join(map(str, sorted({run.setting.ranks for run in calibration.runs})))
    found.append(f"trainer ranks measured: {measured}; other numbers of them are taken to share the tokens out evenly")
    for run in calibration.runs:
        other = differences(run, experiment)
        if run.host != host:
            other.insert(0, f"machine {run.host}, here {host}")
        if other:
            found.append(f"{run.name} is a calibration of something else: {'; '.join(other)}")
        if run.truncated and experiment.orchestrator.sampling.max_tokens > run.setting.max_tokens:
            found.append(
                f"{run.name}: a limit cut {run.truncated:.0f} episodes short; with more max_tokens they would be longer"
            )
        if not run.is_over:
            found.append(f"{run.name} has not ended: what it wrote so far is taken")
        if run.num_broken:
            found.append(f"{run.name}: {run.num_broken} rows or episodes without finite numbers were left out")
    groups = {env.rollouts_per_example for env in experiment.orchestrator.env} - {None}
    if groups:
        found.append("environments with group sizes of their own: orchestrator.rollouts_per_example is taken for all")
    if 0 < len(experiment.orchestrator.greedy_sources) < len(experiment.orchestrator.env):
        found.append("environments of which some have greedy rollouts: one is taken for each prompt of all")
    if experiment.engines_sleep:
        found.append("inference.sleep: the time in which engines go to sleep and wake is left out")
    if experiment.orchestrator.eval is not None:
        found.append("evaluations are left out")
    return found
