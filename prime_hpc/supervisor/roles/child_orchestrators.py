"""The orchestrators of a trainer that trains many runs: one for each run that the trainer has given a slot.

    trainer rank 0: state.json of run_a says "training"  -->  its orchestrator is started here
    the orchestrator dies                    -->  the trainer is told ("run_a/1/orchestrator"), which fails run_a
    state.json of run_a says done, failed    -->  the orchestrator ends by itself, or is ended

The trainer decides who trains; nothing here ever ends the attempt. The orchestrators run beside the supervisor, where a
homogeneous job has its orchestrator as well.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loguru import logger

from prime_hpc.client.http import ask
from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.runtime.process_tree import end_families
from prime_hpc.runtime.role_context import role_environment
from prime_hpc.store.attempts import Attempt, show_latest_logs, write_attempt
from prime_hpc.store.child_runs import ChildState, list_children, phase_text, read_state
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.reaper import Reaper
from prime_hpc.supervisor.roles.process import Role, log_tail
from prime_hpc.supervisor.roles.spec import orchestrator_spec

LOOK_S = 2.0
FORGET_S = 30.0
UNLOAD_TIMEOUT_S = 2.0
"""At the end so long for servers that live on."""
FINAL_EVAL_TIMEOUT_S = 600.0
"""So long an orchestrator may go on after its run's last step: it serves and evaluates the last version."""
_OUTCOMES = {"done": "completed", "stopped": "stopped", "failed": "failed", "removed": "failed"}


