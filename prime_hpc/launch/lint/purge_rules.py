"""Lint of what the site's purge of its scratch would delete before the job has read it."""

import time
from collections.abc import Iterator

from prime_hpc.launch.fetch.needs import needs_of
from prime_hpc.launch.fetch.presence import job_environ, look
from prime_hpc.launch.lint.lint_finding import Finding, Subject
from prime_hpc.launch.purge import first_purge, warn_s
from prime_hpc.slurm.containers import stated_paths
from prime_hpc.slurm.times import parse_duration


def before_a_purge(subject: Subject) -> Iterator[Finding]:
    """Files of the experiment, or of an earlier attempt of its run, that are deleted before the job may be over."""
    site, experiment = subject.site, subject.experiment
    if site.purge_days is None:
        return
    run_dir = experiment.run_dir.absolute()
    over = time.time() + _longest_s(subject) + warn_s(site)
    places = {key: path for key, path in stated_paths(experiment, site, run_dir).items() if key != "site.node_local"}
    environ = job_environ(experiment, site)
    for need in needs_of(experiment):
        found = look(need, environ)
        if found.is_there and found.path is not None:
            places.setdefault(need.key, found.path)
    for key, path in places.items():
        purge = first_purge(path, site)
        if purge is None or not purge.is_before(over):
            continue
        is_run = key == "output_dir"
        keep = f"`prime-hpc archive {run_dir.name} DESTINATION` keeps the run" if is_run else ""
        again = f"copy {path} to a place that is not purged, or bring it again just before (`prime-hpc fetch FILE`)"
        yield Finding(
            "PH332",
            "warning",
            key,
            f"{purge.path} is purged from {purge.date} on ({purge.rule}), before the job may be over",
            keep or again,
        )


def _longest_s(subject: Subject) -> float:
    """Time limit of the job, seconds; 0 where none is known."""
    stated = subject.experiment.slurm.time or subject.site.options.time
    try:
        return float(parse_duration(stated) or 0.0) if stated else 0.0
    except ValueError:
        return 0.0  # another rule says so


CHECKS = (before_a_purge,)
