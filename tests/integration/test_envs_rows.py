"""The environment `rows`: an episode with rows and reward functions of one's own, through real verifiers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from tests.support.env_world import World
from tests.support.scripted_api import Fault, ScriptedApi

pytestmark = pytest.mark.slow


def test_a_model_as_the_judge(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "prime_hpc/envs/README.md").read_text()
    (code,) = re.findall(r"```python\n(# rewards\.py, which.*?)```", page, re.DOTALL)
    (tmp_path / "judge.py").write_text(code)
    asked = [{"role": "user", "content": "2 + 1?"}, {"role": "assistant", "content": "3"}]
    rows = [{"messages": [*asked, {"role": "user", "content": f"{n} + 2?"}], "answer": str(n + 2)} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    args = {"files": [str(tmp_path / "rows.jsonl")], "reward": f"{tmp_path}/judge.py:score"}
    world.script = lambda prompt, number: "<think>\nno\n</think>\n\n" + ("3" if "1 + 2?" in prompt else "4")

    def verdict(messages: list[dict[str, Any]]) -> str:
        said = messages[-1]["content"]
        assert "no\n" not in said and "<think>" not in said
        return "I cannot tell" if "Question: 0" in said else "Yes." if "answer: 3\n\nReply: 3" in said else "no"

    busy = Fault(status=429, headers={"Retry-After": "0"})
    with ScriptedApi(verdict, key="judge-key", fault=lambda text, number: busy if number == 0 else None) as api:
        for name, value in {"URL": api.url, "MODEL": "any", "API_KEY": "judge-key"}.items():
            monkeypatch.setenv(f"JUDGE_{name}", value)
        unsure, right, wrong = world.play(EnvConfig(id="rows", args=args), 3, enable_thinking=True)
    assert (unsure.usable, right.reward, wrong.reward) == (False, 1.0, 0.0)
    assert "i cannot tell" in unsure.reason


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
