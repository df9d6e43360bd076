"""Checkpoints of the trainer: parameters, optimizer, progress and random states, written at once or in the background.

    main thread    | step n | save(n) starts | step n+1: forward, backward | update | ... | settle |
    background                [copy to host] [write own file, fsync] [rank 0: manifest, rename, prune]

The state changes only in the optimizer's update, so the copy runs beside the next forward and backward pass; a hook on
the optimizer holds the update back until the copy is done. Ranks talk about a save over a gloo group of its own, so the
training's collectives never mix with it.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prime_hpc.config.sections.common import CkptConfig
from prime_hpc.store.artifact import if_removable, prepare_stage, stage_dir
from prime_hpc.store.checkpoint.checkpoints import TRAINER, CheckpointInfo, commit_checkpoint, prune_checkpoints
from prime_hpc.store.errors import NoRoom, OtherRunError, StoreError, Unreadable
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.disk import free_bytes, size_text
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.lustre import lack_of_room
from prime_hpc.store.model.fingerprint import adapter_conflicts, conflicts, critic_conflicts, head_conflicts
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing import dcp_state
from prime_hpc.trainer.checkpointing.random_state import random_state, set_random_state
from prime_hpc.trainer.checkpointing.staging import HostStage
from prime_hpc.trainer.checkpointing.verify import verify_parts
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.threads import rank_thread

CRITIC = "critic."
"""Beginning of the names of a critic's tensors."""
FINAL_JOIN_TIMEOUT_S = 60.0
"""Rank 0 has heard of a save's end: the others hear of it within this."""


@dataclass(frozen=True)
class SaveFigures:
    """Cost of a save."""

    step: int
    size: int
    """Bytes of this rank's part."""
    stall_s: float
    """By how much it held up training on this rank."""
    write_s: float
    """From the state that it holds until its checkpoint was whole."""
    own_s: float = 0.0
    """Of that, for this rank's files alone."""


@dataclass
class _Save:
    """One save under way."""

    step: int
    meta: dict[str, Any]
    batch_dir: Path | None
    stage: Path
    final: Path
    began: float
    stall_s: float = 0.0
    size: int = 0
    own_s: float = 0.0
    ended: float = 0.0
    thread: threading.Thread | None = None
    error: BaseException | None = None


