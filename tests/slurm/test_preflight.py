"""preflight, site probe and doctor --path by hand in allocations of a real Slurm."""

import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.site import parse_site

HPC = str(Path(sys.executable).parent / "prime-hpc")


@pytest.fixture
def shared(cluster: Any) -> Path:
    """A folder that every node sees."""
    folder = Path(cluster.shared) / f"preflight-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    return folder


def in_allocation(cluster: Any, request: list[str], command: list[str]) -> "subprocess.CompletedProcess[str]":
    done: subprocess.CompletedProcess[str] = cluster.x(["salloc", "--quiet", *request, *command])
    return done


def verdicts(output: str) -> dict[str, dict[str, Any]]:
    return {verdict["host"]: verdict for verdict in json.loads(output)["verdicts"]}


def test_every_node_of_a_packed_allocation_passes(cluster: Any, shared: Path) -> None:
    words = [HPC, "preflight", "--dir", str(shared), "--json"]
    done = in_allocation(cluster, ["-p", "gpu", "-N3", "--gres=gpu:2"], words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert len(found) == 3
    for verdict in found.values():
        facts = verdict["facts"]
        assert facts["gpus"]["count"] == 2, "Slurm's own CUDA_VISIBLE_DEVICES"
        low, high = facts["clock_bounds_s"]
        assert low <= 0.1 and high >= -0.1, "all nodes are on one machine"
        assert facts["allreduce"]["reached"] == "done" and facts["allreduce"]["gb_per_s"] > 0
    assert list(shared.iterdir()) == [], "nothing is left behind"


def test_components_of_a_het_allocation_are_judged_apart(cluster: Any, shared: Path) -> None:
    request = ["-p", "gpu", "-N2", "--gres=gpu:4", ":", "-p", "cpu", "-N1"]
    words = [HPC, "preflight", "--dir", str(shared), "--no-allreduce", "--json"]
    done = in_allocation(cluster, request, words)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = [verdict["facts"] for verdict in verdicts(done.stdout).values()]
    assert [(f["component"], f["gpus"]["count"]) for f in facts] == [(0, 4), (0, 4), (1, 0)]


def test_a_node_without_power_is_named_and_nobody_waits_for_it(cluster: Any, shared: Path) -> None:
    """The others are good, though srun could not start the step on all of them."""
    ready, go = shared / "ready", shared / "go"
    check = f"{HPC} preflight --dir {shared} --no-allreduce --timeout 100 --json"
    script = f"scontrol show hostnames > {ready}.part; mv {ready}.part {ready}; until [ -e {go} ]; do sleep 0.2; done"
    answers: list[subprocess.CompletedProcess[str]] = []
    request = ["-p", "gpu", "-N3", "--no-kill"]
    thread = threading.Thread(
        target=lambda: answers.append(in_allocation(cluster, request, ["bash", "-c", f"{script}; {check}"]))
    )
    thread.start()
    cluster.wait_until(ready.exists, "the allocation")
    hosts = ready.read_text().split()
    cluster.drill("power-off", hosts[1])
    try:
        go.touch()
        thread.join()
    finally:
        cluster.drill("power-on", hosts[1])
    (done,) = answers
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert [host for host in hosts if not found[host]["ok"]] == [hosts[1]]
    assert "gave no answer" in found[hosts[1]]["problems"][0]
    assert json.loads(done.stdout)["seconds"] < 90


def test_site_probe_of_a_live_cluster(cluster: Any, shared: Path) -> None:
    target = shared / "drafted.yaml"
    done = cluster.x([HPC, "site", "probe", "--output", str(target)])
    assert done.returncode == 0, done.stdout + done.stderr
    site = parse_site(target)
    assert site.cluster and site.het_jobs and site.requeue
    assert site.partitions["gpu"].gpus_per_node > 0 and site.partitions["cpu"].gpus_per_node == 0
    assert {part.preempt for part in site.partitions.values()} == {"off", "requeue", "cancel"}


def test_doctor_on_the_login_node(cluster: Any) -> None:
    done = cluster.x([HPC, "doctor", "--json"])
    states = {finding["name"]: finding["state"] for finding in json.loads(done.stdout)["findings"]}
    assert states["slurm"] == states["slurm controller"] == "ok"


def test_doctor_measures_a_directory_between_two_nodes(cluster: Any, shared: Path) -> None:
    words = ["srun", "-N1", "-n1", HPC, "doctor", "--path", str(shared), "--json"]
    done = in_allocation(cluster, ["-p", "gpu", "-N2"], words)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)["measured"]["visibility"]
    assert seen["problem"] == "" and seen["exclusive"]
    assert None not in (seen["new_name_s"], seen["missed_name_s"], seen["grown_s"], seen["replaced_s"])
    assert list(shared.iterdir()) == []
