"""Submit, the queue and submitit's view of it, on a real Slurm."""

import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.sampled import sampled

CHECKOUT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "prime_hpc.cli"]
DRIVER = [sys.executable, str(Path(__file__).with_name("queue_driver.py"))]


@pytest.fixture
def folder(cluster: Any) -> Path:
    """A directory that all nodes see, with a space in its name."""
    return Path(tempfile.mkdtemp(prefix="submit it ", dir=cluster.shared))


@pytest.fixture
def config(folder: Path) -> Path:
    """A run whose job would begin in an hour: it waits as long as a test needs it to."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    (folder / "site.yaml").write_text("name: test\nscratch: /\n")
    options = {"partition": "all", "time": "00:10:00", "cpus_per_task": 1, "gpus_per_node": 0, "mem": "100M"}
    tree = {
        "kind": "sft",
        "name": "r",
        "launch": "slurm",
        "output_dir": str(folder / "out"),
        "model": {"name": str(model)},
        "sft": {"data": {"type": "fake"}},
        "ckpt": {"interval": 5},
        "slurm": {"site": str(folder / "site.yaml"), **options, "extra": {"begin": "now+1hour"}},
    }
    path = folder / "exp.yaml"
    path.write_text(json.dumps(tree))
    return path


def drive(cluster: Any, what: str, folder: Path) -> dict[str, Any]:
    done = cluster.x([*DRIVER, what, str(folder)])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(said, dict)
    return said


def prime(cluster: Any, *argv: str, code: int = 0) -> Any:
    """`prime-hpc` on the login node."""
    done = cluster.x([*CLI, *argv])
    assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def queue(cluster: Any, config: Path) -> list[list[str]]:
    """Jobs of the run that wait or run: id, state, comment."""
    token = record(config)["token"]
    text = cluster.x(["squeue", "-h", "-o", "%i|%T|%k"]).stdout
    return [row for line in text.splitlines() if (row := line.split("|"))[2].startswith(f"prime-hpc:{token}")]


def record(config: Path) -> dict[str, Any]:
    found = json.loads((config.parent / "out" / "r" / "submit.json").read_text())
    assert isinstance(found, dict)
    return found


def test_what_submitit_reads_back(cluster: Any, folder: Path) -> None:
    said = drive(cluster, "results", folder)
    assert said["waiting"] == "PENDING"
    assert said["packed"]["result"] == 7 and said["packed"]["log"] == "packed 2\n"
    assert said["het"]["result"] == 7 and len(set(said["het"]["log"].split())) == 2, "two components, two nodes"
    array = said["point 1"]["id"].partition("_")[0]
    assert [said[f"point {i}"]["id"] for i in (1, 2, 3)] == [f"{array}_{i}" for i in (1, 2, 3)]
    assert [said[f"point {i}"]["result"] for i in (1, 2, 3)] == [7, 7, 7]
    for name, state in (("failed", "FAILED"), ("killed", "FAILED"), ("cancelled", "CANCELLED")):
        assert said[name]["state"] == state and "has not produced any output" in said[name]["result"]
    assert said["killed"]["log"] == "gone\n"


def test_successors(cluster: Any, folder: Path) -> None:
    said = drive(cluster, "successor", folder)
    for name in ("well", "ill", "het"):
        assert said[name]["same"] and said[name]["reason"] == "Dependency", name
        assert said[name]["jobs"] == 2, f"{name}: queued twice, one came"
    assert said["well"]["state"] == "CANCELLED", "nothing is left to do: Slurm takes it away"
    assert said["ill"]["state"] == said["het"]["state"] == "FAILED", "it ran, and failed like the first"
    assert said["het"]["components"] == 2


def test_from_the_queue_and_out_of_it(cluster: Any, config: Path) -> None:
    said = json.loads(prime(cluster, "submit", str(config), "--json").stdout)
    assert (said["slurm_state"], said["state"], said["adopted"]) == ("PENDING", "sent", False)
    ((job_id, state, _),) = queue(cluster, config)
    assert (job_id, state) == (said["job_id"], "PENDING")
    again = prime(cluster, "submit", str(config), code=2)
    assert f"this run is in Slurm as job {job_id}, PENDING" in again.stderr
    prime(cluster, "submit", str(config), "--clean", code=2)
    # the answer of sbatch was never written down
    run_dir = config.parent / "out" / "r"
    lost = {**record(config), "state": "sending", "job_id": None, "time": time.time() - 3600}
    (run_dir / "submit.json").write_text(json.dumps(lost))
    found = prime(cluster, "submit", str(config))
    assert f"found job {job_id}" in found.stdout and record(config)["job_id"] == job_id
    assert len(queue(cluster, config)) == 1
    ended = json.loads(prime(cluster, "cancel", str(run_dir), "--json").stdout)
    assert ended[0]["outcome"] == "pending" and queue(cluster, config) == []
    assert "nothing to end" in prime(cluster, "cancel", str(run_dir)).stdout
    # a token of which Slurm knows nothing
    (run_dir / "submit.json").write_text(json.dumps({**lost, "token": "0" * 32}))
    assert "never reached Slurm; submitting now" in prime(cluster, "submit", str(config)).stderr
    assert len(queue(cluster, config)) == 1
    prime(cluster, "cancel", str(run_dir))


def test_a_het_job_and_its_successor_are_cancelled_whole(cluster: Any, config: Path) -> None:
    tree = json.loads(config.read_text())
    tree |= {"kind": "rl", "inference": {}, "orchestrator": {"env": [{"id": "reverse-text"}]}}
    tree["slurm"] |= {"layout": "het", "restart": {"how": "successor"}}
    config.write_text(json.dumps(tree))
    prime(cluster, "submit", str(config))
    rows = queue(cluster, config)
    assert len(rows) == 4 and {row[0].partition("+")[2] for row in rows} == {"0", "1"}
    assert {row[0].partition("+")[0] for row in rows} == {record(config)["job_id"], record(config)["successor"]}
    prime(cluster, "cancel", str(config.parent / "out" / "r"))
    assert queue(cluster, config) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    sampled(
        [
            (["--slurm.partition", "nope"], "slurm.partition: Slurm refused the job.*there are all, cpu, gpu"),
            (["--slurm.gres", "gpu:99"], "slurm: Slurm refused the job: Requested node configuration is not available"),
            (["--slurm.reservation", "nope"], "slurm.reservation: Slurm refused"),
            (["--slurm.constraint", "nope"], "slurm.constraint: Slurm refused"),
            (["--slurm.extra", '{"begin": "now+1hour", "no-such-option": "1"}'], "slurm.extra: Slurm refused"),
        ],
        4,
    ),
)
def test_refusals(cluster: Any, config: Path, flags: list[str], words: str) -> None:
    done = prime(cluster, "submit", str(config), *flags, code=3)
    assert re.search(words, done.stderr), done.stderr
    assert record(config)["state"] == "failed"
    prime(cluster, "submit", str(config))
    assert len(queue(cluster, config)) == 1
    prime(cluster, "cancel", str(config.parent / "out" / "r"))


CLIENT = """
import os, signal, subprocess, sys, time
path, sign, patience, *command = sys.argv[1:]
client = subprocess.Popen(command, env={**os.environ, "PATH": path})
while not os.path.exists(sign):
    time.sleep(0.05)
