"""The short way of a finished artifact: its files straight from the process that committed them, over a socket.

A shared file system may hide a new name from other nodes for seconds, and remember a miss for a minute. The bus
says at once that a batch is there, but not its bytes. So the orchestrator also hands out the files of its newest
batches (`HandoverServer`), the announcement says where (`source`), and a trainer rank asks there first (`Handover`):
no look-up on the shared file system, so no miss that a client could remember, and no metadata operation. What came is
held against the manifest's sums, the manifest against its own sum and the announced digest.

It is about latency only: the file is the truth, and whatever fails here is read from disk.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from loguru import logger

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import MANIFEST, Manifest
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.auth import prove
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.messaging.proven_server import ProvenRequest, ProvenServer
from prime_hpc.store.messaging.run_bus import Bus

PURPOSE = "handover"
NUM_OFFERED = 16
"""Newest artifacts that a server hands out; older ones have long been visible."""
CONNECT_TIMEOUT_S = 2.0
IO_TIMEOUT_S = 10.0
"""Longest silence of either end."""
AVOID_S = 60.0
"""A source that could not be reached is not asked again for so long: a firewall must not cost each step a timeout."""
NEWS_S = 0.5
"""How long the announcement may come after another rank was told to go on."""
_MAX_LINE = 4096
_MAX_MANIFEST = 64 << 20

Fetched = tuple[Manifest, dict[str, npt.NDArray[np.uint8]]]


class HandoverServer:
    """Hands out the files of artifacts that this process has committed, from daemon threads.

    Args:
        bus: the bus that announces them; a caller must prove to know its secret, and its hub's address decides
            whether other machines are served. A bus without a hub: `offer` returns None, and readers read the
            files.
        network: names the ports that may be taken, and the network of which this node's address is bound and
            announced; default: all, announced by the address that leads to the hub.
    """

    def __init__(self, bus: Bus, network: Network | None = None) -> None:
        self._bus = bus
        self._host: str | None = None
        network = Network() if network is None else network
        self._offered: OrderedDict[str, Path] = OrderedDict()
        self._lock = threading.Lock()
        self._server: ProvenServer | None = None
        if bus.hub_host is None:
            return
        try:
            host = bus.hub_host
            if not sockets.is_loopback(bus.hub_host):
                place = network.place("control")
                self._host = place.address if place is not None else None
                host = self._host or sockets.ALL
            listening = sockets.listen(host, ports=network.ports)
            self._server = ProvenServer(listening, _Request, self, bus.secret, PURPOSE)
        except (OSError, ConfigError) as error:
            logger.warning(f"batches are handed over by files alone: no socket to listen on ({error})")
            return
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="handover", daemon=True).start()

    def offer(self, directory: Path) -> str | None:
        """Hand out the files of a committed artifact from now on.
        Returns "host:port" for the announcement; None where nobody could come."""
        host = self._host or self._bus.local_host
        if self._server is None or host is None:
            return None
        with self._lock:
            self._offered[_key(directory)] = directory
            while len(self._offered) > NUM_OFFERED:
                self._offered.popitem(last=False)
        return sockets.join(host, self._server.server_address[1])

    def find(self, request: dict[str, Any]) -> Path:
        """Return the file that a request means. Raises LookupError: no such file on offer."""
        with self._lock:
            directory = self._offered.get(str(request.get("artifact")))
        name = str(request.get("file"))
        if directory is None or Path(name).name != name:
            raise LookupError("not on offer")
        return directory / name

    def close(self) -> None:
        """Hand out nothing more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Request(ProvenRequest):
    """One connection: after the proof a JSON line asks for a file, a JSON line with its size and the bytes answer; any
    number of times."""

    def answer(self) -> None:
        self.connection.settimeout(IO_TIMEOUT_S)
        while line := self.rfile.readline(_MAX_LINE):
            try:
                request = json.loads(line)
                file = self.server.owner.find(request).open("rb", buffering=0)
            except (ValueError, LookupError, OSError, AttributeError) as error:
                self.wfile.write(json.dumps({"error": str(error)}).encode() + b"\n")
                return
            with file:
                size = os.fstat(file.fileno()).st_size
                self.wfile.write(json.dumps({"size": size}).encode() + b"\n")
                self.connection.sendfile(file)


