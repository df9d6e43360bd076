"""Use of the run's GPUs, sampled on every node now and then: for `status`, for Prometheus, and as
`metrics/gpus.jsonl`.

In a job each node's agents sample (`sample_forever`) and say so over the bus; where the roles are processes of this
machine, the supervisor does. A row of the file is about all GPUs of the run together: a row a node would be most of the
metrics at hundreds of nodes.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import number_of
from prime_hpc.runtime.gpu_use import EVERY_S, gpu_use, has_program

FORGET_S = 3.5 * EVERY_S
"""A node that has not spoken for so long tells nothing of now."""
EVENT = "gpus"
Sample = list[dict[str, Any]]
"""`GpuUse` of each GPU of a node."""


def sample_forever(
    say: Callable[[Sample], None], over: threading.Event, named: Callable[[], Collection[Hashable] | None]
) -> None:
    """Sample this node's GPUs every `EVERY_S` until `over`; ends at once where no program tells of GPUs.
    `named`: the run's GPUs, as CUDA_VISIBLE_DEVICES takes them: by their numbers, else all that are seen are sampled (a
    machine, or a node without cgroups, shows others' too)."""
    if not has_program():
        return
    while not over.is_set():
        try:
            seen, ours = gpu_use(), named() or ()
            say([gpu.as_dict() for gpu in [gpu for gpu in seen if gpu.index in ours] or seen])
        except OSError as error:
            say([{"error": str(error)}])
        over.wait(EVERY_S)


class GpuWatch:
    """Keeps what was sampled last, from `start` to `close`."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._file, self._attempt = metrics_file(run_dir, "gpus"), attempt
        self._nodes: dict[str, tuple[float, Sample]] = {}
        self._over = threading.Event()
        self._has_complained = False

    def start(self, host: str | None, named: Callable[[], Collection[Hashable]] = frozenset) -> None:
        """Begin.

        Args:
            host: the roles are this machine's processes, whose GPUs are sampled here, under that name.
            named: see `sample_forever`; none until a role with GPUs has begun.
        """
        if host is not None and has_program():
            threading.Thread(target=self._sample_here, args=(host, named), name="gpus", daemon=True).start()
        threading.Thread(target=self._write_forever, name="gpu-rows", daemon=True).start()

    def _sample_here(self, host: str, named: Callable[[], Collection[Hashable]]) -> None:
        while not named():  # all that the machine shows would be said to be the run's
            if self._over.wait(1.0):
                return
        sample_forever(lambda sample: self.take(host, sample), self._over, named)

    def close(self) -> None:
        """Sample and write no more."""
        self._over.set()

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Take an agent's sample."""
        if message.get("event") == EVENT and isinstance(message.get("gpus"), list):
            self.take(str(message.get("host")), message["gpus"])

    def take(self, host: str, sample: Sample) -> None:
        """Take a sample of a node; of several agents the last one counts."""
        self._nodes[host] = time.monotonic(), [gpu for gpu in sample if isinstance(gpu, dict)]

    def samples(self) -> dict[str, Sample]:
        """Return the last sample of each node that has spoken lately."""
        least = time.monotonic() - FORGET_S
        return {host: sample for host, (when, sample) in list(self._nodes.items()) if when >= least}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return each node's GPUs put together, as `summary` does; `error` where its program did not answer."""
        return {host: summary(sample) for host, sample in self.samples().items() if sample}

    def _write_forever(self) -> None:
        while not self._over.wait(EVERY_S):
            row = summary([gpu for sample in self.samples().values() for gpu in sample])
            if not row.get("num_gpus"):
                continue
            line = json.dumps({"time": round(time.time(), 1), "attempt": self._attempt, **row}) + "\n"
            try:
                self._file.parent.mkdir(exist_ok=True)  # not the run directory, which may be gone
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                if not self._has_complained:
                    logger.warning(f"{self._file} could not be written: {error}")
                self._has_complained = True


def summary(sample: Sample) -> dict[str, Any]:
    """Put GPUs together.

    Returns:
        `num_gpus`, `utilization` (mean, 0 to 1), `least_utilization`, `memory_used` and `memory_total` (sums, bytes),
        `power_w` (sum); what none of them tells is left out. `error` where one is known.
    """
    errors = [str(gpu["error"]) for gpu in sample if "error" in gpu]
    gpus = [gpu for gpu in sample if "error" not in gpu]
    found: dict[str, Any] = {"num_gpus": len(gpus), **({"error": errors[0]} if errors else {})}
    busy = [number for gpu in gpus if (number := number_of(gpu.get("utilization"))) is not None]
    if busy:
        found |= {"utilization": round(sum(busy) / len(busy), 3), "least_utilization": min(busy)}
    for name in ("memory_used", "memory_total", "power_w"):
        numbers = [number for gpu in gpus if (number := number_of(gpu.get(name))) is not None]
        found |= {name: round(sum(numbers), 1)} if numbers else {}
    return found
