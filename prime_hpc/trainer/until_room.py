"""Writes of all ranks together that are tried again while a full disk, a quota or the file system refuses them, instead
of ending the attempt."""

import time
from collections.abc import Callable
from typing import TypeVar

from prime_hpc.store.errors import NoRoom, Unreadable
from prime_hpc.store.io.room import RoomWait
from prime_hpc.trainer.rank_group import RankGroup

T = TypeVar("T")
LOOK_S = 0.5
"""Between two looks for a stop."""


def until_room(
    write: Callable[[], T], ranks: RankGroup, wait: RoomWait, is_stopped: Callable[[], bool] = lambda: False
) -> T | None:
    """Return what `write` returns; None: given up. Collective: the ranks meet after each pause, none waits long in a
    collective.

    Args:
        write: collective; raises NoRoom or Unreadable on all ranks alike, and may be called again then.
        wait: rank 0's counts.
        is_stopped: of rank 0: the attempt is to end, and this is not what holds that up.

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

        def pause(error: NoRoom | Unreadable = error) -> tuple[bool, bool]:
            end = time.monotonic() + wait.next_pause(error)
            while not is_stopped() and (left_s := end - time.monotonic()) > 0:
                time.sleep(min(left_s, LOOK_S))
            return wait.has_room, is_stopped()

        has_room = stopped = False
        while not has_room and not stopped:
            has_room, stopped = ranks.from_first(pause)
        if stopped:
            wait.give_up("the attempt is to end, and the next one writes it")
            return None
