"""Where prompts come from: one verifiers taskset per environment, its tasks numbered 0, 1, 2 ... and split.

Made by `prime_hpc.envs.pool`; the orchestrator reads `name`, `ratio` and `num_tasks`.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import is_one_list
from prime_hpc.envs.resolve import build_env_config

Split = Literal["train", "eval"]

HOLD_OUT = 10
"""Of a list of tasks that is trained and evaluated on, every tenth task (9, 19, 29 ...) is evaluated."""


class EnvSource:
    """One environment's tasks. The same config and seed always give the same tasks in the same order.

    Which tasks a split holds: a taskset with a `split` argument decides itself, unless `args` state one (those that
    prime-hpc ships split by a hash of the text, so that no seed can mix them). Where that leaves both splits with the
    same list of tasks, `eval` is every tenth of them and `train` the rest.
    """

    def __init__(self, config: EnvConfig, split: Split, seed: int, *, beside: Sequence[EnvConfig] = ()) -> None:
        """Find the taskset and load its tasks (an infinite one's are made as they are asked for).

        Args:
            config: the environment.
            split: which tasks.
            seed: for tasksets that take one.
            beside: the environments of the other split, none where that is not used.

        Raises:
            EnvError: not installed, wrong arguments, no tasks, or loading fails.
        """
        from verifiers.v1.utils.loaders import load_environment

        self.config = config
        self.name: str = config.name or config.id
        self.ratio: float = config.ratio
        self.split = split
        self.env_config = build_env_config(config, split, seed)
        others = [build_env_config(other, "eval" if split == "train" else "train", seed) for other in beside]
        self._part: Split | None = split if any(is_one_list(self.env_config, other) for other in others) else None
        self._chosen: list[int] | None = None
        try:
            self.env: Any = load_environment(self.env_config)
            self._tasks: list[Any] = []
            self._more: Iterator[Any] | None = None
            if self.env.taskset.bounded:
                self._tasks = list(self.env.taskset)
            else:
                self._more = iter(self.env.taskset)
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"environment {self.name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        self.num_tasks: int | None = None if self._more is not None else self._count(len(self._tasks))
        if self.num_tasks == 0:
            raise EnvError(f"environment {self.name!r} has no tasks in its {split} split")

    def task(self, index: int) -> Any:
        """The verifiers task number `index` of this split.

        Raises:
            IndexError: there is none.
        """
        if index < 0 or (self.num_tasks is not None and index >= self.num_tasks):
            raise IndexError(f"environment {self.name!r} has tasks 0..{(self.num_tasks or 0) - 1}, not {index}")
        position = self._position(index if self._chosen is None else self._chosen[index])
        if self._more is not None and position >= len(self._tasks):
            self._tasks.extend(itertools.islice(self._more, position + 1 - len(self._tasks)))
        return self._tasks[position]

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
        """Where task `index` of this split stands in the taskset."""
        if self._part is None:
            return index
        small = self._more is None and len(self._tasks) < HOLD_OUT  # then the last task alone is held out
        if self._part == "eval":
            return len(self._tasks) - 1 if small else index * HOLD_OUT + HOLD_OUT - 1
        return index if small else index + index // (HOLD_OUT - 1)
