"""`prime-hpc plan --rehearse`: start the rehearsal of the train step in a process of its own, and say what it found.

This side needs neither torch nor transformers; the process (`prime_hpc.trainer.rehearsal`) does, but no GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.memory_keys import advice
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.launch.estimate.model_facts import GIB
from prime_hpc.launch.estimate.trainer_memory import CONTEXT_GIB

DEADLINE_S = 3600.0
USABLE = 0.95
"""Share of a GPU's memory that is planned with: the allocator's blocks do not fit into each other without gaps."""


def rehearse(experiment: Experiment, gpu_gib: float | None) -> dict[str, Any]:
    """Peak memory of one trainer rank, from a run of the train step on fake tensors.

    Args:
        gpu_gib: memory of one GPU; None: not known.

    Returns:
        `peak_gib`, `by_kind_gib`, `context_gib`, `gpu_gib`, `fits` (None without `gpu_gib`), `advice`, and what the
        rehearsal says of itself.

    Raises:
        ConfigError: no torch here, or a model or layout that cannot work; says which key to change.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--rehearse runs the train step on fake tensors, which needs torch and transformers (no GPU): they are not "
            f"installed for {sys.executable}; run it where the trainer's packages are, or plan without --rehearse"
        )
    with tempfile.TemporaryDirectory(prefix="prime-hpc-rehearsal-") as folder:
        write_snapshot(experiment, Path(folder), ["plan", "--rehearse"])
        found = _run(Path(folder))
    on_gpu = found["device"] == "cuda"
    by_kind = {kind: size / GIB for kind, size in found.pop("by_kind").items()}
    peak, context = found.pop("peak") / GIB, CONTEXT_GIB if on_gpu else 0.0
    fits = None if gpu_gib is None or not on_gpu else peak + context <= USABLE * gpu_gib
    return {
        **found,
        "peak_gib": round(peak, 3),
        "by_kind_gib": {kind: round(size, 3) for kind, size in by_kind.items()},
        "context_gib": context,
        "gpu_gib": gpu_gib,
        "fits": fits,
        "advice": advice(experiment, by_kind) if fits is False else None,
    }


def _run(folder: Path) -> dict[str, Any]:
    """Return the process, to its end."""
    command = [sys.executable, "-m", "prime_hpc.trainer.rehearsal", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the rehearsal did not end within {DEADLINE_S:g} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word from it"]
        reason = "\n".join(lines) if done.returncode == 1 and len(lines) < 8 else "\n".join(lines[-12:])
        raise ConfigError(f"the rehearsal failed: {reason}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def rehearsal_text(experiment: Experiment, found: dict[str, Any]) -> str:
    """Return the result for people."""
    lora = ", LoRA" if experiment.model.lora else ""
    what = f"{experiment.kind.upper()}{lora}, micro-batches of {experiment.micro_batch_tokens} tokens"
    device = "GPUs, pretended" if found["device"] == "cuda" else "this machine's CPU, pretended"
    sync = "kept whole until a step's last micro-batch" if found["no_sync"] else "scattered with every micro-batch"
    size = f"{found['num_params'] / 1e9:.3g} B parameters"
    lines = [
        f"rehearsal    {experiment.model.name}, {size}, {found['world_size']} ranks "
        f"({experiment.trainer.parallel_dims.describe()}) on {device}",
        f"             {what}{'' if lora else f'; gradients {sync}'}; took {found['seconds']:.0f} s",
        f"  peak         {found['peak_gib']:.2f} GiB a rank, in {found['phase']}",
        *(f"    {kind:<13}{gib:.2f}" for kind, gib in found["by_kind_gib"].items()),
    ]
    if found["context_gib"]:
        lines.append(f"  context      {found['context_gib']:.1f} GiB more for CUDA and NCCL")
    if found["fits"] is not None:
        total = found["peak_gib"] + found["context_gib"]
        word = "fits" if found["fits"] else "DOES NOT FIT"
        lines.append(f"  {word}: {total:.1f} of {found['gpu_gib']:g} GiB, of which {USABLE:.0%} are planned with")
    elif found["device"] == "cuda":
        lines.append("  the GPU's memory is not known: --gpu-memory-gib, or gpu_memory_gib in the site profile")
    if found["advice"]:
        lines.append(f"  {found['advice']}")
    return "\n".join([*lines, *(f"  note: {note}" for note in found["notes"])]) + "\n"
