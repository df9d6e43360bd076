"""Nodes that play episodes in a real homogeneous job, and what the others do when one of their hosts is killed."""

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.runs import rows, used_prompts
from tests.support.sandboxes import needs_sandboxes
from tests.support.slurm import Cluster
from tests.support.small_jobs import CLI, attempts, make_folder, rl_with_engines
from tests.support.tool_replies import PROBLEM

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600), needs_sandboxes()]


def hosts_of(cluster: Cluster) -> dict[str, psutil.Process]:
    """Hosts of workers in this cluster's jobs, by node."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        variables = process.info["environ"] or {}
        with contextlib.suppress(psutil.Error):
            if (
                "--of-a-job" in (process.info["cmdline"] or [])
                and variables.get("SLURM_CONF", "").startswith(str(cluster.state))
                and (parent := process.parent()) is not None
                and "prime_hpc.envs.workers.host" not in parent.cmdline()
            ):
                found[variables["SLURMD_NODENAME"]] = process
    return found


def figures(run_dir: Path, since: int = 0) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir, "orchestrator") if row["step"] > since]


def newest(run_dir: Path, name: str) -> float:
    return figures(run_dir)[-1][f"env_workers/reverse-text/{name}"]


@pytest.mark.usefixtures("bubblewrap")
def test_packed_one_host_is_killed_and_comes_back_while_the_other_plays_on(cluster: Cluster) -> None:
    folder = make_folder(cluster)
    (folder / "humaneval.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    problem = {"id": "humaneval", "args": {"data": str(folder / "humaneval.jsonl")}, "sandbox": {"memory_mib": 256}}
    _, run_dir = rl_with_engines(
        cluster,
        folder,
        "players",
        {"orchestrator": {"nodes": 3}},
        steps=100_000,
        replies="tests.support.tool_replies:reverse_or_program",
        orchestrator={"env": [{"id": "reverse-text"}, problem], "env_servers": {"workers": 2}},
    )
    steps = lambda: (figures(run_dir) or [{"step": 0}])[-1]["step"]  # noqa: E731
    cluster.wait_until(lambda: steps() >= 4, "the first steps", timeout=240)
    (life,) = attempts(run_dir)
    own, *players = life["nodes"]["orchestrator"]
    assert own == life["nodes"]["trainer"][0] and len(players) == 2
    before = hosts_of(cluster)
    assert set(before) == set(players), "one on each of the two, none beside the orchestrator"
    assert newest(run_dir, "workers") == 2 and newest(run_dir, "restarts") == 0

    killed, other = players
    at = steps()
    before[killed].kill()
    cluster.wait_until(lambda: newest(run_dir, "workers") == 1, "the loss of one", timeout=60)
    cluster.wait_until(lambda: newest(run_dir, "workers") == 2, "the host's return", timeout=120)
    cluster.wait_until(lambda: steps() >= at + 20, "more steps", timeout=120)
    alone = [row["step"] for row in figures(run_dir, at) if row["env_workers/reverse-text/workers"] == 1]
    assert len(alone) > 1, "steps were made meanwhile"
    after = hosts_of(cluster)
    assert after[other] == before[other] and after[killed] != before[killed]
    assert after[killed].environ()["PRIMEHPC_ENV_SERVER_KEY"] == before[other].environ()["PRIMEHPC_ENV_SERVER_KEY"]
    slots = [newest(run_dir, f"episodes_{slot}") for slot in (0, 1)]
    cluster.wait_until(
        lambda: all(newest(run_dir, f"episodes_{slot}") > slots[slot] for slot in (0, 1)), "both play", timeout=60
    )
    assert all(row["episodes/failed"] == 0 for row in figures(run_dir)), "what was played there was played again"
    said = (run_dir / "logs" / "supervisor.log").read_text()
    assert f"the process of orchestrator on {killed} was killed by signal 9: it alone is started again" in said

    ended = cluster.x([*CLI, "cancel", str(run_dir)], timeout=100)
    assert ended.returncode == 0, ended.stderr
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "an empty queue", timeout=60)
    assert [life["outcome"] for life in attempts(run_dir)] == ["stopped"], "all in one attempt"
    prompts = [position for step in range(1, steps() + 1) for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))
    cluster.wait_until(lambda: not hosts_of(cluster), "the end of the hosts", timeout=30)
