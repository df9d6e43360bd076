"""The policy as verifiers' model client: token prompts to `/inference/v1/generate`, versions of every sampled token.

It stands where verifiers' own `TrainClient` would: that one drops vLLM's `weight_versions`, cannot read vLLM 0.32's
log-probability entries, and spends most of its time in layers that a one-process orchestrator does not need (OpenAI
SDK, a thread per render).
"""

import asyncio
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json, to_json
from renderers.base import ParsedResponse
from verifiers.v1.clients import Client
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Message, Response, SamplingConfig, Tool

from prime_hpc.client.http import NoAnswerError, ServerClient
from prime_hpc.client.inference import BARE_LOGPROBS, InferenceError, LogprobError, read_choice, read_tokens
from prime_hpc.client.versions import VersionSpanError
from prime_hpc.envs.images import image_urls, without_images
from prime_hpc.envs.rendering import PromptRenderer
from prime_hpc.envs.routing import RoutingError, parse_routing
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.dataset.row_images import is_data_url

UNAVAILABLE = (502, 503)
"""HTTP statuses of a server that is starting or being restarted."""
REFUSED = (400, 413, 422)
"""HTTP statuses that are about the request, not about the server."""
FULL = (
    *("context length", "context_length", "maximum context", "max_model_len", "maximum model length"),
    *("too many tokens", "too long"),
)
"""Words of servers where a conversation leaves no room for a reply."""
CUT_OFF = {"repetition": "length"}
"""vLLM's word for a reply that it has cut off, of which verifiers knows none -> the word for what it is, too long."""
RETRY_DELAYS_S = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Waits before asking an unreachable server again; the last one repeats."""


class ContextFullError(ProviderError):
    """The conversation leaves no room for another token in the model's context."""


class RequestRefusedError(ProviderError):
    """The server works and says that the request is wrong: it would be on any server."""


class UnusableAnswerError(ProviderError):
    """The server works and says that it has no log-probability of a token that it sampled."""


@dataclass(frozen=True)
class SampledTurn:
    """Facts from the engine about one reply that the message graph has no place for."""

    logprobs: list[float]
    """The very list that the reply's graph node holds: it tells which node this is. Empty: not asked for."""
    versions: np.ndarray
    """int32 [num sampled tokens]."""
    routed: np.ndarray | None = None
    """Experts of the prompt and all sampled tokens but the last one, see `envs.routing`; None: not recorded."""


@dataclass(frozen=True)
class _Reply:
    """The tokens that one call sampled, within the model's context."""

    token_ids: list[int]
    logprobs: list[float]
    versions: np.ndarray
    routed: np.ndarray | None
    finish_reason: str | None


