"""A plan in words."""

import json
from collections.abc import Sequence

from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import EngineRole, engine_roles, served_by, servers_of
from prime_hpc.inference.backend import engines_title
from prime_hpc.launch.lint.network_rules import network_line
from prime_hpc.launch.plan import words
from prime_hpc.launch.plan.interval import interval_lines
from prime_hpc.launch.plan.plan import Plan
from prime_hpc.launch.plan.this_machine import launcher
from prime_hpc.observe.console import in_seconds
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.options import num_env_nodes
from prime_hpc.slurm.placement import RoleGroup, across_nodes
from prime_hpc.slurm.script import job_name


def plan_text(plan: Plan) -> str:
    """Return a plan for people."""
    experiment, num_nodes = plan.experiment, plan.placement.num_nodes
    params = plan.facts.num_params if plan.facts else None
    counted = f", {_count(params)} parameters" if params else ""
    started = launcher() if plan.is_here else f"Slurm job {job_name(experiment)!r}, site profile {plan.site.name}"
    started = "in the foreground, on this machine" if plan.in_foreground else started
    many = is_parent(experiment)
    lines = [
        f"experiment   {experiment.name} ({experiment.kind})",
        f"launch       {started}",
        f"model        {experiment.model.name} ({experiment.model.dtype}{counted})",
        f"runs         {words.runs_line(experiment)}" if many else f"steps        {words.steps_line(experiment)}",
        f"layout       {plan.placement.layout}: {plan.why}",
        f"components   {num_nodes} node{'s' if num_nodes > 1 else ''} in all",
        *(f"  {line}" for line in _component_lines(plan)),
        "roles",
        *(f"  {line}" for line in _role_lines(plan)),
        f"network      {network_line(plan.network, is_local=plan.is_here)}",
        *_memory_lines(plan),
        *_checkpoint_lines(plan),
        f"restart      {plan.how}",
        *(f"  {event:<20}{text}" for event, text in plan.restart_events.items()),
        "paths",
        *(f"  {name:<20}{path}" for name, path in plan.paths.items() if path),
        *_finding_lines(plan),
    ]
    return "\n".join(lines) + "\n"


def show_dry_run(plan: Plan, script: str | None, as_json: bool) -> None:
    """Print what `submit` would start: the plan, and the script of a Slurm job."""
    if as_json:
        print(json.dumps({"dry_run": True, "plan": plan.as_dict(), "script": script}, indent=2, default=str))
    else:
        print(plan_text(plan), end="" if script is None else "\n")
        print(script or "", end="")


def _component_lines(plan: Plan) -> list[str]:
    lines = []
    for component in plan.placement.components:
        options = ", ".join(name if value is True else f"{name} {value}" for name, value in component.options.items())
        count = f"{component.num_nodes} node{'s' if component.num_nodes > 1 else ''}"
        default = "no GPU" if plan.is_here else "the partition defaults"
        lines.append(f"{component.index} {component.name:<14}{count:<12}{options or default}")
    return lines


def _role_lines(plan: Plan) -> list[str]:
    experiment = plan.experiment
    lines = [_engine_line(plan, role) for role in engine_roles(experiment)]
    lines += words.attached_lines(experiment) if experiment.samples else []
    if not experiment.trains:
        return [
            *lines,
            f"{experiment.kind:<14}on the first node of component 0; {words.evaluation_line(experiment)}",
        ]
    if experiment.kind == "rl":
        more = num_env_nodes(experiment)
        beside = f", workers of its environments on {more} more" if more else ""
        lines.append(f"orchestrator  on the first node of component 0{beside}; {words.orchestrator_line(experiment)}")
    if experiment.kind == "sft":
        lines += [*words.evaluation_lines(experiment), f"data          {words.data_line(experiment)}"]
    ranks = next(group for group in plan.placement.groups if group.role == "trainer")
    num_ranks = experiment.trainer.num_ranks
    lines.append(
        f"trainer       {experiment.trainer.launcher}, {num_ranks} FSDP2 rank{'s' * (num_ranks > 1)}"
        f"{experiment.trainer.parallel_dims.suffix} on "
        f"{_span([ranks], ranks.num_nodes)}, {ranks.processes_per_node} a node; {_gpus([ranks])}; "
        f"micro-batches of {experiment.micro_batch_tokens} tokens{words.looks(experiment)}"
    )
    if plan.placement.spares:
        lines.append(f"spare         {len(plan.placement.spares)} node(s) for the server of a lost one")
    if (elastic := experiment.slurm.elastic) is not None and plan.placement.elastic is not None:
        asked = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in plan.placement.elastic.items())
        count = f"up to {elastic.servers} more server(s)"
        lines.append(f"elastic       {count}, each a one-node job that comes and goes: {asked or 'no options'}")
    return lines


