"""Which processes a run consists of on one node: commands, devices, threads, deadlines.

A pure function of the experiment and the node's facts; the supervisor starts what it returns.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment


@dataclass(frozen=True)
class RoleSpec:
    """One process that the supervisor starts and watches."""

    name: str
    """`inference`, `orchestrator` or `trainer`."""
    command: list[str]
    start_timeout_s: float
    """Deadline of its readiness."""
    index: int = 0
    """Replica, for inference."""
    num_processes: int = 1
    """Processes that report their own status (the trainer's ranks)."""
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    """How often it may be started again in place; 0: its death ends the attempt."""
    health_url: str | None = None
    """Answers 200 while the server is well."""

    @property
    def label(self) -> str:
        """Name for people: `trainer`, `inference[1]`."""
        return f"{self.name}[{self.index}]" if self.name == "inference" else self.name


def visible_gpus(environ: dict[str, str]) -> list[str]:
    """Ids of the GPUs that this job may use, from CUDA_VISIBLE_DEVICES, else from the driver's device files."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [x for x in listed.split(",") if x.strip()]
    return sorted((p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*")), key=int)


def split_gpus(experiment: Experiment, gpus: list[str]) -> tuple[list[list[str]], list[str]]:
    """GPUs of each inference replica and of the trainer.

    Explicit ids (`inference_gpu_ids`, `trainer_gpu_ids`) win and may overlap (one GPU shared by both sides).

    Raises:
        ConfigError: the node has fewer GPUs than the roles need.
    """
    inference = experiment.inference if experiment.samples else None
    replicas = inference.num_replicas if inference else 0
    local = (inference.data_parallel_size_local or inference.data_parallel_size) if inference else 0
    per_replica = local * (inference.tensor_parallel_size if inference else 0)
    if not gpus:
        return [[] for _ in range(replicas)], []
    need_inference, need_trainer = replicas * per_replica, experiment.trainer.num_ranks
    named = lambda ids: None if ids is None else [str(i) for i in ids]  # noqa: E731
    serving = named(experiment.inference_gpu_ids)
    training = named(experiment.trainer_gpu_ids)
    if serving is None:
        serving = [g for g in gpus if g not in (training or [])][:need_inference]
    if training is None:
        training = [g for g in gpus if g not in serving][:need_trainer]
    for key, have, need in (("inference", serving, need_inference), ("trainer", training, need_trainer)):
        if len(have) < need:
            raise ConfigError(
                f"{key} needs {need} GPUs, but gets {len(have)} of the {len(gpus)} visible ({', '.join(gpus)}): lower "
                "trainer.num_ranks or inference.data_parallel_size, or share GPUs with inference_gpu_ids and "
                "trainer_gpu_ids"
            )
    groups = [serving[i * per_replica : (i + 1) * per_replica] for i in range(replicas)]
    return groups, training[:need_trainer]


def own_gpus(experiment: Experiment, role: str, gpus: list[str]) -> list[str]:
    """GPUs of one role that is started by hand: those that its key names, else visible ones that the other side's key
    does not name.

    Args:
        experiment: `trainer_gpu_ids` and `inference_gpu_ids` are obeyed.
        role: `trainer`, `inference` (one server) or `orchestrator` (none).
        gpus: the visible ones; none on a machine without.

    Raises:
        ConfigError: the key names too few.
    """
    if not gpus or role == "orchestrator":
        return []
    keys = {"trainer": experiment.trainer_gpu_ids, "inference": experiment.inference_gpu_ids}
    own = keys.pop(role)
    (others,) = keys.values()
    inference = experiment.inference
    need = experiment.trainer.num_ranks
    if role == "inference":
        assert inference is not None
        need = inference.data_parallel_size_local or inference.data_parallel_size
        need *= inference.tensor_parallel_size
    if own is None:
        return [gpu for gpu in gpus if gpu not in {str(i) for i in others or ()}][:need]
    if len(own) < need:
        raise ConfigError(
            f"{role}_gpu_ids names {len(own)} GPUs, but {role} needs {need}: name more, or lower "
            + ("trainer.num_ranks" if role == "trainer" else "inference.data_parallel_size")
        )
    return [str(i) for i in own[:need]]


def trainer_spec(experiment: Experiment, run_dir: Path, gpus: list[str], rendezvous_port: int) -> RoleSpec:
    """torchrun with one process a rank."""
    trainer = experiment.trainer
    threads = trainer.threads_per_rank or max(1, (os.cpu_count() or 1) // trainer.num_ranks)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(trainer.num_ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{rendezvous_port}", "--rdzv-id", "trainer"),
        *("--max-restarts", "0"),
        *("-m", "prime_hpc.trainer.main", str(run_dir)),
    ]
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not gpus and "OMP_WAIT_POLICY" not in os.environ:
        # Engines and trainer share a CPU machine's cores: a thread that waits at a barrier must not keep one busy.
        environment["OMP_WAIT_POLICY"] = "passive"
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return RoleSpec(
        "trainer",
        command,
        experiment.supervisor.start_timeout_s,
        num_processes=trainer.num_ranks,
        environment=environment,
    )


def orchestrator_spec(experiment: Experiment, run_dir: Path) -> RoleSpec:
    """The orchestrator waits for the servers, so its deadline includes theirs."""
    servers = experiment.inference.ready_timeout_s if experiment.inference else 0.0
    return RoleSpec(
        "orchestrator",
        [sys.executable, "-m", "prime_hpc.orchestrator.main", str(run_dir)],
        experiment.supervisor.start_timeout_s + servers,
        environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def inference_spec(experiment: Experiment, run_dir: Path, replica: int, port: int, gpus: list[str]) -> RoleSpec:
    """One vLLM server (with its data-parallel engines)."""
    inference = experiment.inference
    assert inference is not None
    command = [sys.executable, "-m", "prime_hpc.inference.main", str(run_dir)]
    command += ["--replica", str(replica), "--port", str(port)]
    return RoleSpec(
        "inference",
        command,
        inference.ready_timeout_s,
        index=replica,
        environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {},
        max_restarts=inference.max_restarts,
        health_url=f"http://{inference.server.host}:{port}/health",
    )
