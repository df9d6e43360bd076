"""Collects a run's figures every few seconds, and hands them on: to whoever has the token, and as a text file.

By threads of its own. Nothing here can hold a run up or end it: a port that is taken, a folder that cannot be written
and a file system that hangs are said once in the log.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.run_files import ALARMS_JSONL, ATTEMPTS_JSONL, STATUS_JSON
from prime_hpc.config.sections.common import PrometheusConfig
from prime_hpc.observe.console import Tail
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.run_dirs import known_json
from prime_hpc.supervisor.alarms.rules import rules_of
from prime_hpc.supervisor.hub import host_of_hub
from prime_hpc.supervisor.prometheus.endpoint import Endpoint
from prime_hpc.supervisor.prometheus.figures import Figures
from prime_hpc.supervisor.prometheus.folder import file_of, folder_of, label_of, read_target, take_token, write_target
from prime_hpc.supervisor.prometheus.servers import merge
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.server_loads import ServerLoads

ROWS = ("trainer", "orchestrator")


class Exporter:
    """Collects from `start` to `close`.

    Args:
        environment: of the roles: which network is the run's.
        statuses: the last word of each role's processes.
        roles: of the attempt; more may come.
        walltime_left: seconds to the job's end, where they are known.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        environment: Mapping[str, str],
        statuses: Mapping[tuple[str, int], Mapping[str, Any]],
        roles: Sequence[Role],
        loads: ServerLoads,
        gpus: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]],
        walltime_left: Callable[[], float | None],
    ) -> None:
        assert experiment.prometheus is not None
        self._config: PrometheusConfig = experiment.prometheus
        self._kind, self._run_dir, self._environment = experiment.kind, run_dir, environment
        self._statuses, self._roles, self._loads = statuses, roles, loads
        self._gpus, self._walltime_left = gpus, walltime_left
        self._folder = folder_of(run_dir, self._config.folder)
        self._run = label_of(run_dir)
        self._figures = Figures(self._run)
        for rule in rules_of(experiment.alarms):  # from zero on: the first one is an increase, too
            self._figures.put("run_alarms_total", 0.0, rule.title)
        self._tails = {role: Tail(metrics_file(run_dir, role)) for role in ROWS}
        self._alarms = Tail(run_dir / ALARMS_JSONL)
        self._text = ""
        self._endpoint: Endpoint | None = None
        self._address = ""
        self._has_complained = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, on_nodes: bool) -> None:
        """Begin; `on_nodes`: listen for other machines too, as the hub does."""
        self._thread = threading.Thread(target=self._work, args=(on_nodes,), name="prometheus-collect", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand nothing on any more."""
        self._closed.set()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._take_back()

    def _work(self, on_nodes: bool) -> None:
        self._collect_until_closed(on_nodes)
        self._take_back()  # `close` waits for a second only: a file system that hung may let files through later
        if self._endpoint is not None:
            self._endpoint.close()

    def _take_back(self) -> None:
        """Take the files out of the folder; where a newer attempt answers, which may have begun elsewhere, its own."""
        with contextlib.suppress(OSError):
            if read_target(self._folder, self._run) not in (None, self._address):
                return
            for suffix in (".json", ".prom"):
                file_of(self._folder, self._run, suffix).unlink(missing_ok=True)

    def _collect_until_closed(self, on_nodes: bool) -> None:
        self._try(self._collect)
        if self._config.serve:
            self._try(lambda: self._listen(on_nodes))
        while True:
            if self._config.textfile and not self._closed.is_set():
                self._try(self._write)
            if self._closed.wait(self._config.every_s):
                return
            self._try(self._collect)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a disk, a port, a package that is missing: the run goes on
            if not self._has_complained:
                logger.warning(f"prometheus: {type(error).__name__}: {error}; the run goes on without")
            self._has_complained = True

    def _listen(self, on_nodes: bool) -> None:
        token = take_token(self._folder)
        if self._closed.is_set():  # while the file system kept it
            return
        network = Network.from_env(self._environment)
        host, advertised = host_of_hub(network, self._environment, on_nodes=on_nodes)
        port = self._config.port
        listener = sockets.listen(host, port, ports=None if port else network.ports, seed=f"{self._run_dir} metrics")
        self._endpoint = Endpoint(listener, token, self._run, lambda: self._text)
        self._address = sockets.join(advertised or sockets.name_of(host), listener.getsockname()[1])
        write_target(self._folder, self._run, self._address)
        logger.info(f"prometheus: http://{self._address}/metrics, for who sends the token in {self._folder}")

    def _write(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(file_of(self._folder, self._run, ".prom"), self._text, sync=False)

    def _collect(self) -> None:
        figures = self._figures
        figures.take_processes(dict(self._statuses))
        figures.take_gpus(self._gpus())
        roles = list(self._roles)
        figures.replace("role_restarts_total", {(role.spec.label,): float(role.restarts) for role in roles})
        figures.put("run_walltime_left_seconds", self._walltime_left())
        texts = self._loads.texts()
        serving = [role.spec.label for role in roles if role.is_server]
        figures.replace("server_up", {(label,): float(label in texts) for label in serving})
        for role, tail in self._tails.items():
            for row in tail.rows():
                figures.take_row(role, row)
        for row in self._alarms.rows():
            figures.take_alarm(row)
        take_files(figures, self._run_dir, self._kind)
        self._text = figures.text() + (merge(texts, self._run) if self._config.servers else "")


def take_files(figures: Figures, run_dir: Path, kind: str) -> None:
    """Take what a run's small files say: its own word, its attempts, and the room that is left. Raises OSError."""
    figures.take_word(known_json(run_dir / STATUS_JSON) or {}, kind)
    figures.take_attempts(read_attempts(run_dir / ATTEMPTS_JSONL))
    about = os.statvfs(run_dir)
    figures.put("filesystem_free_bytes", float(about.f_bavail * about.f_frsize))
    figures.put("filesystem_size_bytes", float(about.f_blocks * about.f_frsize))
