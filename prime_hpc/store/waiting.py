"""Waiting until an artifact is whole and visible on this node. Used through `prime_hpc.store.artifact`."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from prime_hpc.store.errors import ArtifactError, ArtifactTimeout, FencedError, StoreError, Unreadable, WaitCancelled
from prime_hpc.store.io import files
from prime_hpc.store.manifest import MANIFEST, Manifest, verify_artifact

if TYPE_CHECKING:
    from prime_hpc.store.messaging.file_transfer import Handover
    from prime_hpc.store.messaging.run_bus import Bus

_FIRST_LISTING_PAUSE_S = 0.02
_MAX_LISTING_PAUSE_S = 2.0
_CONNECTED_LISTING_PAUSE_S = 30.0
"""While the bus's hub is reached, announcements come by themselves: listing is for one that was lost. A directory
of many thousand names takes a network file system seconds."""
_MAX_READ_PAUSE_S = 0.25


@dataclass
class ListingPace:
    """When the parent directory is listed next. Whoever waits for one artifact in several calls hands in the same."""

    pause: float = _FIRST_LISTING_PAUSE_S
    last: float = -_CONNECTED_LISTING_PAUSE_S

    def due_in(self, now: float, longest: float) -> float:
        """Seconds until then, of a `time.monotonic()`; `longest` pause of all."""
        return self.last + min(self.pause, longest) - now

    def listed(self, now: float) -> None:
        """Note that it was listed."""
        self.last, self.pause = now, min(self.pause * 1.5, _CONNECTED_LISTING_PAUSE_S)


class Announced(TypedDict, total=False):
    """How an artifact is heard of, and when it counts as there."""

    bus: "Bus | None"
    """Announces; None or a silent one: listing only."""
    topic: str
    """Of the announcement; without one: listing only."""
    key: Mapping[str, int]
    """Fields of the announcement that must have at least these values, e.g. `{"step": 3}`."""
    names: Collection[str] | None
    """Files whose sizes are checked; None: all."""
    handover: "Handover | None"
    """The writer's socket; where it hands out the manifest, the file system is not asked at all."""
    min_incarnation: int
    """An artifact of an older attempt counts as not there (a late write of a fenced process); one that no attempt wrote
    (0) was put there by hand, and counts."""


def wait_for_artifact(
    directory: Path,
    *,
    deadline_s: float,
    cancelled: Callable[[], bool] | None = None,
    pace: ListingPace | None = None,
    **announced: Unpack[Announced],
) -> Manifest:
    """Wait until an artifact is whole and visible here (sizes checked). One process waits, it tells the others.

    The name is not looked up before it was announced or listed: an NFS client would cache the miss for up to a
    minute. Without an announcement, and where an announced name is not visible yet, the parent directory is listed,
    0.02 .. 2 s apart; up to 30 s apart while the bus is connected and has announced nothing.

    Args:
        directory: the artifact's final name.
        cancelled: asked at least every 0.25 s.
        pace: of the listings, where this is not the first call for this artifact.

    Raises:
        ArtifactTimeout: it never appeared; names what was awaited and for how long.
        ArtifactError: it appeared, but until the deadline some file was not what the manifest says.
        WaitCancelled: `cancelled()` became true.
        FencedError: a newer attempt than `min_incarnation` wrote it: this one is over.
    """
    wait = _Wait(directory, **announced)
    end = time.monotonic() + deadline_s
    read_pause, pace = 0.01, pace or ListingPace()
    while True:
        if cancelled is not None and cancelled():
            raise WaitCancelled(f"stopped waiting for {directory}")
        now = time.monotonic()
        if wait.should_list and pace.due_in(now, wait.longest_pause) <= 0:
            wait.list_parent()
            pace.listed(now)
        manifest = wait.read()
        if manifest is not None:
            return manifest
        if now >= end:
            raise wait.failure(deadline_s)
        if wait.found:
            time.sleep(min(read_pause, end - now))
            read_pause = min(read_pause * 2, _MAX_READ_PAUSE_S)
        else:
            wait.pause(max(0.0, min(pace.due_in(now, wait.longest_pause), end - now, 0.25)))


