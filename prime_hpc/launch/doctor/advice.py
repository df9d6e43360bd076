"""Advice drawn from the figures of `doctor --path`: lines with what to set, or whether to avoid the directory.

Pure: figures of `filesystem.measure` in, findings out.
"""

from collections.abc import Iterator

from prime_hpc.launch.doctor.filesystem import GIB, Measured, Visibility
from prime_hpc.launch.doctor.finding import Finding

LOCAL_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", "squashfs"}
MEMORY_TYPES = {"tmpfs", "ramfs"}
NETWORK_NOTES = {
    "nfs": "misses and attributes are cached for up to 60 s: prime-hpc lists directories and never asks twice",
    "nfs4": "misses and attributes are cached for up to 60 s: prime-hpc lists directories and never asks twice",
    "lustre": "stripes matter for large files, small ones burden its metadata server",
}
SLOW_RATE = 200e6
SLOW_FSYNC_S = 0.1
SLOW_METADATA = 200.0
FULL_SHARE = 0.8
"""An OST beyond this may refuse a write although the file system has room."""
LOW_GIB = 20.0
LATE_S = 2.0
STRIPES = "lfs setstripe -E 512M -c 1 -E 40G -c 4 -E -1 -c -1"


def advise(found: Measured) -> list[Finding]:
    """One finding a property, in the order of a reader's interest."""
    parts = (_place, _space, _stripes, _speed, _guarantees, _locks)
    findings = [finding for part in parts for finding in part(found)]
    return findings + (list(_visibility(found.visibility)) if found.visibility else [])


def _place(found: Measured) -> Iterator[Finding]:
    text = f"{found.fs_type} ({found.source})" if found.source else found.fs_type
    if found.fs_type in MEMORY_TYPES:
        yield Finding("file system", "warn", f"{text}: memory of this node", "neither shared nor kept: staging only")
    elif found.fs_type in LOCAL_TYPES:
        yield Finding("file system", "ok", f"{text}: local; for runs of one node, unless it is exported to the others")
    else:
        note = NETWORK_NOTES.get(found.fs_type, "")
        yield Finding("file system", "ok", f"{text}{f': {note}' if note else ''}")


def _space(found: Measured) -> Iterator[Finding]:
    free = found.free / GIB
    text = f"{free:,.1f} of {found.total / GIB:,.1f} GiB free"
    remedy = "--ckpt.keep-last 2, or another output_dir; `plan` says what a run keeps"
    yield Finding.of("space", free >= LOW_GIB, text, remedy)
    if found.free_inodes is not None and found.free_inodes < 100_000:
        yield Finding("inodes", "warn", f"{found.free_inodes:,} free", "remove small files; a quota may count them")
    full = {name: share for name, share in found.osts.items() if share > FULL_SHARE}
    if full:
        worst = max(full, key=lambda name: full[name])
        text = (
            f"{len(full)} of {len(found.osts)} OSTs are over {FULL_SHARE:.0%} full (worst {worst}: {full[worst]:.0%})"
        )
        yield Finding("OSTs", "warn", text, f"writes may fail with room left; spread files: {STRIPES} DIR")
    elif found.osts:
        yield Finding("OSTs", "ok", f"{len(found.osts)}, at most {max(found.osts.values()):.0%} full")


def _stripes(found: Measured) -> Iterator[Finding]:
    if found.fs_type != "lustre":
        return
    if found.stripe is None:
        yield Finding("stripes", "warn", "no `lfs` command here to ask with", "load the Lustre client tools")
    elif "lcm_" in found.stripe or "component" in found.stripe:
        yield Finding("stripes", "ok", "progressive layout is set")
    else:
        words = " ".join(found.stripe.split())[:120]
        yield Finding("stripes", "warn", words, f"large files fill one OST: {STRIPES} {found.path}")


def _speed(found: Measured) -> Iterator[Finding]:
    text = f"write {found.write_rate / 1e6:,.0f} MB/s, read {found.read_rate / 1e6:,.0f} MB/s"
    text += f" ({found.written / 2**20:,.0f} MiB, one writer)"
    remedy = "--ckpt.save-async, with --ckpt.staging-dir on node-local disk for large models"
    yield Finding.of("throughput", found.write_rate >= SLOW_RATE, text, remedy)
    text = f"median {found.fsync_s * 1e3:.1f} ms, worst {found.fsync_worst_s * 1e3:.0f} ms"
    remedy = "each batch and each weight version pays it several times: prefer a scratch file system"
    yield Finding.of("fsync", found.fsync_s <= SLOW_FSYNC_S, text, remedy)
    text = f"{found.metadata_rate:,.0f} create + rename + unlink a second"
    remedy = "keep software off it; compilers' caches are node-local anyway (/tmp, or the site's node_local)"
    yield Finding.of("metadata", found.metadata_rate >= SLOW_METADATA, text, remedy)


def _guarantees(found: Measured) -> Iterator[Finding]:
    text = f"{found.renames:,} replacements under a reader: {found.rename_torn} torn, {found.rename_missing} missing"
    if found.rename_torn:
        yield Finding("rename", "fail", text, "avoid: a reader may see half a file")
    elif found.rename_missing:
        yield Finding("rename", "warn", text, "readers of the store try again; other tools may not")
    else:
        yield Finding("rename", "ok", text)
    if found.exclusive:
        yield Finding("exclusive create", "ok", "one winner among processes")
    else:
        yield Finding(
            "exclusive create", "fail", "several winners", "avoid: two attempts of a job cannot be told apart"
        )
    if found.mmap:
        yield Finding("mmap", "ok", "works")
    else:
        yield Finding("mmap", "fail", "does not work", "avoid: batches and weights are memory-mapped")


def _locks(found: Measured) -> Iterator[Finding]:
    bad = [kind for kind, works in found.locks.items() if not works]
    if not bad:
        local = "localflock" in found.options
        text = "flock and fcntl work between processes here" + (" (localflock: not between nodes)" if local else "")
        yield Finding("locks", "ok", text)
        return
    remedy = "prime-hpc needs none, caches of Hugging Face and Triton do: put those elsewhere"
    if found.fs_type == "lustre":
        remedy += ", or have it mounted with -o flock"
    yield Finding("locks", "warn", f"{' and '.join(bad)} do not work", remedy)


def _visibility(seen: Visibility) -> Iterator[Finding]:
    name = f"seen from {seen.other}"
    if seen.problem:
        yield Finding(name, "fail", seen.problem, "choose a directory that all nodes share")
        return
    for key, text, remedy in (
        ("new_name_s", "a new file", "slow, but safe: who announces a file does so over a socket"),
        ("missed_name_s", "a name that was asked for too early", "your own scripts: list the directory, do not ask"),
        ("grown_s", "a file that grew", "never read a growing file from another node; prime-hpc does not"),
        ("replaced_s", "a file that was replaced", "readers may get old content for so long"),
    ):
        delay = getattr(seen, key)
        told = f"not within {seen.limit_s:g} s" if delay is None else f"after {delay:.2f} s"
        yield Finding.of(name, delay is not None and delay <= LATE_S, f"{text}: {told}", remedy)
    if seen.exclusive:
        yield Finding(name, "ok", "exclusive create holds across")
    else:
        remedy = "avoid: two attempts of a job cannot be told apart"
        yield Finding(name, "fail", "exclusive create does not hold across", remedy)
    without = [kind for kind, works in seen.locks.items() if not works]
    if without:
        text = f"{' and '.join(without)} do not hold across"
        yield Finding(name, "warn", text, "prime-hpc needs no locks; tools that do must not share caches here")
    else:
        yield Finding(name, "ok", "flock and fcntl hold across")
