"""The routes of the service, behind its key.

Whoever sends another key, or none, learns nothing: every route answers 401 alike. Errors are JSON, `{"detail": ...}`:
404 for what is not here, 410 for a session that is over, 422 for what cannot be understood. What is wrong with an
operation is the result of its future instead.
"""

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from loguru import logger
from pydantic import BaseModel, ValidationError

from prime_hpc.trainer.tinker import requests as wanted
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.paths import Saved, as_checkpoint, as_training_run, newest_first
from prime_hpc.trainer.tinker.service import Service
from prime_hpc.trainer.tinker.sessions import GoneError
from prime_hpc.trainer.tinker.wire import PROTOBUF, BadWireError, read_forward_backward

MOST_BYTES = 256 << 20
"""Of one request; the client sends at most 5 MB of data at once."""
LONG_POLL_S = 20.0
"""A question for a result is answered within this, if only to say that there is none yet; the client asks again."""
_UNAUTHORIZED = {"detail": "this service needs its key: X-API-Key"}
_OFF = ("pjwt_auth_enabled", "proto_compress_fwdbwd", "sample_use_retrieve_futures", "custom_loss_server_side")
"""Features that the client leaves off: it uses keys alone, asks for each result by itself, computes custom losses."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T", bound=BaseModel)
Row = TypeVar("Row")


def build_app(service: Service, key: str) -> web.Application:
    """Build the application."""
    app = web.Application(client_max_size=MOST_BYTES, middlewares=[_gate(key), _errors])
    routes = _Routes(service)
    posts: dict[str, Handler] = {
        "client/config": _said(dict.fromkeys(_OFF, False)),
        "client/dynamic_config": _said({}),  # the client's own defaults hold
        "create_session": _answers(wanted.CreateSession, service.create_session),
        "session_heartbeat": routes.heartbeat,
        "telemetry": _said({"status": "accepted"}),  # and dropped
        "create_model": _begins(wanted.CreateModel, service.create),
        "get_info": routes.info,
        "unload_model": routes.unload,
        "forward_backward": routes.forward_backward,
        "optim_step": _begins(wanted.OptimStep, service.update),
        "save_weights": _begins(wanted.SaveWeights, service.save),
        "save_weights_for_sampler": _begins(wanted.SaveForSampler, service.publish),
        "save_weights_external": _begins(wanted.SaveExternal, service.export),
        "load_weights": routes.load_weights,
        "weights_info": routes.weights_info,
        "create_sampling_session": routes.create_sampler,
        "asample": _answers(wanted.Sample, service.sample),
        "retrieve_future": routes.retrieve,
        "cancel_future": _said({}),  # what is cancelled ends by itself
        "sessions/{session_id}/finish": routes.finish,
    }
    gets: dict[str, Handler] = {
        "healthz": _said({"status": "ok"}),
        "get_server_capabilities": routes.capabilities,
        "samplers/{sampler_id}": routes.sampler,
        "sessions": routes.sessions,
        "sessions/{session_id}": routes.session,
        "training_runs": routes.training_runs,
        "training_runs/{model_id}": routes.training_run,
        "training_runs/{model_id}/checkpoints": routes.checkpoints_of_run,
        "checkpoints": routes.checkpoints,
    }
    save = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
    app.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in posts.items()])
    app.add_routes([web.get(f"/api/v1/{path}", handler) for path, handler in gets.items()])
    app.add_routes([web.delete(save, routes.delete), web.put(f"{save}/ttl", routes.set_expiry)])
    return app


def _gate(key: str) -> Any:
    """Middleware, outermost: nothing is reached without the key."""
    expected = key.encode()

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.getall("X-API-Key", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), expected):
            return web.json_response(_UNAUTHORIZED, status=401, headers={"Connection": "close"})
        return await handler(request)

    return gate


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refused(error.status, f"{request.method} {request.path}: {error.reason}; not served here")
    except GoneError as error:
        return _refused(404, str(error))
    except ValidationError as error:
        return _refused(422, wanted.explain(error))
    except (BadRequestError, BadWireError) as error:
        return _refused(422, str(error))
    except Exception as error:  # noqa: BLE001 - one request's trouble, which its client is told; the others go on
        logger.opt(exception=True).error(f"{request.method} {request.path} failed")
        return _refused(500, f"{type(error).__name__}: {error}")


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)


async def _read(request: web.Request, kind: type[T]) -> T:
    """Return the body. Raises a ValidationError where it is no such request."""
    return kind.model_validate_json(await request.read())


def _said(answer: dict[str, Any]) -> Handler:
    """Return a route that always says the same."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer)

    return handle


