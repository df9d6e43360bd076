"""Async client of one prime-hpc inference server: generation by token ids, weight updates, health."""

import asyncio
import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from prime_hpc.client.figures import parse_figures
from prime_hpc.client.http import Answer, NoAnswerError, ServerClient
from prime_hpc.client.versions import versions_from_spans
from prime_hpc.runtime.event_loops import loop_time

POLICY = "policy"
READY_POLL_S = 0.25
NO_LOGPROB = -9999.0
"""Stands for a log-probability that a server does not have, or that is none: JSON has no infinity."""
BARE_LOGPROBS = ("X-Logprobs", "bare")
"""A header of a request for tokens: a server that knows it answers log-probabilities as `logprobs.values`, one number a
token, where no others than those of the sampled tokens are asked for: a third of the answer's bytes. Those of a
prompt's likeliest tokens come as two packed arrays (`unpack_top`), a seventh."""


class InferenceError(RuntimeError):
    """A call to the inference server failed; `status` is the HTTP status, or None without an answer of
    its own (also where something in between said 200)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LogprobError(InferenceError):
    """The log-probability of a sampled token is missing or not finite: nothing can be trained on it."""


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens at each of L places; the largest id, with 0, where none is known."""

    ids: np.ndarray
    """int32 [L, k]."""
    logprobs: np.ndarray
    """float32 [L, k]."""


@dataclass(frozen=True)
class Generation:
    """One completion: arrays of length L, the number of sampled tokens (a final EOS included)."""

    token_ids: np.ndarray
    """int32 [L]."""
    logprobs: np.ndarray
    """float32 [L], the engine's log-probability of each token, after temperature."""
    versions: np.ndarray
    """int32 [L], the policy version that sampled each token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


def read_choice(choice: Mapping[str, Any]) -> tuple[list[int], list[float], np.ndarray]:
    """Token ids, log-probabilities and policy versions (int32) of one `choices[]` entry of `/inference/v1/generate`.

    Raises:
        LogprobError: a log-probability is missing or not finite.
        InferenceError: they are of other tokens, or of another number.
        VersionSpanError: the version spans do not cover the tokens.
    """
    ids, versions = read_tokens(choice)
    logprobs = _logprobs_of(choice, ids)
    for token_id, logprob in zip(ids, logprobs, strict=True):
        if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob == NO_LOGPROB:
            raise LogprobError(f"the server sent the log-probability {logprob!r} for token {token_id}")
    return ids, logprobs, versions


def read_tokens(choice: Mapping[str, Any]) -> tuple[list[int], np.ndarray]:
    """Token ids and policy versions (int32) of a choice whose log-probabilities nobody asked for.
    Raises VersionSpanError: the version spans do not cover the tokens."""
    ids = choice.get("token_ids") or []
    return ids, versions_from_spans(choice.get("weight_versions"), len(ids))


def _logprobs_of(choice: Mapping[str, Any], ids: list[int]) -> list[Any]:
    """Return the log-probability of every token, as it was sent. Raises InferenceError: they are of other tokens."""
    sent = choice.get("logprobs") or {}
    values = sent.get("values")
    if values is None:
        content = sent.get("content") or []
        # vLLM >= 0.32 names the token by `token_id`, older ones by `token: "token_id:N"`.
        for token_id, entry in zip(ids, content, strict=False):
            if (
                entry.get("token_id", token_id) != token_id
                or entry.get("token", f"token_id:{token_id}") != f"token_id:{token_id}"
            ):
                raise InferenceError(
                    f"the server's log-probabilities are of other tokens than its completion ({token_id})"
                )
        values = [entry.get("logprob") for entry in content]
    if len(values) != len(ids):
        raise InferenceError(f"the server sent {len(values)} log-probabilities for {len(ids)} tokens")
    return values


def parse_choice(choice: Mapping[str, Any]) -> Generation:
    """Turn one `choices[]` entry of `/inference/v1/generate` into arrays. Raises as `read_choice` does."""
    ids, logprobs, versions = read_choice(choice)
    values = np.asarray(logprobs, dtype=np.float32)
    return Generation(np.asarray(ids, dtype=np.int32), values, versions, choice["finish_reason"])


def parse_scores(rows: Sequence[Mapping[str, Any] | None] | None, token_ids: Sequence[int]) -> np.ndarray:
    """Turn `prompt_logprobs` of `/inference/v1/generate` into float32 [L].
    Raises InferenceError: they are missing, of another length, or of other tokens."""
    if rows is None or len(rows) != len(token_ids):
        found = "none" if rows is None else f"{len(rows)}"
        raise InferenceError(f"prompt log-probabilities of {len(token_ids)} tokens were asked for, {found} came")
    scores = np.zeros(len(token_ids), dtype=np.float32)
    for i, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
        if i == 0:
            continue
        entry = (row or {}).get(str(token))
        if entry is None:
            raise InferenceError(f"the prompt log-probabilities say nothing of token {token} at position {i}")
        scores[i] = entry["logprob"]
    if not np.isfinite(scores).all():
        raise InferenceError("a prompt log-probability is not finite")
    return scores


def parse_top(rows: Sequence[Mapping[str, Any] | None], top_k: int, wanted: Sequence[bool] | np.ndarray) -> TopTokens:
    """Turn `prompt_logprobs` (L rows, of which `parse_scores` has made sure) into the `top_k` likeliest tokens of each
    place where `wanted`. A row may hold the prompt's own token beyond them."""
    ids = np.full((len(rows), top_k), np.iinfo(np.int32).max, np.int32)
    logprobs = np.zeros((len(rows), top_k), np.float32)
    for i in np.flatnonzero(wanted).tolist():
        row = rows[i] or {}
        values = np.fromiter((entry["logprob"] for entry in row.values()), np.float32, len(row))
        best = np.argsort(-values, kind="stable")[:top_k]
        ids[i, : len(best)] = np.fromiter(map(int, row), np.int32, len(row))[best]
        logprobs[i, : len(best)] = np.maximum(values[best], NO_LOGPROB)
    return TopTokens(ids, logprobs)


