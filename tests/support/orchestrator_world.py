"""Everything around a real orchestrator process: bus hub, scripted inference servers, a scripted trainer.

The trainer reads batches and publishes (fake) weight versions through the store, as the real one does; the servers
answer in vLLM's format and can be killed, restarted and slowed down.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.orchestrator.batching.batch_builder import EPISODE_BITS
from prime_hpc.runtime.role_context import role_environment
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.batches import list_batches, read_state, remove_batches_after
from prime_hpc.store.errors import ArtifactError, ArtifactTimeout
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import prune_weights
from tests.support.forked import ForkedProcess
from tests.support.scripted_server import AdminServer, Reply

ROOT = Path(__file__).resolve().parents[2]
MODULE = "prime_hpc.orchestrator.main"
Process = subprocess.Popen[bytes] | ForkedProcess


def varied_reply(seed: int, delay_s: float = 0.02) -> Any:
    """Replies of 1 to 30 letters that take up to twice `delay_s`, the same for the same seed and call number."""

    def script(prompt: str, number: int) -> Reply:
        rng = random.Random(seed * 1_000_003 + number)
        return Reply("".join(rng.choices("abcdef", k=rng.randint(1, 30))), delay_s=rng.uniform(0, 2 * delay_s))

    return script


class ScriptedTrainer(threading.Thread):
    """Consumes batches and publishes versions: step n turns batch n into `weights/step_<n>`."""

    def __init__(self, paths: RunPaths, address: str | None, *, first: int, last: int, step_s: float) -> None:
        super().__init__(daemon=True)
        self.paths, self.first, self.last, self.step_s = paths, first, last, step_s
        self.bus = BusClient(address, "trainer")
        self.halt = threading.Event()
        self.incarnation = 1
        self.done: list[int] = []

    def run(self) -> None:
        for step in range(self.first, self.last + 1):
            while not self.halt.is_set():
                try:
                    wait_for_artifact(
                        self.paths.rollouts_step(step),
                        deadline_s=1.0,
                        bus=self.bus,
                        topic="batch",
                        key={"step": step},
                    )
                    break
                except (ArtifactTimeout, ArtifactError):
                    continue
            if self.halt.wait(self.step_s):
                return
            self.publish(step)
            self.done.append(step)

    def publish(self, version: int) -> None:
        final = self.paths.weights_step(version)
        with ArtifactWriter(
            final, kind="weights", step=version, version=version, writer="trainer", incarnation=self.incarnation
        ) as writer:
            writer.write("model.safetensors", [bytes([version % 256]) * 64])
        assert writer.manifest is not None
        self.bus.publish("weights", version=version, path=str(final), digest=writer.manifest.digest)
        prune_weights(self.paths, 1, self.incarnation)

    def stop(self) -> None:
        self.halt.set()
        self.join(10)
        self.bus.close()


def make_experiment(tokenizer_dir: Path, run_dir: Path, **orchestrator: Any) -> Experiment:
    """A small experiment; `orchestrator` overrides its section, `top` the tree's root."""
    top = orchestrator.pop("top", {})
    return Experiment.model_validate(
        {
            "name": run_dir.name,
            "output_dir": str(run_dir.parent),
            "max_steps": 6,
            "async_level": 1,
            "seq_len": 160,
            "model": {"name": str(tokenizer_dir), "renderer": "qwen3"},
            "trainer": {"num_ranks": 2, "micro_batch_tokens": 320},
            "log": {"level": "DEBUG"},
            "orchestrator": {
                "batch_size": 16,
                "rollouts_per_example": 4,
                "max_concurrent": 24,
                "sampling": {"max_tokens": 40},
                "env": [{"id": "reverse-text", "args": {"num_tasks": 64}, "timeout_s": 20}],
                "advantage": {"type": "grpo_no_std"},
                "weights_timeout_s": 30,
                **orchestrator,
            },
        }
        | top
    )


