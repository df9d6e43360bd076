"""`scontrol requeue` and what must follow it. Imports nothing heavy: agents need it as well (`orphan`)."""

import signal
import time

from loguru import logger

from prime_hpc.observe.slurm import SlurmError, run_slurm
from prime_hpc.supervisor.inquest import field

SCONTROL_TIMEOUT_S = 30.0
UPDATE_TRIES = 6


def requeue(job_id: str, num_nodes: int) -> str:
    """Put the job back into the queue; the caller, a process of it and its main thread, dies of that soon.

    Args:
        job_id: its leader.
        num_nodes: that it needs; a packed job that lost a node (--no-kill) would come back smaller. 0: leave it.

    Returns:
        what `scontrol show job --oneliner` said of it before.

    Raises:
        SlurmError: Slurm refuses, or cannot be asked.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the requeue's own, and Slurm's warning of the time limit
        signal.signal(number, signal.SIG_IGN)
    job = run_slurm(["scontrol", "show", "job", "--oneliner", job_id], timeout_s=SCONTROL_TIMEOUT_S)
    run_slurm(["scontrol", "requeue", job_id], timeout_s=SCONTROL_TIMEOUT_S)
    logger.info(f"job {job_id} is requeued")
    if num_nodes > int(field(job, "NumNodes").partition("-")[0] or num_nodes):
        update(job_id, f"NumNodes={num_nodes}")
    return job


def update(job_id: str, change: str) -> None:
    """Change the requeued job; right after the requeue Slurm says for a second or two that it is not available."""
    for left in reversed(range(UPDATE_TRIES)):
        try:
            run_slurm(["scontrol", "update", f"JobId={job_id}", change], timeout_s=SCONTROL_TIMEOUT_S)
        except SlurmError as error:
            if not left:
                logger.warning(f"job {job_id} goes without {change}: {error}")
            time.sleep(1.0 if left else 0.0)
        else:
            logger.info(f"job {job_id}: {change}")
            return
