"""sbatch, squeue, scancel, scontrol, sinfo and sacct on PATH that keep a queue in a file and fail as they are told to.

For failures that a real Slurm does not have on demand: a hang, a lost answer, a refusal. In a test:

    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    fake.behave("sbatch", hang="after")         # takes the job, and never answers
    ...
    assert [job["state"] for job in fake.jobs()] == ["PENDING"]

The same file is the program: `python fake_slurm.py sbatch STATE_FOLDER ARGUMENTS...`.
"""

import fcntl
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr", "srun")
HANG_S = 600.0


class FakeSlurm:
    """A queue that a test looks into and changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fake-slurm"
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text("ClusterName=fake\n")
        for name in COMMANDS:
            program = self.bin / name
            words = shlex.join([sys.executable, "-SE", __file__, name, str(self.folder)])
            program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            program.chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to meet this Slurm and no other."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "PRIMEHPC_"))}
        return clean | {"PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_CONF": str(self.conf)}

    def use(self, monkeypatch: Any) -> None:
        """Put the commands before the real ones for this process."""
        for name in [k for k in os.environ if k.startswith(("SLURM_", "SBATCH_", "PRIMEHPC_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", self.environ["PATH"])
        monkeypatch.setenv("SLURM_CONF", str(self.conf))

    def remove(self, *names: str) -> None:
        """Uninstall commands."""
        for name in names:
            (self.bin / name).unlink()

    def behave(self, command: str, **how: Any) -> None:
        """Change what a command does from now on; without keywords: as it should.

        Args:
            command: e.g. `sbatch`.
            how: `hang`: `before` or `after` it did its work; `code` and `stderr`: fail before doing anything;
                `late`: seconds after which the work is done by a process of its own, while the command hangs;
                `say`: replaces its answer; `only_once`: the next call behaves again.
        """
        with _state(self.folder) as state:
            state["behaviour"][command] = how

    def jobs(self) -> list[dict[str, Any]]:
        """The queue, by job id."""
        with _state(self.folder) as state:
            return sorted(state["jobs"], key=lambda job: int(job["id"]))

    def change(self, job_id: str, **fields: Any) -> None:
        """Set fields of a job: `state`, `reason`, `nodes`, `comment`, `restarts`, ...

        Of those that scontrol shows, by its own names: `shown`, and `components` of a het job, by offset.
        """
        with _state(self.folder) as state:
            for job in state["jobs"]:
                if job["id"] == job_id:
                    job.update(fields)

    def expect(self, text: str, **how: Any) -> None:
        """Answer `sbatch --test-only` about scripts with this text in them, the first that fits.

        Args:
            text: e.g. `--nodes=2`.
            how: `after`: it would start in so many seconds, `nodes`: on these; `say`: other words; `code`: refused with
                them; `hang`: no answer.
        """
        with _state(self.folder) as state:
            state["expected"].append([text, how])

    def limit(self, most: int | None) -> None:
        """Let a user have so many jobs in the queue from now on; None: any number."""
        with _state(self.folder) as state:
            state["limit"] = most

    def set_comments(self, text: str | None) -> None:
        """As a site's job_submit plugin, give every job this comment from now on; None: leave them."""
        with _state(self.folder) as state:
            state["comment"] = text

    def forget(self, job_id: str) -> None:
        """As the controller does some minutes after a job's end."""
        with _state(self.folder) as state:
            state["jobs"] = [job for job in state["jobs"] if job["id"] != job_id]

    def add(self, **fields: Any) -> str:
        """A job that somebody else submitted; returns its id."""
        with _state(self.folder) as state:
            return _new_job(state, fields)

    def calls(self, command: str | None = None) -> list[list[str]]:
        """Command lines so far."""
        with _state(self.folder) as state:
            return [argv for argv in state["calls"] if command is None or argv[0] == command]

    def environment_of(self, job_id: str) -> dict[str, str]:
        """Environment in which sbatch was called for a job."""
        return dict(next(job for job in self.jobs() if job["id"] == job_id)["environ"])


