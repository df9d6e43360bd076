"""An attempt's look for a newer one of its run, after whose beginning it may change nothing any more."""

from collections.abc import Callable

from loguru import logger

from prime_hpc.store.attempts import Ended
from prime_hpc.store.errors import FencedError
from prime_hpc.store.run_paths import RunPaths, check_incarnation


class Fence:
    """One attempt's.

    Args:
        paths: the run.
        incarnation: of the attempt.
        look_s: pause between two looks.
        clock: of the supervisor, seconds.
    """

    def __init__(self, paths: RunPaths, incarnation: int, look_s: float, clock: Callable[[], float]) -> None:
        self._paths, self._incarnation, self._look_s, self._clock = paths, incarnation, look_s, clock
        self._next_look = 0.0
        self.is_fenced = False

    def look(self) -> None:
        """Raise Ended where a newer attempt of the run has begun elsewhere."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + self._look_s
        try:
            check_incarnation(self._paths, self._incarnation)
        except FencedError as error:
            self.is_fenced = True
            raise Ended(1, str(error)) from error
        except OSError as error:  # the file system does not answer: whoever writes will see
            logger.warning(f"{self._paths.incarnation} cannot be listed: {error}")

    def true_end(self, ended: Ended) -> Ended:
        """Return the end as it truly is: what fails after a newer attempt has begun fails because of it."""
        self._next_look = 0.0
        try:
            self.look()
        except Ended as fenced:
            return fenced
        return ended
