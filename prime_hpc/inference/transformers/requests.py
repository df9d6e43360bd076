"""From a request's JSON to sequences and back, for the token route and OpenAI's two text routes.

`token_ids`, `logprobs` and `weight_versions` have the form of vLLM's answers, so that one client reads both. A field
that this server does not act on is refused, unless it is one that could change nothing (`HARMLESS`).
"""

import base64
import io
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from prime_hpc.inference.transformers.engine import finite, wire_row
from prime_hpc.inference.transformers.parameters import BadRequestError, SamplingParams, parse_params
from prime_hpc.inference.transformers.sampling import Drawn
from prime_hpc.inference.transformers.sequences import Running, StopText

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "request_id", "stream_options"}
    | {"cache_salt", "priority", "kv_transfer_params"}
)
"""Fields that are taken and change nothing here."""
OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "continue_final_message": (False,),
    "features": (),
    "output_mode": ("tokens",),
}
"""Fields of whole features that this server does not have, and the values that are off (null is)."""


@dataclass
class Job:
    """One request: its prompts, each with `n` completions."""

    prompts: list[list[int]]
    params: SamplingParams
    model: str
    asked: Mapping[str, Any]
    """The route's own fields."""


class Reader:
    """Reads requests for one model."""

    def __init__(self, tokenizer: Any, names: Sequence[str], vocab_size: int, max_len: int) -> None:
        """`tokenizer`: transformers', or None where the model has none: text is refused then."""
        self._tokenizer, self.names = tokenizer, tuple(names)
        self._vocab_size, self._max_len = vocab_size, max_len

    def tokens(self, body: Mapping[str, Any]) -> Job:
        """Read the body of `/inference/v1/generate`."""
        own, rest = _split(body, {"model", "token_ids", "sampling_params"})
        if "content_parts" in rest:
            raise BadRequestError("content_parts: the transformers backend takes text alone, no images")
        if rest:
            raise BadRequestError(f"{', '.join(sorted(rest))}: the transformers backend does not know this field")
        stated = own.get("sampling_params") or {}
        if not isinstance(stated, Mapping):
            raise BadRequestError("sampling_params must be an object")
        return self._job([own.get("token_ids")], parse_params(stated), own)

    def completion(self, body: Mapping[str, Any]) -> Job:
        """Read the body of `/v1/completions`."""
        own, rest = _split(body, {"model", "prompt", "return_token_ids", "add_special_tokens"})
        prompt = own.get("prompt")
        listed = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = [
            self._text()(one, add_special_tokens=own.get("add_special_tokens", True))["input_ids"]
            if isinstance(one, str)
            else one
            for one in (prompt if isinstance(prompt, list) and listed else [prompt])
        ]
        return self._job(prompts, parse_params(rest), own)

    def chat(self, body: Mapping[str, Any]) -> Job:
        """Read the body of `/v1/chat/completions`."""
        names = {"model", "messages", "return_token_ids", "chat_template_kwargs", "add_generation_prompt"}
        own, rest = _split(body, names | {"logprobs", "top_logprobs", "max_completion_tokens"})
        if "max_completion_tokens" in own:
            rest.setdefault("max_tokens", own["max_completion_tokens"])
        if own.get("logprobs"):
            rest["logprobs"] = own.get("top_logprobs") or 0
        tokenizer = self._text()
        if not tokenizer.chat_template:
            raise BadRequestError("the model's tokenizer has no chat template: use /v1/completions")
        try:
            ids = tokenizer.apply_chat_template(
                [_message(message) for message in own.get("messages") or []],
                add_generation_prompt=own.get("add_generation_prompt", True),
                tokenize=True,
                return_dict=False,
                **(own.get("chat_template_kwargs") or {}),
            )
        except BadRequestError:
            raise
        except Exception as error:
            raise BadRequestError(f"messages: {type(error).__name__}: {error}") from error
        return self._job([ids], parse_params(rest), own)

    def stop_text(self, params: SamplingParams) -> StopText | None:
        """Watch for the stop strings of a request."""
        if not params.stop:
            return None
        return StopText(lambda ids: self.decode(ids, params), params.stop, params.include_stop_str_in_output)

    def decode(self, ids: Sequence[int], params: SamplingParams) -> str:
        """Text of token ids; ids beyond the tokenizer's (padding of the vocabulary) are nothing."""
        tokenizer = self._text()
        known, skips = [i for i in ids if i < len(tokenizer)], params.skip_special_tokens
        return tokenizer.decode(known, skip_special_tokens=skips, clean_up_tokenization_spaces=False)

    def piece(self, token_id: int) -> str:
        """Text of one token."""
        return self._tokenizer.decode([token_id]) if token_id < len(self._tokenizer) else ""

    def _text(self) -> Any:
        if self._tokenizer is None:
            raise BadRequestError("the model has no tokenizer: this server takes token ids only")
        return self._tokenizer

    def _job(self, prompts: Sequence[Any], params: SamplingParams, own: Mapping[str, Any]) -> Job:
        for ids in prompts:
            if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
                raise BadRequestError("a prompt must be a list of token ids, not empty; a string where text is taken")
            if not all(0 <= i < self._vocab_size for i in ids):
                raise BadRequestError(f"token id out of range: the vocabulary has {self._vocab_size}")
            if len(ids) >= self._max_len:
                raise BadRequestError(
                    f"the prompt has {len(ids)} tokens, this model's maximum context length is {self._max_len}"
                )
        if params.stop and self._tokenizer is None:
            raise BadRequestError("stop: the model has no tokenizer; use stop_token_ids")
        return Job([list(ids) for ids in prompts], params, str(own.get("model") or self.names[0]), own)


