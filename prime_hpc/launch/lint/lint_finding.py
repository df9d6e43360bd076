"""Lint's finding with its stable code, the subject that all checks look at, and the kinds of runs a check is for."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.engine_groups import SECTIONS, EngineRole, sampling_role
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.config.sections.orchestrator import ClientConfig
from prime_hpc.config.sections.slurm import SiteConfig, SitePartition
from prime_hpc.config.sections.teacher import TeacherConfig
from prime_hpc.launch.estimate.model_facts import ModelFacts
from prime_hpc.launch.fetch.fetch import OFFLINE
from prime_hpc.launch.fetch.presence import job_environ
from prime_hpc.slurm.options import RoleOptions, SlurmRole, known_partitions
from prime_hpc.slurm.placement import Placement
from prime_hpc.store.model.config import is_on

Severity = Literal["error", "warning", "info"]
Kind = Literal["rl", "sft", "eval", "synthesize"]
TRAINING: tuple[Kind, ...] = ("rl", "sft")
EVERY: tuple[Kind, ...] = (*TRAINING, "eval", "synthesize")

CODES = {
    "PH000": "the config does not resolve",
    "PH101": "tensor parallel size and attention heads",
    "PH102": "tensor parallel size and key-value heads",
    "PH103": "tensor parallel size and vocabulary",
    "PH104": "context beyond the model's",
    "PH105": "the trainer does not fit its GPUs",
    "PH106": "the engines do not fit their GPUs",
    "PH107": "model unknown: nothing of it was checked",
    "PH108": "float16 cannot train",
    "PH109": "the trainer's tensor parallel size",
    "PH110": "the trainer's context parallel size",
    "PH111": "the trainer's expert parallel size",
    "PH112": "a tensor-parallel group over several nodes",
    "PH113": "adapters that the model has no place for",
    "PH114": "attention kernel that is not here",
    "PH115": "float32 on GPUs",
    "PH118": "weights that cannot be trained",
    "PH119": "model families that cannot be trained, or only one sample a row",
    "PH120": "the memory of a GPU that several roles use",
    "PH121": "rotary embeddings that trainer and engines do not share",
    "PH122": "data-parallel engines of a dense model",
    "PH123": "more pipeline stages than layers",
    "PH124": "what the inference backend cannot do",
    "PH125": "an inference backend that is not here",
    "PH126": "a weight transport that cannot work",
    "PH127": "routers of a mixture of experts",
    "PH128": "tokens that the model has no embedding of",
    "PH129": "images",
    "PH130": "a model without a tokenizer",
    "PH131": "reward models and models that reply",
    "PH201": "group baseline of one rollout",
    "PH202": "batch smaller than the ranks",
    "PH203": "orchestrator concurrency",
    "PH204": "evaluation without an environment",
    "PH205": "no checkpoints",
    "PH206": "checkpoint interval",
    "PH207": "data file",
    "PH208": "curriculum",
    "PH209": "echo without turns",
    "PH210": "a trainer of many runs without a run",
    "PH211": "greedy training rollouts",
    "PH212": "code that a model writes",
    "PH213": "masked tokens where none can be",
    "PH214": "steps of epochs",
    "PH215": "what the hub does not have",
    "PH220": "steps without a learning rate, or a schedule longer than the run",
    "PH221": "a clip or a penalty that only sees numerics",
    "PH222": "KL penalty or entropy bonus without the groups that have no signal",
    "PH223": "no room for a demonstration",
    "PH224": "a learning rate that nobody chose",
    "PH225": "a demonstration that tasks do not have",
    "PH226": "advantages divided twice",
    "PH227": "imitation of whatever was sampled",
    "PH230": "more workers of environments than CPUs",
    "PH231": "addresses of environments' workers without workers",
    "PH232": "an environment that is not installed",
    "PH233": "code of your own that cannot be imported",
    "PH234": "output directory that cannot be one",
    "PH235": "a key of servers that is not set",
    "PH236": "an argument that an environment does not have",
    "PH237": "a variable of the shell in a path",
    "PH238": "a reward that nothing scores",
    "PH240": "alarms over unknown metrics",
    "PH241": "keys without an effect",
    "PH242": "a checkpoint to resume from that is not there, or of another experiment",
    "PH243": "versions to evaluate that are not there",
    "PH301": "unknown partition",
    "PH302": "more GPUs a node than the partition has",
    "PH303": "more nodes than the partition has",
    "PH304": "time that Slurm cannot read",
    "PH305": "time of zero",
    "PH306": "time above the partition's limit",
    "PH307": "no time limit",
    "PH308": "the roles cannot be placed",
    "PH309": "requeue where the site does not allow it",
    "PH310": "signal lead",
    "PH311": "time limit too short to get anywhere",
    "PH312": "server on the loopback address",
    "PH313": "directory of the run or of its checkpoints that other nodes do not see",
    "PH314": "dependency that Slurm cannot read",
    "PH315": "CPUs",
    "PH316": "memory",
    "PH317": "GPUs asked for and not used",
    "PH318": "no GPUs asked for",
    "PH319": "options handed on between het components",
    "PH320": "multi-node keys that the placement decides",
    "PH321": "option value that Slurm cannot read",
    "PH322": "start-up deadlines beyond the time limit",
    "PH323": "script that cannot be rendered",
    "PH324": "container image",
    "PH325": "paths inside the container",
    "PH326": "GPUs that Slurm does not know",
    "PH327": "ports",
    "PH328": "a job that does not come back",
    "PH329": "nodes without internet, and what is not on disk",
    "PH332": "files that the site purges before the job may be over",
    "PH333": "the packed Python environment",
}
"""Stable codes: a number is never given a new meaning. 1xx the model, 2xx the run, 3xx Slurm and the site."""


@dataclass(frozen=True)
class Finding:
    """One thing that lint has to say."""

    code: str
    """A key of CODES."""
    severity: Severity
    key: str | None
    """Dotted key of the experiment that is to be changed."""
    message: str
    remedy: str

    @classmethod
    def error(cls, code: str, key: str | None, message: str, remedy: str) -> "Finding":
        """Return one for which a run is refused."""
        return cls(code, "error", key, message, remedy)

    @classmethod
    def warning(cls, code: str, key: str | None, message: str, remedy: str) -> "Finding":
        """Return one that is shown, and holds nothing up."""
        return cls(code, "warning", key, message, remedy)

    @classmethod
    def info(cls, code: str, key: str | None, message: str, remedy: str) -> "Finding":
        """Return one that need not be a fault."""
        return cls(code, "info", key, message, remedy)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"code": self.code, "title": CODES[self.code], **asdict(self)}

    def line(self, origin: str | None = None) -> str:
        """For the terminal; `origin`: where the key was stated."""
        where = ": ".join(part for part in (origin, self.key) if part)
        return f"{self.severity} {self.code} {where + ': ' if where else ''}{self.advice}"

    @property
    def advice(self) -> str:
        """Say what is wrong, and what to do unless that says it."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True)
