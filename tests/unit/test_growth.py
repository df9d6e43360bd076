"""The search for what is never forgotten finds it."""

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from tests.support.growth import Growth

ROOT = Path(__file__).parents[2]
ALONE = "from tests.unit.test_growth import Keeper, grown; print(*grown(Keeper()), sep='\\n')"


class Keeper:
    """Forgets nothing of some things."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self.window: deque[int] = deque(maxlen=1000)
        self.rows: list[dict[str, int]] = []

    def step(self, n: int) -> None:
        self.numbers[n] = n
        self.newest[n] = n
        self.newest.pop(n - 8, None)
        self.window.append(n)
        self.rows.append({"n": n})


def grown(keeper: Any, steps: int = 90) -> list[str]:
    growth = Growth([30, 60, 90])
    for n in range(1, steps + 1):
        keeper.step(n)
        growth.look(n)
    assert growth.found is not None
    return growth.found


def test_what_gains_an_entry_a_step_is_named() -> None:
    """In a process of its own: a look goes through all that there is, and others' tests leave millions of objects."""
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = [line for line in done.stdout.splitlines() if "Keeper" in line]
    assert len(kept) == 2 and any("Keeper.numbers: 30 entries, then 90" in line for line in kept)
    assert any("Keeper.rows: 30 entries, then 90" in line for line in kept)
