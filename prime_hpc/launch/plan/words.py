"""Words for what the roles of an experiment do, a line each: for plans."""

import shlex

from prime_hpc.config import Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import EngineRole, sampling_role
from prime_hpc.config.run_files import TINKER_URL
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.config.sections.orchestrator import OrchestratorConfig
from prime_hpc.launch.estimate.epochs import epochs_line
from prime_hpc.launch.estimate.forward_passes import looked_at_for
from prime_hpc.store.child_runs import list_children
from prime_hpc.store.io.disk import size_text


def steps_line(experiment: Experiment) -> str:
    """How far it goes."""
    if not experiment.trains:
        return evaluated_versions(experiment) if experiment.kind == "eval" else "the model as it is"
    if experiment.num_steps is None:
        return epochs_line(experiment)
    return f"{experiment.max_steps}" + (f", async level {experiment.async_level}" if experiment.kind == "rl" else "")


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
    envs = ", ".join(env.label for env in config.environments) or "none"
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
    run_dir = shlex.quote(str(experiment.run_dir))
    return (
        f"at most {trainer.max_concurrent_runs} at once, an adapter and an orchestrator each; {known}; ends "
        f"{trainer.runs_idle_timeout_s:g} s after the last (prime-hpc runs add {run_dir} RUN.yaml)"
    )


def orchestrator_line(experiment: Experiment) -> str:
    """Describe who samples, and how much."""
    orchestrator = experiment.orchestrator
    if experiment.trainer.tinker is not None:
        return "none: tinker clients bring their own data and environments"
    envs = ", ".join(env.label for env in orchestrator.env) or "none"
    own = "one for each run that trains; where it states nothing else: " if is_parent(experiment) else ""
    sizes = {orchestrator.group_size(i) for i in range(len(orchestrator.env))} or {orchestrator.rollouts_per_example}
    return (
        f"{own}{experiment.num_prompts} prompts x {' or '.join(map(str, sorted(sizes)))} rollouts"
        f"{_greedy(orchestrator)} a step, "
        f"{_in_flight(orchestrator)}, environments: {envs}{_of_teacher(experiment)}"
    )


def looks(experiment: Experiment) -> str:
    """Say that a batch is looked at before its first update, and for what; empty: it is not."""
    keys = looked_at_for(experiment)
    return f"; one more forward pass over each batch, for {' and '.join(keys)}" if keys else ""


def _greedy(orchestrator: OrchestratorConfig) -> str:
    """Say that prompts have a greedy rollout more, and of which environments; empty: none has."""
    sources, num = orchestrator.greedy_sources, len(orchestrator.env)
    own = f" (of {', '.join(orchestrator.env[i].label for i in sources)})" if len(sources) < num else ""
    return f" and a greedy one{own}" if sources else ""


def _of_teacher(experiment: Experiment) -> str:
    """Say what a teacher's distributions add to a batch, or that it reads text; empty: neither."""
    distillation, teacher = experiment.trainer.loss.distillation, experiment.orchestrator.teacher
    if teacher is not None and teacher.tokenizer == "own":
        return f"; the teacher reads the text in the tokens of {teacher.model}"
    if distillation is None:
        return ""
    top_k, size = distillation.top_k, distillation.batch_bytes * experiment.orchestrator.batch_size * experiment.seq_len
    return (
        f"; the teacher's {top_k} likeliest tokens: {distillation.batch_bytes} bytes a token of the batch, "
        f"{size_text(size)} a step at most"
    )


def evaluation_lines(experiment: Experiment) -> list[str]:
    """Return the process that evaluates an SFT run in environments, if one does."""
    evaluation = experiment.orchestrator.eval
    if evaluation is None:
        return []
    envs = ", ".join(env.label for env in evaluation.env)
    intervals = " or ".join(map(str, sorted(set(evaluation.intervals))))
    every = f"every {intervals} steps, {evaluation.num_examples} tasks each"
    return [f"orchestrator  evaluates on {envs} {every}"]


def data_line(experiment: Experiment) -> str:
    """Return the training data of SFT, and what is held out."""
    data, held_out = experiment.sft.data, experiment.sft.eval
    what = "samples" if experiment.sft.preference is None else "pairs"
    size = f"{data.batch_tokens} tokens" if data.batch_tokens else f"{data.batch_size} {what}"
    sets = f" of {', '.join(one.id for one in held_out.sets)}" if held_out and held_out.sets else ""
    evaluation = f", held-out loss{sets} every {held_out.interval} steps" if held_out else ""
    return f"{data.label}, {size} a step{evaluation}"


def split_of(servers: InferenceConfig) -> str:
    """Say how one engine is split."""
    stages = servers.pipeline_parallel_size
    return f"tensor parallel {servers.tensor_parallel_size}" + (f" x pipeline parallel {stages}" if stages > 1 else "")


def of_model(view: Experiment, role: EngineRole) -> str:
    """Name the model that a group serves, where it is not the policy."""
    return f" of {view.model.name}" if role != "inference" else ""


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


def _in_flight(config: OrchestratorConfig) -> str:
    if config.adaptive_concurrency is None:
        return f"at most {config.max_concurrent} in flight"
    most = min(config.max_concurrent, config.adaptive_concurrency.most)
    return f"{most} in flight at first, then as many as the engines ask for"
