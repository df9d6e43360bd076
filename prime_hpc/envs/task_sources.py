"""Sources of prompts: one verifiers taskset per environment, its tasks numbered 0, 1, 2 ... and split.

Made by `prime_hpc.envs.pool`; the orchestrator reads `name`, `ratio` and `num_tasks`.
"""

import contextlib
import itertools
import json
import pickle
import threading
import time
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.env_config import build_env_config, sandbox_of
from prime_hpc.envs.errors import EnvError

Split = Literal["train", "eval"]

HOLD_OUT = 10
"""Of a list of tasks that is trained and evaluated on, every tenth task (9, 19, 29 ...) is evaluated."""


WINDOW = 4096
"""Tasks of an endless taskset that are kept, the newest ones."""
FAR = 256
"""So many tasks may take long to make."""
BUSY_S = 30.0
"""For so long a thread waits for another one to make one more task, which may never end."""


class EndlessTasks:
    """An endless taskset's tasks by number. What is older than the window is made again, from the first one on."""

    def __init__(self, taskset: Iterable[Any], name: str) -> None:
        self._taskset, self._name = taskset, name
        self._lock = threading.RLock()  # which knows whose it is
        """Episodes make tasks on the thread of environments, others look at some on theirs."""
        self._start()

    def _start(self) -> None:
        self._more: Iterator[Any] = iter(self._taskset)
        self._made = 0
        self._kept: deque[Any] = deque(maxlen=WINDOW)
        self._end = ""
        """Why no further one can be made."""

    def is_far(self, number: int) -> bool:
        """Return whether many others must be made before this one."""
        made = self._made if number >= self._made - len(self._kept) else 0
        return number - made > FAR

    def __getitem__(self, number: int) -> Any:
        made = self._made
        try:
            while not self._lock.acquire(timeout=BUSY_S):
                if made == self._made:
                    reason = f"another task of it was made for more than {BUSY_S:g} s"
                    raise EnvError(f"environment {self._name!r}: {reason}")
                made = self._made
            if number < self._made - len(self._kept):
                self._start()
            while self._made <= number:
                self._kept.append(self._next())
                self._made += 1
            return self._kept[number - self._made]
        finally:
            with contextlib.suppress(RuntimeError):  # another thread's; interrupted as it waited, it may have it or not
                self._lock.release()

    def _next(self) -> Any:
        """Make the next task. Raises EnvError where that fails, from then on: what has raised makes no more."""
        try:
            task = None if self._end else next(self._more, None)
        except (Exception, SystemExit) as error:  # a taskset's code, which raises anything
            self._end = f"task {self._made} cannot be made: {type(error).__name__}: {error}"
            raise self._error() from error
        except BaseException:  # interrupted, for it kept the loop of all episodes: the next one begins anew
            self._start()
            raise
        if task is None:  # no StopIteration: on a thread nobody would hear of it
            self._end = self._end or f"the taskset says that it is endless, and ends after {self._made} tasks"
            raise self._error()
        return task

    def _error(self) -> EnvError:
        return EnvError(f"environment {self._name!r}: {self._end}")


@runtime_checkable
class OfAnyNumber(Protocol):
    """A taskset of a user's data, which may have millions of tasks: they differ in their data alone."""

    differ_in_data: Literal[True]


def prompt_of(task: Any) -> str:
    """Return a task's prompt as text."""
    prompt = task.data.prompt
    return prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)


class PackedTasks:
    """A long list's tasks by number, each made when it is taken: as objects a row costs 4 KiB, packed a tenth of it."""

    BLOCK = 32
    """Tasks that are packed together: what one that is taken costs, against what the texts have in common."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        found = iter(tasks)
        self._blocks: list[bytes] = []
        self._unpacked: tuple[int, list[bytes]] = (-1, [])
        self._like: Any = None
        self._len = 0
        self.prompts = array("q")
        """A hash of each one's prompt, of this process."""
        while block := list(itertools.islice(found, self.BLOCK)):
            self._like = self._like or block[0]
            usual = self._like.data.__dict__  # what it shares with the first one, such as defaults, is not stored
            own = [{k: v for k, v in task.data.__dict__.items() if v is not usual.get(k)} for task in block]
            self.prompts.extend(hash(prompt_of(task)) for task in block)
            self._blocks.append(zlib.compress(pickle.dumps([pickle.dumps(each) for each in own]), 1))
            self._len += len(block)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self._len:
            raise IndexError(f"there are {self._len} tasks, none has the number {number}")
        block, place = divmod(number, self.BLOCK)
        at, packed = self._unpacked  # one of them: several threads may take tasks
        if at != block:
            packed = pickle.loads(zlib.decompress(self._blocks[block]))
            self._unpacked = (block, packed)
        return self._like.with_data(**pickle.loads(packed[place]))


_SHARED: "weakref.WeakValueDictionary[str, PackedTasks]" = weakref.WeakValueDictionary()
"""Lists that both splits take their tasks from, by the taskset's settings, as long as one of them has it."""


