"""The prompt stream: which task comes next, deterministically, and what a resumed run must dispatch again.

A *prompt* is one position p = 0, 1, 2, ... of an endless stream over all training environments. Every position ends
in exactly one of: used in a batch, dropped (its group had too few usable rollouts, or a gate rejected it), or still to
be dispatched. The state that is stored with batch n holds the cursor and the positions below it that are neither used
in batches <= n nor dropped; a run that resumes at n dispatches those first. Pure: no clock, no files. Driven by
`dispatcher` and `loop`.

The environment of a position follows from the ratios. Its task is the next one of the environment's shuffled walk, or
what a curriculum's sampler chooses; a chosen task stays with its position and is part of the state.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_hpc.orchestrator.errors import OrchestratorError

STATE_FORMAT = 1


@dataclass(frozen=True)
class SourceInfo:
    """Facts of an environment that the stream needs: label, share of the prompts, number of tasks (None: endless)."""

    name: str
    ratio: float
    num_tasks: int | None

    def __post_init__(self) -> None:
        if self.num_tasks is not None and self.num_tasks < 1:
            raise OrchestratorError(f"environment {self.name!r} has no tasks: check its `args`")


@dataclass(frozen=True, order=True)
class Prompt:
    """One position of the stream: the `ordinal`-th prompt drawn from `source`, which is its task number `task`."""

    position: int
    source: int
    ordinal: int
    task: int


@dataclass(frozen=True)
class Draw:
    """A sampler's decision: the task of one new position."""

    seed: int
    source: int
    env: str
    ordinal: int
    """How many positions this source has had before."""
    num_tasks: int | None
    """None: endless, every step of the walk is a new task."""
    walk: Callable[[int], int]
    """Task at step k = 0, 1, 2, ... of the source's walk: each task once an epoch, every epoch shuffled anew."""


def shuffled_tasks(num_tasks: int, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """Permutation int64[num_tasks] of one epoch, by sorting hashes: the same on every machine and numpy version."""
    hashes = _mix(np.arange(num_tasks, dtype=np.uint64) + mixed(0, seed, source, epoch))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def mixed(start: int, *words: int) -> NDArray[np.uint64]:
    """Hash of whole numbers, uint64[1], the same on every machine."""
    key = np.full(1, start, dtype=np.uint64)
    for word in words:
        key = _mix(key + np.uint64(word & 0xFFFFFFFFFFFFFFFF) + np.uint64(0x9E3779B97F4A7C15))
    return key


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014), wrapping (arrays wrap in silence, scalars would warn)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PromptStream:
    """Draws prompts and remembers those that must be drawn again. All calls are O(1) but the start of an epoch."""

    def __init__(self, sources: Sequence[SourceInfo], seed: int, choose: Callable[[Draw], int] | None = None) -> None:
        """`choose` gives the task of a new position; None: the walk's task at the position's ordinal."""
        if not sources:
            raise OrchestratorError("no training environment: set `orchestrator.env`")
        self.sources = tuple(sources)
        self.seed = seed
        self._choose = choose
        self.cursor = 0
        """Positions below it were drawn at least once."""
        self._counts = [0] * len(self.sources)
        self._credits = [0.0] * len(self.sources)
        self._pending: deque[Prompt] = deque()
        self._epochs: dict[int, tuple[int, NDArray[np.int64]]] = {}

    @property
    def num_pending(self) -> int:
        """Prompts that wait to be dispatched again."""
        return len(self._pending)

    def next(self) -> Prompt:
        """Return the next prompt: one that must be dispatched again, else the stream's next position."""
        if self._pending:
            return self._pending.popleft()
        source = self._next_source()
        prompt = self._drawn(self.cursor, source, self._counts[source])
        self._counts[source] += 1
        self.cursor += 1
        return prompt

    def put_back(self, prompt: Prompt) -> None:
        """Dispatch this prompt again, before all others (its rollouts were stale or lost)."""
        self._pending.appendleft(prompt)

    def state_dict(self, outstanding: Sequence[Prompt]) -> dict[str, Any]:
        """JSON-able state; `outstanding` are the prompts in flight or in complete groups that no batch holds yet."""
        pending = sorted([*self._pending, *outstanding])
        # Without a sampler the ordinal says the task.
        chosen = {"tasks": [p.task for p in pending]} if self._choose is not None else {}
        return {
            "format": STATE_FORMAT,
            "seed": self.seed,
            "sources": [[s.name, s.num_tasks] for s in self.sources],
            "cursor": self.cursor,
            "counts": list(self._counts),
            "credits": list(self._credits),
            "pending": [[p.position, p.source, p.ordinal] for p in pending],
            **chosen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that the state was stored with. Raises OrchestratorError if environments changed."""
        if state.get("format") != STATE_FORMAT:
            found = state.get("format")
            raise OrchestratorError(f"orchestrator state has format {found}, this version reads {STATE_FORMAT}")
        here = [[s.name, s.num_tasks] for s in self.sources]
        for what, then, now in (("environments", state["sources"], here), ("seed", state["seed"], self.seed)):
            if then != now:
                raise OrchestratorError(
                    f"cannot resume: {what} were {then} when the checkpoint was written and are {now} now; "
                    "a resumed run could skip or repeat prompts (resume with the same ones, or start a new run)"
                )
        self.cursor = state["cursor"]
        self._counts = list(state["counts"])
        self._credits = list(state["credits"])
        pending = state["pending"]
        tasks = state.get("tasks") or [self._walk(source, ordinal) for _, source, ordinal in pending]
        self._pending = deque(Prompt(p, s, o, task) for (p, s, o), task in zip(pending, tasks, strict=True))

    def _next_source(self) -> int:
        """Smooth weighted round robin: ratios hold over every short stretch, and may change at a resume."""
        total = sum(s.ratio for s in self.sources)
        for i, source in enumerate(self.sources):
            self._credits[i] += source.ratio / total
        best = max(range(len(self.sources)), key=lambda i: (self._credits[i], -i))
        self._credits[best] -= 1.0
        return best

    def _drawn(self, position: int, source: int, ordinal: int) -> Prompt:
        if self._choose is None:
            return Prompt(position, source, ordinal, self._walk(source, ordinal))
        info = self.sources[source]
        draw = Draw(self.seed, source, info.name, ordinal, info.num_tasks, partial(self._walk, source))
        task = self._choose(draw)
        if task < 0 or (info.num_tasks is not None and task >= info.num_tasks):
            raise OrchestratorError(
                f"orchestrator.curriculum.sampler chose task {task} of {info.name}, which has "
                f"{info.num_tasks if info.num_tasks is not None else 'endless'} tasks, numbered from 0"
            )
        return Prompt(position, source, ordinal, task)

    def _walk(self, source: int, step: int) -> int:
        num_tasks = self.sources[source].num_tasks
        if num_tasks is None:
            return step
        epoch, index = divmod(step, num_tasks)
        if self._epochs.get(source, (-1,))[0] != epoch:
            self._epochs[source] = (epoch, shuffled_tasks(num_tasks, self.seed, source, epoch))
        return int(self._epochs[source][1][index])
