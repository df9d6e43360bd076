"""The admin routes of every backend's server: weight updates, sleep and the served version.

`guard` lets nobody reach them without the server's key. Plain Starlette: vLLM's FastAPI application takes them, and so
does that of a backend which is installed without FastAPI.
"""

from collections.abc import Awaitable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from prime_hpc.inference.backend import POLICY
from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.policy import Policy, PolicyFailedError, UnavailableError


class UpdateRequest(BaseModel):
    """Body of `POST /update_weights`."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """Absolute folder of the version on a file system that the server sees."""
    version: int = Field(ge=0)
    """Policy version; every token sampled from now on carries it."""
    name: str = POLICY
    """Model name under which an adapter is served."""


def _policy(request: Request) -> Policy:
    return request.app.state.policy


async def _answer(call: Awaitable[dict[str, Any]], refused: int) -> JSONResponse:
    """Wait for an update; `refused`: the HTTP status of a version that is refused (the engines go on unharmed)."""
    try:
        return JSONResponse(await call)
    except BadVersionError as error:
        return JSONResponse({"error": str(error)}, status_code=refused)
    except UnavailableError as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    except PolicyFailedError as error:
        return JSONResponse({"error": str(error)}, status_code=500)


async def update_weights(request: Request) -> JSONResponse:
    """Load a version into every engine; 400 with a reason where it is refused, 422 for another body, 503 where
    it cannot be had now."""
    try:
        body = UpdateRequest.model_validate_json(await request.body())
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        return JSONResponse({"error": wrong}, status_code=422)
    return await _answer(_policy(request).update(body.path, body.version, body.name), 400)


async def reload_weights(request: Request) -> JSONResponse:
    """Back to the base model, version 0; an adapter of another name is unloaded."""
    return await _answer(_policy(request).reload(request.query_params.get("name", POLICY)), 409)


async def serve_base(request: Request) -> JSONResponse:
    """Let a further model name stand for the base model, version 0, until an adapter is loaded under it."""
    name = request.query_params.get("name")
    if not name:
        return JSONResponse({"error": "name: which model name? (/serve_base?name=NAME)"}, status_code=422)
    return await _answer(_policy(request).serve_base(name), 400)


async def sleep(request: Request) -> JSONResponse:
    """Give up the engines' memory until the next update or `/wake_up`; answered when it is free."""
    return await _answer(_policy(request).sleep(), 409)


async def wake_up(request: Request) -> JSONResponse:
    """Take the memory back and go on as before; an update of the weights does so itself."""
    return await _answer(_policy(request).wake_up(), 409)


async def policy_version(request: Request) -> JSONResponse:
    """Return the version that samples now under a model name, and all adapters' versions by name."""
    policy = _policy(request)
    try:
        version, path = policy.served(request.query_params.get("name", POLICY))
    except BadVersionError as error:
        return JSONResponse({"error": str(error)}, status_code=404)
    return JSONResponse({"version": version, "path": path, "adapters": policy.adapter_versions()})


ROUTES = [
    Route("/update_weights", update_weights, methods=["POST"]),
    Route("/reload_weights", reload_weights, methods=["POST"]),
    Route("/serve_base", serve_base, methods=["POST"]),
    Route("/sleep", sleep, methods=["POST"]),
    Route("/wake_up", wake_up, methods=["POST"]),
    Route("/policy_version", policy_version, methods=["GET"]),
]
