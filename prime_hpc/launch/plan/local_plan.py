"""`prime-hpc plan`: where each role of an experiment would run on this machine, before anything does.

`slurm_plan` has the plan of a Slurm job; `resolve_launch` says which of the two it will be.
"""

import os
import shutil
from collections.abc import Mapping
from typing import Literal

from prime_hpc.config import ConfigError, Experiment, Loaded
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import EngineRole, engine_roles, first_port, sampling_role, served_by, servers_of
from prime_hpc.config.run_files import TINKER_URL
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.config.sections.orchestrator import OrchestratorConfig
from prime_hpc.config.site import load_site
from prime_hpc.inference.backend import engines_title
from prime_hpc.launch.estimate.memory import read_model
from prime_hpc.launch.estimate.micro_batch import with_micro_batch
from prime_hpc.launch.estimate.step_time import pace
from prime_hpc.launch.plan.interval import interval_facts, interval_lines
from prime_hpc.store.child_runs import list_children
from prime_hpc.supervisor.roles.spec import split_gpus, usable_gpus


def plan_text(loaded: Loaded) -> str:
    """Return the placement of an experiment, for people."""
    experiment, micro_batch = with_micro_batch(loaded.experiment, None)
    lines = [
        f"experiment  {experiment.name} ({experiment.kind})",
        f"run dir     {experiment.run_dir}",
        f"launch      {launcher()}",
        f"model       {experiment.model.name} ({experiment.model.dtype})",
        f"runs        {runs_line(experiment)}" if is_parent(experiment) else f"steps       {steps_line(experiment)}",
        "roles",
    ]
    lines += [f"  {line}" for line in _roles(experiment)]
    lines += [f"  micro-batch   {micro_batch.words()}"] if micro_batch is not None else []
    return "\n".join([*lines, *(["", _checkpoints(experiment)] if experiment.trains else [])]) + "\n"


def resolve_launch(experiment: Experiment) -> Literal["slurm", "local"]:
    """Decide where `submit` would start the job: as the experiment says, else through Slurm where there is an
    sbatch."""
    if experiment.launch != "auto":
        return experiment.launch
    return "slurm" if shutil.which("sbatch") else "local"


def launcher() -> str:
    """Name the launcher of a local job, in one line."""
    if shutil.which("sbatch"):
        return "submitit's LocalExecutor on this machine (there is a Slurm here: --launch slurm takes it)"
    return "submitit's LocalExecutor on this machine (no sbatch found: no Slurm here)"


def _is_rl(experiment: Experiment) -> bool:
    return experiment.kind == "rl"


def steps_line(experiment: Experiment) -> str:
    """How far it goes."""
    if not experiment.trains:
        return evaluated_versions(experiment) if experiment.kind == "eval" else "the model as it is"
    return f"{experiment.max_steps}" + (f", async level {experiment.async_level}" if _is_rl(experiment) else "")


def evaluated_versions(experiment: Experiment) -> str:
    """Name the versions that an evaluation evaluates."""
    config = experiment.eval
    if config.weights_dir is None:
        return "the model as it is"
    steps = config.steps if config.steps == "all" else ", ".join(map(str, config.steps))
    return f"{'the base model, then ' if config.eval_base else ''}steps {steps} of {config.weights_dir}"


def evaluation_line(experiment: Experiment) -> str:
    """Of the process that plays, in a job of its own."""
    config = experiment.episodes
    envs = ", ".join(env.name or env.id for env in config.environments) or "none"
    tasks = f"{config.num_examples} tasks" if config.num_examples else "all tasks"
    return f"{tasks} x {config.rollouts_per_example} rollouts, at most {config.max_concurrent} in flight, of {envs}"


