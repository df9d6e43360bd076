"""The trainer's side: each rank keeps an image of its file in host memory, and sends it to who joins and asks.

Its connections ask, a JSON line each, after both ends have proven to know the job's secret:

    {"join": session, "size": N}                ->  {"host", "port", "name"}: open the group there  ->  {"joined": true}
    {"hold": sum}                               ->  {"held": true}: the image stays as it is, until
    {"send": sum}                               ->  all buckets, over the group  ->  {"sent": bytes}, or
    {"release": true}                           ->  {"released": true}

A connection that ends gives back what it held. The next version waits for those that hold this one, at most `HOLD_S`:
then they are cut off.
"""

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from loguru import logger

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.runtime.host_memory import HEADROOM, available_bytes
from prime_hpc.runtime.page_locked import page_locked
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.messaging.network import Network, route_to
from prime_hpc.store.messaging.proven_server import ProvenRequest, ProvenServer
from prime_hpc.weight_transport.files import FilesSender
from prime_hpc.weight_transport.network import group
from prime_hpc.weight_transport.network.layout import BUCKET_BYTES, HEADER_SUFFIX, KEY, Part, Sent, buckets, read_header
from prime_hpc.weight_transport.transport import Place, VersionForm, WholeFile

PURPOSE = "weights"
HOLD_S = 180.0
"""Longest that a server may keep a version from being replaced."""
MAX_LINE = 4096