def start_orchestrator(run_dir: Path, env: dict[str, str], log: Path, in_shell: bool, module: str = MODULE) -> Process:
    """`python -m prime_hpc.orchestrator.main`, as the supervisor starts it (seconds of imports), or as a fork."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [module, str(run_dir)]
    with log.open("ab") as file:
        if in_shell:
            return subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=file, stderr=file)
        return ForkedProcess(command, env=env, stdout=file, stderr=file)


class World:
    """One run directory with its hub and servers; `start` begins an attempt of the orchestrator."""

    def __init__(self, run_dir: Path, exp: Experiment, servers: Sequence[AdminServer]) -> None:
        self.paths = RunPaths(run_dir)
        self.exp, self.servers = exp, list(servers)
        self.hub = BusServer()
        self.process: Process | None = None
        self.trainer: ScriptedTrainer | None = None
        self.log = run_dir / "orchestrator.log"
        write_snapshot(exp, run_dir, ["test"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(200)
        if self.trainer is not None:
            self.trainer.stop()
        self.hub.close()

    def start(
        self,
        *,
        resume: int | None = None,
        attempt: int = 1,
        last: int | None = None,
        step_s: float = 0.05,
        in_shell: bool = False,
        incarnation: int = 1,
        module: str = MODULE,
    ) -> None:
        """Start trainer and orchestrator; `last` ends the trainer early, `in_shell` starts it by its command line,
        `module` is another one that does what the orchestrator's does."""
        env = role_environment(
            bus_address=self.hub.address,
            attempt=attempt,
            incarnation=incarnation,
            resume_step=resume,
            urls={"inference": [server.url for server in self.servers]},
        )
        self.trainer = ScriptedTrainer(
            self.paths, self.hub.address, first=(resume or 0) + 1, last=last or self.exp.max_steps, step_s=step_s
        )
        self.trainer.incarnation = incarnation
        self.trainer.start()
        self.process = start_orchestrator(self.paths.root, env, self.log, in_shell, module)

    def wait(self, timeout_s: float = 240.0) -> int:
        """The orchestrator's exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def wait_for_batch(self, step: int, timeout_s: float = 200.0) -> None:
        """Until batch `step` is there."""
        end = time.monotonic() + timeout_s
        while step not in list_batches(self.paths):
            assert time.monotonic() < end, f"no batch {step} after {timeout_s} s:\n{self.log.read_text()[-3000:]}"
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL the orchestrator, stop the trainer."""
        assert self.process is not None and self.trainer is not None
        self.process.kill()
        self.process.wait(200)
        self.trainer.stop()

    def rewind(self, step: int) -> None:
        """After `kill`: what the supervisor and the trainer do before an attempt that resumes after batch `step`."""
        assert self.trainer is not None
        remove_batches_after(self.paths, step, self.trainer.incarnation)
        for folder in self.paths.weights.glob("step_*"):
            if folder > self.paths.weights_step(step):
                shutil.rmtree(folder)
        if not self.paths.weights_step(step).exists():
            self.trainer.publish(step)
        self.hub.close()
        self.hub = BusServer()

    def ranks(self, step: int) -> list[RankBatch]:
        """Batch `step`."""
        return [read_rank_batch(self.paths.rollouts_step(step), r) for r in range(self.exp.trainer.num_ranks)]

    def state(self, step: int) -> dict[str, Any]:
        """The orchestrator's state after batch `step`."""
        return read_state(self.paths.rollouts_step(step))

    def metrics(self) -> list[dict[str, Any]]:
        """The orchestrator's metrics."""
        return read_metrics(self.paths.metrics("orchestrator"))

    def status(self, attempt: int = 1) -> dict[str, Any]:
        """The orchestrator's status file."""
        status = read_status(self.paths.logs(attempt, "orchestrator"))
        assert status is not None
        return status

    def check_batches(self, steps: range) -> None:
        """The staleness bound, the arrays, and that no prompt is used or dropped twice nor forgotten."""
        used: list[int] = []
        dropped: list[int] = []
        for step in steps:
            floor = max(0, step - 1 - self.exp.async_level)
            state = self.state(step)
            groups: set[int] = set()
            for rank in self.ranks(step):
                rank.check()
                sampled = rank.versions[rank.loss_mask]
                assert (rank.versions[~rank.loss_mask] == -1).all()
                assert not len(sampled) or (sampled.min() >= floor and sampled.max() <= step - 1), (step, sampled)
                assert not rank.advantages[~rank.loss_mask].any()
                assert (rank.sample_ids >> EPISODE_BITS == rank.group_ids).all()
                groups |= set(rank.group_ids.tolist())
            assert groups <= set(state["used"])
            assert len(state["used"]) == self.exp.num_prompts
            used += state["used"]
            dropped += state["dropped"]
        last = self.state(steps[-1])
        pending = [position for position, _, _ in last["prompts"]["pending"]]
        assert sorted([*used, *dropped, *pending]) == list(range(last["prompts"]["cursor"]))


def read_samples(world: World) -> list[dict[str, Any]]:
    """The sample log."""
    return [json.loads(line) for line in world.paths.metrics("samples").read_text().splitlines()]
