#!/usr/bin/env python3
"""Write prime-hpc.json, the Grafana dashboard, from the table of panels here.

    tools/grafana/make.py [--check]

--check writes nothing: exit code 1 where the file is not what the table says, as a test does. In Grafana: Dashboards,
New, Import, and choose a Prometheus that scrapes the runs (slurm/MONITORING.md).
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "prime-hpc.json"
MINE = 'run=~"$run"'
NOT_READY = 'state!~"ready|done"'
NOBODY, EVERY = 'kind="solved_none"', 'kind="in_batch"'
P = "prime_hpc_"
WINDOWS = ("1m", "5m", "15m", "1h", "6h")
Query = tuple[str, str]
"""PromQL, and the legend."""


def of(name: str, *more: str) -> str:
    """Select a family of the chosen runs, with further label matchers."""
    return f"{P}{name}{{{','.join((MINE, *more))}}}"


def rate(name: str, *more: str) -> str:
    """Per second over the chosen window: most counters grow once a step, and steps may be minutes long."""
    return f"rate({of(name, *more)}[$window])"


def vllm(name: str, *more: str) -> str:
    """Select a family of the servers' own."""
    return f"vllm:{name}{{{','.join((MINE, *more))}}}"


def each(how: str, query: str) -> str:
    """Put the engines of a server together."""
    return f"{how} by (run, server) ({query})"


def by_role(how: str, query: str) -> str:
    """Put the processes of a role together."""
    return f"{how} by (run, role) ({query})"


def by_host(how: str, query: str) -> str:
    """Put the GPUs of a node together."""
    return f"{how} by (run, host) ({query})"


def quantile(q: float, name: str) -> str:
    """Quantile of a histogram of the servers' own."""
    return f"histogram_quantile({q}, sum by (run, le) (rate({vllm(name + '_bucket')}[$__rate_interval])))"


