"""A rank of the trainer (`prime_hpc.trainer.main`) on a node of its own; the second one's device and mount are slow."""

import os
import sys
import time
from typing import Any

import torch

from prime_hpc.runtime.role_context import NODE
from prime_hpc.trainer import main as trainer_main
from prime_hpc.trainer import rl, slow_ranks
from prime_hpc.trainer.checkpointing.dcp_state import ShardPlan
from prime_hpc.weight_transport.files import FilesSender

LATE_S = 0.5


def slow_down() -> None:
    """Delay what this rank reads and writes, and have it multiply 40 times where others do once."""
    for place, name in ((rl, "read_local_batch"), (ShardPlan, "write"), (FilesSender, "finalize")):
        setattr(place, name, late(getattr(place, name)))
    mm = torch.mm

    def slow_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return [mm(*args, **kwargs) for _ in range(40)][-1]

    torch.mm = slow_mm


def late(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE_S)
        return function(*args, **kwargs)

    return run


if __name__ == "__main__":
    slow_ranks.EVERY = 1
    os.environ[NODE] = f"node{os.environ['RANK']}"
    if os.environ["RANK"] == "1":
        slow_down()
    trainer_main._exit(trainer_main.main(sys.argv[1:]))
