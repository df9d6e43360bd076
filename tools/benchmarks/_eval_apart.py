"""`tools/bench eval --apart`: server and client on cores of their own, as where engines are on other nodes.

The server, engine included, has the first core, the bare load generator and `eval` the others: needs two.
"""

from typing import Any

import eval as together

render = together.render


def run() -> dict[str, Any]:
    """Both sides in turn."""
    return together.run(apart=True) | {"apart": True}
