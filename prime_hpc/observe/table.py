"""Tables for people on a terminal: columns as wide as their longest cell."""

from collections.abc import Sequence


def pad(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[list[str]]:
    """Return the rows, all of one length, with every cell but a last left-aligned one as wide as its column.

    Args:
        rows: the first may be a header.
        right: align all columns but the first to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if right:
        return [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return [[*map(str.ljust, row[:-1], widths), row[-1]] for row in rows]


def align(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line a row; see `pad`."""
    return ["  ".join(row).rstrip() for row in pad(rows, right=right)]
