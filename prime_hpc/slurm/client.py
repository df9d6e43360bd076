"""Run Slurm's commands: every call has a deadline, and an environment that knows of no surrounding job. What `squeue`,
`sacct` and `scontrol show job` answer is read here, and nowhere else.

Works on the login node and inside a job alike. `on_cluster` sends the calls to another cluster of the site (`-M`).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config.site import cluster_name
from prime_hpc.runtime.tied_process import tied
from prime_hpc.slurm.times import parse_time

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
_WHOLE_ANSWERS = {"SCONTROL_ALL": "1", "SINFO_ALL": "1", "SQUEUE_ALL": "1", "SLURM_TIME_FORMAT": "%s"}
"""For all commands but sbatch, which would hand them on: hidden partitions and their nodes are shown too, which else
root alone sees; and times as epoch seconds, since of the hour when clocks are set back each is there twice."""
_OF_PARTITIONS = ("SCONTROL_ALL", "SINFO_ALL")
_TOLD: set[str] = set()
"""Words of sbatch that were shown: a sweep's hundred jobs get the same."""
_PAUSES_S = (1.0, 3.0)
"""Before a busy controller is asked the same again."""


class SlurmError(RuntimeError):
    """A Slurm command that is missing, hangs or fails. The command line exits with `exit_code`."""

    exit_code = 3

    def __init__(self, argv: Sequence[str], code: int | None, stderr: str) -> None:
        """Keep what was asked and answered.

        Args:
            code: its exit status, the negative number of the signal that ended it; None: it did not start, or did not
                answer in time.
            stderr: what it said, or why it could not be asked.
        """
        self.argv = list(argv)
        self.code = code
        self.stderr = stderr.strip()
        failed = f" failed with exit status {code}" if code else ""
        if self._killed_by:
            failed = f" was ended by signal {self._killed_by}"
        advice = f"; {self.advice}" if self.advice else ""
        super().__init__(f"`{_shown(argv)}`{failed}: {self.stderr or 'it said nothing'}{advice}")

    @property
    def is_missing(self) -> bool:
        """True if the command is not installed here, or (as a shell or the loader says of it) cannot be run."""
        return self.code in (126, 127) or (self.code is None and self.stderr.startswith(f"{self.argv[0]} is not found"))

    @property
    def is_unreachable(self) -> bool:
        """True if nobody can tell what Slurm would have said: no command, no answer or one that cannot be read, not a
        word, no controller.

        Slurm's commands die by SIGPIPE when the controller closes the connection that they are writing into.
        """
        return (
            not self.code
            or bool(self._killed_by)
            or self.is_missing
            or not self.stderr
            or any(re.search(pattern, self.stderr, re.I) for pattern, _ in _UNREACHABLE)
        )

    @property
    def is_busy(self) -> bool:
        """True if the controller has dropped this one request; it may have done what was asked."""
        return self.code is not None and _BUSY.search(self.stderr) is not None

    @property
    def is_full(self) -> bool:
        """True if sbatch was refused for a queue that is full; it tries again by itself until it is ended."""
        return is_queue_full(self.stderr)

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
        if self.code is None and _NOT_STARTED in self.stderr:
            return _NO_RESOURCES
        if self.is_full:
            return _FULL_ADVICE
        if self.code is None:
            return "the controller may be overloaded or down; try again later (`scontrol ping` asks it)"
        if self._killed_by:
            return _CONTROLLER
        return next(
            (advice for pattern, advice in (*_UNREACHABLE, _HIDDEN) if re.search(pattern, self.stderr, re.I)), ""
        )


