"""The inference server of the fault harness: `python -m tests.faults.server TOKENIZER_DIR ADDRESS_FILE GROUP_SIZE`.

Speaks what prime-hpc's own server speaks (`tests.support.scripted_server`). The r-th rollout of a prompt is always the
same text, so whatever was killed in between, a prompt's rollouts can be told from another's.
"""

import random
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.scripted_server import Reply, ScriptedServer


def reply_of(prompt: str, rollout: int) -> str:
    """Text of a prompt's r-th rollout: letters of the prompt's last message, reversed and damaged differently."""
    text = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0][::-1]
    rng = random.Random(zlib.crc32(f"{text}:{rollout}".encode()))
    letters = list(text)
    for _ in range(rollout * max(1, len(letters) // 6)):
        letters[rng.randrange(len(letters))] = rng.choice("abcdef")
    return "".join(letters)


class CountingServer(ScriptedServer):
    """Answers the rollouts of each prompt in turn, and can go back to the base model."""

    def __init__(self, tokenizer: Any, group_size: int) -> None:
        super().__init__(tokenizer, self._reply)
        self._group_size = group_size
        self._asked: Counter[str] = Counter()

    def _reply(self, prompt: str, number: int) -> Reply:
        rollout = self._asked[prompt] % self._group_size
        self._asked[prompt] += 1
        self.requests.clear()
        self.headers.clear()
        return Reply(reply_of(prompt, rollout))

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/policy_version", self._policy_version),
                web.post("/update_weights", self._update),
                web.post("/reload_weights", self._reload),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _update(self, request: web.Request) -> web.Response:
        """As an engine does: what is not there cannot be loaded."""
        body = await request.json()
        if not (Path(body["path"]) / "manifest.json").exists():
            return web.json_response({"error": f"{body['path']} holds no weights"}, status=400)
        self.version = body["version"]
        return web.json_response({"version": self.version, "path": body["path"], "changed": True})

    async def _reload(self, request: web.Request) -> web.Response:
        self.version = 0
        return web.json_response({"version": 0, "path": None, "changed": True})


def main(tokenizer_dir: str, address_file: str, group_size: str) -> None:
    """Answer until killed."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    with CountingServer(tokenizer, int(group_size)) as server:
        temporary = Path(f"{address_file}.tmp")
        temporary.write_text(server.url)
        temporary.replace(address_file)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
