"""After an sbatch that gave no job id: refused (in terms of the config: Slurm's own words, the key to change, what
there is), on its way, or queued all the same? The token in its comment tells."""

import re
import sys
import time
from pathlib import Path

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.sections.slurm import SlurmConfig
from prime_hpc.config.site import has_accounting
from prime_hpc.slurm.client import SlurmError, run_slurm
from prime_hpc.slurm.jobs import JobInfo, find_by_token, find_in_history
from prime_hpc.slurm.placement import LAYOUTS

LOOK_TIMEOUT_S = 10.0
QUEUE_ANSWER_S = 15.0
"""A request that was on its way when its client died arrives within this, or never: sbatch dies with the client, and
Slurm's own MessageTimeout is 10 s."""
_POLL_S = 2.0


class SlurmRefused(ConfigError):
    """Slurm refused the job, or cannot be reached. The command line exits with 3."""

    exit_code = 3


class NothingQueued(SlurmRefused):
    """Slurm said no, or there is none: nothing was queued. Of a plain SlurmRefused that is not known."""


_REFUSALS: tuple[tuple[str, str, str], ...] = (
    # first: the words of every refusal for a policy speak of time limits, too
    (
        r"(assoc|qos)(max|grp)submitjob",
        "slurm",
        "you have as many jobs in the queue as you may: let some end, or cancel them; a sweep's points are sent as "
        "slots come free with `prime-hpc sweep submit SWEEP --feed`",
    ),
    (
        r"(assoc|qos)maxwalldurationperjob",
        "slurm.time",
        "ask for less time, or name another slurm.qos or slurm.account: `sacctmgr show qos format=Name,MaxWall` and "
        "`sacctmgr show assoc user=$USER format=Account,QOS,MaxWall` show what each allows",
    ),
    (
        r"assocgrp|assocmax|qosmax|qosgrp|accounting/qos policy",
        "slurm",
        "the limits of your account do not allow it: ask for less, or name another slurm.account or slurm.qos",
    ),
    (r"invalid partition|partition .*(not|in)valid", "slurm.partition", ""),
    (
        r"invalid account",
        "slurm.account",
        "name an account that may use this partition (`sacctmgr show associations user=$USER` lists yours)",
    ),
    (r"invalid qos|qos .*not permitted", "slurm.qos", "`sacctmgr show qos` lists what there is"),
    (r"time-min", "slurm.time_min", "it must be below slurm.time"),
    (r"time limit|--time", "slurm.time", "`sinfo -o '%P %l'` shows the partitions' limits"),
    (r"invalid feature", "slurm.constraint", "`sinfo -o '%N %f'` shows the nodes' features"),
    (
        r"generic resource|\bgres\b|gpus",
        "slurm.gpus_per_node",
        "`sinfo -o '%P %D %G'` shows the nodes' GPUs; slurm.gpu_type and slurm.gres name them",
    ),
    (r"reservation", "slurm.reservation", "`scontrol show reservation` lists what there is"),
    (r"memory specification|memory required", "slurm.mem", "`sinfo -o '%P %m'` shows the nodes' memory"),
    (r"licen[sc]e", "slurm.licenses", "`scontrol show licenses` lists what there is"),
    (r"dependency", "slurm.dependency", "the job that it names must exist"),
    (r"invalid node name|nodelist", "slurm.nodelist", "see slurm.exclude too; `sinfo -N` lists the nodes"),
    (
        r"node count|node configuration is not available|more processors requested|requested node",
        "slurm",
        "no node set can ever fulfil it: fewer slurm.trainer.nodes or slurm.inference.nodes, fewer "
        "slurm.gpus_per_node, another slurm.gpu_type, less slurm.mem or slurm.cpus_per_task, another slurm.partition, "
        "other nodes in slurm.nodelist and slurm.exclude (`sinfo -o '%P %D %c %m %G'` shows what there is)",
    ),
    (
        r"unrecognized option|invalid option|ambiguous",
        "slurm.extra",
        "this Slurm does not know an option of the script (job.sbatch in the run directory)",
    ),
    (r"array", "slurm.layout", "this form of job array is refused"),
    (r"pathname|too long", "output_dir", "choose a shorter path"),
    (r"i/o error|no space|disk full", "slurm", "the controller could not store the job; tell the site's staff"),
)
"""Pattern of Slurm's words, the key that they are about, what to do; the first that fits counts."""


REFUSED = "Slurm refused the job: "
"""Begins what a refusal says."""
_UNSPECIFIED = "Unspecified error"
"""Slurm's word where a rule of the site refuses a job; what that says is the site's own, and about no key of ours."""
_TRIED_AGAIN = "sleeping and retrying"
"""Ends what sbatch says before it tries again by itself."""


