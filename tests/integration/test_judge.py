"""A judge that the run starts, asked by rewards over HTTP: in training, killed in the middle, and in an evaluation."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.judged_rows import judged_rows
from tests.support.runs import background, command, rows, starter_tree, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def written(folder: Path, name: str, tree: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    judge = {"model": tree["model"]["name"], "backend": "transformers"}
    engines = {"backend": "transformers", "server": {"port": 0}}
    whole = tree | {"name": name, "output_dir": str(folder / "out"), "device": "cpu"}
    path.write_text(yaml.safe_dump(whole | {"inference": engines, "judge_inference": judge}))
    return path


@pytest.mark.exhaustive
def test_a_killed_judge_comes_back_and_no_episode_fails(tmp_path: Path) -> None:
    tree = starter_tree(tmp_path, max_steps=25)
    tree["orchestrator"] |= {"env": [judged_rows(tmp_path)], "advantage": {"zero": "keep"}}
    run_dir, log = tmp_path / "out" / "judged", tmp_path / "log"

    def step() -> int:
        return max((row["step"] for row in rows(run_dir, "orchestrator")), default=0)

    with background("rl", "@", written(tmp_path, "judged", tree), log=log) as process:
        wait_until(lambda: (run_dir / "metrics" / "orchestrator.jsonl").exists() and step() >= 3, 300, "three steps")
        (pid,) = re.findall(r"started judge\[0\] \(process (\d+)\)", log.read_text())
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait(250) == 0, log.read_text()[-3000:]
    assert re.search(r"judge\[0\].*killed by signal 9.*it is started again", log.read_text())
    steps = rows(run_dir, "orchestrator")
    assert len(steps) == 25 and all(row["episodes/failed"] == 0 for row in steps)
    attempts = (run_dir / "attempts.jsonl").read_text().splitlines()
    assert len({json.loads(line)["attempt"] for line in attempts}) == 1


@pytest.mark.exhaustive
def test_an_evaluation_has_a_judge_too(tmp_path: Path) -> None:
    tree = starter_tree(tmp_path)
    tree = {"model": tree["model"], "seq_len": 128, "kind": "eval"}
    tree["eval"] = {"env": [judged_rows(tmp_path)], "num_examples": 4, "sampling": {"max_tokens": 8}}
    done = command("eval", "@", written(tmp_path, "judged-eval", tree))
    assert done.returncode == 0, done.stderr[-3000:]
    (summary,) = (tmp_path / "out" / "judged-eval").glob("results/summary.json")
    assert json.dumps(json.loads(summary.read_text())).count('"asked') >= 1