_FULL = "temporarily unable to accept job|job queue full"
_ENDED_OTHERWISE = "submission failed: (?!resource temporarily unavailable)"
_FULL_ADVICE = (
    "so Slurm says where the whole cluster has as many jobs as it keeps (MaxJobCount of `scontrol show config`; each "
    "point of a sweep is one): try again when some have ended; `prime-hpc sweep submit SWEEP --feed` sends a sweep's "
    "points as there is room"
)
_NOT_STARTED = "could not be started here"
_NO_RESOURCES = "this machine has no memory or no processes left for you; end some, or try again later"
_CONTROLLER = "the controller is down or cannot be reached from here; try again later (`scontrol ping` asks it)"
_UNREACHABLE = (
    (r"unable to contact slurm controller|connection refused|connect failure|controller not responding", _CONTROLLER),
    (r"zero bytes were transmitted|(socket|connection) timed out|timed out on send/recv", _CONTROLLER),
    (r"communication (connection|shutdown) failure|message (send|receive) failure", _CONTROLLER),
    (r"unexpected message received|insane message|connection (reset|rejected|forced)|shutting down and", _CONTROLLER),
    (r"unable to (resolve|establish control machine address)", _CONTROLLER),  # then any word: of an errno left over
    (r"standby mode", "the backup controller is about to take over; try again in some minutes"),
    (r"rate limit exceeded|altered now, try again|job record, try again", "the controller is busy; try again later"),
    (r"fork: .*resource temporarily unavailable|cannot allocate memory", _NO_RESOURCES),
    (r"munge|authentication", "munge does not answer on this host; tell the site's staff, or try another login node"),
    (
        r"could not establish a configuration source|unable to process configuration|slurm\.conf",
        "no slurm.conf is in force here; set SLURM_CONF, or use a login node of the cluster",
    ),
)
_HIDDEN = (
    "slurm_load_(partition|node).*access/permission denied",
    "the site shows partitions and nodes to its staff alone (PrivateData of `scontrol show config`); a site profile is "
    "written by hand there, from slurm/sites/example.yaml",
)


_BUSY = re.compile(
    r"socket timed out|timed out on send/recv|zero bytes were transmitted|rate limit exceeded|try again", re.I
)


def is_queue_full(words: str) -> bool:
    """Return whether sbatch's last word is that the whole cluster has as many jobs as it keeps: it tries again by
    itself, and may be refused for another reason then."""
    return re.search(_FULL, words, re.I) is not None and re.search(_ENDED_OTHERWISE, words, re.I) is None


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
    Raises SlurmError: it holds no job id."""
    for line in reversed(text.split("\n")):
        job_id, _, cluster = line.strip().partition(";")
        if job_id.isdigit():
            return job_id, cluster or None
    raise SlurmError(["sbatch", "--parsable"], 0, f"its answer holds no job id: {text.strip()!r}")


def send_script(
    script: Path, options: Sequence[str], extra: Mapping[str, str], timeout_s: float = SBATCH_TIMEOUT_S
) -> tuple[str, str | None]:
    """Hand a batch script to sbatch; return the job's id and, where it names one, the cluster.

    What a site's rules say of a job that they take (another partition, hours that run out) goes to standard error.
    `extra`: variables that the job gets. Raises SlurmError: sbatch refuses, hangs, is missing, or gives no job id.
    """
    said: list[str] = []
    argv = ["sbatch", "--parsable", *options, str(script)]
    answer = run_slurm(argv, timeout_s, extra=extra, dies_with_us=True, hear=said.append)
    sent = sbatch_answer(answer)
    if (words := "".join(said).strip()) and words not in _TOLD:
        _TOLD.add(words)
        with suppress(OSError):  # the job is queued, whoever reads this
            print(words, file=sys.stderr, flush=True)
    return sent


def run_slurm(
    argv: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    *,
    stdin: str | None = None,
    extra: Mapping[str, str] | None = None,
    dies_with_us: bool = False,
    with_stderr: bool = False,
    hear: Callable[[str], object] | None = None,
    of_user: bool = False,
) -> str:
    """Run a Slurm command; return its standard output.

    A question, and the order to end a job, that a busy controller drops are sent again, within the same time.

    Args:
        timeout_s: it is killed after this.
        extra: variables added to its environment (sbatch hands them on to the job).
        dies_with_us: it is killed when this process is: an sbatch that lives on could make a job of which nobody knows.
        with_stderr: standard error follows it: the answer of some is there.
        hear: gets standard error of a command that did its work.
        of_user: it shows no partition that is hidden from this user, or closed to his group.

    Raises:
        SlurmError: it is missing, hangs, or its exit status is not 0.
    """
    environment = {k: v for k, v in clean_environment(os.environ).items() if not k.startswith(_READER_LEAKS)}
    whole = {} if argv[0] == "sbatch" else _WHOLE_ANSWERS
    environment |= {k: v for k, v in whole.items() if not (of_user and k in _OF_PARTITIONS)} | dict(extra or {})
    pauses, end = iter(_PAUSES_S if _may_be_repeated(argv) else ()), time.monotonic() + timeout_s
    if (cluster := asked_cluster()) is not None and argv[0] in _OF_A_CLUSTER:
        argv = [argv[0], f"--clusters={cluster}", *argv[1:]]
    busy: SlurmError | None = None
    while True:
        try:
            left_s = timeout_s if busy is None else end - time.monotonic()
            done = _run_once(argv, environment, left_s, stdin, dies_with_us)
            if hear is not None:
                hear(done.stderr)
            return done.stdout + (done.stderr if with_stderr else "")
        except SlurmError as error:
            if busy is not None and argv[0] == "scancel" and error.is_unknown_job:
                return ""  # the order that was dropped had got through
            pause_s = next(pauses, None) if error.is_busy else None
            if pause_s is None or time.monotonic() + 2 * pause_s > end:
                raise
            busy = error
            time.sleep(pause_s)


def _may_be_repeated(argv: Sequence[str]) -> bool:
    """Return whether a command does the same when it is given twice."""
    if argv[0] == "scontrol":
        return argv[1:2] == ["show"]
    return argv[0] in ("squeue", "sinfo", "sacct") or (argv[0] == "scancel" and not any("-s" in w for w in argv))


def _run_once(
    argv: Sequence[str], environment: dict[str, str], timeout_s: float, stdin: str | None, dies_with_us: bool
) -> "subprocess.CompletedProcess[str]":
    """Run a command. Raises SlurmError: it is missing, hangs, or its exit status is not 0."""
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
    except OSError as error:  # a login node on which a user may have no more processes
        raise SlurmError(argv, None, f"{argv[0]} {_NOT_STARTED}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").partition("\n")[0].strip()
        words = f" ({said})" if said else ""  # of a full queue, at which sbatch tries again and again
        raise SlurmError(argv, None, f"timed out: no answer within {timeout_s:.3g} s{words}") from error
    if done.returncode != 0:
        raise SlurmError(argv, done.returncode, done.stderr or done.stdout)
    return done


def _shown(argv: Sequence[str]) -> str:
    """Return the command as a person would type it; formats with separators are left out."""
    return " ".join("..." if SEPARATOR in word else word for word in argv)


def squeue_command(which: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Return the command of which `squeue_rows` reads the answer."""
    layout = ",".join(f"{field}:0{SEPARATOR}" for field in fields)  # width 0: nothing is cut off
    return ["squeue", "-h", "-a", "-r", "-t", "all", *which, "-O", layout]


