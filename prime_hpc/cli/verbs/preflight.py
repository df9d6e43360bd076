"""`prime-hpc preflight [RUN]`: check the nodes of this allocation, or show what a run's preflight found.

Exit codes: 0 every node is good; 1 a node is not; 2 wrong usage.
"""

from pathlib import Path
from typing import Any

from prime_hpc.cli.common import print_json, refuse_unknown, take_flags
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.doctor.manual_preflight import check_here, newest_report

USAGE = "prime-hpc preflight [RUN] [--dir DIR] [--timeout S] [--allreduce | --no-allreduce] [--json]"


def run(argv: list[str], program: str) -> int:
    """Check, or show; prints one line a problem."""
    from prime_hpc.supervisor.preflight.run import summary

    rest, given, values = take_flags(argv, ("--json", "--allreduce", "--no-allreduce"), ("--dir", "--timeout"))
    refuse_unknown(rest, 1, USAGE)
    if rest and (values or given - {"--json"}):
        raise ConfigError(
            f"RUN shows a report that is there; --dir, --timeout and --allreduce are for a new check; {USAGE}"
        )
    report = _report_of(rest[0]) if rest else _check(given, values)
    if "--json" in given:
        print_json(report)
    else:
        print("\n".join(summary(report)))
    return 0 if report["ok"] else 1


def _report_of(word: str) -> dict[str, Any]:
    from prime_hpc.store.run_dirs import find_run

    return newest_report(find_run(word))


def _check(given: set[str], values: dict[str, str]) -> dict[str, Any]:
    from prime_hpc.config.sections.slurm import PreflightConfig

    if {"--allreduce", "--no-allreduce"} <= given:
        raise ConfigError(f"--allreduce and --no-allreduce contradict each other; usage: {USAGE}")
    options: dict[str, Any] = {}
    if "--timeout" in values:
        options["timeout_s"] = _seconds(values["--timeout"])
    if given & {"--allreduce", "--no-allreduce"}:
        options["allreduce"] = "--allreduce" in given
    return check_here(Path(values.get("--dir", ".")), PreflightConfig(**options)).as_json()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--timeout {text}: a number of seconds above 0 is meant")
    return seconds
