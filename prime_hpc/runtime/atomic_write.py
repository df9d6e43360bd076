"""Small files replaced in one rename: whoever reads sees the old content or the new, never a part.

For everything outside the run's artifacts. Those have `store.io.files`, which also counts sums and is where faults are
injected; this module imports nothing, so that every room may use it.
"""

import contextlib
import errno
import os
import uuid
from pathlib import Path


def write_atomic(
    path: Path, data: str | bytes, *, sync: bool = True, sync_name: bool = False, mode: int = 0o666
) -> None:
    """Replace a small file.

    Args:
        path: the file; its directory exists.
        data: its new content; text becomes UTF-8.
        sync: False where losing the change on a power cut costs nothing.
        sync_name: the new name, too, is on the disk when this returns.
        mode: who may read it, as far as the umask lets them.

    Raises:
        OSError: the disk is full, or the directory is not writable; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # never hides the reason
            temporary.unlink()
        raise
    if sync_name:
        sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """Have the names in a directory on the disk, where its file system can say when they are (SMB's cannot)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
