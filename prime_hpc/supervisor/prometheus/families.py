"""Families that a run tells Prometheus: the supervisor's own, and those of the roles' rows (`observe.metric_table`).

Every sample has the label `run`; the others are named in the tables. `slurm/MONITORING.md` shows them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prime_hpc.observe.metric_names import evaluated
from prime_hpc.observe.metric_table import ORCHESTRATOR, TRAINER, Family, counter, gauge

PREFIX = "prime_hpc_"


RUN = {
    "run_info": gauge("Facts of the run that do not change within an attempt; always 1.", "kind", "attempt", "job_id"),
    "run_state": gauge("1 for the state that the supervisor is in.", "state"),
    "run_step": gauge("Last step of the trainer; of a run that trains nothing its last episode."),
    "run_max_steps": gauge("Step at which the run is complete."),
    "run_stall_seconds": gauge("How long the present step has stood still; 0: it does not."),
    "run_walltime_left_seconds": gauge("Time to the job's end."),
    "run_attempts_ended_total": counter("Attempts that have ended.", "outcome"),
    "run_alarms_total": counter("Alarms that fired in this attempt.", "rule"),
    "run_collected_timestamp_seconds": gauge("When these figures were collected: an old one means files hang."),
    "filesystem_free_bytes": gauge("Space that is left for the user where the run directory is."),
    "filesystem_size_bytes": gauge("Size of the file system of the run directory."),
    "role_state": gauge("1 for the state that a role is in.", "role", "state"),
    "role_restarts_total": counter("How often a role was started again in place.", "role"),
    "process_info": gauge("A role's process that has spoken; always 1.", "role", "index", "host", "pid"),
    "process_step": gauge(
        "Last step that a role's process has told of: a rank but the first every 5 s.", "role", "index"
    ),
    "process_last_word_timestamp_seconds": gauge("When a role's process spoke last.", "role", "index"),
    "process_resident_memory_bytes": gauge("Memory that a role's process holds.", "role", "index"),
    "process_cpu_seconds_total": counter("CPU time that a role's process has used.", "role", "index"),
    "gpu_utilization_ratio": gauge("Share of the last moment in which a GPU computed.", "host", "gpu"),
    "gpu_memory_used_bytes": gauge("Memory of a GPU that is in use.", "host", "gpu"),
    "gpu_memory_size_bytes": gauge("Memory that a GPU has.", "host", "gpu"),
    "gpu_power_watts": gauge("Power that a GPU draws.", "host", "gpu"),
    "server_up": gauge("1: a server has answered with its own figures, which are handed on.", "server"),
}
FAMILIES: dict[str, Family] = {PREFIX + name: family for name, family in (RUN | TRAINER | ORCHESTRATOR).items()}


@dataclass(frozen=True)
class Target:
    """The place of a row's metric: a family, values of its labels, and what it is multiplied with."""

    name: str
    labels: tuple[str, ...] = ()
    scale: float = 1.0


_ROWS: dict[str, dict[str, Target]] = {
    role: {m: Target(name, labels) for name, f in families.items() for m, labels in f.metrics.items()}
    for role, families in (("trainer", TRAINER), ("orchestrator", ORCHESTRATOR))
}
_WORKER = {
    "workers": Target("env_workers"),
    "busy": Target("env_worker_busy_ratio"),
    "memory_gib": Target("env_worker_memory_bytes", (), 2.0**30),
    "in_flight": Target("env_worker_episodes", ("in_flight",)),
    "queued": Target("env_worker_episodes", ("queued",)),
}
_ENV_REWARD = re.compile(r"reward/(.+)/(mean|std)")
_ENV_GROUPS = re.compile(r"groups/(.+)/(in_batch|solved_all|solved_none)")
_ENV_WORKERS = re.compile(r"env_workers/(.+)/([^/]+)")
_NO_METRICS = ("step", "time")


def environments(row: Iterable[str]) -> list[str]:
    """Return the environments, slashes in their names and all, of which a row of the orchestrator has rewards."""
    trained = (found[1] for key in row if (found := _ENV_REWARD.fullmatch(key)))
    return [*trained, *filter(None, map(evaluated, row))]


def target_of(role: str, metric: str, envs: Iterable[str] = ()) -> Target | None:
    """Return the place of a metric of `metrics/<role>.jsonl`; None for a row's step and time.
    `envs`: `environments` of the row: where an environment's name ends, and its own metric's begins."""
    if metric in _NO_METRICS:
        return None
    if metric in _ROWS[role]:
        return _ROWS[role][metric]
    if role == "trainer":
        group, _, name = metric.partition("/")
        if group == "time":
            return Target("trainer_phase_seconds_total", (name,))
        return Target("trainer_part_loss", (name,)) if group == "loss" and name else Target("trainer_other", (metric,))
    if found := _ENV_REWARD.fullmatch(metric):
        return Target("env_reward", found.groups())
    if found := _ENV_GROUPS.fullmatch(metric):
        return Target("env_groups", found.groups())
    if found := _ENV_WORKERS.fullmatch(metric):
        env, figure = found.groups()
        known = _WORKER.get(figure)
        if known is None:
            return Target("env_worker_events_total", (env, figure))
        return Target(known.name, (env, *known.labels), known.scale)
    group, _, rest = metric.partition("/")
    if group in ("env", "eval") and "/" in rest:
        env = max((e for e in envs if rest.startswith(f"{e}/")), key=len, default=rest.partition("/")[0])
        return Target("env_metric" if group == "env" else "env_eval", (env, rest[len(env) + 1 :]))
    return Target("orchestrator_other", (metric,))


def table() -> list[str]:
    """Return the lines of the document's table."""

    def row(name: str, family: Family) -> str:
        labels, metrics = (", ".join(f"`{word}`" for word in words) for words in (family.labels, family.metrics))
        return f"| `{name}` | {family.kind} | {labels} | {metrics} | {family.text} |"

    head = "| metric | kind | labels besides `run` | in `metrics/*.jsonl` | meaning |"
    return [head, "|---|---|---|---|---|", *(row(name, family) for name, family in FAMILIES.items())]