class Handover:
    """A reader's end. Every method answers None where the short way does not work; then the files are read."""

    def __init__(self, bus: Bus, topic: str, key: str) -> None:
        """`key`: field of an announcement that numbers the artifacts, e.g. `step`."""
        self._bus, self._topic, self._key = bus, topic, key
        self._avoid: dict[str, float] = {}

    def fetch(self, directory: Path, number: int, choose: Callable[[Manifest], Collection[str]]) -> Fetched | None:
        """Fetch the manifest and the chosen files of artifact `number`, checked.

        Args:
            directory: its name in the run.
            choose: the manifest -> names of files.

        Returns:
            the manifest and name -> uint8[size]; None: read the files.
        """
        message = self._announcement(number)
        source = message.get("source") if message is not None else None
        if message is None or not isinstance(source, str) or time.monotonic() < self._avoid.get(source, 0.0):
            return None
        try:
            with _connect(source, self._bus.secret) as connection:
                content = self._get(connection, directory, MANIFEST, None)
                manifest = Manifest.from_bytes(content.tobytes(), directory / MANIFEST)
                if message.get(self._key) == number and manifest.digest != message.get("digest"):
                    raise ArtifactError(directory, f"digest {message.get('digest')}", f"digest {manifest.digest}")
                names = [name for name in choose(manifest) if name in manifest.files]
                return manifest, {n: self._get(connection, directory, n, manifest.files[n]) for n in names}
        except LookupError as error:
            logger.debug(f"{directory}: {source} does not hand it out ({error})")
        except (OSError, ValueError, ArtifactError) as error:
            self._avoid[source] = time.monotonic() + AVOID_S
            logger.warning(f"{directory}: {source} could not hand it over ({error}); reading the files from now on")
        return None

    def _announcement(self, number: int) -> dict[str, Any] | None:
        def covers(message: dict[str, Any]) -> bool:
            value = message.get(self._key)
            return isinstance(value, int) and value >= number

        if not self._bus.connected:
            latest = self._bus.latest(self._topic)
            return latest if latest is not None and covers(latest) else None
        return self._bus.wait(self._topic, covers, NEWS_S)

    def _get(
        self, connection: socket.socket, directory: Path, name: str, entry: FileEntry | None
    ) -> npt.NDArray[np.uint8]:
        request = {"artifact": _key(directory), "file": name}
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(_read_line(connection))
        if "error" in answer:
            raise LookupError(answer["error"])
        size = int(answer["size"])
        if size > _MAX_MANIFEST if entry is None else size != entry.size:
            raise ArtifactError(directory / name, f"{entry.size if entry else 'fewer'} bytes", f"{size} bytes")
        content: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        view = content.data
        _read_into(connection, view)
        found = xxhash.xxh3_64_hexdigest(view)
        if entry is not None and found != entry.xxh3:
            raise ArtifactError(directory / name, f"xxh3 {entry.xxh3}", f"xxh3 {found}, handed over")
        return content


@contextlib.contextmanager
def _connect(source: str, secret: str) -> Iterator[socket.socket]:
    with socket.create_connection(parse_address(source), CONNECT_TIMEOUT_S) as connection:
        prove(connection, secret, PURPOSE)
        connection.settimeout(IO_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def _read_line(connection: socket.socket) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)  # a line of some 20 bytes; what follows belongs to the file
        if not byte or len(line) > _MAX_LINE:
            raise ConnectionError("the connection closed before the answer")
        line += byte
    return bytes(line)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError(f"the connection closed with {len(view)} bytes missing")
        view = view[count:]


def _key(directory: Path) -> str:
    """How both ends call an artifact; the run directory may be mounted elsewhere on the other node."""
    return f"{directory.parent.name}/{directory.name}"
