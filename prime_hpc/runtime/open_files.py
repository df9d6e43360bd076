"""How many files and connections a process may have open."""

import resource

MAX_DESCRIPTORS = 1 << 16
"""More than any run has connections; a limit of millions makes old programs that close all descriptors slow."""


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many files and connections as the hard limit allows, `MAX_DESCRIPTORS`
    at most. The usual soft limit of 1024 is less than the ranks of a large run. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox that forbids it: what there is must do
        return soft
    return wanted
