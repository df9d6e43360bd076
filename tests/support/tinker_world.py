"""The tinker service as a process of its own, and the unchanged client of PyPI."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from prime_hpc.runtime import process_tree
from tests.support import forked
from tests.support.many_runs import log_of, make_parent, start_trainer
from tests.support.runs import free_port, wait_until


class TinkerWorld:
    """A service on a run directory; may be killed and started again."""

    def __init__(self, directory: Path, model: Path, **changes: Any) -> None:
        self.directory, self.model, self.port = directory, model, free_port()
        trainer = {
            "max_concurrent_runs": 2,
            "threads_per_rank": 1,
            "micro_batch_tokens": 128,
            "tinker": {"port": self.port} | changes.pop("tinker", {}),
        } | changes.pop("trainer", {})
        self.num_ranks = trainer.get("num_ranks", 1)
        make_parent(directory, model, trainer=trainer, **changes)
        self.process: forked.ForkedProcess | None = None
        self._clients: list[tinker.ServiceClient] = []

    def start(self) -> "TinkerWorld":
        self.process = start_trainer(self.directory, self.num_ranks)
        ready = f"ready at http://127.0.0.1:{self.port}"
        before = log_of(self.directory).count(ready)
        wait_until(lambda: log_of(self.directory).count(ready) > before or self.ended, 280, "the service is ready")
        assert not self.ended, log_of(self.directory)[-3000:]
        return self

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.directory / "tinker.key").read_text()

    def client(self, key: str | None = None, **more: Any) -> tinker.ServiceClient:
        client = tinker.ServiceClient(base_url=self.url, api_key=key or self.key, **more)
        self._clients.append(client)
        return client

    def kill(self) -> None:
        """SIGKILL; ranks of a torchrun end with it."""
        if self.process is not None:
            ranks = process_tree.family(self.process.pid)[1:]
            self.process.kill()
            self.process.wait(200)
            wait_until(lambda: not process_tree.alive(ranks), 200, "the ranks are gone")

    def close(self) -> None:
        """End the service, and its clients' threads, which would ask for it as long as this process lives."""
        for client in self._clients:
            with contextlib.suppress(RuntimeError, tinker.APIError):  # closed already, or never let in
                client.holder.close()
        self.kill()


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Tokens, each the target of the one before it; inputs are values a target."""
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    arrays["target_tokens"] = np.asarray(tokens[1:], np.int64)
    fields: Any = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields)
