"""The failure behind an exception, told by its type where it is caught, not by its words where they are read."""

import os

_OF_INPUT = (ValueError, TypeError)
"""Errors of data, code or keys, where nothing else led to them."""
_OF_CODE = (*_OF_INPUT, ArithmeticError, AssertionError, AttributeError, LookupError, NameError, SyntaxError)
"""Errors that may lead to one without the machine, the network or the file system having a part in it."""
_MOST_LINKS = 100


class NodeError(ValueError):
    """It lies with this node, or with what it sees of the file system: elsewhere, or later, it may not come again."""


def is_permanent(error: BaseException) -> bool:
    """Return whether another attempt would fail in the same way: it is an error of data, code or keys, and neither it
    nor what led to it may be a machine's or a network's."""
    if not isinstance(error, _OF_INPUT):
        return False
    link: BaseException | None = error
    for _ in range(_MOST_LINKS):
        if link is None:
            return True
        if isinstance(link, NodeError) or not isinstance(link, _OF_CODE):
            return False
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False  # a circle


def file_error_text(error: BaseException) -> str:
    """Return which file could not be used and why, without the system's number; of another error its words."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror


def missing_home(error: BaseException) -> str:
    """Say what to do about pathlib's error of a home directory that it does not find; empty for any other error."""
    if not isinstance(error, RuntimeError) or str(error) != "Could not determine home directory.":
        return ""
    if os.environ.get("HOME"):
        return "a path begins with ~NAME, and this machine knows no such user: write the path out"
    return (
        f"HOME is not set, and this machine knows no user with the id {os.getuid()}: export HOME=FOLDER "
        "(of a job: slurm.env.HOME)"
    )
