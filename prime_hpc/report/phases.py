"""Time of the trainer and the orchestrator by phase, from the rows of their steps: blocks for the timeline, sums for
the accounting of each attempt.

A trainer's step is, in this order, waiting for the batch, training (forward, backward, optimizer), publishing the new
version, saving, and the rest. An orchestrator's step is waiting (for rollouts, for weights, for servers) and its own
work; since its rows carry `spans`, their places in the step are known, before that their sums alone.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.report.series import MAX_STEP, number_of, section_of, short
from prime_hpc.store.attempts import NOT_BEGUN

TRAINER = ("wait", "train", "publish", "save", "other")
ORCHESTRATOR = ("wait_rollouts", "wait_weights", "wait_servers", "work")
_TRAINER_KEYS = {
    "wait": ("time/wait",),
    "train": ("time/forward_backward", "time/optim"),
    "publish": ("time/publish",),
    "save": ("time/checkpoint",),
}
_ORCHESTRATOR_KEYS = {name: (f"time/{name}",) for name in ORCHESTRATOR[:-1]}
MOST_BLOCKS = 20_000
"""Held of a role; above that two neighbours become one."""
MOST_SPANS = 40_000


@dataclass
class AttemptSums:
    """Seconds by phase of the steps that ended within one attempt."""

    seconds: dict[str, float] = field(default_factory=dict)
    lost: float = 0.0
    """Seconds of steps that a later attempt did again."""
    num_steps: int = 0
    num_lost: int = 0
    first: float | None = None
    """Begin of the first step, epoch seconds."""
    last: float | None = None
    """End of the last one."""
    tokens: float = 0.0
    evaluated: float = 0.0
    """Seconds of evaluations, of engines that do nothing else."""


class Phases:
    """Collects a role's steps; memory is bounded whatever their number."""

    def __init__(
        self,
        names: Sequence[str],
        attempts: Sequence[Mapping[str, Any]],
        most_blocks: int = MOST_BLOCKS,
        role: str = "trainer",
        ready: Mapping[int, float] | None = None,
    ) -> None:
        """Args:
        names: of the phases, in their order; the last one is the rest of the step.
        most_blocks: held at once.
        ready: as for `ready_at`: before that seats are empty for the start.
        """
        self._most = most_blocks
        self._names, self._stated = tuple(names), tuple(names[:-1])
        self._began = [number_of(row.get("began")) or 0.0 for row in attempts]
        resumed = [_first_step(row, role) for row in attempts]
        self._resumed_later = [min(resumed[index + 1 :], default=sys.maxsize) for index in range(max(1, len(resumed)))]
        """The first step that any later attempt went on from."""
        self._ready = [
            0.0 if role in (row.get("kept") or []) else ready_at(row, ready or {}) or 0.0 for row in attempts
        ]
        self.sums = [AttemptSums() for _ in attempts] or [AttemptSums()]
        self._ends, self._starts = array("d"), array("d")
        self._parts = [array("d") for _ in self._names]
        self._steps = array("q")
        self._merged = 1
        self._in_block = 0
        self.spans: dict[str, list[tuple[float, float]]] = {}
        """Phase -> (begin, end) where rows tell them, epoch seconds."""
        self.has_spans = False

    def _attempt_of(self, moment: float) -> int:
        return max(0, bisect_right(self._began, moment) - 1)

    def add(self, row: Mapping[str, Any], seconds: Mapping[str, float], is_lost: bool | None = None) -> None:
        """Take a step's row.

        Args:
            row: with `time` (its end), `step` and `time/step`.
            seconds: of its phases but the last.
            is_lost: a later attempt did it again; None: as the attempts' own begins say.
        """
        end, length = number_of(row.get("time")), number_of(row.get("time/step"))
        step = row.get("step")
        if end is None or length is None or not 0 <= length < 1e9 or not isinstance(step, int) or step >= MAX_STEP:
            return
        values = [max(0.0, seconds.get(name, 0.0)) for name in self._stated]
        values.append(max(0.0, length - sum(values)))
        index = self._attempt_of(end)
        if is_lost is None:
            is_lost = self._resumed_later[index] < step
        self._add_to_sums(index, end, length, values, is_lost)
        self.sums[index].tokens += number_of(row.get("num_tokens")) or 0.0
        after = min(length, max(0.0, end - self._ready[index])) if self._ready else length
        for name, share in empty_seats(row).items():
            self.sums[index].seconds[name] = self.sums[index].seconds.get(name, 0.0) + share * after
        self._take_spans(row.get("spans"), end, self.sums[index])
        self._add_block(step, end - length, end, values)

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Take a row of engines that only evaluate."""
        end, seconds = number_of(row.get("time")), number_of(row.get("eval/seconds"))
        if end is not None and seconds is not None and 0 <= seconds < 1e9:
            self.sums[self._attempt_of(end)].evaluated += seconds

    def _add_to_sums(self, index: int, end: float, length: float, values: list[float], is_lost: bool) -> None:
        sums = self.sums[index]
        sums.num_steps += 1
        sums.first = end - length if sums.first is None else min(sums.first, end - length)
        sums.last = end if sums.last is None else max(sums.last, end)
        if is_lost:
            sums.lost += sum(values[1:])
            sums.num_lost += 1
            sums.seconds[self._names[0]] = sums.seconds.get(self._names[0], 0.0) + values[0]
            return
        for name, value in zip(self._names, values, strict=True):
            sums.seconds[name] = sums.seconds.get(name, 0.0) + value

    def _take_spans(self, spans: Any, end: float, sums: AttemptSums) -> None:
        if not isinstance(spans, list):
            return
        self.has_spans = True
        for span in spans:
            if not (isinstance(span, list) and len(span) == 3 and isinstance(span[0], str)):
                continue
            before, length = number_of(span[1]), number_of(span[2])
            if before is None or length is None:
                continue
            if span[0] not in self._names:
                sums.seconds[span[0]] = sums.seconds.get(span[0], 0.0) + length
            found = self.spans.setdefault(span[0], [])
            if len(found) < MOST_SPANS:
                found.append((end - before, end - before + length))

    def _add_block(self, step: int, start: float, end: float, values: list[float]) -> None:
        if self._in_block and self._in_block < self._merged and start - self._ends[-1] < 60:
            self._ends[-1] = end
            for part, value in zip(self._parts, values, strict=True):
                part[-1] += value
            self._in_block += 1
            return
        self._ends.append(end)
        self._starts.append(start)
        self._steps.append(step)
        for part, value in zip(self._parts, values, strict=True):
            part.append(value)
        self._in_block = 1
        if len(self._ends) > self._most:
            self._halve()

    def _halve(self) -> None:
        size = len(self._ends) // 2
        self._starts = array("d", (self._starts[2 * i] for i in range(size)))
        self._ends = array("d", (self._ends[2 * i + 1] for i in range(size)))
        self._steps = array("q", (self._steps[2 * i] for i in range(size)))
        self._parts = [array("d", (part[2 * i] + part[2 * i + 1] for i in range(size))) for part in self._parts]
        self._merged *= 2
        self._in_block = self._merged

    def lane(self, origin: float, most: int) -> dict[str, Any]:
        """Return the blocks for the page, times in seconds since `origin`, at most `most` of them."""
        while len(self._ends) > most:
            self._halve()
        return {
            "phases": list(self._names),
            "steps": list(self._steps),
            "merged": self._merged,
            "start": [round(value - origin, 3) for value in self._starts],
            "end": [round(value - origin, 3) for value in self._ends],
            "parts": [[short(value) for value in part] for part in self._parts],
            "spans": {
                name: [[round(begin - origin, 3), round(end - origin, 3)] for begin, end in found]
                for name, found in self.spans.items()
            },
            "placed": self.has_spans or self._names == TRAINER,
        }


def ready_at(attempt: Mapping[str, Any], ready: Mapping[int, float]) -> float | None:
    """Return when all roles of an attempt were ready, epoch seconds; None where nobody says.
    `ready`: of `timeline.ready_times`, for those that did not live to write it."""
    began, start = number_of(attempt.get("began")), number_of(section_of(attempt, "seconds").get("start"))
    if began is not None and start is not None:
        return began + start
    return ready.get(attempt.get("attempt", 0))


def _first_step(attempt: Mapping[str, Any], role: str) -> int:
    """Return the step after which an attempt did a role's steps; of one that did none again a step that never is."""
    if role in (attempt.get("kept") or []) or attempt.get("why") == NOT_BEGUN:
        return sys.maxsize
    return int(attempt.get("resume_step") or 0)