def _engine_line(plan: Plan, role: EngineRole) -> str:
    servers, places = servers_of(plan.experiment, role), [g for g in plan.placement.groups if g.role == role]
    first = places[0]
    nodes = {(g.component, g.first_node + i) for g in places for i in range(g.num_nodes)}
    span = f", each over {first.num_nodes} nodes" if first.num_nodes > 1 else ""
    if span and across_nodes(plan.experiment, role) == "engine_group":
        span += " (one vLLM group)"
    what = f"{len(places)} {engines_title(servers)} server(s){words.of_model(served_by(plan.experiment, role), role)}"
    how = f"data parallel {first.dp_size} x {words.split_of(servers)}"
    return f"{role:<14}{what} on {_span(places, len(nodes))}, {how}{span}; {_gpus(places)}"


def _span(groups: Sequence[RoleGroup], count: int) -> str:
    first = min(group.first_node for group in groups)
    last = max(group.first_node + group.num_nodes for group in groups) - 1
    where = f"node {first}" if first == last else f"nodes {first}-{last}"
    return f"{count} node{'s' if count > 1 else ''} ({where} of component {groups[0].component})"


def _gpus(groups: Sequence[RoleGroup]) -> str:
    on_gpus = groups[0].device == "cuda"
    sets = list(dict.fromkeys(group.gpus or () for group in groups))
    if sets == [()]:
        return "cuda: GPUs that are not here" if on_gpus else "cpu: no GPU is asked for"
    shown = "GPUs " + " | ".join(index_ranges(gpus) for gpus in sets[:8]) + (" ..." if len(sets) > 8 else "")
    return f"cuda: {shown}" if on_gpus else f"cpu: {shown} are asked for and left alone"


def _memory_lines(plan: Plan) -> list[str]:
    experiment, memory = plan.experiment, plan.memory
    if memory.trainer_gib is None and (experiment.trains or memory.engines.get("inference") is None):
        return ["memory       not estimated: the model's config.json is not here, or of an unknown kind"]
    of = {role: f" of {size:.0f}" if size else "" for role, size in memory.gpu_gib.items()}
    lines = ["memory       estimates, GiB a GPU"]
    if memory.trainer_gib is not None:
        parts = ", ".join(f"{name} {value:.2g}" for name, value in memory.trainer_gib.items())
        lines.append(f"  trainer       {sum(memory.trainer_gib.values()):.1f}{of.get('trainer', '')}: {parts}")
        if plan.micro_batch is not None:
            lines.append(f"  micro-batch   {plan.micro_batch.words()}")
        if not experiment.model.lora:
            last = "with a step's last micro-batch, and whole until then"
            how = last if memory.defers_sync else "with every micro-batch"
            lines.append(f"  gradients     are reduced and scattered {how} (trainer.no_sync)")
    for role, engine in memory.engines.items():
        if engine is None:
            continue
        text = f"weights {engine.weights_gib:.2g}, {engine.token_bytes} bytes of KV cache a token"
        if engine.kv_gib is not None and engine.max_tokens is not None:
            samples = engine.max_tokens / served_by(experiment, role).max_model_len
            text += f": {max(0.0, engine.kv_gib):.1f} GiB are left, {samples:.0f} samples of the longest kind at once"
        lines.append(f"  {'engine' if role == 'inference' else role:<14}{text}")
    return lines


def _checkpoint_lines(plan: Plan) -> list[str]:
    ckpt, speed = plan.experiment.ckpt, plan.pace
    if is_parent(plan.experiment):
        return [f"checkpoints  {words.child_checkpoints(plan.experiment)}"]
    if not plan.experiment.trains:
        return ["episodes     each is on disk when it ends: a later attempt plays those that are missing"]
    if ckpt is None:
        return ["checkpoints  OFF: an attempt that ends leaves nothing to come back to (--ckpt switches them on)"]
    resume = f", resumes at {ckpt.resume_step}" if ckpt.resume_step is not None else ""
    every = "as often as costs least" if ckpt.interval == "auto" else f"every {ckpt.interval} steps"
    return [
        f"checkpoints  {every}{resume}; a save takes about {in_seconds(speed.save_s)} ({speed.save_from}) and holds "
        f"training up for {in_seconds(speed.stall_s)}",
        *(f"             {line}" for line in interval_lines(ckpt.interval, plan.interval, speed)),
    ]


def _finding_lines(plan: Plan) -> list[str]:
    shown = [finding for finding in plan.findings if finding.severity != "info"]
    if not shown:
        return ["lint         clean"]
    return ["lint", *(f"  {f.severity} {f.code} {f.key or ''}: {f.message}" for f in shown)]


def _count(number: int) -> str:
    for size, unit in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
