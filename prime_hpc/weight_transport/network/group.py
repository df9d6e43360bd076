"""A process group of one trainer rank, which is rank 0 and sends, and the workers of one server.

It knows nothing of torch's default group, of which every process has one of its own. Rendezvous is a store of torch's
in the sender, below a name that only the two ends of a proven connection know.
"""

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.network import Network, route_to
from prime_hpc.weight_transport.network.nccl import SHARED

JOIN_S = 30.0
"""Longest that one end waits for the others."""
BUCKET_S = 60.0
"""Longest that one bucket may take: what a peer costs that has stopped, and does not say so."""
CONTAINED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Of a group's watchdog, which by default ends the process when a peer is gone, or later than the group's timeout."""
_stating = threading.Lock()
_stated_before: dict[str, tuple[str | None, int]] = {}
"""Variables that are stated now: what they were before, and by how many."""


def listen(host: str, network: Network) -> "tuple[dist.TCPStore, int]":
    """Open the store of a group that is to be: it, and its port. `network`: names the ports that may be taken.
    Raises OSError: no port is free."""
    listening = sockets.listen(host, ports=network.ports)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=JOIN_S),
        master_listen_fd=listening.detach(),
        use_libuv=True,
    )
    return store, port


def connect(host: str, port: int) -> "dist.TCPStore":
    """Reach the store of a sender. Raises RuntimeError: torch's own, where nobody answers."""
    timeout = datetime.timedelta(seconds=JOIN_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Group:
    """Sends from rank 0 to all others. Every method may raise a RuntimeError of torch's, and is of no use after it."""

    def __init__(
        self, store: "dist.TCPStore", name: str, rank: int, size: int, backend: str, peer: str, device: torch.device
    ) -> None:
        """Come to the group; `connect` it before anything is sent.

        Args:
            name: of the group, below which it is written there.
            rank, size: 0 is the sender.
            backend: `gloo` or `nccl`.
            peer: an address of the other side, to which this node's own way leads.
        """
        self.device = device if backend == "nccl" else torch.device("cpu")
        prefixed = dist.PrefixStore(name, store)
        timeout = datetime.timedelta(seconds=JOIN_S)
        options: Any
        self._stream: Any = None
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=2 * BUCKET_S)  # `broadcast` gives up before
            with _stated(CONTAINED):
                self._group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo  # of which the stubs lack the half
            options = gloo._Options()
            options._timeout = timeout
            # not by the interface that the environment names: that is of the process's own groups
            here = route_to(peer)
            options._devices = [gloo.create_device(hostname=here.address if here else peer)]
            self._group = gloo(prefixed, rank, size, options)
        self._store, self._size, self._timeout = prefixed, size, timeout
        prefixed.set(f"here/{rank}", "")

    def connect(self) -> None:
        """Return when all have come, and a byte has gone to all.

        NCCL connects in a group's first operation: that would be a part of a version, for which engines are paused.
        """
        try:
            # for who has not come NCCL would wait in a call that nothing ends
            self._store.wait([f"here/{rank}" for rank in range(self._size)], self._timeout)
            with self.beside(), _stated(SHARED):
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except BaseException:
            self.close()
            raise

    def broadcast(self, values: torch.Tensor) -> None:
        """Send to all, or receive; returns when it is done. `values`: contiguous, of `device`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = datetime.timedelta(seconds=BUCKET_S)
        work = self._group.broadcast([values], options)
        work.wait()
        if self.device.type == "cuda":
            try:
                _await_device(self.device)
            except RuntimeError:
                self.close()  # what is queued behind the bucket would wait for it for ever
                raise

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On a GPU: have a thread of its own send beside what the process computes there.

        A new thread's GPU is the node's first, and its stream the one on which the process computes: each bucket would
        wait for all that is queued there, and what is queued next for the bucket.
        """
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            yield

    def close(self) -> None:
        """Leave; a second time does no harm."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()


@contextlib.contextmanager
def _stated(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for what is made inside; then they are as before. Servers join the trainer side by side:
    the first of several threads finds what was before, the last one puts it back."""
    with _stating:
        for name, value in variables.items():
            before, number = _stated_before.get(name, (os.environ.get(name), 0))
            _stated_before[name] = before, number + 1
            os.environ[name] = value
    try:
        yield
    finally:
        with _stating:
            for name in variables:
                before, number = _stated_before.pop(name)
                if number > 1:
                    _stated_before[name] = before, number - 1
                elif before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before


def _await_device(device: torch.device) -> None:
    """Until the device has done what was queued, or the time of a bucket is over."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + BUCKET_S
    while not event.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a bucket did not arrive within {BUCKET_S:.0f} s")
        time.sleep(0.0002)
