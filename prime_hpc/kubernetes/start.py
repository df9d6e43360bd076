"""srun's counterpart among pods: starts a role's agents in several pods, shows what they print, ends them on SIGTERM.

    python -m prime_hpc.kubernetes.start --hosts A,B --tasks N --label LABEL MODULE ARGUMENT ...

The environment, which holds secrets of the attempt, goes through a file in the run directory that its owner alone can
read, and not over the network. Exit code: the first that is not 0; 255 where a pod cannot be reached.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from prime_hpc.config.errors import ConfigError
from prime_hpc.kubernetes.connection import connect, messages, read_key, say
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.role_context import INCARNATION

UNREACHABLE = 255
REACH_S = 120.0
"""A pod that was there a moment ago and is being made again."""
AGAIN_S = 1.0


class Steps:
    """The agents of one role, a connection a pod."""

    def __init__(self, key: str, order: dict[str, object]) -> None:
        self._key, self._order = key, order
        self._connections: list[socket.socket] = []
        self._codes: list[int] = []
        self._ending = threading.Event()
        self._lock = threading.Lock()

    def run(self, hosts: list[str]) -> int:
        """Start them all and wait for their end; returns the exit code."""
        threads = [threading.Thread(target=self._one, args=(host, len(hosts) > 1), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=0.5)  # signals are handled in between
        return next((code for code in self._codes if code), 0)

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """Have the pods end what was started."""
        self._ending.set()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                say(connection, {"what": "end"})

    def _one(self, host: str, labelled: bool) -> None:
        try:
            connection = self._reach(host)
            with self._lock:
                self._connections.append(connection)
            say(connection, self._order)
            if self._ending.is_set():  # told so before this connection was there to be told
                say(connection, {"what": "end"})
            code = UNREACHABLE
            for message in messages(connection):
                if "out" in message:
                    self._show(host if labelled else "", str(message["out"]))
                if "code" in message:
                    code = int(message["code"])
                    break
        except (OSError, ValueError) as error:
            self._show("", f"pod {host}: {error}\n")
            code = UNREACHABLE
        self._codes.append(code if 0 <= code < 256 else 128 - code)

    def _reach(self, host: str) -> socket.socket:
        deadline = time.monotonic() + REACH_S
        while True:
            try:
                return connect(host, self._key)
            except OSError:
                if time.monotonic() > deadline or self._ending.wait(AGAIN_S):
                    raise

    def _show(self, host: str, text: str) -> None:
        if host:
            text = "".join(f"{host}: {line}" for line in text.splitlines(keepends=True))
        with self._lock, contextlib.suppress(OSError):
            sys.stdout.write(text)
            sys.stdout.flush()


def write_environment(run_dir: Path, label: str) -> Path:
    """Write this process's environment for the pods of one step; returns the file. Raises OSError."""
    folder = run_dir / "secrets"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"step-{label.replace('[', '_').rstrip(']')}-{secrets.token_hex(8)}.json"
    write_atomic(path, json.dumps(dict(os.environ)), mode=0o600)
    return path


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.kubernetes.start", allow_abbrev=False)
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    run_dir = Path(given.arguments[1])
    try:
        key = read_key()
        path = write_environment(run_dir, given.label)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)
    order = {
        "what": "start",
        "label": given.label,
        "incarnation": int(os.environ.get(INCARNATION, "0")),
        "tasks": given.tasks,
        "arguments": given.arguments,
        "environment_file": str(path),
    }
    steps = Steps(key, order)
    signal.signal(signal.SIGTERM, steps.end)
    signal.signal(signal.SIGINT, steps.end)
    try:
        code = steps.run(given.hosts.split(","))
    finally:
        path.unlink(missing_ok=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
