"""The algorithm of each training environment: one for all, or of its own; and what they remember, as one state."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_hpc.config.sections.orchestrator import OrchestratorConfig
from prime_hpc.orchestrator.algorithms.scorer import Scorer
from prime_hpc.orchestrator.errors import OrchestratorError

FIRST, OTHERS = "algorithm", "other_algorithms"
"""Keys of the orchestrator's state: what the first environment's algorithm remembers, and those of others by their
number. Apart, for what an algorithm remembers may have any name, an environment's among them."""


def make_scorers(config: OrchestratorConfig, *, in_loss: bool = False) -> list[Scorer]:
    """Return the scorer of every training environment. Those of one algorithm and one length share it, with its memory.

    Args:
        in_loss: as `Scorer`'s.

    Raises:
        ConfigError: an algorithm is unknown or cannot be imported.
        OrchestratorError: an algorithm needs larger groups than its environment has.
    """
    made: dict[tuple[str, int], Scorer] = {}
    found = []
    for source, env in enumerate(config.env):
        advantage, length = config.advantage_of(source), env.sampling.over(config.sampling).max_tokens
        scorer = made.setdefault((advantage.type, length), Scorer(advantage, max_tokens=length, in_loss=in_loss))
        if scorer.min_group > config.group_size(source):
            raise OrchestratorError(
                f"orchestrator.env.{source} ({env.label}): {advantage.type} needs {scorer.min_group} or more "
                f"rollouts of a prompt, but its rollouts_per_example = {config.group_size(source)}"
            )
        found.append(scorer)
    return found


def scorers_state(scorers: Sequence[Scorer]) -> dict[str, Any]:
    """Return the part of the orchestrator's state that they remember; empty where that is nothing."""
    others = {str(i): s.state_dict() for i, s in enumerate(scorers) if s is not scorers[0]}
    parts = {FIRST: scorers[0].state_dict(), OTHERS: {number: own for number, own in others.items() if own}}
    return {key: part for key, part in parts.items() if part}


def load_scorers(scorers: Sequence[Scorer], state: Mapping[str, Any]) -> None:
    """Take up what `scorers_state` gave, from the whole state."""
    scorers[0].load_state_dict(state.get(FIRST, {}))
    for number, own in state.get(OTHERS, {}).items():
        scorers[int(number)].load_state_dict(own)
