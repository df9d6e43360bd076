"""The state that a run should have: two FSDP2 ranks that train again on its stored batches, without interruption.

`python -m tests.faults.oracle RUN_DIR RANK STORE SCRATCH` is one rank. It reads run directories from standard input,
one a line, trains from the base model on batches 1 .. n with the trainer's own engine (as `prime-hpc replay` does) and
compares parameters, optimizer and random states with the checkpoint of step n, bit by bit. It stays up: the second
answer costs no start. `Oracle` is the handle of both ranks.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORLD_SIZE = 2


class Oracle:
    """Both ranks."""

    def __init__(self, run_dir: Path, scratch: Path) -> None:
        """`run_dir`: any run of the experiment; its batches do not matter."""
        scratch.mkdir(parents=True, exist_ok=True)
        self._processes = []
        for rank in range(WORLD_SIZE):
            command = [sys.executable, "-m", "tests.faults.oracle", str(run_dir), str(rank), str(scratch / "store")]
            self._processes.append(
                subprocess.Popen(
                    [*command, str(scratch)],
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(scratch / f"oracle{rank}.log").open("wb"),
                )
            )

    def differences(self, run_dir: Path, step: int) -> list[str]:
        """In what the checkpoint of `step` differs from training on batches 1 .. `step`; [] where it does not."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([str(run_dir), step]).encode() + b"\n")
            process.stdin.flush()
        found: list[str] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            found += json.loads(line) if line else ["the oracle died"]
        return found

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.wait(60)


class Rank:
    """One rank's trainer, back at the base model before each answer."""

    def __init__(self, run_dir: Path, rank: int, store: str, scratch: Path) -> None:
        import torch
        import torch.distributed as dist

        from prime_hpc.config import load_run
        from prime_hpc.observe.role_status import RoleStatus
        from prime_hpc.runtime.role_context import RoleContext
        from prime_hpc.store.messaging.bus import BusClient
        from prime_hpc.trainer.checkpointing.random_state import random_state
        from prime_hpc.trainer.main import seed_everything
        from prime_hpc.trainer.objectives import loss_of
        from prime_hpc.trainer.parallel.tensor import local
        from prime_hpc.trainer.replay.replay import plain
        from prime_hpc.trainer.trainer import build_trainer

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
        experiment = plain(load_run(run_dir), WORLD_SIZE)
        seed_everything(experiment.seed, rank)
        context = RoleContext("trainer", scratch, index=rank)
        bus = BusClient(None, "oracle")
        self.trainer = build_trainer(experiment, context, torch.device("cpu"), bus, RoleStatus(context, bus))
        self.objective = loss_of(experiment)
        self._base = {name: local(t).detach().clone() for name, t in self._weights()}
        self._random = {name: state.clone() for name, state in random_state(rank).items()}

    def _weights(self) -> list[tuple[str, Any]]:
        return self.trainer.train_step.policy.named_weights()

    def differences(self, run_dir: Path, step: int) -> list[str]:
        """See `Oracle.differences`."""
        import torch

        from prime_hpc.store.checkpoint.checkpoints import resolve_resume
        from prime_hpc.store.run_paths import RunPaths
        from prime_hpc.trainer.batching.micro_batches import read_local_batch
        from prime_hpc.trainer.checkpointing import dcp_state
        from prime_hpc.trainer.checkpointing.random_state import random_state, set_random_state
        from prime_hpc.trainer.parallel.tensor import local

        trainer, rank = self.trainer, self.trainer.rank
        with torch.no_grad():
            for name, tensor in self._weights():
                local(tensor).copy_(self._base[name])
        optimizer = trainer.train_step.optimizer
        optimizer.state.clear()
        set_random_state(self._random)
        for number in range(1, step + 1):
            batch = read_local_batch(RunPaths(run_dir).rollouts_step(number), rank, trainer.world_size)
            trainer.train_step.run(number, batch, self.objective)
        live = dcp_state.named_state(trainer.train_step.policy, optimizer)
        state = live | random_state(rank)
        computed = {name: local(tensor).clone() for name, tensor in state.items()}
        info = resolve_resume(RunPaths(run_dir).checkpoints, step, deep=False)
        found = dcp_state.differences(dcp_state.read_metadata(info.trainer_dir), live)
        if found:
            return found
        dcp_state.load_state(info.trainer_dir, state)
        return [
            f"rank {rank}: {name}" for name, tensor in state.items() if not torch.equal(local(tensor), computed[name])
        ]


def main(run_dir: str, rank: str, store: str, scratch: str) -> None:
    """Answer until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        own = Rank(Path(run_dir), int(rank), store, Path(scratch))
        for line in sys.stdin:
            directory, step = json.loads(line)
            try:
                found = own.differences(Path(directory), step)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run is not what it should be
                found = [f"rank {rank}: {type(error).__name__}: {error}"]
            answers.write(json.dumps(found) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
