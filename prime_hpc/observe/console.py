"""The console that a person watches: one line a step, a progress display for the long waits.

Fed by the roles' own metrics files (the truth), driven by the supervisor's tick. It decides nothing.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import number_of, parse_row
from prime_hpc.runtime.clock import AwakeClock

Doing = Mapping[str, Sequence[Mapping[str, Any]]]
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 12
"""Values of a curve in a line, and so many are kept."""
QUIET_S = 60.0
"""After so long without a line, and three times as long as a step takes, it is said what the roles do; then after twice
as long, and so on."""


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Return the last `width` values as block characters, scaled between their least and greatest; of one that is not
    finite a gap."""
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, last = min(finite), len(BLOCKS) - 1
    span = (max(finite) - low) or 1.0
    levels = [min(last, int((v - low) / span * len(BLOCKS))) if math.isfinite(v) else None for v in shown]
    return "".join(" " if level is None else BLOCKS[level] for level in levels)


def short(number: float) -> str:
    """Return a count in three significant characters: 950, 3.1k, 2.4M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`; those that are not finite as `?`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, secs = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def in_seconds(seconds: float) -> str:
    """Return a length of time in seconds as `4.27 s`, `427 s`, `1500 s`: never with an exponent."""
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def time_left(seconds: float) -> str:
    """Return a length of time as `h:mm:ss`, very long ones in days."""
    if not math.isfinite(seconds):
        return "?"
    return duration(seconds) if seconds < 360_000 else f"{seconds / 86_400:.1f} d"


def local_time(epoch: float) -> str:
    """Return local time; with the date where it is not today's."""
    try:
        moment, today = time.localtime(epoch), time.localtime()
    except (OverflowError, ValueError, OSError):  # no time at all
        return "?"
    return time.strftime("%H:%M" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)


class Tail:
    """New whole lines of a JSON-lines file since the last look."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """Args:
        path: the file, which may not exist yet.
        whole: what is in it already counts as new.
        """
        self._path = path
        self._offset: int | None = 0
        if not whole:
            self._offset = None
            with contextlib.suppress(OSError):
                self._offset = self._size()

    def rows(self) -> list[dict[str, Any]]:
        """Rows appended since the last call.
        Raises OSError: the file cannot be read now; nothing is skipped, the next call goes on from the same place."""
        if self._offset is None:  # it could not be asked at first
            self._offset = self._size()
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [_with_numbers(row) for row in map(parse_row, data[:end].splitlines()) if row is not None]

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def _with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with figures that are not finite as numbers; the file has them as text."""
    texts = {key: number_of(value) for key, value in row.items() if isinstance(value, str) and key != "run"}
    return row | {key: number for key, number in texts.items() if number is not None}


def _words(row: Mapping[str, Any]) -> str:
    """Write what processes of a role do."""
    return str(row.get("phase", "?")) + (f" (waits for {row['awaits']})" if row.get("awaits") else "")


