"""One job as `scontrol show job` tells of it, for tests of its time limit."""

import time


def shown(limit: str, end: float | None, state: str = "RUNNING") -> str:
    when = "Unknown" if end is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    return f"JobId=7 JobState={state} TimeLimit={limit} EndTime={when} Deadline=N/A"
