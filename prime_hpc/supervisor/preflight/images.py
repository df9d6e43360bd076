"""The container's image on every node, before anything else runs in it: a round of its own with its own deadline.

The supervisor's side; the nodes run `image`. A node that has no image yet fetches it here (tens of gigabytes, at the
first run), so that no later deadline has to allow for that, and steps that share a node do not all fetch it at once.
"""

import sys
import time
from collections.abc import Callable

from prime_hpc.supervisor.preflight.launcher import RunStep, Steps
from prime_hpc.supervisor.preflight.plan import HostCheck, NodeVerdict, Report

TICK_S = 0.2
_MODULE = "prime_hpc.supervisor.preflight.image"


def start_images(
    checks: list[HostCheck], run_step: RunStep, timeout_s: float, stop: Callable[[], bool], report: Report
) -> Report:
    """Start the container once on each host; what failed goes into the report's verdicts.

    Where no node could start it, it is the image (or its mounts) and no node's fault.
    """
    began = time.monotonic()
    started: set[str] = set()
    hosts = [check.host for check in checks]
    steps = Steps(run_step)
    try:
        for component in sorted({check.component for check in checks}):
            here = [check.host for check in checks if check.component == component]
            steps.start([sys.executable, "-P", "-m", _MODULE], here, component)
        while time.monotonic() - began < timeout_s and not stop() and started < set(hosts):
            over = all(steps.silent_end(step) for step in steps.steps)
            for message in steps.listen(TICK_S):
                started |= {host for host in hosts if host == message.data["host"]}
            if over:
                break
        missing = [host for host in hosts if host not in started]
        words = {host: steps.words_about(host) for host in missing}
    finally:
        steps.close()
    waited = time.monotonic() - began
    for host in hosts:
        why = f"the container did not start on it in {waited:.0f} s: {words.get(host) or 'it said nothing'}"
        report.verdicts.append(NodeVerdict(host, host in started, [] if host in started else [why]))
    if stop():
        report.verdicts, report.problems = [], ["preflight was interrupted"]
    elif not started:
        report.verdicts = []
        report.problems.append(f"the container started on no node: {words[hosts[0]] or 'it said nothing'}")
    report.seconds += waited
    return report
