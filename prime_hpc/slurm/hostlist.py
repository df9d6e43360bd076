"""Slurm's host lists, `n[1-3,07-08],m2` to names and back, and its ranges of numbers."""

import re
from collections.abc import Iterable


def expand_hosts(text: str) -> list[str]:
    """Host names of a Slurm host list, in its order: `n[1-3,07-08],m2` and `r[1-2]n[0-1]`.
    Raises ValueError: a bracket is not closed, or holds something else than numbers."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, bracket in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            tails = [plain] if plain else [number for part in bracket.split(",") for number in _numbers(part, text)]
            names = [name + tail for name in names for tail in tails]
        hosts += [name for name in names if name]
    if "".join(re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+|,", text)) != text:
        raise ValueError(f"not a host list: {text!r}")
    return hosts


def compress_hosts(hosts: Iterable[str]) -> str:
    """Return the shortest host list of names, sorted by name and number: the inverse of `expand_hosts` up to order.

    Slurm takes a bracket at a name's end alone: names that end otherwise (`gpu1-a`) stay as they are.
    """
    plain: list[str] = []
    groups: dict[tuple[str, int], list[int]] = {}
    for host in dict.fromkeys(hosts):
        match = re.fullmatch(r"(.*?)(\d+)", host)
        if match is None:
            plain.append(host)
            continue
        prefix, digits = match.groups()
        # names with leading zeros, and numbers of their width without them, belong together: n08, n09, n10
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((prefix, width), []).append(int(digits))
    for prefix, width in [key for key in groups if key[1]]:
        loose = groups.get((prefix, 0), [])
        fitting = [n for n in loose if len(str(n)) == width]
        groups[prefix, width] += fitting
        groups[prefix, 0] = [n for n in loose if n not in fitting]
    texts = plain + [_compressed(*key, numbers) for key, numbers in groups.items() if numbers]
    return ",".join(sorted(texts))


def index_ranges(numbers: Iterable[int], width: int = 0) -> str:
    """Write numbers as Slurm does: [0, 1, 2, 5] -> `0-2,5`; `width`: digits of each, filled up with zeros."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in ranges)


def _compressed(prefix: str, width: int, numbers: list[int]) -> str:
    inner = index_ranges(numbers, width)
    return f"{prefix}{inner}" if len(numbers) == 1 else f"{prefix}[{inner}]"


def _numbers(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
    if match is None:
        raise ValueError(f"not a host list: {text!r} ({part!r} is no number and no range)")
    low, high = match[1], match[2] or match[1]
    return [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
