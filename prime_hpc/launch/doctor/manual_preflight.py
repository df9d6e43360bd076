"""Preflight by hand: of the allocation that this shell is in, or of this machine alone; and a run's newest report."""

import importlib.util
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.secret import revealed
from prime_hpc.store.io.files import list_dir
from prime_hpc.store.run_dirs import read_json

if TYPE_CHECKING:
    from prime_hpc.config.sections.slurm import PreflightConfig
    from prime_hpc.slurm.allocation import Allocation
    from prime_hpc.supervisor.preflight.launcher import RunStep
    from prime_hpc.supervisor.preflight.plan import PreflightPlan, Report
    from prime_hpc.supervisor.roles.slurm_step import StepContext


def check_here(folder: Path, config: "PreflightConfig", environ: Mapping[str, str] = os.environ) -> "Report":
    """Check the nodes of this allocation, or, outside one, this machine as one node.

    Args:
        folder: a directory that the nodes should share; a sub-directory is made there and removed at the end.
        config: limits. An all-reduce left to choice is made across the largest component if torch is installed.

    Raises:
        ConfigError: the folder does not exist or cannot be written.
    """
    from prime_hpc.slurm.allocation import read_allocation
    from prime_hpc.supervisor.preflight.run import run_preflight

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; --dir names one that all nodes share")
    log_dir = folder.resolve() / f".prime-hpc-preflight-{uuid.uuid4().hex[:8]}"
    allocation = read_allocation(environ)
    plan = _plan(allocation, log_dir, config, environ)
    try:
        log_dir.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another with --dir") from error
    try:
        if allocation is None:
            return run_preflight(plan, _local_step)
        return run_preflight(plan, _srun_step(allocation, folder.resolve(), environ))
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _plan(
    allocation: "Allocation | None", log_dir: Path, config: "PreflightConfig", environ: Mapping[str, str]
) -> "PreflightPlan":
    from prime_hpc.config.site import load_site
    from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan

    if allocation is None:
        gpus = 0 if environ.get("CUDA_VISIBLE_DEVICES") is None else None
        checks = [HostCheck(socket.gethostname(), gpus_asked=gpus)]
        return PreflightPlan(log_dir.parent, 0, checks, config, [], log_dir)
    on_gpus = False if load_site(None, environ).device == "cpu" else None
    checks = [HostCheck(host, index, None, on_gpus) for index, hosts in enumerate(allocation.hosts) for host in hosts]
    largest = max(allocation.hosts, key=len)
    able = config.allreduce is not None or importlib.util.find_spec("torch") is not None
    return PreflightPlan(log_dir.parent, 0, checks, config, list(largest) if able else [], log_dir)


def _local_step(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _context(
    allocation: "Allocation", folder: Path, environ: Mapping[str, str]
) -> "tuple[StepContext, dict[str, str]]":
    """How steps are started here, and in which environment."""
    from prime_hpc.config.site import load_site
    from prime_hpc.supervisor.roles.slurm_step import StepContext
    from prime_hpc.supervisor.roles.srun_environment import for_srun

    site = load_site(None, environ)
    return StepContext(allocation, folder, True, tuple(site.srun_args)), for_srun(environ) | revealed(site.env)


def _srun_step(allocation: "Allocation", folder: Path, environ: Mapping[str, str]) -> "RunStep":
    from prime_hpc.supervisor.preflight.launcher import module_arguments

    context, clean = _context(allocation, folder, environ)

    def run_step(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
        command = context.srun(hosts, component, 1, "preflight", module_arguments(argv))
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean
        )

    return run_step


def step_on(
    allocation: "Allocation", host: str, folder: Path, arguments: list[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Command that runs `python -m ARGUMENTS` on one node with our standard input, and its environment."""
    context, clean = _context(allocation, folder, environ)
    component = next(index for index, hosts in enumerate(allocation.hosts) if host in hosts)
    command = context.srun([host], component, 1, "doctor", arguments)
    return [word for word in command if word != "--input=none"], clean


def newest_report(run_dir: Path) -> dict[str, Any]:
    """Return the newest preflight report of a run, as plain data.
    Raises ConfigError: there is none (preflight was off, or no attempt came so far), or it cannot be looked for."""
    logs = run_dir / "logs"
    try:
        folders = [logs / name / "preflight" for name in list_dir(logs)]
        paths = [folder / "report.json" for folder in folders if "report.json" in list_dir(folder)]
    except OSError as error:
        raise ConfigError(f"the preflight reports of {run_dir} cannot be read: {error}") from error
    read = map(read_json, paths)  # None: being written, or torn by a full disk
    found = [data for data in read if data is not None and "verdicts" in data]
    if not found:
        raise ConfigError(
            f"{run_dir} holds no preflight report: jobs of Slurm alone have one, once an attempt came that far, "
            "unless slurm.preflight.enabled is off"
        )
    return max(found, key=lambda data: data.get("time", 0.0))
