"""The experts to which an engine sent the tokens of a reply, from its answer to the rows of a sample.

An engine that records them (`trainer.router_replay`) answers with rows for the prompt and all sampled tokens but the
last one, which never went through the model. Tokens of earlier turns come again with every later prompt: the rows of
the call that sampled them count.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

RoutingOf = Callable[[Any], np.ndarray | None]
"""Recorded experts [positions, layers, k] of the call that sampled a message node, from the first token of its prompt
on; None where there are none."""


class RoutingError(ValueError):
    """Recorded experts that cannot be those of the tokens that they came with."""


def parse_routing(choice: Mapping[str, Any]) -> np.ndarray | None:
    """Experts of one `choices[]` entry, uint8 or uint16 [positions, layers, k]; None where the server records none.
    Raises RoutingError: they cannot be read, or are of another shape."""
    text = choice.get("routed_experts")
    if text is None:
        return None
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise RoutingError(f"the recorded experts cannot be read: {error}") from error
    if found.ndim != 3 or found.dtype not in (np.uint8, np.uint16):
        raise RoutingError(f"the recorded experts are {found.dtype}{list(found.shape)}, not of tokens, layers and k")
    return found


def branch_routing(nodes: Sequence[Any], routing_of: RoutingOf) -> np.ndarray | None:
    """Lay out the experts of a branch's tokens, [L, layers, k]; the type's largest number where none are known.

    Args:
        nodes: of the branch, from its root on.

    Returns:
        None where no reply of it has any.

    Raises:
        RoutingError: rows of another number than the tokens that the call saw, or of another shape than others.
    """
    found: list[tuple[int, np.ndarray]] = []
    offset = 0
    for node in nodes:
        rows = routing_of(node) if node.sampled and any(node.mask) else None
        if rows is not None:
            last = offset + int(np.flatnonzero(np.asarray(node.mask, dtype=bool))[-1])
            if len(rows) != last:
                raise RoutingError(
                    f"experts of {len(rows)} tokens are recorded for a reply that ends with token {last}"
                )
            found.append((last, rows))
        offset += len(node.token_ids)
    if not found:
        return None
    shape, kind = found[0][1].shape[1:], found[0][1].dtype
    routed = np.full((offset, *shape), np.iinfo(kind).max, kind)
    filled = 0
    for last, rows in found:
        if rows.shape[1:] != shape or rows.dtype != kind:
            raise RoutingError(f"experts are recorded as {rows.dtype}{rows.shape[1:]} beside {kind}{shape}")
        routed[filled:last] = rows[filled:]
        filled = last
    return routed
