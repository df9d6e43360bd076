"""A shell where a role of a run is: in its container, in its directory, with its environment but for its secrets.

    python -m prime_hpc.supervisor.roles.shell_on_node RUN_DIR ROLE RANK [-- COMMAND ...]

`prime-hpc shell` starts it here, or through srun on the role's node. It finds the role's process by that process's own
word, says where it is, and becomes the shell, or the command. Exit codes: the shell's or the command's own; 3 no such
process is here; 126 the command cannot be started; 127 there is none of that name.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config.secret import is_secret
from prime_hpc.runtime import role_context
from prime_hpc.runtime.look import words_here
from prime_hpc.runtime.role_context import this_node
from prime_hpc.supervisor.roles.caches import NODE_LOCAL

READ_WITHIN_S = 3.0
"""A process that hangs in its memory does not give its environment away."""
ENTER_WITHIN_S = 10.0
NOT_THERE, CANNOT_START, NO_SUCH_COMMAND = 3, 126, 127
_SHOWN = (
    *(role_context.ATTEMPT, role_context.INCARNATION, role_context.RESUME_STEP, role_context.RUN, role_context.NODE),
    *(*role_context.URL_VARIABLES.values(), NODE_LOCAL),
    *("PRIMEHPC_OUTPUTS", "PRIMEHPC_SITE", "PRIMEHPC_SITES"),
)
"""Of our own variables those that hold no secret; the bus's address does, and the ranks' meeting point is one."""
_OF_THE_STEP = ("SLURM", "SRUN_", "PMI", "PALS_")
"""Begin the names of variables that belong to the step in which a process runs."""
_OF_THE_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "SHELL", "LS_COLORS")
_LEAST_SECRET = 8
"""Shorter values of secrets are not looked for in other values."""


def main() -> int:
    """Become the shell; returns an exit code where that is not possible."""
    words = sys.argv[1:]
    command = words[words.index("--") + 1 :] if "--" in words else []
    run_dir, role, rank = words[:3]
    here = [word for word in words_here(run_dir) if not word.get("part")]  # a server's engines are no role's process
    found = [word for word in here if (word.get("role"), word.get("index")) == (role, int(rank))]
    if not found:
        return _say_nothing_here(run_dir, role, rank, here)
    word = max(found, key=lambda one: one.get("began", 0.0))
    pid = int(word["pid"])
    about = f"{this_node()}: {_name(role, rank)}, pid {pid}"
    texts = _read(pid)
    environment, hidden = dict(os.environ), list[str]()
    if texts is None:
        print(f"prime-hpc shell: process {pid} does not tell its environment: this shell has its own", file=sys.stderr)
    else:
        environment, hidden = shown_environment(texts["environ"], os.environ)
        environment |= _virtual_environment(texts["cmdline"][:1], environment)
    entry, trouble = _entry(pid)
    inside = f"in the container of process {pid}" if entry else trouble
    parts = [about, f"run {run_dir}", f"attempt {environment.get(role_context.ATTEMPT, '1')}", inside]
    parts.append(f"without {', '.join(hidden)}" if hidden else "")
    print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
    return _become(pid, entry, command, environment, run_dir)


def shown_environment(role: Mapping[str, str], own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return a role's environment without its secrets, and the names of the user's variables that were left out.
    `own`: of this process: its Slurm step and its terminal are kept."""
    ours = {name for name in role if name.startswith("PRIMEHPC_") and name not in _SHOWN}
    hidden = {name for name, value in role.items() if name not in ours and is_secret(name, value)}
    texts = [role[name] for name in ours | hidden if is_secret(name, role[name]) or name == role_context.BUS]
    secrets = [part for text in texts for part in (text, text.partition("@")[0]) if len(part) >= _LEAST_SECRET]
    hidden |= {name for name, value in role.items() if name not in ours and any(text in value for text in secrets)}
    steps = {name for name in role if name.startswith(_OF_THE_STEP)}
    shown = {name: value for name, value in role.items() if name not in ours | hidden | steps}
    kept = {
        n: v for n, v in own.items() if n in _OF_THE_TERMINAL or (n.startswith(_OF_THE_STEP) and not is_secret(n, v))
    }
    return shown | kept, sorted(hidden)


