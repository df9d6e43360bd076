"""To look into a rank: a trace of chosen steps, NCCL's last collectives where one hangs, memory where it runs out.

trainer.profile   -> <run>/profile/attempt_<k>/steps_3-4_rank_0.json.gz   (Perfetto, chrome://tracing)
a hung collective -> <logs of the attempt>/trainer/nccl_trace_rank_<r>    (torch's fr_trace reads all ranks' files)
out of memory     -> <logs of the attempt>/trainer/memory_rank_<r>.pickle (pytorch.org/memory_viz)
"""

import json
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from prime_hpc.config.sections.trainer import ProfileConfig

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""So many collectives are remembered, and written by every rank when one runs into its deadline."""
DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Path that a dump begins with; torch appends the rank."""


class StepProfiler:
    """torch's profiler over steps `first_step` to `last_step`: of all that a rank does in them, publishing included."""

    def __init__(self, config: ProfileConfig | None, folder: Path, rank: int, *, apart: bool = False) -> None:
        """Args:
        config: None: nothing is traced.
        folder: where traces go; made when there is one.
        apart: a trace for each step: between two of them other runs of this process have their turns, and a second
            profiler beside this one ends the process.
        """
        self._apart = apart
        self._config = config if config is not None and rank in config.ranks else None
        self._folder, self._rank = folder, rank
        self._profiler: Any = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Before `step`: start, if it is one of those."""
        config = self._config
        if config is None or self._profiler is not None or not config.first_step <= step <= config.last_step:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._first = step
        self._profiler = torch.profiler.profile(
            activities=activities, with_stack=config.stacks, profile_memory=config.memory, record_shapes=config.stacks
        )
        self._profiler.start()

    def end(self, step: int) -> None:
        """After `step`: write the trace, if it was the last of those, or has one of its own."""
        if self._profiler is not None and self._config is not None and (self._apart or step >= self._config.last_step):
            self._write(step)

    def close(self, step: int | None = None) -> None:
        """Write what there is when the loop ends."""
        if self._profiler is not None:
            self._write(step)

    def _write(self, step: int | None) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        steps = f"steps_{self._first}-{step}" if step is not None else f"from_step_{self._first}"
        path = self._folder / f"{steps}_rank_{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # somebody who looks on must not end the run
            logger.warning(f"the profile could not be written: {error}")
            return
        logger.info(f"profile of {steps.replace('_', ' ')}: {path}")


def record_collectives(log_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL's flight recorder write into the run when a collective hangs. Before the process group starts.

    Args:
        log_dir: of the role in this attempt; exists.
        environ: of this process. What it states stays.
    """
    for name, value in {**FLIGHT_RECORDER, DUMP_FILE: str(log_dir / "nccl_trace_rank_")}.items():
        environ.setdefault(name, value)


def snapshot_when_out_of_memory(log_dir: Path, rank: int, *, with_stacks: bool = False) -> Callable[..., None]:
    """Write what holds the GPU's memory at the moment at which it runs out, before anything is freed. On CUDA only.

    Args:
        log_dir: of the role in this attempt; exists.
        with_stacks: remember also which code has allocated each block; costs some time at every allocation.

    Returns:
        torch's observer, which calls it with (device, bytes asked for, bytes allocated, bytes free).
    """
    path = log_dir / f"memory_rank_{rank}.pickle"

    def observe(device: int, asked: int, allocated: int, free: int) -> None:
        if path.exists():  # the first time says why
            return
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning(f"the memory's snapshot could not be written: {error}")
        else:
            logger.error(f"GPU {device} is out of memory: {asked:,} bytes were asked for; what holds it: {path}")

    if torch.cuda.is_available():
        if with_stacks:
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]  # of CUDA builds
    return observe


def last_collectives(most: int = 4) -> list[dict[str, Any]]:
    """Return the collectives that this rank began last, newest first, from torch's flight recorder (NCCL and gloo).
    Returns `group`, `number` in it, `name`, `sizes`, `is_over`; [] where this torch has no recorder."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json" if torch.cuda.is_available() else "", None)
    dump = dump or getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(True, False)).get("entries", [])
    return [
        {
            "group": "/".join(filter(None, entry.get("process_group", []))),
            "number": entry.get("collective_seq_id"),
            "name": entry.get("profiling_name"),
            "sizes": entry.get("input_sizes"),
            "is_over": bool(entry.get("retired")),
        }
        for entry in reversed(entries[-most:])
    ]
