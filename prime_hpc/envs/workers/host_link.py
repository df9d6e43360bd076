"""The orchestrator's side of a host: start it, have it start workers, hear how they ended."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loguru import logger

from prime_hpc.config.sections.orchestrator import EnvServersConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.workers.frames import PURPOSE, FrameError, Unpacker, pack
from prime_hpc.runtime.role_context import BUS, ENV_HOSTS
from prime_hpc.store.messaging.auth import prove
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.messaging.sockets import is_loopback

END_TIMEOUT_S = 8.0
"""How long a host may take to end with its workers before it is killed."""
TOLD_WITHIN_S = 30.0
"""How long after a worker's connection broke its host may take to say why."""
CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""A host that was just started imports for seconds before it answers."""
_HOST = "prime_hpc.envs.workers.host"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "TOKENIZERS_PARALLELISM": "false"
}
"""A host must have no threads, and a worker is there for one core."""


@dataclass(frozen=True)
class Ending:
    """How a worker ended."""

    code: int | None
    """Exit code, negative: by that signal; None: its host is gone and cannot say."""
    episode: int
    """Id of the episode whose code it ran at that moment; 0: none, or nobody knows."""
    why: str = ""
    """The reason for which the host ended it."""

    def __str__(self) -> str:
        if self.why:
            return f"was ended: {self.why}"
        if self.code is None:
            return "was lost with its host"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"


class Connection:
    """To one worker."""

    def __init__(
        self,
        host: "HostLink",
        number: int,
        ended: asyncio.Future[Ending],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Take what leads to the worker; `ended` gets its result from the host."""
        self._host, self._number, self.ended = host, number, ended
        self._reader, self._writer = reader, writer
        self._unpacker = Unpacker()

    def send(self, op: str, **fields: Any) -> None:
        """Send a message; nothing happens where the worker is gone."""
        if not self._writer.is_closing():
            self._writer.write(pack(op, **fields))

    async def receive(self) -> list[dict[str, Any]]:
        """Return the next messages; [] when the worker is gone. Raises FrameError: it does not keep to the protocol."""
        while True:
            try:
                data = await self._reader.read(1 << 18)
            except OSError:
                return []
            if not data:
                return []
            if messages := self._unpacker.feed(data):
                return messages

    def kill(self, why: str) -> None:
        """Have the worker's host end it at once."""
        self._host.kill(self._number, why)

    async def ending(self) -> Ending:
        """Wait for how it ended, and close the connection."""
        self.close()
        await asyncio.wait({self.ended}, timeout=TOLD_WITHIN_S)
        if not self.ended.done():
            self.kill("it closed its connection and did not end")
            await asyncio.wait({self.ended}, timeout=TOLD_WITHIN_S)
        return self.ended.result() if self.ended.done() else Ending(None, 0)

    def close(self) -> None:
        """Close the connection; a worker ends then."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()

    def abort(self) -> None:
        """Close the connection without what is still to be sent, for which `close` waits."""
        self._writer.transport.abort()


class HostLink(ABC):
    """A host as the orchestrator sees it. Subclasses reach it."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._unpacker = Unpacker()
        self._endings: dict[int, asyncio.Future[Ending]] = {}
        """Of the workers that live, as far as is known."""
        self._num_started = 0
        self._reaching = asyncio.Lock()

    @abstractmethod
    async def _reach(self) -> socket.socket:
        """Return a new control connection. Raises OSError."""

    @abstractmethod
    async def _start(self, control: socket.socket, order: dict[str, Any]) -> socket.socket:
        """Have a worker started and return the connection to it. Raises OSError."""

    async def connect(self, label: str, memory_bytes: int, loads: dict[str, Any]) -> Connection:
        """Start a worker and return the connection to it.

        Args:
            memory_bytes: at which the host ends it; 0: no limit.
            loads: its tokenizer and what goes with it, so that the host can import that once for all (`Fleet`).

        Raises:
            OSError: no process or socket can be had, or the host is gone.
        """
        async with self._reaching:
            if self._control is None:
                self._unpacker = Unpacker()
                self._control = await self._reach()
                asyncio.get_running_loop().add_reader(self._control, self._on_readable)
            control = self._control
        self._num_started += 1
        number = self._num_started  # others may be started meanwhile
        ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._endings[number] = ended
        try:  # noted before: the host may say at once that it has ended
            order = {"worker": number, "label": label, "memory": memory_bytes, "loads": loads}
            sock = await self._start(control, order)
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        except BaseException:
            self._endings.pop(number, None)
            raise
        return Connection(self, number, ended, reader, writer)

    def kill(self, number: int, why: str) -> None:
        """End a worker at once."""
        if self._control is not None and number in self._endings:
            with contextlib.suppress(OSError):
                self._control.sendall(pack("kill", worker=number, why=why))

    async def close(self) -> None:
        """End all workers."""
        self._leave()

    def _on_readable(self) -> None:
        """Read how workers ended, or that the host is gone itself."""
        assert self._control is not None
        try:
            data = self._control.recv(1 << 16)
            messages = self._unpacker.feed(data)
        except (OSError, FrameError):
            data, messages = b"", []
        for message in messages:
            if message["op"] == "gone":
                ended = self._endings.pop(message["worker"], None)
                if ended is not None and not ended.done():
                    ended.set_result(Ending(int(message["code"]), int(message["episode"]), str(message["why"])))
        if not data:
            logger.warning("{} is gone, and its workers with it", self)
            self._leave()

    def _leave(self) -> None:
        """Close the control connection: the host ends the workers, if it lives."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        for ended in self._endings.values():
            if not ended.done():
                ended.set_result(Ending(None, 0))
        self._endings.clear()


class LocalHost(HostLink):
    """A host process on this machine, started when the first worker is, and again when it is gone."""

    def __init__(self, log_dir: Path | None) -> None:
        """`log_dir` gets a log of each worker and of the host; None: this process's output has them."""
        super().__init__()
        self._log_dir = log_dir
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return "the host of the environments' workers"

    @property
    def pid(self) -> int | None:
        """Process id, for tests and messages."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """End the host and with it all workers."""
        self._leave()
        process = self._process
        if process is None:
            return
        deadline = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if process.poll() is None:
            logger.warning("{} does not end: killed", self)
            process.kill()  # its workers die with it
            process.wait()

    async def _start(self, control: socket.socket, order: dict[str, Any]) -> socket.socket:
        name = str(order["label"]).replace("[", "_").replace("]", "").replace("/", "_")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [pack("start", log=self._log_file(name), **order)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def _log_file(self, name: str) -> str:
        if self._log_dir is None:
            return ""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return str(self._log_dir / f"env_{name}.log")

    async def _reach(self) -> socket.socket:
        """Start the process; it takes orders at once and obeys once it has imported what it needs."""
        if self._process is not None:
            self._process.poll()
        ours, theirs = socket.socketpair()
        log = self._log_file("host")
        with theirs, open(log or os.devnull, "ab") as out:  # noqa: PTH123 - either a path or the null device
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _HOST, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out if log else None,
                stderr=subprocess.STDOUT if log else None,
                pass_fds=[theirs.fileno()],
                env={k: v for k, v in os.environ.items() if k != BUS} | ONE_THREAD,  # no way to the run's messages
                start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor
            )
        return ours


class RemoteHost(HostLink):
    """A host that somebody started on another machine; it logs there."""

    def __init__(self, address: str, key: str, patience_s: float = 0.0) -> None:
        """`address` is host:port, `key` what both ends prove to know; for `patience_s` it may not listen yet."""
        super().__init__()
        self._address, self._key, self._patience_s = address, key, patience_s
        self._session = uuid.uuid4().hex

    def __str__(self) -> str:
        return f"the host of environments' workers at {self._address}"

    async def _reach(self) -> socket.socket:
        sock = await self._connected()
        await asyncio.to_thread(sock.sendall, pack("control", session=self._session))
        return sock

    async def _start(self, control: socket.socket, order: dict[str, Any]) -> socket.socket:
        sock = await self._connected()

        def order_it() -> None:
            sock.sendall(pack("start", log="", session=self._session, **order))
            unpacker = Unpacker()
            while not (messages := unpacker.feed(data := sock.recv(1 << 10))):
                if not data:
                    raise ConnectionError(f"{self} starts no worker: it has lost this orchestrator's session")
            if messages[0]["op"] != "started":
                raise FrameError("a started worker was expected")

        try:
            await asyncio.to_thread(order_it)
        except OSError:
            sock.close()
            raise
        return sock

    async def _connected(self) -> socket.socket:
        """Return a connection whose ends have proven to each other that they know the key. Raises OSError."""

        def connect() -> socket.socket:
            sock = self._dial()
            try:
                prove(sock, self._key, PURPOSE)
            except OSError as error:
                sock.close()
                hint = "its key is another one, or it is busy with strangers"
                raise ConnectionError(f"{self} did not take us in: {hint} ({error})") from error
            sock.settimeout(START_TIMEOUT_S)
            return sock

        return await asyncio.to_thread(connect)

    def _dial(self) -> socket.socket:
        """Connect, again and again while a host of the job still starts."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return socket.create_connection(parse_address(self._address), CONNECT_TIMEOUT_S)
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)