@contextmanager
def _state(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "state.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(path.read_text()) if path.exists() else {}
        state = {"next": 100, "jobs": [], "behaviour": {}, "calls": [], "comment": None} | state
        state = {"expected": [], "limit": None} | state
        yield state
        path.write_text(json.dumps(state))


def _new_job(state: dict[str, Any], fields: dict[str, Any]) -> str:
    job_id = str(state["next"])
    size = int(fields.get("size", 1))
    state["next"] += size
    defaults = {"state": "PENDING", "reason": "Priority", "nodes": "", "comment": "", "name": "x", "restarts": 0}
    state["jobs"].append({**defaults, "num_nodes": 1, "size": 1, "array": None, "environ": {}, **fields, "id": job_id})
    return job_id


def _program(command: str, folder: Path, argv: list[str]) -> int:
    if argv and argv[0].startswith("--clusters="):
        os.environ["FAKE_CLUSTER"] = argv[0].partition("=")[2]
    with _state(folder) as state:
        state["calls"].append([command, *argv])
        how = state["behaviour"].get(command, {})
        if how.get("only_once"):
            state["behaviour"][command] = {}
    if "code" in how:
        print(how.get("stderr", ""), file=sys.stderr)
        return int(how["code"])
    if how.get("hang") == "before":
        time.sleep(HANG_S)
    if "late" in how:
        if os.fork() == 0:  # what the controller does with a request that has reached it
            os.setsid()
            time.sleep(how["late"])
            _DO[command](folder, argv)
            return 0
        time.sleep(HANG_S)
    if "FAKE_CLUSTER" in os.environ:
        argv = argv[1:]
    try:
        answer = _DO[command](folder, argv)
    except _RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    if how.get("hang") == "after":
        time.sleep(HANG_S)
    print(how.get("say", answer))
    return 0


class _RefusedError(Exception):
    """The command ends with exit code 1 and these words."""


def _test_only(folder: Path) -> str:
    script = sys.stdin.read()
    with _state(folder) as state:
        how = next((how for text, how in state["expected"] if text in script), {"after": 0})
    if how.get("hang"):
        time.sleep(HANG_S)
    if "code" in how:
        raise _RefusedError(how.get("say", ""))
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + how.get("after", 0)))
    nodes = how.get("nodes") or f"n[1-{sum(map(int, re.findall(r'--nodes=([0-9]+)', script)))}]"
    said = f"sbatch: Job 9 to start at {start} using 1 processors on nodes {nodes} in partition gpu"
    print(how.get("say", said), file=sys.stderr)
    return ""


def _active(state: dict[str, Any]) -> int:
    return sum(len(_parts(job)) for job in state["jobs"] if job["state"] in ("PENDING", "RUNNING"))


def _sbatch(folder: Path, argv: list[str]) -> str:
    if "--test-only" in argv:
        return _test_only(folder)
    script = Path(argv[-1]).read_text()
    header = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    options: dict[str, str] = {}
    for line in [*header[: next((i for i, x in enumerate(header) if "hetjob" in x), None)], *argv]:
        for word in shlex.split(line.removeprefix("#SBATCH ")) if line.startswith("#") else [line]:
            name, _, value = word.partition("=")
            if name.startswith("--"):
                options[name[2:]] = value
    with _state(folder) as state:
        job_id = _new_job(
            state,
            {
                "comment": options.get("comment", "") if state["comment"] is None else state["comment"],
                "name": options.get("job-name", Path(argv[-1]).name),
                "num_nodes": int(options.get("nodes", "1")),
                "dependency": options.get("dependency"),
                "array": options.get("array"),
                "size": 1 + sum("hetjob" in line for line in header),
                "script": argv[-1],
                "text": script,
                "cluster": os.environ.get("FAKE_CLUSTER"),
                "cwd": str(Path.cwd()),
                "environ": {k: v for k, v in os.environ.items() if k.startswith(("SLURM", "SBATCH", "PRIMEHPC"))},
            },
        )
        if state["limit"] is not None and _active(state) > state["limit"]:  # raised here, the job is not kept
            words = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
            raise _RefusedError(f"sbatch: error: AssocMaxSubmitJobLimit\nBatch job submission failed: {words}")
    return f"{job_id};{os.environ['FAKE_CLUSTER']}" if "FAKE_CLUSTER" in os.environ else job_id


