"""One run's sampler and gates, what they remember, and what is counted. Driven by `loop`.

A group is heard of once it is terminal: as it is rejected, or as it joins a batch. What is stored with batch n so
follows from the batches up to n and from what was rejected before it, and a resumed run hears of each position once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from loguru import logger

from prime_hpc.config.sections.curriculum import CurriculumConfig
from prime_hpc.orchestrator.curriculum.base import CompletedGroup, load_state, state_of
from prime_hpc.orchestrator.curriculum.gates import make_gate
from prime_hpc.orchestrator.curriculum.samplers import make_sampler
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Draw

_KEY = "orchestrator.curriculum"


class Curriculum:
    """The sampler behind the prompt stream and the gates before the batch."""

    def __init__(self, config: CurriculumConfig, *, num_prompts: int, env_names: Sequence[str]) -> None:
        """Args:
            num_prompts: groups of one batch.
            env_names: label of each source of the stream.
        Raises ConfigError: a sampler or gate of the user's own cannot be imported or made."""
        self._config = config
        self._env_names = env_names
        self._sampler = make_sampler(config.sampler, env_names)
        self._gates = {gate.label: make_gate(gate, f"{_KEY}.gates.{i}.type") for i, gate in enumerate(config.gates)}
        self.max_rejected = max(1, round(config.max_rejected * num_prompts))
        """Groups rejected on the way to one batch at most."""
        self._num_rejected = 0
        self._warned = False
        self._admitted_anyway = 0
        self._rejected_by: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._rejected: list[list[Any]] = []

    @property
    def choose(self) -> Callable[[Draw], int] | None:
        """The function that the prompt stream calls for the task of a new position; None: the standard order."""
        return None if self._sampler is None else self._choose

    def judge(self, group: Group) -> str:
        """Label of the gate that rejects a complete group, empty where all admit it or enough were rejected.
        Raises OrchestratorError: a gate or sampler of the user's own failed; names it and the group."""
        if not self._gates:
            return ""
        completed = self._completed(group)
        self._rewards.append(float(completed.rewards.mean()))
        label = next((label for label, gate in self._gates.items() if not self._admits(label, gate, completed)), "")
        if not label:
            return ""
        if self._num_rejected >= self.max_rejected:
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"{self._num_rejected} groups were rejected on the way to this batch ({_KEY}.max_rejected = "
                    f"{self._config.max_rejected:g} batches of prompts), and {label} rejects another: what completes "
                    "until the batch is full is admitted"
                )
            self._admitted_anyway += 1
            return ""
        self._num_rejected += 1
        self._rejected_by[label] += 1
        self._rejected.append([group.prompt.position, label])
        self._observe(completed)
        return label

    def batch_taken(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Take the groups of the next batch. Returns what to store with it, plain JSON; {} where nothing is remembered.

        `rejected` lists [position, gate] since the batch before it, for the record.
        """
        if self._sampler is not None:
            for group in groups:
                self._observe(self._completed(group))
        self._num_rejected, self._warned = 0, False
        rejected, self._rejected = self._rejected, []
        return self.state_dict() | ({"rejected": rejected} if rejected else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of sampler and gates as plain JSON."""
        state: dict[str, Any] = {}
        if self._sampler is not None:
            state["sampler"] = {"type": self._config.sampler.type, "state": state_of(self._sampler, f"{_KEY}.sampler")}
        if gates := {label: s for label, gate in self._gates.items() if (s := state_of(gate, f"{_KEY}.gates"))}:
            state["gates"] = gates
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that the state was stored with; another sampler than then starts afresh."""
        sampler = state.get("sampler", {"type": "standard", "state": {}})
        if sampler["type"] == self._config.sampler.type:
            load_state(self._sampler, sampler["state"])
        else:
            logger.warning(
                f"{_KEY}.sampler was {sampler['type']} when the checkpoint was written and is "
                f"{self._config.sampler.type} now: it starts with nothing remembered"
            )
        for label, gate in self._gates.items():
            load_state(gate, state.get("gates", {}).get(label, {}))

    def drain_metrics(self) -> dict[str, float]:
        """Return and reset the counts since the last call; {} for a run without a curriculum."""
        row: dict[str, float] = {}
        if self._gates:
            row = {f"curriculum/rejected/{label}": self._rejected_by[label] for label in self._gates}
            row["curriculum/admitted_anyway"] = self._admitted_anyway
            if self._rewards:  # batches hold what was admitted: their mean reward says little about the policy
                row["curriculum/reward_of_all"] = sum(self._rewards) / len(self._rewards)
            self._rejected_by, self._admitted_anyway, self._rewards = Counter(), 0, []
        if self._sampler is not None and hasattr(self._sampler, "metrics"):
            row |= {f"curriculum/{key}": value for key, value in self._sampler.metrics().items()}
        return row

    def _completed(self, group: Group) -> CompletedGroup:
        return CompletedGroup.of(group, self._env_names[group.prompt.source])

    def _choose(self, draw: Draw) -> int:
        assert self._sampler is not None
        try:
            return int(self._sampler.choose(draw))
        except Exception as error:
            raise self._failed("sampler", self._config.sampler.type, f"a draw from {draw.env}", error) from error

    def _observe(self, group: CompletedGroup) -> None:
        if self._sampler is None:
            return
        try:
            self._sampler.observe(group)
        except Exception as error:
            raise self._failed("sampler", self._config.sampler.type, group.name, error) from error

    def _admits(self, label: str, gate: Any, group: CompletedGroup) -> bool:
        try:
            return bool(gate.admits(group))
        except Exception as error:
            raise self._failed("gates", label, group.name, error) from error

    def _failed(self, key: str, name: str, what: str, error: Exception) -> OrchestratorError:
        return OrchestratorError(f"{_KEY}.{key}: {name} failed on {what}: {type(error).__name__}: {error}")
