"""Many experiments that differ from one in a few keys: the sources are read once, each variant adds to them."""

import copy
from collections.abc import Iterable

from prime_hpc.config.errors import Problem
from prime_hpc.config.sources.counts import derive_counts
from prime_hpc.config.sources.flags import Entry
from prime_hpc.config.sources.job_shapes import lay_shape
from prime_hpc.config.sources.load import Loaded
from prime_hpc.config.sources.tree import Tree
from prime_hpc.config.validate import check_complete

ENTRYPOINT = "submit"


class Variants:
    """The base of all variants: statements of every source, laid over each other in order of precedence."""

    def __init__(
        self,
        entries: Iterable[Entry],
        problems: Iterable[Problem] = (),
        warnings: Iterable[str] = (),
        *,
        is_begun: bool = False,
    ) -> None:
        """Lay the base.

        Args:
            entries: statements of all sources, lowest precedence first.
            is_begun: see `check_complete`.
        """
        self._is_begun = is_begun
        self._tree = Tree(problems)
        self._tree.warnings += warnings
        entries = list(entries)
        self._tree.place(entries)
        typed = [entry for entry in entries if entry.origin.source == "command line"]
        lay_shape(self._tree, typed)  # the one in force; a sweep takes no other
        self._tree.problems += derive_counts(self._tree.values, self._tree.provenance)

    @property
    def problems(self) -> list[Problem]:
        """Problems of the base, hence with every variant."""
        return self._tree.problems

    @property
    def stated(self) -> dict[str, object]:
        """A copy of the values that the base states; keys at their default are absent, `${...}` is as written."""
        return copy.deepcopy(self._tree.values)

    def variant(self, entries: Iterable[Entry]) -> Loaded:
        """Return the base with these statements on top, checked.
        Raises ConfigError: with everything that is wrong, in the base too."""
        tree = self._tree.copy()
        tree.place(entries)
        experiment = tree.experiment()
        check_complete(experiment, ENTRYPOINT, tree.provenance, is_begun=self._is_begun)
        return Loaded(experiment, tree.provenance, [], ENTRYPOINT, [*self._tree.warnings, *tree.warnings])
