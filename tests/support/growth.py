"""Find what a process never forgets: containers that gain entries, and objects that become more, with every step.

`python -m tests.support.growth RUN_DIR` is a role that looks at itself: `PRIME_HPC_GROWTH` says which one, at which
steps, and where to write what it found ("prime_hpc.trainer.main 30 60 90 /tmp/found.json"). Counts do not depend on the
machine, as memory does, nor on how long a step takes.
"""

import gc
import importlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

VARIABLE = "PRIME_HPC_GROWTH"
CONTAINERS = (dict, list, set, deque)
STEPS = [8, 16, 24, 32, 40]
"""When a role is looked at: what goes up and down is above the look before four times in a row once in a hundred."""


def limit_caches(most: int = 16) -> None:
    """Have caches be full after a few steps: then they may not grow any more."""
    from prime_hpc.envs import rendering
    from prime_hpc.envs.patches import lookups
    from prime_hpc.orchestrator.rollouts import carried

    rendering.MAX_TEXTS = rendering.CACHE_PROMPTS = lookups.MAX_DECODED = carried.MOST_STATES = most


class Growth:
    """Looks at this process now and then."""

    def __init__(self, steps: list[int]) -> None:
        """`steps`: when to look, at least three, of equal distance."""
        assert len(steps) >= 3, steps
        self._steps, self._every = steps, steps[1] - steps[0]
        self._kept: list[Any] = []
        """All containers of the first look."""
        self._lengths: list[list[int]] = []
        self._counts: list[Counter[type]] = []
        self.found: list[str] | None = None
        """After the last look: what has grown by an entry a step, or more, from each look to the next."""

    def look(self, step: int) -> None:
        """Look where it is time to."""
        if len(self._lengths) == len(self._steps) or step < self._steps[len(self._lengths)]:
            return
        gc.unfreeze()
        gc.collect()
        alive = gc.get_objects()
        self._counts.append(Counter(map(type, alive)))
        if not self._lengths:
            own = {id(self._lengths), id(self._counts), id(self.__dict__)}
            # A dictionary of numbers is no object of the collector's: its owner is.
            found = {id(one): one for one in containers((*alive, *gc.get_referents(*alive))) if id(one) not in own}
            self._kept = list(found.values())
        del alive
        self._lengths.append([len(one) for one in self._kept])
        if len(self._lengths) == len(self._steps):
            self.found = [*self._containers(), *self._types()]
            self._kept.clear()
        gc.freeze()  # or each collection until the next look goes through all of it

    def _containers(self) -> list[str]:
        sizes = zip(self._kept, zip(*self._lengths, strict=True), strict=True)
        grown = [
            (one, of_it) for one, of_it in sizes if self._has_grown(of_it) and getattr(one, "maxlen", None) is None
        ]
        return [f"{_owner(one)}: {of_it[0]} entries, then {of_it[-1]}" for one, of_it in grown]

    def _types(self) -> list[str]:
        first, last = self._counts[0], self._counts[-1]
        return [
            f"objects of {_name(kind)}: {first[kind]}, then {last[kind]}"
            for kind in last
            if _name(kind).startswith("prime_hpc.") and self._has_grown([counts[kind] for counts in self._counts])
        ]

    def _has_grown(self, sizes: Sequence[int]) -> bool:
        return all(after - before >= self._every for before, after in pairwise(sizes))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def containers(objects: Iterable[Any]) -> Iterator[Any]:
    """Those that gain entries. `isinstance` would ask each object, and some do things then."""
    kinds: dict[type, bool] = {}
    for one in objects:
        kind = type(one)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, CONTAINERS)
        if kinds[kind]:
            yield one


def _owner(container: Any) -> str:
    """Name the attribute, or the variable of a module, under which a container is kept."""
    for one in gc.get_referrers(container):
        if not issubclass(type(one), dict) and not hasattr(one, "__dict__"):
            continue
        names = one if issubclass(type(one), dict) else vars(one)
        name = next((key for key, value in list(names.items()) if value is container and isinstance(key, str)), "")
        if name:
            owners = [one] if names is not one else [o for o in gc.get_referrers(one) if _owns(o, one)]
            owner = _name(type(owners[0])) if owners else str(one.get("__name__", "a dictionary"))
            return f"{owner}.{name}"
    return f"a {type(container).__name__} with {str(next(iter(container), ''))[:80]}"


def _owns(one: Any, attributes: dict[str, Any]) -> bool:
    return getattr(one, "__dict__", None) is attributes


def main() -> None:
    """Be the role."""
    from prime_hpc.observe.metrics import MetricsWriter
    from prime_hpc.store.role_process import leave

    module, *steps, out = os.environ[VARIABLE].split()
    role = importlib.import_module(module)
    limit_caches()
    growth = Growth([int(step) for step in steps])
    log = MetricsWriter.log

    def logged(writer: MetricsWriter, step: int, **values: Any) -> None:
        log(writer, step, **values)
        growth.look(step)
        if growth.found is not None:
            Path(out).write_text(json.dumps(growth.found))

    MetricsWriter.log = logged  # type: ignore[method-assign, assignment]
    leave(role.main())


if __name__ == "__main__":
    main()