STATS: tuple[tuple[str, str, list[Query]], ...] = (
    ("Step", "none", [(of("run_step"), "{{run}}")]),
    ("Progress", "percentunit", [(f"{of('run_step')} / {of('run_max_steps')}", "{{run}}")]),
    ("State", "none", [(f"{of('run_state')} == 1", "{{run}} {{state}}")]),
    ("Walltime left", "s", [(of("run_walltime_left_seconds"), "{{run}}")]),
    ("Stands still for", "s", [(of("run_stall_seconds"), "{{run}}")]),
    ("Alarms in this attempt", "none", [(f"sum by (run) ({of('run_alarms_total')})", "{{run}}")]),
)
"""Title, unit, queries."""
ROWS: tuple[tuple[str, tuple[tuple[str, str, list[Query]], ...]], ...] = (
    (
        "Learning",
        (
            ("Reward", "none", [(of("orchestrator_reward", 'stat="mean"'), "{{run}}")]),
            ("Reward by environment", "none", [(of("env_reward", 'stat="mean"'), "{{run}} {{env}}")]),
            (
                "Prompts that no rollout solved, by environment",
                "percentunit",
                [(f"{of('env_groups', NOBODY)} / ignoring (kind) {of('env_groups', EVERY)}", "{{run}} {{env}}")],
            ),
            ("Held-out results", "none", [(of("env_eval"), "{{run}} {{env}} {{metric}}")]),
            ("Loss", "none", [(of("trainer_loss"), "{{run}}")]),
            ("KL to the engine (nats)", "none", [(of("trainer_kl_nats"), "{{run}}")]),
            ("Entropy (nats)", "none", [(of("trainer_entropy_nats"), "{{run}}")]),
            ("Gradient norm", "none", [(of("trainer_gradient_norm"), "{{run}}")]),
            ("Tokens a rollout", "none", [(of("orchestrator_completion_tokens"), "{{run}} {{stat}}")]),
            ("Lag (versions)", "none", [(of("orchestrator_lag_versions"), "{{run}} {{stat}}")]),
        ),
    ),
    (
        "Time",
        (
            ("Step time", "s", [(of("trainer_step_seconds"), "{{run}}")]),
            ("What the trainer does", "percentunit", [(rate("trainer_phase_seconds_total"), "{{run}} {{phase}}")]),
            (
                "What the orchestrator waits for",
                "percentunit",
                [(rate("orchestrator_wait_seconds_total"), "{{run}} {{awaits}}")],
            ),
            (
                "Idle",
                "percentunit",
                [
                    (rate("trainer_phase_seconds_total", 'phase="wait"'), "{{run}} trainer"),
                    (of("orchestrator_engines_idle_ratio"), "{{run}} engines"),
                    (of("orchestrator_empty_seats_ratio"), "{{run}} empty seats, {{cause}}"),
                ],
            ),
            (
                "Tokens per second",
                "none",
                [
                    (rate("trainer_tokens_total"), "{{run}} trained"),
                    (rate("orchestrator_tokens_total", 'kind="sampled"'), "{{run}} sampled"),
                ],
            ),
            ("Model FLOPs utilization", "percentunit", [(of("trainer_flops_utilization_ratio"), "{{run}}")]),
        ),
    ),
    (
        "Rollouts and environments",
        (
            ("Episodes per second", "none", [(rate("orchestrator_episodes_total"), "{{run}} {{state}}")]),
            ("Groups per second", "none", [(rate("orchestrator_groups_total"), "{{run}} {{fate}}")]),
            ("Episodes in flight", "none", [(of("orchestrator_episodes_in_flight"), "{{run}} {{stat}}")]),
            ("Failed episodes", "percentunit", [(of("orchestrator_failed_ratio"), "{{run}}")]),
            ("Environments' processes", "none", [(of("env_workers"), "{{run}} {{env}}")]),
            ("Busy processes", "percentunit", [(of("env_worker_busy_ratio"), "{{run}} {{env}}")]),
        ),
    ),
    (
        "Servers",
        (
            ("Servers that answer", "none", [(f"sum by (run) ({of('server_up')})", "{{run}}")]),
            (
                "Requests",
                "none",
                [
                    (each("sum", vllm("num_requests_running")), "{{run}} {{server}} running"),
                    (each("sum", vllm("num_requests_waiting")), "{{run}} {{server}} queued"),
                ],
            ),
            ("KV cache in use", "percentunit", [(each("max", vllm("kv_cache_usage_perc")), "{{run}} {{server}}")]),
            (
                "Tokens sampled per second",
                "none",
                [(each("sum", f"rate({vllm('generation_tokens_total')}[$__rate_interval])"), "{{run}} {{server}}")],
            ),
            ("Time to the first token, 95 %", "s", [(quantile(0.95, "time_to_first_token_seconds"), "{{run}}")]),
            ("Version served", "none", [(of("orchestrator_served_version"), "{{run}}")]),
        ),
    ),
    (
        "Machines",
        (
            ("Roles not ready", "none", [(of("role_state", NOT_READY) + " == 1", "{{run}} {{role}} {{state}}")]),
            ("Restarts in place", "none", [(of("role_restarts_total"), "{{run}} {{role}}")]),
            (
                "Silence of the most silent process",
                "s",
                [(by_role("max", f"time() - {of('process_last_word_timestamp_seconds')}"), "{{run}} {{role}}")],
            ),
            (
                "Memory of processes",
                "bytes",
                [(by_role("sum", of("process_resident_memory_bytes")), "{{run}} {{role}}")],
            ),
            ("CPU cores used", "none", [(by_role("sum", rate("process_cpu_seconds_total")), "{{run}} {{role}}")]),
            ("GPUs busy", "percentunit", [(by_host("avg", of("gpu_utilization_ratio")), "{{run}} {{host}}")]),
            (
                "GPU memory in use",
                "percentunit",
                [
                    (
                        f"max by (run, host) ({of('gpu_memory_used_bytes')} / {of('gpu_memory_size_bytes')})",
                        "{{run}} {{host}}",
                    )
                ],
            ),
            ("GPU power", "watt", [(by_host("sum", of("gpu_power_watts")), "{{run}} {{host}}")]),
            ("File system: free", "bytes", [(of("filesystem_free_bytes"), "{{run}}")]),
            ("Attempts that ended", "none", [(of("run_attempts_ended_total"), "{{run}} {{outcome}}")]),
            ("Age of these figures", "s", [(f"time() - {of('run_collected_timestamp_seconds')}", "{{run}}")]),
        ),
    ),
)


def panel(
    number: int, kind: str, title: str, unit: str, queries: Iterable[Query], place: dict[str, int]
) -> dict[str, Any]:
    """One panel."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(queries)
    ]
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    for column, (title, unit, queries) in enumerate(STATS):
        place = {"x": 4 * column, "y": 0, "w": 4, "h": 4}
        panels.append(panel(len(panels) + 1, "stat", title, unit, queries, place))
    y = 4
    for row, members in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        for index, (title, unit, queries) in enumerate(members):
            place = {"x": 8 * (index % 3), "y": y + 1 + 8 * (index // 3), "w": 8, "h": 8}
            panels.append(panel(len(panels) + 1, "timeseries", title, unit, queries, place))
        y += 1 + 8 * -(-len(members) // 3)
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": f"label_values({P}run_info, run)", "refId": "runs"},
            "definition": f"label_values({P}run_info, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
        {
            "name": "window",
            "type": "custom",
            "label": "Rates over",
            "query": ",".join(WINDOWS),
            "current": {"text": WINDOWS[1], "value": WINDOWS[1], "selected": True},
            "options": [{"text": window, "value": window, "selected": window == WINDOWS[1]} for window in WINDOWS],
        },
    ]
    return {
        "uid": "prime-hpc",
        "title": "prime-hpc runs",
        "tags": ["prime-hpc"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def main(argv: list[str]) -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(prog="tools/grafana/make.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the file is another")
    options = parser.parse_args(argv)
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if options.check:
        is_current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        print("up to date" if is_current else f"{FILE.name} is not what the table says: run tools/grafana/make.py")
        return 0 if is_current else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
