"""How Slurm writes durations, times and lists of hosts."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.slurm.hostlist import compress_hosts, expand_hosts
from prime_hpc.slurm.times import parse_duration, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784.0),
        ("02:03:04", 7384.0),
        ("3:04", 184.0),
        ("5", 300.0),
        ("1-2", 93600.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_times() -> None:
    assert parse_time("N/A") is None and parse_time("Unknown") is None
    assert time.localtime(parse_time("2026-01-31T23:59:58"))[:6] == (2026, 1, 31, 23, 59, 58)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,7],m", ["n1", "n2", "n3", "n7", "m"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a-b[1]-ib,c", ["a-b1-ib", "c"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts
    assert sorted(expand_hosts(compress_hosts(hosts))) == sorted(hosts)


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[a-b]", "n[1,,2]"])
def test_host_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a host list"):
        expand_hosts(text)


def test_short_host_lists() -> None:
    assert compress_hosts(f"n{i:04}" for i in range(1000)) == "n[0000-0999]"
    assert compress_hosts(["n3", "n1", "n2", "n9"]) == "n[1-3,9]"
    assert compress_hosts(["r1n1", "r1n2", "r2n1"]) == "r1n[1-2],r2n1"
    assert compress_hosts(["gpu1-a", "gpu2-a", "gpu3-b"]) == "gpu1-a,gpu2-a,gpu3-b", "Slurm takes no bracket inside"


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-[a-z]{1,2})?", fullmatch=True), unique=True, max_size=30))
def test_compress_and_expand_are_inverse(hosts: list[str]) -> None:
    assert sorted(expand_hosts(compress_hosts(hosts))) == sorted(hosts)
