"""Sees that a step stands still, and keeps who holds it up with the run: once a stall, by a thread of its own.

    logs/attempt_<k>/stalls/step_<n>.json, .txt          asked_<seconds>.json, .txt: somebody put the file WHY

Costs a look at the trainer's last word a second. On a stall the nodes are looked at: this one here, those of a Slurm
job or of pods by their agents, who are asked over the bus. Nothing here waits for a file before the cause is known, so
that a file system that hangs is named too; what was found is written when it answers again.
"""

import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config.sections.supervisor import StallsConfig
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.supervisor.stalls.collect import LOOK_TOPIC, Seen, look_here, report, text_of
from prime_hpc.supervisor.stalls.diagnose import PATIENCE_S

TICK_S = 1.0
AGENTS_WITHIN_S = 12.0
USUAL_STEPS = 20
"""Steps whose median is the usual time."""


class StallWatch:
    """Watches from its making to `close`.

    Args:
        log_dir: where what is found is kept.
        clock: of the supervisor: time in which it was stopped is no stall.
        bus_statuses: the last word of each role's processes.
        agents: `label host/task` of the agents that are there now; none where the roles are processes of this machine.
    """

    def __init__(
        self,
        run_dir: Path,
        log_dir: Path,
        config: StallsConfig,
        clock: AwakeClock,
        *,
        bus_statuses: Mapping[tuple[str, int], Mapping[str, Any]],
        publish: Callable[..., None],
        agents: Callable[[], Collection[str]],
    ) -> None:
        self._run_dir, self._folder = run_dir, log_dir
        self._config, self._clock = config, clock
        self._bus_statuses, self._publish, self._agents = bus_statuses, publish, agents
        self._step: int | None = None
        self._since = clock.now()
        self._seconds: deque[float] = deque(maxlen=USUAL_STEPS)
        self._told: int | None = None
        self._answers: dict[str, Seen] = {}
        self._asked = 0
        self._found: dict[str, Any] = {}
        self._stop, self._is_asked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Somebody wants to know, stall or none: look, and keep what is found as `asked_<seconds>`."""
        self._is_asked.set()

    def close(self) -> None:
        """Watch no more. A look that goes on is not waited for."""
        self._stop.set()

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Take what an agent has seen."""
        if message.get("event") == "looked" and message.get("asked") == self._asked:
            self._answers[f"{message['label']} {message['key']}"] = message["seen"]

    def facts(self) -> dict[str, Any] | None:
        """Return the stall that goes on: `step`, `seconds`, `headline`, `file`; None where there is none."""
        if not self._found or self._found["step"] != self._step:
            return None
        return {**self._found, "seconds": round(self._clock.now() - self._since)}

    def limit_s(self) -> float:
        """Return how long a step may take before it counts as a stall."""
        config = self._config
        if not self._seconds:
            return config.factor * config.least_s
        return max(config.least_s, config.factor * statistics.median(self._seconds))

    def _trainers_step(self) -> int | None:
        """Return the last step that rank 0 has told of; None before it is ready, and while nobody asks for a step."""
        word = self._bus_statuses.get(("trainer", 0))
        if word is None or word["state"] != "ready" or word["info"].get("idle"):
            return None
        return int(word["step"] if word.get("step") is not None else word["info"].get("step", 0))

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            now, step = self._clock.now(), self._trainers_step()
            if step is None:
                self._since = now
            elif step != self._step:
                if self._step is not None and step > self._step:
                    self._seconds.append(now - self._since)
                self._step, self._since = step, now
            elif self._config.enabled and now - self._since > self.limit_s() and self._told != step:
                self._told = step
                self._try(partial(self._look_into, step, now - self._since))
            if self._is_asked.is_set():
                self._is_asked.clear()
                self._try(lambda: self._keep(f"asked_{time.time():.0f}", self._look({}, PATIENCE_S)))

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - somebody who looks on must not end the run
            logger.warning(f"who holds the run up could not be found out: {error}")

    def _look(self, facts: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Ask all nodes at once, and name the cause."""
        self._answers, self._asked = {}, self._asked + 1
        expected = set(self._agents())
        if expected:
            self._publish(LOOK_TOPIC, asked=self._asked)
        own = look_here(self._run_dir, pids=[os.getpid()])
        end = time.monotonic() + AGENTS_WITHIN_S
        while expected - self._answers.keys() and time.monotonic() < end and not self._stop.is_set():
            time.sleep(0.1)
        silent = {name.split(" ", 1)[1].partition("/")[0] for name in expected - self._answers.keys()}
        nodes = [own, *self._answers.values()]
        return report(self._run_dir, nodes, patience_s=patience_s, facts=facts, silent=sorted(silent))

    def _keep(self, name: str, document: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = text_of(document, with_stacks=True)
        write_atomic(self._folder / f"{name}.txt", text, sync=False)
        write_atomic(self._folder / f"{name}.json", json.dumps(document, default=str), sync=False)

    def _look_into(self, step: int, seconds: float) -> None:
        usual = statistics.median(self._seconds) if self._seconds else None
        facts = {"step": step + 1, "stood_s": round(seconds, 1), "usual_s": usual}
        document = self._look(facts, patience_s=0.0)
        file = self._folder / f"step_{step + 1}.txt"
        self._found = {"step": step, "headline": document["headline"], "file": str(file)}
        self._keep(file.stem, document)
        than = "" if usual is None else f" (usual: {usual:.1f} s)"
        words = f"step {step + 1} has stood for {seconds:.0f} s{than}"
        logger.warning(f"{words}: {document['headline']}; see {file}")
