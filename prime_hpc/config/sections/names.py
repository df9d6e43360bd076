"""Names in the tree that are either known ones or a user's own code.

Used by the sections whose `type` may be `module:function`.
"""

import re
from collections.abc import Sequence

from prime_hpc.config.errors import nearest_path

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Whether a name is written as `module:attribute`."""
    return _IMPORT_PATH.fullmatch(name) is not None


def known_or_import(name: str, known: Sequence[str], what: str, form: str = "module:function") -> str:
    """`name` itself, where it is one of `known` or an import path.

    Raises:
        ValueError: it is neither; names the nearest and all known ones.
    """
    if name in known or is_import_path(name):
        return name
    near = nearest_path(name, known)
    hint = f"did you mean {near}? " if near else ""
    raise ValueError(f"{name!r} is not {what}: {hint}known are {', '.join(known)}; your own is `{form}`")
