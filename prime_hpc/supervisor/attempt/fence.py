"""An attempt's look for a newer one of its run, after whose beginning it may change nothing any more, and for its run
directory, without which nothing that it does is of use."""

import time
from collections.abc import Callable

from loguru import logger

from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.store.attempts import Ended
from prime_hpc.store.errors import FencedError
from prime_hpc.store.run_paths import RunPaths, check_incarnation
from prime_hpc.supervisor.agent import FENCE_LOOK_S

EXIT_GONE = 66
"""EX_NOINPUT (sysexits.h): the run directory was deleted or moved under the attempt. Nothing brings the job back."""
SURE_S = 10.0
"""So long the attempt's own number is not listed before that is believed: a name may be missing for a moment."""
POLL_S = 0.5


class Fence:
    """One attempt's.
    `unseen_s`: so long the folder of the runs may be away, or another file system's, as where it is not mounted."""

    def __init__(
        self,
        paths: RunPaths,
        incarnation: int,
        clock: Callable[[], float],
        unseen_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths, self._incarnation, self._clock = paths, incarnation, clock
        self._unseen_s, self._sleep = unseen_s, sleep
        self._next_look = 0.0
        self._missing_since: float | None = None
        self._device, self._config = self._folders_device(), self._config_file()
        self.is_fenced = False
        """The attempt may write nothing more."""
        self.is_gone = False
        """Because its run directory is."""

    def look(self, *, at_once: bool = False) -> None:
        """Raise Ended where a newer attempt of the run has begun elsewhere, or the run directory is gone.
        `at_once`: also soon after the last look."""
        now = self._clock()
        if now < self._next_look and not at_once:
            return
        self._next_look = now + FENCE_LOOK_S
        try:
            newest = check_incarnation(self._paths, self._incarnation)
        except FencedError as error:
            self.is_fenced = True
            raise Ended(1, str(error)) from error
        except OSError as error:  # the file system does not answer: whoever writes will see
            logger.warning(f"{self._paths.incarnation} cannot be listed: {error}")
            self._missing_since = None  # then what was missing a moment ago is of the same fault
            return
        if newest >= self._incarnation or (self._config is not None and self._config_file() == self._config):
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = now
            logger.warning(f"{self._paths.root} does not hold attempt {self._incarnation} any more: deleted or moved?")
        if now - self._missing_since >= (SURE_S if self._is_folder_there() else max(SURE_S, self._unseen_s)):
            self.is_fenced = self.is_gone = True
            raise Ended(EXIT_GONE, gone_words(self._paths, self._incarnation))

    def true_end(self, ended: Ended) -> Ended:
        """Return the end as it truly is: what fails after a newer attempt has begun, or without the run directory,
        fails because of it."""
        began = self._clock()
        try:
            while True:
                self.look(at_once=True)
                if self._missing_since is None or self._clock() - began > SURE_S:
                    return ended
                self._sleep(POLL_S)
        except Ended as fenced:
            return fenced

    def _is_folder_there(self) -> bool:
        """Return whether the folder of the runs answers as it did, or was deleted: what is not there is gone."""
        return self._device is not None and self._folders_device() == self._device

    def _config_file(self) -> tuple[int, int] | None:
        """Return which file `run.yaml` is: while it is the one that the attempt began with, its number may have been
        purged from scratch, but the run directory is there."""
        try:
            found = (self._paths.root / RUN_YAML).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _folders_device(self) -> int | None:
        """Return the device of the folder of the runs; of what is left above it, where it was deleted too: below a
        mount point that is none any more that is another one."""
        for folder in self._paths.root.parents:
            try:
                return folder.stat().st_dev
            except FileNotFoundError:
                continue
            except OSError:
                break
        return None


def gone_words(paths: RunPaths, incarnation: int) -> str:
    """Say that a run directory is gone, and what to do."""
    return (
        f"{paths.root} was deleted or moved while the run wrote there (it holds no incarnation/{incarnation:06d} any "
        "more): the run ends, and does not come back by itself. Where it was moved to, `prime-hpc resume` goes on from "
        "its newest checkpoint; what came after the move lies at the old place, if anywhere, and is of no run"
    )