def squeue_rows(which: Sequence[str], fields: Sequence[str], timeout_s: float) -> list[dict[str, str]]:
    """Rows of squeue, one a job, a component or an array's task, those that ended in the last minutes too; none where
    it knows no such job (any more).
    Raises SlurmError: it cannot be asked, or answers in a form that is not known here: none of the jobs is gone."""
    command = squeue_command(which, fields)
    try:
        text = run_slurm(command, timeout_s)
        is_headed = SEPARATOR not in text
        if is_headed:  # no jobs; a site's wrapper that has swallowed an error says the same, but for the heading
            text = run_slurm([word for word in command if word != "-h"], timeout_s)
    except SlurmError as error:
        if error.is_unknown_job:
            return []
        raise
    # a line break in somebody's comment splits a row: rows are told apart by the number of their fields
    records = re.findall(rf"(?:[^{SEPARATOR}]*{SEPARATOR}){{{len(fields)}}}", text)
    if text.count(SEPARATOR) > len(records) * len(fields):
        raise SlurmError(["squeue"], 0, f"its answer breaks off after {len(records)} rows")
    if not records:
        raise SlurmError(["squeue"], 0, f"its answer is of a form that is not known here: {text.strip()[:200]!r}")
    cells = ([value.strip() for value in record.split(SEPARATOR)] for record in records[is_headed:])
    # a site's wrapper may say something first, on lines of its own
    return [dict(zip(fields, (first.rpartition("\n")[2], *rest), strict=False)) for first, *rest in cells]


