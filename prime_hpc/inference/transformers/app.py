"""The HTTP application: the routes of our vLLM server that clients use, in front of the batch."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prime_hpc.inference.policy import Policy
from prime_hpc.inference.routes import ROUTES
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.parameters import BadRequestError
from prime_hpc.inference.transformers.requests import Job, Reader, text_answer, token_answer
from prime_hpc.inference.transformers.sequences import Running

GONE = 499
"""Status of an answer that nobody reads: the client has hung up."""


def build_app(engine: Engine, policy: Policy, reader: Reader, max_len: int) -> Starlette:
    """Build the application. Handlers run on one event loop; the engine has a thread of its own."""
    own = _Handlers(engine, reader, max_len)
    routes = [
        Route("/inference/v1/generate", own.generate, methods=["POST"]),
        Route("/v1/completions", own.completions, methods=["POST"]),
        Route("/v1/chat/completions", own.chat, methods=["POST"]),
        Route("/v1/models", own.models, methods=["GET"]),
        Route("/health", own.health, methods=["GET"]),
        Route("/metrics", own.metrics, methods=["GET"]),
    ]
    app = Starlette(routes=[*routes, *ROUTES])
    app.state.policy = policy
    return app


class _Handlers:
    def __init__(self, engine: Engine, reader: Reader, max_len: int) -> None:
        self._engine, self._reader, self._max_len = engine, reader, max_len

    async def generate(self, request: Request) -> Response:
        """Sample from token ids."""
        return await self._answer(request, self._reader.tokens, token_answer)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions of text or of token ids."""
        reader = self._reader
        return await self._answer(request, reader.completion, lambda job, s: text_answer(job, s, reader, chat=False))

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        reader = self._reader
        return await self._answer(request, reader.chat, lambda job, s: text_answer(job, s, reader, chat=True))

    async def models(self, request: Request) -> Response:
        """Names of the policy."""
        names = self._reader.names
        rows = [{"id": n, "object": "model", "owned_by": "prime-hpc", "max_model_len": self._max_len} for n in names]
        return _json({"object": "list", "data": rows})

    async def health(self, request: Request) -> Response:
        """200 while the batch computes."""
        return Response(status_code=503 if self._engine.failure else 200)

    async def metrics(self, request: Request) -> Response:
        """Figures in Prometheus' text form, under vLLM's names where it has them."""
        engine = self._engine
        figures = (
            ("vllm:num_requests_running", "gauge", "Requests that are being sampled.", engine.num_running),
            ("vllm:num_requests_waiting", "gauge", "Requests that wait for room in the batch.", engine.num_waiting),
            ("vllm:generation_tokens_total", "counter", "Tokens sampled.", engine.num_sampled),
            ("vllm:prompt_tokens_total", "counter", "Prompt tokens computed.", engine.num_prefilled),
            ("prime_hpc_policy_version", "gauge", "Version that samples now.", engine.version),
        )
        rows = (f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, text, value in figures)
        return PlainTextResponse("".join(rows))

    async def _answer(
        self,
        request: Request,
        read: Callable[[Mapping[str, Any]], Job],
        write: Callable[[Job, Sequence[Running]], dict[str, Any]],
    ) -> Response:
        try:
            body = from_json(await request.body())
        except ValueError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not isinstance(body, Mapping):
            return _error(400, "the body is no JSON object")
        if body.get("model") not in (None, *self._reader.names):
            return _error(404, f"the model {body['model']!r} does not exist here; there are {list(self._reader.names)}")
        try:
            job = read(body)
        except BadRequestError as error:
            return _error(400, str(error))
        done = await self._sample(request, job)
        if done is None:
            return Response(status_code=GONE)
        if errors := [sequence.error for sequence in done if sequence.error]:
            return _error(500, errors[0])
        return _json(write(job, done))

    async def _sample(self, request: Request, job: Job) -> list[Running] | None:
        """Let the sequences of a request run to their end; None: the client has gone, and they were aborted."""
        loop = asyncio.get_running_loop()
        left, ended = len(job.prompts) * job.params.n, asyncio.Event()

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        def on_done(sequence: Running) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: so is whoever waited
                loop.call_soon_threadsafe(count)

        running = [self._sequence(ids, job, i, on_done) for ids in job.prompts for i in range(job.params.n)]
        for sequence in running:
            self._engine.submit(sequence)
        waits = [asyncio.create_task(ended.wait()), asyncio.create_task(_wait_for_disconnect(request))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            if not ended.is_set():
                for sequence in running:
                    self._engine.abort(sequence)
        return running if ended.is_set() else None

    def _sequence(self, ids: list[int], job: Job, index: int, on_done: Callable[[Running], None]) -> Running:
        params, room = job.params, self._max_len - len(ids)
        # completions of one request differ, and are the same whenever it is sent again
        generator: torch.Generator | None = None
        if params.seed is not None:
            generator = self._engine.sampler.generator(params.seed + index)
        return Running(
            prompt=ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            generator=generator,
            on_done=on_done,
            prompt_scores=None if params.prompt_logprobs is None else [None],
            text=self._reader.stop_text(params),
        )


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: Mapping[str, Any]) -> Response:
    return Response(to_json(body), media_type="application/json")


def _error(status: int, message: str) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    body = to_json({"error": {"message": message, "type": kind, "code": status}})
    return Response(body, status_code=status, media_type="application/json")
