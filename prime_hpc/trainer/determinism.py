"""`trainer.deterministic`: the same sums in the same order, so that a repeated step gives the same bits on a GPU.

On a CPU a step repeats to the last bit without it. On CUDA several kernels add with atomics, in whatever order their
blocks come to run: the backward passes of attention, embedding, gathering and scattering. The switch makes exact, on
the same GPUs, drivers, versions and number of ranks: a resumed run against an uninterrupted one, `prime-hpc replay`
against the run, two runs of one seed on the same batches. What an engine samples is not the trainer's:
`inference.batch_invariant` is the switch for that.

It costs speed: attention's backward pass without atomics, sorted instead of atomic sums over embedding rows, rings
alone for NCCL, no autotuning in `torch.compile`; and 24 MiB of cuBLAS workspace. An operation that has no
deterministic kernel ends the step with torch's error, which names it.
"""

import os
from collections.abc import MutableMapping

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS repeats itself; torch refuses to multiply with any other while the switch is on."""
NCCL_VARIABLES = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One algorithm and protocol for every collective and size: a ring adds in the order of its ranks. Trees, NVLink SHARP
and the choice between them depend on what NCCL measures at its start."""


def make_deterministic(environ: MutableMapping[str, str] = os.environ) -> None:
    """Switch it on for this process. Before CUDA and NCCL start: both read their variables once.
    `environ`: of this process. What it states for NCCL stays.
    Raises ValueError: CUBLAS_WORKSPACE_CONFIG is set to something else."""
    if environ.setdefault(CUBLAS, CUBLAS_VALUES[0]) not in CUBLAS_VALUES:
        raise ValueError(
            f"trainer.deterministic: with {CUBLAS} = {environ[CUBLAS]} in the environment, cuBLAS repeats nothing; "
            f"unset it, or use {' or '.join(CUBLAS_VALUES)}"
        )
    for name, value in NCCL_VARIABLES.items():
        environ.setdefault(name, value)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)  # inductor's deterministic mode with it: no autotuning
    # it fills what torch.empty returns, for programs that read it before they write: ours do not, and it costs a pass
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