def refusal(error: SlurmError, layout: str) -> SlurmRefused:
    """Return a failed sbatch as an error about the config. `layout`: `het` or `packed`."""
    if error.is_unreachable or error.is_full:
        return SlurmRefused(Problem(str(error), "launch"))
    words = error_lines(error.stderr)
    low = words.lower()
    if (advice := LAYOUTS[layout].if_refused) and "not supported" in low:
        return SlurmRefused(Problem(f"{REFUSED}{words}; {advice}", "slurm.layout"))
    is_sites = _UNSPECIFIED in error.stderr
    named = re.search(r"(?:invalid|specification|value).*--([a-z-]+)", low) or re.search(r"--([a-z-]+) specif", low)
    if not is_sites and named and (field := named[1].replace("-", "_")) in SlurmConfig.model_fields:
        return SlurmRefused(Problem(f"{REFUSED}{words}", f"slurm.{field}"))
    for pattern, key, advice in () if is_sites else _REFUSALS:
        if re.search(pattern, low):
            advice = _partitions() if key == "slurm.partition" else advice
            return SlurmRefused(Problem(f"{REFUSED}{words}" + (f"; {advice}" if advice else ""), key))
    return SlurmRefused(Problem(f"{REFUSED}{words}", "slurm"))


def error_lines(stderr: str) -> str:
    """Return sbatch's lines without its prefixes, the summary first, as one line."""
    lines = [
        re.sub(r"^(sbatch: (error: |fatal: )?|allocation failure: )", "", line).strip() for line in stderr.splitlines()
    ]
    lines = [line for line in dict.fromkeys(lines) if line and not line.startswith("Try ")]
    lines.sort(key=lambda line: not line.startswith("Batch job submission failed"))
    words = [re.sub(r"^Batch job submission failed: ", "", line).rstrip(".") for line in lines]
    reasons = [word for word in words if word != _UNSPECIFIED and not word.endswith(_TRIED_AGAIN)]
    return "; ".join(reasons or words) or "it did not say why"


def _partitions() -> str:
    try:
        lines = run_slurm(["sinfo", "-h", "-o", "%R"], LOOK_TIMEOUT_S, of_user=True).splitlines()
    except SlurmError:
        return ""  # the refusal itself is what matters
    names = sorted({line.strip() for line in lines if len(line.split()) == 1})  # a site's wrapper says sentences
    return f"there are {', '.join(names)}" if names else "sinfo shows you none"


def job_without_answer(token: str, error: SlurmError, layout: str) -> JobInfo:
    """Return the job that an sbatch without an answer made all the same; of a het job the first component.

    Raises:
        NothingQueued: sbatch refused, or there is none.
        SlurmRefused: it cannot be known now.
    """
    if error.is_missing or not error.is_unreachable:
        raise NothingQueued(refusal(error, layout).problems) from error
    try:
        # it was refused all the time, but for its last try, which may be on its way
        found = _wait_for_jobs(token, QUEUE_ANSWER_S if error.is_full else 0.0)
        is_known = error.is_full
    except SlurmError:
        found, is_known = [], False
    if found:
        note(f"sbatch's answer was lost ({error.stderr}), but the job is there")
        return found[0]
    if is_known:
        raise NothingQueued(refusal(error, layout).problems) from error
    raise SlurmRefused(
        Problem(
            f"{error}. Whether the job was queued is not known: give the same command again, it looks for the job "
            "first and never makes a second one",
            "launch",
        )
    ) from error


def _wait_for_jobs(token: str, most_s: float, words: str = "") -> list[JobInfo]:
    """Return a submission's jobs as soon as the controller knows them, none after `most_s`.
    `words`: what the user is told meanwhile. Raises SlurmError."""
    began, found = time.monotonic(), find_by_token(token)
    while not found and (wait_s := began + most_s - time.monotonic()) > 0:
        if words:
            note(f"{words} for {wait_s:.0f} s more")
        time.sleep(min(_POLL_S, wait_s))
        found = find_by_token(token)
    return found


def jobs_of_cut_off_submit(token: str, sent: float, directory: Path, key: str) -> list[JobInfo]:
    """Return the jobs of a submit that ended before the answer was written down: those that the controller knows, else
    one that has ended, which the accounting alone remembers.

    Waits as long as a request may still be on its way.

    Args:
        sent: when, in seconds since the epoch.
        key: of the config, that an error names.

    Raises:
        SlurmRefused: Slurm cannot be asked.
    """
    left_s = min(QUEUE_ANSWER_S, sent + QUEUE_ANSWER_S - time.time())  # its clock may be ahead
    try:
        found = _wait_for_jobs(token, left_s, "an earlier submit was cut off; looking for its job")
    except SlurmError as error:
        raise SlurmRefused(
            Problem(
                f"{directory}: an earlier submit was cut off, and whether its job reached Slurm cannot be asked; "
                f"nothing was changed. {error}",
                key,
            )
        ) from error
    if not found and has_accounting(directory):
        rows = find_in_history(token, sent - 60)
        found = [JobInfo(row.job_id.partition("+")[0], "REVOKED") for row in rows[:1]]
    return found


def note(text: str) -> None:
    """Tell the user, on standard error."""
    print(f"note: {text}", file=sys.stderr, flush=True)
