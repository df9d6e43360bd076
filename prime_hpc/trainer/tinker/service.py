"""Sessions, adapters, samplers and futures: what the routes do. Belongs to the event loop of rank 0.

A request about an adapter is answered at once with the id of a future; the client asks for its result until it is
there. The client numbers its requests about an adapter from 1 on and may send some before others: each waits for
the one before it. What is wrong with a request is the result of its future, in its turn, so that no later one waits
in vain.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.client.inference import InferenceError
from prime_hpc.config import Experiment
from prime_hpc.trainer.tinker import requests as wanted
from prime_hpc.trainer.tinker.batches import BadRequestError, check_data, check_loss
from prime_hpc.trainer.tinker.board import Board, Failure, Kind, Operation
from prime_hpc.trainer.tinker.engines import Engines
from prime_hpc.trainer.tinker.paths import UNNAMED, Saved, Shape, Shelf, check_name, newest_first
from prime_hpc.trainer.tinker.sessions import Future, GoneError, Line, Sampler, Session
from prime_hpc.trainer.tinker.wire import ForwardBackward

KEPT_S = 600.0
"""So long a result waits for the client, or for it to ask once more."""
LOOK_S = 5.0
SWEEP_S = 60.0
"""Between two looks for saves whose time is over."""


class Service:
    """The work behind the routes."""

    def __init__(self, experiment: Experiment, shelf: Shelf, engines: Engines | None, source: str, vocab_size: int):
        """`source`: directory of the base model; `engines`: None where there are none."""
        assert experiment.model.lora is not None and experiment.trainer.tinker is not None
        self._experiment, self.shelf, self._engines = experiment, shelf, engines
        shelf.end_unnamed()
        self._source, self._vocab_size = source, vocab_size
        self._timeout_s = experiment.trainer.tinker.session_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self.board = Board(experiment.trainer.max_concurrent_runs, self._deliver)
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Shape] = {}
        self._lines: dict[str, Line] = {}
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[str, Saved] = {}
        """Adapter -> its newest save for samplers that follow it."""
        self._futures: dict[str, Future] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def describe_model(self) -> dict[str, Any]:
        """Name the one base model that is served."""
        name, length = self._experiment.model.name, self._experiment.seq_len
        can_sample = self._engines is not None
        return {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": can_sample}

    # ------------------------------------------------------------------------------------------------ sessions

    async def watch(self) -> None:
        """End sessions that have fallen silent, forget results that nobody asked for, delete saves whose time is over;
        until cancelled."""
        self._loop = asyncio.get_running_loop()
        swept = -math.inf
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            try:
                if now - swept > SWEEP_S:
                    swept = now
                    await asyncio.to_thread(self._sweep)
                self._look(now)
            except Exception:  # noqa: BLE001 - without these looks no session would ever end
                logger.opt(exception=True).error(f"a look for silent sessions failed; the next is in {LOOK_S:g} s")

    def _look(self, now: float) -> None:
        """End sessions that have fallen silent, forget results that nobody asked for."""
        for session_id, session in list(self._sessions.items()):
            if now - session.seen > self._timeout_s:
                logger.info(f"session {session_id}: silent for {self._timeout_s:g} s, it is over")
                self.finish(session_id)
        for request_id, future in list(self._futures.items()):
            if future.done.is_set() and now - future.ended > KEPT_S:
                del self._futures[request_id]

    def _sweep(self) -> None:
        """Delete expired saves; on a file system that fails, the next sweep does."""
        try:
            for path in self.shelf.delete_expired():
                logger.info(f"{path} was kept for its time (ttl_seconds), and is deleted")
        except OSError as error:
            logger.warning(f"saves whose time is over could not be deleted: {error}")

    def create_session(self, request: wanted.CreateSession) -> dict[str, Any]:
        """Begin a session."""
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = Session(time.monotonic(), user_metadata=_as_text(request.user_metadata))
        lora = self._experiment.model.lora
        assert lora is not None
        modules = ", ".join(lora.target_modules)
        info = f"adapters have at most rank {lora.rank}, on {modules}; the output head (train_unembed) has none"
        logger.info(f"session {session_id}: client {request.sdk_version}")
        return {"type": "create_session", "session_id": session_id, "info_message": info}

    def heartbeat(self, session_id: str) -> None:
        """Note that a client lives. Raises GoneError: no such session."""
        self._session(session_id).seen = time.monotonic()

    def finish(self, session_id: str) -> None:
        """End a session: its adapters give their slots back, its unnamed saves go, where the file system lets them."""
        session = self._sessions.pop(session_id, None)
        for model_id in session.models if session is not None else ():
            self.remove(model_id)
        for sampler_id in session.samplers if session is not None else ():
            sampler = self._samplers.pop(sampler_id)
            if sampler.saved is not None and sampler.saved.name.startswith(UNNAMED):
                try:
                    self.shelf.delete(sampler.saved)
                except (OSError, BadRequestError) as error:
                    logger.warning(f"{sampler.saved.path}, of a session that is over, could not be deleted: {error}")
        for model_id in session.models if session is not None else ():  # its samplers are gone
            self._published.pop(model_id, None)

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise GoneError(f"session {session_id} is over, or of an earlier life of this service: create a new client")
        return self._sessions[session_id]

    def describe_session(self, session_id: str) -> dict[str, Any]:
        """Adapters and samplers of a session."""
        session = self._session(session_id)
        ids = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return {**ids, "user_metadata": session.user_metadata}

    def list_sessions(self) -> list[str]:
        """Sessions that are not over, the newest first."""
        return list(reversed(self._sessions))

    # ------------------------------------------------------------------------------------------------ adapters

    def create(self, request: wanted.CreateModel) -> str:
        """Have an adapter created; returns the future's id."""
        session, model_id = self._new_model(request.session_id, request.model_seq_id)

        def operation() -> Operation:
            self._check_base(request.base_model)
            self._check_optimizer(request.optimizer_config)
            lora = request.lora_config or wanted.LoraShape()
            most = self._experiment.model.lora
            assert most is not None
            if lora.rank > most.rank:
                raise BadRequestError(
                    f"rank {lora.rank} is above {most.rank}, the largest that this service was started for "
                    "(model.lora.rank)"
                )
            if not (lora.train_attn or lora.train_mlp):
                raise BadRequestError("train_unembed alone: here the output head has no adapter")
            seed = self._experiment.seed if lora.seed is None else lora.seed
            name, metadata = self._experiment.model.name, session.user_metadata | _as_text(request.user_metadata)
            shape = Shape(name, lora.rank, seed, lora.train_attn, lora.train_mlp, metadata)
            return Operation(Kind.CREATE, payload={"shape": shape})

        return self._begin(session, model_id, operation)

    def create_from(self, request: wanted.LoadWeights) -> str:
        """Have an adapter created from a save; returns the future's id."""
        assert request.session_id is not None and request.model_seq_id is not None
        session, model_id = self._new_model(request.session_id, request.model_seq_id)

        def operation() -> Operation:
            if request.base_model is not None:
                self._check_base(request.base_model)
            self._check_optimizer(request.optimizer_config)
            saved = self.shelf.find(request.path, "weights")
            self._check_base(saved.shape.base_model)
            metadata = session.user_metadata | _as_text(request.user_metadata)
            shape = replace(saved.shape, user_metadata=metadata)
            payload = {"shape": shape, "saved": saved, "with_optimizer": request.optimizer}
            return Operation(Kind.CREATE, payload=payload)

        return self._begin(session, model_id, operation)

    def load(self, request: wanted.LoadWeights) -> str:
        """Have an adapter take the weights of a save; returns the future's id."""
        if request.model_id is None or request.seq_id is None:
            raise BadRequestError("load_weights needs session_id and model_seq_id, or model_id and seq_id")

        def operation() -> Operation:
            saved = self.shelf.find(request.path, "weights")
            return Operation(Kind.LOAD, payload={"saved": saved, "with_optimizer": request.optimizer})

        return self._enqueue(request.model_id, request.seq_id, operation)

    def run_pass(self, request: ForwardBackward) -> str:
        """Have a forward (and backward) pass done; returns the future's id."""

        def operation() -> Operation:
            bounds = check_loss(request.loss_fn, request.loss_config)
            most = min(self._experiment.micro_batch_tokens, self._experiment.seq_len)
            examples = check_data(request.data, request.loss_fn, self._vocab_size, most)
            payload = {"examples": examples, "loss_fn": request.loss_fn, "bounds": bounds}
            payload["forward_only"] = request.forward_only
            return Operation(Kind.PASS, payload=payload, num_tokens=sum(len(e.tokens) for e in examples))

        return self._enqueue(request.model_id, request.seq_id, operation, is_pass=not request.forward_only)

    def update(self, request: wanted.OptimStep) -> str:
        """Have the optimizer step; returns the future's id."""
        payload = lambda: {"adam": wanted.adam_step(request)}  # noqa: E731
        return self._enqueue(request.model_id, request.seq_id, lambda: Operation(Kind.UPDATE, payload=payload()))

    def save(self, request: wanted.SaveWeights) -> str:
        """Have weights and optimizer saved; returns the future's id."""

        def operation() -> Operation:
            name = check_name(request.path or f"{request.seq_id:06d}")
            payload = {"name": name, "overwrite": request.overwrite, **wanted.kept(request)}
            return Operation(Kind.SAVE, payload=payload)

        return self._enqueue(request.model_id, request.seq_id, operation)

    def publish(self, request: wanted.SaveForSampler) -> str:
        """Have weights saved for the engines; returns the future's id."""

        def operation() -> Operation:
            name = None if request.path is None else check_name(request.path)
            if name is not None and name.startswith(UNNAMED):
                raise BadRequestError(f"{name}: {UNNAMED} begins the names of saves that end with their session")
            payload: dict[str, Any] = {"name": name, **wanted.kept(request)}
            if name is None:
                number, session = request.sampling_session_seq_id, request.model_id.partition(":")[0]
                if number is None:
                    raise BadRequestError("save_weights_for_sampler needs a path, or sampling_session_seq_id")
                payload |= {"sampler": f"{session}:sample:{number}", "follows": request.kind == "inflight"}
            return Operation(Kind.PUBLISH, payload=payload)

        return self._enqueue(request.model_id, request.seq_id, operation)

    def export(self, request: wanted.SaveExternal) -> str:
        """Refuse a save that is to be downloaded, in its turn; returns the future's id."""
        where = self.shelf.of_model(request.model_id).weights
        why = (
            "save_weights_external is not served here: what save_weights_for_sampler writes is a PEFT directory "
            f"already, {where}/step_<n> on the service's file system"
        )
        return self._enqueue(request.model_id, request.seq_id, lambda: Operation(Kind.REFUSE, payload={"why": why}))

    def remove(self, model_id: str) -> None:
        """Have an adapter give its slot back, before anything that is still in its line; what it saved stays."""
        self._models.pop(model_id, None)
        request_id = f"{model_id}:remove"
        if not self._end_line(model_id, f"adapter {model_id} was removed", is_user=True):
            return
        self._futures[request_id] = Future(model_id)
        self.board.put(Operation(Kind.REMOVE, model_id, request_id))

    def _end_line(self, model_id: str, why: str, is_user: bool) -> bool:
        """Take no further requests about an adapter, and answer those that wait for one before them; whether there was
        such an adapter."""
        line = self._lines.pop(model_id, None)
        for operation in line.held.values() if line is not None else ():
            self._settle(operation.request_id, Failure(why, is_user))
        return line is not None

    def info(self, model_id: str) -> dict[str, Any]:
        """Say of an adapter what its client asks. Raises GoneError: there is none."""
        self._line(model_id)
        shape = self._models.get(model_id)
        if shape is None:
            raise GoneError(f"adapter {model_id} is not created yet")
        data = {"arch": "causal-lm", "model_name": shape.base_model, "tokenizer_id": self._source}
        facts = {"is_lora": True, "lora_rank": shape.rank, "model_name": shape.base_model}
        return {"type": "get_info", "model_data": data, "model_id": model_id, **facts}

    def _new_model(self, session_id: str, number: int) -> tuple[Session, str]:
        session, model_id = self._session(session_id), f"{session_id}:train:{number}"
        session.seen = time.monotonic()
        return session, model_id

    def _begin(self, session: Session, model_id: str, build: Callable[[], Operation]) -> str:
        if model_id not in session.models:
            session.models.append(model_id)
            self._lines[model_id] = Line(next=0)
        return self._enqueue(model_id, 0, build)

    def _check_base(self, name: str) -> None:
        served = self._experiment.model.name
        asked, there = name.strip("/").split("/"), Path(served).parts
        is_end = Path(served).is_absolute() and there[-len(asked) :] == tuple(asked)  # of a folder: <org>/<model>, say
        if name not in (served, self._source) and not is_end:
            raise BadRequestError(f"base model {name!r} is not served here; there is {served!r}")

    def _check_optimizer(self, config: dict[str, Any] | None) -> None:
        kind = (config or {}).get("type", "adamw")
        if kind != "adamw":
            raise BadRequestError(f"optimizer {kind!r} is not served here; there is 'adamw'")

    def _line(self, model_id: str) -> Line:
        if model_id not in self._lines:
            raise GoneError(
                f"there is no adapter {model_id} here: its session is over, or this service was started again since; "
                f"go on from {self._last_save(model_id)} with create_training_client_from_state_with_optimizer"
            )
        self._session(model_id.partition(":")[0]).seen = time.monotonic()
        return self._lines[model_id]

    def _last_save(self, model_id: str) -> str:
        """Name what a client that lost its adapter goes on from."""
        try:
            saves = newest_first(self.shelf.saved(model_id))
        except BadRequestError:
            saves = []
        return next((saved.path for saved in saves if saved.kind == "weights"), "the last save_state")

    def _enqueue(self, model_id: str, number: int, build: Callable[[], Operation], *, is_pass: bool = False) -> str:
        """Take a request in; it is passed on when all before it were. The same number again is the same request."""
        line, request_id = self._line(model_id), f"{model_id}:{number}"
        if request_id in self._futures or number < line.next:
            return request_id
        try:
            operation = build()
        except BadRequestError as error:
            payload = {"why": str(error)} | ({"is_pass": True} if is_pass else {})
            operation = Operation(Kind.REFUSE, payload=payload)
        self._futures[request_id] = Future(model_id)
        line.held[number] = Operation(
            operation.kind, model_id, request_id, operation.payload, num_tokens=operation.num_tokens
        )
        while line.next in line.held:
            ready = line.held.pop(line.next)
            line.next += 1
            if ready.kind is Kind.REFUSE and ready.request_id == f"{model_id}:0":  # it never was an adapter
                self._settle(ready.request_id, Failure(ready.payload["why"], is_user=True))
                self._end_line(model_id, f"adapter {model_id} was refused: {ready.payload['why']}", is_user=True)
                break
            self.board.put(ready)
        return request_id

    # ------------------------------------------------------------------------------------------------ samplers

    def create_sampler(self, request: wanted.CreateSampler) -> str:
        """Begin a sampler; returns its id.

        Raises:
            GoneError: no such session, or no such save.
            BadRequestError: another base model.
        """
        session = self._session(request.session_id)
        saved = self.shelf.find(request.model_path, "sampler_weights") if request.model_path else None
        self._check_base(saved.shape.base_model if saved is not None else request.base_model or "")
        return self._add_sampler(session, f"{request.session_id}:sample:{request.sampling_session_seq_id}", saved)

    def _add_sampler(self, session: Session, sampler_id: str, saved: Saved | None, follows: str = "") -> str:
        self._samplers[sampler_id] = Sampler(saved, follows)
        if sampler_id not in session.samplers:
            session.samplers.append(sampler_id)
        return sampler_id

    def describe_sampler(self, sampler_id: str) -> dict[str, Any]:
        """Say of a sampler what its client asks."""
        saved = self._weights_of(sampler_id)
        path = saved.path if saved is not None else None
        return {"sampler_id": sampler_id, "base_model": self._experiment.model.name, "model_path": path}

    def _weights_of(self, sampler_id: str) -> Saved | None:
        if sampler_id not in self._samplers:
            raise GoneError(
                f"there is no sampler {sampler_id} here: its session is over, or this service was started again since; "
                "create one from its model_path"
            )
        sampler = self._samplers[sampler_id]
        return self._published[sampler.follows] if sampler.follows else sampler.saved

    def sample(self, request: wanted.Sample) -> dict[str, Any]:
        """Have sequences sampled; returns the future's id and the sequences' ids.

        Raises:
            GoneError: no such sampler.
            BadRequestError: there is nothing to sample from.
        """
        if self._engines is None:
            raise BadRequestError("this service has no engines (inference is not set), so nothing can be sampled")
        if request.sampling_session_id is not None:
            saved = self._weights_of(request.sampling_session_id)
            self._session(request.sampling_session_id.partition(":")[0]).seen = time.monotonic()
        else:
            saved = self.shelf.find(request.model_path, "sampler_weights") if request.model_path is not None else None
        self._check_base(saved.shape.base_model if saved is not None else request.base_model or self._source)
        begins = request.sampling_session_id or uuid.uuid4().hex
        request_id = f"{begins}:{uuid.uuid4().hex if request.seq_id is None else request.seq_id}"
        if request_id not in self._futures:
            self._futures[request_id] = Future("")
            task = asyncio.create_task(self._sample(request_id, request, saved, self._engines))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, request_id: str, request: wanted.Sample, saved: Saved | None, engines: Engines) -> None:
        try:
            result: Any = await engines.sample(request, saved, self._vocab_size)
        except BadRequestError as error:
            result = Failure(str(error), is_user=True)
        except InferenceError as error:
            logger.error(f"{request_id}: {error}")
            result = Failure(str(error), is_user=False)
        except Exception as error:  # noqa: BLE001 - without a result the client would ask for it for ever
            result = _trouble(request_id, error)
        self._settle(request_id, result)

    # ------------------------------------------------------------------------------------------------ results

    def _deliver(self, operation: Operation, result: Any) -> None:
        """Take a result from the main thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._finish, operation, result)

    def _finish(self, operation: Operation, result: Any) -> None:
        try:
            result = self._taken(operation, result)
        except Exception as error:  # noqa: BLE001 - without a result the client would ask for it for ever
            result = _trouble(operation.request_id, error)
        self._settle(operation.request_id, result)

    def _taken(self, operation: Operation, result: Any) -> Any:
        """Note what an operation has changed; returns what its client is told."""
        model_id, payload = operation.model_id, operation.payload
        failed = isinstance(result, Failure)
        if operation.kind is Kind.CREATE and not failed and model_id in self._lines:
            self._models[model_id] = payload["shape"]
        if operation.kind is Kind.CREATE and failed:
            self._end_line(model_id, f"adapter {model_id} could not be created: {result.message}", result.is_user)
        session = self._sessions.get(model_id.partition(":")[0])
        if operation.kind is Kind.PUBLISH and not failed and "sampler" in payload and session is not None:
            saved = self.shelf.find(result["path"], "sampler_weights")
            follows = model_id if payload["follows"] else ""
            if follows:
                if model_id in self._published:  # what began to sample from it goes on, nothing else will
                    self.shelf.set_expiry(self._published[model_id], int(KEPT_S))
                self._published[model_id] = saved
            self._add_sampler(session, payload["sampler"], saved, follows)
            return {"sampling_session_id": payload["sampler"], "type": result["type"]}
        return {"model_id": model_id, "type": "unload_model"} if operation.kind is Kind.REMOVE else result

    def _settle(self, request_id: str, result: Any) -> None:
        future = self._futures.get(request_id)
        if future is not None:  # nobody waits for the end of an adapter
            future.settle(result)

    async def result(self, request_id: str, wait_s: float) -> Future | None:
        """Return a future that has its result; None after so many seconds without one.
        Raises GoneError: there is no such request."""
        future = self._futures.get(request_id)
        if future is None:
            raise GoneError(
                f"request {request_id} is not known here: its result was fetched long ago, or this service was started "
                f"again since; go on from {self._last_save(request_id.rpartition(':')[0])}"
            )
        session = self._sessions.get(request_id.partition(":")[0])
        if session is not None:
            session.seen = time.monotonic()
        try:
            await asyncio.wait_for(future.done.wait(), wait_s)
        except TimeoutError:
            return None
        return future

    def waits_for(self, request_id: str) -> str:
        """Say for what a request is in line: a slot for its adapter, engines that answer; empty where it is not."""
        future = self._futures.get(request_id)
        if future is None or not future.model_id:
            return self._engines.trouble if future is not None and self._engines is not None else ""
        return "" if self.board.has_slot(future.model_id) else "every adapter slot of this service is taken"


def _trouble(request_id: str, error: Exception) -> Failure:
    """Log an error that nobody expects; returns what the client is told."""
    logger.opt(exception=error).error(f"{request_id} failed")
    return Failure(f"{type(error).__name__}: {error}", is_user=False)


def _as_text(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}
