"""The last message of each topic, for who comes late; of some topics the last about each thing that they are about.

Where runs share a hub they come and go, for as long as it lives: of topics that are a run's own ("<run>/<topic>") those
are kept that were spoken of last.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

Kept = TypeVar("Kept")
ABOUT = {"server": ("role", "index")}
"""Topics about several things, and the fields that name one: news of a server does not take the place of another's."""

OF_AGENTS = ("launch/", "end/", "adopt/")
"""Begin the topics of a role's agents, which are no run's, and which an agent that joins again must find."""

MOST_OF_RUNS = 2000
"""Topics of single runs. Who joins is sent all that is kept: of more it would hear late, and beyond the hub's backlog
nothing."""


def thing(topic: str, payload: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the topic of a message and what names the thing that it is about."""
    return (topic, *(str(payload.get(field)) for field in ABOUT.get(topic, ())))


class LastWords(Generic[Kept]):
    """Something kept of the last message about each thing."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[tuple[Any, ...], Kept]] = {}

    def keep(self, topic: str, payload: Mapping[str, Any], kept: Kept) -> None:
        """Keep something of a message in place of what was kept of the one before it."""
        things, name = self._kept.pop(topic, {}), thing(topic, payload)
        things.pop(name, None)  # so that the newest is the last, as of the topics
        things[name] = kept
        self._kept[topic] = things
        if len(self._kept) > MOST_OF_RUNS:
            oldest = next((known for known in self._kept if "/" in known and not known.startswith(OF_AGENTS)), None)
            if oldest is not None:
                del self._kept[oldest]

    def about(self, topic: str, payload: Mapping[str, Any]) -> Kept | None:
        """Return what is kept of the last message about the thing that a message is about."""
        return self._kept.get(topic, {}).get(thing(topic, payload))

    def of(self, topic: str) -> list[Kept]:
        """Return what is kept of a topic, the newest last."""
        return list(self._kept.get(topic, {}).values())

    def __iter__(self) -> Iterator[Kept]:
        """All that is kept, in any order of topics."""
        return (kept for things in self._kept.values() for kept in things.values())

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
