"""Token-in token-out generation (`POST /inference/v1/generate`) as our clients need it.

Differs from vLLM 0.32's own route in five things. Each entry of `logprobs.content` also has `"token": "token_id:N"`,
which renderers 0.1.12 (verifiers' client side) insists on and vLLM dropped. Tokens of an adapter carry its version.
Nothing is detokenised that nobody reads. The answer's per-token part is written straight to JSON. And a client may ask
for log-probabilities as bare or packed numbers (`client.inference.BARE_LOGPROBS`). Without the last, together: 70
instead of 120 ms of this process's CPU time for 1,000 tokens (24-token completions, 128 at once, 2 cores).
"""

import base64
import inspect
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from pydantic_core import to_json
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs,
    GenerateRequest,
    GenerateResponseBase,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import RequestOutput

from prime_hpc.client.inference import BARE_LOGPROBS, NO_LOGPROB
from prime_hpc.inference.vllm.adapters import version_of
from prime_hpc.inference.vllm.gathering import Gathering

GENERATE = "/inference/v1/generate"

_bare: ContextVar[bool] = ContextVar("bare", default=False)
_encoded_by_us: ContextVar[bool] = ContextVar("encoded_by_us", default=False)

router = APIRouter()


def serving_of(engine: Any, app: FastAPI) -> "PolicyTokens":
    """Return our serving of token requests beside vLLM's own, of the same engine."""
    taken = inspect.signature(ServingTokens).parameters
    more = {name: getattr(app.state, name) for name in ("online_derenderer",) if name in taken}  # vLLM 0.33
    return PolicyTokens(engine, app.state.openai_serving_models, app.state.online_renderer, request_logger=None, **more)


def install(app: FastAPI, serving: "PolicyTokens", *, count: bool) -> None:
    """Serve token requests by `serving` on our route instead of vLLM's: the first to be looked at, as the busiest.

    `count`: keep vLLM's counters of HTTP requests, which look at every route once more.
    """
    app.state.serving_tokens = serving
    others = [r for r in app.router.routes if not (isinstance(r, APIRoute) and r.path == GENERATE)]
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(others)
    if not count:
        app.user_middleware[:] = [m for m in app.user_middleware if m.cls is not PrometheusInstrumentatorMiddleware]


@router.post(GENERATE, dependencies=[Depends(validate_json_request)])
@with_cancellation
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Sample from token ids; streaming and text answers are vLLM's own."""
    result = await raw_request.app.state.serving_tokens.serve_tokens(request, raw_request)
    if isinstance(result, ErrorResponse):
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    if isinstance(result, Response):
        return result
    if isinstance(result, GenerateResponseBase):
        return JSONResponse(result.model_dump())
    return StreamingResponse(result, media_type="text/event-stream")


