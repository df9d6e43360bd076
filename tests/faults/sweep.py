"""The sweep: record where a run changes its directory, break a run at each of these points, bring it back, judge it.

Called by `jobs`, which forks one worker a job. See `fork` for how lives are made cheap.
"""

import random
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import holds_changes, list_versions
from prime_hpc.supervisor.attempt.early_end import EXIT_UNREADABLE
from tests.faults.inject import ROLES, UPDATE, Plan
from tests.faults.oracle import Oracle
from tests.faults.verdict import Rollouts, Verdict, judge, most_masked, rollouts_of
from tests.faults.world import DELTA, IMAGES, MASK, PROFILES, REAL_ENGINE, Life, World, read_record

MAX_LIVES = 4
ERRORS = ("ENOSPC", "EDQUOT", "EIO")
WORDS = {"ENOSPC": "disk full", "EDQUOT": "quota exceeded", "EIO": "I/O error"}
"""What the run must say when the disk fails."""


@dataclass(frozen=True)
class Point:
    """One fault."""

    profile: str
    role: str
    how: str
    operation: str
    path: str
    number: int

    def plan(self) -> Plan:
        """For the processes of the attempt."""
        return Plan("", "", self.role, self.operation, self.path, self.number, self.how)

    def __str__(self) -> str:
        time = f" (time {self.number})" if self.number > 1 else ""
        return f"{self.profile}: {self.how} {self.role} at {self.operation} {self.path}{time}"


@dataclass
class Result:
    """What came of a fault."""

    point: Point
    verdict: Verdict
    reached: bool
    lives: int
    seconds: float
    log: str = ""
    """End of the last attempt's log where something is wrong."""

    def as_json(self) -> dict[str, object]:
        """For the record."""
        return {**asdict(self), "point": str(self.point), "verdict": self.verdict.words()}


@dataclass
class Reference:
    """What an uninterrupted run of each profile does."""

    operations: dict[str, dict[str, list[tuple[str, str, int]]]] = field(default_factory=dict)
    rollouts: dict[int, Rollouts] = field(default_factory=dict)
    run_dir: Path = Path()
    """Of one of them."""


def record(root: Path, model: Path, profiles: Iterable[str]) -> Reference:
    """Run each profile once without faults; its own state must be right as well."""
    reference = Reference()
    sweep: Sweep | None = None
    profiles = list(profiles)
    world = World(root, model, profiles)
    try:
        for profile in profiles:
            life = world.begin(f"whole-{profile}", PROFILES[profile], Plan("", ""))
            code = life.wait()
            assert code == 0, life.tail()
            reference.operations[profile] = read_record(life.scratch)
            reference.run_dir = run_dir = root / f"whole-{profile}"
            known = {} if profile == REAL_ENGINE else rollouts_of(RunPaths(run_dir))  # an engine samples anew
            for position, sequences in known.items():
                reference.rollouts.setdefault(position, {}).update(sequences)
            sweep = sweep or Sweep(world, reference)
            verdict = sweep.judge(run_dir.name, PROFILES[profile])
            assert verdict.ok, verdict.words()
            versions = RunPaths(run_dir)
            changes = [v for v in list_versions(versions) if holds_changes(versions.weights_step(v))]
            assert bool(changes) == (profile == DELTA), f"versions {changes} hold changes"
            assert bool(most_masked(versions)) == (profile == MASK), "this profile's old tokens are (not) masked"
            shows = read_rank_batch(versions.rollouts_step(1), 0).images is not None
            assert shows == (profile == IMAGES), "this profile's prompts (do not) hold images"
    finally:
        if sweep is not None:
            sweep.oracle.close()
        world.close()
    return reference


def points_of(reference: Reference, hows: Sequence[str], roles: Sequence[str] = ROLES) -> list[Point]:
    """Every operation of every role in every profile, for each way to fail; twins meet at no operation."""
    found = []
    for profile, by_role in reference.operations.items():
        for how in hows:
            if how == "twins":
                found.append(Point(profile, "supervisor", how, "begin", "run", 1))
                continue
            own = [(role, operation) for role in roles for operation in by_role[role]]
            if how not in ("kill", "kill-all", "stop", "stop-late"):
                own = [(role, operation) for role, operation in own if operation[0] != UPDATE]
            found += [Point(profile, role, how, *operation) for role, operation in own]
    return found


