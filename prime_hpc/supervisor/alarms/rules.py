"""Rules over figures: each fires once whenever its line is crossed. Pure."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from prime_hpc.config.sections.supervisor import AlarmRule, AlarmsConfig
from prime_hpc.observe.metrics import number_of

TIME_LEFT = "run.time_left_s"
BUILT_IN = (
    AlarmRule(name="entropy", metric="trainer.entropy", below=0.01, for_steps=10),
    AlarmRule(name="kl", metric="trainer.kl", above=0.1, for_steps=5),
    AlarmRule(name="reward", metric="orchestrator.reward/mean", falls_to=0.25, for_steps=10),
    AlarmRule(name="idle", metric="trainer.idle_share", above=0.9, for_steps=20),
    AlarmRule(name="disk", metric="run.free_share", below=0.03),
    AlarmRule(name="walltime", metric=TIME_LEFT, below=600.0),
    AlarmRule(name="stall", metric="run.stall_s", above=0.0),
    AlarmRule(name="successor", metric="run.no_successor_s", above=0.0),
)


def rules_of(config: AlarmsConfig) -> list[AlarmRule]:
    """Return the rules that are watched: the user's, and the built-in ones of which none has the name."""
    if not config.enabled:
        return []
    own = {rule.name for rule in config.rules}
    built_in = [rule for rule in BUILT_IN if rule.name not in own] if config.builtin else []
    return [*config.rules, *(rule.model_copy(update={"actions": config.builtin_actions}) for rule in built_in)]


@dataclass(frozen=True)
class Alarm:
    """A rule that has just fired."""

    rule: AlarmRule
    value: float
    step: int | None
    text: str


class Watcher:
    """One rule over one metric. A value that is no number breaks `below`, `above` and `falls_to` alike."""

    def __init__(self, rule: AlarmRule) -> None:
        self.rule = rule
        self._in_a_row = 0
        self._is_broken = False
        self._last: deque[float] = deque(maxlen=rule.for_steps)
        self._best: float | None = None

    def take(self, value: Any, step: int | None) -> Alarm | None:
        """Take the metric's next value; returns the alarm where the line was crossed by it."""
        number = number_of(value)
        if number is None:
            return None
        if not self._last and self.rule.metric == TIME_LEFT and self._breaks(number):
            self._is_broken = True  # the job was given no more from its beginning: no line is crossed
        self._last.append(number)
        if not self._breaks(number):
            self._in_a_row, self._is_broken = 0, False
            return None
        self._in_a_row += 1
        if self._in_a_row < self.rule.for_steps or self._is_broken:
            return None
        self._is_broken = True
        return Alarm(self.rule, number, step, self._text(number, step))

    def _breaks(self, number: float) -> bool:
        rule = self.rule
        if math.isnan(number):
            return True
        if rule.below is not None:
            return number < rule.below
        if rule.above is not None:
            return number > rule.above
        assert rule.falls_to is not None
        if len(self._last) == rule.for_steps and all(map(math.isfinite, self._last)):
            mean = math.fsum(self._last) / len(self._last)
            self._best = mean if self._best is None else max(self._best, mean)
        return self._best is not None and self._best > 0 and number <= rule.falls_to * self._best

    def _text(self, number: float, step: int | None) -> str:
        rule = self.rule
        at = "" if step is None else f" at step {step}"
        if rule.below is not None:
            line = f"below {rule.below:g}"
        elif rule.above is not None:
            line = f"above {rule.above:g}"
        else:
            line = f"at {rule.falls_to:g} of its best, {self._best or 0.0:.4g}"
        row = f" for {rule.for_steps} steps" if rule.for_steps > 1 else ""
        named = "" if rule.title == rule.metric else f"{rule.title}: "
        return f"{named}{rule.metric} is {number:.4g}{at}, {line}{row}"


def figures_of(file: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's figures as alarms name them, with those that are made of others."""
    found = {f"{file}.{name}": value for name, value in row.items() if name not in ("step", "time")}
    wait, step = number_of(row.get("time/wait")), number_of(row.get("time/step"))
    if file == "trainer" and wait is not None and step:
        found["trainer.idle_share"] = wait / step
    return found