def runs_line(experiment: Experiment) -> str:
    """Of a trainer that trains many runs: how many, and which there are."""
    trainer, names = experiment.trainer, list_children(experiment.run_dir)
    if trainer.tinker is not None and experiment.model.lora is not None:
        return (
            f"those of tinker clients: at most {trainer.max_concurrent_runs} adapters of rank "
            f"{experiment.model.lora.rank} or less at once, served where {TINKER_URL} says when it is ready"
        )
    known = f"{len(names)} below it: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else "none yet"
    return (
        f"at most {trainer.max_concurrent_runs} at once, an adapter and an orchestrator each; {known}; ends "
        f"{trainer.runs_idle_timeout_s:g} s after the last (prime-hpc runs add {experiment.run_dir} RUN.yaml)"
    )


def orchestrator_line(experiment: Experiment) -> str:
    """Describe who samples, and how much."""
    orchestrator = experiment.orchestrator
    if experiment.trainer.tinker is not None:
        return "none: tinker clients bring their own data and environments"
    envs = ", ".join(env.name or env.id for env in orchestrator.env) or "none"
    own = "one for each run that trains; where it states nothing else: " if is_parent(experiment) else ""
    return (
        f"{own}{experiment.num_prompts} prompts x {orchestrator.rollouts_per_example} rollouts a step, "
        f"{_in_flight(orchestrator)}, environments: {envs}"
    )


def evaluation_lines(experiment: Experiment) -> list[str]:
    """Return the engines and the process that evaluate an SFT run in environments."""
    evaluation = experiment.orchestrator.eval
    if evaluation is None:
        return []
    envs = ", ".join(env.name or env.id for env in evaluation.env)
    own = experiment.inference
    where = f"{own.num_replicas} {engines_title(own)} server(s)" if own else f"attached: {attached_urls(experiment)}"
    return [
        f"inference     {where}",
        f"orchestrator  evaluates on {envs} every {evaluation.interval} steps, {evaluation.num_examples} tasks each",
    ]


def data_line(experiment: Experiment) -> str:
    """Return the training data of SFT, and what is held out."""
    data, held_out = experiment.sft.data, experiment.sft.eval
    size = f"{data.batch_tokens} tokens" if data.batch_tokens else f"{data.batch_size} samples"
    evaluation = f", held-out loss every {held_out.interval} steps" if held_out else ""
    return f"{data.label}, {size} a step{evaluation}"


