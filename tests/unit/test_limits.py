"""The limits that roles inherit: a login node's, which Slurm hands on, are not theirs."""

import resource
import subprocess
import sys

import pytest

from prime_hpc.runtime import limits


def test_the_descriptor_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, limits.MAX_DESCRIPTORS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert limits.raise_descriptor_limit() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        assert limits.raise_descriptor_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_limits_of_the_shell_that_sent_the_job_are_lifted() -> None:
    """Slurm hands on the soft ones, of all kinds; a stack without a limit gives a thread less than the usual one."""
    code = """
import resource, threading
from prime_hpc.runtime.limits import STACK, lift_limits
for name, soft in (("CPU", 3600), ("AS", 4 << 30), ("FSIZE", 1 << 30), ("MEMLOCK", 1 << 16), ("CORE", 0)):
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
stack = resource.getrlimit(resource.RLIMIT_STACK)
if stack[1] == resource.RLIM_INFINITY:
    resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)
lift_limits()
for name in ("CPU", "AS", "DATA", "FSIZE", "MEMLOCK", "NPROC"):
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    assert soft == hard, name
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0, "the user wants no core dumps"
assert resource.getrlimit(resource.RLIMIT_STACK)[0] == (STACK if stack[1] == resource.RLIM_INFINITY else stack[0])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_hard_limits_that_roles_would_die_of_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    free = resource.RLIM_INFINITY
    hard = {resource.RLIMIT_CPU: 3600, resource.RLIMIT_AS: 64 << 30, resource.RLIMIT_MEMLOCK: 1 << 16}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (free, hard.get(kind, free)))
    found = limits.narrow_limits(on_gpus=True, has_infiniband=True)
    assert [line.partition("(ulimit ")[2][:3] for line in found] == ["-Ht", "-Hv", "-Hl"]
    assert (
        "3600 s of CPU time" in found[0]
        and "67,108,864 KiB of address space" in found[1]
        and "64 KiB of locked" in found[2]
    )
    assert len(limits.narrow_limits(on_gpus=False, has_infiniband=False)) == 1
    hard.clear()
    assert limits.narrow_limits(on_gpus=True, has_infiniband=True) == []
