"""How far the episodes of a run without a trainer are, for the console and `status`."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from prime_hpc.evals.episodes import Record
from prime_hpc.observe.metrics import MetricsWriter

PROGRESS_S = 2.0


class Progress:
    """How far it is, for the console and `status`."""

    def __init__(self, metrics: MetricsWriter, total: int, done: int) -> None:
        self._metrics, self._total, self.done = metrics, total, done
        self._played = 0
        self._began = self._next = time.monotonic()
        self._rewards: dict[str, list[float]] = defaultdict(list)
        self.label = ""
        self.figures: dict[str, Any] = {}
        """Further ones to show."""

    def begin(self, label: str, records: Sequence[Record]) -> None:
        """Begin a version's turn; `records` are those it has already."""
        self.label = label
        self._rewards.clear()
        for record in records:
            self._count(record)
        self.say()

    def ended(self, record: Record) -> None:
        """One more episode."""
        self.done, self._played = self.done + 1, self._played + 1
        self._count(record)
        if time.monotonic() >= self._next:
            self.say()

    def _count(self, record: Record) -> None:
        if record.is_scored:
            self._rewards[record.env].append(float(record.reward or 0.0))

    def say(self) -> None:
        """Tell how far it is."""
        now = time.monotonic()
        self._next = now + PROGRESS_S
        rate = self._played / max(now - self._began, 1e-9)
        means = {f"reward/{env}": sum(values) / len(values) for env, values in self._rewards.items()}
        left = (self._total - self.done) / rate if self._played else None
        self._metrics.log(
            self.done,
            version=self.label,
            total=self._total,
            episodes_per_s=round(rate, 3),
            eta_s=left,
            cpu_s=round(time.process_time(), 3),
            **self.figures,
            **means,
        )
