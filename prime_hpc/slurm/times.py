"""Slurm's ways of writing points in time and lengths of time."""

import re
import time

from prime_hpc.config.errors import ConfigError


def parse_time(text: str) -> float | None:
    """Epoch seconds as Slurm prints them, or of its local `2026-01-31T23:59:59`; None for `N/A`, `Unknown`, `None`."""
    if text.isdigit():
        return float(text)
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


def parse_time_s(text: str) -> int | None:
    """Parse sbatch's `--time` to seconds; None: no limit. Raises ConfigError: not a time."""
    if text.strip().lower() in ("unlimited", "infinite", "-1"):
        return None
    seconds = parse_duration(text)
    if seconds is None:
        forms = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        raise ConfigError(f"{text.strip()!r} is no time: {forms}", "slurm.time")
    return int(seconds)


def format_time(seconds: float) -> str:
    """Format seconds as sbatch takes them: HH:MM:SS, or D-HH:MM:SS from a day on."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    clock = f"{h:02d}:{m:02d}:{s:02d}"
    return f"{days}-{clock}" if days else clock
