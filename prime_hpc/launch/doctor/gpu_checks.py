"""The doctor's look at GPUs: builds of torch and vLLM against the driver, what torch sees, health of each GPU.

Torch is asked in a process of its own: importing it takes seconds and memory.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.site import load_site
from prime_hpc.launch.doctor.finding import Finding
from prime_hpc.runtime.gpus import (
    Runner,
    build_problem,
    driver_problem,
    driver_version,
    run_command,
    torch_build,
    visible_gpus,
)
from prime_hpc.supervisor.preflight.gpu import gpu_facts

TORCH_TIMEOUT_S = 180.0
"""A cold import over a shared file system may take minutes."""
_ASK_TORCH = "import torch; print('count', torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def check_builds(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check builds of torch and vLLM against the driver that is here, or against the GPUs of the cluster."""
    build, driver = torch_build(), driver_version()
    device = f"NVIDIA driver {driver}" if driver else "no NVIDIA driver"
    if build is None:
        yield Finding("torch", "warn", f"not installed; {device}", "bash tools/setup (a login node does without it)")
        return
    version, made_for = build
    problem = build_problem()
    if problem is not None and driver:
        yield Finding("torch", "fail", f"{problem}; there is an {device}", "bash tools/setup gpu, or device: cpu")
    elif problem is not None and (partition := _gpu_partition(environ)) is not None:
        text = f"{version} is a CPU build, but the nodes of {partition} have GPUs: their jobs would be refused"
        yield Finding("torch", "warn", text, "bash tools/setup gpu, on this login node too")
    elif driver and made_for and made_for.startswith("cuda ") and (old := driver_problem(made_for[5:], driver)):
        yield Finding("torch", "fail", old, "ask the site's staff for the driver, or for its cuda-compat module")
    else:
        yield Finding("torch", "ok", f"{version} ({made_for or 'CPU build'}); {device}")


def _gpu_partition(environ: Mapping[str, str]) -> str | None:
    """Return a partition with GPUs of the site whose profile is in force; None where none is known."""
    try:
        site = load_site(None, environ)
    except ConfigError:
        return None  # another finding says so
    if site.device == "cpu":
        return None
    return next((name for name, part in site.partitions.items() if part.gpus_per_node), None)


def check_gpus(environ: Mapping[str, str], run: Runner = run_command) -> Iterator[Finding]:
    """Health of the GPUs of this machine, and whether torch sees them all."""
    facts = gpu_facts(None, environ, run)
    names = sorted({row["name"] for row in facts.listed})
    for text in facts.problems:
        yield Finding("GPUs", "fail", text, "tell the site's staff; exclude the node until then")
    for text in facts.warnings:
        yield Finding("GPUs", "warn", text, "see `nvidia-smi` and `dmesg`")
    build = torch_build()
    if facts.count and build is not None and build[1] is not None:
        yield from _seen_by_torch(len(visible_gpus(environ, run)), run)
    elif not facts.problems and not facts.warnings:
        yield Finding("GPUs", "ok", f"{facts.count} ({', '.join(names)})" if names else f"{facts.count}")


def _seen_by_torch(wanted: int, run: Runner) -> Iterator[Finding]:
    try:
        code, text = run([sys.executable, "-W", "ignore", "-c", _ASK_TORCH], TORCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("GPUs", "fail", f"torch could not be asked for them: {error}", "import torch by hand")
        return
    match = re.search(r"^count (\d+)$", text, re.MULTILINE)
    if code != 0 or match is None:
        words = " ".join(text.split())[-300:]
        yield Finding("GPUs", "fail", f"torch could not be asked for them: {words}", "import torch by hand")
    elif int(match[1]) != wanted:
        remedy = "a run on GPUs would be refused here: compare `nvidia-smi -L`, CUDA_VISIBLE_DEVICES, the driver"
        yield Finding("GPUs", "fail", f"torch sees {match[1]} of the {wanted} that are visible", remedy)
    else:
        yield Finding("GPUs", "ok", f"torch sees all {wanted}")
