"""Names in the tree that are either known ones or a user's own code."""

import re
from collections.abc import Collection
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from prime_hpc.config.errors import nearest_path
from prime_hpc.config.named_code import ALGORITHMS, BACKENDS, OBJECTIVES, TRANSPORTS

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Return whether a name is written as `module:attribute`."""
    return _IMPORT_PATH.fullmatch(name) is not None


def known_or_import(name: str, known: Collection[str], what: str, form: str = "module:function") -> str:
    """`name` itself, where it is one of `known` or an import path.
    Raises ValueError: it is neither; names the nearest and all known ones."""
    if name in known or is_import_path(name):
        return name
    raise ValueError(f"{_unknown(name, known, what)}; your own is `{form}`")


def known_name(name: str, known: Collection[str], what: str) -> str:
    """`name` itself, where it is one of `known`. Raises ValueError: it is not; names the nearest and all known ones."""
    if name in known:
        return name
    raise ValueError(_unknown(name, known, what))


def _unknown(name: str, known: Collection[str], what: str) -> str:
    near = nearest_path(name, known)
    hint = f"did you mean {near}? " if near else ""
    return f"{name!r} is not {what}: {hint}known are {', '.join(known)}"


ObjectiveName = Annotated[str, AfterValidator(partial(known_or_import, known=OBJECTIVES, what="an objective"))]
AdvantageName = Annotated[str, AfterValidator(partial(known_or_import, known=ALGORITHMS, what="an algorithm"))]
BackendName = Annotated[
    str,
    AfterValidator(partial(known_or_import, known=BACKENDS, what="an inference backend", form="module:ATTRIBUTE")),
]
TransportName = Annotated[str, AfterValidator(partial(known_name, known=TRANSPORTS, what="a weight transport"))]


_MAX_NAME_BYTES = 200


def directory_name(name: str) -> str:
    """Return a name that becomes a directory beside others. Raises a ValueError for one that would be another place."""
    if not name or "/" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise ValueError(f"{name!r} cannot name a directory: no slash, no line break or other control character")
    if name.startswith((".", "-", "~")):
        what = "is the directory itself or the one above" if name in (".", "..") else "begins with . or - or ~"
        raise ValueError(f"{name!r} {what}: choose a name that begins with a letter or a digit")
    if name != name.strip():
        raise ValueError(f"{name!r} begins or ends with a space")
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{name[:40]!r}... is {len(name.encode())} bytes long; at most {_MAX_NAME_BYTES}")
    return name
