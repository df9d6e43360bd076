"""Digests of code on the disk: two processes of one run that may find other files must agree on them."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from prime_hpc.store.io.tree import list_tree


@cache
def package_digest(*rooms: str) -> str:
    """Digest of prime-hpc's files, or of some of its rooms', as they lie on the disk now.
    Raises OSError: a folder of them cannot be listed."""
    package = Path(__file__).resolve().parents[1]
    folders = [package / room for room in rooms] or [package]
    files = (path for folder in folders for path in list_tree(folder))  # raises: a digest of fewer is another one
    return digest_of(sorted(path for path in files if path.suffix == ".py"))


def digest_of(files: Iterable[Path]) -> str:
    """Digest of files' names and contents; one that is not there counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.exists() else b""
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
