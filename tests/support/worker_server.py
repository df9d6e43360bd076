"""`python -m tests.support.worker_server SOCKET [PATH ...]`: pytest's workers, forks of one process that has collected.

Each of pytest-xdist's workers imports every test file, torch and verifiers with them: half a minute of CPU a worker.
This process does it once, then becomes, for each client (`worker_start`), a fork that runs the client's `-c CODE` or
`-m MODULE ...` with its streams, environment and folder. Ends with its standard input, and takes its children with it.
"""

import contextlib
import gc
import importlib
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
import types
from pathlib import Path

import numpy
import pytest

from prime_hpc.runtime.process_tree import family, send
from tests.faults.fork import PRELOAD, begin_anew, leave, replace_descriptors
from tests.support.fork_server import receive
from tests.support.forked import roles_path

TICK_S = 0.05
IMPORT_VLLM = tuple(
    f"tests/unit/test_{name}.py" for name in ("network_senders", "network_updates", "policy_worker", "reloads")
)
"""Files whose import brings vLLM. Where one is missing here, servers of it are interpreters of their own: slower."""


def _become(request: dict, fds: list[int]) -> None:
    """Run the request in this fork, as a new interpreter would; never return."""
    code = 1
    try:
        os.setsid()  # Linux shares the cores among sessions: all workers in one got as much as one program of a test
        begin_anew()
        replace_descriptors(fds)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        random.seed()  # or all forks would try the same ports
        numpy.random.seed()
        flag, what, *arguments = request["command"]
        sys.argv = [flag, *arguments]
        if flag == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(what, main.__dict__)
        else:
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the fork's outermost frame: what an interpreter does
        traceback.print_exc()
    finally:
        leave(code)


def _fork(client: socket.socket) -> int | None:
    """Start what a client asks for; its pid, None where nobody asked."""
    try:
        request, fds = receive(client)
    except (EOFError, OSError):
        return None
    pid = os.fork()
    if pid == 0:
        _become(request, fds)
    for fd in fds:
        os.close(fd)
    return pid


def _end(pid: int) -> None:
    send(family(pid), signal.SIGKILL)


def serve(path: Path) -> None:
    """Fork for every client until standard input ends. A client that goes away ends its fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(path))
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(TICK_S if forks else None):
                if key.fileobj is sys.stdin:
                    for pid in forks.values():
                        _end(pid)
                    return
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    begun = _fork(client)
                    if begun is None:
                        client.close()
                        continue
                    forks[client] = begun
                    selector.register(client, selectors.EVENT_READ)
                elif key.fileobj in forks:  # gone: clients send nothing more
                    _end(forks[key.fileobj])
                    selector.unregister(key.fileobj)
            for client, pid in list(forks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del forks[client]
                    with contextlib.suppress(KeyError):
                        selector.unregister(client)
                    with contextlib.suppress(OSError), client:
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main() -> None:
    """Collect, which imports all, then serve.

    The servers of the tests' own processes (`fork_server`) are forks too, of a process that has no vLLM yet: a server
    of it imports it by itself, after it has set the environment for it.
    """
    path, *paths = sys.argv[1:]
    last = [name for name in IMPORT_VLLM if any(Path(name).is_relative_to(word.split("::")[0]) for word in paths)]
    _collect(*[f"--ignore={name}" for name in last], *paths)
    for name in PRELOAD:
        importlib.import_module(name)
    _freeze()
    if os.fork() == 0:
        code = 1
        try:
            begin_anew()
            serve(roles_path(Path(path)))
            code = 0
        finally:
            leave(code)
    if last:
        _collect(*last)
        _freeze()
    serve(Path(path))


def _collect(*words: str) -> None:
    pytest.main(["--collect-only", "-qq", "-n0", "-p", "no:cacheprovider", *words])


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # or every collection in every fork would copy the pages of what is shared


if __name__ == "__main__":
    main()
