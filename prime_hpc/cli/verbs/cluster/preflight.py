"""`prime-hpc preflight [RUN]`: check the nodes of this allocation, or show what a run's preflight found.

Exit codes: 0 every node is good; 1 a node is not; 2 wrong usage.
"""

from pathlib import Path
from typing import Any

from prime_hpc.cli.common import Given, parse
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.slurm import PreflightConfig
from prime_hpc.launch.doctor.manual_preflight import check_here, newest_report
from prime_hpc.store.run_dirs import find_run
from prime_hpc.supervisor.preflight.plan import summary


def run(argv: list[str], program: str) -> int:
    """Check, or show; prints one line a problem."""
    given = parse("preflight", argv)
    run_words = given.arguments(1)
    if run_words and given.flags.keys() - {"--json"}:
        raise ConfigError(
            f"RUN shows a report that is there; --dir, --timeout and --allreduce are for a new check; {given.usage}"
        )
    report = newest_report(find_run(run_words[0])) if run_words else _check(given)
    given.tell(lambda: report, lambda: "\n".join(summary(report)))
    return 0 if report["ok"] else 1


def _check(given: Given) -> dict[str, Any]:
    if "--allreduce" in given and "--no-allreduce" in given:
        raise ConfigError(f"--allreduce and --no-allreduce contradict each other; usage: {given.usage}")
    options: dict[str, Any] = {}
    if (timeout_s := given.positive("--timeout")) is not None:
        options["timeout_s"] = timeout_s
    if "--allreduce" in given or "--no-allreduce" in given:
        options["allreduce"] = "--allreduce" in given
    return check_here(given.path("--dir") or Path(), PreflightConfig(**options)).as_json()
