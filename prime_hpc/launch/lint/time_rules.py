"""Lint of times: limits that Slurm reads and grants, in which the job gets anywhere and Slurm's warning can be used."""

from collections.abc import Iterator

from prime_hpc.config import ConfigError
from prime_hpc.config.engine_groups import ready_timeout_s
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.step_time import pace
from prime_hpc.launch.lint.lint_finding import EVERY, TRAINING, Finding, Subject, rule
from prime_hpc.slurm.options import key_of, split_names
from prime_hpc.slurm.placement import Component, Placement
from prime_hpc.slurm.script import restart_mode
from prime_hpc.slurm.times import format_time, parse_time_s

_STEPS = 2
"""Steps that an attempt of the job should manage."""


@rule(*EVERY, slurm=True)
def limits(subject: Subject) -> Iterator[Finding]:
    """Check the time limit of each role by itself."""
    for role, asked in subject.roles.items():
        key = key_of(role, "time", subject.experiment)
        text = asked.options.get("time")
        if text is None:
            yield Finding.warning(
                "PH307",
                key,
                "no time limit is stated: the partition's default holds, and backfill cannot use gaps",
                "state slurm.time",
            )
            continue
        seconds = _seconds(str(text))
        if isinstance(seconds, str):
            yield Finding.error("PH304", key, seconds, "for instance 12:00:00 or 2-00:00:00, in quotes")
            continue
        if seconds == 0:
            yield Finding.error(
                "PH305", key, "a time of zero: Slurm takes it for no limit at all", "state how long it may run"
            )
        yield from _against_partitions(subject, asked.partitions, seconds, key)
        least = asked.options.get("time-min")
        shortest = _seconds(str(least)) if least is not None else None
        if isinstance(shortest, str):
            yield Finding.error("PH304", key_of(role, "time_min", subject.experiment), shortest, "as for slurm.time")
        elif shortest is not None and seconds is not None and shortest > seconds:
            yield Finding.error(
                "PH304",
                key_of(role, "time_min", subject.experiment),
                f"time_min = {least} is above time = {text}",
                "a shorter time_min",
            )


def _seconds(text: str) -> int | str | None:
    """Seconds, None for no limit, or what is wrong."""
    try:
        return parse_time_s(text)
    except ConfigError as error:
        return error.problems[0].message


def _against_partitions(subject: Subject, names: tuple[str, ...], seconds: int | None, key: str) -> Iterator[Finding]:
    for name in names:
        part = subject.site.partitions.get(name)
        longest = _seconds(part.max_time) if part is not None and part.max_time else None
        if not isinstance(longest, int):
            continue
        if seconds is None or seconds > longest:
            asked = "no limit" if seconds is None else format_time(seconds)
            yield Finding.error(
                "PH306",
                key,
                f"{asked} is above the longest time of {name}, {format_time(longest)}: the job would wait for ever",
                f"at most {format_time(longest)}; the job comes back by itself (slurm.restart)",
            )


def _shortest_limit_s(subject: Subject) -> int | None:
    """Return the job's time limit: the shortest of its roles'; None: none, or none that can be read."""
    found = [_seconds(str(asked.options["time"])) for asked in subject.roles.values() if "time" in asked.options]
    return min((seconds for seconds in found if isinstance(seconds, int) and seconds > 0), default=None)


@rule(*EVERY, slurm=True)
def warned_in_time(subject: Subject) -> Iterator[Finding]:
    """Check that the job has begun when Slurm warns of its end, and that a role which hangs is named before it."""
    limit, lead = _shortest_limit_s(subject), subject.experiment.slurm.restart.signal_lead_s
    ready = max(subject.experiment.supervisor.start_timeout_s, ready_timeout_s(subject.experiment))
    if limit is not None and lead >= limit:
        yield Finding.error(
            "PH310",
            "slurm.restart.signal_lead_s",
            f"Slurm's warning {lead} s before the end of a job of {limit} s comes before it begins",
            "a shorter signal_lead_s, or a longer slurm.time",
        )
    elif limit is not None and ready >= limit:
        yield Finding.info(
            "PH322",
            "supervisor.start_timeout_s",
            f"roles may take {ready:.0f} s to become ready, longer than the time limit of {limit} s",
            "shorter supervisor.start_timeout_s and inference.ready_timeout_s name a role that hangs",
        )


