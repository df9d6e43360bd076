"""placement -> the text of the batch script: the same for `submit`, for `render` and for sbatch by hand.

Byte for byte reproducible: nothing here asks the machine, the cluster or the clock. Quoting: `#SBATCH` lines by
sbatch's own rules (`directive`), file names by its patterns (`escape_pattern`), the body by the shell's
(`shlex.quote`).
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.secret import Secret, command_without_secrets
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sources.flags import parse_flags
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.options import JOB_WIDE, Mode, Options, options_with, resolve_mode
from prime_hpc.slurm.packed_env.facts import pack_of, python_words
from prime_hpc.slurm.placement import Component, Placement
from prime_hpc.slurm.submission_record import submission_environment

_TAKEN_BACK = ("reservation", "exclude")
"""Of what sbatch hands on to the next component, what an empty value takes back; sbatch refuses it for `mem` and the
times, and an account of no name."""
_MAX_DIRECTIVE = 8000  # sbatch reads an argument into a buffer of 8192 bytes


@dataclass(frozen=True)
class ArrayPart:
    """Makes the script that of a job array: task i is point i of a sweep."""

    sweep_dir: Path
    indices: list[int]
    """Ids given to --array."""
    throttle: int | None
    """Tasks that run at once; None: as many as fit."""
    log_pattern: str
    """`--output`: a Slurm file name pattern (`%A` job, `%a` index); a path in it went through `escape_pattern`."""


def render_job(
    placement: Placement,
    experiment: Experiment,
    site: SiteConfig,
    *,
    python: str,
    command_tail: list[str],
    token: str | None = None,
    array: ArrayPart | None = None,
    cwd: Path | None = None,
) -> str:
    """Return the batch script.

    Args:
        python: interpreter of the supervisor, an absolute path.
        command_tail: experiment file and overrides, absolute, from which a script sent by hand prepares the run.
        token: goes into the job's comment, by which a submit whose answer was lost is found again.
        cwd: directory from which the experiment's relative paths count, and in which the script starts wherever sbatch
            is called; None: where sbatch is called.

    Raises:
        ConfigError: something that Slurm cannot do, or that no script can say.
    """
    run_dir = experiment.run_dir.resolve()
    _check_path(run_dir)
    if array is not None and not placement.abilities.takes_arrays:
        raise ConfigError(
            "Slurm refuses arrays of het jobs; use slurm.layout = packed (the same partition and GPUs for all "
            "roles), or run the sweep in lanes",
            "slurm.layout",
        )
    lines = ["#!/bin/bash", *_about(placement, experiment, run_dir, array)]
    carried: Options = {}
    for component in placement.components:
        if component.index:
            lines.append("#SBATCH hetjob")
        asked = _explicit(component, carried)
        named = {
            **_job_options(component, experiment, array, run_dir, cwd),
            **_component_options(component, asked, placement, experiment, site, token),
        }
        lines += [f"#SBATCH {directive(name, value)}" for name, value in named.items()]
    body = [
        *_setup(experiment, site),
        *_environment(experiment, site),
        *_submission(placement, run_dir, token),
        *_command(experiment, site, run_dir, python, command_tail, array),
    ]
    literal = any(re.search(r"'[^']*[$`][^']*'", line) for line in body)
    lines += [
        "",
        *(["# shellcheck disable=SC2016 # values are literal"] if literal else []),
        "set -euo pipefail",
        "trap '' USR1 # Slurm's warning: while the supervisor does not listen (yet), it ends nothing",
        *body,
    ]
    return "\n".join(lines) + "\n"


def directive(name: str, value: str | bool) -> str:
    """One option as sbatch reads it from an `#SBATCH` line: by its own quoting, not the shell's.

    Inside double quotes all but `"` and the backslash is literal; outside of them a `#` begins a comment.
    """
    if value is True:
        return f"--{name}"
    text = str(value)
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ConfigError(f"--{name}={text!r} holds a line break or another control character")
    if not re.fullmatch(r"[\w@%+=:,./\[\]()&|*!~^-]*", text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    line = f"--{name}={text}"
    if len(line.encode()) > _MAX_DIRECTIVE:
        raise ConfigError(f"--{name} is {len(line.encode())} bytes long; sbatch reads at most {_MAX_DIRECTIVE}")
    return line


def escape_pattern(path: str) -> str:
    """Return a path as a part of Slurm's file name patterns, in which `%` begins a symbol."""
    return path.replace("%", "%%")


def restart_mode(experiment: Experiment, site: SiteConfig, placement: Placement) -> Mode:
    """How the job comes back: what was asked, or what the site and the partitions of its batch component allow."""
    return resolve_mode(experiment.slurm, site, str(placement.components[0].options.get("partition", "")))


def job_name(experiment: Experiment) -> str:
    """Name of the Slurm job."""
    return experiment.slurm.job_name or experiment.name


def _about(placement: Placement, experiment: Experiment, run_dir: Path, array: ArrayPart | None) -> list[str]:
    nodes = ", ".join(f"{c.name} {c.num_nodes}" for c in placement.components)
    lines = [f"# {experiment.kind} run {_comment(experiment.name)}: {placement.layout} job, nodes: {nodes}"]
    if array is not None:
        folder = Path(array.log_pattern.replace("%%", "%")).parent
        lines.append(f"# Task i of the array is point i of {_comment(str(array.sweep_dir))}")
    else:
        folder = run_dir / "logs"
    return [*lines, f"# By hand: mkdir -p {shlex.quote(str(folder))} && sbatch job.sbatch"]


def _comment(text: str) -> str:
    return " ".join(text.split())


