"""A directory as one client of its file system sees it: here, or on another node through a served process.

`filesystem` makes changes through one view and asks the other what it sees of them. The other view is the same
directory mounted a second time, or a process that `srun` started on another node:

    python -m prime_hpc.launch.doctor.fs_view --serve DIR  # one JSON question a line on stdin, one answer on stdout
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 20.0
MARK = "VIEW "


class ViewLost(RuntimeError):
    """The other node's process gave no answer."""


class FolderView:
    """A directory through one mount. Names are plain file names in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: dict[str, int] = {}

    def ask(self, operation: str, name: str = "", text: str = "") -> Any:
        """One of the operations below, by name; an OSError becomes `{"error": errno}`."""
        try:
            return getattr(self, f"do_{operation}")(name, text)
        except OSError as error:
            return {"error": error.errno}

    def do_hello(self, name: str, text: str) -> str:
        """Return the name of this host."""
        return os.uname().nodename

    def do_listed(self, name: str, text: str) -> bool:
        """Return whether a listing of the directory shows the name."""
        return name in {entry.name for entry in self.folder.iterdir()}

    def do_size(self, name: str, text: str) -> int:
        """Size by stat, -1 where the name is not there."""
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return -1

    def do_read(self, name: str, text: str) -> str:
        """Return the file's content, opened anew."""
        return (self.folder / name).read_text()

    def do_create(self, name: str, text: str) -> bool:
        """Create exclusively; False where the name is taken."""
        try:
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        return True

    def do_lock(self, name: str, text: str) -> bool:
        """Take a lock of the kind `text` (flock or fcntl) without waiting, and keep it; False where it is held."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        take = fcntl.flock if text == "flock" else fcntl.lockf
        try:
            take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        self._locks[f"{name}/{text}"] = fd
        return True

    def close(self) -> None:
        """Give up all locks."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


class RemoteView(FolderView):
    """The same on another node: the questions go to a process there."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        """Start `command` (a launcher with everything up to `--serve`), which is to serve `folder`."""
        super().__init__(folder)
        self._process = subprocess.Popen(
            [*command, "--serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def ask(self, operation: str, name: str = "", text: str = "") -> Any:
        """Send the question and wait for the answer. Raises ViewLost where none comes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps([operation, name, text]).encode() + b"\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                _, mark, answer = line.decode(errors="replace").partition(MARK)
                if mark:
                    return json.loads(answer)
        except (BrokenPipeError, ValueError):
            pass  # it is gone, or answered nonsense: both are told below
        finally:
            watchdog.cancel()
        raise ViewLost(f"the process on the other node gave no answer: {self._stderr()}")

    def _stderr(self) -> str:
        self._process.kill()
        _, errors = self._process.communicate()
        return " ".join(errors.decode(errors="replace").split())[:300] or "it said nothing"

    def close(self) -> None:
        """End the process; it holds the locks."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def serve(folder: Path) -> None:
    """Answer questions about a directory until standard input ends."""
    view = FolderView(folder)
    for line in sys.stdin:
        operation, name, text = json.loads(line)
        sys.stdout.write(MARK + json.dumps(view.ask(operation, name, text)) + "\n")
        sys.stdout.flush()
    view.close()


if __name__ == "__main__":
    serve(Path(sys.argv[sys.argv.index("--serve") + 1]))