class ArtifactWatch:
    """`wait_for_artifact` for somebody who waits for several: asked now and then, it never blocks."""

    def __init__(self, directory: Path, **announced: Unpack[Announced]) -> None:
        self._wait = _Wait(directory, **announced)
        self._pace = ListingPace()
        self._manifest: Manifest | None = None
        self.found_at: float | None = None
        """When it was first announced or listed, `time.monotonic()`; it may not be whole yet."""

    @property
    def error(self) -> StoreError | None:
        """Why it is not whole, when it was last looked at."""
        return self._wait.error

    def poll(self) -> Manifest | None:
        """Return the manifest once the artifact is whole and visible here; None until then."""
        if self._manifest is not None:
            return self._manifest
        now = time.monotonic()
        if self._pace.due_in(now, self._wait.longest_pause) <= 0:
            if self._wait.should_list:
                self._wait.list_parent()
            self._pace.listed(now)
        elif self.found_at is not None and self._wait.error is not None:
            return None  # broken: looked at again as seldom as listed
        if self._wait.found and self.found_at is None:
            self.found_at = now
        self._manifest = self._wait.read()
        return self._manifest


@dataclass
class _Wait:
    """The state of one `wait_for_artifact`."""

    directory: Path
    bus: "Bus | None" = None
    topic: str = ""
    key: Mapping[str, int] = field(default_factory=dict)
    names: Collection[str] | None = None
    handover: "Handover | None" = None
    min_incarnation: int = 0
    listed: bool = False
    error: StoreError | None = None

    def __post_init__(self) -> None:
        self.bus = self.bus if self.topic else None

    @property
    def announcement(self) -> dict[str, Any] | None:
        message = self.bus.latest(self.topic) if self.bus else None
        return message if message is not None and self._matches(message) else None

    @property
    def found(self) -> bool:
        return self.listed or self.announcement is not None

    @property
    def should_list(self) -> bool:
        # Opening a directory makes an NFS client ask for its changes, and forget its cached misses where there are any:
        # that helps too where an announced name is not visible yet.
        return not self.listed and (self.announcement is None or self.error is not None)

    @property
    def longest_pause(self) -> float:
        """Between two listings, s."""
        silent = self.announcement is None and self.error is None
        connected = self.bus is not None and self.bus.connected
        return _CONNECTED_LISTING_PAUSE_S if silent and connected else _MAX_LISTING_PAUSE_S

    def _matches(self, message: Mapping[str, Any]) -> bool:
        # Steps and versions only grow, so a later announcement also says that the earlier artifact exists.
        values = [(message.get(name), least) for name, least in self.key.items()]
        return all(isinstance(value, int) and value >= least for value, least in values)

    def list_parent(self) -> None:
        try:
            self.listed = self.directory.name in files.list_dir(self.directory.parent)
        except OSError as error:
            self.error = Unreadable.of(error, self.directory.parent)
        else:
            self.error = None if isinstance(self.error, Unreadable) else self.error

    def pause(self, seconds: float) -> None:
        if self.bus is not None and not self.bus.closed:
            self.bus.wait(self.topic, self._matches, seconds)
        else:
            time.sleep(seconds)

    def read(self) -> Manifest | None:
        try:
            manifest = self._handed_over()
            if manifest is None:
                if not self.found:
                    return None
                manifest = verify_artifact(self.directory, names=self.names)
            if 0 < manifest.incarnation < self.min_incarnation:
                raise ArtifactError(
                    self.directory / MANIFEST,
                    f"incarnation {self.min_incarnation} or newer",
                    f"incarnation {manifest.incarnation}",
                )
            announced = self.announcement or {}
            exact = all(announced.get(name) == value for name, value in self.key.items())
            digest = announced.get("digest")
            if exact and digest is not None and digest != manifest.digest:
                raise ArtifactError(self.directory / MANIFEST, f"digest {digest}", f"digest {manifest.digest}")
        except (ArtifactError, Unreadable) as error:
            self.error = error
            return None
        if 0 < self.min_incarnation < manifest.incarnation:
            raise FencedError(
                f"{self.directory}: incarnation {manifest.incarnation} wrote it, this is incarnation "
                f"{self.min_incarnation}; it may not go on"
            )
        return manifest

    def _handed_over(self) -> Manifest | None:
        """Return the manifest from the writer's own socket, where an announcement says that there is one."""
        if self.handover is None or self.announcement is None or not self.key:
            return None
        fetched = self.handover.fetch(self.directory, next(iter(self.key.values())), lambda _: ())
        return fetched[0] if fetched is not None else None

    def failure(self, deadline_s: float) -> StoreError:
        if isinstance(self.error, Unreadable):
            return ArtifactTimeout(f"waited {deadline_s:g} s: {self.error}")
        if self.error is not None:
            return self.error
        what = f"{self.topic} {self.key}" if self.topic else "no topic"
        return ArtifactTimeout(
            f"waited {deadline_s:g} s for {self.directory} ({what}): it was neither announced nor listed in "
            f"{self.directory.parent}"
        )
