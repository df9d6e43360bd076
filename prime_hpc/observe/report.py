"""The end of a run for people: a summary, the reward curve as a picture, two sample rollouts before and after."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loguru import logger

from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metric_names import evaluated, held_out_set
from prime_hpc.observe.metrics import STEP_KEYS, iterate_metrics, read_metrics
from prime_hpc.runtime.atomic_write import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT_OUT = {
    "overlong": "longer than seq_len and dropped (sft.data.overlong)",
    "truncated": "longer than seq_len and cut (sft.data.overlong)",
    "untrained": "without anything to train (sft.data.loss_roles)",
    "bad": "refused and skipped (sft.data.bad_rows)",
    "unshown": "trained without their reasoning, tools or text beside calls: see the template (sft.data.chat_template)",
    "unended": "trained without an end-of-turn token: nothing teaches the model to stop (sft.data.chat_template)",
}
_READ = {"step", *STEP_KEYS, "loss", "ratio", "lag/mean"}
_PARTS = 1000
"""Of a curve, about as many as the picture is pixels wide: a hundred thousand points take ten seconds to draw."""
PICTURE = {"rl": "reward.png", "sft": "loss.png"}


def _is_read(key: str) -> bool:
    return key in _READ or key.startswith(("eval/", "data/"))


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric; a later attempt's row for the same step replaces the earlier one, whose rows
    beyond the newest step's are of no run any more. Evaluations alone come in any order."""
    last = next((row["step"] for row in reversed(rows) if not row.keys().isdisjoint(STEP_KEYS)), None)
    values = {row["step"]: row[key] for row in rows if isinstance(row.get(key), int | float)}
    steps = sorted(step for step in values if last is None or step <= last)
    return steps, [values[s] for s in steps]


