"""The loop of a trainer that trains many runs: rank 0 looks, decides and tells; all ranks do the same.

    every turn:  stop? > save asked? > a run has to leave? > a slot is free? > whose batch is next? > wait

A turn is one command, broadcast from rank 0 (`Command`); micro-batches of two runs are never mixed, and no tensor of a
run is touched in another's turn. What goes wrong with one run (its files, its config, a refused step, the death of its
orchestrator, its deadline) ends that run, its slot is free, and the next turn follows. One for whose version or last
checkpoint there is no room tries again now and then, in a turn of its own.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.observe.metrics import MetricsWriter, last_step
from prime_hpc.observe.role_status import Status
from prime_hpc.runtime import activity
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.child_runs import ChildState, write_state
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io.files import VISIBLE_S
from prime_hpc.store.io.room import RoomWait
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import ArtifactWatch
from prime_hpc.trainer.multi.admission import Admission
from prime_hpc.trainer.multi.child_run import Child, begin_child
from prime_hpc.trainer.multi.fair_queue import FairQueue
from prime_hpc.trainer.multi.run_slots import Leave, RunSlots
from prime_hpc.trainer.train_step import StepRefused
from prime_hpc.trainer.trainer import load_base

TURN_S = 5.0
"""Rank 0 speaks at least so often: the others wait in a collective, which has a deadline of its own."""
PAUSE_S = 0.1
"""Between two looks for batches; the bus usually ends it."""
BROKEN_S = VISIBLE_S
"""A batch that is there but not what its manifest says fails its run after so long: until then it may come in sight."""
_TIMES = ("time/forward_backward", "time/optim", "time/publish", "time/checkpoint")
_KEPT = ("loss", "grad_norm", "lr", "reward", "kl", "ratio", "num_tokens", "num_sequences", "ranks/slow", *_TIMES)
"""Of a run's metrics, in the parent's row of its step."""
ENDS_A_RUN = (StepRefused, StoreError)
"""Errors that end one run; raised on all ranks alike."""


class Kind(StrEnum):
    """Kind of a turn."""

    WAIT = "wait"
    ADMIT = "admit"
    TRAIN = "train"
    SETTLE = "settle"
    """A version or a checkpoint is written, for which there was no room."""
    SAVE = "save"
    WAIT_FOR_SAVE = "wait_for_save"
    """A save in the background has ended."""
    LEAVE = "leave"
    END = "end"


@dataclass(frozen=True)
class Command:
    """Rank 0's word for one turn."""

    kind: Kind
    name: str = ""
    admission: Admission | None = None
    leave: Leave | None = None
    save: bool = False
    reason: str = ""


@dataclass
class _Watch:
    """Rank 0: the next batch of a run, and since when it is waited for."""

    batch: ArtifactWatch
    since: float = field(default_factory=time.monotonic)
    broken_since: float | None = None
    """Since when it is not what its manifest says, or not there at all though it was announced."""

    def look(self, now: float) -> StoreError | None:
        """Return why it is not whole, having noted since when it is broken; one that cannot be read now is not."""
        error = self.batch.error if self.batch.found_at is not None else None
        if error is None or isinstance(error, Unreadable):
            self.broken_since = None
        elif self.broken_since is None:
            self.broken_since = now
        return error


@dataclass
class _Held:
    """Rank 0: what a run tries again, while the others train: there was no room for it."""

    wait: RoomWait
    command: Command
    error: NoRoom | Unreadable
    at: float = 0.0


