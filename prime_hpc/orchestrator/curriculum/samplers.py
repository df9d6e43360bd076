"""Task samplers: which task of an environment comes next. `curriculum` makes the one that the config names."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from prime_hpc.config.named_code import import_object
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.curriculum import SamplerConfig
from prime_hpc.orchestrator.curriculum.base import CompletedGroup, TaskSampler, make_object
from prime_hpc.orchestrator.rollouts.prompts import Draw, mixed

MAX_SKIPS = 1000
"""Tasks passed over for one draw at most; the next one is taken whatever its pool is."""

KEY = "orchestrator.curriculum.sampler.type"


_NORMAL, _EASY, _HARD = range(3)
_EMPTY = base64.b64encode(zlib.compress(b""))


@dataclass
class _Pools:
    """Easy and hard tasks of one environment."""

    walk: int
    """Next step of the environment's shuffled walk."""
    pool_of: bytearray = field(default_factory=bytearray)
    """By task; `_NORMAL`, or beyond its end: of normal difficulty, or never seen."""

    def put(self, task: int, pool: int) -> None:
        if task >= len(self.pool_of):
            self.pool_of.extend(bytes(max(task + 1, 2 * len(self.pool_of)) - len(self.pool_of)))
        self.pool_of[task] = pool

    def of(self, task: int) -> int:
        return self.pool_of[task] if task < len(self.pool_of) else _NORMAL

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, which is stored with every batch: of a million tasks a third of a megabyte."""
        packed = zlib.compress(self.pool_of.rstrip(b"\0"), level=1)
        return {"walk": self.walk, "pools": base64.b64encode(packed).decode("ascii")}

    @classmethod
    def load(cls, state: dict[str, Any]) -> "_Pools":
        """Take up what `state_dict` gave, or the lists of version 0.1.0."""
        pools = cls(state["walk"], bytearray(zlib.decompress(base64.b64decode(state.get("pools", _EMPTY)))))
        for name, pool in (("easy", _EASY), ("hard", _HARD)):
            for task in state.get(name, []):
                pools.put(task, pool)
        return pools


class DifficultyPool:
    """Walks through the tasks as the standard order does, but passes over easy and hard ones now and then.

    A task is easy (hard) while the mean reward of its latest group is at or above `easy_above` (at or below
    `hard_below`). Whether step k of the walk is passed over is decided by a hash of (seed, source, k), so the tasks
    that are drawn follow from the seed and the rewards observed until then. At most one epoch, and `MAX_SKIPS` tasks,
    are passed over in one draw.
    """

    def __init__(self, config: SamplerConfig, env_names: Sequence[str]) -> None:
        self._config, self._env_names = config, env_names
        self._pools: dict[int, _Pools] = {}
        self._endless: set[int] = set()
        self._draws = self._skipped = self._forced = 0

    def choose(self, draw: Draw) -> int:
        """Return the next task of the walk that is not passed over."""
        self._draws += 1
        if draw.num_tasks is None:
            if draw.source not in self._endless:
                self._endless.add(draw.source)
                logger.warning(
                    f"orchestrator.curriculum: {draw.env} is endless, no task of it comes twice; difficulty_pool "
                    "changes nothing there"
                )
            return draw.walk(draw.ordinal)
        # A run that begins to use pools at a resume goes on where the standard order was.
        pools = self._pools.setdefault(draw.source, _Pools(draw.ordinal))
        last = pools.walk + min(MAX_SKIPS, draw.num_tasks)
        for step in range(pools.walk, last + 1):
            task = draw.walk(step)
            probability = self._probability(pools, task)
            if probability >= 1.0 or unit_hash(draw.seed, draw.source, step) < probability:
                break
            self._skipped += step < last
            self._forced += step == last
        pools.walk = step + 1
        return task

    def observe(self, group: CompletedGroup) -> None:
        """Move the task into the pool of its latest mean reward."""
        pools = self._pools.get(group.source)
        if pools is None:  # endless, or drawn by an earlier attempt without pools
            return
        mean = float(group.rewards.mean())
        is_easy, is_hard = mean >= self._config.easy_above, mean <= self._config.hard_below
        pools.put(group.task, _EASY if is_easy else _HARD if is_hard else _NORMAL)

    def _probability(self, pools: _Pools, task: int) -> float:
        return (1.0, self._config.easy_probability, self._config.hard_probability)[pools.of(task)]

    def state_dict(self) -> dict[str, Any]:
        """Return where each environment's walk is, and its easy and hard tasks."""
        return {str(source): pools.state_dict() for source, pools in self._pools.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave. Other thresholds count from each task's next group on."""
        self._pools = {int(source): _Pools.load(entry) for source, entry in state.items()}

    def metrics(self) -> dict[str, float]:
        """Pool sizes now; draws and tasks passed over since the last call."""
        row: dict[str, float] = {"draws": self._draws, "skipped": self._skipped, "forced": self._forced}
        for source, pools in self._pools.items():
            name = self._env_names[source]
            row |= {f"{name}/easy": pools.pool_of.count(_EASY), f"{name}/hard": pools.pool_of.count(_HARD)}
        self._draws = self._skipped = self._forced = 0
        return row


def make_sampler(config: SamplerConfig, env_names: Sequence[str]) -> TaskSampler | None:
    """Return the sampler that the config describes; None for the stream's standard order.
    Raises ConfigError: your own cannot be imported or made."""
    if config.type == "standard":
        return None
    if config.type == "difficulty_pool":
        return DifficultyPool(config, env_names)
    return make_object(import_object(config.type, KEY), revealed(config.args), "choose", KEY)


def unit_hash(*words: int) -> float:
    """Return a number in [0, 1) that depends on all words, the same on every machine."""
    return (int(mixed(0x5EED, *words)[0]) >> 11) / 2**53
