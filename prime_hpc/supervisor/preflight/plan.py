"""Preflight's questions and answers: plan, verdicts, report, and the report's lines for people.

Made by the supervisor, filled by `run`, printed by the verb `preflight` from the kept JSON too.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.slurm import PreflightConfig


@dataclass(frozen=True)
class HostCheck:
    """Expectations of one node."""

    host: str
    """As Slurm names it."""
    component: int = 0
    gpus_asked: int | None = 0
    """None: not known; then a node with fewer than its fellows is bad."""
    on_gpus: bool | None = False
    """True if roles compute on its GPUs; None: not known, then by what is to be seen there."""
    roles: tuple[str, ...] = ()
    """For people."""
    ports: tuple[int, ...] = ()
    """Must be free on it."""


@dataclass(frozen=True)
class PreflightPlan:
    """The checks of a preflight."""

    run_dir: Path
    """The run whose file system is tested."""
    attempt: int
    hosts: list[HostCheck]
    config: PreflightConfig
    trainer_hosts: list[str]
    """In rank order."""
    log_dir: Path
    """In the shared run directory; everything is written into its `preflight/`."""


@dataclass
class NodeVerdict:
    """Verdict on one node."""

    host: str
    ok: bool
    problems: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    """Of the problems those of the run directory, which all nodes see."""
    facts: dict[str, Any] = field(default_factory=dict)
    """GPUs, free space, clock offset, visibility, all-reduce, `warnings`, ..."""


@dataclass
class Report:
    """The outcome; also in `report.json`."""

    verdicts: list[NodeVerdict]
    seconds: float
    path: Path
    problems: list[str] = field(default_factory=list)
    """Faults for which no single node can be blamed."""
    attempt: int = 0
    time: float = field(default_factory=time.time)

    @property
    def ok(self) -> bool:
        """True if the roles may start."""
        return not self.problems and all(verdict.ok for verdict in self.verdicts)

    @property
    def bad(self) -> dict[str, str]:
        """Cause by bad node, for the ledger."""
        return {v.host: "; ".join(v.problems) for v in self.verdicts if not v.ok}

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        rest = {"seconds": round(self.seconds, 3), "time": self.time, "attempt": self.attempt}
        return {"ok": self.ok, **rest, "problems": self.problems, "verdicts": [asdict(v) for v in self.verdicts]}

    def lines(self) -> list[str]:
        """For the log: every bad node with its problems, every warning, one line of figures."""
        return summary(self.as_json())


def summary(report: dict[str, Any]) -> list[str]:
    """Lines for people from a report's plain data."""
    verdicts = report["verdicts"]
    bad = [v for v in verdicts if not v["ok"]]
    head = f"preflight of {len(verdicts)} node(s) in {report['seconds']:.1f} s: "
    head += "all good" if report["ok"] else f"{len(bad)} bad" if bad else "failed"
    lines = [head, *(f"  {problem}" for problem in report["problems"])]
    lines += [f"  {v['host']}: {problem}" for v in bad for problem in v["problems"]]
    lines += [f"  {v['host']}: warning: {text}" for v in verdicts for text in v["facts"].get("warnings", [])]
    return [*lines, *_figures([v["facts"] for v in verdicts])]


def _figures(facts: list[dict[str, Any]]) -> list[str]:
    parts = []
    gpus = [f["gpus"]["count"] for f in facts if "gpus" in f]
    if any(gpus):
        parts.append(f"GPUs a node {_span(gpus, '{:d}')}")
    for key, text, form in (
        ("free_gib", "GiB free", "{:,.0f}"),
        ("seen_after_s", "s until a new file is seen elsewhere", "{:.2f}"),
        ("clock_offset_s", "s clock offset", "{:+.3f}"),
    ):
        values = [f[key] for f in facts if f.get(key) is not None]
        if values:
            parts.append(f"{_span(values, form)} {text}")
    figures = [f["allreduce"] for f in facts if "gb_per_s" in f.get("allreduce", {})]
    if figures:
        speed = _span([f["gb_per_s"] for f in figures], "{:.2f}")
        delay = _span([f["latency_us"] for f in figures], "{:.0f}")
        parts.append(f"all-reduce ({figures[0]['backend']}) {speed} GB/s, {delay} us")
    return [f"  {', '.join(parts)}"] if parts else []


def _span(values: list[Any], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def merged(checks: list[HostCheck]) -> dict[str, HostCheck]:
    """One check a host: roles that share a host have their GPUs and ports checked together."""
    found: dict[str, HostCheck] = {}
    for check in checks:
        if (other := found.get(check.host)) is not None:
            counts = [c.gpus_asked for c in (other, check) if c.gpus_asked is not None]
            gpus = max(counts, default=None)
            roles, ports = (*other.roles, *check.roles), tuple(dict.fromkeys((*other.ports, *check.ports)))
            on = None if None in (stated := (other.on_gpus, check.on_gpus)) else any(stated)
            check = HostCheck(check.host, other.component, gpus, on, roles, ports)
        found[check.host] = check
    return found
