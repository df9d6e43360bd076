"""`prime-hpc env pack`: a virtual environment of tens of thousands of files as one, for nodes far from its storage."""

import contextlib
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.slurm.packed_env.facts import PackFacts, environment_hash
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.disk import free_bytes
from prime_hpc.store.io.file_age import file_age_s
from prime_hpc.store.io.new_file import new_file

SUFFIXES = {"squashfs": ".sqsh", "tar.zst": ".tar.zst", "tar.gz": ".tar.gz"}
PROGRAMS = {"squashfs": "mksquashfs", "tar.zst": "zstd", "tar.gz": "gzip"}
LEFT_AFTER_S = 3600
"""A pack in the making grows all the time: one that has not for so long is of a process that was killed."""
_LEFT_OUT = "*.pyc.*"  # bytecode that is being written


def best_kind() -> str:
    """Return what this machine can make that is unpacked or mounted quickest."""
    return next(kind for kind, program in PROGRAMS.items() if shutil.which(program) or kind == "tar.gz")


def pack_environment(
    venv: Path, output: Path | None, kind: str, say: Callable[[str], None], *, start: str = "unpack"
) -> tuple[Path, PackFacts]:
    """Pack an environment; the file and its facts appear by a rename each.

    Args:
        output: of the pack; None: beside the environment.
        kind: one of `SUFFIXES`.
        start: how nodes start from it: `unpack`, or `mount`.

    Returns:
        the pack and its facts; those that are there already where the environment has not changed.

    Raises:
        ConfigError: it is no virtual environment, or the program that packs is not installed.
        StoreError: the disk is full, or packing failed.
    """
    if not (venv / "pyvenv.cfg").is_file() or not (venv / "bin" / "python").exists():
        raise ConfigError(f"{venv}: is no virtual environment (it holds no pyvenv.cfg and bin/python)")
    if venv.resolve() != Path(sys.prefix).resolve():
        raise ConfigError(f"{venv}: is not the environment of this prime-hpc ({sys.prefix}): pack with that one's own")
    if shutil.which(PROGRAMS[kind]) is None:
        raise ConfigError(f"--format {kind} needs {PROGRAMS[kind]}, which is not on PATH; there is {best_kind()}")
    if start == "mount" and kind != "squashfs":
        raise ConfigError(f"--mount: a {kind} cannot be mounted: --format squashfs")
    pack = (output or venv.with_name(f"{venv.name.lstrip('.')}{SUFFIXES[kind]}")).absolute()
    if pack.is_relative_to(venv.resolve()):
        raise ConfigError(f"{pack}: lies in the environment itself")
    known = environment_hash(venv)
    try:
        facts = PackFacts.read(pack)
        if (facts.hash, facts.kind, facts.size) == (known, kind, str(pack.stat().st_size)):
            say(f"{pack} is of this environment as it is")
            if facts.start != start:
                facts = replace(facts, start=start)
                facts.write(pack)
            return pack, facts
    except (ConfigError, OSError):
        pass  # there is none, or it is of another version
    count = sum(len(names) for _, _, names in os.walk(venv.resolve()))
    _remove_left(pack, say)
    say(f"packing {count} files of {venv} into {pack}")
    with new_file(pack, durable=False) as part:
        _run(kind, venv.resolve(), part)
        facts = PackFacts(
            kind=kind,
            machine=platform.machine(),
            python=platform.python_version(),
            hash=known,
            size=str(part.stat().st_size),
            blake2b=_blake2b(part),
            venv=str(venv.absolute()),
            files=str(count),
            start=start,
        )
        if environment_hash(venv) != known:
            raise StoreError(f"{venv}: changed while it was packed; nothing was made, pack again")
    facts.write(pack)
    return pack, facts


def _remove_left(pack: Path, say: Callable[[str], None]) -> None:
    """Remove what killed processes left of this pack: gigabytes, under names that nobody sees."""
    for left in pack.parent.glob(f".tmp-*-{glob.escape(pack.name)}*"):
        with contextlib.suppress(OSError):  # another removes it, too, or it is somebody else's
            if file_age_s(left) > LEFT_AFTER_S:
                left.unlink()
                say(f"removed {left}, which a pack that was killed left")


def _run(kind: str, venv: Path, part: Path) -> None:
    """Make the file. Raises a StoreError with the program's own words where it fails."""
    tar = ["tar", "-cf", "-", "--owner=0", "--group=0", f"--exclude={_LEFT_OUT}", "-C", str(venv), "."]
    if kind == "squashfs":
        squash = ["mksquashfs", str(venv), str(part), "-noappend", "-all-root", "-no-progress", "-quiet"]
        squash += ["-comp", "zstd", "-Xcompression-level", "3", "-wildcards", "-e", f"... {_LEFT_OUT}"]
        commands = [squash]
    else:
        commands = [tar, ["zstd", "-q", "-3", "-T0", "-c"] if kind == "tar.zst" else ["gzip", "-1", "-c"]]
    with part.with_name(f"{part.name}.log").open("w+b") as log:
        if len(commands) == 1:
            codes = [subprocess.run(commands[0], stdout=log, stderr=log, check=False).returncode]
        else:
            with part.open("wb") as out:
                first = subprocess.Popen(commands[0], stdout=subprocess.PIPE, stderr=log)
                second = subprocess.run(commands[1], stdin=first.stdout, stdout=out, stderr=log, check=False)
                if first.stdout is not None:
                    first.stdout.close()
                codes = [first.wait(), second.returncode]
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    Path(log.name).unlink(missing_ok=True)
    if any(codes):
        free = free_bytes(part.parent) / 2**20
        raise StoreError(f"{part}: could not be made ({free:,.0f} MiB are free): {said or codes}")


def _blake2b(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
