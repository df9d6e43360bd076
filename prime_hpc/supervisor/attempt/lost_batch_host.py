"""Agents that nobody leads any more: they have ended their roles, and see to it that the job's nodes are given back.

    batch host dies, hangs or is cut off --> roles fail, or are ended (fence_s); their agents stay
        Slurm ends or requeues the job                       --> the agents end with it
        Slurm drops the node, the job runs on (--no-kill)    --> an agent gives the job back at once
        Slurm says nothing for SLURM_SILENCE_S                      --> an agent gives the job back all the same

Slurm's own verdict takes SlurmdTimeout, and may never come: a controller that was started anew does not miss a node
that it has not heard since. Giving back is what the supervisor would have done: requeue, or cancel, as the policy says.
Where the supervisor lives on, cut off, it ends its attempt too (`node_timeout_s`), and the next attempt fences it.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from prime_hpc.slurm.client import ShownJob, SlurmError, run_slurm, show_job
from prime_hpc.slurm.hostlist import expand_hosts
from prime_hpc.slurm.requeue import requeue_for_good, silent_nodes

RETURN = "PRIMEHPC_RETURN"
"""Environment of the agents: a `Return` as JSON."""
LOOK_S = 10.0
LATER_LOOK_S = 30.0
"""Of the many agents that are not among the first: the controller is asked less often."""
SLURM_SILENCE_S = 60.0
"""From the end of an agent's role, within which Slurm's own verdict is awaited."""
AGAIN_S = 30.0
"""After a try that changed nothing."""
TURN_S = 20.0
"""By so much later does the agent of the next node act: the first one's requeue is seen by then."""
MAX_TURNS = 5
READ_S = 20.0
"""Longest wait for the run directory; a file system that hangs must not keep the nodes."""
ASK_S = 15.0
"""Longest wait for an answer of the controller."""
MAX_REFUSALS = 3
"""So often may Slurm refuse to requeue the job before it is cancelled: its nodes are wanted by others."""

Ask = Callable[[str], list[ShownJob]]
"""Job id -> its components, a het job's leader first. Raises OSError or RuntimeError where Slurm cannot be asked."""
BatchHostState = Literal["over", "kept", "dropped", "suspended", "unknown"]


