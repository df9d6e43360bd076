"""A stand-in for an inference server: `/inference/v1/generate` and friends, answering from a script.

Deterministic, so that tests know every token. It answers what prime-hpc's own vLLM server answers, in vLLM 0.32's
format, version spans included. In a test:

    with ScriptedServer(tokenizer, reply) as server:      # reply(prompt_text, call_number) -> Reply or str
        ... server.url ...

As a process of its own (for benchmarks): `python -m tests.support.scripted_server TOKENIZER_DIR PORT`.
"""

import asyncio
import base64
import io
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from prime_hpc.store.batches import list_batches
from prime_hpc.store.run_paths import RunPaths
from tests.support.server_thread import ServerThread


@dataclass
class Reply:
    """One scripted answer."""

    text: str = ""
    finish_reason: str = "stop"
    """`stop` (the end token is added), `length` or `abort`."""
    status: int = 200
    delay_s: float = 0.0
    spans: list[tuple[str, int, int | None]] | None = None
    """Version spans (version, start, end), end None for the rest; default: all of the server's current version."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of the answer's choice."""
    answer: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of the answer itself."""


Script = Callable[[str, int], Reply | str]


def split_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that are not those which encoding it gives: the first longer one is spelled in single bytes."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(ids)):
        if len(token) > 1 and not token.startswith("<"):
            return [*ids[:index], *tokenizer.convert_tokens_to_ids(list(token)), *ids[index + 1 :]]
    return ids


def logprob_of(token_id: int, position: int) -> float:
    """The log-probability that the server reports: a fixed function, which tests can recompute."""
    return -((zlib.crc32(f"{token_id}:{position}".encode()) % 10_000) / 10_000 + 1e-4)


def score_of(token_id: int, position: int) -> float:
    """The log-probability of a prompt's token that the server reports: a fixed function, another than `logprob_of`."""
    return -((zlib.crc32(f"score {token_id}:{position}".encode()) % 10_000) / 5_000 + 1e-4)


def experts_of(number: int, count: int) -> np.ndarray:
    """The experts that request `number` reports of its first tokens, uint8 [count, 2 layers, 1]: a fixed function."""
    return ((np.arange(count)[:, None] + [100 * number, 100 * number + 50]) % 251).astype(np.uint8)[..., None]


def tokens_of(image: bytes) -> int:
    """Embeddings that the server makes of an encoded image: a fixed function of its bytes."""
    return 2 + zlib.crc32(image) % 5


def _npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


class ScriptedServer(ServerThread):
    """The server on a thread. `requests` holds what came in, `version` labels what goes out."""

    failure = "scripted failure"
    """What it says with another status than 200."""
    records_experts = False
    """Report `experts_of` every token but the last one."""
    tokens_of = staticmethod(tokens_of)
    """How many embeddings it makes of an encoded image."""

    def __init__(self, tokenizer: Any, script: Script, *, port: int = 0, max_model_len: int = 2048) -> None:
        self.tokenizer = tokenizer
        self.script = script
        super().__init__(port)
        self.max_model_len = max_model_len
        self.version = 0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_scored = 0
        self.score_failures = 0

    def routes(self) -> list[web.RouteDef]:
        """What is answered."""
        return [
            web.post("/inference/v1/generate", self._generate),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/policy_version", self._policy_version),
            web.post("/update_weights", self._update_weights),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if body["sampling_params"].get("prompt_logprobs") is not None:
            return self._prompt_scores(body["token_ids"], body["sampling_params"]["prompt_logprobs"])
        expanded, places = self._expand(body) if body.get("content_parts") else (body["token_ids"], None)
        reply = self.script(self.tokenizer.decode(body["token_ids"]), number)
        reply = Reply(reply) if isinstance(reply, str) else reply
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.status != 200:
            return web.json_response({"error": {"message": self.failure}}, status=reply.status)
        ids = split_tokens(self.tokenizer, reply.text)
        finish_reason = reply.finish_reason
        if finish_reason == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        limit = body["sampling_params"]["max_tokens"]
        if len(ids) > limit:
            ids, finish_reason = ids[:limit], "length"
        spans = reply.spans or [(str(self.version), 0, None)]
        choice = {
            "index": 0,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": {
                "content": [{"token_id": t, "logprob": logprob_of(t, i), "rank": 1} for i, t in enumerate(ids)]
            },
            "weight_versions": [{"version": v, "start": s, "end": len(ids) if e is None else e} for v, s, e in spans],
        }
        if self.records_experts:
            choice["routed_experts"] = _npy(experts_of(number, len(expanded) + len(ids) - 1))
        answer: dict[str, Any] = {"request_id": f"scripted-{number}", "choices": [choice | reply.overrides]}
        if places is not None:
            answer |= {"prompt_token_ids": expanded, "mm_placeholders": {"image": places}}
        return web.json_response(answer | reply.answer)

    def _expand(self, body: dict[str, Any]) -> tuple[list[int], list[dict[str, int]]]:
        """The prompt as vLLM expands it: of each image's one token as many as `tokens_of` its bytes."""
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        counts = [self.tokens_of(base64.b64decode(part["url"].partition(",")[2])) for part in body["content_parts"]]
        ids: list[int] = []
        places: list[dict[str, int]] = []
        for token in body["token_ids"]:
            count = counts.pop(0) if token == pad else 1
            if token == pad:
                places.append({"offset": len(ids), "length": count})
            ids += [token] * count
        assert not counts and body["return_token_ids"]
        return ids, places

    def _prompt_scores(self, ids: list[int], num_top: int) -> web.Response:
        """What a prefill says of its own tokens: each depends on those before it through their number alone; beside
        each the likeliest, the vocabulary's first ones."""
        self.num_scored += 1
        if self.score_failures > 0:
            self.score_failures -= 1
            return web.json_response({"error": {"message": "scripted failure"}}, status=503)
        top = {str(t): {"logprob": -0.7 * (t + 1), "rank": t + 1} for t in range(num_top)}
        rows = [None, *({str(t): {"logprob": score_of(t, i), "rank": 1}} | top for i, t in enumerate(ids) if i)]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [ids[-1]], "logprobs": None}
        return web.json_response({"request_id": "scored", "choices": [choice], "prompt_logprobs": rows})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _policy_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        changed, self.version = self.version != body["version"], body["version"]
        return web.json_response({"version": self.version, "path": body["path"], "changed": changed})


