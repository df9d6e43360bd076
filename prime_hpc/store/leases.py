"""Leases: each reader of weights says which versions it still needs; retention asks before it deletes.

The orchestrator sets its floor after every served version, or of an SFT run before it evaluates one. One small JSON
file per reader, replaced in one rename. `prime-hpc eval` of a run that still trains sets none: a floor keeps all that
is made above it, for hours, and for good where the evaluation is killed. What stays for it are the versions of
checkpoints.

The other way round the trainer says here which version is its last, where its data decide that (`sft.data.num_epochs`).
"""

import json
import re
from pathlib import Path

from loguru import logger

from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths

_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READ_DEADLINE_S = 2.0
_LAST = "last_version"


def set_floor(paths: RunPaths, reader: str, floor: int) -> None:
    """Declare that `reader` still needs every version >= `floor`.

    Args:
        reader: name of the reader, e.g. `orchestrator`.
        floor: the lowest version that it may still open.

    Raises:
        ValueError: a reader name that is no file name.
        StoreError: disk full, not writable.
    """
    if not _READER.fullmatch(reader):
        raise ValueError(f"lease reader {reader!r}: use letters, digits, dot, dash and underscore")
    files.make_dir(paths.leases)
    files.write_atomic(_path(paths, reader), json.dumps({"reader": reader, "floor": int(floor)}).encode())


def drop_lease(paths: RunPaths, reader: str) -> None:
    """Drop the lease of a reader that needs nothing any more. One that is not there is fine."""
    files.remove_file(_path(paths, reader))


def clear_leases(paths: RunPaths) -> None:
    """Forget all readers. The supervisor calls it before it starts the roles of an attempt: the old ones are dead."""
    for name in files.list_dir(paths.leases):
        if name.endswith(".json") or name == _LAST:
            files.remove_file(paths.leases / name)


def min_floor(paths: RunPaths) -> int | None:
    """Lowest version that any reader still needs; None where no reader is registered."""
    floors = [_read_floor(paths.leases / name) for name in files.list_dir(paths.leases) if name.endswith(".json")]
    return min((floor for floor in floors if floor is not None), default=None)


def set_last_version(paths: RunPaths, version: int) -> None:
    """Tell readers of this attempt the version that the run ends with. Raises StoreError as `set_floor`."""
    files.make_dir(paths.leases)
    files.write_atomic(paths.leases / _LAST, str(version).encode())


def last_version(paths: RunPaths) -> int | None:
    """Return what `set_last_version` said in this attempt; None before."""
    if _LAST not in files.list_dir(paths.leases):  # listed: an NFS client would remember for a minute that it is not
        return None
    return files.retry_read(lambda: int((paths.leases / _LAST).read_bytes()), deadline_s=_READ_DEADLINE_S)


def _path(paths: RunPaths, reader: str) -> Path:
    return paths.leases / f"{reader}.json"


def _read_floor(path: Path) -> int | None:
    """Return the floor in one lease; None where it was dropped meanwhile; 0 (keep all) where it cannot be read."""
    try:
        return int(files.retry_read(lambda: json.loads(path.read_bytes())["floor"], deadline_s=_READ_DEADLINE_S))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(f"{path}: unreadable lease ({error}); every version is kept until it is replaced or removed")
        return 0
