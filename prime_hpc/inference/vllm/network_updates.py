"""A server's side of versions that come over the network: it joins the trainer's ranks, and has them send.

    prepare  | join each rank, unless joined (all workers, at once)  |  each rank holds the version   requests go on (1)
    receive  | rank by rank: it sends, every worker receives                                          paused
    leave    | after anything that went wrong: the next `prepare` joins anew

(1) But for `still`: engines that compute their steps together pause while they join. One waits there for the others,
and would wait for one whose step waits for it.

All calls from one event loop, one after another.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.inference.check_version import Signature, compare_signatures, reading, verify_version
from prime_hpc.store.weights import holds_weights
from prime_hpc.weight_transport.network.group import JOIN_S
from prime_hpc.weight_transport.network.layout import HEADER_SUFFIX, Sent, read_layout, sent_of
from prime_hpc.weight_transport.network.link import ANSWER_S, TrainerLink, TransferError

Rows = list[dict[str, Any]]
OnWorkers = Callable[..., Awaitable[Rows]]
"""Calls a method on every worker of every engine; an answer of each."""
Still = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Offer:
    """A version that the trainer's ranks hold."""

    version: int
    folder: Path
    sent: Sent
    layouts: tuple[Path, ...]
    """Of each part the file that begins with its header."""
    is_whole: bool
    """True if it lies in files too."""
    digest: str
    """Of its manifest."""


def read_offer(folder: Path, version: int, expected: Signature | None, tied: bool) -> Offer | None:
    """Return how a version can be had over the network; None where it cannot.

    Args:
        folder, version, expected, tied: as of `check_version.receive_version`.

    Raises:
        BadVersionError: it is incomplete or belongs to another model.
        UnavailableError: it cannot be read now.
    """
    manifest = verify_version(folder, version)
    with reading(folder):
        sent = sent_of(manifest)
        if sent is None:
            return None
        is_whole = holds_weights(manifest)
        layouts = tuple(folder / (part.file + ("" if is_whole else HEADER_SUFFIX)) for part in sent.parts)
        found = {entry.name: entry.shape for layout in layouts for entry in read_layout(layout)}
    if expected is not None:
        compare_signatures(found, expected, tied, folder)
    return Offer(version, folder, sent, layouts, is_whole, manifest.digest)


class NetworkUpdates:
    """The links of one server."""

    def __init__(self, secret: str, on_workers: OnWorkers, num_workers: int, still: Still) -> None:
        """`still`: while workers may wait for each other."""
        self._secret, self._on_workers, self._num_workers, self._still = secret, on_workers, num_workers, still
        self._links: list[TrainerLink] = []
        self._joined: tuple[str, ...] = ()
        """The session, and the addresses of its ranks."""

    async def prepare(self, offer: Offer) -> None:
        """Join the ranks unless that is done, and have them hold the version.
        Raises TransferError: it cannot be had so; the engines go on as they were."""
        place = (offer.sent.session, *(part.address for part in offer.sent.parts))
        if self._joined == place:
            try:
                return await asyncio.to_thread(self._hold, offer)
            except TransferError:
                await self.leave()  # the rank may have cut this server off, and take it again
        try:
            await self._join(offer.sent)
            self._joined = place
            await asyncio.to_thread(self._hold, offer)
        except BaseException:
            await self.leave()
            raise

    def _hold(self, offer: Offer) -> None:
        for link, part in zip(self._links, offer.sent.parts, strict=True):
            link.hold(part.xxh3)

    async def _join(self, sent: Sent) -> None:
        await self.leave()
        size = 1 + self._num_workers

        def ask() -> list[dict[str, Any]]:
            found = []
            for part in sent.parts:
                self._links.append(TrainerLink(part.address, self._secret))
                found.append(self._links[-1].join(sent.session, size))
            return found

        groups = await asyncio.to_thread(ask)
        async with self._still():
            rows = await self._on_workers("policy_join", {"backend": sent.backend, "size": size, "groups": groups})
        _check(rows, "did not join the trainer")
        for link in self._links:
            await asyncio.to_thread(link.joined, JOIN_S)

    async def receive(self, offer: Offer) -> Rows:
        """Have every rank send its part to every worker. Generation is paused. Returns of each worker its `rank`.
        Raises TransferError: it broke off; the engines' weights are undefined."""
        rows: Rows = []
        last = len(self._links) - 1
        for index, (link, part) in enumerate(zip(self._links, offer.sent.parts, strict=True)):
            link.send(part.xxh3)
            said = {"index": index, "layout": str(offer.layouts[index]), "xxh3": part.xxh3}
            rows = await self._on_workers("policy_receive", said, index == 0, index == last)
            _check(rows, f"did not get version {offer.version}")
            await asyncio.to_thread(link.sent, ANSWER_S)
        return rows

    async def leave(self) -> None:
        """Close the links; the ranks give up what they held and joined for this server."""
        links, self._links, self._joined = self._links, [], ()
        for link in links:
            link.close()


def _check(rows: Rows, what: str) -> None:
    errors = [f"{row['rank']}: {row['error']}" for row in rows if "error" in row]
    if errors:
        raise TransferError(f"{len(errors)} of {len(rows)} workers {what}: {errors[0]}")
