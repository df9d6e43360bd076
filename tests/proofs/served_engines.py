"""vLLM engines on this CPU, one after the other, each in a fork of one process that has imported vLLM.

`python -m tests.proofs.served_engines` answers each line of its standard input, a JSON object, with one of its own.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.inference.vllm.args import NO_COMPILER, WORKER_EXTENSION, cpu_options
from prime_hpc.store.model.config import read_config

LIMIT_S = 300
PROMPT_LENGTHS = (5, 11, 17, 23, 30)
REPLY_TOKENS = 24
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    NO_COMPILER: "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class NotServedError(Exception):
    """The engine refuses to start; says why."""


class EngineFailedError(Exception):
    """An engine that has started failed after that, or one came to no end; says how."""


@dataclass(frozen=True)
class Reply:
    """One sampled reply."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Engines:
    """What starts them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def play(
        self, base: Path, versions: Sequence[Path], vocab_size: int, adapter: Path | None = None
    ) -> list[list[Reply]]:
        """Replies of the base model, or of an adapter of it, then of each version that is loaded into the running
        engine. Raises NotServedError, EngineFailedError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked: dict[str, Any] = {"base": str(base), "versions": [str(version) for version in versions]}
        asked |= {"vocab_size": vocab_size, "adapter": None if adapter is None else str(adapter)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"failed": "the process that starts engines is gone"}')
        if "refused" in answer:
            raise NotServedError(answer["refused"])
        if "failed" in answer:
            raise EngineFailedError(answer["failed"])
        return [[Reply(*reply) for reply in replies] for replies in answer["replies"]]


@contextmanager
def engines() -> Iterator[Engines]:
    """Start the process; it ends with the block."""
    command = [sys.executable, "-m", "tests.proofs.served_engines"]
    with (
        tempfile.TemporaryFile("w") as log,
        subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Engines(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def sample(llm: Any, vocab_size: int, seed: int, adapter: str | None = None) -> list[Any]:
    """One reply to each prompt."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab_size - 2, length).tolist() for length in PROMPT_LENGTHS]
    # not `min_tokens`, which takes a token out of the distribution
    wanted = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True, logprobs=0, seed=seed, detokenize=False)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    replies = llm.generate(asked, wanted, use_tqdm=False, lora_request=lora)
    found = []
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = list(reply.outputs[0].token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(reply.outputs[0].logprobs, ids, strict=True)]
        found.append((prompt, ids, logprobs))
    return found


def start(base: str, adapter: str | None) -> Any:
    """Start an engine."""
    from vllm import LLM

    options: dict[str, Any] = cpu_options(read_config(base) or {})
    options |= {} if adapter is None else {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    return LLM(
        base,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(PROMPT_LENGTHS) + REPLY_TOKENS + 1,
        max_num_seqs=len(PROMPT_LENGTHS),
        kv_cache_memory_bytes=128 << 20,
        worker_extension_cls=WORKER_EXTENSION,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
        **options,
    )


def serve(llm: Any, versions: list[str], vocab_size: int, adapter: str | None) -> list[Any]:
    """Sample from each version."""
    llm.collective_rpc("policy_start")
    found = [sample(llm, vocab_size, 0, adapter)]
    for number, version in enumerate(versions, 1):
        opened = llm.collective_rpc("policy_open", args=(version, "files"))
        assert "error" not in opened[0], opened
        llm.collective_rpc("policy_apply")
        assert llm.reset_prefix_cache()
        found.append(sample(llm, vocab_size, number))
    return found


def answer_one(asked: dict[str, Any], out: Path) -> None:
    """In a fork: write the answer."""
    what = "refused"
    try:
        llm = start(asked["base"], asked["adapter"])
        what = "failed"
        replies = serve(llm, asked["versions"], asked["vocab_size"], asked["adapter"])
        answer: dict[str, Any] = {"replies": replies}
    except Exception as error:  # noqa: BLE001 - models fail with errors of any class
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or f"{Path(place.filename).name}:{place.lineno}: {place.line}"
        text = f"{text[:120]} ... {text[-120:]}" if len(text) > 240 else text
        answer = {what: f"{type(error).__name__}: {text}"}
    out.write_text(json.dumps(answer))


def ended(status: int) -> dict[str, str]:
    """The answer of a fork that wrote none: kernels that a CPU lacks may end it at any time, but in time."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return {"failed": f"no answer within {LIMIT_S} s"}
    return {"failed": f"the engine's process ended ({code})"}


def main() -> None:
    """Answer until nobody asks any more."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once for all

    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            out = Path(folder) / "answer"
            out.unlink(missing_ok=True)
            child = os.fork()
            if not child:
                signal.alarm(LIMIT_S)
                answer_one(json.loads(line), out)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            channel.write((out.read_text() if out.exists() else json.dumps(ended(status))) + "\n")
            channel.flush()


if __name__ == "__main__":
    main()