class PolicyClient(ServerClient, Client):
    """One inference server. Lives on the event loop that first uses it; `close` ends its connections."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        renderer: PromptRenderer,
        max_model_len: int,
        patience_s: float,
        *,
        with_logprobs: bool = True,
    ) -> None:
        """Make a client; opens no connection yet.

        Args:
            base_url: `http://host:port`, with or without a trailing `/v1`.
            api_key: sent as a Bearer token; None: that of this user's own servers on this machine (`client.keys`).
            max_model_len: prompt and completion tokens together, at most.
            patience_s: how long an unreachable server (being restarted) is asked again before a turn fails.
            with_logprobs: ask for them: what trains needs them; a fifth of a small model's server is spent on them.
        """
        super().__init__(base_url, api_key)
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.patience_s = patience_s
        self._with_logprobs = with_logprobs
        self._turns: dict[str, list[SampledTurn]] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One reply for a harness that talks OpenAI chat completions over HTTP (verifiers' `Client` contract)."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the policy answers chat completions only, not {type(dialect).__name__}; use another harness",
                status_code=400,
            )
        if turn is None:
            request = dialect.parse_request(body)
            messages, tools = request.messages, request.tools or []
        else:
            messages, tools = turn.prompt, turn.tools
        response = await self.sample(messages, tools, sampling, body["model"], session_id, turn)
        response.raw = serialize_completion(response, body["model"])
        return response

    async def sample(
        self,
        messages: list[Message],
        tools: list[Tool],
        sampling: SamplingConfig,
        model: str,
        session_id: str | None,
        turn: PendingTurn | None,
    ) -> Response:
        """One reply with its tokens and, where asked for, log-probabilities; its versions are kept for `take_turns`.

        Raises:
            ContextFullError: no room for another token.
            RequestRefusedError, UnusableAnswerError: the server works, this reply cannot be had or trained on.
            ProviderError: the server failed, or is none of ours.
        """
        images = self._images_of(messages)
        prompt, bridged = await self._prompt(messages, tools, turn)
        rendered_ids: list[int] = prompt.token_ids
        self._check_places(rendered_ids, len(images), bridged)
        room = self._room(rendered_ids)
        params = sampling.model_dump(exclude_none=True)
        params["max_tokens"] = min(params.get("max_tokens", room), room)
        params |= {"stop_token_ids": self.renderer.stop_token_ids, "skip_special_tokens": False}
        if self._with_logprobs:
            params["logprobs"] = 0
        body = {"model": model, "token_ids": rendered_ids, "sampling_params": params}
        if images:
            body |= {"content_parts": [{"type": "image_url", "url": url} for url in images], "return_token_ids": True}
        choice = await self._generate(body, session_id)
        prompt_ids = _expanded(choice, len(images)) if images else rendered_ids
        reply = self._read_reply(choice, prompt_ids)
        if session_id is not None:
            self._turns.setdefault(session_id, []).append(SampledTurn(reply.logprobs, reply.versions, reply.routed))
        wire_tools = [tool_to_wire(tool) for tool in tools] or None
        parsed = read_reply(self.renderer, reply.token_ids, prompt_ids, wire_tools)
        finish_reason = reply.finish_reason
        if finish_reason == "stop" and any(call.name and call.status == "ok" for call in parsed.tool_calls):
            finish_reason = "tool_calls"  # what the engine, which sees tokens alone, cannot say
        result = {
            "request_id": choice.get("request_id") or "",
            "prompt_ids": prompt_ids,
            "completion_ids": reply.token_ids,
            "completion_logprobs": reply.logprobs,
            "content": content_of(parsed, reply.token_ids, self.renderer),
            "reasoning_content": parsed.reasoning_content,
            "tool_calls": parsed.tool_calls,
            "finish_reason": finish_reason,
            "prompt_attribution": prompt,
        }
        if not images:
            return response_from_generate(result, model, turn if bridged else None)
        result |= {"renderer_prompt_ids": rendered_ids, "mm_placeholders": choice["mm_placeholders"]}
        return response_from_generate(result, model, turn if bridged else None, self.renderer.image_places)

    def take_turns(self, session_id: str) -> list[SampledTurn]:
        """Return the turns sampled for a trace; forgotten afterwards."""
        return self._turns.pop(session_id, [])

    async def _prompt(self, messages: list[Message], tools: list[Tool], turn: PendingTurn | None) -> tuple[Any, bool]:
        """Prompt tokens with their attribution, and whether they extend the conversation's stored tokens; one token
        for each image."""
        wire_tools = [tool_to_wire(tool) for tool in tools] or None
        if wire_tools is not None and not self.renderer.reads_tool_calls:
            raise RequestRefusedError(
                f"the environment gives the model tools ({tools[0].name}), and nothing here reads calls as its chat "
                "template writes them: none would ever be made. Set model.renderer to the one of the `renderers` "
                "package that fits the model",
                status_code=400,
            )
        if turn is not None and turn.prefix_node_ids and _extends_reply(turn.tail):
            previous = turn.previous_renderer_token_ids()
            if previous is not None:
                bridged = await self.renderer.bridge(previous, await self._fitting(turn.tail), wire_tools)
                if bridged is not None:
                    return bridged, True
        return await self.renderer.render(await self._fitting(messages), wire_tools), False

    async def _fitting(self, messages: list[Message]) -> list[dict[str, Any]]:
        """Return messages as renderers take them. Raises ContextFullError: they alone have more tokens than fit."""
        wire = _to_wire(messages)
        if await self.renderer.overflows(wire, self.max_model_len):
            raise ContextFullError(
                f"the prompt has more tokens than the model's context, {self.max_model_len}", status_code=400
            )
        return wire

    def _images_of(self, messages: list[Message]) -> list[str]:
        """Return the `data:` URLs of a conversation's images. Raises RequestRefusedError: it must have none, or they
        are elsewhere."""
        urls = image_urls(messages)
        if urls and not self.renderer.image_places:
            role = next(message.role for message in messages if image_urls([message]))
            raise RequestRefusedError(
                f"a {role} message holds image_url: prompts are text here, and the model would answer without "
                "having seen it. Set model.vision (frozen or trained) for a model that sees images",
                status_code=400,
            )
        for url in urls:
            if not is_data_url(url):
                raise RequestRefusedError(
                    f"an image is not sent as a data: URL, but as {url[:80]!r}: only the prompt of a task may name a "
                    "file or an address",
                    status_code=400,
                )
        return urls

    def _check_places(self, prompt_ids: list[int], num_images: int, bridged: bool) -> None:
        """Raise ProviderError unless a prompt has one token for each image: the engine puts them there in order."""
        places = sum(map(prompt_ids.count, self.renderer.image_places))
        if places == num_images:
            return
        if bridged and places > num_images:
            raise UnusableAnswerError(
                "the model has sampled a token that stands for an image: the next turn cannot tell it from one"
            )
        raise RequestRefusedError(
            f"the prompt has {num_images} images, and {places} tokens that stand for one: images belong into user and "
            "tool messages, and no text may spell such a token",
            status_code=400,
        )

    def _room(self, prompt_ids: list[int]) -> int:
        """Tokens that a reply may have. Raises ContextFullError: none."""
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextFullError(
                f"the prompt has {len(prompt_ids)} tokens, the model's context {self.max_model_len}", status_code=400
            )
        return room

    def _read_reply(self, choice: Mapping[str, Any], prompt_ids: list[int]) -> "_Reply":
        """Return what was sampled after these tokens; what exceeds the context, as only the engine knows how many
        tokens images are, is cut off."""
        token_ids, logprobs, versions = parse_choice(choice, self._with_logprobs)
        routed = _routing_of(choice, len(prompt_ids) + len(token_ids))
        room = self._room(prompt_ids)
        if len(token_ids) <= room:
            reason = choice.get("finish_reason")
            return _Reply(token_ids, logprobs, versions, routed, CUT_OFF.get(str(reason), reason))
        routed = None if routed is None else routed[: self.max_model_len - 1]
        return _Reply(token_ids[:room], logprobs[:room], versions[:room], routed, "length")

    async def _generate(self, body: dict[str, Any], session_id: str | None) -> dict[str, Any]:
        """POST one generation and return its choice; asks again while the server cannot be reached."""
        data = to_json(body)
        headers = dict([BARE_LOGPROBS])
        if session_id:
            headers[SESSION_ID_HEADER] = session_id
        give_up = loop_time() + self.patience_s
        attempt = 0
        while True:
            try:  # the episode's deadline bounds the answer
                answer = await self._http.request(
                    "POST", "/inference/v1/generate", data, timeout_s=None, headers=headers
                )
                raw, status, did = answer.body, answer.status, f"answered {answer.status}"
            except NoAnswerError as error:
                raw, status, did = str(error).encode(), 503, "gave no answer"
            if status == 200:
                return _first_choice(raw)
            if status not in UNAVAILABLE or loop_time() >= give_up:
                kind: type[ProviderError] = RequestRefusedError if status in REFUSED else ProviderError
                text = raw[:500].decode(errors="replace")
                if status in REFUSED and "content_parts" in body and any(words in text.lower() for words in FULL):
                    kind = ContextFullError  # how many tokens its images are, the engine alone knows
                raise kind(f"{self.base_url} {did}: {text}", status_code=status)
            await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
            attempt += 1


def parse_choice(choice: Mapping[str, Any], with_logprobs: bool = True) -> tuple[list[int], list[float], np.ndarray]:
    """Token ids, log-probabilities and policy versions (int32) of one `choices[]` entry, all of one length; no
    log-probabilities where they were not asked for.

    Raises:
        UnusableAnswerError: a log-probability is missing or not finite.
        ProviderError: they disagree, or a version is missing: this is no server of ours.
    """
    try:
        if with_logprobs:
            return read_choice(choice)
        ids, versions = read_tokens(choice)
        return ids, [], versions
    except LogprobError as error:
        raise UnusableAnswerError(str(error)) from error
    except (InferenceError, VersionSpanError) as error:
        raise ProviderError(str(error)) from error


def read_reply(
    renderer: PromptRenderer, completion_ids: list[int], prompt_ids: list[int], tools: list[dict[str, Any]] | None
) -> Any:
    """Return a reply as `renderers` reads it, all of it text where its JSON is more than Python reads; no call has a
    name that is no text."""
    try:
        parsed = renderer.renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
    except (RecursionError, ValueError):  # a number of thousands of digits, brackets a thousand deep
        return ParsedResponse(_text_of(completion_ids, renderer))
    for call in parsed.tool_calls:
        call.name = call.name if isinstance(call.name, str) else None
    return parsed


def _text_of(completion_ids: Iterable[int], renderer: PromptRenderer) -> str:
    """Return a reply as it was sampled, up to the token that ends it."""
    ids = list(itertools.takewhile(lambda i: i not in renderer.stop_token_ids, completion_ids))
    text: str = renderer.tokenizer.decode(ids, skip_special_tokens=False)
    return text


def content_of(parsed: Any, completion_ids: list[int], renderer: PromptRenderer) -> str:
    """Text of a reply that `renderers` has read, with the calls in it that no tool gets: cut, malformed, of no tool.

    Where nothing is called, all that follows the first of these is text, too.
    """
    # Those that `response_from_generate` leaves out of `tool_calls`.
    lost = [call for call in parsed.tool_calls if not call.name or call.status == "unknown_tool"]
    if not lost:
        content: str = parsed.content
        return content
    ids = list(itertools.takewhile(lambda i: i not in renderer.stop_token_ids, completion_ids))
    decode = functools.partial(renderer.tokenizer.decode, skip_special_tokens=False)
    said, span = parsed.content.strip(), lost[0].token_span
    if len(lost) == len(parsed.tool_calls) and span and decode(ids[: span[0]]).rstrip().endswith(said):
        texts = [decode(ids[span[0] :])]
    else:
        texts = [decode(ids[slice(*call.token_span)]) if call.token_span else call.raw for call in lost]
    return "\n".join(filter(None, [said, *texts]))


def _routing_of(choice: Mapping[str, Any], num_tokens: int) -> np.ndarray | None:
    """Return the recorded experts of a call that saw and sampled so many tokens; None where it was aborted.
    Raises ProviderError: they are of others: this is no server of ours."""
    try:
        found = parse_routing(choice)
    except RoutingError as error:
        raise ProviderError(str(error)) from error
    if choice.get("finish_reason") == "abort":
        return None
    if found is not None and len(found) != num_tokens - 1:
        raise ProviderError(f"the server recorded the experts of {len(found)} tokens, of {num_tokens - 1} expected")
    return found


def _first_choice(raw: bytes) -> dict[str, Any]:
    """Return the one choice of a generate answer. Raises ProviderError: not JSON, or without a choice."""
    try:
        data = from_json(raw)
        choice: dict[str, Any] = data["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ProviderError(f"the server's answer is no generation: {raw[:200]!r}") from error
    return choice | {name: data.get(name) for name in ("request_id", "prompt_token_ids", "mm_placeholders")}


def _to_wire(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as renderers take them, without what their images hold."""
    return [_joined(message) for message in without_images([message_to_wire(message) for message in messages])]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts are all text with one text: a chat template may refuse a list, or write it as Python
    shows it."""
    content = message.get("content")
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _expanded(choice: Mapping[str, Any], num_images: int) -> list[int]:
    """Return the prompt as the engine saw it, with a token for each embedding of an image.
    Raises ProviderError: it does not say, or has seen another number of images."""
    ids, places = choice.get("prompt_token_ids"), choice.get("mm_placeholders")
    found = places.get("image") if isinstance(places, dict) else None
    if not isinstance(ids, list) or not isinstance(found, list) or len(found) != num_images:
        raise ProviderError(f"the server does not say where in its prompt it saw {num_images} images: {places!r:.200}")
    return ids


def _extends_reply(tail: list[Message]) -> bool:
    """Return whether new messages can follow a sampled reply as they are: tool results, then at most one user
    message."""
    roles = [message.role for message in tail]
    return bool(roles) and all(role == "tool" for role in roles[:-1]) and roles[-1] in ("tool", "user")
