"""Rows whose reward asks a judge over HTTP; its verdict is any: that it was asked is a metric."""

from pathlib import Path
from typing import Any

REWARD = """
import os
from openai import OpenAI

JUDGE = OpenAI(base_url=os.environ["JUDGE_URL"], api_key=os.environ["JUDGE_API_KEY"], timeout=60, max_retries=5)


def score(completion):
    asked = [{"role": "user", "content": completion[:20]}]
    said = JUDGE.chat.completions.create(model=os.environ["JUDGE_MODEL"], messages=asked, temperature=0, max_tokens=4)
    assert said.choices[0].message.content is not None
    return {"score": len(completion), "asked": 1.0}
"""


def judged_rows(folder: Path) -> dict[str, Any]:
    """The environment, its files in `folder`."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(50)))
    return {"id": "rows", "args": {"files": [str(folder / "rows.jsonl")], "reward": f"{folder}/reward.py:score"}}
