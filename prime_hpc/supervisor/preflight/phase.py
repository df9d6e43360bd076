"""Preflight as the first phase of an attempt in a Slurm job.

`main` makes a `Checkup` where the config wants one, or the site has a container; the supervisor runs it before it
starts any role.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.supervisor.preflight.images import start_images
from prime_hpc.supervisor.preflight.launcher import module_arguments
from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan, Report
from prime_hpc.supervisor.preflight.run import FOLDER, REPORT, run_preflight
from prime_hpc.supervisor.roles.slurm_step import StepContext, StepSpec

NO_STEP = ("Unable to create step", "Unable to confirm allocation", "temporarily disabled", "still disabled")
"""srun's words when the controller refuses, or has it wait: no fault of a node."""
_ENDED_STEP = re.compile(r"STEP \S+ ON \S+ CANCELLED AT \S+ (?!DUE TO NODE FAIL)")
"""slurmstepd's when somebody ends the step, as Slurm does where a preemption's grace time begins: neither."""
OUTSIDE = "prime_hpc.supervisor.preflight.node"
"""Looks at the node itself, so that it runs outside the container."""


class Checkup:
    """The checks of one attempt's nodes."""

    def __init__(self, experiment: Experiment, context: StepContext, specs: Sequence[StepSpec], log_dir: Path) -> None:
        self._experiment = experiment
        self._context = context
        self._specs = specs
        self._log_dir = log_dir

    def run(self, attempt: int, stop: Callable[[], bool], environment: dict[str, str]) -> Report:
        """Check every node of the job. `stop`: whether to break off."""
        trainer = next((spec for spec in self._specs if spec.name == "trainer"), None)
        plan = PreflightPlan(
            run_dir=self._context.run_dir,
            attempt=attempt,
            hosts=self._hosts(),
            config=self._experiment.slurm.preflight,
            trainer_hosts=list(trainer.hosts) if trainer else [],
            log_dir=self._log_dir,
        )

        def run_step(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[bytes]":
            words = module_arguments(argv)
            command = self._context.srun(
                hosts, component, 1, "preflight", words, quiet=True, outside=words[0] == OUTSIDE
            )
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

        report = Report([], 0.0, self._log_dir / FOLDER / REPORT, attempt=attempt)
        box = self._context.container
        if box is not None:
            logger.info(f"starting the container {box.config.image} on every node")
            start_images(plan.hosts, run_step, box.config.start_timeout_s, stop, report)
        if report.ok and self._experiment.slurm.preflight.enabled:
            report = run_preflight(plan, run_step, stop=stop)
        for line in report.lines():
            (logger.info if report.ok else logger.error)(line)
        return report

    def nodes_at_fault(self, report: Report) -> dict[str, str]:
        """Bad nodes by cause; not for a run directory that is full, and none where Slurm would not even make the step.

        Slurm 22.05 refuses the steps of a job with GPUs ("Invalid generic resource") in the attempt after one that was
        requeued while a node of it was dead; the attempt after that is well again.
        """
        full = {v.host for v in report.verdicts if set(v.problems) <= set(v.shared)}
        return {
            node: why
            for node, why in report.bad.items()
            if node not in full and not _ENDED_STEP.search(why) and not any(words in why for words in NO_STEP)
        }

    def _hosts(self) -> list[HostCheck]:
        """Every node of the allocation with what its roles need."""
        checks = []
        for component, hosts in enumerate(self._context.allocation.hosts):
            for host in hosts:
                here = [spec for spec in self._specs if host in spec.hosts]
                needed = {gpu for spec in here for gpu in spec.gpus or ()}
                roles = tuple(spec.label for spec in here)
                stated = tuple(s.port for s in here if s.port is not None and s.hosts[0] == host)
                on_gpus = any(spec.is_on_gpus for spec in here)
                checks.append(HostCheck(host, component, max(needed) + 1 if needed else 0, on_gpus, roles, stated))
        return checks
