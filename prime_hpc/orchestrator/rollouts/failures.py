"""When failing episodes end the run: a window over the last episodes and the commonest reason; and when groups that
come to nothing do, though not enough of their episodes count as failed for that. Pure. Fed by `loop`."""

import re
from collections import Counter, deque
from collections.abc import Sequence

from loguru import logger

from prime_hpc.orchestrator.errors import OrchestratorError

LEAST_WINDOW = 200
MIN_EPISODES = 50
"""Fewer ended episodes say nothing yet (unless a smaller run has no more)."""

BARREN_WINDOWS = 5
"""Windows full of episodes whose groups were all dropped, until the run ends: of one, chance may be the cause."""

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
        return _commonest([reason for reason in self._window if reason])

    def check(self) -> None:
        """Raise OrchestratorError when too many episodes failed to go on."""
        if len(self._window) < MIN_EPISODES or self.share <= self._max_share:
            return
        reason, count = self.commonest()
        raise OrchestratorError(
            f"{self._num_failed} of the last {len(self._window)} episodes failed (orchestrator.max_failed_share = "
            f"{self._max_share:g}); the commonest reason, {count} times: {reason}"
        )


class BarrenGroups:
    """Groups that were dropped one after the other: without a batch there are no metrics, and nobody would see why.

    Rollouts that a deadline cut off are no failures where `advantage.timeout: penalize` lets them count; a group of
    nothing else has no tokens to train.
    """

    def __init__(self, max_failed_share: float, most_in_flight: int = 0) -> None:
        """`max_failed_share`: of 1 the run goes on whatever comes; `most_in_flight`: as of `FailureWindow`."""
        self._window = max(LEAST_WINDOW, most_in_flight)
        self._ends = max_failed_share < 1
        self._reasons: deque[str] = deque(maxlen=self._window)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Take note of a group that was not dropped."""
        self._num_groups = self._num_episodes = self._num_told = 0
        self._reasons.clear()

    def add(self, reasons: Sequence[str]) -> None:
        """Take a group that was dropped: why each of its episodes does not train, empty where it would."""
        self._num_groups += 1
        self._num_episodes += len(reasons)
        self._reasons.extend(filter(None, reasons))

    def check(self) -> None:
        """Warn once a window of episodes that came to nothing.
        Raises OrchestratorError: nothing else has come for `BARREN_WINDOWS` of them."""
        num_windows = self._num_episodes // self._window
        if num_windows == self._num_told:
            return
        self._num_told = num_windows
        reason, count = _commonest(self._reasons)
        text = (
            f"{self._num_groups} groups in a row were dropped, {self._num_episodes} episodes: too few rollouts of each "
            f"have tokens to train, and no batch comes of them; the commonest reason, {count} of the last "
            f"{len(self._reasons)} times: {reason}"
        )
        if self._ends and num_windows >= BARREN_WINDOWS:
            raise OrchestratorError(text)
        logger.warning(text)


def _commonest(reasons: Sequence[str]) -> tuple[str, int]:
    """Return the commonest reason's latest wording and its count; "", 0 of none."""
    if not reasons:
        return "", 0
    kinds = Counter(_NUMBERS.sub("#", reason) for reason in reasons)
    kind, count = kinds.most_common(1)[0]
    return next(r for r in reversed(reasons) if _NUMBERS.sub("#", r) == kind), count