class ChildOrchestrators:
    """Started by `tick`, ended by `end`. Nothing here blocks, but for an orchestrator's grace when it is ended."""

    def __init__(
        self,
        parent_dir: Path,
        experiment: Experiment,
        parent: Attempt,
        environment: Mapping[str, str],
        publish: Callable[..., None],
        reaper: Reaper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reaper`: ends what outlives this process."""
        self._clock = clock
        self._dir, self._experiment, self._parent = parent_dir, experiment, parent
        self._environment, self._publish, self._reaper = dict(environment), publish, reaper
        self._roles: dict[str, Role] = {}
        self._attempts: dict[str, Attempt] = {}
        self._states: dict[str, ChildState] = {}
        self._over_at: dict[str, float] = {}
        self._started: set[tuple[str, int]] = set()
        self._next_look = 0.0
        self._bus_statuses: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
        """By run and incarnation ("run_a/1")."""
        self._servers: dict[str, list[str]] = {}
        """Of each run, as far as this job started none itself."""
        self._urls: list[str] = []
        """Of this job's servers, wherever they are by now."""
        self._forgetting: list[threading.Thread] = []

    def on_message(self, topic: str, payload: dict[str, Any]) -> None:
        """Take a message of the bus, in the hub's thread."""
        run, _, kind = topic.rpartition("/")
        if run and kind == "status" and {"role", "index", "time", "state"} <= payload.keys():
            self._bus_statuses.setdefault(run, {})[payload["role"], payload["index"]] = payload
        elif topic == "run":
            self._next_look = 0.0

    def extend_deadlines(self, seconds: float) -> None:
        """As for `Role`."""
        for role in self._roles.values():
            role.extend_deadlines(seconds)

    def forget_silence(self) -> None:
        """As for `Role`."""
        for role in self._roles.values():
            role.forget_silence()

    @property
    def is_idle(self) -> bool:
        """True if no orchestrator lives."""
        return not self._roles

    @property
    def pids(self) -> list[int]:
        """Leaders of the orchestrators that live."""
        return [role.pid for role in self._roles.values()]

    def facts(self) -> dict[str, str]:
        """State of every run, for people."""
        return {name: phase_text(state) for name, state in sorted(self._states.items())}

    def tick(self, urls: list[str], num_servers: int, bus: str) -> None:
        """Start, watch and end.

        Args:
            urls: of the servers, as far as they are known.
            num_servers: how many there will be; none is started before all are known.
        """
        self._urls = urls
        for name in list(self._roles):
            self._watch(name)
        if self._clock() < self._next_look:
            return
        self._next_look = self._clock() + LOOK_S
        try:
            names = list_children(self._dir)
        except OSError as error:
            logger.warning(f"{self._dir} cannot be listed: {error}")
            return
        for name in {*names, *self._roles}:
            before = self._states.get(name)
            state = read_state(self._dir / name) if name in names else None
            if state is None and name in names and name in self._roles:
                continue  # a word that cannot be read now says nothing: what it said last holds
            if state is None:
                self._states.pop(name, None)
            else:
                self._states[name] = state
            if name in self._roles:
                self._follow(name, state, before)
            elif state is not None and self._wants_orchestrator(name, state) and len(urls) >= num_servers:
                self._start(name, state, urls, bus)

    def _wants_orchestrator(self, name: str, state: ChildState) -> bool:
        is_now = state.parent_incarnation == self._parent.incarnation
        return state.phase == "training" and is_now and (name, state.incarnation) not in self._started

    def _start(self, name: str, state: ChildState, urls: list[str], bus: str) -> None:
        path = self._dir / name
        self._started.add((name, state.incarnation))
        run_key = f"{name}/{state.incarnation}"
        role: Role | None = None
        try:
            experiment = read_experiment(path / RUN_YAML)
            facts = role_environment(
                bus_address=bus,
                attempt=state.incarnation,
                incarnation=state.incarnation,
                resume_step=state.resume_step,
                urls={"inference": urls},
                run=name,
            )
            environment = {**self._environment, **facts, "PYTHONUNBUFFERED": "1"}
            log_dir = RunPaths(path).logs(state.incarnation, "orchestrator")
            bus_statuses = self._bus_statuses.setdefault(run_key, {})
            role = Role(orchestrator_spec(experiment, path), log_dir, environment, bus_statuses, self._clock)
            role.start()
            self._reaper.watch(role.pid)
            attempt = Attempt(state.incarnation, state.incarnation, time.time(), f"slot {state.slot} of the trainer")
            attempt.job_id, attempt.resume_step = self._parent.job_id, state.resume_step
            write_attempt(RunPaths(path).attempts, attempt)
            show_latest_logs(RunPaths(path), attempt)
        except (ConfigError, OSError, StoreError) as error:
            if role is not None and role.was_started:
                self._end_family(role)
            self._report(name, state.incarnation, f"its orchestrator could not be started: {error}")
            return
        self._roles[name], self._attempts[name] = role, attempt
        stated = experiment.orchestrator.client.base_url or []
        self._servers[name] = [stated] if isinstance(stated, str) else stated
        logger.info(f"started the orchestrator of {name} (process {role.pid}): {' '.join(role.command)}")

    def _watch(self, name: str) -> None:
        role = self._roles[name]
        if not role.running:
            if role.has_reported("done") and role.exit_code == 0:
                logger.info(f"the orchestrator of {name} is done")
                self._close(name, None)
            else:
                self._died(name, role.death().cause)
        elif role.state == "starting":
            if role.has_reported("ready"):
                role.state, role.was_ready = "ready", True
                logger.info(f"the orchestrator of {name} is ready after {self._clock() - role.started:.0f} s")
            elif self._clock() - role.started > role.spec.start_timeout_s:
                self._died(name, f"its orchestrator was not ready within {role.spec.start_timeout_s:.0f} s")
        elif role.heartbeat_age_s() > self._experiment.supervisor.heartbeat_timeout_s:
            self._died(name, f"its orchestrator gave no sign of life for {role.heartbeat_age_s():.0f} s")

    def _follow(self, name: str, state: ChildState | None, before: ChildState | None) -> None:
        """Look whether a run whose orchestrator lives is over."""
        incarnation = self._attempts[name].incarnation
        if state is not None and state.incarnation == incarnation and state.phase == "training":
            return
        if state is not None and state.incarnation == incarnation and state.phase == "done":
            since = self._over_at.setdefault(name, self._clock())
            if self._clock() - since < FINAL_EVAL_TIMEOUT_S:
                return  # the last evaluation
        why = "its directory is gone" if state is None else f"the run is {state.phase}"
        logger.info(f"ending the orchestrator of {name}: {why}")
        self._close(name, why)

    def _died(self, name: str, cause: str) -> None:
        role = self._roles[name]
        logger.error(f"{name}: {cause}\n--- end of {role.log_file} ---\n{log_tail(role.log_file)}\n---")
        self._report(name, self._attempts[name].incarnation, cause)
        self._close(name, cause)

    def _report(self, name: str, incarnation: int, cause: str) -> None:
        """Have the trainer fail the run; should the word be lost, it does so when no batch comes in time."""
        self._publish(f"{name}/{incarnation}/orchestrator", state="failed", reason=cause)

    def _close(self, name: str, cause: str | None) -> None:
        """End what a run's orchestrator left that is no more, and write its attempt's end."""
        self._end_family(self._roles.pop(name))
        key = self._environment.get(KEY_VARIABLES["inference"])
        self._forget(name, key)
        self._over_at.pop(name, None)
        attempt = self._attempts.pop(name)
        self._bus_statuses.pop(f"{name}/{attempt.incarnation}", None)
        state = read_state(self._dir / name) or self._states.get(name)
        phase = state.phase if state is not None else "removed"
        attempt.ended, attempt.cause = time.time(), (state.reason if state is not None else None) or cause or phase
        attempt.outcome = _OUTCOMES.get(phase, "stopped" if cause is None else "failed")
        attempt.exit_code = 0 if attempt.outcome != "failed" else 1
        try:
            if (self._dir / name).is_dir():
                write_attempt(RunPaths(self._dir / name).attempts, attempt)
        except (OSError, StoreError) as error:  # its directory is full: no reason for the others to end
            logger.warning(f"the end of {name}'s attempt could not be written: {error}")

    def _end_family(self, role: Role) -> None:
        end_families([role.pid], self._experiment.supervisor.grace_s if role.running else 0.0)
        role.reap()
        self._reaper.forget(role.pid)

    def _forget(self, name: str, key: str | None) -> None:
        """Not waited for: a server that hangs must not hold the others up."""
        self._forgetting = [thread for thread in self._forgetting if thread.is_alive()]
        servers = self._servers.pop(name)
        thread = threading.Thread(target=forget_adapter, args=(self._urls or servers, name, key), daemon=True)
        thread.start()
        self._forgetting.append(thread)

    def end(self, cause: str) -> None:
        """Write down what became of each when the parent's attempt is over; the caller ends its families."""
        for name in list(self._roles):
            self._close(name, None if self._roles[name].has_reported("done") else cause)
        for thread in self._forgetting:
            thread.join(UNLOAD_TIMEOUT_S)


def forget_adapter(urls: list[str], name: str, key: str | None) -> None:
    """Have the servers unload a run's adapter: its place is wanted by others. A server that is gone has none."""
    for url in urls:
        address = f"{url.rstrip('/').removesuffix('/v1')}/reload_weights?name={quote(name)}"
        try:
            ask(address, timeout_s=FORGET_S, key=key, method="POST")
        except OSError as error:
            logger.debug(f"{url} did not unload {name}: {error}")
