"""Real inference servers for the tests: tiny models with versions, a server process, reference log-probabilities."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.manifest import MANIFEST
from tests.support.forked import ForkedProcess
from tests.support.runs import free_port
from tests.support.tiny_tokenizer import make_tokenizer

VOCAB = 512
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
READY_S = 300
STOP_S = 90


def save_model(folder: Path, *, tied: bool, seed: int, **changes: Any) -> Path:
    """Save a random float32 Qwen3 with its tokenizer as a plain model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(Qwen3Config(**{**SIZE, **special, "tie_word_embeddings": tied, **changes})).save_pretrained(folder)
    return folder


def publish(source: Path, run_dir: Path, version: int) -> Path:
    """Make a weight version of a model folder, as the trainer would."""
    final = run_dir / "weights" / f"step_{version:06d}"
    with ArtifactWriter(final, kind="weights", step=version, version=version, writer="test") as writer:
        for file in source.iterdir():
            if file.name != MANIFEST:
                shutil.copy(file, writer.path / file.name)
    return final


def hf_logprobs_of_all(folder: Path, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of every token of the vocabulary where each completion token is: [len(completion), vocab]."""
    model = _hf_model(folder)
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1]


def hf_logprobs(folder: Path, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probability of each completion token given all tokens before it, float32 [len(completion)]."""
    return hf_logprobs_of_all(folder, prompt, completion)[torch.arange(len(completion)), completion]


@lru_cache(maxsize=4)
def _hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class ServerProcess:
    """`python -m prime_hpc.inference.main` in its own session, with its own temporary folder."""

    def __init__(
        self,
        run_dir: Path,
        model: Path,
        inference: Mapping[str, Any] | None = None,
        port: int | None = None,
        lora: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        seq_len: int = 512,
        transport: str = "files",
        bus: str | None = None,
        tree: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        stated: dict[str, Any] = {
            "kind": "rl",
            "name": run_dir.name,
            "seq_len": seq_len,
            "model": {"name": str(model), "dtype": dtype, **({} if lora is None else {"lora": dict(lora)})},
            "orchestrator": {"sampling": {"max_tokens": 256}},
            "inference": {"cpu_kv_cache_gib": 0.25, **(inference or {})},
            "weights": {"transport": transport},
        }
        for section, keys in (tree or {}).items():
            stated[section] = {**stated.get(section, {}), **keys}
        (run_dir / "run.yaml").write_text(yaml.safe_dump(stated))
        self.key: str | None = (inference or {}).get("api_key")
        """As the config states it; None: the server makes its own."""
        self.run_dir = run_dir
        self.log = run_dir / "server.log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # socket paths must stay short
        command = ["prime_hpc.inference.main", str(run_dir), "--port", str(self.port)]
        env = {**os.environ, "TMPDIR": str(self.temporary), **({} if bus is None else {BUS: bus})}
        with self.log.open("w") as log:
            self.process = ForkedProcess(command, env=env, stdout=log, stderr=log, new_session=True)

    def wait_ready(self) -> "ServerProcess":
        """Return when requests are answered; fails with the log's tail when the process ends or takes too long."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{tail}"
            assert time.monotonic() < deadline, f"not ready after {READY_S} s:\n{tail}"
            time.sleep(0.1)

    def members(self) -> list[psutil.Process]:
        """Live processes of the server's session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def terminate(self) -> int:
        """SIGTERM; the exit code. Raises subprocess.TimeoutExpired when it does not end in order."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """End whatever still lives and remove the temporary folder."""
        for process in self.members():
            process.kill()
        self.process.wait(200)
        shutil.rmtree(self.temporary, ignore_errors=True)
