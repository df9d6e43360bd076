"""Run Slurm's commands: every call has a deadline, and an environment that knows of no surrounding job.

Works on the login node and inside a job alike. `on_cluster` sends the calls to another cluster of the site (`-M`).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from prime_hpc.config.site import cluster_name
from prime_hpc.runtime.tied_process import tied

TIMEOUT_S = 30.0
SBATCH_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 20.0
"""Of a question that somebody waits for at the terminal."""
COMMENT_PREFIX = "prime-hpc:"
"""Begins the comment of every job that was submitted by us; the submission's token follows."""

SEPARATOR = "\x1f"  # cannot be typed by accident into a job's name or comment
_LEAKS = ("SLURM_", "SRUN_", "SBATCH_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_A_CLUSTER = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct")
_READER_LEAKS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")


class SlurmError(RuntimeError):
    """A Slurm command that is missing, hangs or fails. The command line exits with `exit_code`."""

    exit_code = 3

    def __init__(self, argv: Sequence[str], code: int | None, stderr: str) -> None:
        """Keep what was asked and answered.

        Args:
            argv: the command.
            code: its exit status, the negative number of the signal that ended it; None: it did not start, or did not
                answer in time.
            stderr: what it said, or why it could not be asked.
        """
        self.argv = list(argv)
        self.code = code
        self.stderr = stderr.strip()
        failed = "" if code is None else f" failed with exit status {code}"
        if self._killed_by:
            failed = f" was ended by signal {self._killed_by}"
        advice = f"; {self.advice}" if self.advice else ""
        super().__init__(f"`{_shown(argv)}`{failed}: {self.stderr or 'it said nothing'}{advice}")

    @property
    def is_missing(self) -> bool:
        """True if the command is not installed here."""
        return self.code is None and "not found" in self.stderr

    @property
    def is_unreachable(self) -> bool:
        """True if nobody can tell what Slurm would have said: no command, no answer, no controller.

        Slurm's commands die by SIGPIPE when the controller closes the connection that they are writing into.
        """
        return (
            self.code is None
            or bool(self._killed_by)
            or any(re.search(pattern, self.stderr, re.I) for pattern, _ in _UNREACHABLE)
        )

    @property
    def _killed_by(self) -> int:
        """The signal that ended the command; 0: none did. A site's wrapper in shell says 128 and the signal."""
        code = self.code or 0
        return -code if code < 0 else code - 128 if code in range(129, 193) else 0

    @property
    def is_unknown_job(self) -> bool:
        """True if Slurm answered that it knows no such job (any more)."""
        return self.code is not None and "invalid job id" in self.stderr.lower()

    @property
    def advice(self) -> str:
        """Advice on what to do about it; empty where Slurm's own words say it."""
        if self.is_missing:
            return "load the site's Slurm module, or start the run on this machine with --launch local"
        if self.code is None:
            return "the controller may be overloaded or down; try again later (`scontrol ping` asks it)"
        if self._killed_by:
            return _CONTROLLER
        return next((advice for pattern, advice in _UNREACHABLE if re.search(pattern, self.stderr, re.I)), "")


_CONTROLLER = "the controller is down or cannot be reached from here; try again later (`scontrol ping` asks it)"
_UNREACHABLE = (
    (r"unable to contact slurm controller|connection refused|connect failure|controller not responding", _CONTROLLER),
    (r"zero bytes were transmitted|socket timed out|timed out on send/recv|communication connection", _CONTROLLER),
    (r"munge|authentication", "munge does not answer on this host; tell the site's staff, or try another login node"),
    (
        r"could not establish a configuration source|unable to process configuration|slurm\.conf",
        "no slurm.conf is in force here; set SLURM_CONF, or use a login node of the cluster",
    ),
)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a surrounding job put there (SLURM_*, SRUN_*, SBATCH_*).

    How Slurm itself is found stays: SLURM_CONF, and SLURM_CONF_SERVER of a client without configuration files.
    """
    return {k: v for k, v in environ.items() if k in _KEPT or not k.startswith(_LEAKS)}


def why_not_in_force(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why jobs cannot be sent to a Slurm from here, or None where one is in force.

    Debian's packages bring the commands without a cluster; and a cluster's nodes may find their configuration by DNS.
    """
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return "there is no sbatch on PATH (is Slurm's module loaded?)"
    if cluster_name(environ) is not None or Path("/run/slurm/conf/slurm.conf").exists():
        return None
    try:
        run_slurm(["sinfo", "-h", "-o", "%R"], ASK_TIMEOUT_S)
    except SlurmError as error:
        if "configuration source" in error.stderr:
            return f"Slurm's commands find no configuration ({error.advice})"  # its own words are four lines of DNS
    return None


def sbatch_answer(text: str) -> tuple[str, str | None]:
    """Job id and cluster of `12` or `12;cluster`, whatever a site's wrapper says around it.

    Raises:
        SlurmError: it holds no job id.
    """
    for line in reversed(text.split("\n")):
        job_id, _, cluster = line.strip().partition(";")
        if job_id.isdigit():
            return job_id, cluster or None
    raise SlurmError(["sbatch", "--parsable"], 0, f"its answer holds no job id: {text.strip()!r}")


def run_slurm(
    argv: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    *,
    stdin: str | None = None,
    extra: Mapping[str, str] | None = None,
    dies_with_us: bool = False,
    with_stderr: bool = False,
) -> str:
    """Run a Slurm command; return its standard output.

    Args:
        argv: the command; found on PATH.
        timeout_s: it is killed after this.
        stdin: text to feed it; None: nothing.
        extra: variables added to its environment (sbatch hands them on to the job).
        dies_with_us: it is killed when this process is: an sbatch that lives on could make a job of which nobody knows.
        with_stderr: standard error follows it: the answer of some is there.

    Raises:
        SlurmError: it is missing, hangs, or its exit status is not 0.
    """
    environment = {k: v for k, v in clean_environment(os.environ).items() if not k.startswith(_READER_LEAKS)}
    environment |= extra or {}
    if (cluster := asked_cluster()) is not None and argv[0] in _OF_A_CLUSTER:
        argv = [argv[0], f"--clusters={cluster}", *argv[1:]]
    try:
        done = subprocess.run(
            tied(argv, environment) if dies_with_us else list(argv),
            input=stdin or "",
            capture_output=True,
            timeout=timeout_s,
            env=environment,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise SlurmError(argv, None, f"{argv[0]} is not found on PATH") from error
    except PermissionError as error:
        raise SlurmError(argv, None, f"{argv[0]} is not found on PATH as a program that may be run") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(argv, None, f"timed out: no answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise SlurmError(argv, done.returncode, done.stderr or done.stdout)
    return str(done.stdout) + (str(done.stderr) if with_stderr else "")


def _shown(argv: Sequence[str]) -> str:
    """Return the command as a person would type it; formats with separators are left out."""
    return " ".join("..." if SEPARATOR in word else word for word in argv)


_CLUSTER: ContextVar[str | None] = ContextVar("cluster", default=None)


@contextmanager
def on_cluster(name: str | None) -> Iterator[None]:
    """Within it, questions and orders go to another cluster of the site; None: to this one."""
    before = _CLUSTER.set(name)
    try:
        yield
    finally:
        _CLUSTER.reset(before)


def asked_cluster() -> str | None:
    """Return the cluster that `on_cluster` has chosen."""
    return _CLUSTER.get()