def sacct_rows(which: Sequence[str], fields: Sequence[str], timeout_s: float) -> list[dict[str, str]] | None:
    """Rows of the accounting, one a life of a job or of a component; None where there is none, or where it does not
    answer: nothing may depend on it."""
    argv = ["sacct", "--duplicates", "-X", "--noheader", "--parsable2", "--delimiter", SEPARATOR]
    try:
        text = run_slurm([*argv, *which, "-o", ",".join(fields)], timeout_s)
    except SlurmError:
        return None
    cells = (line.split(SEPARATOR) for line in text.splitlines())
    return [dict(zip(fields, values, strict=True)) for values in cells if len(values) == len(fields)]


@dataclass(frozen=True)
class ShownJob:
    """A job, or a component of a het job, as `scontrol show job` has it; what that does not print is empty, 0 or
    None."""

    job_id: str
    """As Slurm's commands are told it, of a component `12+1`."""
    state: str
    reason: str
    restarts: int
    partition: str
    """Names separated by commas, of a running job one."""
    num_nodes: int
    """That it needs at least."""
    nodes: str
    """Host list, as `excluded` and `required`."""
    excluded: str
    """By its user, or an admin: an update replaces the whole list."""
    required: str
    features: str
    batch_host: str
    time_limit: str
    ends_at: float | None
    """Epoch seconds; None: there is no limit."""
    preempt_time: str
    output: str
    """The batch script's."""
    is_requeued: bool = True
    """False: Slurm puts it back into the queue neither by itself nor when told to."""
    user: str = ""
    """`name(1000)`."""
    account: str = ""
    qos: str = ""
    asks: str = ""
    """`cpu=16,mem=64G,node=2,gres/gpu=8`."""
    time_min: str = ""
    """To which backfill may lower its time limit; `N/A`: not at all."""
    reservation: str = ""
    """That it runs in: names separated by commas."""


def show_job(job_id: str, timeout_s: float = TIMEOUT_S) -> list[ShownJob]:
    """Ask about a job: each component, a het job's leader first.
    Raises SlurmError: it cannot be asked, or there is no such job."""
    argv = ["scontrol", "show", "job", "--oneliner", job_id]
    text = run_slurm(argv, timeout_s)
    if shown := parse_shown(text, job_id):
        return shown
    raise SlurmError(argv, 0, f"its answer is of a form that is not known here: {text.strip()[:200]!r}")


def parse_shown(text: str, job_id: str) -> list[ShownJob]:
    """Read what `scontrol show job --oneliner` said of this job, a line a component."""
    found = []
    for line in text.splitlines():
        if not line.startswith("JobId="):
            continue
        offset, num_nodes = field(line, "HetJobOffset"), field(line, "NumNodes").partition("-")[0]
        part = ShownJob(
            job_id=f"{job_id}+{offset}" if offset else job_id,
            state=field(line, "JobState"),
            reason=field(line, "Reason"),
            restarts=int(field(line, "Restarts") or 0),
            partition=field(line, "Partition"),
            num_nodes=int(num_nodes) if num_nodes.isdigit() else 0,
            nodes=field(line, "NodeList"),
            excluded=field(line, "ExcNodeList"),
            required=field(line, "ReqNodeList"),
            features=field(line, "Features"),
            batch_host=field(line, "BatchHost"),
            time_limit=field(line, "TimeLimit"),
            ends_at=parse_time(field(line, "EndTime")),
            preempt_time=field(line, "PreemptTime"),
            output=field(line, "StdOut"),
            is_requeued=field(line, "Requeue") != "0",
            user=field(line, "UserId"),
            account=field(line, "Account"),
            qos=field(line, "QOS"),
            asks=field(line, "ReqTRES") or field(line, "TRES"),  # the name since 23.02, and before
            time_min=field(line, "TimeMin"),
            reservation=field(line, "Reservation"),
        )
        found.append(part)
    return found


def first_end(parts: Iterable[ShownJob]) -> float | None:
    """When the time limit strikes, of a het job the first of its components'; None where there is no limit."""
    return min((part.ends_at for part in parts if part.ends_at is not None), default=None)


def field(text: str, name: str) -> str:
    """Return the value of `Name=value` in a line of scontrol's, spaces included; empty where it is absent or
    `(null)`."""
    match = re.search(rf"(?:^|\s){name}=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", text)
    return match[1] if match and match[1] != "(null)" else ""


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
