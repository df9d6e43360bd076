"""The groups of engines that a run starts, by role: the policy's (`inference`), a teacher's and a judge's.

A group is described by the same tree as the policy's engines are: `served_by` is the experiment as one group sees it,
with its model, its servers, its GPUs and its nodes in the places of the policy's. Whoever places, plans, checks or
starts engines takes that view, and does it for any group.
"""

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.run_files import ENGINE_ROLES, EngineRole
from prime_hpc.config.sections.inference import DEFAULT_PORT, FrozenInferenceConfig, InferenceConfig, WeightsConfig

SECTIONS: dict[EngineRole, str] = {
    "inference": "inference",
    "teacher": "teacher_inference",
    "judge": "judge_inference",
}
"""Role -> the key of its servers' section."""
MODELS: dict[EngineRole, str] = {
    "inference": "model.name",
    "teacher": "orchestrator.teacher.model",
    "judge": "judge_inference.model",
}
"""Role -> the key that states what they serve."""


def engine_roles(experiment: Experiment) -> list[EngineRole]:
    """Return the groups that the run starts."""
    starts = {
        "inference": experiment.samples and experiment.inference is not None,
        "teacher": experiment.teacher_inference is not None,
        "judge": experiment.samples and experiment.judge_inference is not None,
    }
    return [role for role in ENGINE_ROLES if starts[role]]


def trained_names(experiment: Experiment) -> dict[str, str]:
    """Key -> name of the models that the trainer loads."""
    is_rl, kl, critic = experiment.kind == "rl", experiment.trainer.loss.kl, experiment.trainer.critic
    names = {"model.name": experiment.model.name, "trainer.loss.kl.model": kl.model if kl and is_rl else None}
    names["trainer.critic.name"] = critic.name if critic and is_rl else None
    return {key: name for key, name in names.items() if name}


def served_by(experiment: Experiment, role: EngineRole) -> Experiment:
    """Return the experiment as a group of engines sees it: `model`, `inference`, `inference_gpu_ids` and
    `slurm.inference` are the group's own. The others have no adapter and record nothing of their routers; the teacher
    has room for one token more than the longest sample (twice that with a tokenizer of its own), the judge for a sample
    and what it is asked about it."""
    servers: FrozenInferenceConfig | None
    if role == "inference":
        return experiment
    if role == "judge":
        servers = experiment.judge_inference
        name = servers.model if servers is not None else None
        length, changes = 2 * experiment.seq_len, {"head_dtype": "model", "vision": None}
    else:
        servers, teacher = experiment.teacher_inference, experiment.orchestrator.teacher
        name = teacher.model if teacher is not None else None
        length, changes = max(experiment.seq_len + 1, experiment.max_model_len), {}
        length *= 2 if teacher is not None and teacher.tokenizer == "own" else 1  # its tokens may be more
    assert servers is not None and name is not None, "the config refuses it"
    changes |= {"name": name, "lora": None, "router_dtype": "model"}
    own = {
        "max_model_len": servers.max_model_len or length,
        "api_key": servers.api_key or (experiment.inference.api_key if experiment.inference else None),
    }
    return experiment.model_copy(
        update={
            "model": experiment.model.model_copy(update=changes),
            "trainer": experiment.trainer.model_copy(update={"router_replay": False}),
            "weights": WeightsConfig(),
            "inference": servers.model_copy(update=own),
            **dict.fromkeys((section for section in SECTIONS.values() if section != "inference"), None),
            "inference_gpu_ids": getattr(experiment, f"{role}_gpu_ids"),
            "slurm": experiment.slurm.model_copy(update={"inference": getattr(experiment.slurm, role)}),
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
