"""The environment `rows`: an episode with rows and reward functions of one's own, through real verifiers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from tests.support.env_world import World
from tests.support.scripted_api import Fault, ScriptedApi
from tests.support.tiny_tokenizer import make_tokenizer

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
    assert result.samples[0].rewards == {"compute_score": [1.0, 1.0], "length": [1.0, 0.5]}
    world.script = lambda prompt, number: "<think>\nso\n</think>\n\n4"
    (thought,) = world.play(EnvConfig(id="rows", args=args), enable_thinking=True)
    assert (thought.metrics["reward/compute_score"], thought.metrics["math"]) == (0.0, 1.0)
    assert thought.metrics["reward/length"] == 0.5 * len("<think>\nso\n</think>\n\n4")


WIRE = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS: dict[str, Any] = {
    "of the API": {"content": None, "tool_calls": [WIRE]},
    "without an id, arguments as an object": {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    "flat, beside parts": {"content": [{"type": "text", "text": ""}], "tool_calls": [WIRE["function"]]},
    "older": {"content": "", "function_call": {"name": "add", "parameters": {"a": 1}}},
}  # fmt: skip
SHOWN = """
def shown(prompt):
    call, result = prompt[2]["tool_calls"][0], prompt[3]
    return call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"] == result["tool_call_id"]
"""


def test_prompts_with_calls_in_every_form(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHOWN)
    asked = [{"role": "developer", "content": "Add."}, {"role": "User", "content": "1 + 1?"}]
    result = {"role": "tool", "content": "2"}
    rows = [{"prompt": [*asked, {"role": "assistant", **call}, result]} for call in CALLS.values()]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    args = {"files": [str(tmp_path / "rows.jsonl")], "reward": f"{tmp_path}/mine.py:shown"}
    world.script = lambda prompt, number: "2"
    results = world.play(EnvConfig(id="rows", args=args), len(rows))
    assert [(each.usable, each.reward) for each in results] == [(True, 1.0)] * len(rows), results
    for request in world.server.requests:
        text = world.tokenizer.decode(request["token_ids"])
        assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 + 1?")
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    row = {"prompt": [{"role": "user", "content": None}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(EnvError, match=r"rows.jsonl, line 1: prompt.0.user.content: .* valid string, got None"):
        world.play(EnvConfig(id="rows", args=args))


def test_parts_of_text_are_one_text_to_a_chat_template(world: World, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    tokenizer.chat_template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    world.tokenizer_dir = tmp_path / "model"
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    args = {"files": [str(tmp_path / "rows.jsonl")]}
    world.script = lambda prompt, number: "2"
    (result,) = world.play(EnvConfig(id="rows", args=args), renderer="default")
    assert result.usable, result.reason
    assert world.tokenizer.decode(world.server.requests[-1]["token_ids"]) == "<|im_start|>1 + 1?<|im_end|>"


@pytest.mark.exhaustive
def test_a_modeled_user_asks_for_what_rows_say(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')

    def script(prompt: str, number: int) -> str:
        if "role-playing a USER" not in prompt:
            return "2" if "add, please" in prompt else "how can I help?"
        return ("hello", "add, please", "###DONE###")[prompt.count("<|im_start|>assistant") - 1]

    world.script = script
    args = {"files": [str(tmp_path / "rows.jsonl")]}
    around = EnvConfig(id="rows", harness="in-process", args=args, env_args={"id": "user-sim"})
    for workers in (0, 1):
        (result,) = world.play(around.model_copy(update={"workers": workers}))
        assert result.usable and result.reward == 1.0, result.reason
        (sample,) = result.samples
        trained = world.tokenizer.decode(sample.token_ids[sample.loss_mask])
        assert (sample.agent, trained) == ("assistant", "how can I help?<|im_end|>2<|im_end|>")
