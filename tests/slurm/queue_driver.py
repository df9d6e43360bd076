"""What `test_submit` has done on the cluster's login node, where the controller can be reached: prints JSON.

python queue_driver.py results FOLDER      jobs of every form through the executors, until all have ended
python queue_driver.py successor FOLDER    successors of a job that ends well, of one that ends ill, of a het job
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import UncompletedJobError

from prime_hpc.launch.job import local_job
from prime_hpc.slurm.executors import RunExecutor, RunJob
from prime_hpc.slurm.jobs import find_by_token, job
from prime_hpc.slurm.queue import queue_successor
from prime_hpc.slurm.submission_record import new_token, open_record, write_record
from prime_hpc.store.run_dirs import read_record

RESULT = """import json, os, pathlib, sys
name = os.environ["SLURM_JOB_ID"]
if "SLURM_ARRAY_TASK_ID" in os.environ:
    name = os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
pathlib.Path(sys.argv[1], "logs/submitit", name + "_0_result.json").write_text(json.dumps(["success", 7]))
"""
LIMIT_S = 60.0


def script(folder: Path, body: str, *, header: str = "", parts: str = "", token: str = "t") -> str:
    """A batch script in the form of `render_job`, small."""
    lines = ["#!/bin/bash", f'#SBATCH --output="{folder}/logs/slurm-%j.out"', "#SBATCH --time=5 --mem=100"]
    lines += [f"#SBATCH --comment=prime-hpc:{token} {header}", parts, "set -eu", body]
    return "\n".join(lines) + "\n"


def leave_result(folder: Path) -> str:
    (folder / "result.py").write_text(RESULT)
    return f"'{sys.executable}' '{folder}/result.py' '{folder}'"


def wait_for(what: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := what()):
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError("it never happened")
        time.sleep(0.2)
    return found


def told(made: Job[Any]) -> dict[str, Any]:
    """What submitit says of a job that has ended."""
    try:
        result: Any = made.result()
    except UncompletedJobError as error:
        result = str(error).splitlines()[1]
    return {"id": made.job_id, "state": made.state, "result": result, "log": made.stdout()}


def results(folder: Path) -> dict[str, Any]:
    """Submit all at once, read all back."""
    RunJob._results_timeout_s = 0
    RunJob.watcher._delay_s = 1
    made: dict[str, Job[Any]] = {}

    def folder_of(name: str) -> Path:
        (folder / name).mkdir(parents=True)
        return folder / name

    one = folder_of("packed run")
    text = script(one, f"echo packed $SLURM_JOB_NUM_NODES\n{leave_result(one)}", header="-N2")
    made["packed"] = RunExecutor(one, text).submit(local_job, str(one), {})
    two = folder_of("het")
    parts = "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1 --mem=100 --comment=prime-hpc:t"
    text = script(two, f"srun --het-group=0,1 hostname\n{leave_result(two)}", parts=parts)
    made["het"] = RunExecutor(two, text).submit(local_job, str(two), {})
    three = folder_of("failed")
    made["failed"] = RunExecutor(three, script(three, "echo no; exit 3")).submit(local_job, str(three), {})
    four = folder_of("killed")
    made["killed"] = RunExecutor(four, script(four, "echo gone; kill -9 $$")).submit(local_job, str(four), {})
    five = folder_of("array")
    text = script(five, leave_result(five), header="--array=1-3%2").replace("%j", "%A_%a")
    points = RunExecutor(five, text).submit_points(dict.fromkeys([1, 2, 3], five))
    made |= {f"point {number}": point for number, point in enumerate(points, 1)}
    six = folder_of("cancelled")
    made["cancelled"] = RunExecutor(six, script(six, "sleep 60"), options=["--begin=now+1hour"]).submit(
        local_job, str(six), {}
    )
    waiting = made["cancelled"].state
    made["cancelled"].cancel()
    wait_for(lambda: all(each.done() for each in made.values()))
    return {name: told(each) for name, each in made.items()} | {"waiting": waiting, "asked": RunJob.watcher.num_calls}


def successor(folder: Path) -> dict[str, Any]:
    """A job, and one behind it that waits for its ill end."""
    said: dict[str, Any] = {}
    for name, body, parts in (
        ("well", "exit 0", ""),
        ("ill", "exit 1", ""),
        ("het", "exit 1", "#SBATCH hetjob\n#SBATCH --mem=100 --dependency="),
    ):
        own, token = folder / name, new_token()
        (own / "logs").mkdir(parents=True)
        text = script(own, body, parts=parts, token=token)
        open_record(own, token=token, state="sent", command=["x"], layout="packed", cluster=None)
        # it waits a little, so that the second is queued before the first has ended
        first = RunExecutor(own, text, options=["--begin=now+2"]).submit(local_job, str(own), {}).job_id
        write_record(own, job_id=first)
        second = queue_successor(own, first, is_first=True)
        again = queue_successor(own, first)
        info = job(second)
        said[name] = {
            "same": again == second == (read_record(own) or {})["successor"],
            "jobs": len(find_by_token(token)),
            "job_id": second,
            "reason": info.reason if info else None,
            "components": len(info.components) if info else None,
        }
    for one in said.values():
        one["state"] = wait_for(partial(_last_state, one["job_id"]))
    return said


def _last_state(job_id: str) -> str | None:
    """In which state the job ended; None before."""
    info = job(job_id)
    return info.state if info is not None and not info.is_active else None


if __name__ == "__main__":
    print(json.dumps({"results": results, "successor": successor}[sys.argv[1]](Path(sys.argv[2]))))
