"""Preflight: checks of the nodes inside the allocation, in seconds, before the roles start. The supervisor's side.

    report = run_preflight(plan, run_step)
    for line in report.lines(): logger.info(line)

One small process a node (`node`) writes its facts into `<log_dir>/preflight/`, waits for the others' files
and says what it saw; the supervisor does the same and judges (`facts`, `rules`). Then, if the
trainer has several nodes or computes on GPUs, one all-reduce across them (`allreduce`), with a deadline of its own.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from loguru import logger

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.supervisor.preflight.allreduce import check_allreduce
from prime_hpc.supervisor.preflight.facts import FactsRound
from prime_hpc.supervisor.preflight.launcher import RunStep
from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan, Report, merged

FOLDER, REPORT = "preflight", "report.json"


def run_preflight(plan: PreflightPlan, run_step: RunStep, *, stop: Callable[[], bool] = lambda: False) -> Report:
    """Check the nodes; never raises for what it finds, and ends within the config's `timeout_s` (plus 3 s to clean up),
    and `allreduce_timeout_s` where an all-reduce follows.

    Args:
        run_step: see `RunStep`. The command's own python and module are `argv[:3]`, what follows are its arguments.
        stop: asked ten times a second; true ends the checks early.
    """
    began = time.monotonic()
    folder = plan.log_dir / FOLDER
    wanted = len(plan.trainer_hosts) > 1 or any(
        check.on_gpus for check in plan.hosts if check.host in plan.trainer_hosts
    )
    allreduce = wanted if plan.config.allreduce is None else plan.config.allreduce and bool(plan.trainer_hosts)
    report = Report([], 0.0, folder / REPORT, attempt=plan.attempt)
    try:
        files.make_dir(folder)
        part = FactsRound(plan, run_step, folder, stop)
        report.verdicts = part.run(plan.config.timeout_s)
        if stop():
            report.problems.append("preflight was interrupted")
        elif (why := part.not_started()) is not None:
            report.verdicts, report.problems = [], [why]
        elif allreduce:
            end = time.monotonic() + plan.config.allreduce_timeout_s
            _add_allreduce(plan, report, lambda hosts: check_allreduce(plan, hosts, run_step, end, stop))
    except (StoreError, OSError) as error:
        report.problems.append(f"preflight could not be run: {error}")
    report.seconds = time.monotonic() - began
    try:
        files.write_atomic(report.path, json.dumps(report.as_json(), indent=1).encode())
    except (StoreError, OSError) as error:
        logger.warning(f"the preflight report could not be written: {error}")
    return report


def _add_allreduce(plan: PreflightPlan, report: Report, check: Callable[[list[HostCheck]], Any]) -> None:
    """Make the second round, over the trainer's nodes that are good so far; its findings go into the verdicts."""
    verdicts = {v.host: v for v in report.verdicts}
    checks = merged(plan.hosts)
    good = [checks[host] for host in plan.trainer_hosts if verdicts[host].ok]
    if len(good) < min(2, len(plan.trainer_hosts)):
        return  # the bad nodes are named already
    outcome = check(good)
    report.problems += outcome.problems
    for host, found in outcome.nodes.items():
        verdict = verdicts[host]
        verdict.facts["allreduce"] = found.facts
        verdict.facts.setdefault("warnings", []).extend(found.warnings)
        verdict.problems += found.problems
        verdict.ok = not verdict.problems
