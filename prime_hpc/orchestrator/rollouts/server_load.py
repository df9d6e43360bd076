"""Episodes in flight at each server over time, and a sample of how long episodes took beside how many others.

From these figures of a run `prime-hpc simulate` learns how fast engines sample, and how long episodes are.
"""

import random
from dataclasses import dataclass

MOST_EPISODES = 32
"""Kept of one step, drawn evenly from all that ended."""


@dataclass
class ServerLoad:
    """One server's load since it was first looked at, on any clock."""

    since: float
    count: int = 0
    area: float = 0.0
    """Seconds of all episodes so far."""
    idle: float = 0.0
    """Seconds without any."""

    def change(self, by: int, now: float) -> None:
        """Have so many episodes more (or fewer) in flight from `now` on; 0 brings the sums up to now."""
        seconds = max(0.0, now - self.since)
        self.area += seconds * self.count
        self.idle += 0.0 if self.count else seconds
        self.since, self.count = max(now, self.since), self.count + by


class LoadMeter:
    """All servers' loads; drained once a step."""

    def __init__(self, num_servers: int, now: float) -> None:
        self._servers = [ServerLoad(now) for _ in range(num_servers)]
        self._drained = (now, 0.0, 0.0)
        self._sample: list[list[float]] = []
        self._num_seen = 0
        self._rng = random.Random(0)
        self.episode_s = 0.0
        """Seconds of a completed training episode: a mean of the last twenty or so; 0 before the first."""

    def begin(self, server: int, now: float) -> tuple[float, float]:
        """Count an episode that starts; returns what `end` wants to know."""
        load = self._servers[server]
        load.change(1, now)
        return now, load.area

    def end(self, server: int, began: tuple[float, float], now: float) -> tuple[float, float]:
        """Count it as ended; returns its seconds, and how many were in flight at its server meanwhile (mean)."""
        load = self._servers[server]
        load.change(-1, now)
        seconds = now - began[0]
        return seconds, (load.area - began[1]) / seconds if seconds > 0 else float(load.count + 1)

    def keep(self, seconds: float, num_tokens: int, in_flight: float) -> None:
        """Take a completed training episode into the sample."""
        self._num_seen += 1
        self.episode_s += (seconds - self.episode_s) * (0.05 if self.episode_s else 1.0)
        row = [round(seconds, 4), num_tokens, round(in_flight, 2)]
        if len(self._sample) < MOST_EPISODES:
            self._sample.append(row)
        elif (place := self._rng.randrange(self._num_seen)) < MOST_EPISODES:
            self._sample[place] = row

    def drain(self, now: float) -> dict[str, float | list[list[float]]]:
        """Return the figures since the last call.

        `queue/in_flight_mean`: episodes in flight, over time. `queue/idle_share`: share of the time, over servers, with
        nothing in flight; one long episode is enough to end it (`seats` counts what it leaves empty).
        `episode_sample`: [seconds, sampled tokens, mean in flight at its server] of some episodes.
        """
        for load in self._servers:
            load.change(0, now)
        area, idle = (sum(getattr(load, name) for load in self._servers) for name in ("area", "idle"))
        seconds = max(now - self._drained[0], 1e-9)
        row: dict[str, float | list[list[float]]] = {
            "queue/in_flight_mean": (area - self._drained[1]) / seconds,
            "queue/idle_share": (idle - self._drained[2]) / seconds / max(1, len(self._servers)),
            "episode_sample": self._sample,
        }
        self._drained, self._sample, self._num_seen = (now, area, idle), [], 0
        return row
