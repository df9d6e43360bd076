"""A supervisor that leads real agents on made-up nodes: as in a Slurm job, with a stand-in for srun.

usage: python -m tests.support.led_run RUN_DIR JSON
JSON: {"restart": {...}, "supervisor": {...}, "actions": [...], "over": FILE}; the one role, a trainer, follows the
actions (see `scripted_role`) on node n1, and waits for the file on n2. Exits with the supervisor's code.
"""

import json
import os
import stat
import sys
from pathlib import Path

from prime_hpc.config import Experiment
from prime_hpc.observe.logs import setup_logger
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.store.attempts import begin
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.agent import LaunchOrder
from prime_hpc.supervisor.roles.slurm_step import Hellos, StepContext, StepSpec
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor

HOSTS = ("n1", "n2")
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-"))
tasks = [subprocess.Popen(sys.argv[first:], env=os.environ | {{"SLURMD_NODENAME": host}}) for host in {HOSTS!r}]
sys.exit(max(task.wait() for task in tasks))
"""

_SECOND = """
import sys, time
while True:
    try:
        with open(sys.argv[1]):
            break
    except FileNotFoundError:
        time.sleep(0.1)
"""


def stand_in(run_dir: Path, program: str) -> None:
    """Put a program into the place of srun, beside the run, and the supervisor's log into the run."""
    srun = run_dir.parent / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(program)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{srun.parent}:{os.environ['PATH']}"
    setup_logger("supervisor", file=run_dir / "logs" / "supervisor.log")


def main() -> int:
    run_dir, facts = Path(sys.argv[1]), json.loads(sys.argv[2])
    stand_in(run_dir, SRUN)

    def order(spec: StepSpec, hellos: Hellos, urls: object) -> LaunchOrder:
        command = [sys.executable, "-m", "tests.support.scripted_role", "trainer", str(run_dir), *facts["actions"]]
        second = [sys.executable, "-c", _SECOND, facts["over"]]  # has no word of its own
        return LaunchOrder(start_number=0, nodes=list(spec.hosts), commands=[command, second], grace_s=1.0)

    spec = StepSpec("trainer", [], 60.0, hosts=HOSTS, order=order)
    tree = {"output_dir": str(run_dir.parent), "name": run_dir.name, "max_steps": 1, "supervisor": facts["supervisor"]}
    experiment = Experiment.model_validate({**tree, "slurm": {"restart": facts["restart"]}})
    paths = RunPaths(run_dir)
    attempt = begin(paths.attempts, incarnation=claim_incarnation(paths), why="test", resume_step=None, job_id="7")
    steps = StepContext(Allocation("7", (HOSTS,), "n1", 0), run_dir, no_kill=True)
    return Supervisor(experiment, run_dir, attempt, RolePlan([spec], {}, dict(os.environ), steps)).run()


if __name__ == "__main__":
    sys.exit(main())