def eval_series(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Held-out mean reward of each environment by policy version, from the orchestrator's metrics."""
    keys = sorted({key for row in rows for key in row if evaluated(key)})
    return {evaluated(key): _series(rows, key) for key in keys}


def write_report(
    run_dir: Path, name: str, kind: Literal["rl", "sft", "eval", "synthesize"], *, is_complete: bool = True
) -> list[str]:
    """Draw the picture and return the summary's lines; a failure to draw is a warning, never an error. `is_complete`:
    the run has come to its end."""
    if kind == "eval" or kind == "synthesize":
        return _evaluation(run_dir, name, is_complete)
    trainer = read_metrics(metrics_file(run_dir, "trainer"), _is_read)
    orchestrator = read_metrics(metrics_file(run_dir, "orchestrator"), _is_read)
    if not trainer:
        return [f"{name}: no step was completed; logs are in {run_dir / 'logs' / 'latest'}"]
    lines = [f"{name}: {len(_series(trainer, 'time/step')[0])} steps, run directory {run_dir}"]
    if kind == "rl":
        lines += _rl_summary(run_dir, orchestrator, trainer)
    else:
        steps, losses = _series(trainer, "loss")
        if losses:
            lines.append(f"loss {losses[0]:.4f} at step {steps[0]} -> {losses[-1]:.4f} at step {steps[-1]}")
        of, held_out = _series(trainer, "eval/loss")
        if held_out:
            lines.append(f"held-out loss {held_out[0]:.4f} (version {of[0]}) -> {held_out[-1]:.4f} (version {of[-1]})")
        for key in sorted({key for row in trainer for key in row if held_out_set(key)}):
            if of_set := _series(trainer, key)[1]:
                lines.append(f"  of {held_out_set(key)}: {of_set[0]:.4f} -> {of_set[-1]:.4f}")
        if words := left_out(trainer[-1]):
            lines.append(words)
        lines += _eval_lines(orchestrator)
    try:
        lines.append(f"picture: {draw(run_dir, name, kind, trainer, orchestrator)}")
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        logger.warning(f"the picture could not be drawn: {error}")
    return lines


def left_out(figures: Mapping[str, Any]) -> str:
    """Word what of SFT's rows did not train as it is, and why; empty where all did.
    `figures`: of a step, `data/...`, which count from the run's beginning."""
    found = [f"{int(figures[f'data/{k}']):,} {words}" for k, words in _LEFT_OUT.items() if figures.get(f"data/{k}")]
    return f"of {int(figures['data/rows']):,} rows so far: {', '.join(found)}" if found else ""


def _evaluation(run_dir: Path, name: str, is_complete: bool) -> list[str]:
    """Return the table that an evaluation wrote after its last whole version, or `synthesize` at its end."""
    results = run_dir / "results"
    if not (results / "table.txt").is_file():
        return [f"{name}: it did not come to its end; logs are in {run_dir / 'logs' / 'latest'}"]
    lines = (results / "table.txt").read_text(encoding="utf-8").splitlines()
    so_far = "" if is_complete else "it did not come to its end; so far: "
    return [f"{name}: {so_far}results in {results}", *lines]


def _rl_summary(run_dir: Path, orchestrator: list[dict[str, Any]], trainer: list[dict[str, Any]]) -> list[str]:
    lines = []
    steps, rewards = _series(orchestrator, "reward/mean")
    if rewards:
        lines.append(f"training reward {rewards[0]:.3f} at step {steps[0]} -> {rewards[-1]:.3f} at step {steps[-1]}")
    lines += _eval_lines(orchestrator)
    _, lags = _series(orchestrator, "lag/mean")
    _, ratios = _series(trainer, "ratio")
    if lags and ratios:
        mean = sum(ratios) / len(ratios)
        lines.append(f"mean lag {sum(lags) / len(lags):.2f} versions, mean importance ratio {mean:.4f}")
    return lines + _samples(run_dir)


def _eval_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the first and the last held-out reward of every environment, with what failed of them."""
    lines = []
    for env, (versions, values) in eval_series(rows).items():
        lines.append(
            f"held-out mean reward of {env}: {values[0]:.3f} (version {versions[0]}) -> "
            f"{values[-1]:.3f} (version {versions[-1]}), gain {values[-1] - values[0]:+.3f}"
        )
        failed = {row["step"]: row for row in rows if row.get(f"eval/{env}/num_failed")}
        for version in dict.fromkeys((versions[0], versions[-1])):
            if row := failed.get(version):
                share = f"{row[f'eval/{env}/num_failed']} of {row[f'eval/{env}/num_episodes']}"
                lines.append(f"  version {version}: {share} episodes failed or timed out, and count as 0")
    return lines


def _samples(run_dir: Path) -> list[str]:
    """One rollout of the first and one of the last step, of the same prompt where the evaluation has it."""
    path = metrics_file(run_dir, "samples")
    first, last = _ends(row for row in iterate_metrics(path) if row.get("kind") == "eval")
    if not first:
        first, last = _ends(iterate_metrics(path))
    by_task = {row.get("task"): row for row in last}
    lines = []
    for before in first[:2]:
        after = by_task.get(before.get("task"))
        if after is None:
            continue
        lines.append(f"sample: prompt {before['prompt']!r}")
        lines += [
            f"  {when:<6} (reward {row['reward']:.2f}): {row['completion']!r}"
            for when, row in (("before", before), ("after", after))
        ]
    return lines


def _ends(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the first step and those of the last one."""
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for row in rows:
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
        if last and row["step"] != last[0]["step"]:
            last = []
        last.append(row)
    return first, last


def draw(
    run_dir: Path,
    name: str,
    kind: Literal["rl", "sft"],
    trainer: list[dict[str, Any]],
    orchestrator: list[dict[str, Any]],
) -> Path:
    """Write the curve as PNG and return its path. Raises ImportError: matplotlib is not installed."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if kind == "rl":
        axes.plot(
            *thinned(*_series(orchestrator, "reward/mean")), color="#9bb7d4", label="training reward (mean of a batch)"
        )
        for env, (versions, values) in eval_series(orchestrator).items():
            axes.plot(versions, values, "o-", label=f"held-out reward: {env}")
        axes.set_ylabel("reward")
    else:
        axes.plot(*thinned(*_series(trainer, "loss")), label="training loss")
        axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("step")
    axes.set_title(name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = run_dir / PICTURE[kind]
    save_picture(figure, path)
    return path


def thinned(steps: Sequence[int], values: Sequence[float], parts: int = _PARTS) -> tuple[list[int], list[float]]:
    """Return the points of a long curve that are seen: of each of so many parts the least and the greatest value, so
    that no peak is lost, and both ends."""
    width = -(-len(values) // parts)
    starts = range(0, len(values), max(1, width))
    picked = {
        pick(range(i, min(i + width, len(values))), key=values.__getitem__) for i in starts for pick in (min, max)
    }
    shown = sorted(picked | {0, len(values) - 1}) if width > 2 else range(len(values))
    return [steps[i] for i in shown], [values[i] for i in shown]


def save_picture(figure: "Figure", path: Path) -> None:
    """Write it as PNG, whole; on a full disk an earlier attempt's stays."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    write_atomic(path, drawn.getvalue(), sync=False)