def _packed(taskset: Any, is_shared: bool) -> PackedTasks:
    """Return a taskset's tasks; those of both splits are read once."""
    key = f"{type(taskset).__module__} {taskset.config.model_dump_json()}"
    found = _SHARED.get(key) if is_shared else None
    if found is None:
        found = PackedTasks(taskset)
        if is_shared:
            _SHARED[key] = found
    return found


class EnvSource:
    """One environment's tasks. The same config and seed always give the same tasks in the same order.

    Which tasks a split holds: a taskset with a `split` argument decides itself, unless `args` state one (those that
    prime-hpc ships split by a hash of the text, so that no seed can mix them). Where that leaves both splits with the
    same list of tasks, `eval` is every tenth of them and `train` the rest.
    """

    def __init__(self, config: EnvConfig, split: Split, seed: int, *, beside: Sequence[EnvConfig] = ()) -> None:
        """Find the taskset and load its tasks (an infinite one's are made as they are asked for, see `EndlessTasks`).
        `beside`: the environments of the other split, none where that is not used.
        Raises EnvError: not installed, wrong arguments, no tasks, or loading fails."""
        from verifiers.v1.utils.loaders import load_environment

        self.config = config
        self.name = config.label
        self.ratio: float = config.ratio
        self.split = split
        began = time.monotonic()
        self.env_config = build_env_config(config, split, seed)
        self.sandbox = sandbox_of(config)
        """Of its episodes; None: what they run, they run as this process does."""
        others = [build_env_config(other, "eval" if split == "train" else "train", seed) for other in beside]
        # One split, seed and arguments: the same tasks in the same order.
        is_shared = any(self.env_config.taskset == other.taskset for other in others)
        self._part: Split | None = split if is_shared else None
        if "played_as" in type(self.env_config.taskset).model_fields:
            self.env_config.taskset.played_as = split
        self._chosen: list[int] | None = None
        try:
            self.env: Any = load_environment(self.env_config)
            taskset = self.env.taskset
            self._tasks: list[Any] | PackedTasks | EndlessTasks
            if not taskset.bounded:
                self._tasks = EndlessTasks(taskset, self.name)
            elif isinstance(taskset, OfAnyNumber):
                self._tasks = _packed(taskset, is_shared)
            else:
                self._tasks = list(taskset)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:  # other people's code
            raise EnvError(f"environment {self.name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        self.load_s = time.monotonic() - began
        """For which it was imported and its tasks were loaded."""
        tasks = self._tasks
        self.num_tasks: int | None = None if isinstance(tasks, EndlessTasks) else self._count(len(tasks))
        self.total_tasks = self.num_tasks
        """Of the whole split."""
        if self.num_tasks == 0:
            raise EnvError(f"environment {self.name!r} has no tasks in its {split} split")

    def task(self, index: int) -> Any:
        """Return the verifiers task number `index` of this split. Raises IndexError: there is none."""
        return self.task_number(self.number(index))

    def number(self, index: int) -> int:
        """Return the number of a task in the whole split, of which `choose` may have kept a part.
        Raises IndexError: there is none."""
        if index < 0 or (self.num_tasks is not None and index >= self.num_tasks):
            raise IndexError(f"environment {self.name!r} has tasks 0..{(self.num_tasks or 0) - 1}, not {index}")
        return index if self._chosen is None else self._chosen[index]

    def task_number(self, number: int) -> Any:
        """Return a task by its number in the whole split."""
        return self._tasks[self._position(number)]

    def may_ask(self, prompts: Iterable[str]) -> Iterator[int]:
        """Yield the tasks of a bounded split that may have one of these prompts: all, where looking at one is how to
        know."""
        tasks, hashes = self._tasks, {hash(prompt) for prompt in prompts}
        for index in range(self.num_tasks or 0):
            if not isinstance(tasks, PackedTasks) or tasks.prompts[self._position(self.number(index))] in hashes:
                yield index

    def is_far(self, number: int) -> bool:
        """Return whether `task_number(number)` may take long: an endless taskset must make many others first."""
        return isinstance(self._tasks, EndlessTasks) and self._tasks.is_far(self._position(number))

    def choose(self, indices: Sequence[int]) -> None:
        """Keep these tasks of the split alone, numbered in this order."""
        self._chosen, self.num_tasks = list(indices), len(indices)

    def _count(self, total: int) -> int:
        """Tasks of this split, of `total` in the taskset."""
        if self._part is None or total == 0:
            return total
        if total == 1:
            raise EnvError(
                f"environment {self.name!r} has one task, which cannot be both trained and evaluated on: name others "
                "in orchestrator.eval.env, or leave orchestrator.eval out"
            )
        held_out = max(1, total // HOLD_OUT)
        return held_out if self._part == "eval" else total - held_out

    def _position(self, index: int) -> int:
        """Return where task `index` of this split stands in the taskset."""
        if self._part is None:
            return index
        total = HOLD_OUT if isinstance(self._tasks, EndlessTasks) else len(self._tasks)
        small = total < HOLD_OUT  # then the last task alone is held out
        if self._part == "eval":
            return total - 1 if small else index * HOLD_OUT + HOLD_OUT - 1
        return index if small else index + index // (HOLD_OUT - 1)
