"""The order of the runs' batches: start-time fair queueing (Goyal et al. 1996) over tokens, with a bound on the wait.

Every run has a virtual time, the tokens that it was trained on, each as often as it was. Of the runs whose batch is
ready the one that is furthest behind goes first. Who had nothing to train for a while, or is new, begins at the virtual
time of the furthest-behind run that had: idleness earns nothing, and a new run does not stop the others until it has
caught up.

What holds, for runs that stay ready (tests/unit/test_multi_fairness.py):

- Tokens: those that two of them were given differ by at most one largest batch of each, as long as no batch is more
  than twice as large as another.
- Wait: a ready run lets at most `PATIENCE` x (slots - 1) steps of others pass, whatever their sizes. A step cannot be
  divided, so a run with far larger batches gets more than its share of tokens rather than starve.

With all batches alike it is round robin.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PATIENCE = 4
"""Steps of each other slot that a ready run lets pass at most."""


@dataclass
class _Account:
    virtual: float
    passed: int = 0
    """Steps of others since its batch was first seen to be ready."""
    waits: bool = False


class FairQueue:
    """The accounts of the runs that hold a slot."""

    def __init__(self, num_slots: int) -> None:
        self._accounts: dict[str, _Account] = {}
        self._now = 0.0
        self.limit = PATIENCE * (num_slots - 1)
        """Steps of others that a ready run lets pass at most."""

    def add(self, run: str) -> None:
        """Add a run that begins at the virtual time of now."""
        self._accounts[run] = _Account(self._now)

    def remove(self, run: str) -> None:
        """Remove a run that has left."""
        self._accounts.pop(run, None)

    def choose(self, ready: Collection[str]) -> str | None:
        """Return the run to train next; None where no batch is ready. `ready`: runs whose next batch is whole."""
        for run, account in self._accounts.items():
            if run in ready and not account.waits:
                account.waits, account.virtual = True, max(account.virtual, self._now)
        waiting = {run: a for run, a in self._accounts.items() if a.waits and run in ready}
        if not waiting:
            return None
        overdue = {run: a for run, a in waiting.items() if a.passed >= self.limit - self._ahead(run, waiting)}
        among = overdue or waiting
        key = (lambda run: (-among[run].passed, run)) if overdue else (lambda run: (among[run].virtual, run))
        return min(among, key=key)

    def _ahead(self, run: str, waiting: Mapping[str, _Account]) -> int:
        """Others that have let more steps pass: they may have to go before it when all become overdue at once."""
        own = (-waiting[run].passed, run)
        return sum((-a.passed, name) < own for name, a in waiting.items() if name != run)

    def trained(self, run: str, num_tokens: float, ready: Collection[str]) -> None:
        """Count a step of `run`."""
        account = self._accounts[run]
        self._now = max(self._now, account.virtual)
        account.virtual += max(num_tokens, 1.0)  # an empty batch is a step all the same
        account.passed, account.waits = 0, False
        for name, other in self._accounts.items():
            if name != run and other.waits and name in ready:
                other.passed += 1
