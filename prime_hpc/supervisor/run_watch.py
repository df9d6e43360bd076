"""Beside the supervisor's loop: threads that watch the run, and can neither hold it up nor end it."""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.store.io.room import WAITS
from prime_hpc.supervisor.alarms.alarm_watch import AlarmWatch
from prime_hpc.supervisor.attempt.lost_batch_host import Return
from prime_hpc.supervisor.attempt.successor import SuccessorWatch
from prime_hpc.supervisor.gpu_watch import GpuWatch
from prime_hpc.supervisor.prometheus.exporter import Exporter
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.server_loads import EVERY_S, ServerLoads, doing
from prime_hpc.supervisor.stalls.watch import StallWatch
from prime_hpc.supervisor.stop_requests import Controls


class RunWatch:
    """All of them, from the attempt's start to `close`.

    Args:
        on_nodes: what listens does so for other machines too.
        bus_statuses: the last word of each role's processes.
        roles: of the attempt; more may come.
        controls: by which a save or the end is asked for.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        attempt: int,
        clock: AwakeClock,
        environment: Mapping[str, str],
        on_nodes: bool,
        bus_statuses: Mapping[tuple[str, int], Mapping[str, Any]],
        roles: Sequence[Role],
        publish: Callable[..., None],
        controls: Controls,
    ) -> None:
        self._stalls = StallWatch(
            run_dir,
            run_dir / "logs" / f"attempt_{attempt}" / "stalls",
            experiment.supervisor.stalls,
            clock,
            bus_statuses=bus_statuses,
            publish=publish,
            agents=lambda: [name for role in list(roles) for name in role.agents()],
        )

        self._bus_statuses = bus_statuses
        prometheus = experiment.prometheus
        every_s = EVERY_S if prometheus is None else min(EVERY_S, prometheus.every_s)
        self._loads = ServerLoads(roles, environment, every_s, keep_texts=prometheus is not None)
        self._gpus = GpuWatch(run_dir, attempt)
        host = None if on_nodes or experiment.device == "cpu" else socket.gethostname()
        self._gpus.start(host, lambda: {gpu for role in list(roles) for gpu in role.spec.held_gpus})
        self._controls = controls
        self._alarms = AlarmWatch(
            run_dir, attempt, experiment.alarms, facts=self._figures, save=self._save, stop=controls.ask_to_stop
        )
        restart, job = experiment.slurm.restart, Return.from_env(environment) if on_nodes else None
        self._successor = (
            SuccessorWatch(
                run_dir,
                job.job,
                every_s=restart.successor_retry_s,
                lead_s=restart.signal_lead_s,
                time_left=lambda: controls.time_left_s,
            )
            if job is not None and job.mode == "successor"
            else None
        )
        self._exporter: Exporter | None = None
        if prometheus is not None:
            sources = bus_statuses, roles, self._loads, self._gpus.samples, lambda: controls.time_left_s
            self._exporter = Exporter(experiment, run_dir, environment, *sources)
            self._exporter.start(on_nodes=on_nodes)

    def _figures(self) -> dict[str, float | None]:
        stall = self._stalls.facts()
        return {
            "stall_s": float(stall["seconds"]) if stall else 0.0,
            "time_left_s": self._controls.time_left_s,
            "no_successor_s": None if self._successor is None else self._successor.missing_s,
        }

    def _save(self) -> None:
        self._controls.num_saves += 1

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Take an agent's word."""
        self._stalls.on_message(message)
        self._gpus.on_message(message)

    def ask_why(self) -> None:
        """Somebody wants to know who holds the run up."""
        self._stalls.ask()

    def lack_of_room(self) -> str:
        """Return which write waits for room on a disk, in its own words; empty: none."""
        words = (str((row.get("doing") or {}).get("blocked", "")) for row in list(self._bus_statuses.values()))
        return next((said for said in words if WAITS in said), "")

    def facts(self) -> dict[str, Any]:
        """Return what `status` shows."""
        return {
            "stall": self._stalls.facts(),
            "alarms": self._alarms.shown(),
            "servers": self._loads.facts(),
            "gpus": self._gpus.facts(),
            "doing": self.doing(),
        }

    def doing(self) -> dict[str, list[dict[str, Any]]]:
        """Return by role what its processes do now."""
        return doing(dict(self._bus_statuses))

    def close(self) -> None:
        """Watch no more."""
        self._stalls.close()
        self._alarms.close()
        self._loads.close()
        if self._successor is not None:
            self._successor.close()
        self._gpus.close()
        if self._exporter is not None:
            self._exporter.close()
