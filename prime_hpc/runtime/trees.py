"""Trees of mappings and lists, as JSON and config files hold them."""

from collections.abc import Callable, Mapping
from typing import Any


def with_leaves(tree: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return a copy of a tree in which each leaf is what `change(leaf, key)` makes of it.
    `key`: of the innermost mapping above the leaf; the tree's own where there is none."""
    if isinstance(tree, Mapping):
        return {name: with_leaves(inner, change, str(name)) for name, inner in tree.items()}
    if isinstance(tree, list | tuple):
        inner = [with_leaves(one, change, key) for one in tree]
        return tuple(inner) if isinstance(tree, tuple) else inner
    return change(tree, key)