def together(some: Sequence[AttemptSums]) -> AttemptSums:
    """Return the sums of engines that several orchestrators shared, each an equal part of their seats: means over the
    time in which any of them made steps, weighted by each one's own."""
    known = [(one, one.first, one.last) for one in some if one.first is not None and one.last is not None]
    if not known:
        return AttemptSums()
    first, last = min(begin for _, begin, _ in known), max(end for _, _, end in known)
    share = (last - first) / max(sum(end - begin for _, begin, end in known), 1e-9)
    names = {name for one, _, _ in known for name in one.seconds}
    seconds = {name: share * sum(one.seconds.get(name, 0.0) for one, _, _ in known) for name in names}
    return AttemptSums(seconds, first=first, last=last)


def empty_seats(row: Mapping[str, Any]) -> dict[str, float]:
    """Shares of an orchestrator row's step for which the engines' seats were empty: `empty_tail`, for the last replies
    of a batch, and `empty_other`; nothing of a row that does not count them."""
    whole, tail = number_of(row.get("queue/empty_seats")), number_of(row.get("queue/empty_tail"))
    if whole is None or tail is None or not 0 <= tail <= whole <= 1:
        return {}
    return {"empty_tail": tail, "empty_other": whole - tail}


def trainer_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a trainer row's phases, by the names of `TRAINER`."""
    return {name: _sum(row, keys) for name, keys in _TRAINER_KEYS.items()}


def orchestrator_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of an orchestrator row's phases, by the names of `ORCHESTRATOR`."""
    return {name: _sum(row, keys) for name, keys in _ORCHESTRATOR_KEYS.items()}


def _sum(row: Mapping[str, Any], keys: Iterable[str]) -> float:
    return sum([number_of(row.get(key)) or 0.0 for key in keys])
