"""The loop of the ranks: rank 0 takes the next operation from the board and tells it, all ranks do the same.

What is wrong with one operation is its own: the client that asked is told, and the next one follows. What may have left
the ranks in different states ends the trainer, and the supervisor starts it again.
"""

import shutil
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.observe.role_status import Status
from prime_hpc.runtime import activity
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.trainer.rank_group import OF_A_RUN
from prime_hpc.trainer.tinker.adapter import Adapter, PassResult
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.board import Failure, Kind, Operation
from prime_hpc.trainer.tinker.paths import UNNAMED, Index, Saved, Shelf, new_save, tinker_path
from prime_hpc.trainer.tinker.paths import Kind as SaveKind
from prime_hpc.trainer.tinker.server import Server
from prime_hpc.trainer.tinker.wire import write_forward_backward
from prime_hpc.trainer.trainer import load_base

TURN_S = 5.0
"""Rank 0 speaks at least so often: the others wait in a collective, which has a deadline of its own."""
PAUSE_S = 0.25
"""Between two looks for a stop."""
STOPPED = "stopped-"
"""Begins the names of saves that the service makes when it is told to save and end; the number of steps follows."""
CONTAINED = (BadRequestError, StoreError)
"""Errors of one operation; raised on all ranks alike."""


class Worker:
    """One rank's life."""

    def __init__(
        self, experiment: Experiment, context: RoleContext, device: torch.device, bus: BusClient, status: Status
    ) -> None:
        """Load the model; rank 0 also begins to listen. Collective; raises what `trainer.load_base` does."""
        self._experiment, self._bus, self._status = experiment, bus, status
        self._base = load_base(experiment, device, experiment.trainer.max_concurrent_runs)
        self._shelf = Shelf(context.run_dir)
        self._adapters: dict[str, Adapter] = {}
        self._numbers: dict[str, int] = {}
        self._num_steps = 0
        self._unsaved: set[str] = set()
        """Adapters that have stepped since they were saved last."""
        self._is_idle = False
        self._server: Server | None = None
        if dist.get_rank() == 0:
            config = self._base.policy.hf.config.get_text_config()
            self._server = Server(experiment, context, bus, self._shelf, self._base.source, config.vocab_size)

    def run(self) -> None:
        """Operation after operation, until somebody says stop. Collective."""
        url = self._server.start() if self._server is not None else ""
        self._status.ready(step=0, world_size=dist.get_world_size(), url=url)
        if url:
            logger.info(f"the tinker service is ready at {url}; its key is in {self._server and self._server.key_file}")
        try:
            while True:
                activity.doing("wait", awaits=activity.CLIENTS)
                decided = self._decide() if self._server is not None else Operation(Kind.WAIT)
                operation = self._base.control.broadcast(decided)
                if operation.kind is Kind.END:
                    return
                if operation.kind is not Kind.WAIT:
                    self._turn(operation)
        finally:
            if self._server is not None:
                self._server.stop()

    # ------------------------------------------------------------------------------------------------ rank 0 decides

    def _decide(self) -> Operation:
        assert self._server is not None
        waited = 0.0
        while waited < TURN_S:
            stop = self._bus.latest("stop")
            if stop is not None:
                return self._end(str(stop.get("reason", "asked to")), with_saves=bool(stop.get("save")))
            operation = self._server.board.take(PAUSE_S)
            if self._is_idle != (operation is None):
                self._is_idle = operation is None
                self._status.beat(idle=self._is_idle)
            if operation is not None:
                return self._prepared(operation)
            waited += PAUSE_S
        return Operation(Kind.WAIT)

    def _end(self, reason: str, *, with_saves: bool) -> Operation:
        """Return the next save of those that come before the end, then the end."""
        for model_id in sorted(self._unsaved) if with_saves else ():
            self._unsaved.remove(model_id)  # once, whatever comes of it
            name = f"{STOPPED}{self._adapters[model_id].steps}"
            logger.info(f"{model_id} is saved as {tinker_path(model_id, 'weights', name)}: {reason}")
            payload = {"name": name, "overwrite": True, "user_metadata": {"saved": reason}, "ttl_seconds": None}
            return self._prepared(Operation(Kind.SAVE, model_id, payload=payload))
        logger.info(f"stopping: {reason}; adapters in training: {len(self._adapters)}")
        return Operation(Kind.END)

    def _prepared(self, operation: Operation) -> Operation:
        """Return an operation with what rank 0 alone can know of it; one that cannot be done is a refusal."""
        if operation.kind not in (Kind.SAVE, Kind.PUBLISH):
            return operation
        model_id, name = operation.model_id, operation.payload["name"]
        number = self._numbers[model_id] = self._numbers.get(model_id, 0) + 1
        try:
            saves = self._shelf.index(model_id).saves
        except BadRequestError as error:
            return replace(operation, kind=Kind.REFUSE, payload={"why": str(error)})
        before = saves["weights"].get(name) if operation.kind is Kind.SAVE else None
        if before is not None and not before.has_expired and not operation.payload["overwrite"]:
            why = f"{tinker_path(model_id, 'weights', name)} exists; choose another name, or say overwrite=True"
            return replace(operation, kind=Kind.REFUSE, payload={"why": why})
        return replace(operation, number=number)

    # ------------------------------------------------------------------------------------------------ all ranks obey

    def _turn(self, operation: Operation) -> None:
        result: Any
        activity.doing(operation.kind)
        try:
            result = self._execute(operation)
        except CONTAINED as error:
            is_user = isinstance(error, BadRequestError)
            result = Failure(str(error), is_user)
            adapter = self._adapters.get(operation.model_id)
            is_training = operation.kind is Kind.PASS or "is_pass" in operation.payload
            if adapter is not None and is_training:
                adapter.refuse_step(f"forward_backward {operation.request_id} failed: {error}")
            if operation.kind is Kind.CREATE:
                self._remove(operation.model_id)
            if not is_user and self._server is not None:
                logger.error(f"{operation.kind} of {operation.model_id}: {error}")
        if self._server is not None:
            self._server.board.done(operation, result)

    def _execute(self, operation: Operation) -> Any:
        """Do it; returns what the client is told, on rank 0."""
        kind, model_id, payload = operation.kind, operation.model_id, operation.payload
        if kind is Kind.CREATE:
            return self._create(operation)
        if kind is Kind.REMOVE:
            return self._remove(model_id)
        if kind is Kind.REFUSE:
            raise BadRequestError(payload["why"])
        adapter = self._adapters.get(model_id)
        if adapter is None:
            raise BadRequestError(f"there is no adapter {model_id} here any more")
        if kind is Kind.PASS:
            return _answer(adapter.run_pass(**payload), with_losses=payload["loss_fn"] == "cross_entropy")
        if kind is Kind.UPDATE:
            metrics = adapter.update(payload["adam"])
            self._num_steps += 1
            self._unsaved.add(model_id)
            self._status.beat(step=self._num_steps, adapter=model_id, adapter_step=adapter.steps)
            return {"metrics": metrics}
        if kind is Kind.SAVE:
            adapter.save(operation.number)
            self._unsaved.discard(model_id)
            return self._noted(operation, adapter, "weights", payload["name"])
        if kind is Kind.PUBLISH:
            adapter.publish(operation.number)
            return self._noted(operation, adapter, "sampler_weights", payload["name"] or f"{UNNAMED}{operation.number}")
        assert kind is Kind.LOAD
        adapter.load(payload["saved"], with_optimizer=payload["with_optimizer"])
        return {"path": payload["saved"].path, "model_id": model_id, "type": "load_weights"}

    def _create(self, operation: Operation) -> dict[str, Any]:
        model_id, shape = operation.model_id, operation.payload["shape"]
        saved: Saved | None = operation.payload.get("saved")
        paths = self._shelf.of_model(model_id)
        self._base.control.from_first(lambda: self._shelf.write(model_id, Index(shape)), OF_A_RUN)
        adapter = Adapter(self._base, self._experiment, operation.slot, shape, paths)
        self._adapters[model_id] = adapter
        if saved is not None:
            adapter.load(saved, with_optimizer=operation.payload["with_optimizer"])
        if self._server is not None:
            begins = f"from {saved.path}" if saved is not None else "as the base model"
            logger.info(f"{model_id}: rank {shape.rank}, slot {operation.slot}, begins {begins}")
        path = saved.path if saved is not None else None
        return {"model_id": model_id, "path": path, "type": "create_model" if saved is None else "load_weights"}

    def _remove(self, model_id: str) -> None:
        self._unsaved.discard(model_id)
        adapter = self._adapters.pop(model_id, None)
        if adapter is not None:
            adapter.close()
        if self._server is not None:
            for operation in self._server.board.leave(model_id):
                self._server.board.done(operation, Failure(f"adapter {model_id} was removed", is_user=True))

    def _noted(self, operation: Operation, adapter: Adapter, kind: SaveKind, name: str) -> dict[str, Any]:
        """Write a save into the adapter's index, and delete what had its name."""
        model_id, payload = operation.model_id, operation.payload

        def note() -> None:
            save = new_save(
                operation.number,
                adapter.steps,
                has_optimizer=adapter.has_optimizer,
                user_metadata=payload["user_metadata"],
                ttl_seconds=payload["ttl_seconds"],
            )
            index = self._shelf.change(model_id, lambda index: index.with_save(kind, name, save))
            before = index.saves[kind].get(name)
            if before is not None and kind == "weights":  # engines may still want what was published
                shutil.rmtree(self._shelf.of_model(model_id).checkpoint_step(before.number), ignore_errors=True)

        self._base.control.from_first(note, OF_A_RUN)
        type_ = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        return {"path": tinker_path(model_id, kind, name), "type": type_}


def _answer(result: PassResult | None, *, with_losses: bool) -> bytes:
    """Encode what a pass computed; nothing but on rank 0."""
    if result is None:
        return b""
    outputs = {"logprobs": result.logprobs} | ({"elementwise_loss": result.losses} if with_losses else {})
    return write_forward_backward(outputs, {"loss:sum": result.loss, "num_tokens:sum": float(result.num_tokens)})


def run_tinker(
    experiment: Experiment, context: RoleContext, device: torch.device, bus: BusClient, status: Status
) -> None:
    """Serve until told to stop. Collective.
    Raises ValueError: the model cannot be loaded, or the address cannot be listened on."""
    worker = Worker(experiment, context, device, bus, status)
    freeze_gc()
    worker.run()
