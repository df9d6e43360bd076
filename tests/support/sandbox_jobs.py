"""A real job whose environments have sandboxes, and everything that it starts as this machine's root sees it."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from prime_hpc.envs.sandbox.sandbox_process import first_inside
from tests.support.runs import ROOT
from tests.support.sandboxes import members
from tests.support.slurm import Cluster
from tests.support.small_jobs import make_folder, rl_with_engines
from tests.support.tool_replies import PROBLEM

PROBE = """
import glob, os, socket
leaks = [name for name in os.environ if name.startswith(("SLURM", "PRIME", "SCRIPTED", "SECRET"))]
def attempt(what, action):
    try:
        action()
    except OSError:
        return
    leaks.append(what)
for path in {paths}:
    attempt(path, lambda: os.stat(path))
attempt("the controller", lambda: socket.create_connection({controller}, 2))
attempt("write", lambda: open({tools!r} + "/x", "w"))
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        leaks += [path] if b"hidden-word" in open(path, "rb").read() else []
    except OSError:
        pass
print("leaks:", leaks, "processes:", sum(name.isdigit() for name in os.listdir("/proc")))
for _ in range(3):  # what a command leaves behind ends with it
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "600"])
"""


class Observed:
    """A job with sandboxes, and all its processes as this machine's root sees them."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        folder = cluster.shared / name
        self.tools, self.temporary = folder / "tools", folder / "tmp"
        for made in (self.tools, self.temporary):
            made.mkdir(parents=True)
        self.name, self.namespaces = name, set[str]()
        self.run_dir = make_folder(cluster) / "out" / name
        config = cluster.shared / "model" / "config.json"  # tools are described in many tokens
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2048}))

    def submit(self, code: str, workers: int, *, steps: int = 2, **sandbox: Any) -> str:
        """Send it: python-tool runs `code`, HumanEval's checker a program."""
        (self.tools / "code.py").write_text(code)
        (self.tools / "humaneval.jsonl").write_text(json.dumps(PROBLEM) + "\n")
        box = {"read_only": [str(self.tools)], "memory_mib": 256, "warm": 1, **sandbox}
        problem = {"id": "humaneval", "args": {"data": str(self.tools / "humaneval.jsonl")}}
        job, run_dir = rl_with_engines(
            self.cluster,
            self.cluster.shared,
            self.name,
            {},
            steps=steps,
            replies="tests.support.tool_replies:use_python",
            env={
                "SCRIPTED_CODE": f"exec(open({str(self.tools / 'code.py')!r}).read())",
                "SECRET": "hidden-word",
                "TMPDIR": str(self.temporary),
            },
            orchestrator={
                "env": [
                    {"id": "python-tool", "sandbox": box, "workers": workers, "timeout_s": 600},
                    {**problem, "sandbox": box, "workers": workers},
                ],
                "sampling": {"max_tokens": 200},
                "traces": {},
            },
            seq_len=1536,
        )
        assert run_dir == self.run_dir
        return job

    def processes(self) -> list[str]:
        """Command lines of all that the job has started; what is in sandboxes is remembered for `left`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words = process.cmdline()
                makes_sandboxes = any(str(self.tools) in word for word in words)
                if makes_sandboxes or str(self.temporary) in process.environ().get("TMPDIR", ""):
                    found.append(" ".join(words)[:200])
                if makes_sandboxes and (first := first_inside(process.pid)):
                    self.namespaces.add(str(Path(f"/proc/{first}/ns/pid").readlink()))
        return found

    def left(self) -> list[Any]:
        """What is left of it: processes, in sandboxes too, and files outside of its run directory."""
        inside = [pid for namespace in self.namespaces for pid in members(namespace)]
        return [*self.processes(), *inside, *self.temporary.iterdir()]

    def rollouts(self, env: str) -> list[dict[str, Any]]:
        """All that were played of an environment."""
        files = sorted((self.run_dir / "traces").iterdir())
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == "rollout" and line["env"] == env]

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 240) -> None:
        def holds() -> bool:
            self.processes()
            return bool(condition())

        self.cluster.wait_until(holds, what, timeout)

    def inside(self) -> int:
        """Processes in sandboxes."""
        return sum(len(members(namespace)) for namespace in self.namespaces)


def controller(cluster: Cluster) -> tuple[str, int]:
    """Where Slurm's controller listens, which every node reaches."""
    told = cluster.ask("scontrol", "show", "config")
    (port,) = re.findall(r"SlurmctldPort *= (\d+)", told)
    (address,) = re.findall(r"SlurmctldHost\[0\] *= \S+\((\S+)\)", told)
    return address, int(port)


def probe(seen: Observed) -> str:
    """Return a program that looks for everything of the job and its node; it prints what it found."""
    cluster = seen.cluster
    hidden = [seen.run_dir, cluster.shared / "model", cluster.shared / "site.yaml", cluster.state, ROOT / "prime_hpc"]
    hidden += [Path.home() / ".cache", seen.temporary, Path("/var/log/apt/history.log"), Path("/run")]
    return PROBE.format(paths=[str(path) for path in hidden], controller=controller(cluster), tools=str(seen.tools))
