"""Preflight's second round: one process on each trainer node joins an all-reduce; the node that holds it up is named.

The supervisor's side; the nodes run `allreduce_node`.
"""

import json
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.store.io import files
from prime_hpc.store.run_dirs import read_json
from prime_hpc.supervisor.preflight.allreduce_node import BEAT_S, PHASES, PROGRESS
from prime_hpc.supervisor.preflight.launcher import RunStep, Steps
from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan
from prime_hpc.supervisor.preflight.rules import stuck

LEAST_S = 5.0
"""With less time left it is not begun."""
SILENT_S = 5 * BEAT_S
"""Without a line for so long a node is silent."""
GIVE_UP_S = 20 * BEAT_S
"""A node that is silent for so long will not speak again: nobody waits for the deadline."""
AFTER_ERROR_S = 5.0
"""How long the others may go on once one has failed."""
TICK_S = 0.1
SLOW_SHARE = 0.5
"""A link below this share of the median is worth a warning."""


@dataclass
class NodeFindings:
    """Findings of one node."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class AllreduceOutcome:
    """Findings of the round."""

    nodes: dict[str, NodeFindings]
    problems: list[str] = field(default_factory=list)
    """Faults for which no single node can be blamed."""


@dataclass
class _Node:
    phase: str | None = None
    beat: int = -1
    alive: float = 0.0
    """Monotonic time of its last sign of life."""
    speaks: bool = False
    """True if its lines arrive; files alone may be seen late."""
    result: dict[str, Any] | None = None


def check_allreduce(
    plan: PreflightPlan, checks: list[HostCheck], run_step: RunStep, end: float, stop: Callable[[], bool]
) -> AllreduceOutcome:
    """All-reduce across the hosts of `checks`, in rank order, until the monotonic time `end`.
    Raises StoreError: the shared directory cannot be written."""
    hosts = [check.host for check in checks]
    left = end - time.monotonic()
    if left < LEAST_S:
        reason = f"{max(left, 0):.0f} s were left for the all-reduce: raise slurm.preflight.allreduce_timeout_s"
        return AllreduceOutcome({}, [reason])
    folder = plan.log_dir / "preflight"
    token = uuid.uuid4().hex
    spec_path = folder / f"allreduce-{token[:8]}.json"
    # a node gives up a little before the supervisor does, so that its own words arrive
    gpus = [check.gpus_asked if check.on_gpus else None if check.on_gpus is None else 0 for check in checks]
    spec = {"token": token, "hosts": hosts, "gpus": gpus, "timeout_s": max(LEAST_S - 1, left - 4)}
    files.write_atomic(spec_path, json.dumps(spec).encode())
    argv = [sys.executable, "-P", "-m", "prime_hpc.supervisor.preflight.allreduce_node", str(spec_path), f"{left:.1f}"]
    nodes = {host: _Node() for host in hosts}
    steps = Steps(run_step)
    try:
        for component in sorted({check.component for check in checks}):
            steps.start(argv, [check.host for check in checks if check.component == component], component)
        _listen(steps, nodes, folder, token, end, stop)
        words = {host: steps.words_about(host) for host, node in nodes.items() if node.phase is None}
        silent = [host for host, node in nodes.items() if _silence(node) > SILENT_S]
    finally:
        steps.close()
    outcome = judge(nodes, words, silent, stop())
    _judge_network(outcome.nodes, plan.config.min_network_share)
    return outcome


def _listen(
    steps: Steps, nodes: dict[str, _Node], folder: Path, token: str, end: float, stop: Callable[[], bool]
) -> None:
    """Until every node has answered, or nobody will any more."""
    failed_at: float | None = None
    while time.monotonic() < end and not stop():
        for message in steps.listen(TICK_S):
            node = nodes.get(message.data["host"])
            if node is not None:
                node.speaks = True
                _take(node, message.data)
        names = set(files.list_dir(folder))
        for host, node in nodes.items():
            if node.result is None and host + PROGRESS in names:
                data = read_json(folder / (host + PROGRESS))
                if data is not None and data.get("token") == token:
                    _take(node, data)
        if all(node.result is not None for node in nodes.values()):
            return
        over = all(steps.silent_end(step) for step in steps.steps)
        if any(_silence(node) > GIVE_UP_S for node in nodes.values()):
            return
        if over or any(node.result is not None and "problem" in node.result for node in nodes.values()):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > AFTER_ERROR_S:
                return


def _silence(node: _Node) -> float:
    """Seconds since the last line of a node that has not finished; 0 where its lines do not arrive at all."""
    return time.monotonic() - node.alive if node.speaks and node.result is None else 0.0


def _take(node: _Node, data: dict[str, Any]) -> None:
    """Take a node's word, which may come twice: by its line and by its file."""
    if data.get("beat", 0) <= node.beat:
        return
    node.phase, node.beat, node.alive = data["phase"], data.get("beat", 0), time.monotonic()
    node.result = data.get("result", node.result)


