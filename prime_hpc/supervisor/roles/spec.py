"""Processes of a run on one node: commands, devices, threads, deadlines.

A pure function of the experiment and the node's facts; the supervisor starts what it returns.
"""

import os
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.engine_groups import ENGINE_ROLES, SECTIONS, EngineRole, engine_roles, ready_timeout_s, servers_of
from prime_hpc.inference.environment import told_to_servers
from prime_hpc.runtime.gpus import driver_version, visible_gpus
from prime_hpc.slurm.gpu_split import assign_gpus, at_positions, gpu_environment
from prime_hpc.store.messaging.network import ENGINES_PORT, GLOO, on_loopback
from prime_hpc.store.messaging.sockets import http_url, reached_at

Urls = dict[str, list[str]]
"""Group of engines -> the URLs of its servers, in order, as far as they are known."""


ORCHESTRATING_MODULES = {
    "orchestrator": "prime_hpc.orchestrator.main",
    "eval": "prime_hpc.evals.main",
    "synthesize": "prime_hpc.evals.synthesis.main",
}
"""Role that plays the episodes -> what is started."""


@dataclass(frozen=True)
class RoleSpec:
    """One process that the supervisor starts and watches."""

    name: str
    """`inference`, `teacher`, `judge`, `orchestrator`, `eval`, `synthesize` or `trainer`."""
    command: list[str]
    start_timeout_s: float
    """Deadline of its readiness."""
    index: int = 0
    """Of a group of engines: the server."""
    num_processes: int = 1
    """Processes that report their own status (the trainer's ranks)."""
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    """How often it may be started again in place; 0: its death ends the attempt."""
    health_url: str | None = None
    """Answers 200 while the server is well."""
    after: tuple[str, ...] = ()
    """Labels of the servers that must be ready before it starts: they share a GPU."""
    hosts: tuple[str, ...] = ()
    """Nodes of the job, in rank order; none: a process of this machine."""
    backend: str = "vllm"
    """Of a server: see `named_code.BACKENDS`."""
    num_engines: int = 1
    """Of a server: data-parallel engines behind it."""
    is_elastic: bool = False
    """True of a server that comes and goes, as a job of its own (`slurm.elastic`)."""

    @property
    def label(self) -> str:
        """Name for people: `trainer`, `inference[1]`."""
        return f"{self.name}[{self.index}]" if self.is_server else self.name

    @property
    def is_server(self) -> bool:
        """True if it is asked for its health instead of for heartbeats."""
        return self.name in ENGINE_ROLES

    @property
    def held_gpus(self) -> frozenset[Hashable]:
        """GPUs that it uses, by names that are equal where two roles share one."""
        return frozenset(gpu for gpu in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu)

    @property
    def device_words(self) -> str:
        """Name the device on which it computes, for people."""
        gpus = self.environment.get("CUDA_VISIBLE_DEVICES")
        return f"GPU {gpus}" if gpus else "cpu"


def held_by_roles(specs: Iterable[RoleSpec]) -> dict[str, float]:
    """Count the GPUs that roles use, for `Attempt.allocated`; nothing on CPUs."""
    gpus = {gpu for spec in specs for gpu in spec.held_gpus}
    return {"gpus": len(gpus)} if gpus else {}


