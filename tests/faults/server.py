"""The fault harness's inference server: `python -m tests.faults.server TOKENIZER_DIR ADDRESS_FILE GROUP_SIZE [OPTION]`.

Speaks what prime-hpc's own server speaks (`tests.support.scripted_server`). The r-th rollout of a prompt is always the
same text, so whatever was killed in between, a prompt's rollouts can be told from another's; what a prompt shows is a
part of it. Options: `--long`, `--images` (it sees pictures of `IMAGE_SIZE`).
"""

import asyncio
import json
import random
import sys
import threading
import time
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.scripted_server import AdminServer, Reply

LONGEST_S = 5.0
EMBEDDINGS = 4
"""Of a picture of `IMAGE_SIZE`, see `tests.support.tiny_vision`."""
IMAGE_SIZE = 32


def reply_of(prompt: str, rollout: int) -> str:
    """Text of a prompt's r-th rollout: letters of the prompt's last message, reversed and damaged differently."""
    text = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0].rpartition("|>")[2][::-1]
    rng = random.Random(zlib.crc32(f"{text}:{rollout}".encode()))
    letters = list(text)
    for _ in range(rollout * max(1, len(letters) // 6)):
        letters[rng.randrange(len(letters))] = rng.choice("abcdef")
    return "".join(letters)


class CountingServer(AdminServer):
    """Answers the rollouts of each prompt in turn."""

    def __init__(self, tokenizer: Any, group_size: int) -> None:
        super().__init__(tokenizer, self._reply)
        self._group_size = group_size
        self._asked: Counter[str] = Counter()

    def _reply(self, prompt: str, number: int) -> Reply:
        parts = self.requests[-1].get("content_parts", ())
        seen = "".join(f" {zlib.crc32(part['url'].encode()):x}" for part in parts)
        rollout = self._asked[prompt + seen] % self._group_size
        self._asked[prompt + seen] += 1
        self.requests.clear()
        self.headers.clear()
        return Reply(reply_of(prompt, rollout) + seen)


class LongReplyServer(CountingServer):
    """One reply in four goes on until the second version after the one that it began with: each sampled a third of it.

    Its words are those that it has anyway. It waits no longer than `LONGEST_S`: nobody may be training any more.
    """

    async def _generate(self, request: web.Request) -> web.Response:
        began = self.version
        answer = await super()._generate(request)
        (choice,) = (found := json.loads(answer.text or ""))["choices"]
        ids = choice["token_ids"]
        if zlib.crc32(bytes(str(ids), "ascii")) % 4:
            return answer
        sampled_by, end = [began], time.monotonic() + LONGEST_S
        while len(sampled_by) < 3 and time.monotonic() < end:
            await asyncio.sleep(0.01)
            if self.version > sampled_by[-1]:
                sampled_by.append(self.version)
            elif self.version < sampled_by[-1]:  # another attempt's, which begins with older ones
                sampled_by = [self.version]
        bounds = [len(ids) * part // len(sampled_by) for part in range(len(sampled_by) + 1)]
        choice["weight_versions"] = [
            {"version": str(version), "start": start, "end": stop}
            for version, (start, stop) in zip(sampled_by, pairwise(bounds), strict=True)
        ]
        return web.json_response(found)


def main(tokenizer_dir: str, address_file: str, group_size: str, *options: str) -> None:
    """Answer until killed."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    kind = LongReplyServer if "--long" in options else CountingServer
    if "--images" in options:
        kind.tokens_of = staticmethod(lambda image: EMBEDDINGS)
    with kind(tokenizer, int(group_size)) as server:
        temporary = Path(f"{address_file}.tmp")
        temporary.write_text(server.url)
        temporary.replace(address_file)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
