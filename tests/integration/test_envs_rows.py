"""The environment `rows`: an episode with rows and reward functions of one's own, through real verifiers."""

from pathlib import Path

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from tests.support.env_world import World

pytestmark = pytest.mark.slow


def test_rows_and_rewards_of_one_s_own(world: World, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "ground_truth": "4"}\n')
    code = (
        "def compute_score(solution_str, ground_truth):\n    return {'score': solution_str == ground_truth, 'n': 7}\n"
    )
    code += "def length(completions, **kwargs):\n    return [len(c) for c in completions]\n"
    (tmp_path / "mine.py").write_text(code)
    rewards = [f"{tmp_path}/mine.py:compute_score", f"{tmp_path}/mine.py:length", "math"]
    args = {"files": [str(tmp_path / "rows.jsonl")], "reward": rewards, "weights": [1, 0.5, 0], "instructions": "Add."}
    world.script = lambda prompt, number: "4"
    (result,) = world.play(EnvConfig(id="rows", args=args))
    assert result.usable and result.reward == 1.5, result
    assert result.prompt_text == "[system] Add.\n[user] 2 + 2?"
    scores = {name: result.metrics[name] for name in ("reward/compute_score", "reward/length", "math")}
    assert scores == {"reward/compute_score": 1.0, "reward/length": 0.5, "math": 1.0}
    assert result.metrics["compute_score/n"] == 7.0
    world.script = lambda prompt, number: "<think>\nso\n</think>\n\n4"
    (thought,) = world.play(EnvConfig(id="rows", args=args), enable_thinking=True)
    assert (thought.metrics["reward/compute_score"], thought.metrics["math"]) == (0.0, 1.0)
    assert thought.metrics["reward/length"] == 0.5 * len("<think>\nso\n</think>\n\n4")
