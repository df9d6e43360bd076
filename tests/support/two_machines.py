"""Two machines that see the same files: network namespaces with a cable between them, where this user may make such."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One of them."""

    address: str
    interface: str
    """"": both are this machine itself, on its loopback interface."""
    network: str = ""
    """Name of its network namespace."""

    @property
    def enter(self) -> tuple[str, ...]:
        """Words before a command that runs there."""
        return ("ip", "netns", "exec", self.network) if self.network else ()


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with no other way to each other than their cable; without the right to make them, this one
    twice.
    """
    names = [f"ph{os.getpid()}{side}" for side in "ab"]
    cards = [f"v{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        made = _ip("netns", "add", names[0]) and _ip("netns", "add", names[1])
        made = made and _ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for name, card, address in zip(names, cards, addresses, strict=True):
            made = made and _ip("link", "set", card, "netns", name)
            made = made and _ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            made = made and _ip("-n", name, "link", "set", card, "up") and _ip("-n", name, "link", "set", "lo", "up")
        if made:
            a, b = (Machine(*facts) for facts in zip(addresses, cards, names, strict=True))
            yield a, b
        else:
            yield Machine("127.0.0.1", ""), Machine("127.0.0.2", "")
    finally:
        for name in names:
            _ip("netns", "del", name)
        _ip("link", "del", cards[0])
