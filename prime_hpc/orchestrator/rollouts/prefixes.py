"""Long starts of prompts, and the servers whose cache has them: groups that share one meet on the same servers. Pure.

A document that many questions are about, the rules of a game: a server that has computed such a start reads it from
its cache, as long as it serves the same version. One orchestrator sends all requests, so it need not hash starts to
servers; it remembers where it has sent them. A start goes where it was while that server has at most `AHEAD` of the
mean load more than the emptiest one, else to that one, which then has it too: the bound of consistent hashing with
bounded loads (Mirrokni et al. 2018, arXiv 1608.01350), with a directory in place of the hashes. What was never seen
goes where it would have gone without all this.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_hpc.orchestrator.rollouts.servers import Server

LENGTHS = (65_536, 16_384, 4_096, 1_024)
"""Characters of the starts that are looked at. What is shorter saves an engine less than a detour costs."""
AHEAD = 0.25
"""Of the mean number of episodes in flight."""
MOST_STARTS = 1 << 14
"""Remembered, the latest ones."""


def starts_of(text: str) -> tuple[int, ...]:
    """Return keys of a prompt's starts of `LENGTHS` characters, as far as it has them, the longest first."""
    return tuple(hash((length, text[:length])) for length in LENGTHS if len(text) >= length)


class PrefixDirectory:
    """Servers by the starts that they were sent, each with the version that it served then."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, dict[int, int]] = OrderedDict()

    def choose(
        self, starts: Sequence[int], servers: "Sequence[Server]", ready: Sequence[int], best: int, keeps: bool
    ) -> int:
        """Return the server for a prompt, and remember that it has its starts.

        Args:
            starts: of the prompt, see `starts_of`.
            servers: all of them.
            ready: those that take episodes.
            best: the one of them with the most room.
            keeps: servers keep what they have computed when their version changes.
        """
        mean = sum(servers[i].in_flight for i in ready) / len(ready)
        most = servers[best].load + max(1.0, AHEAD * mean)
        chosen = best
        for start in starts:
            holders = [
                i
                for i, version in self._holders.get(start, {}).items()
                if servers[i].ready and servers[i].load <= most and (keeps or version == servers[i].version)
            ]
            if holders:
                chosen = min(holders, key=lambda i: servers[i].load)
                break
        for start in starts:
            self._holders.setdefault(start, {})[chosen] = servers[chosen].version
            self._holders.move_to_end(start)
        while len(self._holders) > MOST_STARTS:
            self._holders.popitem(last=False)
        return chosen
