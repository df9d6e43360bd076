"""The plan of a job, through Slurm or on this machine: all that is decided before it, and what it is estimated to need.

`--json` prints `Plan.as_dict`, `plan_text` puts a plan in words.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import ENGINE_ROLES, EngineRole, engine_roles, served_by
from prime_hpc.config.run_files import JOB_SBATCH
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import load_site
from prime_hpc.launch.estimate.engine_memory import EngineMemory, engine_memory
from prime_hpc.launch.estimate.micro_batch import MicroBatch, with_micro_batch
from prime_hpc.launch.estimate.model_facts import ModelFacts, read_model
from prime_hpc.launch.estimate.step_time import Pace, pace
from prime_hpc.launch.estimate.trainer_memory import trainer_gib, whole_gradient_bytes
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.lint.lint_finding import Finding
from prime_hpc.launch.lint.network_rules import network_facts
from prime_hpc.launch.plan.interval import interval_facts
from prime_hpc.launch.plan.restart_text import restart_texts
from prime_hpc.launch.plan.this_machine import place_here, ports_here, resolve_launch
from prime_hpc.slurm.options import Options, known_partitions, resolve
from prime_hpc.slurm.placement import Placement, RoleGroup, choose_layout, place_slurm, placed_roles
from prime_hpc.slurm.script import job_name, restart_mode
from prime_hpc.slurm.times import parse_time_s
from prime_hpc.store.child_runs import PREFIX
from prime_hpc.store.tinker_files import adapters_root


def make_plan(experiment: Experiment) -> "Plan":
    """Return the plan of a job where `submit` would start it. Raises ConfigError."""
    if resolve_launch(experiment) == "local":
        return local_plan(experiment)
    return slurm_plan(experiment, load_site(experiment.slurm.site))


def slurm_plan(experiment: Experiment, site: SiteConfig) -> "Plan":
    """Return the plan of a job of Slurm. Raises ConfigError: the job cannot be placed."""
    experiment, micro_batch = with_micro_batch(experiment, site)
    placement = place_slurm(experiment, site)
    how = restart_mode(experiment, site, placement)
    return Plan(experiment, site, placement, choose_layout(experiment, site)[1], how, micro_batch)


def local_plan(experiment: Experiment, *, in_foreground: bool = False) -> "Plan":
    """Return the same of a job on this machine, or of the command itself there."""
    experiment, micro_batch = with_micro_batch(experiment.model_copy(update={"launch": "local"}), None)
    placement, why = place_here(experiment)
    return Plan(experiment, load_site(experiment.slurm.site), placement, why, "off", micro_batch, in_foreground)


@dataclass(frozen=True)
class Memory:
    """Estimates for one GPU of each role; None where the model is not known."""

    trainer_gib: dict[str, float] | None
    """Part -> GiB."""
    defers_sync: bool | None
    """True if gradients stay whole until a step's last micro-batch (`trainer.no_sync`)."""
    engines: dict[EngineRole, EngineMemory | None]
    gpu_gib: dict[str, float | None]
    """Role -> the size of its smallest GPU, where the site profile says it."""


