"""Lint of the trainer's attention kernel and of its dtype against the device."""

from collections.abc import Iterator

from prime_hpc.config import Experiment
from prime_hpc.launch.lint.lint_finding import TRAINING, Finding, Subject, rule
from prime_hpc.runtime.gpus import installed_version, torch_build

REMEDY = "model.attn = auto takes torch's own kernel, which is FlashAttention 2 as well"
FLASH_PACKAGES = ("flash-attn", "flash-attn-3")
"""Distributions that bring the kernels of `model.attn = flash`."""


@rule(*TRAINING)
def attention_kernel(subject: Subject) -> Iterator[Finding]:
    """`model.attn = flash` where it cannot run: the trainer would say so after it had waited in the queue."""
    experiment = subject.experiment
    if experiment.model.attn != "flash":
        return
    if subject.is_slurm and not subject.trains_on_gpus:
        yield Finding.error("PH114", "model.attn", "flash needs GPUs, and the trainer is to compute on cpu", REMEDY)
    elif problem := flash_problem(experiment, is_here=subject.site.container is None):
        yield Finding.error("PH114", "model.attn", problem, REMEDY)


def flash_problem(experiment: Experiment, *, is_here: bool) -> str:
    """Return why `model.attn = flash` cannot run; empty: it is not asked for, or nothing speaks against it.
    `is_here`: the trainer has this environment's packages."""
    if experiment.model.attn != "flash" or not experiment.trains:
        return ""
    if experiment.model.dtype == "float32":
        return "flash computes in bfloat16, and model.dtype is float32"
    if experiment.device == "cpu":
        return "flash needs GPUs, and device is cpu"
    if is_here and torch_build() is not None and not any(map(installed_version, FLASH_PACKAGES)):
        return "flash-attn is not installed in this environment"
    return ""


@rule(*TRAINING)
def float32_on_gpus(subject: Subject) -> Iterator[Finding]:
    """Right, but slow, and not what the engines compute."""
    if subject.experiment.model.dtype == "float32" and subject.trains_on_gpus:
        yield Finding.info(
            "PH115",
            "model.dtype",
            "float32 on GPUs has no flash attention and no tensor cores; vLLM's attention rounds it to TF32, so that "
            "its log-probabilities differ from the trainer's",
            "bfloat16, unless the run compares with one on the CPU",
        )