_KEYS: dict[str, str] = {}
"""Keys of hosts elsewhere, by the variable that held each."""


def key_of_hosts(config: EnvServersConfig) -> str:
    """Return the key of the hosts at the stated addresses, empty without any; from the first call on it is no longer in
    this process's environment, which programs that episodes start inherit."""
    if given := os.environ.pop(config.key_var, None):
        _KEYS[config.key_var] = given
    return _KEYS.get(config.key_var, "")


def remote_hosts(config: EnvServersConfig, urls: Sequence[str]) -> list[RemoteHost]:
    """Return the hosts at the stated addresses. `urls`: of the inference servers, which the workers there must reach.
    Raises EnvError: the key is not set, or the servers are known by an address of this machine alone."""
    key = key_of_hosts(config)
    if config.addresses and not key:
        raise EnvError(f"env_servers.addresses: the environment variable {config.key_var} with their key is not set")
    for address in config.addresses:
        inward = [url for url in urls if is_loopback(urlsplit(url).hostname or "")]
        if inward and not is_loopback(parse_address(address)[0]):
            raise EnvError(
                f"env_servers.addresses: workers at {address} cannot reach the inference server {inward[0]}, an "
                "address of this machine alone: state inference.server.host, or orchestrator.client.base_url"
            )
    own = os.environ.get(ENV_HOSTS, "").split(",")
    return [RemoteHost(address, key, START_TIMEOUT_S if address in own else 0.0) for address in config.addresses]