def unpack_top(
    packed: Mapping[str, str], token_ids: Sequence[int], top_k: int, wanted: Sequence[bool] | np.ndarray
) -> tuple[np.ndarray, TopTokens]:
    """Turn `prompt_logprobs` as a server of ours packs them into what `parse_scores` and `parse_top` return: base64 of
    int32 `token_ids` and of float32 `logprobs`, [L - 1, 1 + top_k] of all tokens but the first, its own one first.
    Raises InferenceError: they are of other tokens, or of another number."""
    length, known = len(token_ids), np.zeros(len(token_ids), bool)
    try:
        ids, logprobs = (
            np.frombuffer(base64.b64decode(packed[name]), kind).reshape(length - 1, 1 + top_k)
            for name, kind in (("token_ids", "<i4"), ("logprobs", "<f4"))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(f"packed log-probabilities of {length} tokens were asked for: {error}") from error
    if not np.array_equal(ids[:, 0], token_ids[1:]) or np.isnan(logprobs).any():
        raise InferenceError("packed log-probabilities are of other tokens, or not finite")
    known[1:] = np.asarray(wanted)[1:]
    found = TopTokens(np.full((length, top_k), np.iinfo(np.int32).max, np.int32), np.zeros((length, top_k), np.float32))
    found.ids[known] = ids[known[1:], 1:]
    found.logprobs[known] = np.maximum(logprobs[known[1:], 1:], NO_LOGPROB)
    return np.concatenate([[0], np.maximum(logprobs[:, 0], NO_LOGPROB)]).astype(np.float32), found


class InferenceClient(ServerClient):
    """One server. Safe to share between tasks of one event loop; end it with `close`."""

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout_s: float = 120.0, update_timeout_s: float = 1800.0
    ) -> None:
        """Make a client; opens no connection yet.

        Args:
            base_url: `http://host:port`, with or without a trailing `/v1`.
            api_key: sent as a Bearer token; None: that of this user's own servers on this machine (`client.keys`).
            timeout_s: deadline of one generation or small call.
            update_timeout_s: deadline of one weight update (reading the weights included).
        """
        super().__init__(base_url, api_key)
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def health(self) -> bool:
        """Return whether the server answers and its engines live. Never raises."""
        try:
            return (await self._http.request("GET", "/health", timeout_s=5.0)).status == 200
        except NoAnswerError:
            return False

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until `health` holds. Raises InferenceError: not ready after `deadline_s` seconds."""
        end = loop_time() + deadline_s
        while not await self.health():
            if loop_time() >= end:
                raise InferenceError(f"{self.base_url} was not ready after {deadline_s:g} s; see the server's log")
            await asyncio.sleep(READY_POLL_S)

    async def models(self) -> list[str]:
        """Names under which the server serves the policy."""
        return [row["id"] for row in (await self._call("GET", "/v1/models"))["data"]]

    async def model_lengths(self) -> dict[str, int | None]:
        """Longest sequence of every model that is served, by name; None where the server does not say."""
        return {row["id"]: row.get("max_model_len") for row in (await self._call("GET", "/v1/models"))["data"]}

    async def policy_version(self, name: str = POLICY) -> int:
        """Return the version that samples now under a model name (0: the base model). Raises as `served`."""
        return (await self.served(name))[0]

    async def served(self, name: str = POLICY) -> tuple[int, str]:
        """Return the version that samples now under a model name, and the folder that it was read from.
        Raises InferenceError: status 404: no adapter has this name, or it is no server of ours."""
        answer = await self._call("GET", "/policy_version" + _named(name))
        if not isinstance(answer.get("version"), int):
            raise InferenceError(f"{self.base_url}/policy_version names no version", 404)
        return int(answer["version"]), str(answer.get("path", ""))

    async def adapter_versions(self) -> dict[str, int]:
        """Model name -> version of every adapter that is served."""
        return (await self._call("GET", "/policy_version"))["adapters"]

    async def load(self) -> dict[str, float]:
        """Return the server's figures of the moment: see `figures.parse_figures`; without those it does not tell.
        Raises InferenceError: refused, failed, or no answer in 5 s."""
        return parse_figures((await self._ask("GET", "/metrics", timeout=5.0)).body.decode(errors="replace"))

    async def update_weights(self, path: Path | str, version: int, name: str = POLICY) -> dict[str, Any]:
        """Load version `version` from `path`, keeping requests in flight; the same again is a no-op.

        An adapter is served under the model name `name`, beside those of other names; its requests in flight end with
        the version that they began with.

        Returns the server's answer: `version`, `path`, `changed`, seconds of each phase.
        Raises InferenceError: refused (status 4xx: the engine goes on as it was) or failed."""
        body = {"path": str(path), "version": version} | ({} if name == POLICY else {"name": name})
        return await self._call("POST", "/update_weights", body, timeout=self._update_timeout_s)

    async def reload_weights(self, name: str = POLICY) -> dict[str, Any]:
        """Go back to the base model (version 0); an adapter of another name is unloaded."""
        return await self._call("POST", "/reload_weights" + _named(name), timeout=self._update_timeout_s)

    async def sleep(self) -> dict[str, Any]:
        """Have the engines give up their memory; answered when it is free. The next `update_weights` wakes them.
        Raises InferenceError: refused or failed."""
        return await self._call("POST", "/sleep", timeout=self._update_timeout_s)

    async def wake_up(self) -> dict[str, Any]:
        """Have the engines take their memory back and go on with the version that they had."""
        return await self._call("POST", "/wake_up", timeout=self._update_timeout_s)

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Let a model name stand for the base model (version 0) until an adapter is loaded under it."""
        return await self._call("POST", f"/serve_base?name={quote(name)}", timeout=self._update_timeout_s)

    async def generate(
        self, token_ids: Sequence[int] | np.ndarray, sampling: Mapping[str, Any], model: str = POLICY
    ) -> Generation:
        """Sample one completion of a token prompt.

        Args:
            token_ids: prompt, int [L].
            sampling: vLLM sampling parameters (`max_tokens`, `temperature`, ...).

        Raises:
            InferenceError: refused, failed, or no answer in time.
        """
        body = {
            "model": model,
            "token_ids": np.asarray(token_ids).tolist(),
            "sampling_params": {"logprobs": 0, **sampling},
        }
        return parse_choice((await self._call("POST", "/inference/v1/generate", body))["choices"][0])

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask `/inference/v1/generate` as the caller has it; returns the server's answer as it came.
        Raises InferenceError: refused, failed, or no answer in time."""
        return await self._call("POST", "/inference/v1/generate", body)

    async def score(self, token_ids: Sequence[int] | np.ndarray, model: str = POLICY) -> np.ndarray:
        """Log-probability of every token given those before it, at temperature 1; one token is sampled and ignored.

        Args:
            token_ids: int [L].

        Returns:
            float32 [L]; 0 for the first token, -9999 where the model gives a token probability 0.

        Raises:
            InferenceError: refused, failed, no answer in time, or one that is not about these tokens.
        """
        ids = np.asarray(token_ids).tolist()
        return parse_scores(await self._prompt_logprobs(ids, model, 0), ids)

    async def score_top(
        self, token_ids: Sequence[int] | np.ndarray, model: str, top_k: int, wanted: Sequence[bool] | np.ndarray
    ) -> tuple[np.ndarray, TopTokens]:
        """Ask for the same as `score` does, and the `top_k` likeliest tokens where `wanted`, bool [L]."""
        ids = np.asarray(token_ids).tolist()
        rows = await self._prompt_logprobs(ids, model, top_k)
        if isinstance(rows, dict):
            return unpack_top(rows, ids, top_k, wanted)
        scores = parse_scores(rows, ids)
        assert rows is not None
        return scores, await asyncio.to_thread(parse_top, rows, top_k, wanted)

    async def _prompt_logprobs(self, ids: list[int], model: str, top_k: int) -> Any:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        body = {"model": model, "token_ids": ids, "sampling_params": sampling}
        headers = dict([BARE_LOGPROBS]) if top_k else None
        return (await self._call("POST", "/inference/v1/generate", body, headers=headers)).get("prompt_logprobs")

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *how: Any, **more: Any
    ) -> dict[str, Any]:
        """Return the JSON object of an answer. `how`, `more`: as of `_ask`."""
        answer = await self._ask(method, path, body, *how, **more)
        try:
            said = answer.json()
        except ValueError:
            said = None
        if not isinstance(said, dict):
            shown = answer.body[:200].decode(errors="replace")
            raise InferenceError(f"{method} {self.base_url}{path}: {answer.status}, but no JSON object: {shown!r}")
        return said

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        what = f"{method} {self.base_url}{path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = await self._http.request(method, path, data, timeout_s=timeout or self._timeout_s, headers=headers)
        except NoAnswerError as error:
            raise InferenceError(f"{what}: {error}") from error
        if answer.status >= 400:
            raise InferenceError(f"{what}: {answer.status} {_reason(answer)}", answer.status)
        return answer


def _named(name: str) -> str:
    return "" if name == POLICY else f"?name={quote(name)}"


def _reason(answer: Answer) -> str:
    """Return the server's own words: `{"error": "..."}` or `{"error": {"message": "..."}}`, else the raw text."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return answer.body[:500].decode(errors="replace")
    return error["message"] if isinstance(error, dict) and "message" in error else str(error)
