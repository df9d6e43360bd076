"""Another user of the same machine, while a run with everything in it trains: he gets nothing and changes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.runs import ROOT, background, starter_tree, steps, used_prompts, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOBODY = 65534
NUM_IDLE = 1000


def listeners(family: list[psutil.Process]) -> dict[int, str]:
    """Port -> the process that listens on it, for all processes of a run (as `ss -ltnp` shows them)."""
    found = {}
    for process in family:
        try:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = f"{' '.join(process.cmdline()[1:6])} on {connection.laddr.ip}"
        except psutil.NoSuchProcess:
            continue
    return found


def visit(host: str, ports: list[int]) -> list[dict[str, Any]]:
    """What a stranger gets from the ports."""
    words = [sys.executable, "-I", str(ROOT / "tests" / "support" / "stranger.py"), host, ",".join(map(str, ports))]
    words += ["--uid", str(NOBODY), "--flood", str(NUM_IDLE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["uid"] == NOBODY
    return said["ports"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.exhaustive
def test_another_user_gets_nothing_from_a_one_machine_run(tmp_path: Path) -> None:
    tree = starter_tree(
        tmp_path,
        output_dir=str(tmp_path),
        name="run",
        max_steps=100_000,
        trainer={"num_ranks": 2},
        inference={"cpu_kv_cache_gib": 0.25, "data_parallel_size": 2, "server": {"port": 0}},
        prometheus={},
    )
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(tree))
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with background("rl", "@", tmp_path / "exp.yaml", log=log) as process:
        wait_until(lambda: process.poll() is not None or len(steps(run_dir)) >= 2, 300, "the first steps")
        assert process.poll() is None, log.read_text()[-3000:]
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        ports = listeners(family)
        key = next(
            value for one in family for name, value in one.environ().items() if name == "PRIMEHPC_INFERENCE_API_KEY"
        )
        found = visit("127.0.0.1", sorted(ports))
        after = len(steps(run_dir))
        wait_until(lambda: process.poll() is not None or len(steps(run_dir)) >= after + 3, 120, "the run goes on")
        (run_dir / "STOP").touch()
        assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    for one in found:
        print(f"{ports[one['port']]}:{one['port']}: {one}")
    print(
        f"{len(found)} ports, {sum(one['routes'] for one in found)} HTTP requests, "
        f"{sum(one['messages'] for one in found)} messages, {NUM_IDLE * len(found)} idle connections"
    )
    assert len(found) == len(ports) >= 3
    assert sum(one["http"] for one in found) == 2, "the server of the policy, and the figures for Prometheus"
    for one in found:
        assert one["told"] == [], (ports[one["port"]], one)
        assert one["held"] == 0 and one["idle_gone"] == NUM_IDLE, (ports[one["port"]], one)
    done = steps(run_dir)
    assert done == list(range(1, len(done) + 1)), "one attempt, each step once"
    prompts = [position for step in done for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))
    texts = [file for file in run_dir.rglob("*") if file.is_file() and file.stat().st_size < 10_000_000]
    assert not [file for file in texts if key.encode() in file.read_bytes()], "the key is in no file"
    token = (tmp_path / ".prometheus" / "token").read_bytes().strip()
    assert len(token) >= 32 and not [file for file in texts if token in file.read_bytes()]
    assert "mischief" not in log.read_text()
    assert not Path("/tmp/stranger").exists()
