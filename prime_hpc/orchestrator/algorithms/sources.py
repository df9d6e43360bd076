"""The algorithm of each training environment: one for all, or of its own; and what they remember, as one state."""

from collections.abc import Sequence
from typing import Any

from prime_hpc.config.sections.orchestrator import OrchestratorConfig
from prime_hpc.orchestrator.algorithms.scorer import Scorer
from prime_hpc.orchestrator.errors import OrchestratorError

OTHERS = "others"
"""Key of a state, of the algorithms beside `orchestrator.advantage.type`: name -> what it remembers."""


def make_scorers(config: OrchestratorConfig) -> list[Scorer]:
    """Return the scorer of every training environment. Those of one algorithm and one length share it, with its memory.

    Raises:
        ConfigError: an algorithm is unknown or cannot be imported.
        OrchestratorError: an algorithm needs larger groups than its environment has.
    """
    made: dict[tuple[str, int], Scorer] = {}
    found = []
    for source, env in enumerate(config.env):
        advantage, length = config.advantage_of(source), env.sampling.over(config.sampling).max_tokens
        scorer = made.setdefault((advantage.type, length), Scorer(advantage, max_tokens=length))
        if scorer.min_group > config.group_size(source):
            raise OrchestratorError(
                f"orchestrator.env.{source} ({env.name or env.id}): {advantage.type} needs {scorer.min_group} or more "
                f"rollouts of a prompt, but its rollouts_per_example = {config.group_size(source)}"
            )
        found.append(scorer)
    return found


def scorers_state(scorers: Sequence[Scorer]) -> dict[str, Any]:
    """Return what they remember: the first one's own state, and the others' by their number."""
    state = dict(scorers[0].state_dict())
    others = {str(i): s.state_dict() for i, s in enumerate(scorers) if s is not scorers[0] and s.state_dict()}
    return state | ({OTHERS: others} if others else {})


def load_scorers(scorers: Sequence[Scorer], state: dict[str, Any]) -> None:
    """Take up what `scorers_state` gave."""
    others = state.get(OTHERS, {})
    scorers[0].load_state_dict({key: value for key, value in state.items() if key != OTHERS})
    for number, own in others.items():
        scorers[int(number)].load_state_dict(own)
