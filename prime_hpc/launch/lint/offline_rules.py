"""Lint of what nodes without internet would look for and not find."""

from collections.abc import Iterator

from prime_hpc.launch.fetch.presence import job_environ, missing_of
from prime_hpc.launch.lint.lint_finding import Finding, Subject

_ON = ("1", "on", "yes", "true")


def without_internet(subject: Subject) -> Iterator[Finding]:
    """Models, data sets and benchmarks of the hub that are not on disk, where the nodes cannot fetch them.

    No error: the job can wait in the queue while they are fetched, and who lints need not be on the cluster.
    """
    stated = {**subject.site.env, **subject.experiment.slurm.env}
    if subject.site.internet is False:
        why = f"the nodes of the site profile {subject.site.name!r} reach no internet"
    elif str(stated.get("HF_HUB_OFFLINE", "")).lower() in _ON:
        why = "the job's environment keeps the nodes off the hub (HF_HUB_OFFLINE)"
    else:
        return
    for one in missing_of(subject.experiment, job_environ(subject.experiment, subject.site)):
        if one.can_fetch:
            yield Finding(
                "PH329",
                "warning" if subject.site.internet is False else "info",
                one.need.key,
                f"{one.need.kind} {one.need.name} is not all in {one.path} ({', '.join(one.lacks)}), and {why}",
                "`prime-hpc fetch FILE` on a login node brings it there",
            )


CHECKS = (without_internet,)
