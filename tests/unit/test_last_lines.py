"""The lines with which a job ends: of a run that has no curve of its own, or did not come to its end."""

from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.store.child_runs import ChildState, write_state
from prime_hpc.supervisor.main import _summary
from tests.support.made_runs import make_runs_of_one_trainer


def lines_of(run_dir: Path, **tree: Any) -> list[str]:
    return list(_summary(Experiment.model_validate({"name": run_dir.name, **tree}), run_dir))


def test_a_trainer_of_many_runs_says_how_each_went(tmp_path: Path) -> None:
    parent = make_runs_of_one_trainer(tmp_path / "many", {"fast": 1e-2, "slow": 1e-3}, steps=2)
    write_state(parent / "run_fast", ChildState("done", step=2, max_steps=2))
    write_state(parent / "run_slow", ChildState("failed", "no batch came", step=1, max_steps=2))
    lora: dict[str, Any] = {"trainer": {"max_concurrent_runs": 2}, "model": {"lora": {"rank": 4}}}
    first, *each = lines_of(parent, **lora)
    assert first == f"many: 2 runs below {parent}"
    assert each == ["run_fast: done 2/2", "run_slow: failed 1/2: no batch came"]
    assert not (parent / "reward.png").exists(), "it has no reward of its own"


def test_a_service_counts_what_its_clients_saved(tmp_path: Path) -> None:
    adapter = tmp_path / "served" / "tinker" / "one"
    adapter.mkdir(parents=True)
    (adapter / "index.json").write_text('{"saves": {"state": {"a": {"number": 1}, "b": {"number": 2}}}}')
    service = {"trainer": {"max_concurrent_runs": 2, "tinker": {}}, "model": {"lora": {"rank": 4}}}
    [line] = lines_of(tmp_path / "served", **service)
    assert line == f"served: 2 saves of its clients' adapters in {tmp_path / 'served' / 'tinker'}"


@pytest.mark.parametrize(("outcome", "words"), [("completed", "results"), ("interrupted", "so far: results")])
def test_results_of_an_evaluation_that_was_cut_off_are_not_called_its_results(
    tmp_path: Path, outcome: str, words: str
) -> None:
    run = tmp_path / "scored"
    (run / "results").mkdir(parents=True)
    (run / "results" / "table.txt").write_text("version  tasks\nbase     40\n")
    write_attempt(run / "attempts.jsonl", Attempt(1, 1, 1.0, "first start", ended=2.0, outcome=outcome))
    evaluation = {"kind": "eval", "eval": {"environment_ids": ["reverse-text"]}}
    first, *table = lines_of(run, **evaluation)
    assert first.endswith(f"{words} in {run / 'results'}") and len(table) == 2
    assert ("did not come to its end" in first) == (outcome != "completed")