@dataclass(frozen=True)
class Return:
    """Facts that an agent needs to give its job back without reading a file."""

    job: str
    """The leader's id as Slurm's commands are told it, `<array>_<task>` of an array's task."""
    parts: list[str]
    """SLURM_JOB_ID as the job's steps may have it: a stand-in's agent has another one, and nothing to give back."""
    hosts: str
    """Host list of all nodes."""
    batch_host: str
    mode: str
    """How the job comes back: requeue, successor, off."""
    num_nodes: int
    """That the next attempt needs; 0: the job cannot shrink."""
    exclude: bool = False
    """True if the next attempt must not get nodes that are silent now."""

    def to_env(self) -> dict[str, str]:
        """Return the variable from which `from_env` reads it."""
        return {RETURN: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Return | None":
        """Of the job of this agent; None: there is none, or it is another's."""
        text = environ.get(RETURN)
        known = cls(**json.loads(text)) if text else None
        return known if known is not None and environ.get("SLURM_JOB_ID") in known.parts else None

    def turn(self, host: str) -> int:
        """Place of a node among those that may act."""
        others = [name for name in expand_hosts(self.hosts) if name != self.batch_host]
        return min(others.index(host) if host in others else len(others), MAX_TURNS)


def batch_host_state(job: ShownJob, restarts: int) -> BatchHostState:
    """Return what Slurm says of the job whose supervisor is not heard.

    Args:
        job: of a het job the leader.
        restarts: how often the job had been restarted in this attempt.

    Returns:
        `over`: this attempt has ended, or another has begun; `dropped`: it runs on without its batch host.
    """
    if job.restarts != restarts:
        return "over"
    if job.state in ("SUSPENDED", "STOPPED"):
        return "suspended"
    if job.state != "RUNNING":
        return "over"
    return "kept" if job.batch_host in expand_hosts(job.nodes) else "dropped"


class OrphanedAgent:
    """One agent's part in giving the job back.

    Args:
        restarts: SLURM_RESTART_COUNT of this attempt.
        is_supervised: whether the supervisor is heard again, or this agent is wanted no more.
        ask: see `Ask`.
        clock, sleep: time, seconds; the clock does not count while this process is stopped.
    """

    def __init__(
        self,
        known: Return,
        restarts: int,
        host: str,
        is_supervised: Callable[[], bool],
        ask: Ask,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._known, self._restarts = known, restarts
        self._turn = known.turn(host)
        self._is_supervised = is_supervised
        self._ask, self._clock, self._sleep = ask, clock, sleep

    def wait(self, silence_s: float) -> bool:
        """Wait for Slurm's verdict; whether it is for this node to give the job back now.
        `silence_s`: so long Slurm may say nothing."""
        due = self._clock() + silence_s + TURN_S * self._turn
        dropped = False
        while not self._is_supervised():
            state = self._look()
            if state == "over":
                return False
            if state == "suspended":
                due = self._clock() + silence_s + TURN_S * self._turn
            if state == "dropped" and not dropped:
                dropped, due = True, min(due, self._clock() + TURN_S * self._turn)
            if state in ("kept", "dropped") and self._clock() >= due:
                return True
            self._pause(due)
        return False

    def _look(self) -> BatchHostState:
        try:
            return batch_host_state(self._ask(self._known.job)[0], self._restarts)
        except (OSError, RuntimeError, ValueError):
            return "unknown"  # the controller is away, or moves: it is asked again

    def _pause(self, due: float) -> None:
        look_s = LOOK_S if self._turn < MAX_TURNS else LATER_LOOK_S * random.uniform(0.7, 1.3)
        left = due - self._clock()
        end = self._clock() + (min(look_s, left) if left > 0 else look_s)
        while self._clock() < end and not self._is_supervised():
            self._sleep(min(1.0, max(0.05, end - self._clock())))


def requeue_orphaned_job(
    run_dir: Path,
    environ: Mapping[str, str],
    host: str,
    is_supervised: Callable[[], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Have the job of an agent that nobody leads any more come back, or end, as the policy says.

    Returns once this attempt of the job is over, or somebody leads again.

    Args:
        is_supervised: see `OrphanedAgent`.
        say: into the agent's log; must not block.
    """
    known = Return.from_env(environ)
    if known is None:
        return

    def ask(job: str) -> list[ShownJob]:
        return show_job(job, ASK_S)

    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    orphan = OrphanedAgent(known, restarts, host, is_supervised, ask, clock=clock, sleep=time.sleep)
    silence_s, refusals, policy = SLURM_SILENCE_S, 0, _Policy(run_dir, known)
    say(
        f"[{host}] job {known.job} has nobody to lead it; without a word of Slurm it is given back in {silence_s:.0f} s"
    )
    while orphan.wait(silence_s):
        silence_s = AGAIN_S
        comes_back, why = policy.get()
        say(f"[{host}] job {known.job} is led by nobody: {why}")
        try:
            if comes_back and known.mode == "requeue" and refusals < MAX_REFUSALS:
                silent = silent_nodes(known.hosts) if known.exclude else []
                requeue_for_good(known.job, known.num_nodes, restarts, silent, clock=clock, sleep=time.sleep)
            else:  # its nodes are free then, and a successor that waits with afternotok takes over
                run_slurm(["scancel", known.job], timeout_s=ASK_S)
        except SlurmError as error:
            refusals += not error.is_unreachable
            say(f"[{host}] job {known.job} could not be given back: {error}")


class _Policy:
    """The answer to whether the job comes back, read from the run directory beside the wait for Slurm's verdict."""

    def __init__(self, run_dir: Path, known: Return) -> None:
        self._run_dir, self._known = run_dir, known
        self._answer: tuple[bool, str] | None = None
        self._reader = threading.Thread(target=self._read, name="policy", daemon=True)
        self._reader.start()

    def get(self) -> tuple[bool, str]:
        """Return whether, and why. Where the run directory cannot be read in time, the job comes back."""
        self._reader.join(READ_S)
        why = f"the run directory does not answer within {READ_S:.0f} s"
        return self._answer or (self._known.mode != "off", why)

    def _read(self) -> None:
        from prime_hpc.config import load_run
        from prime_hpc.store.attempts import read_attempts
        from prime_hpc.supervisor.attempt.restart_policy import decide_for, mode_of_run
        from prime_hpc.supervisor.attempt.start import run_paths, saved_step_if_known

        try:
            experiment = load_run(self._run_dir)
            paths = run_paths(experiment, self._run_dir)
            rows = read_attempts(paths.attempts)
            # the attempt is still open in the ledger; the next one finds out what became of it
            saved = saved_step_if_known(paths, rows[-1].get("saved_before"))
            rows[-1] |= {"outcome": "node_lost", "saved_step": saved}
            decision = decide_for(experiment, self._run_dir, rows, mode_of_run(self._run_dir))
            self._answer = decision.again, decision.why
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            self._answer = self._known.mode != "off", f"the run's policy cannot be read ({error})"
