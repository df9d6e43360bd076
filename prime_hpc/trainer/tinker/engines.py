"""Sampling through the engines' servers: an adapter is brought into one when it is first asked for there.

Every save is a model of its own for the engines, so a sampler keeps its weights whatever is trained meanwhile. A server
holds as many as the service has slots; the one that was asked for longest ago and has no request in flight goes first.
A server that was started again has none: they are brought in anew. One that gave no answer may be another by then, or
not: it is asked for what it holds, and what nobody here knows of is unloaded, or its places would fill up for good.
What another run, which may be a service too, has brought in stays.
"""

import asyncio
import contextlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from prime_hpc.client.inference import POLICY, InferenceClient, InferenceError, parse_choice
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.paths import Saved
from prime_hpc.trainer.tinker.requests import Sample, SamplingParams
from prime_hpc.trainer.tinker.wire import LENGTH, STOP, SampledSequence, write_samples

NOT_FOUND = 404
RETRY_S = 1.0
_SERVED = re.compile(r"([0-9a-f]{32}-\d+)-\d+")
"""Names under which saves are served: an adapter (a session and a number), the number of the save."""


@dataclass
class _Adapter:
    """One adapter in a server."""

    uses: int = 0
    """Requests in flight."""


class _Server:
    """One server and the adapters in it."""

    def __init__(self, client: InferenceClient, room: int, is_ours: Callable[[str], bool]) -> None:
        self.client, self._room, self._is_ours = client, room, is_ours
        self.in_flight = 0
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()
        """The one that was asked for longest ago first."""
        self._is_known = False
        """Whether the server holds these and no others of ours: one of an earlier life of this service may hold any."""
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def holding(self, saved: Saved | None) -> AsyncIterator[str]:
        """Yield the model name under which a save (or the base model) is served, kept for so long."""
        self.in_flight += 1
        try:
            if saved is None:
                yield POLICY
                return
            name = f"{saved.run.root.name}-{saved.save.number}"
            async with self._changed:
                await self._bring(name, saved)
                adapter = self._adapters[name]
                adapter.uses += 1
                self._adapters.move_to_end(name)
            try:
                yield name
            finally:
                async with self._changed:
                    adapter.uses -= 1  # its own: another may have its name by now, in a server that was started again
                    self._changed.notify_all()
        finally:
            self.in_flight -= 1

    async def _bring(self, name: str, saved: Saved) -> None:
        """See to it that the server holds an adapter."""
        while True:
            await self._look()
            if name in self._adapters:
                return
            if len(self._adapters) < self._room:
                break
            idle = next((n for n, adapter in self._adapters.items() if not adapter.uses), None)
            if idle is None:
                await self._changed.wait()
                continue
            await self.client.reload_weights(idle)
            del self._adapters[idle]
        load = partial(self.client.update_weights, saved.folder.absolute(), saved.save.number, name)
        try:
            await load()
        except InferenceError as error:
            self.doubt()  # it may be full of what it took too late for an answer
            if not _is_refusal(error) or not await self._look():
                raise
            await load()
        self._adapters[name] = _Adapter()

    async def _look(self) -> int:
        """Find out what the server holds, where that is in doubt, and unload what nobody here knows of; return how
        many those were."""
        if self._is_known:
            return 0
        found = await self.client.adapter_versions()
        others = [match for name in found if name not in self._adapters and (match := _SERVED.fullmatch(name))]
        strays = [match[0] for match in others if self._is_ours(match[1])]
        for name in strays:
            await self.client.reload_weights(name)
        for name in [name for name in self._adapters if name not in found]:
            del self._adapters[name]
        self._is_known = True
        self._changed.notify_all()
        return len(strays)

    def doubt(self) -> None:
        """Ask the server for its adapters before the next one is brought: it may be another one that has none, or the
        same that took an order without an answer."""
        self._is_known = False


