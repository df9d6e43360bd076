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

from tests.support.scripted_server import AdminServer, Reply


def reply_of(prompt: str, rollout: int) -> str:
    """Text of a prompt's r-th rollout: letters of the prompt's last message, reversed and damaged differently."""
    text = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0][::-1]
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
        rollout = self._asked[prompt] % self._group_size
        self._asked[prompt] += 1
        self.requests.clear()
        self.headers.clear()
        return Reply(reply_of(prompt, rollout))


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