class AdminServer(ScriptedServer):
    """A scripted server whose weights can be reloaded, and which remembers every change of version."""

    def __init__(self, *args: Any, update_delay_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.update_delay_s = update_delay_s
        self.updates: list[tuple[int, str]] = []

    def routes(self) -> list[web.RouteDef]:
        """Of a server, and the way back to the base model."""
        return [*super().routes(), web.post("/reload_weights", self._reload)]

    async def _update_weights(self, request: web.Request) -> web.Response:
        """As an engine does: what is not there cannot be loaded."""
        body = await request.json()
        manifest = Path(body["path"]) / "manifest.json"
        if not manifest.exists():
            return web.json_response({"error": f"{manifest} does not exist"}, status=400)
        time.sleep(self.update_delay_s)  # in-flight requests stand still, as on a real engine
        self.version = body["version"]
        self.updates.append((self.version, body["path"]))
        return web.json_response({"version": self.version, "path": body["path"], "changed": True})

    async def _reload(self, request: web.Request) -> web.Response:
        self.version = 0
        self.updates.append((0, "base"))
        return web.json_response({"version": 0, "path": None, "changed": True})


class SleepingServer(AdminServer):
    """A scripted server that sleeps as an engine does: requests wait until a version wakes it. Writes down the order.

    It stands in for a GPU's: vLLM gives no memory back on a CPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[str, int, int]] = []
        """(what, version served, batches on disk)."""
        self.paths: RunPaths | None = None
        self.awake = asyncio.Event()
        self.awake.set()

    def routes(self) -> list[web.RouteDef]:
        """Of a server, and sleep."""
        return [*super().routes(), web.post("/sleep", self._sleep)]

    def _note(self, what: str) -> None:
        self.events.append((what, self.version, len(list_batches(self.paths)) if self.paths is not None else 0))

    async def _sleep(self, request: web.Request) -> web.Response:
        self._note("sleep")
        self.awake.clear()
        return web.json_response({"version": self.version, "asleep": True})

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.awake.is_set():
            self._note("waits")
        await self.awake.wait()
        return await super()._generate(request)

    async def _update_weights(self, request: web.Request) -> web.Response:
        response = await super()._update_weights(request)
        self._note("update")
        self.awake.set()
        return response


def reverse_last_user(prompt: str, number: int) -> str:
    """The answer to reverse-text: the last user message, reversed."""
    return prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0][::-1]


def main(tokenizer_dir: str, port: str) -> None:
    """Answer reverse-text until killed."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    with ScriptedServer(tokenizer, reverse_last_user, port=int(port)) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