class NetworkSender:
    """One rank's side."""

    def __init__(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int, backend: str) -> None:
        """Begin to listen. Collective where there is a process group: all ranks that have something to send, or none.
        `config, files, rank`: see `WeightTransport.sender`."""
        self._interval, self._rank, self._backend = config.whole_interval, rank, backend
        self._files, self._form = FilesSender(files), VersionForm()
        own_gpu = backend == "nccl"  # a new thread's own would be the first of the node
        self._device = torch.device("cuda", torch.cuda.current_device()) if own_gpu else torch.device("cpu")
        self._own = next((file for file in files if file.is_owned_here), None)
        self._session = new_secret()
        self._stage = Path()
        self._image: torch.Tensor | None = None
        self._ready = threading.Condition()
        self._sum = ""
        """Of the image's values; empty while they change."""
        self._holders: dict[socket.socket, float] = {}
        """Connections that need it as it is, and since when."""
        self._num_since_whole: int | None = None
        """Versions since the last whole one; None: there is none yet."""
        self._is_in_doubt = True
        """No server has asked for a version since one began to join, or at all: the network may carry none."""
        self._server, self.address = self._serve()
        self._all_listen = self._agree()
        """True if every rank that has something to send can send it."""

    def _serve(self) -> tuple[ProvenServer | None, str]:
        """Listen, where this rank has something to send and there are others to prove themselves to."""
        hub = os.environ.get(BUS)
        if self._own is None:
            return None, ""
        if not hub:
            logger.warning("weights go as whole files: without a supervisor there is no secret that engines know too")
            return None, ""
        needed, left = self._own.size * int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_bytes()
        if needed > left * HEADROOM:
            logger.warning(
                f"weights go as whole files: this node's ranks would hold {needed / 2**30:.1f} GiB of each version in "
                f"host memory, {left / 2**30:.1f} GiB are free"
            )
            return None, ""
        secret, (hub_host, _) = hub.rpartition("@")[0], parse_address(hub)
        try:
            network = Network.from_env()
            place = network.place("collectives") or network.place("control") or route_to(hub_host)
            self._host = "127.0.0.1" if place is None or sockets.is_loopback(hub_host) else place.address
            listening = sockets.listen(self._host, ports=network.ports)
        except (OSError, ConfigError) as error:
            logger.warning(f"weights go as whole files: no socket to listen on ({error})")
            return None, ""
        self._network = network
        server = ProvenServer(listening, _Request, self, secret, PURPOSE)
        threading.Thread(target=server.serve_forever, args=(0.2,), name="send-weights", daemon=True).start()
        return server, sockets.join(self._host, listening.getsockname()[1])

    def _agree(self) -> bool:
        """Return whether no rank lacks a socket; else no rank listens, for a version without one's part is none."""
        lacks = self._own is not None and self._server is None
        every = [lacks]
        if dist.is_initialized():
            every = [False] * dist.get_world_size()
            dist.all_gather_object(every, lacks)
        if any(every) and self._server is not None:
            logger.warning(f"weights go as whole files: rank {every.index(True)} cannot send them")
            self.close()
            self._server, self.address = None, ""
        return not any(every)

    def plan(self, version: int, *, is_kept: bool = False) -> VersionForm:
        """Whole: the first of an attempt, every so many, those that are kept, and as long as no server could join."""
        since = self._num_since_whole
        is_due = since is None or is_kept or since + 1 >= self._interval
        return VersionForm(is_whole=is_due or self._is_in_doubt or not self._all_listen)

    def open(self, form: VersionForm, stage: Path, stack: contextlib.ExitStack) -> None:
        """Begin a version: those who hold the one before come first."""
        self._form, self._stage = form, stage
        self._retire()
        if form.is_whole:
            self._files.open(form, stage, stack)
        if self._server is not None and self._own is not None and self._image is None:
            like = torch.empty(self._own.size, dtype=torch.uint8, device="meta")
            on_gpu = self._device.type == "cuda"
            self._image = page_locked(like, self._device) if on_gpu else torch.empty_like(like, device="cpu")

    def _retire(self) -> None:
        """Give the image free for the next values."""
        with self._ready:
            self._sum = ""  # nobody else begins
            self._ready.wait_for(lambda: not self._holders, HOLD_S)
            late = list(self._holders)
            self._holders.clear()
        for connection in late:
            logger.warning(f"a server held a weight version for {HOLD_S:.0f} s: it is cut off and loads a whole one")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def write(self, place: Place, values: Any) -> None:
        """Take a place."""
        if self._image is not None:
            content = np.frombuffer(values, np.uint8)
            self._image.numpy()[place.offset : place.offset + len(content)] = content
        if self._form.is_whole:
            self._files.write(place, values)

    def finalize(self) -> tuple[dict[str, FileEntry], dict[str, Any]]:
        """Make this rank's files durable, and offer its image."""
        entries: dict[str, FileEntry] = self._files.finalize()[0] if self._form.is_whole else {}
        own = self._own
        if own is None:
            return entries, {}
        if self._image is None:
            return entries, {"not sent": own.name}
        if not self._form.is_whole:
            name = own.name + HEADER_SUFFIX
            entries = {name: store_files.write_file(self._stage / name, [own.header])}
        found = xxhash.xxh3_64_hexdigest(self._image[len(own.header) :].numpy().data)
        with self._ready:
            self._sum = found
        return entries, vars(Part(own.name, self.address, own.size, found))

    def meta(self, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Say where the version can be had."""
        if not any(facts) or any("not sent" in fact for fact in facts):
            return {}
        parts = tuple(Part(**fact) for fact in facts if fact)
        said = {KEY: Sent(self._backend, self._session, parts).as_json()}
        return said if self._form.is_whole else {"transport": self._backend, **said}

    def sent(self, manifest: Manifest) -> None:
        """Count from the last whole version."""
        self._num_since_whole = 0 if self._form.is_whole else (self._num_since_whole or 0) + 1

    def hold(self, connection: socket.socket, wanted: str) -> bool:
        """Keep the image for a connection, if it is the one that it wants."""
        self._is_in_doubt = False  # whoever asks has joined every rank
        with self._ready:
            if not wanted or wanted != self._sum:
                return False
            self._holders[connection] = time.monotonic()
            return True

    def release(self, connection: socket.socket) -> None:
        """Keep nothing for it any more."""
        with self._ready:
            self._holders.pop(connection, None)
            self._ready.notify_all()

    def send(self, connection: socket.socket, joined: group.Group) -> int:
        """Send the image that a connection holds; returns its bytes."""
        image, own = self._image, self._own
        with self._ready:
            is_held = connection in self._holders
        if image is None or own is None or not is_held:
            raise RuntimeError("not on hold")
        total = 0
        with joined.beside():
            for bucket in buckets(read_header(io.BytesIO(own.header), own.name), BUCKET_BYTES):
                values = image[bucket[0].begin : bucket[-1].end]
                joined.broadcast(values.to(joined.device, non_blocking=True))
                total += len(values)
        return total

    def join(self, name: str, size: int, peer: str, tell: Any) -> group.Group:
        """Open a group for a connection, which `tell` tells where."""
        self._is_in_doubt = True
        store, port = group.listen(self._host, self._network)
        tell({"host": self._host, "port": port, "name": name})
        joined = group.Group(store, name, 0, size, self._backend, peer, self._device)
        joined.connect()
        return joined

    def close(self) -> None:
        """Send nothing more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Request(ProvenRequest):
    """One server that joins."""

    def answer(self) -> None:
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sender: NetworkSender = self.server.owner
        joined: group.Group | None = None
        try:
            while line := self.rfile.readline(MAX_LINE):
                request = json.loads(line)
                if "join" in request:
                    joined = sender.join(new_secret(), int(request["size"]), self.client_address[0], self._tell)
                    self._tell({"joined": True})
                elif "hold" in request:
                    self._tell({"held": joined is not None and sender.hold(self.connection, str(request["hold"]))})
                elif "send" in request and joined is not None:
                    self._tell({"sent": sender.send(self.connection, joined)})
                    sender.release(self.connection)
                else:
                    sender.release(self.connection)
                    self._tell({"released": True})
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            logger.warning(f"{self.client_address[0]} gets no weights over the network until it joins anew: {error}")
        finally:
            sender.release(self.connection)
            if joined is not None:
                joined.close()

    def _tell(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")