def _split(body: Mapping[str, Any], own: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the route's own fields, and those that are left (sampling parameters).
    Raises BadRequestError: a feature is asked for that this server does not have."""
    mine: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in body.items():
        if name in HARMLESS or value is None:
            continue
        if name in OFF:
            if value not in OFF[name]:
                raise BadRequestError(f"{name}: the transformers backend does not have this; leave it out")
        elif name in own:
            mine[name] = value
        else:
            rest[name] = value
    return mine, rest


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadRequestError("messages: each needs a role and a content")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise BadRequestError("messages: the transformers backend takes text alone")
        content = "".join(str(part["text"]) for part in content)
    return {**message, "content": content or ""}


def token_answer(job: Job, done: Sequence[Running]) -> dict[str, Any]:
    """Write the answer of `/inference/v1/generate`."""
    choices = [
        {
            "index": i,
            "token_ids": sequence.token_ids,
            "logprobs": _token_logprobs(sequence.drawn, job.params.logprobs),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "weight_versions": sequence.spans,
            "routed_experts": _routed_experts(sequence),
        }
        for i, sequence in enumerate(done)
    ]
    return {
        "request_id": f"generate-{uuid.uuid4().hex}",
        "choices": choices,
        "prompt_logprobs": _prompt_logprobs(done[0]),
    }


def _routed_experts(sequence: Running) -> str | None:
    """Encode recorded experts as vLLM sends them: numpy's file format in base64, of all tokens but the last one."""
    if not sequence.routed:
        return None
    with io.BytesIO() as buffer:
        np.save(buffer, np.concatenate(sequence.routed)[: sequence.num_tokens - 1], allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


def text_answer(job: Job, done: Sequence[Running], reader: Reader, *, chat: bool) -> dict[str, Any]:
    """Write the answer of `/v1/chat/completions` or `/v1/completions`."""
    choices = []
    for i, sequence in enumerate(done):
        kept, watched = sequence.token_ids, sequence.text
        is_stopped = watched is not None and watched.end is not None
        text = watched.text[: watched.end] if watched is not None and is_stopped else reader.decode(kept, job.params)
        choice: dict[str, Any] = {
            "index": i,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "weight_versions": sequence.spans,
            "logprobs": _text_logprobs(sequence.drawn, job.params.logprobs, reader, chat),
        }
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if job.asked.get("return_token_ids"):
            choice |= {"token_ids": kept} | ({} if chat else {"prompt_token_ids": sequence.prompt})
        if sequence.prompt_scores is not None and not chat:
            choice["prompt_logprobs"] = _prompt_logprobs(sequence)
        choices.append(choice)
    num_prompt = sum(map(len, job.prompts))
    num_completion = sum(len(sequence.token_ids) for sequence in done)
    kind = "chat.completion" if chat else "text_completion"
    answer = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": job.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }
    if chat and job.asked.get("return_token_ids"):
        answer["prompt_token_ids"] = job.prompts[0]
    if chat and done[0].prompt_scores is not None:
        answer["prompt_logprobs"] = _prompt_logprobs(done[0])
    return answer


def _token_logprobs(drawn: Sequence[Drawn], num_top: int | None) -> dict[str, Any] | None:
    return None if num_top is None else {"content": [wire_row(one, num_top) for one in drawn]}


def _text_logprobs(drawn: Sequence[Drawn], num_top: int | None, reader: Reader, chat: bool) -> dict[str, Any] | None:
    """Log-probabilities by the pieces of text, in the form of either route."""
    if num_top is None:
        return None
    pieces = [reader.piece(one.token_id) for one in drawn]
    if chat:
        return {"content": [_chat_row(piece, one, reader) for piece, one in zip(pieces, drawn, strict=True)]}
    offsets = list(accumulate(map(len, pieces), initial=0))[:-1]
    tops = [{reader.piece(token): finite(value) for token, value, _ in one.top} for one in drawn]
    return {
        "tokens": pieces,
        "token_logprobs": [finite(one.logprob) for one in drawn],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _chat_row(piece: str, drawn: Drawn, reader: Reader) -> dict[str, Any]:
    def row(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    tops = [row(reader.piece(token), value) for token, value, _ in drawn.top]
    return {**row(piece, drawn.logprob), "top_logprobs": tops}


def _prompt_logprobs(sequence: Running) -> list[dict[str, Any] | None] | None:
    """Scores of a prompt in vLLM's form: of each token but the first, token id -> log-probability and rank."""
    if sequence.prompt_scores is None:
        return None
    rows: list[dict[str, Any] | None] = [None]
    for found in sequence.prompt_scores[1:]:
        rows.append({str(t): {"logprob": finite(value), "rank": rank} for t, (value, rank) in (found or {}).items()})
    return rows
