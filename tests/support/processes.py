"""What a test asks of processes that may end at any moment, also between two questions."""

from contextlib import suppress

import psutil


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie, which has given everything back."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def with_word(word: str) -> list[int]:
    """Those that live and have this word in their command line."""
    named = [p.pid for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]
    return [pid for pid in named if is_alive(pid)]
