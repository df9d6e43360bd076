"""The checkpoint interval in `plan`: the best one, the one that is set, and what each loses in percent.

The formulas are `store.checkpoint.optimal_interval`'s, the same that `ckpt.interval = auto` goes by inside the run;
here they are fed with what earlier attempts of the run measured (`pace`), with the failures that `attempts.jsonl` of
this run and of its neighbours in the output directory tell, and with the site profile's rate.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.run_files import ATTEMPTS_JSONL
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.epochs import with_expected_steps
from prime_hpc.launch.estimate.step_time import Pace
from prime_hpc.observe.console import in_seconds
from prime_hpc.slurm.times import format_time
from prime_hpc.store.checkpoint.optimal_interval import (
    DAY_S,
    Events,
    expected_loss_percent,
    learn,
    mtbf_s,
    plan_interval,
)
from prime_hpc.store.run_dirs import read_rows

MOST_NEIGHBOURS = 200
"""Runs of the output directory that are looked at."""


def earlier_failures(run_dir: Path, num_nodes: int) -> tuple[Events, int]:
    """Collect the failures of this run's attempts and of its neighbours', as if a job of `num_nodes` nodes had lived
    it.

    Of this run every end without notice counts. Of other runs only lost nodes do: their crashes may be bugs of theirs.
    Returns the events, and how many attempts they are of.
    """
    own = read_rows(run_dir / ATTEMPTS_JSONL)
    events = learn(own)
    failures, seconds, count = events.num_failures, events.seconds, len(own)
    try:
        neighbours = [path for path in sorted(run_dir.parent.iterdir()) if path != run_dir][:MOST_NEIGHBOURS]
    except OSError:
        neighbours = []
    for path in neighbours:
        rows = [row for row in read_rows(path / ATTEMPTS_JSONL) if row.get("job_id") and row.get("ended")]
        for row in rows:
            began, ended = row.get("began"), row["ended"] or 0.0
            hosts = {host for hosts in (row.get("nodes") or {}).values() for host in hosts}
            seconds += max(0.0, ended - (ended if began is None else began)) * (len(hosts) or 1) / num_nodes
            failures += row.get("outcome") == "node_lost"
        count += len(rows)
    return Events(failures, events.num_warned, seconds, events.restart_s), count


def interval_facts(
    experiment: Experiment, site: SiteConfig, speed: Pace, num_nodes: int, *, walltime_s: float | None, in_job: bool
) -> dict[str, Any]:
    """Return the best interval and the one that is set, for `plan --json` and `interval_lines`.
    `in_job`: whether Slurm gives a notice."""
    events, num_attempts = earlier_failures(experiment.run_dir, num_nodes)
    restart = experiment.slurm.restart
    restart_s = events.restart_s if events.restart_s is not None else site.startup_s
    mtbf = mtbf_s(num_nodes, site.failures_per_1000_node_days, events)
    best = plan_interval(
        save_s=speed.stall_s,
        write_s=speed.save_s,
        step_s=speed.step_s,
        mtbf=mtbf,
        restart_s=restart_s,
        walltime_s=walltime_s,
        notice_s=restart.signal_lead_s if in_job and restart.how != "off" else None,
        events=events,
    )
    chosen = experiment.ckpt.interval if experiment.ckpt else None
    most = last = with_expected_steps(experiment).max_steps
    if walltime_s is not None:
        most = max(1, min(most, int(walltime_s / speed.step_s)))
    why, best_loss, best_steps, best_s = best.why, best.loss_percent, best.num_steps, best.interval_s
    if best_steps > most:  # there is no such interval in a run that is shorter
        best_steps, best_s = most, most * speed.step_s
        best_loss = expected_loss_percent(best_s, speed.stall_s, best.mtbf_s, restart_s, speed.save_s)
        why += f"; at most {most} steps: " + ("the run" if most == last else "the time limit")
    steps = chosen if isinstance(chosen, int) else best_steps
    seconds = steps * speed.step_s
    loss = expected_loss_percent(seconds, speed.stall_s, best.mtbf_s, restart_s, speed.save_s)
    source = f"{site.failures_per_1000_node_days:g} failures in 1000 node-days (site profile {site.name})"
    if num_attempts:
        source += f"; {events.num_failures} in {events.seconds / DAY_S:.2g} days of {num_attempts} attempts"
    return {
        "best_interval_s": round(best_s),
        "best_steps": best_steps,
        "best_loss_percent": round(best_loss, 3),
        "set_steps": steps if chosen is not None else None,
        "set_loss_percent": round(loss, 3) if chosen is not None else None,
        "mtbf_s": None if math.isinf(best.mtbf_s) else round(best.mtbf_s),
        "failures_from": source,
        "restart_s": round(restart_s),
        "why": why,
    }


def interval_lines(interval: int | str | None, facts: Mapping[str, Any], speed: Pace) -> Sequence[str]:
    """Return the same for people: what is set first."""
    best = f"{facts['best_steps']} steps ({format_time(facts['best_interval_s'])})"
    if interval == "auto":
        lines = [f"expected loss {facts['set_loss_percent']:.2f} % with one every {best}; measured anew as it runs"]
    else:
        lines = [
            f"expected loss {facts['set_loss_percent']:.2f} %; Young/Daly: {facts['best_loss_percent']:.2f} % with one "
            f"every {best}, which --ckpt.interval auto takes"
        ]
    return [
        *lines,
        f"from {in_seconds(speed.step_s)} a step ({speed.step_from}), {facts['restart_s']} s for a restart, "
        f"{facts['why']}",
        f"failures: {facts['failures_from']}",
    ]
