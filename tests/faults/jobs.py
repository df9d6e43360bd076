"""Many faults with a few workers: forks them, hands out the points, gathers and counts the results."""

import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.lives import TWO_LIVES, twins, two_lives
from tests.faults.sweep import Point, Reference, Result, Sweep
from tests.faults.world import World

POLL_S = 0.2


def run_jobs(
    points: Sequence[Point], reference: Reference, root: Path, model: Path, jobs: int, minutes: float | None = None
) -> list[dict[str, Any]]:
    """Try every point; progress on standard error. Returns `Result.as_json` of each, in the order in which they ended.

    Args:
        points, reference, root, model: what and where.
        jobs: workers.
        minutes: begin no point after so long.

    Raises:
        RuntimeError: a worker died.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for index in range(len(points)):  # 4 bytes each: a pipe holds 16,384
        os.write(writer, index.to_bytes(4, "little"))
    os.close(writer)
    out = root / "results.jsonl"
    out.touch()
    workers = []
    until = time.monotonic() + 60 * minutes if minutes is not None else math.inf
    for number in range(jobs):
        pid = os.fork()
        if pid == 0:
            _work(points, reference, root / f"worker{number}", model, reader, out, until)
        workers.append(pid)
    os.close(reader)
    return _gather(workers, out, len(points))


def _work(
    points: Sequence[Point], reference: Reference, root: Path, model: Path, reader: int, out: Path, until: float
) -> None:
    """A worker's life. Never returns."""
    code = 1
    try:
        world = World(root, model, reference.operations)
        sweep = Sweep(world, reference)
        try:
            while time.monotonic() < until and (token := os.read(reader, 4)):
                point = points[int.from_bytes(token, "little")]
                _append(out, _how(point)(sweep, point))
        finally:
            sweep.oracle.close()
            world.close()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork's outermost frame
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _how(point: Point) -> Callable[[Sweep, Point], Result]:
    if point.how == "twins":
        return twins
    return two_lives if point.how in TWO_LIVES else Sweep.try_point


def _append(out: Path, result: Result) -> None:
    with out.open("a") as file:
        file.write(json.dumps(result.as_json()) + "\n")


def _gather(workers: list[int], out: Path, total: int) -> list[dict[str, Any]]:
    began, shown, left = time.monotonic(), 0, set(workers)
    bad: list[int] = []
    while left:
        time.sleep(POLL_S)
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                bad += [pid] if status else []
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        for row in rows[shown:]:
            for words in row["verdict"]:
                print(f"{row['point']}: {words}", file=sys.stderr, flush=True)
            if row["log"]:
                print(row["log"], file=sys.stderr, flush=True)
        if len(rows) // 10 > shown // 10:
            rate = (time.monotonic() - began) / len(rows)
            print(f"{len(rows)}/{total}, {rate:.2f} s a point", file=sys.stderr, flush=True)
        shown = len(rows)
    if bad:
        raise RuntimeError(f"{len(bad)} workers died, see above")
    return [json.loads(line) for line in out.read_text().splitlines()]


def summary(rows: Sequence[dict[str, Any]], points: Sequence[Point], seconds: float) -> dict[str, Any]:
    """The figures of `tools/faults --json`.

    `kill_points` (or `error_points`) counts the faults that happened; those whose operation never came count as
    `never_reached`. `skipped` and `duplicated` are prompts, the others findings.
    """
    findings = [words for row in rows for words in row["verdict"]]
    kinds = Counter(words.split(":", 1)[0] for words in findings)
    by_name = {str(point): point for point in points}
    reached = [by_name[row["point"]] for row in rows if row["reached"]]
    kills = [point for point in reached if point.how.startswith("kill")]
    pairs = [point for point in reached if point.how in (*TWO_LIVES, "twins")]
    return {
        "kill_points": len(kills),
        "two_lives": len(pairs),
        "error_points": len(reached) - len(kills) - len(pairs),
        "not_tried": len(points) - len(rows),
        "never_reached": len(rows) - len(reached),
        "skipped": kinds["skipped"],
        "duplicated": kinds["duplicated"],
        "mismatches": kinds["mismatches"],
        "broken": kinds["broken"],
        "failed": kinds["failed"],
        "seconds": round(seconds, 1),
        "lives": sum(row["lives"] for row in rows),
        "roles": dict(Counter(point.role for point in reached)),
        "hows": dict(Counter(point.how for point in reached)),
        "profiles": dict(Counter(point.profile for point in reached)),
        "bad_points": [row["point"] for row in rows if row["verdict"]],
    }