def _answers(kind: type[T], ask: Callable[[T], dict[str, Any]]) -> Handler:
    """Return a route that reads a request and says what the service answers."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(ask(await _read(request, kind)))

    return handle


def _begins(kind: type[T], begin: Callable[[T], str]) -> Handler:
    """Return a route that reads a request and has an operation begun; its result is asked for later."""

    async def handle(request: web.Request) -> web.Response:
        return _future(begin(await _read(request, kind)))

    return handle


class _Routes:
    """Each reads a request, asks the service, answers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def capabilities(self, request: web.Request) -> web.Response:
        return web.json_response({"supported_models": [self._service.describe_model()]})

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Note a sign of life; 410 ends those of a session that is over."""
        body = json.loads(await request.read())
        try:
            self._service.heartbeat(str(body.get("session_id")))
        except GoneError as error:
            return _refused(410, str(error))
        return web.json_response({"type": "session_heartbeat"})

    async def session(self, request: web.Request) -> web.Response:
        """List adapters and samplers of a session."""
        return web.json_response(self._service.describe_session(request.match_info["session_id"]))

    async def finish(self, request: web.Request) -> web.Response:
        self._service.finish(request.match_info["session_id"])
        return web.json_response({})

    async def load_weights(self, request: web.Request) -> web.Response:
        """Have an adapter created from a save, or take its weights."""
        body = await _read(request, wanted.LoadWeights)
        if body.session_id is not None and body.model_seq_id is not None:
            return _future(self._service.create_from(body))
        return _future(self._service.load(body))

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.info((await _read(request, wanted.OfModel)).model_id))

    async def unload(self, request: web.Request) -> web.Response:
        """Have an adapter give its slot back."""
        model_id = (await _read(request, wanted.OfModel)).model_id
        self._service.remove(model_id)
        return _future(f"{model_id}:remove")

    async def forward_backward(self, request: web.Request) -> web.Response:
        return _future(self._service.run_pass(read_forward_backward(await request.read())))

    async def create_sampler(self, request: web.Request) -> web.Response:
        sampler_id = self._service.create_sampler(await _read(request, wanted.CreateSampler))
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def sampler(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.describe_sampler(request.match_info["sampler_id"]))

    async def retrieve(self, request: web.Request) -> web.Response:
        """Answer with a result, or with 408 that there is none yet."""
        request_id = (await _read(request, wanted.Retrieve)).request_id
        future = await self._service.result(request_id, LONG_POLL_S)
        if future is None:
            waits = self._service.waits_for(request_id)
            state = {"queue_state": "paused_capacity" if waits else "active"}
            reason = {"queue_state_reason": waits} if waits else {}
            return web.json_response({"type": "try_again", "request_id": request_id, **state, **reason}, status=408)
        return web.Response(body=future.body, content_type=PROTOBUF if future.is_protobuf else "application/json")

    async def weights_info(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        shape = self._service.shelf.find(str(body.get("tinker_path"))).shape
        facts = {"train_unembed": False, "train_mlp": shape.train_mlp, "train_attn": shape.train_attn}
        return web.json_response({"base_model": shape.base_model, "is_lora": True, "lora_rank": shape.rank} | facts)

    async def sessions(self, request: web.Request) -> web.Response:
        rows, _ = _part(request, self._service.list_sessions())
        return web.json_response({"sessions": rows})

    async def training_runs(self, request: web.Request) -> web.Response:
        """List all adapters that there ever were, by their last change."""
        shelf = self._service.shelf
        rows = [as_training_run(shelf, model_id) for model_id in shelf.models()]
        rows.sort(key=lambda row: row["last_request_time"], reverse=True)
        part, cursor = _part(request, rows)
        return web.json_response({"training_runs": part, "cursor": cursor})

    async def training_run(self, request: web.Request) -> web.Response:
        """Describe an adapter, which need not be in training any more."""
        return web.json_response(as_training_run(self._service.shelf, self._known(request)))

    async def checkpoints_of_run(self, request: web.Request) -> web.Response:
        """List the saves of an adapter, the newest first."""
        saves = newest_first(self._service.shelf.saved(self._known(request)))
        return web.json_response({"checkpoints": [as_checkpoint(saved) for saved in saves]})

    async def checkpoints(self, request: web.Request) -> web.Response:
        """List the saves of all adapters, the newest first."""
        shelf = self._service.shelf
        saves = newest_first([saved for model_id in shelf.models() for saved in shelf.saved(model_id)])
        part, cursor = _part(request, [as_checkpoint(saved) for saved in saves])
        return web.json_response({"checkpoints": part, "cursor": cursor})

    async def delete(self, request: web.Request) -> web.Response:
        self._service.shelf.delete(self._saved(request))
        return web.json_response({})

    async def set_expiry(self, request: web.Request) -> web.Response:
        """Let a save expire, or keep it for good."""
        saved = self._saved(request)
        self._service.shelf.set_expiry(saved, (await _read(request, wanted.Expiry)).ttl_seconds)
        return web.json_response({})

    def _known(self, request: web.Request) -> str:
        """Return the adapter of a path. Raises GoneError: there never was one of this id."""
        model_id = request.match_info["model_id"]
        try:
            self._service.shelf.index(model_id)
        except BadRequestError as error:
            raise GoneError(str(error)) from error
        return model_id

    def _saved(self, request: web.Request) -> Saved:
        """Return the save of a path. Raises GoneError: there is none."""
        given = request.match_info
        try:
            return self._service.shelf.find(f"tinker://{given['model_id']}/{given['kind']}/{given['name']}")
        except BadRequestError as error:
            raise GoneError(str(error)) from error


def _part(request: web.Request, rows: list[Row]) -> tuple[list[Row], dict[str, int]]:
    """Return the rows that a request asks for, and where they lie among all."""
    page = wanted.Page.model_validate(dict(request.query))
    cursor = {"offset": page.offset, "limit": page.limit, "total_count": len(rows)}
    return rows[page.offset : page.offset + page.limit], cursor


def _future(request_id: str) -> web.Response:
    return web.json_response({"request_id": request_id, "model_id": request_id.rpartition(":")[0]})
