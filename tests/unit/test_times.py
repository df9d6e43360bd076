"""Slurm's ways of writing points in time and lengths of time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.config import ConfigError
from prime_hpc.slurm.times import format_time, parse_time, parse_time_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:00:00", 3600),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("0", 0),
    ],
)
def test_times_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "1-", "-5", "12.5"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        parse_time_s(text)


@given(st.integers(0, 10**7))
def test_times_go_round(seconds: int) -> None:
    assert parse_time_s(format_time(seconds)) == seconds


def test_points_in_time() -> None:
    assert parse_time("1795811556") == 1795811556
    assert parse_time("2026-01-31T23:59:59") is not None
    assert [parse_time(word) for word in ("N/A", "NONE", "None", "Unknown", "")] == [None] * 5