time.sleep(float(patience))
client.send_signal(signal.SIGKILL)
client.wait(timeout=30)
"""


def submit_and_be_killed(cluster: Any, config: Path, path: str, sign: Path, patience_s: float) -> None:
    """Submit on the login node; the client is killed so long after a file has appeared."""
    words = [sys.executable, "-c", CLIENT, path, str(sign), str(patience_s), *CLI, "submit", str(config)]
    done = cluster.x(words)
    assert done.returncode == 0, done.stderr
    assert record(config)["state"] == "sending" and record(config)["job_id"] is None


def found_again(cluster: Any, config: Path) -> bool:
    """Whether the next submit finds the job; there is exactly one in any case."""
    out = prime(cluster, "submit", str(config)).stdout
    assert len(queue(cluster, config)) == 1 and record(config)["state"] == "sent"
    prime(cluster, "cancel", str(config.parent / "out" / "r"))
    return "the earlier submit had reached Slurm" in out


def test_the_client_is_killed_while_sbatch_answers(cluster: Any, config: Path, folder: Path) -> None:
    """sbatch has made the job; its answer reaches nobody."""
    wrapper = folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    real = cluster.x(["bash", "-c", "command -v sbatch"]).stdout.strip()
    wrapper.write_text(f'#!/bin/sh\n{real} "$@"\ntouch "{folder}/sent"\nsleep 600\n')
    wrapper.chmod(0o755)
    submit_and_be_killed(cluster, config, f"{wrapper.parent}:{os.environ['PATH']}", folder / "sent", 0)
    assert len(queue(cluster, config)) == 1
    assert found_again(cluster, config)


def test_the_controller_answers_after_the_client_died(cluster: Any, config: Path) -> None:
    """slurmctld stands still while sbatch asks it, and goes on when nobody waits for its answer any more."""
    controller = int((cluster.state / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        submit_and_be_killed(cluster, config, os.environ["PATH"], config.parent / "out" / "r" / "submit.json", 1.0)
    finally:
        os.kill(controller, signal.SIGCONT)
    found_again(cluster, config)  # or not, if the machine was too busy for sbatch to ask: one job comes of it


def test_from_inside_a_job(cluster: Any, config: Path, folder: Path) -> None:
    script = folder / "outer.sh"
    words = " ".join(f"'{word}'" for word in [*CLI, "submit", str(config)])
    script.write_text(f"#!/bin/bash\n#SBATCH --mem-per-cpu=10 --time=2\ncd '{CHECKOUT}' && {words}\n")
    out = folder / "outer.out"
    done = cluster.x(["sbatch", "--wait", "-p", "all", f"--output={out}", str(script)], timeout=60)
    assert done.returncode == 0, out.read_text()
    ((job_id, _, _),) = queue(cluster, config)
    shown = cluster.x(["scontrol", "show", "job", "-o", job_id]).stdout
    assert "MinMemoryNode=100M" in shown, "of this config, not of the job around it"
    prime(cluster, "cancel", str(config.parent / "out" / "r"))


@pytest.mark.exhaustive  # Slurm 22.05 calls idle nodes "Resources" where the tests before it were fewer: not explained
def test_the_shape_that_starts_first_wins(cluster: Any, config: Path) -> None:
    """The GPU nodes are taken for half an hour, and another job waits for them; the CPU-only ones are free."""
    tree = json.loads(config.read_text())
    del tree["slurm"]["extra"]
    tree |= {"kind": "rl", "inference": {}, "orchestrator": {"env": [{"id": "reverse-text"}]}}
    wide = {"slurm.partition": "gpu", "slurm.trainer.nodes": 2, "trainer.num_ranks": 2}
    never = {"slurm.partition": "gpu", "slurm.inference.nodes": 9, "inference.data_parallel_size": 9}
    tree["slurm"] |= {
        "setup": ["exec sleep 60"],
        "shapes": [
            {"name": "het", "overrides": {"slurm.partition": "gpu", "slurm.layout": "het"}},
            {"name": "wide", "overrides": wide},
            {"name": "narrow", "overrides": {"slurm.partition": "cpu"}},
            {"name": "never", "overrides": never},
        ],
    }
    config.write_text(json.dumps(tree))
    cluster.wait_idle()  # a node that is still completing puts the job off until the scheduler's next whole round
    taken = cluster.sbatch("sleep 1800", "-p", "gpu", "-N4", "--exclusive", "--time=30")
    cluster.wait_state(taken, "RUNNING", timeout=120)
    cluster.sbatch("sleep 1800", "-p", "gpu", "-N4", "--exclusive", "--time=60")
    cluster.wait_until(lambda: "PENDING" in cluster.ask("squeue", "-h", "-o", "%T"), "a job that waits")

    said = json.loads(prime(cluster, "plan", str(config), "--when", "--json").stdout)
    found = {shape["name"]: shape for shape in said["shapes"]}
    assert said["best"] == "narrow" and [shape["name"] for shape in said["shapes"]][-1] == "never"
    assert found["narrow"]["start"] - said["asked"] < 300
    for name in ("wide", "het"):
        assert found[name]["word"] == "starts" and found[name]["start"] - said["asked"] > 1200, found[name]
    assert found["het"]["layout"] == "het" and found["never"]["word"] == "refused" and found["never"]["start"] is None

    done = prime(cluster, "submit", str(config), "--best")
    assert "shape narrow: the first of 4 by start" in done.stdout and "shape narrow)" in done.stdout
    assert cluster.wait_state(record(config)["job_id"], "RUNNING") and record(config)["shape"] == "narrow"
    prime(cluster, "cancel", str(config.parent / "out" / "r"), "--now")
