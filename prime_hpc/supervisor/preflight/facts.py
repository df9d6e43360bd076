"""Preflight's first round: every node states its facts and watches for the others' files; the supervisor judges.

The supervisor's side; the nodes run `node`.
"""

import json
import math
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.store.io import files
from prime_hpc.store.run_dirs import read_json
from prime_hpc.supervisor.preflight import rules
from prime_hpc.supervisor.preflight.launcher import Message, RunStep, Step, Steps
from prime_hpc.supervisor.preflight.node import FACTS, LOST, RESULT, local_hostnames, pick_host
from prime_hpc.supervisor.preflight.plan import HostCheck, NodeVerdict, PreflightPlan, merged
from prime_hpc.supervisor.preflight.rules import SUPERVISOR, Sighting

TICK_S = 0.1
OUTPUT_GRACE_S = 2.0
"""From the end of a step to the conclusion that a silent node of it never ran."""
RETRIES_AT_ONCE = 16
PATIENCE_S = 15.0
"""Once half of the nodes have spoken, a silent one is tried alone after this."""
SLOW_VISIBILITY_S = 2.0
WATCHED_SHARE = 0.5
"""A file counts as unseen by a node that looked for it during so much of the time that all have."""


@dataclass
class _Node:
    """All that the supervisor has heard and seen of a node so far."""

    check: HostCheck
    phase: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By peer when this node saw its file, and when that had been written."""
    unseen: list[str] = field(default_factory=list)
    answered: bool = False
    file_seen: tuple[float, float] | None = None
    """The same for the supervisor seeing this node's file."""
    problems: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    """Those of the run directory; `NodeVerdict.shared`."""
    retried: bool = False
    lost: bool = False


