"""Lint of files that a job would look for and not find: on nodes without internet, or after the site's purge."""

import shlex
import time
from collections.abc import Iterator

from prime_hpc.launch.fetch.needs import needs_of
from prime_hpc.launch.fetch.presence import job_environ, look, missing_of
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Subject, rule
from prime_hpc.launch.purge import first_purge, warn_s
from prime_hpc.slurm.containers import stated_paths
from prime_hpc.slurm.times import parse_duration
from prime_hpc.store.model.config import is_on


@rule(*EVERY, slurm=True)
def without_internet(subject: Subject) -> Iterator[Finding]:
    """Models, data sets and benchmarks of the hub that are not on disk, where the nodes cannot fetch them.

    No error: the job can wait in the queue while they are fetched, and who lints need not be on the cluster.
    """
    stated = {**subject.site.env, **subject.experiment.slurm.env}
    if subject.site.internet is False:
        why = f"the nodes of the site profile {subject.site.name!r} reach no internet"
    elif is_on(stated, "HF_HUB_OFFLINE"):
        why = "the job's environment keeps the nodes off the hub (HF_HUB_OFFLINE)"
    else:
        return
    for one in missing_of(subject.experiment, job_environ(subject.experiment, subject.site)):
        if one.can_fetch and not one.need.data:  # those are `env_rules.benchmarks`
            yield Finding(
                "PH329",
                "warning" if subject.site.internet is False else "info",
                one.need.key,
                f"{one.need.kind} {one.need.name} is not all in {one.path} ({', '.join(one.lacks)}), and {why}",
                "`prime-hpc fetch FILE` on a login node brings it there",
            )


@rule(*EVERY, slurm=True)
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
        keep = f"`prime-hpc archive {shlex.quote(run_dir.name)} DESTINATION` keeps the run" if is_run else ""
        again = f"copy {path} to a place that is not purged, or bring it again just before (`prime-hpc fetch FILE`)"
        yield Finding.warning(
            "PH332",
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