class Engines:
    """One group of engines that the run starts."""

    role: EngineRole
    view: Experiment
    """The experiment as the group sees it: `served_by`."""
    facts: ModelFacts | None
    """Of the model that it serves, where its config.json is here."""

    @property
    def section(self) -> str:
        """Key of the group's servers."""
        return SECTIONS[self.role]

    @property
    def servers(self) -> InferenceConfig:
        """The section's number of servers."""
        assert self.view.inference is not None
        return self.view.inference


@dataclass(frozen=True)
class Subject:
    """The experiment and site that the checks look at. Built once by `lint`."""

    experiment: Experiment
    site: SiteConfig
    facts: ModelFacts | None
    """Of the model, where its config.json is here."""
    is_slurm: bool
    placement: Placement | None = None
    """None: not for Slurm, or impossible (`misplaced` says why)."""
    misplaced: ConfigError | None = None
    roles: dict[SlurmRole, RoleOptions] = field(default_factory=dict)
    """Of each role that has nodes of its own."""
    engines: tuple[Engines, ...] = ()
    """The groups of engines that the run starts."""

    @property
    def is_rl(self) -> bool:
        """Reinforcement, not supervised."""
        return self.experiment.kind == "rl"

    @property
    def attached(self) -> dict[str, ClientConfig | TeacherConfig]:
        """Key -> servers that the run uses and does not start."""
        experiment, found = self.experiment, dict[str, ClientConfig | TeacherConfig | None]()
        client, teacher = experiment.orchestrator.client, experiment.orchestrator.teacher
        serves_none = experiment.trainer.tinker is not None and client.base_url is None
        if not experiment.trains:
            found[f"{experiment.kind}.client"] = experiment.episodes.client
        elif experiment.inference is None and experiment.samples and not serves_none:
            found["orchestrator.client"] = client if sampling_role(experiment) == "inference" else None
        if self.is_rl and teacher is not None and teacher.urls:
            found["orchestrator.teacher"] = teacher
        return {key: servers for key, servers in found.items() if servers is not None}

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the roles, as far as it is known here."""
        return job_environ(self.experiment, self.site) if self.is_slurm else dict(os.environ)

    @property
    def asks_hub(self) -> bool:
        """True if neither this machine nor the nodes are kept off the hub."""
        kept_off = any(is_on(environ, name) for environ in (os.environ, self.environ) for name in OFFLINE)
        return not kept_off and not (self.is_slurm and self.site.internet is False)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job; 1 without a placement."""
        return self.placement.num_nodes if self.placement else 1

    def facts_of(self, role: SlurmRole) -> list[SitePartition]:
        """Return what the site profile knows of a role's partitions."""
        asked = self.roles.get(role)
        return known_partitions(asked.partitions, self.site) if asked else []

    def gpu_gib(self, role: SlurmRole) -> float | None:
        """Memory of one GPU of a role's nodes, of the smallest partition; None: not known, or no GPUs."""
        asked = self.roles.get(role)
        if asked is None or not asked.gpus_per_node:
            return None
        sizes = [part.gpu_memory_gib for part in self.facts_of(role)]
        return min((s for s in sizes if s is not None), default=None)

    @property
    def trains_on_gpus(self) -> bool:
        """True if the trainer is to compute on GPUs, as far as it can be known before it runs."""
        if self.is_slurm:
            groups = self.placement.groups if self.placement else ()
            return any(group.role == "trainer" and group.device == "cuda" for group in groups)
        return self.experiment.device == "cuda"

    def num_trainer_nodes(self) -> int:
        """Nodes of the trainer; 1 without a placement."""
        groups = self.placement.groups if self.placement else ()
        return next((group.num_nodes for group in groups if group.role == "trainer"), 1)


Check = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check, and what it is for."""

    check: Check
    kinds: tuple[Kind, ...]
    slurm: bool
    pods: bool
    """True if it holds for pods too, wherever these are rendered."""

    def applies(self, subject: Subject) -> bool:
        """Return whether it is for this run."""
        return subject.experiment.kind in self.kinds and (subject.is_slurm or not self.slurm)


def rule(*kinds: Kind, slurm: bool = False, pods: bool = False) -> Callable[[Check], Rule]:
    """Make a rule of the check that follows: `lint` asks all of its modules."""
    return lambda check: Rule(check, kinds, slurm, pods)