@rule(*TRAINING, slurm=True)
def attempt_length(subject: Subject) -> Iterator[Finding]:
    """Check that a time limit holds an attempt: start-up, two steps, a save."""
    limit = _shortest_limit_s(subject)
    experiment, restart = subject.experiment, subject.experiment.slurm.restart
    speed = pace(experiment, subject.facts, subject.num_trainer_nodes())
    needs_save = experiment.ckpt is not None
    save_s = speed.save_s if needs_save else 0.0
    if limit is not None and restart.signal_lead_s >= limit:
        return  # `warned_in_time` says so
    if needs_save and restart.how != "off" and restart.signal_lead_s < save_s + speed.step_s:
        yield Finding.warning(
            "PH310",
            "slurm.restart.signal_lead_s",
            f"Slurm's warning comes {restart.signal_lead_s} s before the end; the step under way ({speed.step_s:.0f} "
            f"s, {speed.step_from}) and a save ({save_s:.0f} s, {speed.save_from}) may take longer",
            f"at least {int(1.5 * (save_s + speed.step_s))}",
        )
    if limit is None:
        return
    startup = subject.site.startup_s
    need = startup + _STEPS * speed.step_s + save_s
    if limit < need:
        measured = speed.step_from != "assumed" or limit < startup
        yield Finding(
            "PH311",
            "error" if measured and "startup_s" in subject.site.model_fields_set else "warning",
            "slurm.time",
            f"a time limit of {format_time(limit)} is shorter than start-up ({startup:.0f} s by the site profile), "
            f"{_STEPS} steps of {speed.step_s:.0f} s ({speed.step_from}) and a save of {save_s:.0f} s "
            f"({speed.save_from if needs_save else 'checkpoints are off'}): no attempt of the job would get anywhere",
            f"at least {format_time(2 * need)}, or a smaller startup_s in the site profile if the site is faster",
        )


@rule(*EVERY, slurm=True)
def coming_back(subject: Subject) -> Iterator[Finding]:
    """Requeue where it is not allowed or does nothing."""
    experiment, site = subject.experiment, subject.site
    if subject.placement is None:
        return
    how = restart_mode(experiment, site, subject.placement)
    if how == "off":
        yield from _staying_away(subject.placement, site)
    if how != "requeue":
        return
    if not site.requeue:
        yield Finding.error(
            "PH309",
            "slurm.restart.how",
            f"the site {site.name!r} does not allow jobs to be requeued",
            "successor, or auto",
        )
    names = [name for component in subject.placement.components for name in _named(component)]
    for name in dict.fromkeys(names):
        part = site.partitions.get(name)
        if part is not None and part.preempt == "cancel":
            yield Finding.warning(
                "PH309",
                "slurm.restart.how",
                f"a job that is preempted in {name} is cancelled, not requeued: it would not come back",
                "successor",
            )


def _staying_away(placement: Placement, site: SiteConfig) -> Iterator[Finding]:
    """`restart.how = off`: the job is rendered as one that Slurm must not requeue, and nobody queues another one."""
    names = list(dict.fromkeys(name for component in placement.components for name in _named(component)))
    facts = {name: site.partitions.get(name) for name in names}
    risky = [name for name, part in facts.items() if part is not None and part.preempt in ("requeue", "cancel")]
    if not risky and names and all(part is not None for part in facts.values()):
        return  # nobody is preempted there
    where = f"in {' and '.join(risky)}, where jobs are preempted, it" if risky else "where jobs are preempted, it"
    yield Finding(
        "PH328",
        "warning" if risky else "info",
        "slurm.restart.how",
        f"off: {where} would not come back, nor after its time limit or a lost node",
        "leave it out (auto), or go on by hand with `prime-hpc resume`",
    )


def _named(component: Component) -> tuple[str, ...]:
    return split_names(str(component.options.get("partition", "")))
