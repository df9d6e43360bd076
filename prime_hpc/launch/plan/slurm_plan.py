"""The plan of a job, through Slurm or on this machine: one tree of plain values that `--json` prints and `plan_text`
puts in words."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import ENGINE_ROLES, EngineRole, engine_roles, served_by, servers_of
from prime_hpc.config.run_files import JOB_SBATCH
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import load_site
from prime_hpc.inference.backend import engines_title
from prime_hpc.launch.estimate.memory import ModelFacts, engine_memory, read_model, trainer_gib, whole_gradient_bytes
from prime_hpc.launch.estimate.micro_batch import MicroBatch, with_micro_batch
from prime_hpc.launch.estimate.step_time import Pace, pace
from prime_hpc.launch.lint.network_rules import network_facts, network_line
from prime_hpc.launch.plan.interval import interval_facts, interval_lines
from prime_hpc.launch.plan.local_plan import (
    attached_lines,
    child_checkpoints,
    data_line,
    evaluation_line,
    evaluation_lines,
    launcher,
    of_model,
    orchestrator_line,
    place_here,
    ports_here,
    resolve_launch,
    runs_line,
    split_of,
    steps_line,
)
from prime_hpc.launch.plan.restart_text import restart_texts
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.options import known_partitions, num_env_nodes, resolve
from prime_hpc.slurm.placement import Placement, RoleGroup, across_nodes, choose_layout, place_slurm, placed_roles
from prime_hpc.slurm.script import job_name, restart_mode
from prime_hpc.slurm.times import parse_time_s
from prime_hpc.store.child_runs import PREFIX
from prime_hpc.store.tinker_files import adapters_root


def make_plan(experiment: Experiment) -> dict[str, Any]:
    """Return the plan of a job where `submit` would start it. Raises ConfigError."""
    if resolve_launch(experiment) == "local":
        return local_plan(experiment)
    return slurm_plan(experiment, load_site(experiment.slurm.site))


def slurm_plan(experiment: Experiment, site: SiteConfig) -> dict[str, Any]:
    """Everything that is decided before a Slurm job, and what it is estimated to need.

    Raises:
        ConfigError: the job cannot be placed.
    """
    experiment, micro_batch = with_micro_batch(experiment, site)
    placement = place_slurm(experiment, site)
    how = restart_mode(experiment, site, placement)
    return _tree(experiment, site, placement, choose_layout(experiment, site)[1], how, micro_batch)


def local_plan(experiment: Experiment) -> dict[str, Any]:
    """Return the same of a job on this machine."""
    experiment, micro_batch = with_micro_batch(experiment.model_copy(update={"launch": "local"}), None)
    placement, why = place_here(experiment)
    return _tree(experiment, load_site(experiment.slurm.site), placement, why, "off", micro_batch)


def _tree(
    experiment: Experiment,
    site: SiteConfig,
    placement: Placement,
    why: str,
    how: Literal["requeue", "successor", "off"],
    micro_batch: MicroBatch | None,
) -> dict[str, Any]:
    from prime_hpc.launch.lint.lint import lint

    facts = read_model(experiment.model.name)
    trainer_nodes = next((g.num_nodes for g in placement.groups if g.role == "trainer"), 1)
    speed = pace(experiment, facts, trainer_nodes)
    run_dir = experiment.run_dir.resolve()
    here = placement.layout == "local"
    return {
        "launch": "local" if here else "slurm",
        "name": experiment.name,
        "kind": experiment.kind,
        "job_name": job_name(experiment),
        "site": site.name,
        "layout": placement.layout,
        "layout_why": why,
        "num_nodes": placement.num_nodes,
        "components": [
            {"index": c.index, "name": c.name, "nodes": c.num_nodes, "options": c.options} for c in placement.components
        ],
        "roles": [_group(experiment, group) for group in placement.groups],
        "spares": list(placement.spares),
        "network": network_facts(experiment, site, placement)
        | ({"server_ports": ports_here(experiment)} if here else {}),
        "restart": {"how": how, "signal_lead_s": experiment.slurm.restart.signal_lead_s}
        | {"events": restart_texts(experiment, site, placement, how)},
        "checkpoints": _checkpoints(experiment, site, placement, speed),
        "model": _model(experiment, facts),
        "memory": _memory(experiment, facts, None if here else site),
        "micro_batch": {"tokens": experiment.micro_batch_tokens, "chosen": micro_batch is not None}
        | {"words": micro_batch.words() if micro_batch is not None else None},
        "pace": {"step_s": speed.step_s, "step_from": speed.step_from, "save_s": speed.save_s}
        | {"stall_s": speed.stall_s, "save_from": speed.save_from, "startup_s": site.startup_s},
        "paths": {
            "run": str(run_dir),
            "script": None if here else str(run_dir / JOB_SBATCH),
            "log": str(run_dir / "logs" / ("submitit" if here else "slurm-<job id>.out")),
            "checkpoints": _checkpoint_folder(experiment, run_dir),
        },
        "findings": [finding.as_dict() for finding in lint(experiment, site)],
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


def _checkpoints(experiment: Experiment, site: SiteConfig, placement: Placement, speed: Pace) -> dict[str, Any]:
    ckpt = experiment.ckpt
    limits = [_limit_s(component.options) for component in placement.components]
    walltime_s = min((seconds for seconds in limits if seconds), default=None)
    facts = interval_facts(
        experiment, site, speed, placement.num_nodes, walltime_s=walltime_s, in_job=placement.layout != "local"
    )
    return {
        "on": ckpt is not None,
        "interval": ckpt.interval if ckpt else None,
        "resume_step": None if ckpt is None or ckpt.resume_step is None else str(ckpt.resume_step),
        **facts,
    }


def _limit_s(options: dict[str, Any]) -> int | None:
    try:
        return parse_time_s(str(options["time"])) if "time" in options else None
    except ConfigError:
        return None  # lint has said so


def _model(experiment: Experiment, facts: ModelFacts | None) -> dict[str, Any]:
    return {
        "name": experiment.model.name,
        "dtype": experiment.model.dtype,
        "num_params": facts.num_params if facts else None,
        "context": facts.context if facts else None,
    }


def _memory(experiment: Experiment, facts: ModelFacts | None, site: SiteConfig | None) -> dict[str, Any]:
    """Estimates for one GPU of each role; None where the model is not known.

    Args:
        experiment: the run.
        facts: of its model.
        site: says how large GPUs are; None: this machine, whose are looked at when the job starts.
    """
    gpu_gib: dict[str, float | None] = {}
    for role in placed_roles(experiment):
        found = known_partitions(resolve(role, experiment, site).partitions, site) if site is not None else ()
        sizes = [part.gpu_memory_gib for part in found]
        gpu_gib[role] = min((size for size in sizes if size is not None), default=None)
    trained = facts if experiment.trains else None
    parts = trainer_gib(experiment, trained) if trained is not None else None
    whole = whole_gradient_bytes(experiment, trained) if trained is not None else None
    result: dict[str, Any] = {
        "trainer_gib": None if parts is None else {name: round(value, 3) for name, value in parts.items()},
        "no_sync": None if whole is None else experiment.trainer.defers_sync(whole),
        "engine": None,
        "gpu_gib": gpu_gib,
    }
    for role in engine_roles(experiment):
        view = served_by(experiment, role)
        served = read_model(view.model.name)
        memory = engine_memory(view, served, gpu_gib[role]) if served is not None else None
        result["engine" if role == "inference" else "teacher_engine"] = memory and {
            "weights_gib": round(memory.weights_gib, 3),
            "kv_gib": None if memory.kv_gib is None else round(memory.kv_gib, 3),
            "kv_bytes_per_token": memory.token_bytes,
            "kv_tokens": memory.max_tokens,
        }
    return result


def plan_text(experiment: Experiment, plan: dict[str, Any]) -> str:
    """Return the plan for people."""
    params = plan["model"]["num_params"]
    counted = f", {_count(params)} parameters" if params else ""
    many, here = is_parent(experiment), plan["launch"] == "local"
    lines = [
        f"experiment   {plan['name']} ({plan['kind']})",
        "launch       " + (launcher() if here else f"Slurm job {plan['job_name']!r}, site profile {plan['site']}"),
        f"model        {plan['model']['name']} ({plan['model']['dtype']}{counted})",
        f"runs         {runs_line(experiment)}" if many else f"steps        {steps_line(experiment)}",
        f"layout       {plan['layout']}: {plan['layout_why']}",
        f"components   {plan['num_nodes']} node{'s' if plan['num_nodes'] > 1 else ''} in all",
        *(f"  {line}" for line in _component_lines(plan)),
        "roles",
        *(f"  {line}" for line in _role_lines(experiment, plan)),
        "network      " + network_line(plan["network"], is_local=here),
        *_memory_lines(experiment, plan),
        *_checkpoint_lines(experiment, plan),
        f"restart      {plan['restart']['how']}",
        *(f"  {event:<20}{words}" for event, words in plan["restart"]["events"].items()),
        "paths",
        *(f"  {name:<20}{path}" for name, path in plan["paths"].items() if path),
        *_finding_lines(plan["findings"]),
    ]
    return "\n".join(lines) + "\n"


def show_dry_run(experiment: Experiment, plan: dict[str, Any], script: str | None, as_json: bool) -> None:
    """Print what `submit` would start: the plan, and the script of a Slurm job."""
    if as_json:
        print(json.dumps({"dry_run": True, "plan": plan, "script": script}, indent=2, default=str))
    else:
        print(plan_text(experiment, plan), end="" if script is None else "\n")
        print(script or "", end="")


def _component_lines(plan: dict[str, Any]) -> list[str]:
    lines = []
    for component in plan["components"]:
        options = ", ".join(
            name if value is True else f"{name} {value}" for name, value in component["options"].items()
        )
        count = f"{component['nodes']} node{'s' if component['nodes'] > 1 else ''}"
        default = "no GPU" if plan["launch"] == "local" else "the partition defaults"
        lines.append(f"{component['index']} {component['name']:<14}{count:<12}{options or default}")
    return lines


def _role_lines(experiment: Experiment, plan: dict[str, Any]) -> list[str]:
    lines = [_engine_line(experiment, role, plan) for role in engine_roles(experiment)]
    lines += attached_lines(experiment) if experiment.samples else []
    if not experiment.trains:
        return [*lines, f"{experiment.kind:<14}on the first node of component 0; {evaluation_line(experiment)}"]
    if plan["kind"] == "rl":
        more = num_env_nodes(experiment)
        beside = f", workers of its environments on {more} more" if more else ""
        lines.append(f"orchestrator  on the first node of component 0{beside}; {orchestrator_line(experiment)}")
    trainer = next(role for role in plan["roles"] if role["role"] == "trainer")
    if plan["kind"] == "sft":
        lines += [*evaluation_lines(experiment), f"data          {data_line(experiment)}"]
    lines.append(
        f"trainer       {trainer['launcher']}, {experiment.trainer.num_ranks} FSDP2 ranks"
        f"{experiment.trainer.parallel_dims.suffix} on "
        f"{_span([trainer], trainer['nodes'])}, {trainer['ranks_per_node']} a node; {_gpus([trainer])}; "
        f"micro-batches of {plan['micro_batch']['tokens']} tokens"
    )
    if plan["spares"]:
        lines.append(f"spare         {len(plan['spares'])} node(s) for the server of a lost one")
    return lines


def _engine_line(experiment: Experiment, role: EngineRole, plan: dict[str, Any]) -> str:
    """One group of engines."""
    view = served_by(experiment, role)
    servers = [one for one in plan["roles"] if one["role"].startswith(f"{role}[")]
    first = servers[0]
    nodes = {(s["component"], s["first_node"] + i) for s in servers for i in range(s["nodes"])}
    how = f"data parallel {first['data_parallel_size']} x {split_of(servers_of(experiment, role))}"
    span = f", each over {first['nodes']} nodes" if first["nodes"] > 1 else ""
    if span and across_nodes(experiment, role) == "engine_group":
        span += " (one vLLM group)"
    what = f"{len(servers)} {engines_title(servers_of(experiment, role))} server(s){of_model(view, role)}"
    return f"{role:<14}{what} on {_span(servers, len(nodes))}, {how}{span}; {_gpus(servers)}"


def _span(roles: list[dict[str, Any]], count: int) -> str:
    first = min(role["first_node"] for role in roles)
    last = max(role["first_node"] + role["nodes"] for role in roles) - 1
    where = f"node {first}" if first == last else f"nodes {first}-{last}"
    return f"{count} node{'s' if count > 1 else ''} ({where} of component {roles[0]['component']})"


def _gpus(roles: list[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(tuple(role["gpus"] or ()) for role in roles))
    if sets == [()]:
        return "cuda: GPUs that are not here" if roles[0]["device"] == "cuda" else "cpu: no GPU is asked for"
    shown = "GPUs " + " | ".join(index_ranges(gpus) for gpus in sets[:8]) + (" ..." if len(sets) > 8 else "")
    return f"cuda: {shown}" if roles[0]["device"] == "cuda" else f"cpu: {shown} are asked for and left alone"


def _memory_lines(experiment: Experiment, plan: dict[str, Any]) -> list[str]:
    memory = plan["memory"]
    if memory["trainer_gib"] is None and (experiment.trains or memory["engine"] is None):
        return ["memory       not estimated: the model's config.json is not here, or of an unknown kind"]
    of = {role: f" of {size:.0f}" if size else "" for role, size in memory["gpu_gib"].items()}
    lines = ["memory       estimates, GiB a GPU"]
    if memory["trainer_gib"] is not None:
        parts = ", ".join(f"{name} {value:.2g}" for name, value in memory["trainer_gib"].items())
        size = sum(memory["trainer_gib"].values())
        lines.append(f"  trainer       {size:.1f}{of.get('trainer', '')}: {parts}")
        if plan["micro_batch"]["chosen"]:
            lines.append(f"  micro-batch   {plan['micro_batch']['words']}")
        if not experiment.model.lora:
            how = (
                "with a step's last micro-batch, and whole until then"
                if memory["no_sync"]
                else "with every micro-batch"
            )
            lines.append(f"  gradients     are reduced and scattered {how} (trainer.no_sync)")
    for role in engine_roles(experiment):
        engine = memory["engine" if role == "inference" else "teacher_engine"]
        if not engine:
            continue
        text = f"weights {engine['weights_gib']:.2g}, {engine['kv_bytes_per_token']} bytes of KV cache a token"
        if engine["kv_tokens"] is not None:
            samples = engine["kv_tokens"] / served_by(experiment, role).max_model_len
            text += (
                f": {max(0.0, engine['kv_gib']):.1f} GiB are left, {samples:.0f} samples of the longest kind at once"
            )
        lines.append(f"  {'engine' if role == 'inference' else 'teacher':<14}{text}")
    return lines


def _checkpoint_lines(experiment: Experiment, plan: dict[str, Any]) -> list[str]:
    ckpt, pace_ = plan["checkpoints"], plan["pace"]
    if is_parent(experiment):
        return [f"checkpoints  {child_checkpoints(experiment)}"]
    if not experiment.trains:
        return ["episodes     each is on disk when it ends: a later attempt plays those that are missing"]
    if not ckpt["on"]:
        return ["checkpoints  OFF: an attempt that ends leaves nothing to come back to (--ckpt switches them on)"]
    resume = f", resumes at {ckpt['resume_step']}" if ckpt["resume_step"] else ""
    every = "as often as costs least" if ckpt["interval"] == "auto" else f"every {ckpt['interval']} steps"
    return [
        f"checkpoints  {every}{resume}; a save takes about {pace_['save_s']:.3g} s ({pace_['save_from']}) and holds "
        f"training up for {pace_['stall_s']:.2g} s",
        *(f"             {line}" for line in interval_lines(ckpt["interval"], ckpt, pace_)),
    ]


def _finding_lines(findings: list[dict[str, Any]]) -> list[str]:
    shown = [f for f in findings if f["severity"] != "info"]
    if not shown:
        return ["lint         clean"]
    return ["lint", *(f"  {f['severity']} {f['code']} {f['key'] or ''}: {f['message']}" for f in shown)]


def _count(number: int) -> str:
    for size, unit in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
