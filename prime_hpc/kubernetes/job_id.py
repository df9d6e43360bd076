"""The job id of a run in pods, which Slurm has none of: the name of the run's objects with a mark before it."""

_MARK = "kubernetes:"


def job_of(name: str) -> str:
    """Return the job id of the attempts of a run, by the name of its objects."""
    return f"{_MARK}{name}"


def objects_of(job_id: str | None) -> str | None:
    """Return the name of the objects to which a run's pods belong; None: it has a job of Slurm's, or none."""
    return job_id.removeprefix(_MARK) if job_id is not None and job_id.startswith(_MARK) else None