class MultiTrainer:
    """One rank's life with many runs."""

    def __init__(
        self, experiment: Experiment, context: RoleContext, device: torch.device, bus: BusClient, status: Status
    ) -> None:
        """Load the model. Collective; raises what `trainer.load_base` does."""
        num_slots = experiment.trainer.max_concurrent_runs
        self._experiment, self._bus, self._status = experiment, bus, status
        self._base = load_base(experiment, device, num_slots)
        self._rank, self._paths = dist.get_rank(), RunPaths(context.run_dir)
        self._children: dict[str, Child] = {}
        self._watches: dict[str, _Watch] = {}
        self._held: dict[str, _Held] = {}
        self._leaving: list[Leave] = []
        self._queue = FairQueue(num_slots)
        self._run_slots: RunSlots | None = None
        self._metrics: MetricsWriter | None = None
        self._num_steps, self._last_at = 0, time.perf_counter()
        self._idle_since, self._is_idle = time.monotonic(), False
        if self._rank == 0:
            self._run_slots = RunSlots(experiment, context.run_dir, context.incarnation, self._announce)
            self._num_steps = last_step(self._paths.metrics("trainer"))  # of all its attempts
            self._metrics = MetricsWriter(self._paths.metrics("trainer"))

    def run(self) -> None:
        """Turn after turn, until nothing is left to do or somebody says stop. Collective."""
        self._status.ready(step=0, world_size=dist.get_world_size(), slots=self._experiment.trainer.max_concurrent_runs)
        try:
            while True:
                activity.doing("wait", awaits="batches of its runs" if self._children else activity.RUNS)
                command = self._base.control.broadcast(self._decide() if self._rank == 0 else Command(Kind.WAIT))
                if command.kind is Kind.END:
                    self._end(command)
                    return
                self._execute(command)
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def _announce(self, name: str, state: ChildState) -> None:
        self._bus.publish("run", name=name, phase=state.phase, step=state.step, incarnation=state.incarnation)

    # ------------------------------------------------------------------------------------------------ rank 0 decides

    def _decide(self) -> Command:
        """Return the next order; waits a little where there is none."""
        end = time.monotonic() + TURN_S
        while True:
            command = self._next_command()
            if command is not None:
                return command
            if time.monotonic() >= end:
                return Command(Kind.WAIT)
            self._bus.wait_for_any(PAUSE_S)

    def _next_command(self) -> Command | None:
        assert self._run_slots is not None
        stop = self._bus.latest("stop")
        if stop is not None:
            return Command(Kind.END, save=bool(stop.get("save")), reason=str(stop.get("reason", "asked to")))
        for name, child in self._children.items():
            if child.trainer.saver.checkpointer.has_ended:
                return Command(Kind.WAIT_FOR_SAVE, name)
            if child.trainer.saver.is_asked:
                child.trainer.saver.take_up()
                held = self._held.get(name)
                if held is None or held.command.kind is not Kind.LEAVE:  # that one's last save is the answer
                    return Command(Kind.SAVE, name)
        self._leaving += self._run_slots.look()
        self._leaving += [leave for leave in map(self._trouble, self._watches) if leave is not None]
        while self._leaving:
            leave = self._leaving.pop(0)
            if leave.name in self._children:
                return Command(Kind.LEAVE, leave.name, leave=leave)
        for name, held in list(self._held.items()):
            if time.monotonic() >= held.at:
                if held.wait.has_room:
                    return held.command
                self._pause(name, held)
        admission = self._run_slots.admit()
        if admission is not None:
            return Command(Kind.ADMIT, admission.name, admission=admission)
        ready = {name for name, watch in self._watches.items() if watch.batch.poll() is not None}
        chosen = self._queue.choose(ready)
        if chosen is not None:
            return Command(Kind.TRAIN, chosen)
        return self._idle()

    def _idle(self) -> Command | None:
        """No run trains or waits: for how long?"""
        assert self._run_slots is not None
        is_idle = not self._children and not self._run_slots.waiting
        self._say_idle(is_idle)
        if not is_idle:
            return None
        limit = self._experiment.trainer.runs_idle_timeout_s
        if time.monotonic() - self._idle_since < max(limit, PAUSE_S):
            return None
        self._run_slots.look(now=True)
        if self._run_slots.waiting or self._run_slots.is_changing:
            return None
        return Command(Kind.END, reason=f"no run was left to train for trainer.runs_idle_timeout_s = {limit:g} s")

    def _say_idle(self, is_idle: bool) -> None:
        """No run is no stall; since when there is none."""
        if is_idle != self._is_idle:
            self._is_idle, self._idle_since = is_idle, time.monotonic()
            self._status.beat(idle=is_idle)

    def _trouble(self, name: str) -> Leave | None:
        """Why a run cannot go on, as far as others say or its clock tells."""
        child, watch = self._children[name], self._watches[name]
        word = child.trainer.bus.latest("orchestrator") or {}
        if word.get("state") == "failed":
            return Leave(name, "failed", str(word.get("reason")), save=True)
        now, limit = time.monotonic(), child.trainer.experiment.trainer.batch_timeout_s
        error = watch.look(now)
        if watch.broken_since is not None:
            if now - watch.broken_since > min(BROKEN_S, limit):
                return Leave(name, "failed", f"batch {child.step + 1} is broken: {error}", save=True)
        elif (error is not None or watch.batch.found_at is None) and now - watch.since > limit:
            reason = f"no batch {child.step + 1} within trainer.batch_timeout_s = {limit:g} s"
            return Leave(name, "failed", f"{reason}: {error}" if error is not None else reason, save=True)
        return None

    # ------------------------------------------------------------------------------------------------ all ranks obey

    def _execute(self, command: Command) -> None:
        """Do what rank 0 said. Errors of one run end that run; others are raised."""
        if command.kind is not Kind.WAIT:
            activity.doing(command.kind)
        try:
            if command.kind is Kind.ADMIT:
                self._admit(command)
            elif command.kind is Kind.TRAIN:
                self._train(command.name)
            elif command.kind is Kind.SETTLE:
                self._settle(command.name)
            elif command.kind is Kind.SAVE:
                self._children[command.name].save()
            elif command.kind is Kind.WAIT_FOR_SAVE:
                self._children[command.name].trainer.saver.wait_for_save()
            elif command.leave is not None:
                self._leave(command.leave)
        except ENDS_A_RUN as error:
            if not self._is_put_off(command, error):
                self._failed(command.name, error)
        except Exception as error:
            self._mark_failed(command.name, error)
            raise

    def _is_put_off(self, command: Command, error: StepRefused | StoreError) -> bool:
        """Return whether what failed is tried again, in a turn of its own: there was no room for what a run writes."""
        child = self._children.get(command.name)
        if child is None or not isinstance(error, NoRoom | Unreadable):
            return False
        if command.kind is not Kind.LEAVE and child.trained is None:
            return False
        if self._rank == 0 and command.kind is not Kind.SAVE:  # asked for meanwhile: it is held already
            what = f"{child.name}: what step {child.step} has made"
            paths, is_leaving = child.trainer.paths, command.kind is Kind.LEAVE
            wait = RoomWait(what, paths.root, self._experiment.supervisor.write_timeout_s)
            self._watches.pop(child.name, None)  # it trains no further meanwhile
            held = self._held.setdefault(child.name, _Held(wait, command, error))
            held.command, held.error = command if is_leaving else Command(Kind.SETTLE, child.name), error
            is_checkpoint = is_leaving or child.published == child.step
            held.wait.where = paths.checkpoint_step(child.step) if is_checkpoint else paths.root
            self._pause(child.name, held)
        return True

    def _pause(self, name: str, held: _Held) -> None:
        """On rank 0: have a run that is held wait before its next try. One that has waited too long fails."""
        try:
            held.at = time.monotonic() + held.wait.next_pause(held.error)
        except NoRoom as over:
            del self._held[name]
            self._leaving.append(Leave(name, "failed", str(over)))

    def _admit(self, command: Command) -> None:
        assert command.admission is not None
        child = begin_child(self._base, command.admission, self._experiment.micro_batch_tokens, self._bus)
        self._children[command.name] = child
        if self._run_slots is not None:
            logger.info(f"{command.name}: takes slot {command.admission.slot} at step {child.step}")
            self._say_idle(False)
            self._run_slots.began(command.admission, child.step, child.progress)
            self._queue.add(command.name)
            self._watches[command.name] = _Watch(child.next_batch())
        if child.is_done:  # its last version alone was missing
            self._close(command.name, "done", None)

    def _train(self, name: str) -> None:
        child = self._children[name]
        child.advance()
        assert child.trained is not None
        if self._run_slots is not None:
            ready = {n for n, w in self._watches.items() if w.batch.poll() is not None}
            self._queue.trained(name, child.last_tokens, ready)
        self._settle(name)

    def _settle(self, name: str) -> None:
        child = self._children[name]
        assert child.trained is not None
        started, metrics = child.trained[1], child.settle()
        self._was_written(name)
        if self._run_slots is not None:
            self._watches[name] = _Watch(child.next_batch())
            self._run_slots.trained(name, child.step, child.num_samples, child.num_tokens)
            self._report(child, metrics, started)
        if child.is_done:
            self._close(name, "done", None)

    def _was_written(self, name: str) -> None:
        """On rank 0: there was room for what a run was held for, if it was."""
        if (held := self._held.pop(name, None)) is not None:
            held.wait.over()

    def _report(self, child: Child, metrics: dict[str, float], started: float) -> None:
        """Log a row among the parent's own metrics: the trainer's share of time, and whose step it was."""
        now = time.perf_counter()
        self._num_steps += 1
        row: dict[str, Any] = {"run": child.name, "run/step": child.step}
        row |= {"run/max_steps": child.trainer.experiment.max_steps, "runs/training": len(self._children)}
        row |= {"time/wait": round(started - self._last_at, 4), "time/step": round(now - self._last_at, 4)}
        row["tokens_per_s"] = metrics["num_tokens"] / max(now - started, 1e-9)
        row |= {key: metrics[key] for key in _KEPT if key in metrics}
        self._last_at = now
        assert self._metrics is not None
        self._metrics.log(self._num_steps, **row)
        self._status.beat(step=self._num_steps, run=child.name, run_step=child.step)

    def _leave(self, leave: Leave) -> None:
        if leave.save:
            self._children[leave.name].save(is_last=True)
            self._was_written(leave.name)
        self._close(leave.name, leave.phase, leave.reason)

    def _failed(self, name: str, error: BaseException) -> None:
        if name in self._children:
            self._close(name, "failed", str(error), error)
        elif self._run_slots is not None and isinstance(error, NoRoom | Unreadable):
            self._run_slots.put_back(name, error)
        elif self._run_slots is not None:  # it could not even begin
            self._run_slots.ended(name, "failed", str(error))

    def _close(self, name: str, phase: Any, reason: str | None, error: BaseException | None = None) -> None:
        """End a run and free its slot."""
        trouble = self._children.pop(name).close(error)
        if trouble is not None:
            phase, reason = "failed", "; ".join(filter(None, [reason, trouble]))
        if self._run_slots is not None:
            self._watches.pop(name, None)
            if (held := self._held.pop(name, None)) is not None:
                held.wait.give_up(reason or "the run has left")
            self._queue.remove(name)
            self._run_slots.ended(name, phase, reason)

    def _mark_failed(self, name: str, error: BaseException) -> None:
        """Mark a run as failed in whose turn this rank cannot go on. Should it be the reason, the next attempt leaves
        it out: it is marked as failed by whoever saw it."""
        if isinstance(error, RuntimeError | OSError) or name not in self._children:
            return  # a lost rank, memory, the network: whose turn it was says nothing
        child = self._children[name]
        reason = f"it ended the trainer: rank {self._rank}: {type(error).__name__}: {error}"
        state = ChildState(
            "failed", reason, step=child.step, max_steps=child.trainer.experiment.max_steps, **child.progress
        )
        try:
            write_state(child.trainer.paths.root, state)
        except (StoreError, OSError) as failure:
            logger.error(f"{name}: {reason}; and this could not be written: {failure}")

    def _end(self, command: Command) -> None:
        """Take the last turn. What still trains goes on in the trainer's next attempt, but for what has a STOP file."""
        unsaved, errors = list(self._children) if command.save else [], dict[str, StepRefused | StoreError]()
        for room_s in (None, self._experiment.supervisor.write_timeout_s):  # none waits before all others have saved
            for name in unsaved:
                errors.pop(name, None)
                self._children[name].trainer.saver.room_s = room_s
                try:
                    self._children[name].save(is_last=True)
                except ENDS_A_RUN as error:
                    errors[name] = error
            unsaved = [name for name in unsaved if isinstance(errors.get(name), NoRoom | Unreadable)]
        # whose file STOP was seen is saved and over: not for the next attempt to begin
        leaves = [leave for leave in (*self._leaving, *(held.command.leave for held in self._held.values())) if leave]
        stopped = {leave.name: leave.reason for leave in leaves if leave.phase == "stopped" and command.save}
        for name, child in self._children.items():
            trouble = child.close() or (str(errors[name]) if name in errors else None)
            if trouble is not None and self._rank == 0:
                logger.error(f"{name}: its checkpoint of step {child.step} was not saved: {trouble}")
            if self._run_slots is not None and name in stopped:
                reason = "; ".join(filter(None, [stopped[name], trouble]))
                self._run_slots.ended(name, "stopped" if trouble is None else "failed", reason)
        if self._rank == 0:
            steps = ", ".join(f"{name} at step {child.step}" for name, child in self._children.items()) or "none"
            logger.info(f"stopping: {command.reason}; runs that were training: {steps}")


def run_multi(
    experiment: Experiment, context: RoleContext, device: torch.device, bus: BusClient, status: Status
) -> None:
    """Train the runs below `context.run_dir` until there are none, or until told to stop. Collective.
    Raises ValueError: the model cannot be loaded."""
    trainer = MultiTrainer(experiment, context, device, bus, status)
    freeze_gc()
    trainer.run()
