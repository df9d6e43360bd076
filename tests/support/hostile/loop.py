"""A small real RL run whose roles see a hostile file system: the orchestrator and each trainer rank on its own mount.

    python -m tests.support.hostile.loop [--names 5] [--misses 30] [--steps 4] [--bus]

The real orchestrator and the real trainer (two FSDP2 ranks on a tiny model) as processes; a scripted inference server
stands in for vLLM. Without `--bus` nothing is announced: everything is found by listing. Prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prime_hpc.config import write_snapshot
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.runtime.role_context import role_environment
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.roles import ports
from tests.support.hostile.mount import hostile_mounts
from tests.support.orchestrator_world import ROOT, make_experiment, varied_reply
from tests.support.scripted_server import AdminServer
from tests.support.tiny_model import make_tiny_model

SETTLE_S = 0.2
NUM_RANKS = 2


def start(role: str, run_dir: Path, environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """A role as the supervisor starts it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"prime_hpc.{role}.main", str(run_dir)],
            env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(
    folder: Path, *, names_s: float, misses_s: float, steps: int, has_bus: bool, deadline_s: float
) -> dict[str, Any]:
    """Train `steps` steps; figures of the run.

    Raises:
        RuntimeError: a role failed or did not end in time; holds the end of both logs.
    """
    from transformers import AutoTokenizer

    model = make_tiny_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    with ExitStack() as stack:
        nodes = stack.enter_context(
            hostile_mounts(
                folder, clients=1 + NUM_RANKS, names_s=names_s, misses_s=misses_s, attributes_s=min(names_s, 5.0)
            )
        )
        one, *others = (RunPaths(node.path / "run") for node in nodes)
        trainer = {"num_ranks": NUM_RANKS, "micro_batch_tokens": 320, "backend": "gloo"}
        exp = make_experiment(
            model, one.root, top={"max_steps": steps, "trainer": trainer}, batch_size=8, weights_timeout_s=600
        )
        write_snapshot(exp, one.root, ["hostile"])
        claim_incarnation(one)
        roles = [one.logs(1, role) for role in ("orchestrator", "trainer")]
        for directory in (one.rollouts, one.weights, one.leases, one.metrics("trainer").parent, *roles):
            directory.mkdir(parents=True)  # as the supervisor does before it starts a role
        time.sleep(names_s + SETTLE_S)  # roles of a job start seconds after its run directory was made
        server = stack.enter_context(AdminServer(tokenizer, varied_reply(0)))
        hub = BusServer() if has_bus else None
        if hub is not None:
            stack.callback(hub.close)
        address = hub.address if hub else None
        environment = role_environment(
            bus_address=address or "", attempt=1, incarnation=1, resume_step=None, urls={"inference": [server.url]}
        )
        logs = [folder / "orchestrator.log", *(folder / f"rank_{rank}.log" for rank in range(NUM_RANKS))]
        (port,) = ports.choose(1, 23_000)
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
        began = time.monotonic()
        processes = [start("orchestrator", one.root, environment, logs[0])]
        for rank, paths in enumerate(others):
            own = {**environment, **group, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            processes.append(start("trainer", paths.root, own, logs[1 + rank]))
        _wait(processes, logs, began + deadline_s)
        seconds = time.monotonic() - began
        rows = read_metrics(RunPaths(folder / "back" / "run").metrics("trainer"))
        server_side = RunPaths(folder / "back" / "run")
        for step in range(1, steps + 1):
            verify_artifact(server_side.rollouts_step(step), deep=True)
        verify_artifact(server_side.weights_step(steps), deep=True)
        states = {role: (read_status(one.logs(1, role)) or {}).get("state") for role in ("orchestrator",)}
        return {
            "bus": has_bus,
            "names_s": names_s,
            "misses_s": misses_s,
            "steps": [row["step"] for row in rows],
            "served": [version for version, _ in server.updates],
            "states": states,
            "seconds": round(seconds, 1),
            "wait_s": [row["time/wait"] for row in rows],
        }


def _wait(processes: "list[subprocess.Popen[bytes]]", logs: list[Path], end: float) -> None:
    try:
        while any(process.poll() is None for process in processes):
            failed = [process for process in processes if process.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                tails = "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs)
                raise RuntimeError(f"{'a role failed' if failed else 'not done in time'}\n{tails}")
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=float, default=5.0)
    parser.add_argument("--misses", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bus", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-loop-") as folder:
        figures = run(
            Path(folder),
            names_s=args.names,
            misses_s=args.misses,
            steps=args.steps,
            has_bus=args.bus,
            deadline_s=900.0,
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
