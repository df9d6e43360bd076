"""A packed job that lost its batch host: `--no-kill` lets it run on, on the nodes that are left, led by nobody.

    batch host dies --> roles fail, or are ended (fence_s); agents hear no pulse
                    --> Slurm drops the node (SlurmdTimeout) --> an agent gives the job back

Slurm itself requeues a job whose batch host died, but not one that may lose nodes: that one holds what is left of it
until its time limit. So the agents wait for Slurm's verdict, and the first of them does what the supervisor would have
done. Where only the network was cut, Slurm keeps the node, and nothing happens here: the supervisor may be alive.
Called by `agent`; imports what is heavier than an agent when it comes to that.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_hpc.observe.hosts import expand_hosts
from prime_hpc.supervisor.inquest import field

LOOK_S = 10.0
WAIT_S = 1800.0
"""Several times the longest SlurmdTimeout that sites set."""
TURN_S = 20.0
"""By so much later does the agent of the next node act: the first one's requeue is seen by then."""

Ask = Callable[[str], str]
"""Job id -> its line in `scontrol show job --oneliner`. Raises OSError or RuntimeError where Slurm cannot be asked."""


def nodes_left(line: str, restarts: str) -> list[str] | None:
    """The nodes of a job that runs on without its batch host.

    Args:
        line: what scontrol says of the job.
        restarts: how often the job had been restarted in this life.

    Returns:
        [] while it still has its batch host; None where this life is over anyway.
    """
    if field(line, "JobState") != "RUNNING" or field(line, "Restarts") != restarts:
        return None
    nodes = expand_hosts(field(line, "NodeList"))
    return [] if field(line, "BatchHost") in nodes else nodes


def await_orphan(
    ask: Ask,
    environ: Mapping[str, str],
    host: str,
    is_led: Callable[[], bool],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Wait for Slurm's verdict after the supervisor fell silent; whether it is for this node to give the job back.

    Args:
        ask: see `Ask`.
        environ: of a task of the job.
        host: this node's name.
        is_led: whether the supervisor is heard again, or this agent is wanted no more.
        clock, sleep: time, seconds.
    """
    job, restarts = environ.get("SLURM_JOB_ID"), environ.get("SLURM_RESTART_COUNT", "0")
    end, turn = clock() + WAIT_S, None
    while job and clock() < end and not is_led():
        try:
            nodes = nodes_left(ask(job), restarts)
        except (OSError, RuntimeError, ValueError):
            nodes = []  # the controller is away, or moves: it is asked again
        if nodes is None:
            return False
        if nodes:
            turn = turn if turn is not None else clock() + TURN_S * (nodes.index(host) if host in nodes else len(nodes))
            if clock() >= turn:
                return True
        sleep(LOOK_S)
    return False


def give_back(
    run_dir: Path, environ: Mapping[str, str], host: str, is_led: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Wait, then have the job of an agent that nobody leads any more come back, or end, as the policy says.

    Args:
        run_dir: the run.
        environ: of a task of the job.
        host: this node's name.
        is_led: see `await_orphan`.
        say: into the agent's log.
    """
    if not environ.get("SLURM_JOB_ID") or environ.get("SLURM_HET_SIZE"):
        return  # Slurm ends a het job that lost a node
    from prime_hpc.config import load_run
    from prime_hpc.config.site import read_site
    from prime_hpc.observe.slurm import SlurmError, run_slurm
    from prime_hpc.supervisor.attempts import read_attempts
    from prime_hpc.supervisor.begin import newest_saved_step, run_paths
    from prime_hpc.supervisor.placement import place_slurm
    from prime_hpc.supervisor.survive import come_back, decide, mode_of_run

    def ask(job: str) -> str:
        return run_slurm(["scontrol", "show", "job", "--oneliner", job])

    if not await_orphan(ask, environ, host, is_led, clock=time.monotonic, sleep=time.sleep):
        return
    job, experiment = environ["SLURM_JOB_ID"], load_run(run_dir)
    paths = run_paths(experiment, run_dir)
    rows, mode = read_attempts(paths.attempts), mode_of_run(run_dir)
    # the life is still open in the ledger; the next one finds out what became of it
    lost = {**rows[-1], "outcome": "node_lost", "saved_step": newest_saved_step(paths)}
    decision = decide([*rows[:-1], lost], experiment.slurm.survive, mode)
    say(f"job {job} lost its batch host and runs on with nobody to lead it: {decision.why}")
    if decision.again and mode == "requeue":
        come_back(job, mode, place_slurm(experiment, read_site(run_dir)).num_nodes)
        return
    try:
        run_slurm(["scancel", job])  # its nodes are free, and a successor that waits with afternotok takes over
    except SlurmError as error:
        say(f"job {job} could not be cancelled: {error}")
