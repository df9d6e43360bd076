"""When failing episodes end the run: a window over the last episodes and the commonest reason. Pure. Fed by `loop`."""

import re
from collections import Counter, deque

from prime_hpc.orchestrator.errors import OrchestratorError

LEAST_WINDOW = 200
MIN_EPISODES = 50
"""Fewer ended episodes say nothing yet (unless a smaller run has no more)."""

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


class FailureWindow:
    """Share of failed episodes among the last ones that ended (completed, failed or timed out)."""

    def __init__(self, max_failed_share: float, most_in_flight: int = 0) -> None:
        """`most_in_flight`: the window is as long. Of thousands hundreds end in the second in which a judge is away."""
        self._max_share = max_failed_share
        self._window: deque[str] = deque(maxlen=max(LEAST_WINDOW, most_in_flight))
        self._num_failed = 0

    def add(self, reason: str) -> None:
        """One episode ended; `reason` is empty where it may train."""
        if len(self._window) == self._window.maxlen:
            self._num_failed -= bool(self._window[0])
        self._num_failed += bool(reason)
        self._window.append(reason)

    @property
    def share(self) -> float:
        """Failed share of the window, 0 while it is empty."""
        return self._num_failed / max(1, len(self._window))

    def commonest(self) -> tuple[str, int]:
        """Return the commonest failure's latest wording and its count (numbers and addresses do not tell failures
        apart)."""
        failures = [reason for reason in self._window if reason]
        if not failures:
            return "", 0
        kinds = Counter(_NUMBERS.sub("#", reason) for reason in failures)
        kind, count = kinds.most_common(1)[0]
        return next(r for r in reversed(failures) if _NUMBERS.sub("#", r) == kind), count

    def check(self) -> None:
        """Raise OrchestratorError when too many episodes failed to go on."""
        if len(self._window) < MIN_EPISODES or self.share <= self._max_share:
            return
        reason, count = self.commonest()
        raise OrchestratorError(
            f"{self._num_failed} of the last {len(self._window)} episodes failed (orchestrator.max_failed_share = "
            f"{self._max_share:g}); the commonest reason, {count} times: {reason}"
        )
