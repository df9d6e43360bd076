"""The commands of `fake_slurm`: `main(command, folder, arguments)` is one call of one of them.

A test makes dozens of calls, each a process of its own. So this file imports next to nothing, and what it keeps is
written by `marshal`, which is in every interpreter: json, re, pathlib and typing take twice the CPU of all the rest.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANG_S = 600.0


class State:
    """`with State(folder) as state`: the queue, which nobody else changes meanwhile."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(f"{folder}/state", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._state: dict[str, Any] = {"next": 100, "jobs": [], "behaviour": {}, "calls": [], "comment": None}
        self._state |= {"expected": [], "limit": None}

    def __enter__(self) -> dict[str, Any]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if size := os.fstat(self._file).st_size:
            self._state |= marshal.loads(os.pread(self._file, size, 0))
        return self._state

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:  # at one stroke, as a command may be killed; what a longer state left behind it is not read
            os.pwrite(self._file, marshal.dumps(self._state), 0)
        os.close(self._file)


def new_job(state: dict[str, Any], fields: dict[str, Any]) -> str:
    job_id = str(state["next"])
    size = int(fields.get("size", 1))
    state["next"] += size
    defaults = {"state": "PENDING", "reason": "Priority", "nodes": "", "comment": "", "name": "x", "restarts": 0}
    state["jobs"].append({**defaults, "num_nodes": 1, "size": 1, "array": None, "environ": {}, **fields, "id": job_id})
    return job_id


def main(command: str, folder: str, argv: list[str]) -> int:
    """Do what a command does; its exit code."""
    if argv and argv[0].startswith("--clusters="):
        os.environ["FAKE_CLUSTER"] = argv[0].partition("=")[2]
    with State(folder) as state:
        state["calls"].append([command, *argv])
        how = state["behaviour"].get(command, {})
        if how.get("only_once"):
            state["behaviour"][command] = {}
        is_late = "late" in how
        # what the controller does with a request that has reached it; before anybody sees the call, and kills us
        is_request = is_late and os.fork() == 0
        if is_request:
            os.setsid()
    if "stderr" in how:
        print(how["stderr"], file=sys.stderr)
    if "code" in how:
        return int(how["code"])
    if how.get("hang") == "before":
        time.sleep(HANG_S)
    if is_request:
        time.sleep(how["late"])
        _DO[command](folder, argv)
        return 0
    if is_late:
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


def _test_only(folder: str) -> str:
    script = sys.stdin.read()
    with State(folder) as state:
        how = next((how for text, how in state["expected"] if text in script), {"after": 0})
    if how.get("hang"):
        time.sleep(HANG_S)
    if "code" in how:
        raise _RefusedError(how.get("say", ""))
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + how.get("after", 0)))
    sizes = [word.split()[0] for word in script.split("--nodes=")[1:]]
    nodes = how.get("nodes") or f"n[1-{sum(map(int, sizes))}]"
    said = f"sbatch: Job 9 to start at {start} using 1 processors on nodes {nodes} in partition gpu"
    print(how.get("say", said), file=sys.stderr)
    return ""


def _active(state: dict[str, Any]) -> int:
    return sum(len(_parts(job)) for job in state["jobs"] if job["state"] in ("PENDING", "RUNNING"))


def _sbatch(folder: str, argv: list[str]) -> str:
    if "--test-only" in argv:
        return _test_only(folder)
    import shlex  # this command alone needs them
    from pathlib import Path

    script = Path(argv[-1]).read_text()
    header = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    options: dict[str, str] = {}
    for line in [*header[: next((i for i, x in enumerate(header) if "hetjob" in x), None)], *argv]:
        for word in shlex.split(line.removeprefix("#SBATCH ")) if line.startswith("#") else [line]:
            name, _, value = word.partition("=")
            if name.startswith("--"):
                options[name[2:]] = value
    with State(folder) as state:
        job_id = new_job(
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


def _squeue(folder: str, argv: list[str]) -> str:
    flags = dict(zip(argv, [*argv[1:], ""], strict=True))
    with State(folder) as state:
        jobs = _here(state)
    if "-j" in flags:
        wanted = flags["-j"].split(",")
        jobs = [job for job in jobs if job["id"] in wanted]
    if flags.get("-o") == "%S":
        return "N/A"
    fields = [field.partition(":0") for field in flags["-O"].split(",")]
    rows = [] if "-h" in argv else ["".join(name.upper() + tail for name, _, tail in fields)]
    for job in jobs:
        for part in _parts(job):
            rows.append("".join(str(part.get(name, "N/A")) + tail for name, _, tail in fields))
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


def _scancel(folder: str, argv: list[str]) -> str:
    named = {word.partition("_")[0] for word in argv}  # the tasks of an array have one state here
    with State(folder) as state:
        for job in _here(state):
            if job["id"] in named and job["state"] in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED"):
                job["state"] = "CANCELLED"
    return ""


def _scontrol(folder: str, argv: list[str]) -> str:
    if argv[:2] == ["show", "job"]:
        with State(folder) as state:
            job = next(job for job in state["jobs"] if job["id"] == argv[-1])
        shown = {"JobState": job["state"], "StdOut": job.get("stdout", ""), "NumNodes": job["num_nodes"]}
        shown |= {"Partition": "gpu", "Restarts": job["restarts"], **job.get("shown", {})}
        lines = []
        for i in range(job["size"]):
            het = {"HetJobId": job["id"], "HetJobOffset": i} if job["size"] > 1 else {}
            facts = {"JobId": int(job["id"]) + i, **het, **shown, **job.get("components", {}).get(str(i), {})}
            lines.append(" ".join(f"{name}={value}" for name, value in facts.items()))
        return "\n".join(lines)
    if argv[0] == "requeue":
        with State(folder) as state:
            job = next(job for job in state["jobs"] if job["id"] == argv[-1])
            job |= {"state": "PENDING", "restarts": job["restarts"] + 1}
    if argv[:2] == ["write", "batch_script"] and argv[-1] == "-":
        with State(folder) as state:
            return next(str(job.get("text", "")) for job in state["jobs"] if job["id"] == argv[2])
    return ""


def _sinfo(folder: str, argv: list[str]) -> str:
    return "gpu\ncpu"


def _nothing(folder: str, argv: list[str]) -> str:
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
