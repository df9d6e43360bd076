"""A judge of the run's own in a real het job: on nodes of its own, found by rewards on the nodes that play episodes,
killed, and back."""

import re
from pathlib import Path

import pytest
import yaml

from tests.slurm.test_rl_jobs import START_S, last_step, processes_of, submit
from tests.support.judged_rows import judged_rows
from tests.support.runs import rows, starter_tree
from tests.support.slurm import Cluster
from tests.support.small_jobs import attempts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]


def test_het_rewards_ask_the_run_s_own_judge_which_is_killed_and_comes_back(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "judged"
    folder.mkdir()
    env = judged_rows(folder)
    tree = starter_tree(folder, output_dir=str(folder / "out"), ckpt={"interval": 5}, inference={"server": {"port": 0}})
    tree["orchestrator"] |= {"env": [env], "env_servers": {"workers": 2}, "advantage": {"zero": "keep"}}
    tree["inference"]["backend"] = "transformers"
    tree["judge_inference"] = {"model": tree["model"]["name"], "backend": "transformers"}
    tree["slurm"] = {
        "site": "devcluster",
        "gpus_per_node": 1,
        "cpus_per_task": 2,
        "layout": "het",
        "orchestrator": {"partition": "cpu", "gpus_per_node": 0, "nodes": 2},
    }
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    job, run_dir = submit(cluster, path, "judged", "--max-steps", 40)
    cluster.wait_until(lambda: last_step(run_dir) >= 4, "the first steps", timeout=START_S)
    (life,) = attempts(run_dir)
    (judge,) = life["nodes"]["judge[0]"]
    assert judge not in [*life["nodes"]["trainer"], *life["nodes"]["inference[0]"], *life["nodes"]["orchestrator"]]

    (process,) = processes_of(run_dir, "prime_hpc.inference.main", "judge").values()
    key = process.environ()["PRIMEHPC_JUDGE_API_KEY"].encode()
    process.kill()
    cluster.wait_state(job, "COMPLETED", timeout=START_S + 120)
    assert [life["outcome"] for life in attempts(run_dir)] == ["completed"], "all in one attempt"
    assert re.search(r"judge\[0\].*it is started again", (run_dir / "logs" / "supervisor.log").read_text())
    assert all(row["episodes/failed"] == 0 for row in rows(run_dir, "orchestrator"))
    assert not [path for path in run_dir.rglob("*") if path.is_file() and key in path.read_bytes()], "it is in no file"
