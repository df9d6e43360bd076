"""A Slurm of its own for tests: `slurm/devcluster` from Python. Used by the `cluster` fixture of tests/slurm."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

DEVCLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "devcluster"
DONE = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
)
"""States that a job does not leave."""
SLURM_IS_MISSING = 4
"""Exit code of `up` where Slurm is neither there nor can be installed."""


class ClusterError(RuntimeError):
    """A devcluster command failed, or what was waited for did not come."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


SLOWEST = 4
"""So many times longer than on a machine of its own a test may take."""


def slowness() -> float:
    """How many times longer than on an idle machine a wait may last: all nodes share this one's CPUs with whatever else
    runs here, so that the start of a few roles takes one minute or ten."""
    return min(SLOWEST, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def start_or_skip(*options: str, num_nodes: int = 6) -> "Cluster":
    """Start a cluster; a test without a Slurm is skipped and says why."""
    try:
        return Cluster(*options, num_nodes=num_nodes)
    except ClusterError as error:
        if error.code == SLURM_IS_MISSING:
            pytest.skip(f"no Slurm: {error}")
        raise


class Cluster:
    """A running dev cluster.

    It ends with `down`, and also when this process dies: a guard waits for the end of a pipe that only we hold. It is
    no child of ours: a supervisor that a test runs in this process ends all children of it that it does not know.
    """

    shared: Path
    """A folder that every node sees."""
    netns: bool
    """Whether each node has namespaces of its own; otherwise all are on 127.0.0.1."""
    num_gpu_nodes: int
    num_nodes: int
    env: dict[str, str]
    """Environment in which Slurm's commands and prime-hpc find this cluster; with namespaces only through `x`."""

    def __init__(self, *options: str, num_nodes: int = 6) -> None:
        """Start it. Raises ClusterError (`code` is `up`'s exit code)."""
        folder = Path(tempfile.mkdtemp(prefix="prime-hpc-slurm-"))
        if len(str(folder)) > 50:  # sockets' paths are short
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="prime-hpc-slurm-", dir="/tmp"))
        folder.chmod(0o755)
        self._folder = folder
        self.state = folder / "cluster"
        self.shared = folder / "shared"
        self.shared.mkdir()
        script = 'cat >/dev/null; "$0" --dir "$1" down --clean >&2 && rm -rf "$2"; echo $?'
        self._guard = subprocess.Popen(
            ["setsid", "--fork", "sh", "-c", script, DEVCLUSTER, self.state, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "down.log").open("wb"),
        )
        try:
            self.drill("up", str(num_nodes), *options, timeout=900)
        except BaseException:
            self.down()
            raise
        settings = dict(line.split("=", 1) for line in (self.state / "run" / "cluster.env").read_text().splitlines())
        self.netns = settings["MODE"] == "netns"
        self.num_nodes, self.num_gpu_nodes = int(settings["N"]), int(settings["GPU_NODES"])
        # certificates: nodes of another root have them elsewhere
        own = ("SLURM_", "SRUN_", "SBATCH_", "PRIMEHPC_", "PRIME_", "SSL_CERT_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.env |= {"SLURM_CONF": str(self.state / "etc" / "slurm.conf"), "PRIMEHPC_DEVCLUSTER": str(self.state)}

    def down(self) -> None:
        """End all of it and remove its folder. Again: nothing."""
        if self._guard.stdin is None or self._guard.stdin.closed:
            return
        code = self._guard.communicate(timeout=600)[0].strip()  # a root of another suite has many files
        if code != b"0":  # what still runs is found by its folder alone
            said = (self._folder / "down.log").read_text(errors="replace")
            how = f"ended with code {code.decode()}" if code else "was killed"
            warnings.warn(f"{self._folder} is left: `down` {how}: {said[-500:]}", stacklevel=2)
            return
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- commands

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on the head node, for subprocess.Popen with `env`."""
        return [str(DEVCLUSTER), "--dir", str(self.state), "x", *map(str, argv)]

    def x(
        self,
        argv: Sequence[str],
        timeout: float = 60,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the head node; its exit code, stdout and stderr come back as they are.

        Args:
            timeout: seconds, more on a busy machine; subprocess.TimeoutExpired after it, with the command killed.
            env: more environment.
            cwd: its directory; default: `shared`.
            options: of subprocess.run.
        """
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self.command(argv),
            env=self.env | dict(env or {}),
            cwd=cwd or self.shared,
            capture_output=True,
            text=True,
            timeout=timeout * slowness(),
            **options,
        )
        return done

    def ask(self, *argv: str, timeout: float = 60) -> str:
        """Stripped stdout of a command on the head node that must succeed."""
        done = self.x(argv, timeout)
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {done.stdout}{done.stderr}", done.returncode)
        return done.stdout.strip()

    def drill(self, name: str, *args: str, timeout: float = 60) -> str:
        """One of devcluster's own commands (`power-off n3`, `preempt 5`, ...). Raises ClusterError; returns stdout."""
        done = subprocess.run(
            [DEVCLUSTER, "--dir", self.state, name, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout * slowness(),
        )
        if done.returncode != 0:
            raise ClusterError(f"devcluster {name} {' '.join(args)}: {done.stderr}", done.returncode)
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str) -> str:
        """Send the lines of a script; returns the job id. Its output is `<job id>.out` in `shared`."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        output = ["--output", f"{self.shared}/%j.out", "--open-mode=append"]
        done = self.x(["sbatch", "--parsable", *output, *options], input=text)
        if done.returncode != 0:
            raise ClusterError(f"sbatch {' '.join(options)}: {done.stderr}", done.returncode)
        return done.stdout.strip()

    # ---- looking and waiting

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Reason, Restarts, NodeList, ..."""
        question = ("scontrol", "--oneliner", "show", "job", job_id)
        try:
            answer = self.ask(*question)
        except ClusterError as error:
            if error.code != -signal.SIGPIPE:  # the controller closed the connection while scontrol wrote into it
                raise
            answer = self.ask(*question)
        words = answer.splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job_id: str) -> str:
        """What a job of `sbatch` has printed so far."""
        path = self.shared / f"{job_id}.out"
        return path.read_text() if path.exists() else ""

    def wait_until(self, holds: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Until `holds()`. Raises ClusterError with `what` and the queue after `timeout` seconds, on a machine that is
        busy with other work so many more times as long."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() > began + timeout * slowness():
                queue = self.x(["squeue"]).stdout + self.x(["sinfo", "-N", "-p", "all", "-o", "%N %T %E"]).stdout
                raise ClusterError(f"{time.monotonic() - began:.0f} s went by without: {what}\n{queue}")
            time.sleep(0.2)

    def wait_state(self, job_id: str, states: str | Collection[str], timeout: float = 60) -> str:
        """Until the job is in one of `states`; returns which."""
        wanted = {states} if isinstance(states, str) else set(states)
        state = ""

        def there() -> bool:
            nonlocal state
            state = self.job(job_id)["JobState"]
            return state in wanted

        self.wait_until(there, f"job {job_id} {' or '.join(sorted(wanted))}", timeout)
        return state

    def is_idle(self) -> bool:
        """No job is in the queue and every node takes jobs."""
        queue = self.x(["squeue", "-h"])
        nodes = self.x(["sinfo", "-h", "-N", "-p", "all", "-o", "%T"])
        return queue.stdout + queue.stderr == "" and set(nodes.stdout.split()) == {"idle"}

    def wait_idle(self, timeout: float = 30) -> None:
        """Until no job is in the queue and every node is idle."""
        self.wait_until(self.is_idle, "an idle cluster", timeout)

    def heal(self, timeout: float = 90) -> None:
        """Whatever a test left behind: daemons started again, jobs cancelled, cables plugged, nodes idle."""
        if self.is_idle():
            return
        if self.netns:
            for node in (f"n{i + 1}" for i in range(self.num_nodes)):
                try:
                    self.drill("join", node)
                except ClusterError:
                    pass  # it is powered off; `up` starts it
        self.drill("up", timeout=120)
        jobs = set(self.ask("squeue", "-h", "-o", "%A").split())
        if jobs:
            self.x(["scancel", "--full", "--signal=KILL", *jobs])  # what traps SIGTERM would take KillWait
            self.x(["scancel", *jobs])
        for line in self.ask("sinfo", "-h", "-N", "-p", "all", "-t", "drain,down", "-o", "%N").split():
            self.x(["scontrol", "update", f"NodeName={line}", "State=RESUME"])
        self.wait_idle(timeout)
