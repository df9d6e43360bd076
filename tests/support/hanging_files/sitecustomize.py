"""On PYTHONPATH, files below $HANGING_ROOT do not answer while the file $HANGING_NOW exists: calls stand still.

A stand-in for a shared file system that hangs, for processes of this interpreter, where no FUSE can be had: whoever
opens, lists, renames, removes or makes something there waits, in whichever thread.
"""

import os
import sys
import time
from pathlib import Path

_ROOT, _NOW = os.environ.get("HANGING_ROOT", ""), Path(os.environ.get("HANGING_NOW", ""))
_EVENTS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink"}


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _EVENTS:
        return
    path = arguments[0]
    if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(_ROOT):
        while _NOW.exists():
            time.sleep(0.05)


if _ROOT:
    sys.addaudithook(_hook)
