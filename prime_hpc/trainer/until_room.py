"""Writes of all ranks together that are tried again while a full disk, a quota or the file system refuses them, instead
of ending the attempt."""

import time
from collections.abc import Callable
from typing import TypeVar

from prime_hpc.store.errors import NoRoom, Unreadable
from prime_hpc.store.io.room import RoomWait
from prime_hpc.trainer.rank_group import RankGroup

T = TypeVar("T")


def until_room(write: Callable[[], T], ranks: RankGroup, wait: RoomWait) -> T:
    """Return what `write` returns. Collective: the ranks meet after each pause, none waits long in a collective.

    Args:
        write: collective; raises NoRoom or Unreadable on all ranks alike, and may be called again then.
        wait: rank 0's counts.

    Raises:
        NoRoom: the time is over; on all ranks.
    """
    while True:
        try:
            result = write()
        except (NoRoom, Unreadable) as refused:
            error = refused
        else:
            wait.over()
            return result

        def pause(error: NoRoom | Unreadable = error) -> bool:
            time.sleep(wait.next_pause(error))
            return wait.has_room

        while not ranks.from_first(pause):
            pass
