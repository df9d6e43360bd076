"""Watches the run's figures by a thread of its own, keeps what fired in `alarms.jsonl`, and has it told.

Reads the metrics files as they grow; the figures of the run itself are looked at every `LOOK_S`. What an alarm sends
has a thread of its own, so that a webhook that hangs delays neither the run nor the next alarm.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config.run_files import ALARMS_JSONL
from prime_hpc.config.sections.supervisor import AlarmsConfig
from prime_hpc.observe.console import Tail
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import jsonable
from prime_hpc.supervisor.alarms.actions import TELL, ActionError, with_retries
from prime_hpc.supervisor.alarms.rules import Alarm, Watcher, figures_of, rules_of

TICK_S = 1.0
LOOK_S = 10.0
SHOWN = 3
FILES = ("trainer", "orchestrator")


class AlarmWatch:
    """Watches from its making to `close`.

    Args:
        facts: figures of the run that are known in memory: `stall_s`, `time_left_s`, `no_successor_s`; None is
            left out.
        tick_s: between two looks at the files.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        config: AlarmsConfig,
        *,
        facts: Callable[[], Mapping[str, float | None]],
        save: Callable[[], None],
        stop: Callable[[str], None],
        tick_s: float = TICK_S,
    ) -> None:
        self._run_dir, self._attempt, self._config = run_dir, attempt, config
        self._facts, self._save, self._stop_run = facts, save, stop
        self._watchers = [Watcher(rule) for rule in rules_of(config)]
        self._shown: deque[str] = deque(maxlen=SHOWN)
        self._lock = threading.Lock()
        self._next_look, self._tick_s = 0.0, tick_s
        self._closed = threading.Event()
        if self._watchers:
            self._tails = {name: Tail(metrics_file(run_dir, name)) for name in FILES}
            self._thread = threading.Thread(target=self._run, name="alarms", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more. What is being sent is not waited for."""
        self._closed.set()

    def shown(self) -> list[str]:
        """Return the alarms that fired last in this attempt."""
        return list(self._shown)

    def _run(self) -> None:
        while not self._closed.wait(self._tick_s):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a file system that does not answer, a row of another version
                logger.warning(f"alarms: {type(error).__name__}: {error}")

    def _look(self) -> None:
        for name, tail in self._tails.items():
            for row in tail.rows():
                self._take(figures_of(name, row), row.get("step"))
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + min(LOOK_S, 10 * self._tick_s)
            self._take({f"run.{name}": value for name, value in {**self._facts(), **self._space()}.items()}, None)

    def _space(self) -> dict[str, float]:
        about = os.statvfs(self._run_dir)
        total = about.f_blocks * about.f_frsize
        free = about.f_bavail * about.f_frsize
        return {"free_gib": free / 2**30, "free_share": free / total} if total else {}

    def _take(self, figures: Mapping[str, Any], step: int | None) -> None:
        for watcher in self._watchers:
            if watcher.rule.metric in figures:
                alarm = watcher.take(figures[watcher.rule.metric], step)
                if alarm is not None:
                    self._fire(alarm)

    def _fire(self, alarm: Alarm) -> None:
        logger.warning(f"alarm: {alarm.text}")
        self._shown.append(f"{time.strftime('%H:%M')} {alarm.text}")
        self._note(alarm, actions=list(alarm.rule.actions), value=alarm.value, step=alarm.step, text=alarm.text)
        for action in alarm.rule.actions:
            if action == "save":
                self._save()
            elif action == "stop":
                self._stop_run(f"alarm: {alarm.text}")
            elif action in TELL:
                threading.Thread(target=self._tell, args=(action, alarm), name=f"alarm-{action}", daemon=True).start()

    def _tell(self, action: str, alarm: Alarm) -> None:
        error = None
        try:
            retries = 0 if action == "command" else self._config.retries
            with_retries(lambda: TELL[action](self._config, alarm, self._run_dir), retries, self._closed.wait)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the record says that nobody was told
            error = str(problem) if isinstance(problem, ActionError | OSError) else repr(problem)
            logger.warning(f"alarm {alarm.rule.title}: its {action} failed: {error}")
        self._note(alarm, action=action, error=error)

    def _note(self, alarm: Alarm, **facts: Any) -> None:
        """Append a line to the record; a full disk is no reason to be silent elsewhere."""
        known = {name: jsonable(value) for name, value in facts.items()}
        row = {"time": round(time.time(), 1), "attempt": self._attempt, "rule": alarm.rule.title, **known}
        try:
            with self._lock, (self._run_dir / ALARMS_JSONL).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logger.warning(f"{ALARMS_JSONL} could not be written: {error}")
