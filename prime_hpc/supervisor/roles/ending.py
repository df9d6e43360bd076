"""The end of roles with all that they started: politely, then through Slurm, then by signals."""

import os
import time
from collections.abc import Callable, Iterable, Sequence

from prime_hpc.runtime.process_tree import end_families, end_strays
from prime_hpc.supervisor.roles.process import Role


def end_roles(
    roles: Sequence[Role], grace_s: float, more: Iterable[int] = (), tick: Callable[[], None] | None = None
) -> list[int]:
    """End the processes, steps and stand-ins of roles.

    Args:
        roles: to end.
        grace_s: from the polite end to the kill.
        more: leaders of other families of this machine that end with them.
        tick: called while steps are waited for.

    Returns:
        ids of the processes of this machine that had to be killed.
    """
    for role in roles:
        role.ask_to_end()
    steps = [role for role in roles if role.has_agents]
    deadline = time.monotonic() + grace_s + 3.0
    while time.monotonic() < deadline and any(role.is_alive for role in steps):
        if tick is not None:
            tick()
        time.sleep(0.1)
    for role in steps:
        role.kill()
    return end_families([*(role.pid for role in roles if role.was_started), *more], grace_s)


def reap_roles(roles: Sequence[Role], others: Iterable[int]) -> list[int]:
    """Collect what has ended, and end what it left behind.

    Args:
        roles: that have ended.
        others: families of this process that have nothing to do with them.

    Returns:
        ids of the processes that had to be killed.
    """
    for role in roles:
        role.reap()
    return end_strays(os.getpid(), others, grace_s=1.0)
