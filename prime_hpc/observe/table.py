"""Tables for people on a terminal: columns as wide as their longest cell."""

from collections.abc import Sequence
from unicodedata import combining, east_asian_width


def pad(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[list[str]]:
    """Return the rows, all of one length, with every cell but a last left-aligned one as wide as its column.

    Args:
        rows: the first may be a header.
        right: align all columns but the first to the right.
    """
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    blanks = [[" " * (most - width(cell)) for cell, most in zip(row, widths, strict=True)] for row in rows]
    if right:
        return [
            [row[0] + blank[0], *map(str.__add__, blank[1:], row[1:])] for row, blank in zip(rows, blanks, strict=True)
        ]
    return [[*map(str.__add__, row[:-1], blank), row[-1]] for row, blank in zip(rows, blanks, strict=True)]


def width(text: str) -> int:
    """Return how many cells of a terminal a text takes: two for each wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def narrowed(rows: Sequence[Sequence[str]], room: int, spared: Sequence[str]) -> list[list[str]]:
    """Return the padded rows without as many columns as it takes for all but the last one to have room.

    Args:
        rows: the first is the header.
        room: characters of a line.
        spared: headers of columns that may go, the first one first.
    """
    for header in (*spared, None):
        padded = pad(rows)
        if header is None or sum(width(cell) + 2 for cell in padded[0][:-1]) <= room:
            break
        place = list(rows[0]).index(header)
        rows = [[*row[:place], *row[place + 1 :]] for row in rows]
    return padded


def align(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line a row; see `pad`."""
    return ["  ".join(row).rstrip() for row in pad(rows, right=right)]
