"""Two attempts of one run at once: the first is cut off in the middle of an operation, a second one begins, and then
the first goes on as if nothing had happened.

The first attempt believes to be on another machine (its supervisor's process means nothing here), is stopped with all
its processes (SIGSTOP) right before an operation, and is woken when the second attempt is at work or done. It must end
by itself, say why, and leave no trace: the second attempt is judged as any other run. Used by `tools/faults --lives`.
"""

import os
import signal
import subprocess
import time
from dataclasses import replace

from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_paths import RunPaths, current_incarnation, list_steps
from tests.faults import inject
from tests.faults.sweep import Point, Result, Sweep
from tests.faults.verdict import Verdict
from tests.faults.world import PROFILES, STEPS, Life

TWO_LIVES = ("stop", "stop-late")
STOPPED_S = 200.0
"""At a load of 20 an attempt needs more than a minute to its last version."""
REFUSALS = (
    "has begun at the same moment",
    "still runs here",
    "a run is going on there",
    "already holds a run",
    "it may not write any more",
)
FENCED_S = 40.0
"""An attempt that was left behind must have ended within this."""


def two_lives(sweep: Sweep, point: Point) -> Result:
    """Stop an attempt at `point`, run another, wake the first while the second works.

    Args:
        sweep: whose world and oracle are used.
        point: with `how = stop` (woken after the second attempt's next batch) or `stop-late` (woken when it is done).
    """
    began = time.monotonic()
    name = sweep.next_name()
    ckpt = PROFILES[point.profile]
    plan = replace(point.plan(), how="stop", host="node-of-the-first-life")
    lives = [sweep.world.begin(name, ckpt, plan)]
    verdict = Verdict()
    paths = RunPaths(sweep.world.root / name)
    try:
        reached = _wait_until_stopped(lives[0])
        if reached:
            seen = len(list_steps(paths.rollouts))
            _look_silent(paths)
            lives.append(sweep.world.resume(name, by_hand=False))
            if point.how == "stop":
                _wait_for_progress(paths, lives[1], seen)
            else:
                lives[1].wait()
            inject.strike_all(lives[0].scratch, signal.SIGCONT)
            code = lives[1].wait()
            verdict.failed += [f"the second attempt ended with code {code}"] if code else []
            left = lives[0].wait_for_all(FENCED_S)
            verdict.failed += [f"{len(left)} processes of the first attempt work on"] if left else []
            verdict.failed += _first_words(paths, lives[0])
            for life in lives[1:]:
                verdict.failed += ["processes of the second attempt are left"] if life.wait_for_all(15) else []
        found = sweep.judge(paths.root.name, ckpt)
        found.failed = verdict.failed + found.failed
        verdict = found
    except subprocess.TimeoutExpired:
        reached = lives[0].reached
        verdict.failed.append(f"attempt {len(lives)} did not end")
    finally:
        for life in lives:
            life.end()
    return sweep.result(point, verdict, reached, lives, began, name)


def _look_silent(paths: RunPaths) -> None:
    """Let the stopped attempt's last word be old: another host waits so long before it takes a run over."""
    if (paths.root / "status.json").exists():
        os.utime(paths.root / "status.json", (0, 0))


def twins(sweep: Sweep, point: Point) -> Result:
    """The same command twice at once, for the same run directory: one does the work, the other is refused."""
    began = time.monotonic()
    name = sweep.next_name()
    ckpt = PROFILES[point.profile]
    lives = [sweep.world.begin(name, ckpt) for _ in range(2)]
    verdict = Verdict()
    try:
        codes = [life.wait() for life in lives]
        if sorted(codes)[0] != 0 or sorted(codes)[1] not in (1, 2):
            verdict.failed.append(f"two of the same command ended with codes {codes}")
        for life, code in zip(lives, codes, strict=True):
            text = life.log.read_text(errors="replace")
            if code and not any(words in text for words in REFUSALS):
                verdict.failed.append("the one that was refused does not say why")
            verdict.failed += ["processes are left"] if life.wait_for_all(FENCED_S) else []
        found = sweep.judge(name, ckpt)
        found.failed = verdict.failed + found.failed
        verdict = found
    except subprocess.TimeoutExpired:
        verdict.failed.append("one of the two did not end")
    finally:
        for life in lives:
            life.end()
    return sweep.result(point, verdict, True, lives, began, name)


def _wait_until_stopped(life: Life) -> bool:
    """True once the first attempt stands still; False where it came to its end without reaching the point."""
    end = time.monotonic() + STOPPED_S
    while time.monotonic() < end:
        if life.reached:
            time.sleep(0.2)
            inject.strike_all(life.scratch, signal.SIGSTOP)  # and what was forked meanwhile
            return True
        if life.process.poll() is not None:
            return False
        time.sleep(0.05)
    return False


def _wait_for_progress(paths: RunPaths, life: Life, seen: int) -> None:
    """Until the second attempt has begun for good: it owns the run and has written a batch."""
    end = time.monotonic() + STOPPED_S
    while time.monotonic() < end and life.process.poll() is None:
        batches = list_steps(paths.rollouts)
        if current_incarnation(paths) > 1 and batches and _is_of(paths, batches[-1], 2):
            return
        time.sleep(0.05)


def _is_of(paths: RunPaths, step: int, incarnation: int) -> bool:
    from prime_hpc.store.errors import ArtifactError
    from prime_hpc.store.manifest import read_manifest

    try:
        return read_manifest(paths.rollouts_step(step)).incarnation == incarnation
    except ArtifactError:
        return False


def _first_words(paths: RunPaths, life: Life) -> list[str]:
    """The first attempt failed and said why, unless its work was done before it was stopped."""
    try:
        code: int | None = life.process.wait(10)  # its environment, by which it was found, goes before its number
    except subprocess.TimeoutExpired:
        code = None
    if code == 0 and read_attempts(paths.attempts)[0]["saved_step"] == STEPS:
        return []
    if code in (0, None):
        return [f"the first attempt ended with code {code}"]
    text = life.log.read_text(errors="replace")
    told = any(words in text for words in ("incarnation 2", *REFUSALS))
    return [] if told else ["the first attempt does not say that a newer one has begun"]
