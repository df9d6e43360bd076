"""Checkpoints of the trainer: parameters, optimizer, progress and random states through torch DCP.

Called by `rl.py` and `sft.py`. Tensors are saved by name and global shape, so a checkpoint loads under any number of
ranks. For RL, rank 0 joins the orchestrator's state of the same step to it (`store.checkpoints`).
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from prime_hpc.store import files as store_files
from prime_hpc.store.artifact import hash_files, prepare_stage, stage_dir
from prime_hpc.store.checkpoints import TRAINER, CheckpointInfo, commit_checkpoint
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.model import Policy


class Checkpointer:
    """Saves and loads one policy and its optimizer. `save` and `load` are collective."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        paths: RunPaths,
        *,
        incarnation: int,
        meta: Mapping[str, Any],
    ) -> None:
        """
        Args:
            policy, optimizer: what is saved.
            paths: the run (its `checkpoints` may lie elsewhere).
            incarnation: life of the run.
            meta: plain JSON for the manifest.
        """
        self._policy, self._optimizer, self._paths = policy, optimizer, paths
        self._incarnation, self._meta = incarnation, dict(meta)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def save(self, step: int, *, progress: Mapping[str, int], batch_dir: Path | None) -> None:
        """Commit `checkpoints/step_<step>`.

        Args:
            step: updates done.
            progress: whole numbers, e.g. samples seen; `load` gives them back.
            batch_dir: artifact of batch `step`, whose orchestrator state belongs to the checkpoint; None for SFT.

        Raises:
            StoreError: disk full, fenced, or other content has this name.
        """
        final = self._paths.checkpoint_step(step)
        stage = stage_dir(final, self._incarnation)
        try:
            if self._rank == 0:
                prepare_stage(final, self._incarnation, run=self._paths)
            dist.barrier()  # the stage exists
            state = self._state() | {"progress": {"step": step, **progress}} | self._random_state()
            # DCP's own files; one per rank. hash_files below makes them durable.
            dcp.save(state, storage_writer=dcp.FileSystemWriter(stage / TRAINER, sync_files=False))
            own = [f"{TRAINER}/{name}" for name in self._own_files(stage / TRAINER)]
            gathered: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
            dist.gather_object(hash_files(stage, own), gathered)
            if gathered is not None:
                commit_checkpoint(
                    stage,
                    final,
                    step=step,
                    trainer_files={name: entry for part in gathered for name, entry in part.items()},
                    batch_dir=batch_dir,
                    run=self._paths,
                    incarnation=self._incarnation,
                    meta=self._meta | {"world_size": self._world_size},
                )
        except BaseException:
            if self._rank == 0:  # whatever ended this, nothing half-written stays behind
                store_files.remove_tree(stage)
            raise
        dist.barrier()  # nobody begins the next step's work on a checkpoint that is still being committed

    def _own_files(self, directory: Path) -> list[str]:
        """DCP names files `__<rank>_<n>.distcp`; rank 0 also writes `.metadata`."""
        own = [p.name for p in directory.iterdir() if p.name.startswith(f"__{self._rank}_")]
        return own + [".metadata"] * (self._rank == 0)

    def load(self, info: CheckpointInfo) -> dict[str, int]:
        """Restore parameters, optimizer and (for ranks that existed) random states.

        Returns:
            the `progress` that was saved.
        """
        reader = dcp.FileSystemReader(info.trainer_dir)
        known = reader.read_metadata().state_dict_metadata
        state = self._state()
        randoms = {key: value for key, value in self._random_state().items() if key in known}
        names = [key.removeprefix("progress.") for key in known if key.startswith("progress.")]
        state |= {"progress": dict.fromkeys(names, 0)} | randoms
        dcp.load(state, storage_reader=reader)
        # The config may have changed since: its betas, decay and so on hold, not the saved ones.
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        set_state_dict(
            self._policy,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)
        self._set_random_state({key: state[key] for key in randoms})
        return {name: int(value) for name, value in state["progress"].items()}

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._policy, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _random_state(self) -> dict[str, torch.Tensor]:
        """This rank's generators as tensors, under names of its own."""
        state: Any = np.random.get_state()
        _, keys, position, has_gauss, gauss = state  # always MT19937
        numpy_state = np.concatenate(
            [np.asarray(keys, np.uint32).view(np.uint8), _bytes_of(position, has_gauss, gauss)]
        )
        version, internal, gauss_next = random.getstate()
        python_state = np.concatenate(
            [
                np.asarray(internal, np.uint32).view(np.uint8),
                _bytes_of(version, gauss_next is not None, gauss_next or 0.0),
            ]
        )
        states = {
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(numpy_state),
            "python": torch.from_numpy(python_state),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return {f"random_{self._rank}_{key}": value for key, value in states.items()}

    def _set_random_state(self, states: Mapping[str, torch.Tensor]) -> None:
        for key, value in states.items():
            kind = key.rsplit("_", 1)[1]
            if kind == "torch":
                torch.set_rng_state(value)
            elif kind == "cuda":
                torch.cuda.set_rng_state(value)
            else:
                raw = value.numpy()
                words = raw[:-24].view(np.uint32)
                first, flag, gauss = raw[-24:].view(np.float64)
                if kind == "numpy":
                    np.random.set_state(("MT19937", words, int(first), int(flag), float(gauss)))
                else:
                    random.setstate((int(first), tuple(int(w) for w in words), float(gauss) if flag else None))


def _bytes_of(*values: float) -> np.ndarray:
    """Three numbers as 24 bytes (whole numbers this small are exact in float64)."""
    return np.array(values, dtype=np.float64).view(np.uint8)
