"""`worker_start.py SOCKET [-u] -c CODE` or `-m MODULE ...`: a process of Python, as a fork of the `worker_server` that
listens on the socket or will soon; where there is none any more, an interpreter of its own.

Stands in for the interpreter in pytest-xdist's command line. Ends as the fork does; the fork ends with it.
"""

import array
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

WAIT_S = 240.0


def main() -> None:
    """Send the command, wait for its end."""
    path, *command = sys.argv[1:]
    command = [word for word in command if word != "-u"]
    deadline = time.monotonic() + WAIT_S
    server = socket.socket(socket.AF_UNIX)
    while True:
        try:
            server.connect(path)
            break
        except OSError:
            if time.monotonic() > deadline or not Path(path).parent.is_dir():
                os.execv(sys.executable, [sys.executable, "-u", *command])
            time.sleep(0.05)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the fork as well, which decides
    request = {"command": command, "env": dict(os.environ), "cwd": str(Path.cwd())}
    data = json.dumps(request).encode() + b"\n"
    sent = server.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.sendall(data[sent:])
    for fd in (0, 1):  # the pipes are the fork's alone
        os.close(fd)
    answer = server.recv(64)
    code = int(answer) if answer.strip() else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
