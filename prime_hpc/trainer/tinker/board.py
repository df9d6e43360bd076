"""Operations on their way from the event loop to the ranks, and their results on the way back. Rank 0 only.

    event loop --put--> [a line for each adapter] --take--> main thread, all ranks --done--> event loop

Of one adapter operations are done in the order of the client's numbers (`service` sees to that); between adapters the
fair queue of the many-runs trainer decides, by tokens. An adapter that is to be created waits until a slot is free.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from prime_hpc.trainer.multi.fair_queue import FairQueue


class Kind(StrEnum):
    """Kind of an operation."""

    CREATE = "create"
    PASS = "pass"
    UPDATE = "update"
    SAVE = "save"
    PUBLISH = "publish"
    LOAD = "load"
    REFUSE = "refuse"
    """Nothing is done, but in its turn: the request was wrong."""
    REMOVE = "remove"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True)
class Operation:
    """One thing to do, on all ranks."""

    kind: Kind
    model_id: str = ""
    request_id: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    slot: int = -1
    """Of a creation: given by `take`."""
    number: int = 0
    """Of a save: given by the worker."""


@dataclass(frozen=True)
class Failure:
    """An operation that was not done."""

    message: str
    is_user: bool
    """True if the request was wrong; else it is this service's trouble."""


class Board:
    """The lines, the slots, and who is next. Safe between the two threads."""

    def __init__(self, num_slots: int, deliver: Callable[[Operation, Any], None]) -> None:
        """`deliver(operation, result)` is called in the main thread."""
        self._changed = threading.Condition()
        self._lines: dict[str, deque[Operation]] = {}
        self._free = list(range(num_slots))
        self._slot_of: dict[str, int] = {}
        self._queue = FairQueue(num_slots)
        self._deliver = deliver

    def put(self, operation: Operation) -> None:
        """Add an operation at the end of its adapter's line; a removal at its head."""
        with self._changed:
            if operation.model_id not in self._lines:
                self._lines[operation.model_id] = deque()
                self._queue.add(operation.model_id)
            if operation.kind is Kind.REMOVE:
                self._lines[operation.model_id].appendleft(operation)
            else:
                self._lines[operation.model_id].append(operation)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Operation | None:
        """Return the next operation; None after so many seconds without one."""
        with self._changed:
            chosen = self._choose()
            if chosen is None:
                self._changed.wait(timeout_s)
                chosen = self._choose()
            return chosen

    def _choose(self) -> Operation | None:
        ready = {m for m, line in self._lines.items() if line and (line[0].kind is not Kind.CREATE or self._free)}
        model = self._queue.choose(ready)
        if model is None:
            return None
        operation = self._lines[model].popleft()
        self._queue.trained(model, operation.num_tokens, ready)
        if operation.kind is Kind.CREATE:
            self._slot_of[model] = self._free.pop(0)
            operation = replace(operation, slot=self._slot_of[model])
        return operation

    def has_slot(self, model_id: str) -> bool:
        """Return whether an adapter is in training, and not only in line."""
        with self._changed:
            return model_id in self._slot_of

    def leave(self, model_id: str) -> list[Operation]:
        """Free the slot of an adapter that is gone; returns what was still in its line."""
        with self._changed:
            left = list(self._lines.pop(model_id, ()))
            self._queue.remove(model_id)
            slot = self._slot_of.pop(model_id, None)
            if slot is not None:
                self._free.append(slot)
            self._changed.notify_all()
            return left

    def done(self, operation: Operation, result: Any) -> None:
        """Hand a result to whoever asked."""
        self._deliver(operation, result)
