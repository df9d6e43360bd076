"""Slurm's ways of writing points in time and lengths of time."""

import re
import time


def parse_time(text: str) -> float | None:
    """Epoch seconds of Slurm's local `2026-01-31T23:59:59`; None for `N/A`, `Unknown`, `None`."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Seconds of Slurm's `[D-]HH:MM:SS`, `MM:SS` or `D-HH[:MM]`; None for UNLIMITED, NOT_SET, INVALID."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[2].split(":")]
    if match[1] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return float(((int(match[1]) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if len(numbers) == 1:
        return numbers[0] * 60.0  # a bare number is minutes, as in `--time`
    hours, minutes, seconds = [0, *numbers][-3:]
    return float((hours * 60 + minutes) * 60 + seconds)
