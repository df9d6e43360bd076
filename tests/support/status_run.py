"""Run directories of which `status` tells, and Slurm's answers about them."""

import json
import os
import time
from pathlib import Path
from typing import Any

from prime_hpc.launch.monitor.run_facts import Queue, RunStatus
from prime_hpc.launch.monitor.status import Ask, status_of
from prime_hpc.slurm.jobs import JobInfo


class Run:
    """A run directory as `submit` and the supervisor leave it."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, time.time()  # ages count from now
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.yaml").write_text("kind: rl\nname: x\nmax_steps: 40\nckpt:\n  interval: 5\n  path: null\n")

    def sent(self, job_id: str | None = "12", state: str = "sent", age: float = 600, **fields: Any) -> "Run":
        row = {"token": "tok", "state": state, "job_id": job_id, "time": self.now - age, "successor": None, **fields}
        (self.path / "submit.json").write_text(json.dumps(row))
        return self

    def attempt(
        self, number: int = 1, *, ended: float | None = None, outcome: str | None = None, **fields: Any
    ) -> "Run":
        row = {
            **{
                "attempt": number,
                "began": self.now - 500,
                "why": "first start",
                "host": "n1",
                "pid": 1,
                "job_id": "12",
            },
            **{"ended": None if ended is None else self.now - ended, "outcome": outcome, "cause": None, "restarts": 0},
            **{"nodes": {"trainer": ["n1", "n2"], "inference[0]": ["n3"]}, "next": None},
        }
        with (self.path / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(row | fields) + "\n")
        return self

    def word(self, state: str = "running", *, age: float = 1, **fields: Any) -> "Run":
        row = {"time": self.now - age, "state": state, "step": 7, "max_steps": 40, "reward": 0.5, "attempt": 1}
        row |= {"roles": {"trainer": "ready"}, "nodes": {"trainer": ["n1"]}}
        path = self.path / "status.json"
        path.write_text(json.dumps(row | fields))
        os.utime(path, (self.now - age, self.now - age))
        return self

    def metrics(self, role: str, rows: list[dict[str, Any]]) -> "Run":
        (self.path / "metrics").mkdir(exist_ok=True)
        with (self.path / "metrics" / f"{role}.jsonl").open("a") as file:
            file.writelines(json.dumps({"time": self.now, **row}) + "\n" for row in rows)
        return self

    def status(self, *jobs: JobInfo, trouble: str | None = None) -> RunStatus:
        return status_of(self.path, ask=answering(*jobs, trouble=trouble), details=False)


def answering(*jobs: JobInfo, trouble: str | None = None) -> Ask:
    return lambda wanted, by_token: Queue({job.job_id: job for job in jobs}, trouble)


def job(state: str, job_id: str = "12", **fields: Any) -> JobInfo:
    return JobInfo(job_id=job_id, state=state, **{"comment": "prime-hpc:tok", **fields})
