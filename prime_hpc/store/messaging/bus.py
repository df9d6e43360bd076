"""The message bus: who has finished an artifact tells everybody at once, over a socket.

The supervisor runs the hub (`BusServer`), every role a `BusClient`. Both prove to the other that they know the hub's
secret before anything is said (`prime_hpc.store.messaging.auth`). Messages are small JSON objects under a topic
("weights", "batch", "consumed", "served", "status", "stop", "save"); the hub passes each to all clients and keeps the
last per topic (`last_words`) for late joiners; messages for the supervisor alone (`HUB_ONLY`) go no further. The bus is
about latency only: whoever waits also lists the directory (`waiting.wait_for_artifact`), so a lost message, a dead hub
or no hub at all costs seconds, never correctness.
"""

import contextlib
import math
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from loguru import logger

from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.accept_clients import Admission
from prime_hpc.store.messaging.auth import AuthenticationError, new_secret, prove
from prime_hpc.store.messaging.json_lines import Peer, PeerGone, encode, parse_address
from prime_hpc.store.messaging.last_words import LastWords

Payload = dict[str, Any]
_TICK_S = 1.0  # longest sleep of a thread; everything urgent wakes it
_FLUSH_S = 1.0  # what close() grants at most to messages that are still on their way
_CONNECT_TIMEOUT_S = 2.0
_PURPOSE = "bus"
_MAX_QUEUED = 1000  # messages kept while the hub cannot be reached; older ones are dropped
HUB_ONLY = frozenset({"status", "agent", "held"})
"""Topics that are the hub's alone: thousands of processes report on themselves, and only the supervisor listens."""
SHARED = frozenset({"stop", "save", "server", "pulse", "run"})
"""Topics that mean everybody, also where several runs share a hub; all others are a run's own."""
_HISTORY = 256  # messages that a waiter may still see though newer ones came in the same instant


