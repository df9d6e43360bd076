"""Limits of this process that its children inherit: files, memory, CPU time (`ulimit`).

Slurm gives a job the soft limits of the shell that called sbatch. Login nodes are often narrow: an hour of CPU time, a
few GiB of address space, 64 KiB of locked memory. A role would die of them on a node that allows all of it.
"""

import resource

MAX_DESCRIPTORS = 1 << 16
"""More than any run has connections; a limit of millions makes old programs that close all descriptors slow."""
STACK = 8 << 20
"""Bytes: what a shell usually gives."""
_LIFTED = ("CPU", "AS", "DATA", "FSIZE", "RSS", "MEMLOCK", "NPROC")


def lift_limits() -> None:
    """Take for this process and its children what the node allows: each soft limit up to the hard one, open files as
    `raise_descriptor_limit` has it.

    A stack without a limit, as slurmd's service and some shells have it, becomes the usual one: a thread's is as large
    as that, but 2 MiB where there is no limit, too little for NCCL's search through large topologies. Core dumps stay
    as they are: of a process with GPUs they fill quotas, and a user who wants them says so.
    """
    raise_descriptor_limit()
    for name in _LIFTED:
        kind = getattr(resource, f"RLIMIT_{name}")
        soft, hard = resource.getrlimit(kind)
        if soft != hard:
            _set(kind, hard, hard)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY:
        _set(resource.RLIMIT_STACK, STACK, hard)


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many files and connections as the hard limit allows, `MAX_DESCRIPTORS`
    at most. The usual soft limit of 1024 is less than the ranks of a large run. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    return wanted if _set(resource.RLIMIT_NOFILE, wanted, hard) else soft


def narrow_limits(*, on_gpus: bool, has_infiniband: bool) -> list[str]:
    """Describe the hard limits of this process by which roles end or fail; no process can lift them."""
    found = []
    for name, letter, what in (
        ("CPU", "t", "of CPU time each, then they are killed"),
        ("FSIZE", "f", "in one file"),
        *((("AS", "v", "of address space, less than CUDA reserves"),) if on_gpus else ()),
        *((("MEMLOCK", "l", "of locked memory: InfiniBand needs all it can get"),) if has_infiniband else ()),
    ):
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        if hard != resource.RLIM_INFINITY:
            size = f"{hard} s" if name == "CPU" else f"{hard >> 10:,} KiB"
            found.append(f"its processes may have {size} {what} (ulimit -H{letter}): its staff can lift it")
    return found


def _set(kind: int, soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):  # a sandbox that forbids it: what there is must do
        return False
    return True