class Checkpointer:
    """Saves and loads one policy and its optimizer. `save`, `wait_for_save`, `finish` and `load` are collective."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        paths: RunPaths,
        *,
        incarnation: int,
        meta: Mapping[str, Any],
        config: CkptConfig | None = None,
        slot: int = 0,
        others: Mapping[str, tuple[Policy, torch.optim.Optimizer]] | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Args:
        policy, optimizer: what is saved; of a policy with adapters, the one in `slot`.
        others: more models with their optimizers, by what their tensors' names begin with.
        extra: small tensors beside them, the same on all ranks. They stay as they are where a checkpoint has none.
        meta: plain JSON for the manifest; `identity` (see `store.model.fingerprint`), `kind` and `adapter` are compared
            by `load`.
        config: None saves synchronously and keeps everything.
        """
        self._policy, self._paths, self._slot = policy, paths, slot
        self._models = {"": (policy, optimizer), **(others or {})}
        self._incarnation, self._meta, self._extra = incarnation, dict(meta), dict(extra or {})
        self._config = config or CkptConfig()
        self._ranks = RankGroup()
        self._side: RankGroup | None = None
        """Of saves alone."""
        self._plan: dcp_state.ShardPlan | None = None
        self._signature: tuple[Any, ...] = ()
        self._room: HostStage | None = None
        self._room_plan: dcp_state.ShardPlan | None = None
        """The plan for which there is room: the same one on all ranks."""
        self._save: _Save | None = None
        self._staged = threading.Event()
        self._figures: SaveFigures | None = None
        if self._config.save_async:
            for _, each in self._models.values():
                each.register_step_pre_hook(self._before_update)

    # ------------------------------------------------------------------------------------------------ saving

    @property
    def in_flight(self) -> int | None:
        """Step of the save that is being written. Its weights version must be kept though it has no name yet."""
        return self._save.step if self._save is not None else None

    @property
    def has_ended(self) -> bool:
        """True if a save in flight has come to its end on this rank: time to `wait_for_save`."""
        return self._save is not None and self._save.thread is not None and not self._save.thread.is_alive()

    def save(self, step: int, *, progress: Mapping[str, int], batch_dir: Path | None) -> None:
        """Commit `checkpoints/step_<step>`; with `save_async`, begin to: `wait_for_save` or `finish` say how it went.

        Args:
            progress: whole numbers, e.g. samples seen; `load` gives them back.
            batch_dir: artifact of batch `step`, whose orchestrator state belongs to the checkpoint; None for SFT.

        Raises:
            NoRoom: the disk is full, or a quota used up.
            StoreError: fenced, or other content has this name; also of a save still in flight.
        """
        began = time.perf_counter()
        self.finish()
        if self._side is None:
            self._side = RankGroup(self._config.timeout_s)
        state = self._state()
        plan = self._plan_for(state)
        parts = {name: local(state[name]) for name in plan.names}
        final = self._paths.checkpoint_step(step)
        stage = stage_dir(final, self._incarnation)
        meta = self._meta | {"world_size": self._ranks.world_size, "progress": {"step": step, **progress}}
        save = _Save(step, meta, batch_dir, stage, final, began)
        if not self._config.save_async:
            self._write(save, plan, parts, None)
            save.stall_s = time.perf_counter() - began
            self._record(save)
            return
        self._make_room(plan, parts)
        event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._staged.clear()
        save.thread = rank_thread(self._in_background, args=(save, plan, parts, event), name=f"save-{step}")
        self._save = save
        save.thread.start()
        save.stall_s += time.perf_counter() - began

    def prepare(self) -> None:
        """Take the memory for asynchronous saves. Collective at its first call, which comes after the first step.
        Raises StoreError: there is too little on some rank; on all."""
        if not self._config.save_async or self._room is not None:
            return
        state = self._state()
        plan = self._plan_for(state)
        self._make_room(plan, {name: local(state[name]) for name in plan.names})

    def wait_for_save(self) -> None:
        """Take note of a save that has ended on rank 0. Every rank calls it then.
        Raises StoreError: it failed, on whichever rank."""
        self._join(FINAL_JOIN_TIMEOUT_S)

    def finish(self) -> None:
        """Wait for the save in flight, if any. Raises StoreError: it failed, or took longer than `ckpt.timeout_s`."""
        self._join(self._config.timeout_s)

    def close(self) -> None:
        """No more saves: give the side group back. Collective; nothing is in flight."""
        if self._side is not None:
            self._side.close()
            self._side = None

    def take_figures(self) -> SaveFigures | None:
        """Return the cost of the save that ended last; None when that was told before."""
        figures, self._figures = self._figures, None
        return figures

    def _state(self) -> dict[str, torch.Tensor]:
        return self._named_state() | self._extra | random_state(self._ranks.rank)

    def _named_state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for owner, (model, optimizer) in self._models.items():
            state |= dcp_state.named_state(model, optimizer, self._slot, owner)
        return state

    def _plan_for(self, state: dict[str, torch.Tensor]) -> dcp_state.ShardPlan:
        """Return the plan of who writes what; made again when tensors came or went, which they do on all ranks
        alike."""
        now = dcp_state.signature(state)
        if self._plan is None or now != self._signature:
            self._plan, self._signature = dcp_state.plan_shards(state), now
        return self._plan

    def _make_room(self, plan: dcp_state.ShardPlan, parts: Mapping[str, torch.Tensor]) -> None:
        """Take the memory for a plan's parts, unless it is there. Collective where the plan is new.
        Raises StoreError: there is too little on some rank; on all."""
        if plan is self._room_plan:
            return
        self._room = self._room_plan = None  # what it takes is free again before others measure
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = self._ranks.on_all(lambda: HostStage(parts, self._config.staging_dir, ranks_per_node))
        # Only now that all have measured: what one has touched, another of this node would count as taken.
        rank_thread(room.touch, name="touch-staging").start()
        self._room, self._room_plan = room, plan

    def _before_update(self, *_: Any) -> None:
        """Hold the optimizer's update back until the state before it is copied."""
        save = self._save
        if save is None or self._staged.is_set():
            return
        began = time.perf_counter()
        if not self._staged.wait(self._config.timeout_s):
            raise StoreError(f"the state of step {save.step} was not copied within ckpt.timeout_s")
        save.stall_s += time.perf_counter() - began

    def _in_background(
        self, save: _Save, plan: dcp_state.ShardPlan, parts: dict[str, torch.Tensor], event: "torch.cuda.Event | None"
    ) -> None:
        """Copy, let training go on, write: the save's thread."""
        failure: Exception | None = None
        try:
            assert self._room is not None
            self._room.copy(parts, event)
            parts = self._room.tensors
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, then it is raised
            failure = error
        finally:
            self._staged.set()
        try:
            self._write(save, plan, parts, failure)
        except Exception as error:  # noqa: BLE001 - raised by `wait_for_save` or `finish` in the main thread
            save.error = error

    def _write(
        self, save: _Save, plan: dcp_state.ShardPlan, parts: Mapping[str, torch.Tensor], failure: Exception | None
    ) -> None:
        """Write this rank's part; on rank 0 commit when all have. All ranks learn how it went.
        Raises StoreError: some rank failed."""
        side = self._side
        assert side is not None

        def write() -> tuple[dict[str, FileEntry], list[Any]]:
            if failure is not None:
                raise failure
            for directory in (save.stage, save.stage / TRAINER):  # rank 0's node made them
                store_files.await_name(directory)
            began = time.perf_counter()
            written = plan.write(save.stage / TRAINER, parts)
            save.own_s = time.perf_counter() - began
            return written

        try:
            side.from_first(lambda: self._open_stage(save, sum(part.nbytes for part in parts.values())))
            entries, results = side.on_all(write)
            save.size = sum(entry.size for entry in entries.values())
            gathered = side.gather((entries, results))
            side.from_first(lambda: self._commit(save, plan, gathered or []))
            save.ended = time.perf_counter()
        except BaseException:
            if side.rank == 0:
                store_files.clear_away(save.stage)
            raise
        side.from_first(self.prune)

    def _open_stage(self, save: _Save, num_bytes: int) -> None:
        """Rank 0: an empty stage, on a disk that has room for it."""
        free, needed = free_bytes(save.final), num_bytes * self._ranks.world_size
        if free < needed:
            raise NoRoom(
                f"{save.final}: disk full: a checkpoint takes about {size_text(needed)}, {size_text(free)} are "
                "free: free space, choose another ckpt.path, or keep fewer (ckpt.keep_last)",
                needed,
            )
        lack = lack_of_room(save.final, self._ranks.world_size, num_bytes)
        if lack is not None:
            raise NoRoom(f"{save.final}: {lack}: free space, or choose another ckpt.path")
        prepare_stage(save.final, self._incarnation, run=self._paths, file_bytes=num_bytes)
        store_files.make_dir(save.stage / TRAINER)

    def _commit(self, save: _Save, plan: dcp_state.ShardPlan, gathered: list[Any]) -> None:
        """Rank 0: everything is durable but the manifest."""
        entries = {name: entry for part, _ in gathered for name, entry in part.items()}
        entries |= plan.write_metadata(save.stage / TRAINER, [results for _, results in gathered])
        own = self._incarnation
        commit_checkpoint(self._paths, save.step, entries, save.batch_dir, incarnation=own, meta=save.meta)

    def make_room(self) -> bool:
        """Rank 0: where there is none, delete what retention gives up with the next checkpoint; the newest stays.
        Returns whether there was something. Raises FencedError: a newer attempt has begun."""
        config, removed = self._config, list[int]()
        if config.keep_last is not None and config.keep_last > 1:
            with if_removable("checkpoints"):
                removed = prune_checkpoints(self._paths, config.keep_last - 1, config.keep_interval, self._incarnation)
        return bool(removed)

    def prune(self) -> None:
        """Rank 0: delete the checkpoints that retention gives up. That it cannot is no reason to end a run.
        Raises FencedError: a newer attempt has begun."""
        config = self._config
        with if_removable("checkpoints"):
            prune_checkpoints(self._paths, config.keep_last, config.keep_interval, self._incarnation)

    def _join(self, timeout_s: float) -> None:
        save = self._save
        if save is None:
            return
        assert save.thread is not None
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            raise StoreError(f"the checkpoint of step {save.step} was not written within {timeout_s:.0f} s")
        self._save = None
        if isinstance(save.error, NoRoom | Unreadable):
            raise save.error
        if save.error is not None:
            raise StoreError(f"the checkpoint of step {save.step} was not saved: {save.error}") from save.error
        self._record(save)

    def _record(self, save: _Save) -> None:
        self._figures = SaveFigures(save.step, save.size, save.stall_s, save.ended - save.began, save.own_s)

    # ------------------------------------------------------------------------------------------------ loading

    def load(self, info: CheckpointInfo, patience_s: float | None = None) -> dict[str, int]:
        """Restore parameters, optimizer and (for ranks that existed) random states, under any number of ranks.

        Learning rate, betas, decay and the like are the config's, not the saved ones. The sums of all files are checked
        first, each rank's by itself.

        Args:
            patience_s: see `verify_parts`.

        Returns:
            the `progress` that was saved.

        Raises:
            OtherRunError: it is a checkpoint of another model, tokenizer, optimizer or kind of run.
            Unreadable: a file is not what the manifest says, or cannot be read. Either on all ranks.
        """
        verify_parts(info, self._paths, patience_s)
        problems = self.mismatches(info)
        progress = info.manifest.meta.get("progress")
        if progress is None:
            problems.append("its manifest states no progress (written by an older prime-hpc?)")
        metadata = self._ranks.on_all(lambda: dcp_state.read_metadata(info.trainer_dir))
        for owner, (model, optimizer) in self._models.items():
            dcp_state.create_optimizer_state(optimizer)
            dcp_state.drop_unsaved_state(model, optimizer, metadata, self._slot, owner)
        state = self._named_state()
        for owner in self._models:
            problems = problems or dcp_state.differences(metadata, state, owner=owner)
        if problems or progress is None:
            raise OtherRunError(f"{info.path} cannot be resumed from: {'; '.join(problems)}")
        saved = metadata.state_dict_metadata
        randoms = {k: v for k, v in random_state(self._ranks.rank).items() if k in saved}
        extra = {k: v for k, v in self._extra.items() if k in saved}
        dcp_state.load_state(info.trainer_dir, state | extra | randoms)
        set_random_state(randoms)
        return {name: int(value) for name, value in progress.items()}

    def mismatches(self, info: CheckpointInfo) -> list[str]:
        """In which respects a checkpoint's manifest says that it is not of this model or kind of run."""
        meta = info.manifest.meta
        found = conflicts(meta.get("identity") or {}, self._meta.get("identity") or {})
        kinds = meta.get("kind"), self._meta.get("kind")
        if None not in kinds and kinds[0] != kinds[1]:
            found.append(f"it is of a {kinds[0]} run, this is {kinds[1]}")
        found += adapter_conflicts(meta.get("adapter"), self._meta.get("adapter"))
        found += critic_conflicts(meta, CRITIC in self._models)
        return found + head_conflicts(meta, self._policy.scores)
