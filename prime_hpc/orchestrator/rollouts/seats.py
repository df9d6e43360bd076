"""Seats for episodes that stayed empty, and why: what `queue/idle_share` cannot see, for which one episode is work.

A run's seats are the episodes that it had in flight at once at its fullest moment of the last `MEMORY` steps, at most
those that it may have (`max_concurrent`): where the staleness gate never lets so many begin, the rest of the
limit was never meant to be used. Of each moment the empty ones have one cause:
- `tail`: the trainer waits for the next batch, and that for the episodes in flight, the longest ones;
- `gate`: the trainer works on a batch, and until it has made the next version no more groups may begin;
- `weights`: that version is there, and is being loaded;
- `servers`: no server answers;
- `end`: the run's last batches are all begun.
"""

from collections import defaultdict, deque

from prime_hpc.orchestrator.rollouts.groups import GroupBook
from prime_hpc.orchestrator.rollouts.servers import ServerTable

CAUSES = ("tail", "gate", "weights", "servers", "end")
MEMORY = 16
"""Steps: more than can be written one after the other without an episode in between, and few enough that a large
evaluation's episodes are forgotten."""


class SeatMeter:
    """Times and episodes' seconds by cause; drained once a step."""

    def __init__(self, now: float) -> None:
        """Nothing is in flight at `now`, on any clock."""
        self._since = self._began = now
        self._cause = ""
        self._in_flight = 0
        self._peak = 0
        """Of this step."""
        self._peaks: deque[int] = deque(maxlen=MEMORY)
        """Of the last ones."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._areas: defaultdict[str, float] = defaultdict(float)

    def look(self, in_flight: int, cause: str, now: float) -> None:
        """Take the state from `now` on.

        Args:
            cause: one of `CAUSES` why there are no more; "" where there may not be.
            now: on the clock of the constructor.
        """
        seconds = max(0.0, now - self._since)
        self._seconds[self._cause] += seconds
        self._areas[self._cause] += seconds * self._in_flight
        if seconds > 0:
            self._peak = max(self._peak, self._in_flight)
        self._since, self._in_flight, self._cause = max(now, self._since), in_flight, cause

    def drain(self, limit: int, now: float) -> dict[str, float]:
        """Return the shares since the last call: `queue/seats`, episodes; `queue/empty_seats`, the share of the seats
        that was empty, over time; `queue/empty_<cause>` for each of `CAUSES`, which sum up to it.
        `limit`: episodes that may be in flight."""
        self.look(self._in_flight, self._cause, now)
        self._peaks.append(self._peak)
        seats = min(limit, max(self._peaks))
        whole = seats * max(now - self._began, 1e-9)
        row = {"queue/seats": float(seats), "queue/empty_seats": 0.0}
        for cause in CAUSES:
            empty = max(0.0, seats * self._seconds[cause] - self._areas[cause]) / whole if seats else 0.0
            row[f"queue/empty_{cause}"] = empty
            row["queue/empty_seats"] += empty
        self._began = self._since
        self._peak = 0
        self._seconds.clear()
        self._areas.clear()
        return row


def why_empty(table: ServerTable, book: GroupBook, is_updating: bool) -> str:
    """Return the cause for which no further group begins now, one of `CAUSES`; "" where one may begin."""
    if not table.ready_indices:
        return "servers"
    held = book.held_by(table.served_version)
    return "weights" if held == "gate" and is_updating else held
