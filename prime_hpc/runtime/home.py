"""A home directory that this machine does not know: a job's node without `HOME` and without the user."""

import os


def missing_home(error: BaseException) -> str:
    """Say what to do about pathlib's error of a home directory that it does not find; empty for any other error."""
    if not isinstance(error, RuntimeError) or str(error) != "Could not determine home directory.":
        return ""
    if os.environ.get("HOME"):
        return "a path begins with ~NAME, and this machine knows no user of that name: write the path out"
    return (
        f"HOME is not set, and this machine knows no user with the id {os.getuid()}: export HOME=FOLDER "
        "(of a job: slurm.env.HOME)"
    )
