"""The supervisor: starts the roles of one attempt, waits until each is ready, watches them, ends them.

The same object on a laptop, under submitit's LocalExecutor and as a Slurm job's batch process.
Called by `prime_hpc.supervisor.main`.
"""

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.observe.console import Console
from prime_hpc.observe.context import role_environment
from prime_hpc.store.doorbell import DoorbellHub
from prime_hpc.supervisor.attempts import Attempt, write_attempt
from prime_hpc.supervisor.begin import run_paths
from prime_hpc.supervisor.processes import become_subreaper, end_families, end_strays
from prime_hpc.supervisor.reaper import Reaper
from prime_hpc.supervisor.role import Role, log_tail
from prime_hpc.supervisor.roles import RoleSpec

TICK_S = 0.2
HEALTH_INTERVAL_S = 5.0
UNWELL_LIMIT_S = 90.0
"""A server whose health route fails for so long is ended and started again."""


class Ended(Exception):
    """The attempt is over; carries the exit code and the cause."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause


class Supervisor:
    """One attempt. `run` returns the exit code: 0 done, 1 failed, 130 interrupted."""

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        attempt: Attempt,
        specs: list[RoleSpec],
        inference_urls: list[str],
        environment: dict[str, str],
    ) -> None:
        self._experiment = experiment
        self._paths = run_paths(experiment, run_dir)
        self._attempt = attempt
        self._specs = specs
        self._urls = inference_urls
        self._environment = environment
        self._roles: list[Role] = []
        self._heard: dict[tuple[str, int], dict[str, Any]] = {}
        self._signal: int | None = None
        self._next_health: dict[str, float] = {}
        self._ready_at: float | None = None
        self._console = Console(run_dir, experiment.max_steps, kind=experiment.kind)

    def run(self) -> int:
        """Live the attempt to its end; everything started is gone when this returns."""
        become_subreaper()
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        hub, reaper = DoorbellHub(on_message=self._on_message, incarnation=self._attempt.incarnation), Reaper()
        ended = Ended(1, "the supervisor itself failed")
        try:
            self._start(hub, reaper)
            while True:
                self._tick()
                time.sleep(TICK_S)
        except Ended as end:
            ended = end
        except OSError as error:  # a full disk under the logs, a process table that is full
            ended = Ended(1, f"the supervisor could not go on: {error}")
        finally:
            self._end(hub, reaper, ended)
            hub.close()
            reaper.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return ended.code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # the second time: no more patience
            for role in self._roles:
                role.kill()
        self._signal = number

    def _on_message(self, topic: str, payload: dict[str, Any]) -> None:
        if topic == "status" and {"role", "index", "time", "state"} <= payload.keys():
            self._heard[payload["role"], payload["index"]] = payload

    def _start(self, hub: DoorbellHub, reaper: Reaper) -> None:
        facts = role_environment(
            doorbell_address=hub.address,
            attempt=self._attempt.attempt,
            incarnation=self._attempt.incarnation,
            resume_step=self._attempt.resume_step,
            inference_urls=self._urls,
        )
        environment = {**self._environment, **facts, "PYTHONUNBUFFERED": "1"}
        latest = self._paths.root / "logs" / "latest"
        latest.parent.mkdir(parents=True, exist_ok=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"attempt_{self._attempt.attempt}")
        for spec in self._specs:
            role = Role(spec, self._paths.logs(self._attempt.attempt, spec.name), environment, self._heard)
            role.start()
            self._roles.append(role)
            reaper.watch(role.pid)
            logger.info(f"started {spec.label} (process {role.pid}): {' '.join(spec.command)}")
        self._reaper = reaper

    def _tick(self) -> None:
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            raise Ended(130 if self._signal == signal.SIGINT else 128 + self._signal, f"interrupted by {name}")
        for role in self._roles:
            if role.state != "done":
                self._look_at(role)
        waiting = {r.spec.label: time.time() - r.started_at for r in self._roles if r.state == "starting"}
        if not waiting and self._ready_at is None:
            self._ready_at = time.time()
            logger.info(f"all roles are ready after {self._ready_at - self._attempt.began:.0f} s")
        self._console.tick(waiting)
        workers = [r for r in self._roles if r.spec.name != "inference"]
        if all(r.state == "done" for r in workers):
            raise Ended(0, "done")

    def _look_at(self, role: Role) -> None:
        if not role.running:
            if role.says("done") and role.exit_code == 0 and role.spec.name != "inference":
                role.state = "done"
                logger.info(f"{role.spec.label} is done")
                return
            self._on_death(role, role.cause_of_death())
        elif role.state == "starting":
            if self._is_ready(role):
                role.state, role.was_ready = "ready", True
                logger.info(f"{role.spec.label} is ready after {time.time() - role.started_at:.0f} s")
            elif time.time() - role.started_at > role.spec.start_timeout_s:
                self._on_death(role, f"{role.spec.label} was not ready within {role.spec.start_timeout_s:.0f} s")
        elif role.spec.health_url is not None:
            self._check_health(role)
        elif role.silent_s() > self._experiment.supervisor.heartbeat_timeout_s:
            self._on_death(role, f"{role.spec.label} gave no sign of life for {role.silent_s():.0f} s")

    def _is_ready(self, role: Role) -> bool:
        return self._due(role, 0.5) and role.healthy() if role.spec.health_url else role.says("ready")

    def _check_health(self, role: Role) -> None:
        if self._due(role, HEALTH_INTERVAL_S) and not role.healthy() and role.unwell_s() > UNWELL_LIMIT_S:
            self._on_death(role, f"{role.spec.label} failed its health check for {role.unwell_s():.0f} s")

    def _due(self, role: Role, interval_s: float) -> bool:
        now = time.monotonic()
        if now < self._next_health.get(role.spec.label, 0.0):
            return False
        self._next_health[role.spec.label] = now + interval_s
        return True

    def _on_death(self, role: Role, cause: str) -> None:
        """A role ended that should not have: start a server again in place, end the attempt for the others."""
        tail = log_tail(role.log_file)
        role.kill()
        role.reap()
        self._reaper.forget(role.pid)
        # one that never served has a reason that a second start does not change
        if role.was_ready and role.restarts < role.spec.max_restarts:
            role.restarts += 1
            logger.warning(f"{cause}; it is started again ({role.restarts}/{role.spec.max_restarts}), the run goes on")
            role.start()
            self._reaper.watch(role.pid)
            return
        role.state = "dead"
        logger.error(f"{cause}\n--- end of {role.log_file} ---\n{tail}\n---")
        raise Ended(1, cause)

    def _end(self, hub: DoorbellHub, reaper: Reaper, ended: Ended) -> None:
        """End every role with all it started, and write down how the attempt ended."""
        hub.ring("stop", reason=ended.cause, save=False)
        grace = self._experiment.supervisor.grace_s
        killed = end_families([role.pid for role in self._roles], grace)
        for role in self._roles:
            role.reap()
        killed += end_strays(os.getpid(), [reaper.pid], grace_s=1.0)
        if killed:
            logger.debug(f"processes that had to be killed: {killed}")
        self._console.close()
        now = time.time()
        self._attempt.ended, self._attempt.exit_code, self._attempt.cause = now, ended.code, ended.cause
        self._attempt.outcome = {0: "completed", 1: "failed"}.get(ended.code, "interrupted")
        ready = self._ready_at or now
        self._attempt.seconds = {
            "start": round(ready - self._attempt.began, 1),
            "run": round(now - ready, 1),
            **{k: round(v, 1) for k, v in self._console.seconds().items()},
        }
        try:
            write_attempt(self._paths.attempts, self._attempt)
        except OSError as error:
            logger.warning(f"{self._paths.attempts} could not be written: {error}")
        level = "INFO" if ended.code == 0 else "ERROR"
        logger.log(level, f"attempt {self._attempt.attempt} ended: {self._attempt.outcome} ({ended.cause})")
