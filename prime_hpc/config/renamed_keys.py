"""Keys of the experiment that had another name: the one table of old names, which go on working for one release.

`schema.locate` finds a key under its old name too, so files, variables, flags and sweeps take it; `sources.tree` says
the new name once for each source. Snapshots (`run.yaml`) of the version before are read silently.
"""

from collections.abc import Mapping
from typing import Any

from prime_hpc.config.errors import Origin, Problem

Path_ = tuple[str, ...]

REMOVED_IN = "0.3"
"""Version that no longer knows the old names."""
RENAMED: dict[str, str] = {
    "slurm.survive": "slurm.restart",
    "slurm.restart.max_lives": "slurm.restart.max_attempts",
    "slurm.restart.ledger_days": "slurm.restart.bad_node_days",
    "slurm.restart.node_silence_s": "slurm.restart.node_timeout_s",
    "supervisor.doubt_s": "supervisor.recheck_s",
}
"""Old dotted path -> new one. Applied from the first to the last: a key below a renamed section is named as it is
called there."""

_RULES = tuple((tuple(old.split(".")), tuple(new.split("."))) for old, new in RENAMED.items())


def renamed(path: Path_) -> Path_:
    """Return a key's path from the root under its present name; the path itself where it is no old name."""
    for old, new in _RULES:
        if tuple(segment.replace("-", "_") for segment in path[: len(old)]) == old:
            path = (*new, *path[len(old) :])
    return path


def old_names(path: Path_) -> list[str]:
    """Return the old names of a key for its documentation; those of a section above it stand with the section."""
    names = []
    for old in [old for old, new in _RULES if new == path]:
        for before, now in reversed(_RULES):
            old = (*before, *old[len(now) :]) if old[: len(now)] == now else old
        names.append(".".join(old))
    return names


def notice(old: str, new: str, origin: Origin) -> str:
    """Return the warning about an old name that was stated."""
    return f"{origin}: {old} is called {new} now; the old name is not understood from {REMOVED_IN} on"


def stated_twice(new: str, old_origin: Origin, new_origin: Origin) -> Problem:
    """Return the problem of a key that is stated under its old and its new name."""
    message = f"is stated under its old name too ({old_origin}): state it once, under this name"
    return Problem(message, new, new_origin)


def renew(values: Mapping[str, Any], origins: dict[str, Origin]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a tree as an older version wrote it with the present names, and what was stated under two.

    Args:
        values: from the root; left as it is.
        origins: dotted path -> where it was stated; moved along.
    """
    tree, problems = dict(values), []
    for old, new in _RULES:
        parent = _copied(tree, old[:-1])
        if parent is None or old[-1] not in parent:
            continue
        value = parent.pop(old[-1])
        home = _copied(tree, new[:-1])
        here, there = (origins.get(".".join(path), Origin("file")) for path in (old, new))
        if home is None or new[-1] in home:
            problems.append(stated_twice(".".join(new), here, there))
            continue
        home[new[-1]] = value
        before, now = ".".join(old), ".".join(new)
        for dotted in [key for key in origins if key == before or key.startswith(f"{before}.")]:
            origins[now + dotted[len(before) :]] = origins.pop(dotted)
    return tree, problems


def _copied(tree: dict[str, Any], path: Path_) -> dict[str, Any] | None:
    """Return the mapping at a path, itself and those above it replaced by copies; None where there is none."""
    for name in path:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            return None
        tree[name] = tree = dict(inner)
    return tree