class Console:
    """Joins the trainer's and the orchestrator's rows of a step into one line."""

    def __init__(
        self,
        run_dir: Path,
        max_steps: int | None,
        *,
        kind: Literal["rl", "sft", "eval", "synthesize"],
        clock: AwakeClock | None = None,
    ) -> None:
        self._clock = clock or AwakeClock()
        self._missed = self._clock.missed()
        self._run_dir = run_dir
        self._max_steps = max_steps
        self._kind = kind
        self._trainer = Tail(metrics_file(run_dir, "trainer"))
        self._orchestrators = {"": Tail(metrics_file(run_dir, "orchestrator"))}
        """By the run's name; "": this run's own. Those of runs below it come with their first step."""
        self._episodes = Tail(metrics_file(run_dir, kind))
        """Of a run without a trainer."""
        self._rollouts: dict[str, dict[int, dict[str, Any]]] = {}
        """By run and step."""
        self._rewards: dict[str, deque[float]] = {}
        self._losses: deque[float] = deque(maxlen=CURVE)
        self._times: deque[float] = deque(maxlen=10)
        self._last_step_at: float | None = None
        self._seconds = {"useful": 0.0, "waiting": 0.0, "saving": 0.0}
        self._step: int | None = None
        self._longest_save = 0.0
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._said_at = 0.0
        self._quiet_since = self._clock.now()
        self._quiet_s = QUIET_S
        self._has_complained = False

    def tick(self, waiting: dict[str, float], doing: Callable[[], Doing] = dict) -> None:
        """Show what is new.

        Args:
            waiting: label of each role that is not ready, and for how many seconds it has been starting.
            doing: by role, what its processes do now (rows of `phase`, `awaits`, `count`). Asked for now and then.
        """
        self._show_waiting(waiting)
        trained = [row for row in self._new_rows(self._trainer) if "time/step" in row]
        for run in {row["run"] for row in trained if "run" in row} - self._orchestrators.keys():
            # the whole file: what this step was trained on is in it already
            self._orchestrators[run] = Tail(metrics_file(self._run_dir / run, "orchestrator"), whole=True)
        for run, tail in self._orchestrators.items():
            self._rollouts.setdefault(run, {}).update(
                (r["step"], r) for r in self._new_rows(tail) if "reward/mean" in r
            )
        for row in trained:
            self._show_step(row)
        played = self._new_rows(self._episodes) if self._kind in ("eval", "synthesize") else []
        for row in played:
            self._show_episodes(row)
        if waiting or trained or played:
            self._quiet_since, self._quiet_s = self._clock.now(), QUIET_S
        else:
            self._show_quiet(doing)

    def seconds(self) -> dict[str, float]:
        """Split the trainer's time: useful, waiting for rollouts, saving."""
        return dict(self._seconds)

    def progress(self) -> dict[str, Any]:
        """Return the last step of this attempt, with its reward or loss; None before the first."""
        name, values = ("reward", self._rewards.get("")) if self._kind != "sft" else ("loss", self._losses)
        is_known = self._step is not None or self._kind in ("rl", "sft")  # of episodes their first line says it
        max_steps = self._max_steps if is_known else None
        return {"step": self._step, "max_steps": max_steps, name: values[-1] if values else None}

    def needs_s(self) -> float:
        """Return what one more step and a save took at most lately, in seconds: of a save all of it, also what went on
        in the background, for at the end nothing else is waited for."""
        return max(self._times, default=0.0) + self._longest_save

    def close(self) -> None:
        """Take the progress display away; lines that came meanwhile are shown first."""
        self.tick({})
        if self._progress is not None:
            self._progress.stop()

    def _new_rows(self, tail: Tail) -> list[dict[str, Any]]:
        """Return what a file has new; nothing while it cannot be read, which is no reason to end a run."""
        try:
            return tail.rows()
        except OSError as error:
            if not self._has_complained:
                logger.warning(
                    f"the console cannot read {error.filename or 'metrics'} now: {error.strerror}; it tries on"
                )
            self._has_complained = True
            return []

    def _show_waiting(self, waiting: dict[str, float]) -> None:
        if sys.stdout.isatty():
            self._draw_progress(waiting)
        elif waiting and time.monotonic() - self._said_at > 15:
            self._said_at = time.monotonic()
            logger.info("starting: " + ", ".join(f"{label} {s:.0f} s" for label, s in sorted(waiting.items())))

    def _show_quiet(self, doing: Callable[[], Doing]) -> None:
        quiet_s = self._clock.now() - self._quiet_since
        if quiet_s < max(self._quiet_s, 3 * max(self._times, default=0.0)):
            return
        self._quiet_s = 2 * quiet_s
        if told := ", ".join(f"{role} {'; '.join(map(_words, rows))}" for role, rows in doing().items()):
            what = "step" if self._kind in ("rl", "sft") else "episode"
            after = "" if self._step is None else f" after {self._step}"
            logger.info(f"no {what}{after} for {duration(quiet_s)}: {told}")

    def _draw_progress(self, waiting: dict[str, float]) -> None:
        if self._progress is None:
            if not waiting:
                return
            from rich.console import Console as Screen
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            screen = Screen(soft_wrap=True)  # the terminal breaks long lines, whose width rich may only guess
            columns = TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn()
            self._progress = Progress(*columns, console=screen, transient=True)
            self._progress.start()
        for label in waiting:
            if label not in self._tasks:
                self._tasks[label] = self._progress.add_task(f"{label} starts (loads the model, warms up)", total=None)
        for label in [x for x in self._tasks if x not in waiting]:
            self._progress.remove_task(self._tasks.pop(label))
        if not waiting:
            self._progress.stop()
            self._progress = None

    def _show_step(self, row: dict[str, Any]) -> None:
        now, missed = self._clock.now(), self._clock.missed()
        was_stopped, self._missed = missed > self._missed, missed
        step = row["step"]
        # the first step's wait is the start-up of the other side: no measure of the steps to come
        took = (
            now - self._last_step_at if self._last_step_at is not None else row["time/step"] - row.get("time/wait", 0.0)
        )
        self._last_step_at = now
        self._times.append(took)
        wait = row.get("time/wait", 0.0)
        save = row.get("time/checkpoint", 0.0)
        self._step = step
        if not was_stopped:  # the trainer's own clock ran on while the job was suspended
            self._longest_save = max(self._longest_save, save, row.get("ckpt/write_s", 0.0))
        self._seconds["waiting"] += wait
        self._seconds["saving"] += save
        self._seconds["useful"] += max(0.0, row["time/step"] - wait - save)
        if "run/max_steps" in row and "run" not in row:  # the data decide (`sft.data.num_epochs`): it has counted
            self._max_steps = int(row["run/max_steps"])
        parts = [f"step {step:>4}/{self._max_steps}"]
        if "run" in row:  # one of several runs of this trainer: the row is of its step
            parts = [f"{row['run']} step {row['run/step']:>4}/{row['run/max_steps']}"]
        parts += self._rl_parts(row, took) if self._kind == "rl" else self._sft_parts(row)
        parts += [f"slow ranks: {row['ranks/slow']:.0f} (trainer's log)"] if row.get("ranks/slow") else []
        parts += [f"{took:.1f} s/step"]
        if "run" not in row and self._max_steps is not None:
            parts += [f"ETA {duration(sum(self._times) / len(self._times) * (self._max_steps - step))}"]
        logger.info("  ".join(parts))

    def _show_episodes(self, row: dict[str, Any]) -> None:
        """Without a trainer a step is an episode."""
        self._step, self._max_steps = row["step"], row["total"]
        means = {key.removeprefix("reward/"): row[key] for key in row if key.startswith("reward/")}
        self._rewards[""] = deque([sum(means.values()) / len(means)] if means else [], maxlen=CURVE)
        parts = [f"{row['version']}: {row['step']}/{row['total']} episodes"]
        parts += [f"{env} {mean:.3f}" for env, mean in means.items()]
        parts += [f"{row['passed']} rows pass"] if "passed" in row else []
        parts += [f"{row['episodes_per_s']:.1f} episodes/s"]
        parts += [f"ETA {duration(row['eta_s'])}"] if row["eta_s"] is not None else []
        logger.info("  ".join(parts))

    def _sft_parts(self, row: dict[str, Any]) -> list[str]:
        self._losses.append(row["loss"])
        return [
            f"loss {row['loss']:.4f} {sparkline(self._losses)}",
            *([f"accuracy {row['rewards/accuracies']:.2f}"] if "rewards/accuracies" in row else []),
            f"grad {row['grad_norm']:.2f}",
            f"lr {row['lr']:.1e}",
            f"{short(row['tokens_per_s'])} tok/s",
            f"MFU {row.get('mfu', 0.0):.1%}",
        ]

    def _rl_parts(self, row: dict[str, Any], took: float) -> list[str]:
        run, step = row.get("run", ""), row.get("run/step", row["step"])
        waiting = self._rollouts.get(run, {})
        rollouts = waiting.get(step, {})
        self._rollouts[run] = {later: values for later, values in waiting.items() if later > step}
        reward = rollouts.get("reward/mean", row.get("reward", float("nan")))
        rewards = self._rewards.setdefault(run, deque(maxlen=CURVE))
        rewards.append(reward)
        length = max(took, row["time/step"], 1e-9)
        empty_for_weights = sum(rollouts.get(f"queue/empty_{cause}", 0.0) for cause in ("gate", "weights"))
        waits = {
            "trainer waits for rollouts": row.get("time/wait", 0.0) / length,
            "inference waits for weights": max(rollouts.get("time/wait_weights", 0.0) / length, empty_for_weights),
        }
        who = max(waits, key=lambda key: waits[key])
        share, tail = min(1.0, waits[who]), rollouts.get("queue/empty_tail", 0.0)
        generated = rollouts.get("tokens/sampled_per_second", 0.0)
        is_idle = rollouts.get("groups/with_signal", 1) == 0
        return [
            f"reward {reward:.3f} {sparkline(rewards)}" + (" (no group has a signal)" if is_idle else ""),
            f"loss {row['loss']:+.4f}",
            f"kl {row['kl']:.1e} ratio {row['ratio']:.3f}",
            f"lag {rollouts.get('lag/mean', 0.0):.1f}/{rollouts.get('lag/max', 0)}",
            f"train {short(row['tokens_per_s'])} gen {short(generated)} tok/s",
            (f"{who} {share:.0%}" if share >= 0.05 else "nobody waits")
            + (f", {tail:.0%} of the seats empty for the last replies" if tail >= 0.05 else ""),
        ]