class PolicyTokens(ServingTokens):
    """vLLM's serving of token requests with our wire format."""

    gathering: Gathering | None = None
    """Lets requests wait for each other before they reach the engine; None: none waits."""

    async def serve_tokens(self, request: GenerateRequest, raw_request: Request | None = None) -> Any:
        """Answer a request as vLLM does, without text where only tokens are asked for."""
        params = request.sampling_params
        if request.output_mode == "tokens" and not params.stop:
            params.detokenize = False
        params.skip_clone = True  # this request's own: vLLM need not copy it deeply
        name, value = BARE_LOGPROBS
        asked = raw_request is not None and raw_request.headers.get(name) == value
        plain = asked and request.output_mode == "tokens"
        bare = plain and params.logprobs == 0 and params.prompt_logprobs is None
        packs = plain and params.logprobs is None and (params.prompt_logprobs or 0) > 0
        if bare or packs:
            params.flat_logprobs = True  # lists of numbers, not two objects a token
        _bare.set(bare)
        if self.gathering is not None:
            await self.gathering.join()
        return await super().serve_tokens(request, raw_request)

    async def serve_tokens_full_generator(
        self,
        request: GenerateRequest,
        result_generator: AsyncGenerator[RequestOutput, None],
        request_id: str,
        model_name: str,
        request_metadata: RequestResponseMetadata,
        **more: Any,
    ) -> Any:
        """Collect the answer as vLLM does; of tokens alone, encode log-probabilities and versions at once."""
        last: RequestOutput | None = None
        of_prompt: Any = None

        async def tap() -> AsyncGenerator[RequestOutput, None]:
            nonlocal last, of_prompt
            async for output in result_generator:
                last = output
                if isinstance(output.prompt_logprobs, FlatLogprobs):
                    of_prompt, output.prompt_logprobs = output.prompt_logprobs, None
                yield output

        plain = request.output_mode == "tokens"
        reset = _encoded_by_us.set(plain)
        try:
            answer = await super().serve_tokens_full_generator(
                request, tap(), request_id, model_name, request_metadata, **more
            )
        finally:
            _encoded_by_us.reset(reset)
        if not plain or isinstance(answer, ErrorResponse):
            return answer
        assert last is not None
        body = answer.model_dump()
        if of_prompt is not None:
            body["prompt_logprobs"] = packed_logprobs(of_prompt)
        top = request.sampling_params.logprobs
        for choice, output in zip(body["choices"], last.outputs, strict=True):
            if choice["logprobs"] is not None and output.logprobs is not None:
                values = bare_logprobs(output.token_ids, output.logprobs) if _bare.get() else None
                if values is not None:
                    choice["logprobs"] = {"values": values}
                else:
                    choice["logprobs"]["content"] = logprob_rows(output.token_ids, output.logprobs, top)
            if last.lora_request is not None:  # the engine labels the base model's version alone
                version = str(version_of(last.lora_request))
                choice["weight_versions"] = [{"version": version, "start": 0, "end": len(output.token_ids)}]
        return Response(to_json(body), media_type="application/json")

    def _create_tokens_logprobs(self, *args: Any, **kwargs: Any) -> GenerateLogProbs:
        if _encoded_by_us.get():
            return GenerateLogProbs(content=[])
        return super()._create_tokens_logprobs(*args, **kwargs)


def bare_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float] | None:
    """Log-probability of every sampled token, [L]; None where the engine's lists are of other tokens."""
    if not isinstance(logprobs, FlatLogprobs) or logprobs.token_ids != list(token_ids):
        return None
    return [_finite(value) for value in logprobs.logprobs]


def packed_logprobs(of_prompt: FlatLogprobs) -> dict[str, str]:
    """Pack a prompt's log-probabilities as `client.inference.unpack_top` reads them."""
    arrays = {"token_ids": np.array(of_prompt.token_ids, "<i4"), "logprobs": np.array(of_prompt.logprobs, "<f4")}
    return {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}


def logprob_rows(
    token_ids: Sequence[int], logprobs: Iterable[Mapping[int, Logprob] | None], num_top: int | None
) -> list[dict[str, Any]]:
    """`logprobs.content` of one completion.

    Args:
        token_ids: sampled tokens, [L].
        logprobs: for each, the engine's candidates by token id (the sampled one first).
        num_top: candidates that the request asked for; -1 means all.
    """
    rows = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        sampled = candidates.get(token_id) if candidates else None
        row: dict[str, Any] = {
            "token_id": token_id,
            "token": f"token_id:{token_id}",
            "logprob": NO_LOGPROB if sampled is None else _finite(sampled.logprob),
            "rank": (sampled.rank or None) if sampled else None,
            "top_logprobs": [],
        }
        if num_top and candidates:
            shown = list(candidates.items())[: None if num_top < 0 else num_top]
            row["top_logprobs"] = [
                {"token_id": other, "logprob": _finite(entry.logprob), "rank": entry.rank or None}
                for other, entry in shown
            ]
        rows.append(row)
    return rows


def _finite(logprob: float) -> float:
    return logprob if logprob >= NO_LOGPROB else NO_LOGPROB  # NaN compares false