class _Waker:
    """Ends a selector's sleep from another thread."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        # A full pipe already wakes; a closed one belongs to a thread that has ended.
        with contextlib.suppress(OSError):
            self._writer.send(b"x")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


def scoped(prefix: str, topic: str) -> str:
    """Return the name on the wire of a topic of the run that a prefix stands for."""
    return topic if topic in SHARED else f"{prefix}{topic}"


def _call(callback: Callable[..., None], *arguments: Any) -> None:
    """Run a caller's callback; its failure is logged and never ends the bus's thread."""
    try:
        callback(*arguments)
    except Exception:  # noqa: BLE001 - a caller's code: anything may come, and all of it is logged
        logger.exception(f"bus callback {getattr(callback, '__qualname__', callback)} failed")


class BusServer:
    """Broadcasts messages between the roles of one attempt, from a daemon thread.

    Args:
        host: address to bind; "::" for several nodes: every address, of both families.
        port: 0 takes a free one.
        on_message: called with (topic, payload) for every message of a client, in the hub's thread: be quick.
        incarnation: messages of clients that state a lower one are dropped (a former attempt still running).
        advertise: host that clients shall use; default `host`, or this machine's name where all are bound.
        secret: what a client must prove to know: on a cluster's network, and on a machine that others use too, anybody
            can reach the port. Default: a new one. It is part of `address`.
        ports: that may be taken; default: any.

    Raises:
        StoreError: the port is taken or the address is not this machine's.
        NoFreePort: all of `ports` are taken.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        on_message: Callable[[str, Payload], None] | None = None,
        *,
        incarnation: int = 0,
        advertise: str | None = None,
        secret: str | None = None,
        ports: sockets.PortRange | None = None,
    ) -> None:
        try:
            listener = sockets.listen(host, port, ports=ports)
        except OSError as error:
            where = sockets.join(host, port)
            raise StoreError(f"the message bus cannot listen on {where}: {error.strerror or error}") from error
        where = sockets.join(advertise or sockets.name_of(host), listener.getsockname()[1])
        self._secret = secret or new_secret()
        self.place, self.address = where, f"{self._secret}@{where}"
        self._admission = Admission(listener, self._secret, _PURPOSE)
        self._on_message = on_message
        self._incarnation = incarnation
        self._id = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._latest: LastWords[tuple[Payload, bytes]] = LastWords()
        self._sequence = 0
        self._peers: dict[socket.socket, Peer] = {}
        self._has_news = False
        """Lines were queued: all peers are looked at, thousands, which is not done for every word that one says."""
        self._writing: set[socket.socket] = set()
        """Peers that the selector watches for room to write."""
        self._closing = threading.Event()
        self._waker = _Waker()
        self._thread = threading.Thread(target=self._run, name="bus-hub", daemon=True)
        self._thread.start()

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Broadcast from the hub's own process. Never raises, never blocks."""
        self._broadcast(topic, payload)

    def latest(self, topic: str) -> Payload | None:
        """Return the last message of a topic."""
        with self._lock:
            entries = self._latest.of(topic)
        return dict(entries[-1][0]) if entries else None

    @property
    def num_clients(self) -> int:
        """Connections that are open now and have given their proof."""
        return len(self._peers)

    def close(self) -> None:
        """Hand over what is queued (1 s at most), close all connections, end the thread."""
        self._closing.set()
        self._waker.wake()
        self._thread.join(_FLUSH_S + 2 * _TICK_S)

    def _broadcast(self, topic: str, payload: Payload) -> None:
        with self._lock:
            self._sequence += 1
            line = encode({"topic": topic, "payload": payload, "hub": self._id, "seq": self._sequence})
            self._latest.keep(topic, payload, (payload, line))
            slow = [peer for peer in self._peers.values() if not peer.queue(line)]
            self._has_news = True
        for peer in slow:  # shut down here, removed by the hub's thread; the client comes back and gets the latest
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        self._waker.wake()

    # The hub's thread.

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._waker.reader, selectors.EVENT_READ)
        try:
            while not self._closing.is_set():
                self._turn(selector, self._admission.tend(selector, _TICK_S))
            self._admission.close(selector)
            end = time.monotonic() + _FLUSH_S
            finished: set[Peer] = set()
            while self._peers and time.monotonic() < end:
                for peer in self._peers.values():
                    if not peer.wants_write and peer not in finished:
                        peer.finish()
                        finished.add(peer)
                self._turn(selector, 0.05)
        finally:
            self._admission.close(selector)  # a second time does no harm
            for sock in list(self._peers):
                self._drop(selector, sock)
            selector.close()
            self._waker.close()

    def _turn(self, selector: selectors.BaseSelector, timeout: float) -> None:
        with self._lock:
            has_news, self._has_news = self._has_news, False
        for sock in list(self._peers if has_news else self._writing):
            wants_write = self._peers[sock].wants_write
            if wants_write != (sock in self._writing):
                selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0))
                self._writing ^= {sock}
        for key, events in selector.select(timeout):
            if key.fileobj is self._waker.reader:
                self._waker.drain()
            elif self._admission.concerns(key.fileobj):
                self._admit(selector, key.fileobj)  # type: ignore[arg-type]
            elif key.fileobj in self._peers:
                self._serve(selector, key.fileobj, events)

    def _admit(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        admitted = self._admission.handle(selector, sock)
        if admitted is None:
            return
        sock, proof = admitted
        try:
            peer = Peer(sock)
        except OSError:  # gone before its options were set
            sock.close()
            return
        peer.queue(proof)
        with self._lock:
            for _, line in self._latest:
                peer.queue(line)
            self._peers[sock] = peer
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self._writing.add(sock)

    def _serve(self, selector: selectors.BaseSelector, sock: socket.socket, events: int) -> None:
        peer = self._peers[sock]
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    peer.flush()
            messages = peer.receive() if events & selectors.EVENT_READ else []
        except PeerGone:
            self._drop(selector, sock)
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Payload) -> None:
        topic, payload, incarnation = message.get("topic"), message.get("payload"), message.get("incarnation")
        if not isinstance(topic, str) or not isinstance(payload, dict):
            return
        if isinstance(incarnation, int) and incarnation < self._incarnation:
            logger.debug(f"bus: dropped a message on {topic} of incarnation {incarnation}")
            return
        if topic.rpartition("/")[2] not in HUB_ONLY:
            self._broadcast(topic, payload)
        if self._on_message is not None:
            _call(self._on_message, topic, payload)

    def _drop(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        selector.unregister(sock)
        self._writing.discard(sock)
        with self._lock:
            peer = self._peers.pop(sock)
        peer.close()


class BusClient:
    """One role's end of the bus: a daemon thread that connects, and connects again.

    Args:
        address: "secret@host:port" of the hub; None makes every call a silent no-op (a role started by hand).
        incarnation: number of the run's attempt, stated in every message; None: not stated.
        run: one of several runs that share a hub, and its incarnation ("run_a/2"): topics that are not `SHARED` are its
            own, "<run>/<topic>" on the wire. "" means the hub's only run, or the parent of several.
    """

    def __init__(self, address: str | None, role: str, *, incarnation: int | None = None, run: str = "") -> None:
        self._prefix = f"{run}/" if run else ""
        self._address = parse_address(address) if address else None
        self.secret = address.rpartition("@")[0] if address else ""
        """Proves a connection."""
        self._role = role
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self._latest: LastWords[tuple[Payload, str, int]] = LastWords()
        """Each with its hub and sequence number."""
        self._history: deque[tuple[int, str, Payload]] = deque(maxlen=_HISTORY)
        self._num_received = 0
        self._outgoing: deque[bytes] = deque(maxlen=_MAX_QUEUED)
        self._callbacks: list[tuple[str, Callable[[Payload], None]]] = []
        self._replays: deque[tuple[Payload, Callable[[Payload], None]]] = deque()
        self._closing = threading.Event()
        self._moved = threading.Event()
        self._peer: Peer | None = None
        self.local_host: str | None = None
        """Under which the hub's other clients reach this process; None until it has reached the hub itself."""
        if self._address is not None:
            self._waker = _Waker()
            self._thread = threading.Thread(target=self._run, name=f"bus-{role}", daemon=True)
            self._thread.start()

    @property
    def connected(self) -> bool:
        """True if the hub can be reached now."""
        return self._peer is not None

    @property
    def hub_host(self) -> str | None:
        """Host of the hub; None where there is none."""
        return self._address[0] if self._address else None

    @property
    def closed(self) -> bool:
        """True if `close` was called: `wait` no longer blocks."""
        return self._closing.is_set()

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Announce. Never raises, never blocks; kept while the hub cannot be reached."""
        if self._address is None or self._closing.is_set():
            return
        name = self._scoped(topic)
        message = {"topic": name, "payload": payload, "role": self._role, "incarnation": self._incarnation}
        self._outgoing.append(encode(message))
        self._waker.wake()

    def latest(self, topic: str) -> Payload | None:
        """Return the last message of a topic that this process has received (its own come back to it as well)."""
        with self._changed:
            messages = self._latest.of(self._scoped(topic))
        return dict(messages[-1][0]) if messages else None

    def _scoped(self, topic: str) -> str:
        return scoped(self._prefix, topic)

    def wait_for_any(self, timeout_s: float) -> None:
        """Block until any message comes, at most `timeout_s` seconds."""
        with self._changed:
            seen = self._num_received
            self._changed.wait_for(lambda: self._num_received != seen or self._closing.is_set(), timeout_s)

    def wait(self, topic: str, predicate: Callable[[Payload], bool], timeout_s: float) -> Payload | None:
        """Block until the latest or a coming message of `topic` satisfies `predicate`.
        Returns the message; None after `timeout_s` seconds, or once the bus is closed."""
        end = time.monotonic() + timeout_s
        topic = self._scoped(topic)
        with self._changed:
            for latest, *_ in self._latest.of(topic):
                if predicate(latest):
                    return dict(latest)
            seen = self._num_received
            while not self._closing.is_set():
                for number, name, payload in list(self._history):
                    if number > seen and name == topic and predicate(payload):
                        return dict(payload)
                seen = self._num_received
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(remaining)
        return None

    def subscribe(self, topic: str, callback: Callable[[Payload], None]) -> None:
        """Call `callback(payload)` for the latest message of a topic (if any; about each thing) and every coming one.

        It runs in the bus's thread: be quick, and hand over to an event loop with `call_soon_threadsafe`.
        """
        if self._address is None:
            return
        topic = self._scoped(topic)
        with self._changed:
            self._callbacks.append((topic, callback))
            self._replays.extend((latest, callback) for latest, *_ in self._latest.of(topic))
        self._waker.wake()

    def move(self, place: str, incarnation: int) -> None:
        """Go on at another hub that has the same secret, as a role of its attempt: what the old one announced holds no
        longer.

        Args:
            place: host:port of the hub.
            incarnation: stated in every message from now on.
        """
        with self._changed:
            self._address, self._incarnation = parse_address(f"{self.secret}@{place}"), incarnation
            self._latest.clear()
            self._history.clear()
            self._moved.set()
        self._waker.wake()

    def close(self) -> None:
        """Hand over what is queued (1 s at most) and end the thread. Waiters return None."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._address is not None:
            self._waker.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(_FLUSH_S + _CONNECT_TIMEOUT_S)

    # The bus's thread.

    def _run(self) -> None:
        pause = 0.05
        try:
            while not self._closing.is_set():
                self._moved.clear()
                peer = self._connect()
                if peer is None:
                    self._run_replays()
                    self._closing.wait(pause)
                    pause = min(pause * 2, _TICK_S)
                    continue
                pause = 0.05
                try:
                    self._talk(peer)
                except PeerGone as error:
                    logger.debug(f"bus of {self._role}: connection lost ({error})")
                    self._closing.wait(pause)
                finally:
                    self._peer = None
                    peer.close()
        finally:
            self._waker.close()

    def _connect(self) -> Peer | None:
        assert self._address is not None
        sock = None
        try:
            sock = socket.create_connection(self._address, _CONNECT_TIMEOUT_S)
            if sock.getsockname() == sock.getpeername():  # nobody listens on this ephemeral port: TCP met itself
                sock.close()
                return None
            here, there = sock.getsockname()[0], sock.getpeername()[0]
            # on the hub's machine: as the hub is known (its name may be 127.0.1.1 there, asked from 127.0.0.1)
            self.local_host = self._address[0] if here == there or sockets.is_loopback(here) else here
            prove(sock, self.secret, _PURPOSE)
            self._peer = Peer(sock)
        except OSError as error:  # the hub is not there yet, or is gone: listing takes over, and this is tried again
            if sock is not None:
                sock.close()
            if isinstance(error, AuthenticationError):
                logger.debug(f"bus of {self._role}: {error}")
            return None
        return self._peer

    def _talk(self, peer: Peer) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker.reader, selectors.EVENT_READ)
            selector.register(peer.sock, selectors.EVENT_READ)
            end, finished = math.inf, False
            while time.monotonic() < end:  # once closing, until the hub has read all and hangs up (PeerGone)
                if self._moved.is_set():
                    return
                self._pump(peer)
                self._run_replays()
                if self._closing.is_set():
                    end = min(end, time.monotonic() + _FLUSH_S)
                    if not (finished or peer.wants_write or self._outgoing):
                        peer.finish()
                        finished = True
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wants_write else 0)
                selector.modify(peer.sock, wanted)
                for key, events in selector.select(_TICK_S if end == math.inf else 0.05):
                    if key.fileobj is self._waker.reader:
                        self._waker.drain()
                    elif events & selectors.EVENT_READ:
                        for message in peer.receive():
                            self._accept(message)

    def _pump(self, peer: Peer) -> None:
        while self._outgoing and peer.queue(self._outgoing[0]):
            self._outgoing.popleft()
        peer.flush()

    def _run_replays(self) -> None:
        while self._replays:
            payload, callback = self._replays.popleft()
            _call(callback, dict(payload))

    def _accept(self, message: Payload) -> None:
        topic, payload, hub, sequence = (message.get(k) for k in ("topic", "payload", "hub", "seq"))
        if not isinstance(topic, str) or not isinstance(payload, dict):
            return
        if not isinstance(hub, str) or not isinstance(sequence, int):
            return
        # After a reconnection the hub repeats the latest about each thing, in any order: what this process has
        # already seen about it is skipped, so callbacks run once per message.
        with self._changed:
            if self._moved.is_set():  # a last word of the hub that was left
                return
            known = self._latest.about(topic, payload)
            if known is not None and hub == known[1] and sequence <= known[2]:
                return
            self._num_received += 1
            self._latest.keep(topic, payload, (payload, hub, sequence))
            self._history.append((self._num_received, topic, payload))
            callbacks = [callback for name, callback in self._callbacks if name == topic]
            self._changed.notify_all()
        for callback in callbacks:
            _call(callback, dict(payload))