def _job_options(
    component: Component, experiment: Experiment, array: ArrayPart | None, run_dir: Path, cwd: Path | None
) -> Options:
    """Return the options of the job as a whole: only component 0 states it, except for the name."""
    options: Options = {"job-name": job_name(experiment)}
    if component.index:
        return options
    if array is not None:
        options["array"] = index_ranges(array.indices) + (f"%{array.throttle}" if array.throttle else "")
    options["output"] = array.log_pattern if array else f"{escape_pattern(str(run_dir / 'logs'))}/slurm-%j.out"
    options["open-mode"] = "append"
    if cwd is not None:
        options["chdir"] = str(cwd)
    return options


def _explicit(component: Component, carried: Options) -> Options:
    """Return a component's options with those written out that Slurm would hand on to it from the components before.
    `carried`: what was handed on so far; updated."""
    asked = dict(component.options)
    if component.index:
        for name in JOB_WIDE:
            asked.pop(name, None)  # the leader's
        asked["dependency"] = ""  # it would be handed on: a component that waits for its own leader never starts
    for name in options_with(handed_on=True):
        if name not in asked and name in carried:
            asked[name] = "" if name in _TAKEN_BACK else carried[name]
        if name in asked:
            carried[name] = asked[name]
    return asked


def _component_options(
    component: Component,
    asked: Options,
    placement: Placement,
    experiment: Experiment,
    site: SiteConfig,
    token: str | None,
) -> Options:
    options: Options = {"nodes": str(component.num_nodes), "ntasks-per-node": "1"}
    options |= {name: value for name, value in asked.items() if name != "comment"}
    options["signal"] = f"B:USR1@{experiment.slurm.restart.signal_lead_s}"
    leader, how = placement.components[0].options, restart_mode(experiment, site, placement)
    options["requeue" if how == "requeue" else "no-requeue"] = True
    if placement.abilities.survives_lost_node and component.num_nodes > 1:
        options["no-kill"] = True  # a lost node ends its role, not the job; het jobs do not honour it
    comment = f"prime-hpc:{token}" if token else "prime-hpc"
    options["comment"] = f"{comment} {leader['comment']}" if "comment" in leader else comment
    return options


def _setup(experiment: Experiment, site: SiteConfig) -> list[str]:
    lines = [*site.setup, *experiment.slurm.setup]
    if not lines:
        return []
    # module files and conda's hooks read variables that may be unset
    return ["", "set +u", *lines, "set -u"]


def _environment(experiment: Experiment, site: SiteConfig) -> list[str]:
    exports: list[str] = []
    if site.network_interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            exports.append(f"export {name}={shlex.quote(site.network_interface)}")
    for name, value in (site.env | experiment.slurm.env).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{name!r} is no name of an environment variable", "slurm.env")
        if isinstance(value, Secret):
            continue  # the supervisor gives it to the roles; a script is read by others
        if "\0" in value:
            raise ConfigError(f"the value of {name} holds a NUL byte", "slurm.env")
        exports.append(f"export {name}={shlex.quote(value)}")
    return ["", *exports] if exports else []


def _submission(placement: Placement, run_dir: Path, token: str | None) -> list[str]:
    """With --export=NONE nothing of sbatch's environment reaches the script: it says itself which submission it is."""
    if token is None or str(placement.components[0].options.get("export", "")).upper() not in ("NONE", "NIL"):
        return []
    named = submission_environment(run_dir, token)
    return ["", *(f"export {name}={shlex.quote(value)}" for name, value in named.items())]


def _command(
    experiment: Experiment,
    site: SiteConfig,
    run_dir: Path,
    python: str,
    command_tail: Sequence[str],
    array: ArrayPart | None,
) -> list[str]:
    begin = python_words(pack_of(experiment, site), site.node_local, python)
    command = [*begin, "-P", "-m", "prime_hpc.launch.job"]
    if array is not None:
        words = f'{shlex.join([*command, "--point", str(array.sweep_dir)])} "$SLURM_ARRAY_TASK_ID"'
    else:
        words = shlex.join([*command, str(run_dir), *(["--", *command_tail] if command_tail else [])])
    return [
        "",
        "# exec: Slurm's signals reach the supervisor itself, at once",
        f"exec {words}",
    ]


def _check_path(run_dir: Path) -> None:
    text = str(run_dir)
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ConfigError(f"{text!r} holds a line break or another control character", "name")
    if "\\" in text:
        # sbatch takes it for "no symbols in this file name" and drops it
        raise ConfigError(f"{text!r} holds a backslash, which Slurm cannot have in a log's path", "output_dir")


def interpreter() -> str:
    """Return this Python, not resolved: that of a virtual environment is a link that must be called by its own name."""
    return sys.executable


def command_tail(argv: list[str]) -> list[str]:
    """Return an experiment's command line (without the verb and its own flags) with its config files as absolute paths.

    Values of keys stay as they are: the job starts in the directory that the script names. A secret is left out:
    the script, and the job's command line, are read by others (a run that `submit` sends has it in its run directory).
    """
    argv, _ = command_without_secrets(argv)
    tail = list(argv)
    for place, token in enumerate(argv):
        if token.startswith("@"):
            name = token[1:]
            tail[place] = f"@{_absolute(name)}" if name else token
        elif place and argv[place - 1] == "@":
            tail[place] = _absolute(token)
        elif not token.startswith("-"):
            changed = [*tail[:place], _absolute(token), *tail[place + 1 :]]
            # Whether a bare word is a file or a flag's value, only the parser knows. Asked of the word as it was: the
            # path is no value of a switch, and so a file, whatever the word was.
            named = Path(token).expanduser()  # as the parser has it
            if _files(changed).count(named) < _files(tail).count(named):
                tail = changed
    return tail


def _files(argv: list[str]) -> list[Path]:
    return [file.path for file in parse_flags(argv, None, positional_files=True).files]


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())
