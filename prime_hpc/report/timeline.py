"""Lanes of the timeline that come from attempts and from the supervisor's word on each role.

`metrics/roles.jsonl` has a line for every change of a role's state, from the supervisor; runs of versions before it
have none, and then the attempts alone are drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.report.series import Faults, number_of, read_lines
from prime_hpc.store.run_dirs import IN_PLACE

MOST_LANES = 64
MOST_SPANS = 20_000


def job_lanes(spent: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], origin: float) -> list[dict[str, Any]]:
    """Return the spans of the job: in the queue or down, starting, running; seconds since `origin`."""
    spans: list[dict[str, Any]] = []
    for index, row in enumerate(spent["rows"]):
        began = row["began"] - origin
        if row["waited"] > 0:
            spans.append(
                {
                    "state": _gap(index, row, attempts),
                    "start": began - row["waited"],
                    "end": began,
                    "of": row["attempt"],
                }
            )
        ready = began + row["trainer"]["start"]
        spans.append({"state": "start", "start": began, "end": ready, "of": row["attempt"]})
        spans.append({"state": "run", "start": ready, "end": began + row["wall"], "of": row["attempt"]})
    return [span for span in spans if span["end"] > span["start"]]


def _gap(index: int, row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> str:
    """A job waits in the queue before it begins, and where it comes back by itself; else nothing runs."""
    if index == 0:
        return "queue" if row["job"] else "waiting"
    following = attempts[index - 1].get("next")
    return "queue" if following != IN_PLACE and (following or row["job"]) else "down"


def ready_times(path: Path) -> dict[int, float]:
    """Return when all roles of an attempt were ready for the first time, by attempt, epoch seconds."""
    seen: dict[int, dict[str, float | None]] = {}
    for row in read_lines(path, Faults()):
        moment, label, attempt = number_of(row.get("time")), row.get("role"), row.get("attempt")
        if moment is None or not isinstance(label, str) or not isinstance(attempt, int):
            continue
        roles = seen.setdefault(attempt, {})
        if len(roles) < MOST_LANES or label in roles:
            is_ready = row.get("state") in ("ready", "running") and roles.get(label) is None
            roles[label] = moment if is_ready else roles.get(label)
    whole = {attempt: [moment for moment in roles.values() if moment] for attempt, roles in seen.items()}
    return {attempt: max(moments) for attempt, moments in whole.items() if len(moments) == len(seen[attempt])}


def role_lanes(path: Path, spent: Mapping[str, Any], origin: float) -> dict[str, list[list[Any]]]:
    """Return each role's states as [state, begin, end], seconds since `origin`."""
    ends = {row["attempt"]: row["began"] + row["wall"] for row in spent["rows"]}
    lanes: dict[str, list[list[Any]]] = {}
    open_since: dict[tuple[Any, str], tuple[str, float]] = {}
    num_spans = 0

    def close(key: tuple[Any, str], moment: float) -> None:
        nonlocal num_spans
        state, begin = open_since.pop(key)
        if moment > begin and num_spans < MOST_SPANS and (key[1] in lanes or len(lanes) < MOST_LANES):
            lanes.setdefault(key[1], []).append([state, round(begin - origin, 3), round(moment - origin, 3)])
            num_spans += 1

    for row in read_lines(path, Faults()):
        moment, label, state = number_of(row.get("time")), row.get("role"), row.get("state")
        if moment is None or not isinstance(label, str) or not isinstance(state, str):
            continue
        key = (row.get("attempt"), label)
        if key in open_since:
            close(key, moment)
        open_since[key] = (state, moment)
    for key in list(open_since):
        close(key, max(ends.get(key[0], 0.0), open_since[key][1]))
    return lanes
