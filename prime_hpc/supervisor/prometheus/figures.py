"""The figures of a run at a moment, gathered from the ends of its files and the supervisor's memory, as Prometheus'
text.

Rows of `metrics/*.jsonl` are taken as they come: what they say of a step adds up in counters, which begin anew with
each attempt, as those of any process that is started again.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from prime_hpc.observe.metrics import number_of
from prime_hpc.supervisor.prometheus.families import FAMILIES, PREFIX, Target, environments, target_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]
_Shape = tuple[str, tuple[str, ...]]
"""A role and the metrics of a row: most rows of a file have the same ones."""
ALREADY_COUNTED = ("env_worker_events_total",)
"""Counters whose rows tell the whole count, not what a step adds."""
OUTCOMES = ("completed", "failed", "interrupted", "node_lost", "preempted", "requeued", "stopped")
"""Ends of an attempt, told from zero on."""
_STEP_KEY = {"trainer": "time/step", "orchestrator": "reward/mean"}
"""Only a row with this one is that of a step; others are evaluations."""
_MOST_SERIES = 2000
"""Of one family: environments' own metrics may be many."""
_MOST_SHAPES = 64
"""Of which anything is remembered."""


@dataclass
class _Targets:
    """Places of a row's metrics: of those that are added to what is there, and of those that are set."""

    added: list[tuple[str, Target]] = field(default_factory=list)
    set: list[tuple[str, Target]] = field(default_factory=list)


def _find_targets(role: str, metrics: tuple[str, ...]) -> _Targets:
    found = _Targets()
    envs = environments(metrics) if role == "orchestrator" else []
    for metric in metrics:
        if (target := target_of(role, metric, envs)) is not None:
            is_set = FAMILIES[PREFIX + target.name].kind == "gauge" or target.name in ALREADY_COUNTED
            (found.set if is_set else found.added).append((metric, target))
    return found


