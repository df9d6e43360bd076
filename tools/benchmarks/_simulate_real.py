"""`tools/bench simulate --real`: the same runs with engines and a trainer as quick as the cores that they share."""

from typing import Any

import simulate

render = simulate.render


def run() -> dict[str, Any]:
    """All cases and comparisons."""
    return simulate.run(stretched=False)