def _here(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The jobs of the cluster that is asked."""
    return [job for job in state["jobs"] if job.get("cluster") == os.environ.get("FAKE_CLUSTER")]


def _squeue(folder: Path, argv: list[str]) -> str:
    flags = dict(zip(argv, [*argv[1:], ""], strict=True))
    with _state(folder) as state:
        jobs = _here(state)
    if "-j" in flags:
        wanted = flags["-j"].split(",")
        jobs = [job for job in jobs if job["id"] in wanted]
    if flags.get("-o") == "%S":
        return "N/A"
    rows = []
    for job in jobs:
        for part in _parts(job):
            fields = re.findall(r"(\w+):0([^,]*)", flags["-O"])
            rows.append("".join(str(part.get(name, "N/A")) + tail for name, tail in fields))
    return "\n".join(rows)


def _parts(job: dict[str, Any]) -> list[dict[str, Any]]:
    common = {
        "State": job["state"],
        "Reason": job["reason"] or "None",
        "NumNodes": job["num_nodes"],
        "NodeList": job["nodes"],
        "StartTime": job.get("start", "N/A"),
        "TimeLeft": "10:00",
        "RestartCnt": job["restarts"],
        "Name": job["name"],
        "Comment": job["comment"] or "(null)",
        "Command": job.get("script") or "(null)",
        "Account": job.get("account", "mine"),
        "QOS": job.get("qos", "normal"),
        "JobID": job["id"],
        "JobArrayID": job["id"],
    }
    if job["array"]:
        ranges = [part.partition("-") for part in job["array"].partition("%")[0].split(",")]
        tasks = [i for low, _, high in ranges for i in range(int(low), int(high or low) + 1)]
        return [{**common, "JobArrayID": f"{job['id']}_{i}"} for i in tasks]
    if job["size"] > 1:
        leader = int(job["id"])
        return [{**common, "JobID": leader + i, "HetJobID": leader, "HetJobOffset": i} for i in range(job["size"])]
    return [common]


def _scancel(folder: Path, argv: list[str]) -> str:
    named = {word.partition("_")[0] for word in argv}  # the tasks of an array have one state here
    with _state(folder) as state:
        for job in _here(state):
            if job["id"] in named and job["state"] in ("PENDING", "RUNNING"):
                job["state"] = "CANCELLED"
    return ""


def _scontrol(folder: Path, argv: list[str]) -> str:
    if argv[:2] == ["show", "job"]:
        with _state(folder) as state:
            job = next(job for job in state["jobs"] if job["id"] == argv[-1])
        shown = {"JobState": job["state"], "StdOut": job.get("stdout", ""), "NumNodes": job["num_nodes"]}
        shown |= {"Partition": "gpu", **job.get("shown", {})}
        lines = []
        for i in range(job["size"]):
            het = {"HetJobId": job["id"], "HetJobOffset": i} if job["size"] > 1 else {}
            facts = {"JobId": int(job["id"]) + i, **het, **shown, **job.get("components", {}).get(str(i), {})}
            lines.append(" ".join(f"{name}={value}" for name, value in facts.items()))
        return "\n".join(lines)
    if argv[:2] == ["write", "batch_script"] and argv[-1] == "-":
        with _state(folder) as state:
            return next(str(job.get("text", "")) for job in state["jobs"] if job["id"] == argv[2])
    return ""


def _sinfo(folder: Path, argv: list[str]) -> str:
    return "gpu\ncpu"


def _nothing(folder: Path, argv: list[str]) -> str:
    return ""


_DO = {
    "sbatch": _sbatch,
    "squeue": _squeue,
    "scancel": _scancel,
    "scontrol": _scontrol,
    "sinfo": _sinfo,
    "sacct": _nothing,
    "sacctmgr": _nothing,
    "srun": _nothing,
}


if __name__ == "__main__":
    sys.exit(_program(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
