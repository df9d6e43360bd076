"""A small real run for the fault harness: its config, its attempts, and how a user brings it back.

One `World` a worker: a scratch directory with a tiny model and a scripted server. `begin` starts an attempt (`rl`, with
the real supervisor, orchestrator, torchrun and two FSDP2 ranks), `resume` the one after it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.checkpoint.checkpoints import list_checkpoints
from prime_hpc.store.run_paths import RunPaths
from tests.faults import inject
from tests.faults.inject import Plan
from tests.faults.server import IMAGE_SIZE

STEPS = 6
ASYNC_LEVEL = 1
PROMPTS = 3
GROUP = 2
LIFE_TIMEOUT_S = 240.0
PROFILES: dict[str, dict[str, Any]] = {
    "sync": {"interval": 2, "keep_last": 1},
    "async": {"interval": 2, "keep_last": 1, "save_async": True},
    "vllm": {"interval": 2, "keep_last": 1},
    "delta": {"interval": 2, "keep_last": 1},
    "envs": {"interval": 2, "keep_last": 1},
    "mask": {"interval": 2, "keep_last": 1},
    "images": {"interval": 2, "keep_last": 1, "save_async": True},
    "updates": {"interval": 2, "keep_last": 1},
}
"""`ckpt` of the run that is killed. `vllm` is served by a real engine, which each attempt starts anew; the versions of
`delta` are what changed; the episodes of `envs` are played by two workers; those of `mask` may outlast several
versions, and their old tokens are masked; the prompts of `images` hold pictures, and what sees them is trained; a batch
of `updates` is four updates. Each is swept by itself."""
REAL_ENGINE = "vllm"
DELTA = "delta"
ENVS = "envs"
MASK = "mask"
IMAGES = "images"
UPDATES = "updates"
FEW_CHANGES_LR = 5e-11
"""At which float32 weights of a usual size stay as they are."""
ENGINE_TIMEOUT_S = 900.0
NOTHING = Plan("", "", role="nobody")


@dataclass
class Life:
    """One `rl` with everything that it started."""

    process: "subprocess.Popen[bytes]"
    scratch: Path
    log: Path
    timeout_s: float = LIFE_TIMEOUT_S

    @property
    def reached(self) -> bool:
        """Whether the planned fault happened."""
        return (self.scratch / "reached").exists()

    def wait(self) -> int:
        """The exit code of `rl`.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        return self.process.wait(self.timeout_s)

    def wait_for_all(self, timeout_s: float) -> list[int]:
        """Processes of the attempt that are still there after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (left := inject.living(self.scratch)) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        """Whatever is left of it."""
        inject.strike_all(self.scratch, signal.SIGCONT)
        inject.strike_all(self.scratch, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)

    def tail(self, lines: int = 40) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class World:
    """Where one worker's runs live."""

    def __init__(self, root: Path, model: Path, profiles: Collection[str] = ()) -> None:
        """`profiles`: of the runs. Without `vllm` they attach to the scripted server."""
        self.root, self.model = root, model
        self._real_engine, self._is_delta = REAL_ENGINE in profiles, DELTA in profiles
        self._has_workers, self.masks, self._shows_images = ENVS in profiles, MASK in profiles, IMAGES in profiles
        self._has_updates = UPDATES in profiles
        root.mkdir(parents=True, exist_ok=True)
        self._lives = 0
        address = root / "server"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server", str(model), str(address), str(GROUP)]
            + ["--long"] * self.masks
            + ["--images"] * self._shows_images,
            stdin=subprocess.DEVNULL,
            stdout=(root / "server.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + 60
        while not address.exists():
            assert time.monotonic() < end and self._server.poll() is None, (root / "server.log").read_text()
            time.sleep(0.02)
        self.url = address.read_text()

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait(60)

    def config(self, name: str, ckpt: dict[str, Any]) -> Path:
        """Write the experiment as a user would."""
        tree: dict[str, Any] = {
            "name": name,
            "output_dir": str(self.root),
            "max_steps": STEPS,
            "async_level": ASYNC_LEVEL,
            "seq_len": 96,
            "model": {"name": str(self.model), "dtype": "float32", "renderer": "qwen3"},
            "log": {"level": "INFO"},
            "ckpt": ckpt,
            "supervisor": {"grace_s": 2, "read_timeout_s": 2, "write_timeout_s": 2, "recheck_s": 0.5},
            "trainer": {"num_ranks": 2, "threads_per_rank": 1, "keep_weights": 1, "optim": {"lr": 1e-3}},
            "orchestrator": {
                "batch_size": PROMPTS * GROUP,
                "rollouts_per_example": GROUP,
                "max_concurrent": 4,
                "log_samples": 0,
                "sampling": {"max_tokens": 40},
                "client": {"base_url": self.url},
                "env": [{"id": "reverse-text", "args": {"num_tasks": 64}, "timeout_s": 20}],
                "weights_timeout_s": 60,
            },
        }
        if self._real_engine:
            tree["inference"] = {"cpu_kv_cache_gib": 0.25, "max_model_len": 96, "server": {"port": 0}}
            del tree["orchestrator"]["client"]
        if self._is_delta:
            tree["weights"] = {"transport": "delta"}
            tree["trainer"]["optim"]["lr"] = FEW_CHANGES_LR
        if self.masks:
            tree["orchestrator"] |= {"stale": "mask", "max_concurrent": 4 * PROMPTS * GROUP}
        if self._has_updates:
            tree["trainer"] |= {"num_mini_batches": 2, "epochs_per_batch": 2}
        if self._has_workers:
            tree["orchestrator"]["env_servers"] = {"workers": 2}
        if self._shows_images:
            tree["model"] |= {"vision": "trained", "renderer": "qwen3-vl"}
            pictures = {"num_tasks": 64, "size": IMAGE_SIZE, "instructions": None}
            tree["orchestrator"]["env"][0] |= {"id": "shapes", "args": pictures}
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def forget(self, name: str) -> None:
        """Delete a run and its attempts."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        for path in self.root.glob(f"{name}.life*"):
            shutil.rmtree(path, ignore_errors=True)

    def start(self, name: str, command: list[str], plan: Plan | None, **facts: str) -> Life:
        """An attempt with a plan of faults (none: nothing happens)."""
        self._lives += 1
        scratch = self.root / f"{name}.life{self._lives}"
        (scratch / "pids").mkdir(parents=True)
        run_dir = str((self.root / name).resolve())
        told = Plan(**(vars(plan or NOTHING) | facts | {"scratch": str(scratch), "run_dir": run_dir}))
        log = scratch / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, **told.environment()},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Life(process, scratch, log, ENGINE_TIMEOUT_S if self._real_engine else LIFE_TIMEOUT_S)

    def begin(self, name: str, ckpt: dict[str, Any], plan: Plan | None = None, **facts: str) -> Life:
        """`rl @ NAME.yaml`."""
        return self.start(name, ["tests.faults.entry", "rl", "@", str(self.config(name, ckpt))], plan, **facts)

    def resume(self, name: str, by_hand: bool, plan: Plan | None = None, **facts: str) -> Life:
        """What a user does next: the same command where nothing of the run is there yet, `--ckpt.resume-step latest`
        where a checkpoint is; otherwise what a requeued job does, the supervisor again.

        Args:
            name: the run.
            by_hand: prefer the command line.
        """
        run_dir = self.root / name
        config = ["tests.faults.entry", "rl", "@", str(self.root / f"{name}.yaml")]
        if not (run_dir / "run.yaml").exists() or not read_attempts(run_dir / "attempts.jsonl"):
            return self.start(name, config, plan, **facts)
        if by_hand and list_checkpoints(RunPaths(run_dir).checkpoints):
            return self.start(name, [*config, "--ckpt.resume-step", "latest"], plan, **facts)
        return self.start(name, ["prime_hpc.supervisor.main", str(run_dir)], plan, **facts)


def read_record(scratch: Path) -> dict[str, list[tuple[str, str, int]]]:
    """Role -> its operations (operation, path, which time), in order."""
    found = {}
    for role in inject.ROLES:
        path = scratch / f"record.{role}"
        lines = path.read_text().splitlines() if path.exists() else []
        found[role] = [tuple(json.loads(line)) for line in dict.fromkeys(lines)]  # workers do the same each
    return found
