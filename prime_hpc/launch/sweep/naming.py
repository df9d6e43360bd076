"""Names of points, from a pattern or from the keys that vary. They become run names and directories."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.schema import locate

MAX_LENGTH = 120
RESERVED = frozenset({"logs", "secrets"})
"""Names of the sweep directory's own folders (others are hidden, which no point is)."""
_PLACE = re.compile(r"\{([^{}]*)\}")
_UNSAFE = re.compile(r"[^\w.+=,@-]+")


def check_pattern(pattern: str, keys: Sequence[str]) -> None:
    """Refuse a pattern that names what no axis varies. Raises ConfigError: with the near match."""
    for place in _PLACE.findall(pattern):
        key = _key_of(place)
        if key not in (*keys, "index"):
            near = get_close_matches(key, keys, n=1)
            hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join((*keys, 'index'))}"
            raise ConfigError(f"{{{place}}} is no axis of the sweep; {hint}", "point_name")


def default_pattern(keys: Sequence[str], points: Sequence[dict[str, Any]]) -> str:
    """`lr{trainer.optim.lr}-seed{seed}` from the keys whose values differ between points."""
    varying = [key for key in keys if len({repr(point.get(key)) for point in points}) > 1] or list(keys)
    return "-".join(f"{shortest_end(key, varying)}{{{key}}}" for key in varying)


def shortest_end(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a key's path that no other key has: `lr`, `eval.sampling.temperature`."""
    parts = key.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)


def point_name(pattern: str, values: dict[str, Any], index: int) -> str:
    """Return the name of one point: safe as a file name, at most MAX_LENGTH long, never one of the sweep's own
    files."""

    def put(match: re.Match[str]) -> str:
        key = _key_of(match[1])
        return str(index) if key == "index" and key not in values else value_text(values.get(key, "default"))

    name = _UNSAFE.sub("_", _PLACE.sub(put, pattern)).strip(".-_") or f"point{index}"
    if name in RESERVED or name.endswith((".jsonl", ".json", ".yaml")):
        name = f"point-{name}"
    return name if len(name) <= MAX_LENGTH else f"{name[: MAX_LENGTH - 9].rstrip('.-_')}-{_short_sum(name)}"


def value_text(value: Any) -> str:
    """Return a value as a part of a name: `1e-05`, `true`, `none`, `a,b`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list | tuple):
        return ",".join(value_text(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{key}={value_text(item)}" for key, item in value.items())
    return str(value)


def _key_of(place: str) -> str:
    node = locate(tuple(place.strip().split("."))) if place.strip() else None
    return node.dotted if node is not None else place


def _short_sum(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:8]
