"""Engines and a trainer that take the time of slower devices, by sleeping. For `simulate.py`, which puts this folder on
the path of its processes.

On few cores engines and trainer take each other's time, and neighbours on the machine take both's: what one run costs
is then no cost of another. Here a step of the engine's batch lasts `a + b n` seconds for n rows, and a micro-batch's
loss so long a target token, whatever of it the cores need; everything is computed as ever.
"""

import os
import time

import torch

from prime_hpc.config.named_code import Bounds
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.inference.backend import Start
from prime_hpc.inference.transformers.backend import TransformersBackend
from prime_hpc.trainer.objectives.base import Targets, Terms, get_objective

TOKEN_S = float(os.environ.get("PRIME_HPC_BENCH_TOKEN_S", "0.05"))
SHARED_TOKEN_S = 0.0015
TARGET_S = float(os.environ.get("PRIME_HPC_BENCH_TARGET_S", "0.001"))


class StretchedBackend(TransformersBackend):
    """The batch over transformers' forward pass, each step of it as long as stated."""

    title = "transformers, stretched"

    def serve(self, start: Start) -> None:
        """Serve with a slower `step`."""
        from prime_hpc.inference.transformers.engine import Engine

        quick = Engine.step

        def step(engine: Engine) -> None:
            begin = time.monotonic()
            quick(engine)
            left = TOKEN_S + SHARED_TOKEN_S * engine.num_running - (time.monotonic() - begin)
            if left > 0:
                time.sleep(left)

        setattr(Engine, "step", step)  # noqa: B010 - a method in the place of another
        super().serve(start)


STRETCHED = StretchedBackend()


def slow_loss(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """AIPO's loss, later."""
    time.sleep(TARGET_S * len(targets.logprobs))
    terms: Terms = get_objective("aipo")(targets, config, bounds)
    assert isinstance(terms.loss, torch.Tensor)
    return terms
