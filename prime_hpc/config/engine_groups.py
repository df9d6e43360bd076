"""The groups of vLLM engines that a run starts, by role: the policy's (`inference`), and a teacher's (`teacher`).

A group is described by the same tree as the policy's engines are: `served_by` is the experiment as one group sees it,
with its model, its servers, its GPUs and its nodes in the places of the policy's. Whoever places, plans, checks or
starts engines takes that view, and does it for any group.
"""

from typing import Literal

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.inference import DEFAULT_PORT, InferenceConfig

EngineRole = Literal["inference", "teacher"]
ENGINE_ROLES: tuple[EngineRole, ...] = ("inference", "teacher")
"""In the order in which they get nodes and GPUs."""

SECTIONS: dict[EngineRole, str] = {"inference": "inference", "teacher": "teacher_inference"}
"""Role -> the key of its servers' section."""
MODELS: dict[EngineRole, str] = {"inference": "model.name", "teacher": "orchestrator.teacher.model"}
"""Role -> the key that states what they serve."""


def engine_roles(experiment: Experiment) -> list[EngineRole]:
    """Return the groups that the run starts."""
    starts = {
        "inference": experiment.samples and experiment.inference is not None,
        "teacher": experiment.teacher_inference is not None,
    }
    return [role for role in ENGINE_ROLES if starts[role]]


def served_by(experiment: Experiment, role: EngineRole) -> Experiment:
    """Return the experiment as a group of engines sees it: `model`, `inference`, `inference_gpu_ids` and
    `slurm.inference` are the group's own. The teacher has no adapter, records nothing of its routers, and has room for
    one token more than the longest sample."""
    servers, teacher = experiment.teacher_inference, experiment.orchestrator.teacher
    if role == "inference":
        return experiment
    assert servers is not None and teacher is not None and teacher.model is not None, "the config refuses it"
    own = {
        "max_model_len": servers.max_model_len or max(experiment.seq_len + 1, experiment.max_model_len),
        "api_key": servers.api_key or (experiment.inference.api_key if experiment.inference else None),
    }
    return experiment.model_copy(
        update={
            "model": experiment.model.model_copy(update={"name": teacher.model, "lora": None, "router_dtype": "model"}),
            "trainer": experiment.trainer.model_copy(update={"router_replay": False}),
            "inference": servers.model_copy(update=own),
            "teacher_inference": None,
            "inference_gpu_ids": experiment.teacher_gpu_ids,
            "slurm": experiment.slurm.model_copy(update={"inference": experiment.slurm.teacher}),
        }
    )


def servers_of(experiment: Experiment, role: EngineRole) -> InferenceConfig:
    """Return the section of a group that the run starts, with the group's own defaults."""
    servers = served_by(experiment, role).inference
    assert servers is not None, f"the run starts no {role}"
    return servers


def ready_timeout_s(experiment: Experiment) -> float:
    """Deadline of the slowest group's start, seconds; 0 where the run starts none. They start at once."""
    return max((servers_of(experiment, role).ready_timeout_s for role in engine_roles(experiment)), default=0.0)


def sampling_role(experiment: Experiment) -> EngineRole:
    """Return the group that plays the training episodes: the teacher where it is imitated."""
    return "teacher" if experiment.orchestrator.advantage.imitates else "inference"


def first_port(experiment: Experiment, servers: InferenceConfig) -> int:
    """HTTP port of a group's first server on one machine; 0: free ones are found."""
    port = servers.server.port
    if port is None:
        return 0 if experiment.network.port_range else DEFAULT_PORT
    return port