def _roles(experiment: Experiment) -> list[str]:
    if not experiment.trains:
        return _evaluation_roles(experiment)
    trainer = experiment.trainer
    threads = trainer.threads_per_rank or max(1, (os.cpu_count() or 1) // trainer.num_ranks)
    serving: dict[EngineRole, list[list[str]]] = {role: [] for role in engine_roles(experiment)}
    training: list[str] = []
    missing = ""
    try:
        serving, training = split_gpus(experiment, usable_gpus(experiment, os.environ))
    except ConfigError as error:  # a plan may be looked at on another machine than the run's
        missing = f"not here: {error}"
    where = f"on cuda: {_gpus(training)}" if training else f"{threads} threads a rank on cpu"
    where = "on GPUs that are not here" if missing else where
    lines = [
        f"trainer       torchrun, {trainer.num_ranks} FSDP2 ranks{trainer.parallel_dims.suffix}, {where}, "
        f"micro-batches of {experiment.micro_batch_tokens} tokens"
    ]
    if missing:
        lines.append(f"device        {missing}")
    if not _is_rl(experiment):
        return [*evaluation_lines(experiment), *lines, f"data          {data_line(experiment)}"]
    lines.insert(0, f"orchestrator  {orchestrator_line(experiment)}")
    return [*_engines(experiment, serving), *attached_lines(experiment), *lines]


def _evaluation_roles(experiment: Experiment) -> list[str]:
    try:
        lines = _engines(experiment, split_gpus(experiment, usable_gpus(experiment, os.environ))[0])
    except ConfigError as error:  # a plan may be looked at on another machine than the run's
        lines = [f"device        not here: {error}"]
    return [*lines, *attached_lines(experiment), f"{experiment.kind:<14}{evaluation_line(experiment)}"]


def _gpus(own: list[str]) -> str:
    return f"GPU{'s' if len(own) > 1 else ''} {', '.join(own)}"


def _engines(experiment: Experiment, serving: Mapping[EngineRole, list[list[str]]]) -> list[str]:
    """Return the groups of engines that are started, on the GPUs of each server."""
    lines = []
    for role in engine_roles(experiment):
        view, servers = served_by(experiment, role), servers_of(experiment, role)
        engines = f"data parallel {servers.data_parallel_size} x {split_of(servers)}"
        port = first_port(experiment, servers) or "chosen at start"
        own = [gpu for server in serving[role] for gpu in server]
        where = f"cuda: {_gpus(own)}" if own else "cpu" if serving[role] else "GPUs that are not here"
        what = f"{servers.num_replicas} {engines_title(servers)} server(s){of_model(view, role)}, {engines} on {where}"
        lines.append(f"{role:<14}{what}, port {port}")
    return lines


def split_of(servers: InferenceConfig) -> str:
    """Say how one engine is split."""
    stages = servers.pipeline_parallel_size
    return f"tensor parallel {servers.tensor_parallel_size}" + (f" x pipeline parallel {stages}" if stages > 1 else "")


def of_model(view: Experiment, role: EngineRole) -> str:
    """Name the model that a group serves, where it is not the policy."""
    return f" of {view.model.name}" if role == "teacher" else ""


def attached_lines(experiment: Experiment) -> list[str]:
    """Servers that run already, of the policy and of a teacher."""
    lines, teacher = [], experiment.orchestrator.teacher
    if not experiment.trains:
        client = experiment.episodes.client
        return [f"inference     attached: {', '.join(client.urls)}"] if client is not None else []
    if experiment.inference is None and experiment.trainer.tinker is not None:
        urls = attached_urls(experiment) if experiment.orchestrator.client.base_url is not None else ""
        lines.append(f"inference     {f'attached: {urls}' if urls else 'none: clients can train, not sample'}")
    elif experiment.inference is None and sampling_role(experiment) != "teacher":
        lines.append(f"inference     attached: {attached_urls(experiment)}")
    if teacher is not None and teacher.urls:
        lines.append(f"teacher       attached: {', '.join(teacher.urls)}")
    return lines


def attached_urls(experiment: Experiment) -> str:
    """Servers that the run attaches to, for people."""
    return ", ".join(experiment.orchestrator.client.urls)


def child_checkpoints(experiment: Experiment) -> str:
    """Of a trainer that trains many runs."""
    if experiment.trainer.tinker is not None:
        return "as the clients ask for them (save_state), each adapter's below its directory"
    ckpt = experiment.ckpt
    default = "off" if ckpt is None else f"interval {ckpt.interval}"
    return f"each run's own, below its directory; {default} where it states nothing else"


def _checkpoints(experiment: Experiment) -> str:
    if is_parent(experiment):
        return f"checkpoints  {child_checkpoints(experiment)}"
    if experiment.ckpt is None:
        return "checkpoints  off (--ckpt switches them on)"
    where = experiment.ckpt.path or experiment.run_dir / "checkpoints"
    resume = f", resumes at {experiment.ckpt.resume_step}" if experiment.ckpt.resume_step is not None else ""
    speed = pace(experiment, read_model(experiment.model.name))
    site = load_site(experiment.slurm.site)
    facts = interval_facts(experiment, site, speed, 1, walltime_s=None, in_job=False)
    interval = experiment.ckpt.interval
    every = "as often as costs least" if interval == "auto" else f"every {interval} steps"
    lines = interval_lines(interval, facts, {"step_s": speed.step_s, "step_from": speed.step_from})
    return "\n".join([f"checkpoints  {every} in {where}{resume}", *(f"             {line}" for line in lines)])


def _in_flight(config: OrchestratorConfig) -> str:
    if config.adaptive_concurrency is None:
        return f"at most {config.max_concurrent} in flight"
    most = min(config.max_concurrent, config.adaptive_concurrency.most)
    return f"{most} in flight at first, then as many as the engines ask for"
