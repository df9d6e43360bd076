"""The supervisor: starts the roles of one attempt, waits until each is ready, watches them, ends them.

The same object on a laptop, under submitit's LocalExecutor and as a Slurm job's batch process.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.run_files import TINKER_KEY
from prime_hpc.observe.console import Console
from prime_hpc.runtime import activity
from prime_hpc.runtime.clock import STOPPED_S
from prime_hpc.runtime.failures import NodeError
from prime_hpc.runtime.process_tree import become_subreaper, family
from prime_hpc.runtime.role_context import role_environment
from prime_hpc.store.attempts import Attempt, Ended, close_attempt, show_latest_logs, write_attempt
from prime_hpc.store.errors import NoRoom, StoreError
from prime_hpc.supervisor.agent import BEAT_S, FENCE
from prime_hpc.supervisor.attempt.fence import Fence
from prime_hpc.supervisor.attempt.restart_policy import FINAL
from prime_hpc.supervisor.attempt.start import run_paths, saved_step_if_known
from prime_hpc.supervisor.heartbeat import LoopGaps
from prime_hpc.supervisor.preflight.phase import Checkup
from prime_hpc.supervisor.roles.at_crash import Hold, SaveFirst, may_outlive
from prime_hpc.supervisor.roles.child_orchestrators import ChildOrchestrators
from prime_hpc.supervisor.roles.health import HealthChecks
from prime_hpc.supervisor.roles.led_roles import LedRoles
from prime_hpc.supervisor.roles.process import Role, end_roles, known_urls, may_start, reap_roles
from prime_hpc.supervisor.roles.slurm_step import StepContext, StepRole, StepSpec
from prime_hpc.supervisor.roles.spec import RoleSpec, Urls
from prime_hpc.supervisor.run_watch import RunWatch
from prime_hpc.supervisor.status_file import LiveStatus
from prime_hpc.supervisor.stop_requests import Controls, Stop

TICK_S = 0.2
SAVES_OF_ATTEMPT = 10_000
"""Saves that may be asked for in one attempt: each has a number of its own."""
NODE_SILENCE_GRACE_S = 3 * BEAT_S
"""When a role dies, its nodes that say nothing for so long are the reason."""
HELD_UP_S = 5.0
"""A longer gap between two ticks is the supervisor's own, as when the file system hangs: for nobody does it count."""


@dataclass(frozen=True)
class RolePlan:
    """The roles of an attempt, and with what they are started."""

    specs: Sequence[RoleSpec]
    """With `steps` all of them are `StepSpec`s."""
    urls: Urls
    """Of the servers, by group; with `steps` they are learnt from the agents."""
    environment: dict[str, str]
    steps: StepContext | None = None
    """The Slurm job; None: processes of this machine."""
    spares: Sequence[str] = ()
    """Nodes of a homogeneous job that take over a lost server."""
    checkup: Checkup | None = None
    """Of the nodes, before any role starts."""