class Sweep:
    """One worker's lives and judgements."""

    def __init__(self, world: World, reference: Reference) -> None:
        self.world, self.reference = world, reference
        self.oracle = Oracle(reference.run_dir, world.root / "oracle")
        self._number = 0

    def try_point(self, point: Point) -> Result:
        """Break a run at this point, bring it back until it is done, judge it."""
        began = time.monotonic()
        name = self.next_name()
        ckpt = PROFILES[point.profile]
        lives = [self.world.begin(name, ckpt, point.plan())]
        verdict = Verdict()
        try:
            code = lives[0].wait()
            reached = lives[0].reached
            verdict.failed += first_end(point, lives[0], code)
            while code != 0 and len(lives) < MAX_LIVES:
                lives.append(self.world.resume(name, by_hand=self._number % 2 == 0))
                code = lives[-1].wait()
            if code != 0:
                verdict.failed.append(f"attempt {len(lives)} ended with code {code}")
            for life in lives:
                left = life.wait_for_all(15)
                verdict.failed += [f"{len(left)} processes of attempt {lives.index(life) + 1} are left"] if left else []
            found = self.judge(name, ckpt)
            if point.role == "supervisor" and len(lives) == 1 and reached:
                found.failed = []  # its disk took the work, but not the line that it had ended
            found.failed = verdict.failed + found.failed
            verdict = found
        except subprocess.TimeoutExpired:
            reached = lives[0].reached
            verdict.failed.append(f"attempt {len(lives)} did not end within {lives[-1].timeout_s:.0f} s")
        finally:
            for life in lives:
                life.end()
        return self.result(point, verdict, reached, lives, began, name)

    def judge(self, name: str, ckpt: dict[str, Any]) -> Verdict:
        """Check a finished run of this world against the reference."""
        run_dir, known = self.world.root / name, self.reference.rollouts
        return judge(run_dir, known, self.oracle, ckpt, masks=self.world.masks)

    def next_name(self) -> str:
        """Of another run."""
        self._number += 1
        return f"run{self._number}"

    def result(
        self, point: Point, verdict: Verdict, reached: bool, lives: list[Life], began: float, name: str
    ) -> Result:
        """What came of it; the run is deleted where nothing is wrong."""
        log = "" if verdict.ok else "\n".join(f"--- attempt {i + 1}\n{life.tail()}" for i, life in enumerate(lives))
        if verdict.ok:
            self.world.forget(name)
        return Result(point, verdict, reached, len(lives), time.monotonic() - began, log)


def first_end(point: Point, life: Life, code: int) -> list[str]:
    """What is wrong with how the broken life ended."""
    if not life.reached:
        return [] if code == 0 else [f"the fault did not happen, and the attempt ended with code {code}"]
    if point.how == "kill" and point.role.startswith("env_"):
        return [f"the end of a process that plays episodes ended the attempt with code {code}"] if code else []
    if point.how in ("kill", "kill-all"):
        return (
            [f"the supervisor was killed and ended with code {code}"]
            if point.role == "supervisor" and code != -9
            else []
        )
    kind = point.how.removeprefix("once:")
    text = life.log.read_text(errors="replace")
    # what cannot be read, or has no room, may have it in the next attempt: the job comes back
    if code not in (0, 1, 2, EXIT_UNREADABLE):
        return [f"the attempt ended with code {code} on {kind}"]
    if code and WORDS[kind] not in text:
        return [f"the attempt ended with code {code} and does not say {WORDS[kind]!r}"]
    return []


def thin(points: Sequence[Point], count: int, seed: int) -> list[Point]:
    """A seeded sample in the points' own order: of each way to fail, and of each role in it, about as many."""
    rng = random.Random(seed)
    ways: dict[str, dict[str, list[int]]] = {}
    for index, point in enumerate(points):
        ways.setdefault(point.how, {}).setdefault(point.role, []).append(index)
    turns = []
    for how, roles in ways.items():
        for indices in roles.values():
            rng.shuffle(indices)
        first = rng.sample(list(roles), len(roles))
        of_how = sorted((place, first.index(role), i) for role, found in roles.items() for place, i in enumerate(found))
        turns += [(place, how, index) for place, (_, _, index) in enumerate(of_how)]
    turns.sort()
    return [points[index] for index in sorted(index for _, _, index in turns[:count])]
