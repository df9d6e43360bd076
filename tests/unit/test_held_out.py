"""Evaluation tasks that training has too are left out, of lists that are packed."""

import json
from pathlib import Path

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import leave_out_trained
from prime_hpc.envs.task_sources import EnvSource


def source(path: Path, numbers: list[int], split: str = "train", answer: int = 0) -> EnvSource:
    rows = [{"prompt": [{"role": "user", "content": f"{n}\ud83c?"}], "answer": n + answer} for n in numbers]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = EnvConfig(id="rows", name=path.stem, args={"files": [str(path)], "reward": "exact"})
    return EnvSource(config, split, 0)  # type: ignore[arg-type]


def test_rows_of_equal_prompt_and_answer_are_left_out(tmp_path: Path) -> None:
    trained = source(tmp_path / "trained.jsonl", list(range(100)))
    trained.choose([7, 3, 99])  # a part of them, in another order
    evaluated = source(tmp_path / "held.jsonl", [3, 4, 99, 200, 201, 202], "eval")
    leave_out_trained([evaluated], [trained], 6)
    assert [evaluated.task(i).data.answer for i in range(evaluated.num_tasks or 0)] == [4, 200, 201, 202]
    others = source(tmp_path / "others.jsonl", [3, 7, 99], "eval", answer=1)
    leave_out_trained([others], [trained], 3)
    assert others.num_tasks == 3, "the answers are others"
    with pytest.raises(EnvError, match=r"'held': 3 of its first 3 tasks are trained on as well, by trained \(3\)"):
        leave_out_trained([source(tmp_path / "held.jsonl", [99, 7, 3], "eval")], [trained], 3)