class Supervisor:
    """One attempt. `run` returns the exit code: 0 done or saved, 1 failed, 66 directory gone, 74 no room, 130
    interrupted."""

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        attempt: Attempt,
        plan: RolePlan,
        controls: Controls | None = None,
        led: LedRoles | None = None,
    ) -> None:
        """Args:
        controls: that listen since the attempt began; default: new ones.
        led: what the job's earlier attempt has left.
        """
        self._experiment = experiment
        self._paths = run_paths(experiment, run_dir)
        self.attempt = attempt
        self._plan = plan
        restart = experiment.slurm.restart
        self._led = led or LedRoles.begin(restart, plan.spares)
        self.left: LedRoles | None = None
        """After `run`: what goes on in the run's next attempt in this job (`follow`)."""
        clock, publish = self._led.clock, self._led.hubs.publish
        self._hold = Hold(attempt.incarnation, publish)
        self._save_first = SaveFirst(attempt.attempt * SAVES_OF_ATTEMPT + SAVES_OF_ATTEMPT - 1, publish)
        self._ended_by: tuple[Role | None, list[str]] = None, []  # the role, and its nodes that were lost
        self._stop: Stop | None = None
        self._health = HealthChecks(clock.now)
        self._fence = Fence(self._paths, attempt.incarnation, clock.now, experiment.supervisor.read_timeout_s)
        self._gaps = LoopGaps(clock)
        self._ready_at: float | None = None
        self._children: ChildOrchestrators | None = None
        self._console = Console(run_dir, experiment.num_steps, kind=experiment.kind, clock=clock)
        allocation = plan.steps.allocation if plan.steps else None
        self._controls = controls or Controls(run_dir, allocation, restart.signal_lead_s)
        self._controls.needs_s = self._console.needs_s
        self._saves_asked = self._controls.num_saves
        self._live = LiveStatus(run_dir, attempt=attempt.attempt, job_id=attempt.job_id)

    def run(self) -> int:
        """Live the attempt to its end; everything started is gone when this returns."""
        become_subreaper()
        self._others = [process.pid for process in family(os.getpid())[1:]]  # here before: none of the run's
        activity.introduce("supervisor", 0, self._paths.root)
        self._controls.install()
        led, environment, on_nodes = self._led, self._plan.environment, self._plan.steps is not None
        run = self._experiment, self._paths.root, self.attempt.attempt, led.clock, environment, on_nodes
        self._run_watch = RunWatch(*run, led.statuses, led.roles, led.hubs.publish, self._controls)
        ended = Ended(1, "the supervisor itself failed")
        try:
            self._open_hub()
            self._check_nodes()
            self._start()
            activity.doing("supervising")
            self._gaps.take()
            while True:
                self._tick()
                time.sleep(TICK_S)
        except Ended as end:
            ended = end
        except (OSError, StoreError) as error:
            ended = Ended.by_itself(error)
        finally:
            ended = self._fence.true_end(ended)
            self.left = self._roles_to_leave(ended)
            ended = self._end(ended)
            self._run_watch.close()
            if self.left is None:
                led.close()
                self._controls.restore()
        return ended.code

    def follow(self, attempt: Attempt) -> "Supervisor":
        """Return the run's next attempt in this job, with the roles that this one left."""
        assert self.left is not None
        self.left.forget_others()
        plan = replace(self._plan, specs=self.left.placed(self._plan.specs), checkup=None)
        return Supervisor(self._experiment, self._paths.root, attempt, plan, self._controls, self.left)

    def _on_message(self, topic: str, payload: dict[str, Any]) -> None:
        self._led.on_message(topic, payload)
        if self._children is not None and (topic == "run" or "/" in topic):
            self._children.on_message(topic, payload)
        elif topic == "held":
            self._hold.on_message(payload)
        elif topic == "saved":
            self._save_first.on_message(payload)
        elif topic == "agent":
            self._run_watch.on_message(payload)

    def _open_hub(self) -> None:
        hubs, on_nodes = self._led.hubs, self._plan.steps is not None
        hubs.keep(self._led.no_servers)
        try:
            of_attempt = self._plan.environment, self.attempt.incarnation
            self._hub = hubs.open(*of_attempt, self._on_message, on_nodes=on_nodes)
        except (ConfigError, StoreError) as error:  # no such network on this node; no port, which another one may have
            raise Ended(1 if on_nodes and isinstance(error, (NodeError, StoreError)) else 2, str(error)) from error

    def _check_nodes(self) -> None:
        """Preflight. Raises Ended where a node is bad, or where somebody wants the attempt to end."""
        if (checkup := self._plan.checkup) is None:
            return
        self._live.write(now=True, **{**self._facts(), "state": "preflight"})
        environment = self._plan.environment
        report = checkup.run(self.attempt.attempt, lambda: self._controls.poll() is not None, environment)
        self._handle_requests()
        if not report.ok:
            blamed = checkup.nodes_at_fault(report)
            self._note_lost(list(blamed))
            causes = [f"{node}: {why}" for node, why in report.bad.items()] + report.problems
            raise Ended(1, f"preflight: {'; '.join(causes)}", "node_lost" if blamed else "failed")

    def _start(self) -> None:
        facts = role_environment(
            bus_address=self._hub.address,
            attempt=self.attempt.attempt,
            incarnation=self.attempt.incarnation,
            resume_step=self.attempt.resume_step,
            urls=self._plan.urls,
        )
        fence_s = str(self._experiment.slurm.restart.fence_s)
        environment = {**self._plan.environment, **facts, "PYTHONUNBUFFERED": "1", FENCE: fence_s}
        if is_parent(self._experiment):
            run = self._paths.root, self._experiment, self.attempt, self._plan.environment
            led = self._led
            self._children = ChildOrchestrators(*run, led.hubs.publish, led.reaper, clock=led.clock.now)
        show_latest_logs(self._paths, self.attempt)
        self._led.take_into(self.attempt, self._paths)
        self._led.go_on(self.attempt, self._hub.place)
        here = [role.spec.label for role in self._led.roles]
        for spec in [spec for spec in self._plan.specs if spec.label not in here]:
            role = self._make_role(spec, environment)
            self._led.roles.append(role)  # before it starts: its agents may speak at once
            if role.state == "waiting":
                role.started = self._led.clock.now()
                logger.info(f"{spec.label} shares a GPU with {', '.join(spec.after)}: it starts when they are ready")
            elif spec.is_elastic:
                self._led.replicas.invite(role)
            else:
                self._begin(role)
        write_attempt(self._paths.attempts, self.attempt)  # a later attempt asks what became of these nodes

    def _begin(self, role: Role) -> None:
        self._led.start(role)
        if role.has_agents:
            self.attempt.nodes[role.spec.label] = list(role.hosts)
        logger.info(f"started {role.spec.label} (process {role.pid}): {' '.join(role.command)}")

    def _make_role(self, spec: RoleSpec, environment: dict[str, str]) -> Role:
        log_dir = self._paths.logs(self.attempt.attempt, spec.name)
        log_dir.mkdir(parents=True, exist_ok=True)  # here, once: not by a role's processes on many nodes
        of_role, clock = (log_dir, environment, self._led.statuses), self._led.clock.now
        if self._plan.steps is None:
            return Role(spec, *of_role, clock)
        assert isinstance(spec, StepSpec)
        self.attempt.nodes[spec.label] = list(spec.hosts)
        grace_s = self._experiment.supervisor.grace_s
        return StepRole(spec, *of_role, self._plan.steps, self._led.hubs.publish, grace_s, clock)

    # ------------------------------------------------------------------------------------------------ watch

    def _tick(self) -> None:
        self._detect_own_stall()
        self._led.pulse.tick()
        self._fence.look()
        self._handle_requests()
        for role in self._led.roles:
            if role.state == "waiting" and may_start(role, self._led.roles):
                self._begin(role)
            elif role.state not in ("waiting", "done", "away"):
                self._look_at(role)
        self._led.replicas.restart_lost(self._led.roles, self._begin)
        if self._children is not None:
            num_servers = sum(role.is_server for role in self._led.roles)
            self._children.tick(
                known_urls(self._plan.urls, self._led.roles).get("inference", []), num_servers, self._hub.address
            )
        to_come = [role for role in self._led.roles if role.state in ("waiting", "starting")]
        waiting = {role.spec.label: self._led.clock.now() - role.started for role in to_come}
        if not waiting and self._ready_at is None and self._stop is None:
            self._ready_at = time.time()
            logger.info(f"all roles are ready after {self._ready_at - self.attempt.began:.0f} s")
        self._console.tick(waiting, self._run_watch.doing)
        self._live.write(**self._facts())
        workers = [r for r in self._led.roles if not r.is_server]
        if all(r.state == "done" for r in workers) and (self._children is None or self._children.is_idle):
            raise self._finished()

    def _finished(self) -> Ended:
        """All workers are done: with the work, or with what a stop asked for."""
        progress = self._console.progress()
        is_over = self._children is None and 0 < (progress["max_steps"] or 0) <= (progress["step"] or 0)
        if self._stop is None or is_over:
            return Ended(0, "done")
        request = self._stop.request
        return Ended(request.code, request.reason, request.outcome)

    def _facts(self) -> dict[str, Any]:
        state = "starting" if self._ready_at is None else "running"
        return {
            "state": "saving" if self._stop is not None else state,
            **self._console.progress(),
            "roles": {r.spec.label: r.state for r in self._led.roles},
            "nodes": self.attempt.nodes,
            "cause": self._stop.request.reason if self._stop else None,
            "outcome": self._stop.request.outcome if self._stop else None,
            **self._run_watch.facts(),
        } | ({"runs": self._children.facts(), "max_steps": None} if self._children is not None else {})

    def _detect_own_stall(self) -> None:
        """Between two ticks the file system may have hung, or the job been suspended: that is no role's silence."""
        watched: list[Role | ChildOrchestrators] = [*self._led.roles, *([self._children] if self._children else [])]
        gap, stopped = self._gaps.take()
        gap -= self._health.take_asking_s() + self._controls.take_asking_s()
        if gap > HELD_UP_S:
            logger.warning(f"the supervisor was held up for {gap:.0f} s (does the file system hang?)")
            for one in watched:
                one.extend_deadlines(gap)
            if self._stop is not None:
                self._stop = self._stop._replace(deadline=self._stop.deadline + gap)
        if stopped > STOPPED_S:
            self._fence.look(at_once=True)  # the next STOP or SAVE may be for a newer attempt
            for one in watched:
                one.forget_silence()
            logger.warning(f"the supervisor was stopped for {stopped:.0f} s (suspended?); the run goes on where it was")
            self._controls.was_stopped(stopped)

    def _handle_requests(self) -> None:
        """Signals, the files SAVE and STOP, the time limit."""
        if self._controls.force_requested:
            for role in self._led.roles:
                role.kill()
        for role in [role for role in self._led.roles if role.warned]:
            self._controls.note_warning(role.warned)
            role.warned = 0
        request = self._controls.poll()
        if self._controls.is_asked_why:
            self._controls.is_asked_why = False
            self._run_watch.ask_why()
        if self._controls.num_saves > self._saves_asked:
            self._saves_asked = self._controls.num_saves
            who = "the file SAVE, an alarm, or a warning of Slurm's in doubt"
            logger.info(f"a save was asked for ({who}): saving at the next step boundary")
            self._led.hubs.publish("save", id=self.attempt.attempt * SAVES_OF_ATTEMPT + self._saves_asked)
        if self._stop is not None:
            request, deadline = self._stop = self._controls.stop_or_cancel(self._stop, self._led.clock.now())
            self.attempt.next = "slurm" if request.by_slurm else None
            if self._led.clock.now() > deadline:
                cause, code = f"{request.reason}; not saved within {request.budget_s:.0f} s", 1
                if held := self._run_watch.lack_of_room():
                    cause, code = f"{cause}: {held}", NoRoom.attempt_exit_code
                raise Ended(request.code or code, cause, request.outcome if request.outcome in FINAL else "failed")
        elif request is not None:
            self.attempt.next = "slurm" if request.by_slurm else None
            self._note_lost(request.lost_nodes)
            if not request.save or self._ready_at is None:
                raise Ended(request.code, request.reason, request.outcome)
            logger.warning(f"{request.reason}: saving, then ending (at most {request.budget_s:.0f} s)")
            self._stop = Stop(request, self._led.clock.now() + request.budget_s)
            self._led.hubs.publish("stop", reason=request.reason, save=True)

    def _look_at(self, role: Role) -> None:
        role.send_launch_order(known_urls(self._plan.urls, self._led.roles))
        if lost := role.lost_hosts(self._experiment.slurm.restart.node_timeout_s):
            self._on_lost_nodes(role, lost)
        elif not role.running:
            if role.has_reported("done") and role.exit_code == 0 and not role.is_server:
                role.state = "done"
                logger.info(f"{role.spec.label} is done")
                return
            self._on_unexpected_exit(role, *role.death())
        elif missing := role.missing_hosts():
            self._on_lost_nodes(role, missing, have_spoken=bool(role.agents()))
        elif role.state == "starting":
            if self._health.is_ready(role) if role.is_server else role.has_reported("ready"):
                role.state, role.was_ready = "ready", True
                self.attempt.nodes |= {role.spec.label: list(role.hosts)} if role.has_agents else {}  # now it has one
                url = next((row["info"]["url"] for row in role.statuses() if row["info"].get("url")), None)
                where = (
                    f", at {url}; its key is in {self._paths.root / TINKER_KEY}" if url and not role.is_server else ""
                )
                logger.info(f"{role.spec.label} is ready after {self._led.clock.now() - role.started:.0f} s{where}")
            elif self._led.clock.now() - role.started > role.start_timeout_s:
                self._on_unexpected_exit(role, f"{role.spec.label} was not ready within {role.start_timeout_s:.0f} s")
        elif role.is_server:
            if self._health.has_failed(role):
                cause = f"{role.spec.label} failed its health check for {role.unhealthy_s():.0f} s"
                self._on_unexpected_exit(role, cause)
        elif role.heartbeat_age_s() > self._experiment.supervisor.heartbeat_timeout_s:
            self._on_unexpected_exit(role, f"{role.spec.label} gave no sign of life for {role.heartbeat_age_s():.0f} s")

    # ------------------------------------------------------------------------------------------------ deaths

    def _on_lost_nodes(self, role: Role, hosts: list[str], *, have_spoken: bool = True) -> None:
        """Let a homogeneous job go on without a server's node, where another serves or a spare node takes its place;
        anything else is started again as a whole.

        `have_spoken`: agents of the role. Else no node is to blame: Slurm may have the step wait.
        """
        cause, outcome = f"node {', '.join(hosts)} of {role.spec.label} was lost (no sign of life)", "node_lost"
        if self._led.let_go(role, cause):
            return
        if have_spoken:
            self._note_lost(hosts)
        else:
            cause, outcome = f"the agents of {role.spec.label} on {', '.join(hosts)} did not start in time", "failed"
        if self._is_done_with(role):
            return
        can_go_on = self._plan.steps is not None and self._plan.steps.no_kill and role.is_server and role.was_ready
        if not can_go_on or not self._led.can_do_without(role, hosts):
            self._kill_and_log(role, cause, hosts)
            self._let_trainer_save(role)
            raise Ended(1, cause, outcome)
        self._led.hubs.publish("server", role=role.spec.name, index=role.spec.index, state="lost", url=role.url)
        self._led.kill(role)
        where = self._led.replicas.mark_lost(role, hosts)
        logger.warning(f"{cause}; the run goes on without it: {where}")

    def _note_lost(self, hosts: Sequence[str]) -> None:
        self.attempt.lost_nodes = list(dict.fromkeys([*self.attempt.lost_nodes, *hosts]))

    def _on_unexpected_exit(self, role: Role, cause: str, permanent: bool = False, code: int = 1) -> None:
        """Start a server again that ended and should not have; for other roles end the attempt."""
        if not self._is_done_with(role) and not role.is_server and (lost := role.silent_hosts(NODE_SILENCE_GRACE_S)):
            self._on_lost_nodes(role, lost)
        if self._is_done_with(role) or self._led.let_go(role, cause):  # it may have said so meanwhile
            return
        if self._led.replicas.awaiting_recovery(role) and self._led.can_do_without(role, role.hosts):
            self._led.kill(role)
            logger.warning(f"{cause}; {self._led.replicas.mark_lost(role, role.hosts)}")
            return
        # one that never served has a reason that a second start does not change
        if role.was_ready and role.restarts < role.spec.max_restarts:
            self._led.kill(role, reap=True)
            role.restarts += 1
            logger.warning(f"{cause}; it is started again ({role.restarts}/{role.spec.max_restarts}), the run goes on")
            self._begin(role)
            return
        self._kill_and_log(role, cause, code=code)
        self._let_trainer_save(role)
        raise Ended(code, cause, permanent=permanent)

    def _let_trainer_save(self, ended: Role) -> None:
        if self._ready_at is None:
            return
        needs_s, left_s, many = self._console.needs_s(), self._controls.time_left_s, self._children is not None
        self._save_first.ask(self._led.roles, ended, needs_s, left_s, self._led.pulse, self._cannot_save, many=many)

    def _is_done_with(self, role: Role) -> bool:
        if self._stop is not None and (role.is_server or role.has_reported("done")):
            role.state = "done"  # on the way out, nobody asks the servers any more
        return role.state == "done"

    def _cannot_save(self) -> bool:
        """Return whether the attempt has no time to save anything, or a trainer no more all of its nodes."""
        request, silence_s = self._controls.poll(), self._experiment.slurm.restart.node_timeout_s
        is_lost = any(role.spec.name == "trainer" and role.lost_hosts(silence_s) for role in self._led.roles)
        return is_lost or self._fence.is_fenced or (request is not None and not request.save)

    def _kill_and_log(self, role: Role, cause: str, lost: Sequence[str] = (), code: int = 1) -> None:
        """End a role without which the attempt is over. Raises Ended where somebody had asked for its end."""
        tail = role.log_excerpt()
        self._led.kill(role, reap=True)
        role.state = "dead"
        self._ended_by = role, list(lost)
        logger.error(f"{cause}\n--- end of {role.log_file} ---\n{tail}\n---")
        if self._stop is not None:  # the true cause is what the end was asked for
            request = self._stop.request
            raise Ended(request.code or code, f"{request.reason}; it did not end in order: {cause}", request.outcome)

    def _roles_to_leave(self, ended: Ended) -> LedRoles | None:
        """Return the servers, where another role crashed that had been at work, and the orchestrator where that was the
        trainer; None: everything ends."""
        role, lost = self._ended_by
        is_allowed = self._experiment.slurm.restart.in_place and self._plan.steps is not None
        if not is_allowed or self._children is not None or role is None or role.is_server or not role.was_ready:
            return None
        is_asked = self._stop is not None or self._controls.final_request() is not None
        if self._fence.is_fenced or is_asked or ended.outcome not in ("failed", "node_lost"):
            return None
        left = self._led.servers_without(lost)
        if left is not None and role.spec.name == "trainer" and may_outlive(self._experiment):
            self._hold.ask(self._led.roles, lost, left)
        return left

    def _end(self, ended: Ended) -> Ended:
        """End every role that no later attempt takes over, with all it started, and write down how this one ended:
        as returned, cancelled or stopped if somebody asked for that meanwhile."""
        kept, spared = (self.left.roles, self.left.no_servers) if self.left is not None else ([], [])
        self._led.hubs.publish("stop", reason=ended.cause, save=False, spared=spared)
        over = [role for role in self._led.roles if role not in kept]
        children = self._children.pids if self._children is not None else []
        killed = end_roles(over, self._experiment.supervisor.grace_s, children, self._led.pulse.tick)
        if self._children is not None:
            self._children.end(ended.cause)
        serving = [role.pid for role in kept if role.was_started]
        if killed := [*killed, *reap_roles(over, [*self._others, *serving])]:
            logger.debug(f"processes that had to be killed: {killed}")
        self._console.close()
        if (final := self._controls.final_request(ended.outcome)) is not None:
            self.attempt.next = "slurm" if final.by_slurm else None
            ended = Ended(final.code or ended.code, f"{final.reason}; before that: {ended.cause}", final.outcome)
        is_wanted = (ended := self._write_down(ended)).code == 0 or ended.outcome == "interrupted"
        logger.log(
            "INFO" if is_wanted else "ERROR", f"attempt {self.attempt.attempt} ended: {ended.outcome} ({ended.cause})"
        )
        return ended

    def _write_down(self, ended: Ended) -> Ended:
        if (true := self._fence.true_end(ended)) is not ended or self._fence.is_fenced:
            return true if self._fence.is_gone else ended  # the newer attempt has written this one's end
        now = time.time()
        ready = self._ready_at or now
        seconds = {"start": ready - self.attempt.began, "run": now - ready, **self._console.seconds()}
        close_attempt(self.attempt, ended, saved_step_if_known(self._paths, self.attempt.saved_before), seconds, now)
        self._live.write(
            now=True, **{**self._facts(), "state": "ended", "cause": ended.cause, "outcome": ended.outcome}
        )
        try:
            write_attempt(self._paths.attempts, self.attempt)
        except (OSError, StoreError) as error:
            logger.warning(f"{self._paths.attempts} could not be written: {error}")
        return ended