def judge(nodes: dict[str, _Node], words: dict[str, str], silent: list[str], stopped: bool) -> AllreduceOutcome:
    """Return findings by host. A node whose failure only follows from another's gets a warning, not a problem.

    Args:
        words: what launchers said of nodes that never spoke.
        silent: nodes that stopped giving signs of life.
        stopped: the round was ended from outside.
    """
    found = {host: NodeFindings(facts={"reached": node.phase}) for host, node in nodes.items()}
    good = {h: n.result for h, n in nodes.items() if n.result is not None and "problem" not in n.result}
    for host, result in good.items():
        found[host].facts |= result
    _slow_links(found)
    _slow_gpu_links(found)
    bad = [host for host in nodes if host not in good]
    if not bad or stopped:
        return AllreduceOutcome(found, ["the all-reduce was interrupted"] if stopped else [])
    named = _suspects(nodes, bad, silent)
    for host in named:
        found[host].problems.append(_story(nodes[host], host in silent, words.get(host, "")))
    for host in bad:
        if host not in named:
            followed = f" (it follows from {', '.join(named[:3])})" if named else ""
            found[host].warnings.append(f"the all-reduce did not end here{followed}: {_story(nodes[host], False, '')}")
    if named:
        return AllreduceOutcome(found)
    causes = list(dict.fromkeys(n.result["problem"] for n in nodes.values() if n.result and "problem" in n.result))
    said = f": {causes[0]}" if causes else ""
    return AllreduceOutcome(
        found, [f"the all-reduce across {', '.join(nodes)} did not end and no single node stands out{said}"]
    )


def _judge_network(found: dict[str, NodeFindings], min_share: float) -> None:
    """NCCL falls back to TCP without a word where InfiniBand's libraries or devices are not to be had."""
    for findings in found.values():
        facts = findings.facts
        rate, speed = facts.get("fastest_port_gb_per_s"), facts.get("gb_per_s")
        if len(found) < 2 or facts.get("transport") != "Socket" or not rate or speed is None:
            continue
        text = (
            f"NCCL takes TCP sockets ({speed:.1f} GB/s) though it has {facts['ports']} of up to {rate:.0f} GB/s: load "
            "the site's network plugin, look at NCCL_IB_DISABLE and NCCL_NET, and (in a container) at /dev/infiniband"
        )
        (findings.problems if speed < min_share * rate else findings.warnings).append(text)


def _suspects(nodes: dict[str, _Node], bad: list[str], silent: list[str]) -> list[str]:
    """Those whom most of the others, or they themselves, blame; else those that are behind or silent."""
    votes = [node.result["blamed"] for node in nodes.values() if node.result and "blamed" in node.result]
    itself = [h for h, n in nodes.items() if n.result and n.result.get("blamed") == h]
    blamed = [h for h in bad if h in itself or (len(nodes) > 2 and 2 * votes.count(h) > len(nodes) - 1)]
    if blamed:
        return blamed
    phases = {host: PHASES.index(node.phase) for host, node in nodes.items() if node.phase in PHASES}
    return [host for host in stuck(phases, silent, nodes) if host in bad]


def _story(node: _Node, silent: bool, words: str) -> str:
    """Describe what held a node up, in one sentence."""
    if node.phase is None:
        return "it did not start its part of the all-reduce" + (f"; the launcher said: {words}" if words else "")
    if node.result is not None and "problem" in node.result:
        return f"after it {node.phase}: {node.result['problem']}"
    return f"all-reduce: it {node.phase} and {'gave no more sign of life' if silent else 'came no further'}"


def _slow_links(found: dict[str, NodeFindings]) -> None:
    links = {host: f.facts["to_next"] for host, f in found.items() if "to_next" in f.facts}
    if len(links) < 3:
        return  # of two, neither is known to be the slow one
    usual = statistics.median(link["gb_per_s"] for link in links.values())
    for host, link in links.items():
        if link["gb_per_s"] < SLOW_SHARE * usual:
            text = f"it sends {link['gb_per_s']:.2f} GB/s to {link['host']}, other links carry {usual:.2f}"
            found[host].warnings.append(text)


def _slow_gpu_links(found: dict[str, NodeFindings]) -> None:
    """Warn of a GPU whose NVLink is down: it is reached over PCIe, at a tenth of the speed, and nothing says so."""
    links = {
        (host, index): speed
        for host, findings in found.items()
        for index, speed in enumerate(findings.facts.get("gpu_links_gb_per_s", ()))
    }
    if len(links) < 3:
        return
    usual = statistics.median(links.values())
    for (host, index), speed in links.items():
        if speed < SLOW_SHARE * usual:
            after = (index + 1) % len(found[host].facts["gpu_links_gb_per_s"])
            text = f"its GPU {index} sends {speed:.0f} GB/s to its GPU {after}, other pairs carry {usual:.0f}"
            found[host].warnings.append(f"{text}: look at `nvidia-smi nvlink --status` and `nvidia-smi topo -m`")