def _read(pid: int) -> dict[str, Any] | None:
    """Read the environment and the command line of a process, by another one that may hang; None where it does."""
    script = 'cat "/proc/$0/cmdline" && printf "\\n--\\n" && cat "/proc/$0/environ"'
    process = subprocess.Popen(["/bin/sh", "-c", script, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output, _ = process.communicate(timeout=READ_WITHIN_S)
    except subprocess.TimeoutExpired:
        return None
    if process.returncode:
        return None
    cmdline, _, environ = output.partition(b"\n--\n")
    pairs = (os.fsdecode(item).partition("=") for item in environ.split(b"\0") if item)
    return {
        "cmdline": [os.fsdecode(word) for word in cmdline.split(b"\0") if word],
        "environ": {name: value for name, _, value in pairs},
    }


def _virtual_environment(program: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what activates the virtual environment whose Python the process is; {} where it is in none."""
    folder = Path(program[0]).parent if program and program[0].startswith("/") else None
    if folder is None or not (folder.parent / "pyvenv.cfg").is_file():
        return {}
    path = [entry for entry in environment.get("PATH", os.defpath).split(os.pathsep) if entry != str(folder)]
    return {"VIRTUAL_ENV": str(folder.parent), "PATH": os.pathsep.join([str(folder), *path])}


def _entry(pid: int) -> tuple[list[str], str]:
    """Return the command that enters the container of a process, and why there is none where it cannot be entered.

    Both are empty where the process is in no container.
    """
    names = ("mnt", "user")
    try:
        own, its = ({n: os.readlink(f"/proc/{who}/ns/{n}") for n in names} for who in ("self", pid))  # noqa: PTH115
    except OSError as error:
        return [], f"its namespaces cannot be read ({error.strerror})"
    if own["mnt"] == its["mnt"]:
        return [], ""
    program = shutil.which("nsenter")
    if program is None:
        return [], "outside of its container (there is no nsenter here)"
    user = ["--user", "--preserve-credentials"] if own["user"] != its["user"] else []
    entry = [program, f"--target={pid}", *user, "--mount", "--root", "--wd"]
    try:
        tried = subprocess.run(
            [*entry, "/bin/sh", "-c", ":"], capture_output=True, text=True, timeout=ENTER_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"outside of its container ({error})"
    if tried.returncode:
        return [], f"outside of its container ({tried.stderr.strip() or f'nsenter: {tried.returncode}'})"
    return entry, ""


def _become(pid: int, entry: list[str], command: list[str], environment: dict[str, str], run_dir: str) -> int:
    if not command:
        inside = f"/proc/{pid}/root" if entry else ""
        wanted = (environment.get("SHELL", ""), "/bin/bash", "/bin/sh")
        command = [next((shell for shell in wanted if shell and os.access(f"{inside}{shell}", os.X_OK)), "/bin/sh")]
        command += ["-i"] if os.isatty(0) else []
    if not entry:
        for folder in (f"/proc/{pid}/cwd", run_dir):
            try:
                os.chdir(Path(folder).resolve())
                break
            except OSError:
                continue
    try:
        os.execvpe((entry or command)[0], [*entry, *command], environment)
    except OSError as error:
        print(f"prime-hpc shell: {command[0]}: {error.strerror}", file=sys.stderr)
        return NO_SUCH_COMMAND if isinstance(error, FileNotFoundError) else CANNOT_START


def _say_nothing_here(run_dir: str, role: str, rank: str, here: Sequence[Mapping[str, Any]]) -> int:
    names = sorted({_name(str(word.get("role")), str(word.get("index"))) for word in here})
    there = f"; here are {', '.join(names)}" if names else "; no process of the run is here"
    told = f"no {_name(role, rank)} of {run_dir} runs on {this_node()} now{there}"
    print(f"prime-hpc shell: error: {told}", file=sys.stderr)
    return NOT_THERE


def _name(role: str, rank: str) -> str:
    if role == "trainer":
        return f"trainer rank {rank}"
    return f"{role}[{rank}]" if role in (*role_context.URL_VARIABLES, "agent") else role


if __name__ == "__main__":
    sys.exit(main())
