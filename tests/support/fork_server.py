"""`python -m tests.support.fork_server SOCKET`: forks of one process that has imported everything a run needs.

A trainer rank spends seven seconds of CPU on imports, and tests start hundreds. A client (`tests.support.forked`) sends
a command of the form `-m MODULE ...` with its environment and streams; it becomes a fork of this process (see
`tests.faults.fork`), as does every Python module that it starts in turn. Ends with its standard input, and takes what
still runs with it.
"""

import array
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

from prime_hpc.runtime.process_tree import family, send
from tests.faults import fork

TICK_S = 0.02
MAX_REQUEST = 1 << 20
MOST_DESCRIPTORS = 3


class Child:
    """A process that a client waits for."""

    def __init__(self, client: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self.client, self.process = client, process

    def told(self) -> bool:
        """Tell the client how it ended, if it has."""
        code = self.process.poll()
        if code is None:
            return False
        with self.client:
            try:
                self.client.sendall(f"{code}\n".encode())
            except OSError:
                pass  # nobody waits any more
        return True


def receive(client: socket.socket) -> tuple[dict, list[int]]:
    """Read a request: one line of JSON; with its first bytes the descriptors of its streams, the last are output and
    errors."""
    fds = array.array("i")
    data, ancillary, _, _ = client.recvmsg(MAX_REQUEST, socket.CMSG_SPACE(MOST_DESCRIPTORS * fds.itemsize))
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    while not data.endswith(b"\n"):
        more = client.recv(MAX_REQUEST) if data else b""
        if not more:
            raise EOFError
        data += more
    return json.loads(data), list(fds)


def serve(path: Path) -> None:
    """Until standard input ends."""
    fork.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: list[Child] = []
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(path))
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(TICK_S if children else None):
                if key.fileobj is sys.stdin:
                    for child in children:
                        send(family(child.process.pid), signal.SIGKILL)
                    return
                client, _ = listener.accept()
                try:
                    request, (*passed, out, err) = receive(client)
                except (EOFError, OSError):
                    client.close()  # who only tried whether anybody listens
                    continue
                named = {f"@{index}": str(fd) for index, fd in enumerate(passed)}
                process = subprocess.Popen(
                    [sys.executable, "-m", *(named.get(word, word) for word in request["command"])],
                    env=request["env"],
                    cwd=request["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=passed,
                    start_new_session=request["new_session"],
                )
                for fd in (*passed, out, err):
                    os.close(fd)
                client.sendall(f"{process.pid}\n".encode())
                children.append(Child(client, process))
            children = [child for child in children if not child.told()]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
