"""transformers as an inference backend, for machines where vLLM cannot be installed.

One process, one device: the batch computes in a thread of its own (`engine`), this one answers HTTP (`app`). The Python
packages are those that every role needs; nothing is compiled. Its weights are there once more, in host memory, while a
version is loaded.
"""

import asyncio
import importlib.util
import os
from pathlib import Path

from prime_hpc.inference.backend import Start
from prime_hpc.inference.transformers import limits
from prime_hpc.runtime.device import describe_cpu, describe_gpus, require_gpus
from prime_hpc.slurm.gpu_split import ALLOCATOR_VARIABLES

NEEDED = ("torch", "transformers", "safetensors", "starlette", "uvicorn")


class TransformersBackend:
    """A continuous batch over transformers' forward pass."""

    title = "transformers"
    overhead_gib = 1.0
    """CUDA context and activations of a prefill."""
    refusals = staticmethod(limits.refusals)
    step_bytes = staticmethod(limits.step_bytes)

    def missing(self) -> str:
        """Name the packages that are not here."""
        lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacks)} not installed here: pip install 'prime-hpc[transformers]'" if lacks else ""

    def serve(self, start: Start) -> None:
        """Load the model and serve."""
        config = start.config
        if Path(start.experiment.model.name).is_dir():
            os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")  # asks no hub, waits for none
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if start.device.type == "cuda" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            # what a step takes grows by a token a step: fixed blocks would soon be too small, each of them
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        import torch

        if start.device.type == "cuda":
            count = require_gpus(start.device, process=f"{start.role} server {start.replica}")
            print(describe_gpus(start.device, count), flush=True)
        else:
            print(describe_cpu(start.device), flush=True)
            torch.set_num_threads(config.cpu_threads)
        from prime_hpc.inference.transformers.serve import serve

        asyncio.run(serve(start))


TRANSFORMERS = TransformersBackend()