def usable_gpus(experiment: Experiment, environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs of this machine that the roles compute on; [] is the CPU, as `device` says or for want of any.
    Raises ConfigError: GPUs are stated (`device`, `*_gpu_ids`) and there are none."""
    if experiment.device == "cpu":
        return []
    gpus = visible_gpus(environ)
    named = [key for key in (f"{name}_gpu_ids" for name in ("trainer", *ENGINE_ROLES)) if getattr(experiment, key)]
    if gpus or (experiment.device == "auto" and not named):
        return gpus
    hidden = "CUDA_VISIBLE_DEVICES" in environ
    driver = driver_version()
    raise ConfigError(
        "GPUs are wanted, but none is to be seen here ("
        + (f"CUDA_VISIBLE_DEVICES = {environ['CUDA_VISIBLE_DEVICES']!r}" if hidden else "nvidia-smi, /dev/nvidia*")
        + f"; {f'NVIDIA driver {driver}' if driver else 'no NVIDIA driver'}); device: cpu computes without",
        named[0] if named else "device",
    )


def split_gpus(experiment: Experiment, gpus: list[str]) -> tuple[dict[EngineRole, list[list[str]]], list[str]]:
    """GPUs of each server of each group of engines, and of the trainer.

    Positions that a key names (`inference_gpu_ids`, ...) win and may overlap (one GPU shared by several roles).

    `gpus`: the visible ones, as CUDA_VISIBLE_DEVICES takes them; [] is the CPU.
    Raises ConfigError: the node has fewer GPUs than the roles need, or none at a position that a key names."""
    roles = engine_roles(experiment)
    sizes = {role: _server_gpus(experiment, role) for role in roles}
    counts = {role: servers_of(experiment, role).num_replicas for role in roles}
    if not gpus:
        return {role: [[] for _ in range(counts[role])] for role in roles}, []
    on_cpu = not experiment.trains or experiment.trainer.backend == "gloo"
    training = 0 if on_cpu else experiment.trainer.num_ranks
    need = {role: counts[role] * sizes[role] for role in roles} | {"trainer": training}
    shares = assign_gpus(gpus, need, {role: _named(experiment, role, gpus) for role in need})
    for role, have in shares.items():
        if len(have) < need[role]:
            sections = [f"{SECTIONS[name]}.data_parallel_size" for name in roles]
            raise ConfigError(
                f"{role} needs {need[role]} GPUs, but gets {len(have)} of the {len(gpus)} visible ({', '.join(gpus)}): "
                f"lower {' or '.join(['trainer.num_ranks', *sections])}, or share GPUs with "
                f"{' and '.join(f'{name}_gpu_ids' for name in need)}"
            )
    cut = {r: [shares[r][i * sizes[r] : (i + 1) * sizes[r]] for i in range(counts[r])] for r in roles}
    return cut, shares["trainer"][: need["trainer"]]


def _server_gpus(experiment: Experiment, role: EngineRole) -> int:
    servers = servers_of(experiment, role)
    return (servers.data_parallel_size_local or servers.data_parallel_size) * servers.gpus_per_engine


def _named(experiment: Experiment, role: str, gpus: list[str]) -> list[str] | None:
    """GPUs whose positions among the visible ones a role's key names."""
    positions = getattr(experiment, f"{role}_gpu_ids")
    return None if positions is None else at_positions(positions, gpus, f"{role}_gpu_ids")


def role_gpus(experiment: Experiment, role: str, gpus: list[str]) -> list[str]:
    """GPUs of one role that is started by hand: those that its key names, else visible ones that the other side's key
    does not name.

    Args:
        experiment: `trainer_gpu_ids` and those of groups of engines are obeyed.
        role: `trainer`, `inference` (one server) or `orchestrator` (none).
        gpus: the visible ones; none on a machine without.

    Raises:
        ConfigError: the key names too few, or too few are left.
    """
    if not gpus or role == "orchestrator" or (role == "trainer" and experiment.trainer.backend == "gloo"):
        return []
    own = _named(experiment, role, gpus)
    # the other side may be on another machine: of its positions those count that are here
    others = {
        gpus[i]
        for name in ("trainer", *ENGINE_ROLES)
        if name != role
        for i in getattr(experiment, f"{name}_gpu_ids") or ()
        if i < len(gpus)
    }
    need = _server_gpus(experiment, "inference") if role == "inference" else experiment.trainer.num_ranks
    found = [gpu for gpu in gpus if gpu not in others] if own is None else own
    if len(found) >= need:
        return found[:need]
    count = "trainer.num_ranks" if role == "trainer" else "inference.data_parallel_size"
    if own is not None:
        raise ConfigError(f"{role}_gpu_ids names {len(own)} GPUs, but {role} needs {need}: name more, or lower {count}")
    raise ConfigError(
        f"{role} needs {need} GPUs, but {len(found)} of the {len(gpus)} visible ({', '.join(gpus)}) are left: lower "
        f"{count}, or name them with {role}_gpu_ids"
    )


def trainer_spec(
    experiment: Experiment, run_dir: Path, gpus: list[str], meets: Sequence[str] = (), words: Sequence[str] = ()
) -> RoleSpec:
    """torchrun with one process a rank, which meet over a file: nothing listens.

    Args:
        experiment: its `num_ranks` are those of this node.
        meets: torchrun's options of several nodes, where the ranks meet over the network.
        words: the config's command line, for ranks that find none in the run directory.
    """
    trainer = experiment.trainer
    threads = trainer.threads_per_rank or max(1, (os.cpu_count() or 1) // trainer.num_ranks)
    command = [
        *(sys.executable, "-P", "-m", "prime_hpc.trainer.torchrun"),
        *(*meets, "--nproc-per-node", str(trainer.num_ranks), "--max-restarts", "0"),
        *("-m", "prime_hpc.trainer.main", *(words or [str(run_dir)])),
    ]
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not gpus and "OMP_WAIT_POLICY" not in os.environ:
        # Engines and trainer share a CPU machine's cores: a thread that waits at a barrier must not keep one busy.
        environment["OMP_WAIT_POLICY"] = "passive"
    environment |= gpu_environment(gpus, os.environ, trains=True)
    if not meets and GLOO not in os.environ:
        environment |= on_loopback()
    return RoleSpec(
        "trainer",
        command,
        experiment.supervisor.start_timeout_s,
        num_processes=trainer.num_ranks,
        environment=environment,
    )


def orchestrator_spec(experiment: Experiment, run_dir: Path) -> RoleSpec:
    """Build the role that plays the episodes: it waits for the servers, so its deadline includes theirs."""
    role = experiment.orchestrating_role
    return RoleSpec(
        role,
        [sys.executable, "-P", "-m", ORCHESTRATING_MODULES[role], str(run_dir)],
        experiment.supervisor.start_timeout_s + ready_timeout_s(experiment),
        environment={**gpu_environment([], os.environ), "OMP_NUM_THREADS": "1"},
    )


def inference_command(python: str, run_dir: Path, role: EngineRole, replica: int, port: int) -> list[str]:
    """Build the command of one vLLM server of a group."""
    command = [python, "-P", "-m", "prime_hpc.inference.main", str(run_dir)]
    command += [] if role == "inference" else ["--role", role]
    return [*command, "--replica", str(replica), "--port", str(port)]


def inference_spec(
    experiment: Experiment,
    run_dir: Path,
    replica: int,
    port: int,
    gpus: list[str],
    role: EngineRole = "inference",
    engines_port: int | None = None,
) -> RoleSpec:
    """One vLLM server (with its data-parallel engines) of a group."""
    servers = servers_of(experiment, role)
    environment = gpu_environment(gpus, os.environ) | told_to_servers(servers.python)
    if engines_port is not None:
        environment[ENGINES_PORT] = str(engines_port)
    if GLOO not in os.environ and not (servers.headless or servers.data_parallel_address):
        environment |= on_loopback()
    return RoleSpec(
        role,
        inference_command(servers.python or sys.executable, run_dir, role, replica, port),
        servers.ready_timeout_s,
        index=replica,
        environment=environment,
        max_restarts=servers.max_restarts,
        health_url=http_url(reached_at(servers.server.host), port, "/health"),
        backend=servers.backend,
        num_engines=servers.data_parallel_size,
    )
