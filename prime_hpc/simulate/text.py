"""The answer of `prime-hpc simulate`, for people and for scripts."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.observe.table import align
from prime_hpc.simulate.calibration import Calibration, Missing
from prime_hpc.simulate.measured import Measured
from prime_hpc.simulate.predict import Check, Prediction
from prime_hpc.simulate.setting import setting_of


def missing_text(missing: Missing, file: str, name: str, sources: Sequence[str]) -> str:
    """Say what is missing, and the commands that measure it."""
    looked = (
        f"looked in: {', '.join(sources)}" if sources else "no run was named (--from RUN), and this one has not run"
    )
    lines = ["nothing is predicted: there is no calibration of", *(f"  {line}" for line in missing.lines), looked]
    return "\n".join([*lines, *commands(file, name)]) + "\n"


def commands(file: str, name: str) -> list[str]:
    """Return the commands that measure what a calibration needs."""
    file, name = shlex.quote(file), shlex.quote(name)
    return [
        "to measure it, on the machine that will run it:",
        f"  rl @ {file} --bench --name {name}-bench                    # lengths, engines, trainer: each side alone",
        f"  rl @ {file} --max-steps 8 --name {name}-short              # these, and publishing, loading, saving",
        f"  prime-hpc simulate {file} --from {name}-short",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s"
    return f"{60 * hours:.1f} min" if hours < 1 else f"{hours:.1f} h"


def _gib(gib: float | None) -> str:
    return "" if gib is None else f"{gib:.1f}" if gib >= 1 else f"{gib:.2f}"


def run_line(run: Measured) -> str:
    """Name a calibrating run: machine, model, steps."""
    experiment, setting = run.experiment, run.setting
    kind = "bench" if run.is_bench else f"steps {run.steps[0]} to {run.steps[1]}" if run.steps else "no whole step"
    shape = f"trainer={setting.ranks},inference={setting.inference},async={setting.async_level}"
    return (
        f"  {run.name}: {kind}, {shape}, {len(run.episodes)} episodes; "
        f"{experiment.model.name} ({experiment.model.dtype}) on {run.host}"
    )


def curve_line(calibration: Calibration) -> str:
    """Describe the engines: tokens/s of one, over requests in flight."""
    curve = calibration.curve
    points = sorted({curve.least, (curve.least * curve.most) ** 0.5, curve.most})
    speeds = ", ".join(f"{curve.tokens_per_s(n):.4g} at {n:.3g}" for n in points)
    return f"  one engine's tokens/s over requests in flight: {speeds} (measured between these)"


def error_lines(checks: Sequence[Check]) -> list[str]:
    """State the error: the calibrating runs, predicted and measured."""
    found = []
    for one in checks:
        if one.measured_s is None or one.error is None:
            found.append(f"  {one.run}: no steps of both sides, so its error is not known (a run of a few steps has)")
            continue
        sides = [
            f"{name} {_percent(ours)} (measured {_percent(theirs)})"
            for name, ours, theirs in (
                ("trainer idle", one.predicted.trainer_idle, one.measured_trainer_idle),
                ("engines idle", one.predicted.engines_idle, one.measured_engines_idle),
            )
            if theirs is not None
        ]
        found.append(
            f"  {one.run}: predicted {one.predicted.step_s:.4g} s a step, measured {one.measured_s:.4g} s: "
            f"{100 * one.error:+.1f} %{''.join('; ' + side for side in sides)}"
        )
    return found


def prediction_text(
    experiment: Experiment,
    calibration: Calibration,
    checks: Sequence[Check],
    rows: Sequence[Prediction],
    notes: Sequence[str],
) -> str:
    """Return the answer for people."""
    asked, costs = setting_of(experiment), calibration.costs
    lengths = sorted(tokens for tokens, _ in costs.rollouts)
    lines = [
        f"simulated    {experiment.name}: {asked.num_prompts} prompts x {asked.group_size} rollouts "
        f"{'and a greedy one ' if asked.greedy else ''}a step, async level {asked.async_level}, {asked.max_concurrent} "
        f"in flight at most, {asked.max_steps} steps",
        "calibrated by",
        *(run_line(run) for run in calibration.runs),
        f"  episodes of {sum(lengths) / len(lengths):.4g} tokens (mean), {lengths[len(lengths) * 9 // 10]:.4g} at the "
        f"90th percentile; {costs.trained_per_sampled:.3g} tokens trained for each sampled",
        curve_line(calibration),
        f"  one rank's tokens/s: {1 / costs.train_token_s:.4g}, and {costs.train_fixed_s:.3g} s an update; publishing "
        f"{costs.publish_s:.3g} s, loading {costs.load_s:.3g} s (engines pause {costs.pause_s:.3g} s)",
        "error: the calibrating runs by their own calibration",
        *error_lines(checks),
        "",
        *align(_table(rows, asked.max_steps), right=True),
        "",
    ]
    lines += [f"* {row.shape}: {note}" for row in rows for note in row.notes]
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Prediction], steps: int) -> list[list[str]]:
    above = ["", "", "trainer", "engines", "", "sampled", "in", "trainer", "weights", "ckpt", "to step", "device", ""]
    head = ["shape", "s/step", "idle", "idle", "lag", "again", "flight", "GiB", "GiB", "loss", str(steps), "hours", ""]
    fastest = min(rows, key=lambda row: (row.longest_s, row.device_hours))
    cheapest = min(rows, key=lambda row: (row.longest_s * row.setting.devices, row.longest_s))
    found = [above, head]
    for row in rows:
        outcome = row.outcome
        doubt = "?" if row.range_s is not None else ""
        marks = ["asked"] * row.is_asked
        marks += [f"fastest{doubt}"] * (row is fastest) + [f"cheapest{doubt}"] * (row is cheapest)
        found.append(
            [
                row.shape + (" *" if row.notes else ""),
                f"{outcome.step_s:.4g}" if row.range_s is None else f"{row.range_s[0]:.3g} to {row.range_s[1]:.3g}",
                _percent(outcome.trainer_idle),
                _percent(outcome.engines_idle),
                f"{outcome.lag:.2f}",
                _percent(outcome.stale),
                f"{outcome.in_flight:.3g}",
                _gib(row.trainer_gib),
                _gib(row.engine_gib),
                "" if row.loss_percent is None else f"{row.loss_percent:.2f} %",
                _hours(row.hours) + doubt,
                f"{row.device_hours:.3g}{doubt}",
                ", ".join(marks),
            ]
        )
    shown = [column for column in zip(*found, strict=True) if any(column[2:])]  # nobody knows some of all shapes
    return [list(row) for row in zip(*shown, strict=True)]


def prediction_tree(
    experiment: Experiment,
    calibration: Calibration,
    checks: Sequence[Check],
    rows: Sequence[Prediction],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the answer for scripts."""
    costs = asdict(calibration.costs)
    del costs["rollouts"]
    return {
        "name": experiment.name,
        "seed": experiment.seed,
        "calibration": {
            "runs": [
                {
                    "name": run.name,
                    "path": str(run.path),
                    "host": run.host,
                    "model": run.experiment.model.name,
                    "steps": run.steps,
                    "episodes": len(run.episodes),
                    "bench": run.is_bench,
                    "over": run.is_over,
                }
                for run in calibration.runs
            ],
            "costs": costs,
            "curve": asdict(calibration.curve),
            "start_s": calibration.start_s,
        },
        "error": [asdict(one) | {"error": one.error} for one in checks],
        "shapes": [row.as_dict() for row in rows],
        "notes": list(notes),
    }
