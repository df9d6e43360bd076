"""The episodes of one environment and the workers that play them; what becomes of them when a worker dies. Pure.

An episode has one id for its whole life and another attempt number each time it is given to a worker. An answer counts
if it is of the attempt that is out, from the worker that has it: everything else (a second answer, one for an episode
that was given up, one of a worker that was replaced) is dropped and counted. So each episode ends once.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_SUSPECTED = 3
"""Workers that may die with an episode, nobody knowing whose fault it was, before the episode counts as lost."""


@dataclass(eq=False)
class Assigned:
    """One episode that was not answered yet."""

    ident: int
    task: int
    server: int
    greedy: bool = False
    attempt: int = 0
    worker: Hashable = None
    """The worker that plays it; None: it waits for one."""
    suspected: int = 0
    """Workers that died with it without a word of whose fault that was."""


@dataclass(frozen=True)
class Losses:
    """The episodes of a worker that died."""

    guilty: list[Assigned] = field(default_factory=list)
    """Killed it: it would kill the next one too."""
    unlucky: list[Assigned] = field(default_factory=list)
    """Suspected too often to be tried again."""
    again: list[Assigned] = field(default_factory=list)
    """To be played again elsewhere."""


class Assignments:
    """All episodes of one environment that are not over."""

    def __init__(self) -> None:
        self._episodes: dict[int, Assigned] = {}
        self._waiting: dict[int, Assigned] = {}
        """Those of them that no worker has, oldest first: with thousands in flight nobody looks through all."""
        self._of_worker: dict[Hashable, dict[int, Assigned]] = {}
        self._last_ident = 0
        self.num_dropped = 0
        """Answers that nobody waited for."""

    def __len__(self) -> int:
        return len(self._episodes)

    def open(self, task: int, server: int, *, greedy: bool = False) -> Assigned:
        """Make a new episode; it waits for a worker."""
        self._last_ident += 1
        made = self._episodes[self._last_ident] = Assigned(self._last_ident, task, server, greedy)
        self._waiting[made.ident] = made
        return made

    def assign(self, episode: Assigned, worker: Hashable) -> None:
        """Give it to a worker."""
        assert episode.worker is None and episode.ident in self._episodes
        del self._waiting[episode.ident]
        episode.attempt += 1
        episode.worker = worker
        self._of_worker.setdefault(worker, {})[episode.ident] = episode

    def load(self, worker: Hashable) -> int:
        """Return how many episodes a worker plays."""
        return len(self._of_worker.get(worker, ()))

    def answered(self, worker: Hashable, ident: int, attempt: int) -> Assigned | None:
        """Take an answer; returns the episode, which is over now, or None where nobody waits for this one."""
        episode = self.find(worker, ident, attempt)
        if episode is None:
            self.num_dropped += 1
            return None
        self.forget(episode)
        return episode

    def find(self, worker: Hashable, ident: int, attempt: int) -> Assigned | None:
        """Return the episode that a worker plays under this id and attempt; None where it plays no such one."""
        episode = self._of_worker.get(worker, {}).get(ident)
        return episode if episode is not None and episode.attempt == attempt else None

    def forget(self, episode: Assigned) -> None:
        """Drop one that is over, or given up. A second time does no harm."""
        self._episodes.pop(episode.ident, None)
        self._waiting.pop(episode.ident, None)
        self._of_worker.get(episode.worker, {}).pop(episode.ident, None)

    def waiting(self) -> list[Assigned]:
        """Return the episodes that no worker has, oldest first."""
        return list(self._waiting.values())

    def lost(self, worker: Hashable, guilty: int | None) -> Losses:
        """Take back the episodes of a worker that is gone.
        `guilty`: id of the episode that ended it; 0: nobody knows; None: no episode did."""
        losses = Losses()
        own = self._of_worker.pop(worker, {})
        for episode in own.values():
            episode.worker = None
            if guilty == episode.ident:
                losses.guilty.append(episode)
            elif guilty == 0 and episode.suspected + 1 >= MAX_SUSPECTED:
                losses.unlucky.append(episode)
            else:
                episode.suspected += guilty == 0
                losses.again.append(episode)
        for episode in (*losses.guilty, *losses.unlucky):
            self.forget(episode)
        again = {episode.ident: episode for episode in losses.again}
        if again:  # they are older than those that wait already, mostly; in order
            self._waiting = dict(sorted({**again, **self._waiting}.items()))
        return losses