class FactsRound:
    """The first round: every node's own facts, and who sees whose file."""

    def __init__(self, plan: PreflightPlan, run_step: RunStep, folder: Path, stop: Callable[[], bool]) -> None:
        self._plan = plan
        self._folder = folder
        self._stop = stop
        self._steps = Steps(run_step)
        self._token = uuid.uuid4().hex
        self._nodes = {host: _Node(check) for host, check in merged(plan.hosts).items()}
        self._sightings: list[Sighting] = []
        self._strangers: list[str] = []
        self._looking = math.inf
        self._watch_s = 0.0
        self._ended: dict[int, float] = {}
        self._half_spoke = math.inf
        self._told_lost = 0
        self._next_look = 0.0

    def run(self, timeout_s: float) -> list[NodeVerdict]:
        """Verdicts in the plan's order. Raises StoreError where the folder cannot be written."""
        began = time.monotonic()
        self._argv = self._write_spec(timeout_s)
        try:
            checks = [node.check for node in self._nodes.values()]
            for component in sorted({check.component for check in checks}):
                self._launch([check.host for check in checks if check.component == component], component)
            self._looking = time.time()
            while time.monotonic() - began < timeout_s and not self._stop() and not self._all_known():
                for message in self._steps.listen(TICK_S):
                    self._on_message(message)
                if time.monotonic() >= self._next_look:
                    self._look()
                    self._next_look = time.monotonic() + min(1.0, TICK_S * len(self._nodes) / 64)
                self._retry()
        finally:
            self._steps.close()
        return self._judge(time.monotonic() - began)

    def not_started(self) -> str | None:
        """After `run`: the launcher's words where none of several nodes ever spoke, which is no node's fault; else
        None."""
        nodes = self._nodes.values()
        if len(nodes) < 2 or any(n.phase is not None or n.answered or n.file_seen is not None for n in nodes):
            return None
        unlaunched = [problem for node in nodes for problem in node.problems]
        words = [*unlaunched, *(self._steps.words_about(host) for host in self._nodes), *self._strangers]
        said = next((text for text in words if text), "it said nothing")
        return f"none of {len(nodes)} nodes began its check; the launcher said: {said}"

    def _write_spec(self, timeout_s: float) -> list[str]:
        """Write what the nodes read; returns the command that they run."""
        config = self._plan.config
        wait_s = self._watch_s = min(config.max_visibility_s, 0.8 * timeout_s)
        checks = [node.check for node in self._nodes.values()]
        hosts = [
            {"host": c.host, "gpus_asked": c.gpus_asked, "on_gpus": c.on_gpus, "ports": list(c.ports)} for c in checks
        ]
        self._spec_wrote = time.time()
        spec = {
            "token": self._token,
            "run_dir": str(self._plan.run_dir),
            "min_free_gib": config.min_free_gib,
            "max_gpu_memory_used": config.max_gpu_memory_used,
            "watch_s": wait_s,
            "hosts": hosts,
        }
        path = self._folder / f"spec-{self._token[:8]}.json"
        files.write_atomic(path, json.dumps(spec).encode())
        return [sys.executable, "-P", "-m", "prime_hpc.supervisor.preflight.node", str(path), f"{wait_s:.1f}"]

    def _launch(self, hosts: list[str], component: int) -> None:
        try:
            self._steps.start(self._argv, hosts, component)
        except OSError as error:
            for host in hosts:
                self._nodes[host].problems.append(f"its check could not be launched: {error}")
                self._nodes[host].lost = True

    def _on_message(self, message: Message) -> None:
        data = message.data
        host = self._plan_name(data["host"])
        if host is None:
            self._strangers += [*data.get("result", {}).get("problems", [])]
            return
        node = self._nodes[host]
        node.phase = data["phase"]
        self._sightings.append(Sighting(host, SUPERVISOR, data["at"], message.arrived))
        if data["phase"] == "started":
            node.times.setdefault("started", data["started"])
        elif data["phase"] == "facts":
            node.facts = data["facts"]
        elif data["phase"] == "result":
            self._take(node, data["result"])

    def _plan_name(self, name: str) -> str | None:
        return name if name in self._nodes else next((h for h in self._nodes if h.split(".")[0] == name), None)

    def _take(self, node: _Node, result: dict[str, Any]) -> None:
        """Take a node's result, from its line or its file."""
        node.answered = True
        node.times.update(result.get("times", {}))
        node.seen = result.get("seen", {})
        node.unseen = result.get("unseen", [])
        node.problems += [p for p in result.get("problems", []) if p not in node.problems]
        node.shared += result.get("shared", [])

    def _look(self) -> None:
        """Read the files that are new."""
        names = set(files.list_dir(self._folder))
        for host, node in self._nodes.items():
            if node.file_seen is None and host + FACTS in names:
                data = read_json(self._folder / (host + FACTS))
                if data is not None and data.get("token") == self._token:
                    node.file_seen = time.time(), data["times"]["wrote"]
                    node.phase = node.phase or "facts"
                    node.facts = data["facts"]
                    node.times.update(data["times"])
            if not node.answered and host + RESULT in names:
                data = read_json(self._folder / (host + RESULT))
                if data is not None and data.get("token") == self._token:
                    self._take(node, data)

    def _retry(self) -> None:
        """Try once more what a step of several nodes left unanswered: one of them may have made it fail or hang.

        Nodes that never spoke are tried alone, those that were ended with their step together.
        """
        now = time.monotonic()
        open_nodes = {host: node for host, node in self._nodes.items() if not node.answered and not node.lost}
        silent = [host for host, node in open_nodes.items() if node.phase is None]
        if 2 * len(silent) <= len(self._nodes):
            self._half_spoke = min(self._half_spoke, now)
        late = now - self._half_spoke > PATIENCE_S
        alone = sum(not step.ended for step in self._steps.steps if len(step.hosts) == 1)
        again: dict[int, list[str]] = {}
        for host, node in open_nodes.items():
            over = self._is_over(host, now)
            if node.retried or len(self._steps_of(host)[0].hosts) == 1:
                node.lost = over
            elif node.phase is not None and over:
                node.retried = True
                again.setdefault(node.check.component, []).append(host)
            elif node.phase is None and (over or late or self._steps.mentions(host)) and alone < RETRIES_AT_ONCE:
                node.retried = True
                alone += 1
                self._launch([host], node.check.component)
        for component, hosts in again.items():
            self._launch(hosts, component)
        # a node that could not even see or write the directory will never show a file
        lost = [h for h, n in self._nodes.items() if n.lost or (n.answered and n.problems and n.file_seen is None)]
        if len(lost) > self._told_lost:  # nobody need wait for them any longer
            self._told_lost = len(lost)
            files.write_atomic(self._folder / LOST, json.dumps({"token": self._token, "hosts": lost}).encode())

    def _steps_of(self, host: str) -> list[Step]:
        return [step for step in self._steps.steps if host in step.hosts]

    def _is_over(self, host: str, now: float) -> bool:
        """Return whether the newest step of a host has ended, and its last words have had time to arrive."""
        step = self._steps_of(host)[-1]
        return self._steps.silent_end(step) and now - self._ended.setdefault(id(step), now) >= OUTPUT_GRACE_S

    def _all_known(self) -> bool:
        return all(
            node.lost or (node.answered and (node.file_seen is not None or node.problems))
            for node in self._nodes.values()
        )

    def _judge(self, waited_s: float) -> list[NodeVerdict]:
        hosts = list(self._nodes)
        self._look()
        seen = self._file_sightings()
        bounds = self._clocks(seen)
        by_host: dict[str, list[Sighting]] = {host: [] for host in (SUPERVISOR, *hosts)}
        for sighting in seen:
            by_host[sighting.reader].append(sighting)
            by_host[sighting.writer].append(sighting)
        wrote = {host for host, node in self._nodes.items() if "wrote" in node.times or node.file_seen is not None}
        answered = [host for host, node in self._nodes.items() if node.answered and "looking" in node.times]
        unseen = {
            h: [w for w in self._nodes[h].unseen if w in wrote and self._looked_for(h, w, bounds)] for h in answered
        }
        unseen[SUPERVISOR] = [h for h in hosts if h in wrote and self._nodes[h].file_seen is None]
        watchers: dict[str, list[str]] = {writer: [] for writer in wrote}
        for reader in answered:
            for writer in wrote.intersection({*self._nodes[reader].seen, *unseen[reader]}):
                watchers[writer].append(reader)
        for readers in watchers.values():
            readers.append(SUPERVISOR)
        blame = rules.judge_unseen(unseen, watchers)
        gpus = rules.few_gpus(
            {h: n.facts["gpus"]["count"] for h, n in self._nodes.items() if n.facts},
            {h: n.check.gpus_asked for h, n in self._nodes.items()},
            {h: n.check.component for h, n in self._nodes.items()},
        )
        verdicts = []
        for host, node in self._nodes.items():
            facts = {"roles": list(node.check.roles), "component": node.check.component, **node.facts}
            problems = [*node.problems, *facts.pop("problems", []), *([gpus[host]] if host in gpus else [])]
            if not node.answered and not node.problems:
                problems.append(self._no_answer(host, node, waited_s))
            problems += blame.get(host, [])
            clock = rules.clock_problem(bounds[host], self._plan.config.max_clock_skew_s)
            problems += [clock] if clock else []
            guess = rules.best_guess(bounds[host])
            if guess is not None:
                low, high = (round(bound, 4) for bound in bounds[host])
                facts |= {"clock_offset_s": round(guess, 4), "clock_bounds_s": [low, high]}
            problems += self._late(host, by_host[host], bounds, facts)
            shared = [*node.shared, *facts.pop("shared", [])]
            verdicts.append(NodeVerdict(host, not problems, problems, shared, facts))
        return verdicts

    def _looked_for(self, reader: str, writer: str, bounds: dict[str, rules.Bounds]) -> bool:
        """Return whether a node looked for another's file long enough after that was written.

        One that started long before the other had given up by then, which is no fault of either.
        """
        clocks = (rules.best_guess(bounds[reader]) or 0.0) - (rules.best_guess(bounds[writer]) or 0.0)
        looked_s = self._nodes[reader].times["looked"] - self._nodes[writer].times["wrote"] - clocks
        return looked_s >= WATCHED_SHARE * self._watch_s

    def _no_answer(self, host: str, node: _Node, waited_s: float) -> str:
        last = {None: "never heard of", "started": "it started", "facts": "it stated its facts"}.get(node.phase, "")
        words = self._steps.words_about(host) if node.phase is None else ""
        stranger = f"; a node that is not in the plan said: {self._strangers[0]}" if self._strangers else ""
        said = f"; the launcher said: {words}" if words else ""
        return f"it gave no answer within {waited_s:.0f} s ({last}){said}{stranger}"

    def _file_sightings(self) -> list[Sighting]:
        """List who saw whose facts file when, with when the reader began to look."""
        found = []
        for host, node in self._nodes.items():
            if node.file_seen is not None:
                seen, written = node.file_seen
                found.append(Sighting(host, SUPERVISOR, written, seen, self._looking))
            for writer, (seen, written) in node.seen.items():
                found.append(Sighting(writer, host, written, seen, node.times["looking"]))
        return found

    def _clocks(self, seen: list[Sighting]) -> dict[str, rules.Bounds]:
        sightings = [*self._sightings, *seen]
        for host, node in self._nodes.items():
            if "started" in node.times:
                launched = self._steps_of(host)[0].launched
                sightings.append(Sighting(SUPERVISOR, host, launched, node.times["started"]))
            if "spec_seen" in node.times:
                sightings.append(Sighting(SUPERVISOR, host, self._spec_wrote, node.times["spec_seen"]))
        here = pick_host(list(self._nodes)) if local_hostnames() else None
        return rules.clock_bounds(sightings, self._nodes, [here] if here else [])

    def _late(
        self, host: str, mine: list[Sighting], bounds: dict[str, rules.Bounds], facts: dict[str, Any]
    ) -> list[str]:
        """Add how late this host sees and is seen; return the problems that follow."""
        problems = []
        limit = self._plan.config.max_visibility_s
        for key, side in (("sees_after_s", "reader"), ("seen_after_s", "writer")):
            late = [(*rules.lateness(s, bounds), s) for s in mine if getattr(s, side) == host]
            if not late:
                continue
            proven, about, worst = max(late, key=lambda item: (item[0], item[1]))
            facts[key] = round(max(item[1] for item in late), 3)
            if proven > limit and side == "reader":
                problems.append(f"it saw the file of {worst.writer} {proven:.0f} s late (limit {limit:g} s)")
            elif about > SLOW_VISIBILITY_S and side == "reader":
                warning = f"it saw the file of {worst.writer} about {about:.1f} s late"
                facts["warnings"] = [*facts.get("warnings", []), warning]
        return problems
