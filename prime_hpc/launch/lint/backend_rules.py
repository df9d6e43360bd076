"""Lint of the inference backend: is it here, and can it do what the experiment asks of it."""

from collections import Counter
from collections.abc import Iterator

from prime_hpc.config import ConfigError
from prime_hpc.config.engine_groups import EngineRole
from prime_hpc.config.named_code import NETWORK_TRANSPORTS
from prime_hpc.inference import environment
from prime_hpc.inference.backend import load_backend, refusals_of
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Subject, rule
from prime_hpc.runtime.device import Stated, planned_device
from prime_hpc.slurm.placement import stated_device
from prime_hpc.slurm.shared_gpus import gpus_in_common

SHARE_FOR_KV = 0.5
"""Of a node's host memory."""


def unknown(subject: Subject) -> Iterator[Finding]:
    """Import paths at which there is no backend: nothing else can be said of its engines."""
    for group in subject.engines:
        try:
            load_backend(group.servers.backend, f"{group.section}.backend")
        except ConfigError as error:
            for problem in error.problems:
                yield Finding.error("PH125", problem.key, problem.message, "vllm, transformers, or mend the path")


@rule(*EVERY, pods=True)
def abilities(subject: Subject) -> Iterator[Finding]:
    """Keys that ask a backend for what it does not do, and a backend that is not installed."""
    for group in subject.engines:
        backend = load_backend(group.servers.backend)
        view = group.view.model_copy(update={"device": _device_of(subject, group.role)})
        for refusal in refusals_of(backend, view, group.role):
            yield Finding.error("PH124", refusal.key, refusal.reason, refusal.remedy)
        if subject.is_slurm:  # a login node does without it
            continue
        if python := group.servers.python:
            if problem := environment.problem_of(python, group.servers.backend):
                yield Finding.error("PH125", f"{group.section}.python", problem, "mend it, or leave the key out")
        elif missing := backend.missing():
            key = f"{group.section}.backend"
            yield Finding.error("PH125", key, f"{backend.title}: {missing}", "install it, or another backend")


@rule(*EVERY, pods=True)
def offloaded(subject: Subject) -> Iterator[Finding]:
    """Host memory for offloaded KV cache against that of a node; half of it is left to the rest."""
    for group in subject.engines:
        size = group.servers.kv_offload_gib
        limit = min((part.mem_gib for part in subject.facts_of(group.role) if part.mem_gib), default=None)
        if size is None or limit is None or subject.placement is None:
            continue
        engines: Counter[int] = Counter()
        for placed in subject.placement.groups:
            if placed.role == group.role:
                for node in range(placed.first_node, placed.first_node + placed.num_nodes):
                    engines[node] += placed.processes_per_node
        most = max(engines.values(), default=0)
        if most * size > limit * SHARE_FOR_KV:
            yield Finding.error(
                "PH106",
                f"{group.section}.kv_offload_gib",
                f"{most} engines on a node take {most * size:.0f} GiB of its {limit:.0f} GiB of host memory",
                f"at most {limit * SHARE_FOR_KV / most:.0f}",
            )


@rule(*EVERY, pods=True)
def transport(subject: Subject) -> Iterator[Finding]:
    """Versions that shall go over the network where they cannot."""
    experiment, name = subject.experiment, subject.experiment.weights.transport
    if name not in NETWORK_TRANSPORTS:
        return
    policies = [group for group in subject.engines if group.role == "inference"]
    other = next((group for group in policies if group.servers.backend != "vllm"), None)
    devices = {_device_of(subject, group.role) for group in policies}
    on_cpu = "cpu" in devices or experiment.trainer.backend == "gloo" or experiment.device == "cpu"
    shares = experiment.engines_sleep or gpus_in_common(experiment, placement=subject.placement)
    cases = (
        (experiment.kind != "rl", "only a run of kind rl has engines that follow each version", "files"),
        (experiment.model.lora is not None, "adapters (model.lora) always go as files", "files"),
        (not policies, "only servers that the run starts know the job's secret, which the trainer asks for", "files"),
        (other is not None, "only vLLM's workers receive; the transformers backend does not", "files, or backend vllm"),
        (name == "nccl" and on_cpu, "NCCL moves what is in GPUs, and trainer or engines are on CPUs", "gloo, or files"),
        (
            name == "nccl" and shares,
            "NCCL joins no two processes on one GPU, and trainer and engines share theirs",
            "gloo, or files",
        ),
    )
    for is_wrong, reason, remedy in cases:
        if is_wrong:
            yield Finding.error("PH126", "weights.transport", f"{name}: {reason}", f"use {remedy}")


def _device_of(subject: Subject, role: EngineRole) -> Stated:
    """Return the device of a group of engines: of its nodes, or of this machine. `auto`: no nodes are known."""
    if not subject.is_slurm:
        return planned_device(stated_device(subject.experiment, subject.site)).type
    groups = subject.placement.groups if subject.placement else ()
    return next((group.device for group in groups if group.role == role), "auto")