class Figures:
    """Values by family and labels; all methods may be called from any thread."""

    def __init__(self, run: str) -> None:
        """`run` is the label of every sample."""
        self._run = run
        self._values: dict[str, dict[Labels, float]] = {}
        self._targets: dict[_Shape, _Targets] = {}
        self._newest: dict[_Shape, Mapping[str, Any]] = {}
        """Rows whose gauges are not set yet: those of a hundred thousand would be set for the last one's sake."""
        self._lock = Lock()

    def put(self, name: str, value: float | None, *labels: object) -> None:
        """Set a value; None: it is not known."""
        with self._lock:
            self._put(name, value, tuple(map(str, labels)))

    def _put(self, name: str, value: float | None, labels: Labels) -> None:
        assert len(labels) == len(FAMILIES[PREFIX + name].labels), name
        series = self._values.setdefault(name, {})
        if value is None:
            series.pop(labels, None)
        elif labels in series or len(series) < _MOST_SERIES:
            series[labels] = value

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """Set all values of a family: what is not among them is no more."""
        with self._lock:
            self._values[name] = {}
            for labels, value in values.items():
                self._put(name, value, labels)

    def take_row(self, role: str, row: Mapping[str, Any]) -> None:
        """Take a new row of `metrics/<role>.jsonl`."""
        shape = role, tuple(row)
        with self._lock:
            if _STEP_KEY[role] in row:
                self._add(f"{role}_steps_total", 1.0, ())
                for metric, target in self._targets_of(shape).added:
                    number = number_of(row[metric])
                    if number is not None and 0 <= number < math.inf:
                        self._add(target.name, number * target.scale, target.labels)
            self._newest.pop(shape, None)
            self._newest[shape] = row
            if len(self._newest) > _MOST_SHAPES:
                self._set_gauges()

    def _targets_of(self, shape: _Shape) -> _Targets:
        if len(self._targets) > _MOST_SHAPES:
            self._targets.clear()
        if shape not in self._targets:
            self._targets[shape] = _find_targets(*shape)
        return self._targets[shape]

    def _set_gauges(self) -> None:
        """Set what the newest rows say, the last one's last."""
        for shape, row in self._newest.items():
            for metric, target in self._targets_of(shape).set:
                if (number := number_of(row[metric])) is not None:
                    self._put(target.name, number * target.scale, target.labels)
        self._newest.clear()

    def _add(self, name: str, value: float, labels: Labels) -> None:
        series = self._values.get(name, {})
        if labels in series:
            series[labels] += value
        else:
            self._put(name, value, labels)

    def take_word(self, word: Mapping[str, Any], kind: str) -> None:
        """Take the supervisor's own word, as it is in `status.json`."""
        facts = (kind, str(word.get("attempt", "")), str(word.get("job_id") or ""))
        self.replace("run_info", {facts: 1.0})
        self.replace("run_state", {(str(word.get("state", "unknown")),): 1.0})
        self.put("run_step", number_of(word.get("step")))
        self.put("run_max_steps", number_of(word.get("max_steps")))
        stall = word.get("stall")
        self.put("run_stall_seconds", (number_of(stall.get("seconds")) if isinstance(stall, dict) else None) or 0.0)
        roles = word.get("roles")
        if isinstance(roles, dict):
            self.replace("role_state", {(str(label), str(state)): 1.0 for label, state in roles.items()})

    def take_loss(self) -> None:
        """Take it that the run is lost: what its supervisor said last, before it was killed, is no more."""
        self.replace("run_state", {("lost",): 1.0})
        self.replace("role_state", {})
        self.put("run_stall_seconds", 0.0)

    def take_attempts(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take `attempts.jsonl`."""
        ended = Counter(dict.fromkeys(OUTCOMES, 0))
        ended.update(str(row.get("outcome")) for row in rows if row.get("ended") is not None)
        self.replace("run_attempts_ended_total", {(outcome,): float(count) for outcome, count in ended.items()})

    def take_alarm(self, row: Mapping[str, Any]) -> None:
        """Take a new line of `alarms.jsonl`; those on what was done about an alarm do not count."""
        if "actions" in row:
            with self._lock:
                self._add("run_alarms_total", 1.0, (str(row.get("rule", "")),))

    def take_processes(self, statuses: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        """Take the last word of each of the roles' processes."""
        names = {"process_step": "step", "process_last_word_timestamp_seconds": "time"}
        names |= {"process_resident_memory_bytes": "memory_bytes", "process_cpu_seconds_total": "cpu_s"}
        found: dict[str, dict[Labels, float]] = {name: {} for name in (*names, "process_info")}
        for (role, index), row in statuses.items():
            labels = role, str(index)
            found["process_info"][*labels, str(row.get("host", "")), str(row.get("pid", ""))] = 1.0
            for name, key in names.items():
                if (number := number_of(row.get(key))) is not None:
                    found[name][labels] = number
        for name, values in found.items():
            self.replace(name, values)

    def take_gpus(self, nodes: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Take the last samples of the nodes' GPUs, each a `runtime.gpu_use.GpuUse` as JSON."""
        names = {"gpu_utilization_ratio": "utilization", "gpu_memory_used_bytes": "memory_used"}
        names |= {"gpu_memory_size_bytes": "memory_total", "gpu_power_watts": "power_w"}
        for name, key in names.items():
            rows = [(host, gpu) for host, sample in nodes.items() for gpu in sample]
            numbers = {(host, str(gpu.get("index"))): number_of(gpu.get(key)) for host, gpu in rows}
            self.replace(name, {labels: number for labels, number in numbers.items() if number is not None})

    def text(self, now: float | None = None) -> str:
        """Return all of it in Prometheus' text form."""
        from prometheus_client.exposition import generate_latest  # of whoever asks for it alone

        self.put("run_collected_timestamp_seconds", time.time() if now is None else now)
        with self._lock:
            self._set_gauges()
            metrics = [self._metric(name, series) for name, series in self._values.items() if series]
        return generate_latest(_Collected(metrics)).decode()

    def _metric(self, name: str, series: Mapping[Labels, float]) -> "Metric":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        family = FAMILIES[PREFIX + name]
        labels = ("run", *family.labels)
        made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = made(PREFIX + name, family.text, labels=labels)
        for values, number in series.items():
            metric.add_metric([self._run, *values], number)
        return metric


class _Collected:
    """Stands for a registry, which `generate_latest` asks for its metrics."""

    def __init__(self, metrics: Sequence["Metric"]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence["Metric"]:
        return self._metrics
