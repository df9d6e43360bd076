"""The job's behaviour after failures in plain words: the policy of `slurm.restart` for one plan."""

from prime_hpc.config import Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import EngineRole, engine_roles
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.slurm.options import known_partitions, split_names
from prime_hpc.slurm.placement import Placement
from prime_hpc.supervisor.attempt.bad_nodes import are_avoided


def restart_texts(experiment: Experiment, site: SiteConfig, placement: Placement, how: str) -> dict[str, str]:
    """Event -> what then becomes of the job.

    Args:
        placement: layout and spares decide what a lost node means.
        how: `requeue`, `successor` or `off`.
    """
    restart = experiment.slurm.restart
    saved = "the newest checkpoint" if experiment.ckpt else "step 1 (checkpoints are off)"
    if not experiment.trains:
        saved = "the episodes that are on disk"
    if is_parent(experiment):
        saved = "each run's newest checkpoint"
    if experiment.trainer.tinker is not None:
        saved = "what is saved"
    back = {
        "requeue": f"the same job is requeued and goes on from {saved}",
        "successor": f"the successor, queued beforehand with afternotok, goes on from {saved}",
        "off": "the job ends; `prime-hpc resume` goes on by hand",
    }[how]
    if placement.layout == "local":
        return {"crash": back}
    save = "everyone saves and " if experiment.ckpt or is_parent(experiment) else ""
    words = {
        "time limit": f"Slurm warns {restart.signal_lead_s} s before it: {save}{back}",
        "preemption": _preemption(experiment, site, placement, how, back, saved),
        **{f"lost {role} node": _lost_server(experiment, role, placement, back) for role in engine_roles(experiment)},
        f"lost {'trainer' if experiment.trains else 'first'} node": f"the attempt ends; {back}",
        "crash": back,
        "held job": "a node whose prolog failed leaves the job held: `prime-hpc status` says so, `scontrol release` "
        "lets it go on",
    }
    if how != "off" and restart.in_place and not is_parent(experiment):
        inside = f"the next attempt begins inside the job, from {saved}"
        if engine_roles(experiment):
            inside = f"a server is started again alone; of another role {inside}, while the servers serve on"
        words["crash"] = f"{inside}; the second time in a row that nothing new was saved {back}"
        if placement.spares and experiment.trains:
            words["lost trainer node"] = f"a spare node takes its place inside the job; of the batch host, {back}"
    if how != "off":
        idle, attempts = restart.max_crashes + 1, restart.max_attempts
        words["crash"] += f"; not after {idle} attempts in a row that saved nothing new, nor after {attempts} attempts"
    if are_avoided(experiment, site) and how != "off":
        words["bad node"] = f"left out of the next attempt; forgotten after {restart.bad_node_days:g} days"
    return words


def _preemption(experiment: Experiment, site: SiteConfig, placement: Placement, how: str, back: str, saved: str) -> str:
    names = split_names(str(placement.components[0].options.get("partition", "")))
    kinds = {part.preempt for part in known_partitions(names, site)}
    if kinds == {"off"}:
        return "jobs of this partition are not preempted"
    if kinds == {"suspend"}:
        return "all processes are stopped and go on later where they were; the time does not count"
    if "cancel" in kinds and how == "requeue":
        return "the job is cancelled, and requeue does nothing then: `prime-hpc resume` goes on by hand"
    if how == "off":
        return back
    told = "" if kinds else " (the site profile does not say how this partition preempts)"
    return f"SIGTERM, then {back}{told}"


def _lost_server(experiment: Experiment, role: EngineRole, placement: Placement, back: str) -> str:
    """Only a homogeneous job with servers on other nodes survives the loss of one."""
    servers = [g for g in placement.groups if g.role == role]
    if not placement.abilities.survives_lost_node:
        return f"Slurm ends a het job that loses a node; {back}"
    others = {(g.component, g.first_node) for g in placement.groups if g.role != role}
    if placement.num_nodes == 1 or any((g.component, g.first_node) in others for g in servers):
        whose = "the trainer's node too" if experiment.trains else "where the episodes are played"
        return f"it is {whose}; {back}"
    if len({group.first_node for group in servers}) == 1:
        if servers[0].num_nodes <= len(placement.spares):
            return f"no server is elsewhere: they start on a spare node, and the trainer waits; without one, {back}"
        return f"no server is elsewhere: the attempt ends; {back}"
    retry_s = experiment.slurm.restart.replica_retry_s
    where = "on its nodes" if servers[0].num_nodes > 1 else "on its node, then as a job of its own"
    where = f"{'on a spare node, else ' if placement.spares else ''}{where}, tried every {retry_s:.0f} s"
    return f"the trainer goes on with the other servers; the lost one's comes back {where}"