class Engines:
    """All servers. Belongs to one event loop."""

    def __init__(
        self,
        urls: Callable[[], list[str]],
        key: str | None,
        room: int,
        max_len: int,
        wait_s: float,
        is_ours: Callable[[str], bool],
    ) -> None:
        """Args:
        urls: of the servers that are known now.
        room: adapters at once in one server.
        max_len: longest prompt and completion together.
        wait_s: how long a request waits for a server that does not answer (it starts, or is started again).
        is_ours: whether an adapter was trained by this run, in an earlier life of the service too.
        """
        self._is_ours = is_ours
        self._urls, self._key, self._room, self._max_len, self._wait_s = urls, key, room, max_len, wait_s
        self._servers: dict[str, _Server] = {}
        self.trouble = ""
        """Why requests for samples are asked again; empty: the last one had its answer."""

    async def close(self) -> None:
        """End the connections."""
        for server in self._servers.values():
            await server.client.close()

    async def sample(self, request: Sample, saved: Saved | None, vocab_size: int) -> bytes:
        """Return the client's answer to a request for samples.

        Args:
            saved: weights; None: the base model's.

        Raises:
            BadRequestError: it cannot be sampled like that.
            InferenceError: the engines failed, or none answered in time.
        """
        tokens = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        body = self._body(request, tokens, vocab_size)
        end = loop_time() + self._wait_s
        while True:
            try:
                answer = await self._ask(body, saved)
                self.trouble = ""
                break
            except InferenceError as error:
                if _is_refusal(error) or loop_time() >= end:
                    raise
                self.trouble = f"the engines do not answer ({error})"
                await asyncio.sleep(RETRY_S)
        return _written(answer, request, tokens)

    async def _ask(self, body: Mapping[str, Any], saved: Saved | None) -> dict[str, Any]:
        for url in self._urls():
            if url not in self._servers:
                client = InferenceClient(url, self._key, timeout_s=self._wait_s)
                self._servers[url] = _Server(client, self._room, self._is_ours)
        known = [self._servers[url] for url in self._urls()]
        if not known:
            raise InferenceError("no engine is ready yet")
        server = min(known, key=lambda s: s.in_flight)
        try:
            async with server.holding(saved) as name:
                try:
                    return await server.client.complete({**body, "model": name})
                except InferenceError as error:
                    if _is_refusal(error):
                        raise BadRequestError(str(error)) from error
                    raise
        except InferenceError as error:
            if error.status in (None, NOT_FOUND):  # it is gone, or another one that knows nothing
                server.doubt()
            raise

    def _body(self, request: Sample, tokens: list[int], vocab_size: int) -> dict[str, Any]:
        if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
            raise BadRequestError("prompt: pictures and sound are not served here, only tokens")
        if not tokens or not all(0 <= token < vocab_size for token in tokens):
            worst = next((t for t in tokens if not 0 <= t < vocab_size), "none at all")
            raise BadRequestError(f"prompt: token {worst}: the model has tokens 0 to {vocab_size - 1}")
        params = request.sampling_params
        room = self._max_len - len(tokens)
        if room < 1:
            raise BadRequestError(f"prompt: {len(tokens)} tokens leave no room in a context of {self._max_len}")
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, name):
                raise BadRequestError(f"{name} is not served here; leave it out")
        last_n = request.prompt_logprobs_last_n
        if last_n is not None and not last_n < len(tokens):
            raise BadRequestError(f"prompt_logprobs_last_n = {last_n}: the prompt has {len(tokens)} tokens")
        sampling: dict[str, Any] = {
            "n": request.num_samples,
            "max_tokens": min(params.max_tokens or room, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "logprobs": request.topk_sample_logprobs,
            **_stop(params),
        }
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            sampling["prompt_logprobs"] = request.topk_prompt_logprobs
        return {"token_ids": tokens, "sampling_params": {k: v for k, v in sampling.items() if v is not None}}


def _is_refusal(error: InferenceError) -> bool:
    """Return whether the same again would fail as well."""
    return error.status is not None and error.status != NOT_FOUND and error.status < 500


def _stop(params: SamplingParams) -> dict[str, Any]:
    """When a sequence ends: at the end-of-sequence token, but where the list of what else ends it is empty."""
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is None:
        return {}
    if not stop:
        return {"ignore_eos": True}
    words = [word for word in stop if isinstance(word, str)]
    return {"stop": words} if words else {"stop_token_ids": stop}


def _written(answer: Mapping[str, Any], request: Sample, tokens: list[int]) -> bytes:
    """Encode an answer of our servers for the client."""
    sequences = []
    for choice in answer["choices"]:
        found = parse_choice(choice)
        if found.finish_reason not in ("stop", "length"):
            raise InferenceError(f"a sequence ended by {found.finish_reason}: the engine was stopped")
        top = None
        if request.topk_sample_logprobs:
            rows = choice["logprobs"]["content"]
            top = [[(entry["token_id"], entry["logprob"]) for entry in row["top_logprobs"]] for row in rows]
        reason = STOP if found.finish_reason == "stop" else LENGTH
        sequences.append(SampledSequence(found.token_ids, found.logprobs, reason, top))
    rows = answer.get("prompt_logprobs")
    if rows is None:
        return write_samples(sequences, None, None)
    skipped = len(tokens) - request.prompt_logprobs_last_n if request.prompt_logprobs_last_n is not None else 1
    scores = np.full(len(tokens), np.nan, np.float32)
    top_rows: list[list[tuple[int, float]]] = [[] for _ in tokens]
    for i in range(skipped, len(tokens)):
        scores[i] = rows[i][str(tokens[i])]["logprob"]
        ranked = sorted(rows[i].items(), key=lambda item: -item[1]["logprob"])[: request.topk_prompt_logprobs]
        top_rows[i] = [(int(token), entry["logprob"]) for token, entry in ranked]
    return write_samples(
        sequences, scores if request.prompt_logprobs else None, top_rows if request.topk_prompt_logprobs else None
    )
