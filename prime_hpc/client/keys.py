"""The keys of inference servers: where a server finds its own, and where its clients find it.

A key that the config states wins. The servers of a run get one from their supervisor, in the environment, a new one for
each attempt. A server that is started by hand takes the one in `client.api_key_var`'s variable, else one of its own
making, which it leaves in a file that only its user can read (`key_file`): a client of the same user on the same
machine finds it there. Servers of one user on one machine share it; the first that starts when none lives makes a new
one.
"""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from loguru import logger

from prime_hpc.store.io.private import make_private_dir, open_private, user_cache
from prime_hpc.store.messaging.auth import new_secret

KEY_VARIABLES = {role: f"PRIMEHPC_{role.upper()}_API_KEY" for role in ("inference", "teacher", "judge")}
"""Group of engines -> the environment variable with which the supervisor tells its servers their key. verifiers hands
no variable on to programs of episodes that has `API_KEY` in its name."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
_MAX_KEY = 4096
_LISTENING = "0A"


def key_file() -> Path:
    """Return the file in which servers that this user starts by hand on this machine leave their key."""
    return user_cache() / "keys" / f"{socket.gethostname()}.key"


def server_key(stated: str | None, role: str, api_key_var: str) -> str:
    """Return the key of a server: the supervisor's for this attempt, else the config's; by hand the environment's, else
    one that the user's own clients on this machine find by themselves.
    `role`: `inference`, `teacher` or `judge`.
    Raises ValueError: no key can be kept safely."""
    given = os.environ.get(KEY_VARIABLES[role]) or stated or os.environ.get(api_key_var)
    if given:
        return given
    path = key_file()
    try:
        return take_key(path)
    except OSError as error:
        raise ValueError(
            f"no key of its own can be kept in {path} ({error}): set inference.api_key or ${api_key_var}"
        ) from error


def take_key(path: Path) -> str:
    """Return the key of the user's servers on this machine, for a server: a new one where none of them lives.

    The file is locked for as long as this process and those forked from it live.
    Raises OSError: the file cannot be made, or is not the user's alone.
    """
    make_private_dir(path.parent)
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)  # never closed: the lock must live as long as the server
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another server; or a file system without locks: the old one serves on
        pass
    else:
        _write(descriptor, new_secret())
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    key = _read(descriptor)
    if not key:
        key = new_secret()
        _write(descriptor, key)
    return key


def find_key(url: str) -> str | None:
    """For a client: the key of a server of this user on this machine; None for others'.

    The key is not given away: a port that another user listens on gets none.
    """
    parts = urlsplit(url)
    path = _kept_key_file() if parts.hostname in (*LOOPBACK, socket.gethostname()) else None
    if path is None:
        return None
    if not is_user_listener(parts.port or 80):
        logger.warning(f"{url}: another user listens there; the key in {path} is not sent")
        return None
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except OSError as error:
        logger.warning(f"the key in {path} is not used: {error}")
        return None
    try:
        return _read(descriptor) or None
    finally:
        os.close(descriptor)


def _kept_key_file() -> Path | None:
    """Return the key's file where it is there; None too for a user without a home, or one that may not be searched."""
    try:
        path = key_file()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def is_user_listener(port: int) -> bool:
    """Return whether all who listen on a port of this machine are this user's; True where the kernel does not say."""
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        fields = [row.split() for row in rows]
        owners |= {int(f[7]) for f in fields if f[3] == _LISTENING and int(f[1].rpartition(":")[2], 16) == port}
    return owners <= {os.geteuid()}


def _write(descriptor: int, key: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, key.encode(), 0)


def _read(descriptor: int) -> str:
    return os.pread(descriptor, _MAX_KEY, 0).decode().strip()