@dataclass(frozen=True)
class Plan:
    """One job before it is started."""

    experiment: Experiment
    """With the micro-batch that was chosen."""
    site: SiteConfig
    placement: Placement
    why: str
    """It is placed so."""
    how: Literal["requeue", "successor", "off"]
    """It comes back so."""
    micro_batch: MicroBatch | None
    """None: it is stated, or nothing is known to choose it by."""
    in_foreground: bool = False
    """No job: the command that starts it runs it."""

    @property
    def is_here(self) -> bool:
        """True if the job is on this machine."""
        return self.placement.layout == "local"

    @cached_property
    def facts(self) -> ModelFacts | None:
        """Of the model, where its config.json is here."""
        return read_model(self.experiment.model.name)

    @cached_property
    def pace(self) -> Pace:
        """Of a step and a save."""
        nodes = next((group.num_nodes for group in self.placement.groups if group.role == "trainer"), 1)
        return pace(self.experiment, self.facts, nodes)

    @cached_property
    def interval(self) -> dict[str, Any]:
        """The best interval of checkpoints and the one that is set: `interval_facts`."""
        limits = [_limit_s(component.options) for component in self.placement.components]
        return interval_facts(
            *(self.experiment, self.site, self.pace, self.placement.num_nodes),
            walltime_s=min((seconds for seconds in limits if seconds), default=None),
            in_job=not self.is_here,
        )

    @cached_property
    def memory(self) -> Memory:
        """Estimates; how large the GPUs of this machine are is looked at when the job starts."""
        experiment, site = self.experiment, self.site
        gpu_gib: dict[str, float | None] = {}
        for role in placed_roles(experiment):
            found = () if self.is_here else known_partitions(resolve(role, experiment, site).partitions, site)
            sizes = [part.gpu_memory_gib for part in found]
            gpu_gib[role] = min((size for size in sizes if size is not None), default=None)
        engines: dict[EngineRole, EngineMemory | None] = {}
        for role in engine_roles(experiment):
            view = served_by(experiment, role)
            served = read_model(view.model.name)
            engines[role] = engine_memory(view, served, gpu_gib[role]) if served is not None else None
        if self.facts is None or not experiment.trains:
            return Memory(None, None, engines, gpu_gib)
        whole = whole_gradient_bytes(experiment, self.facts)
        defers = None if whole is None else experiment.trainer.defers_sync(whole)
        return Memory(trainer_gib(experiment, self.facts), defers, engines, gpu_gib)

    @cached_property
    def network(self) -> dict[str, Any]:
        """The section in force, and the HTTP ports that are known."""
        facts = network_facts(self.experiment, self.site, self.placement)
        return facts | ({"server_ports": ports_here(self.experiment)} if self.is_here else {})

    @cached_property
    def restart_events(self) -> dict[str, str]:
        """Event -> what then becomes of the job."""
        return restart_texts(self.experiment, self.site, self.placement, self.how)

    @cached_property
    def paths(self) -> dict[str, str | None]:
        """Of the run directory, the script of the job, its log, the checkpoints."""
        run_dir = self.experiment.run_dir.resolve()
        log = "supervisor.log" if self.in_foreground else "submitit" if self.is_here else "slurm-<job id>.out"
        return {
            "run": str(run_dir),
            "script": None if self.is_here else str(run_dir / JOB_SBATCH),
            "log": str(run_dir / "logs" / log),
            "checkpoints": _checkpoint_folder(self.experiment, run_dir),
        }

    @cached_property
    def findings(self) -> list[Finding]:
        """Lint's."""
        return lint(self.experiment, self.site)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        experiment, placement, speed, ckpt = self.experiment, self.placement, self.pace, self.experiment.ckpt
        return {
            "launch": "local" if self.is_here else "slurm",
            "name": experiment.name,
            "kind": experiment.kind,
            "job_name": job_name(experiment),
            "site": self.site.name,
            "layout": placement.layout,
            "layout_why": self.why,
            "num_nodes": placement.num_nodes,
            "components": [
                {"index": c.index, "name": c.name, "nodes": c.num_nodes, "options": c.options}
                for c in placement.components
            ],
            "roles": [_group(experiment, group) for group in placement.groups],
            "spares": list(placement.spares),
            "elastic": {"servers": experiment.slurm.elastic.servers, "options": placement.elastic}
            if experiment.slurm.elastic is not None and placement.elastic is not None
            else None,
            "network": self.network,
            "restart": {"how": self.how, "signal_lead_s": experiment.slurm.restart.signal_lead_s}
            | {"events": self.restart_events},
            "checkpoints": {"on": ckpt is not None, "interval": ckpt.interval if ckpt else None}
            | {"resume_step": None if ckpt is None or ckpt.resume_step is None else str(ckpt.resume_step)}
            | self.interval,
            "model": {"name": experiment.model.name, "dtype": experiment.model.dtype}
            | {key: getattr(self.facts, key, None) for key in ("num_params", "context")},
            "memory": _memory(self.memory),
            "micro_batch": {"tokens": experiment.micro_batch_tokens, "chosen": self.micro_batch is not None}
            | {"words": self.micro_batch.words() if self.micro_batch is not None else None},
            "pace": {"step_s": speed.step_s, "step_from": speed.step_from, "save_s": speed.save_s}
            | {"stall_s": speed.stall_s, "save_from": speed.save_from, "startup_s": self.site.startup_s},
            "paths": self.paths,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _checkpoint_folder(experiment: Experiment, run_dir: Path) -> str:
    if experiment.trainer.tinker is not None:
        return str(adapters_root(run_dir) / "<adapter>" / "checkpoints")
    if is_parent(experiment):
        return str(run_dir / f"{PREFIX}<id>" / "checkpoints")
    return str((experiment.ckpt and experiment.ckpt.path) or run_dir / "checkpoints")


def _group(experiment: Experiment, group: RoleGroup) -> dict[str, Any]:
    name = f"{group.role}[{group.index}]" if group.role in ENGINE_ROLES else group.role
    if name == "orchestrator":
        name = experiment.orchestrating_role
    values: dict[str, Any] = {
        "role": name,
        "component": group.component,
        "first_node": group.first_node,
        "nodes": group.num_nodes,
        "device": group.device,
        "gpus": None if group.gpus is None else list(group.gpus),
    }
    if group.role == "trainer":
        values |= {"ranks_per_node": group.processes_per_node, "launcher": experiment.trainer.launcher}
        values |= {"parallel": asdict(experiment.trainer.parallel_dims)}
    elif group.role in ENGINE_ROLES:
        values |= {"engines_per_node": group.processes_per_node, "data_parallel_size": group.dp_size}
    return values


def _memory(memory: Memory) -> dict[str, Any]:
    parts = memory.trainer_gib
    result: dict[str, Any] = {
        "trainer_gib": None if parts is None else {name: round(value, 3) for name, value in parts.items()},
        "no_sync": memory.defers_sync,
        "engine": None,
        "gpu_gib": memory.gpu_gib,
    }
    for role, engine in memory.engines.items():
        result["engine" if role == "inference" else f"{role}_engine"] = engine and {
            "weights_gib": round(engine.weights_gib, 3),
            "kv_gib": None if engine.kv_gib is None else round(engine.kv_gib, 3),
            "kv_bytes_per_token": engine.token_bytes,
            "kv_tokens": engine.max_tokens,
        }
    return result


def _limit_s(options: Options) -> int | None:
    try:
        return parse_time_s(str(options["time"])) if "time" in options else None
    except ConfigError:
        return None  # lint has said so
