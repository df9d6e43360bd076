"""A job with a server and a trainer on made-up nodes, led over several attempts, with a stand-in for srun.

usage: python -m tests.support.led_job RUN_DIR JSON
JSON: {"restart": {...}, "trainer": [actions], "orchestrator": [actions], "spares": [nodes]}; the trainer follows the
actions (see `scripted_role`) on node n1, the orchestrator of an RL run beside it, if there is one; the server answers
on n2. Exits with the last attempt's code.
"""

import json
import os
import sys
from pathlib import Path

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.store.attempts import begin
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.agent import LaunchOrder
from prime_hpc.supervisor.attempt.in_place import begin_in_place
from prime_hpc.supervisor.roles.slurm_step import Hellos, StepContext, StepSpec
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor
from tests.support.led_run import stand_in

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
(nodes,) = (word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist="))
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-"))
own = {{"SLURMD_NODENAME": nodes, "PRIMEHPC_NODE": "127.0.0.1"}}
sys.exit(subprocess.run(sys.argv[first:], env=os.environ | own).returncode)
"""


def main() -> int:
    run_dir, facts = Path(sys.argv[1]), json.loads(sys.argv[2])
    stand_in(run_dir, SRUN)

    def follow(role: str, actions: list[str], hosts: tuple[str, ...], hellos: Hellos) -> LaunchOrder:
        port = next(iter(hellos[f"{hosts[0]}/0"]["ports"]), 0)
        command = [sys.executable, "-m", "tests.support.scripted_role", role, str(run_dir)]
        command += [action.replace("PORT", str(port)) for action in actions]
        return LaunchOrder(start_number=0, nodes=list(hosts), commands=[command], grace_s=1.0)

    def serve(spec: StepSpec, hellos: Hellos, urls: object) -> LaunchOrder:
        return follow("inference", ["serve:PORT", "ready", "sleep:600"], spec.hosts, hellos)

    def train(spec: StepSpec, hellos: Hellos, urls: object) -> LaunchOrder:
        return follow("trainer", facts["trainer"], spec.hosts, hellos)

    def orchestrate(spec: StepSpec, hellos: Hellos, urls: object) -> LaunchOrder:
        return follow("orchestrator", facts["orchestrator"], spec.hosts, hellos)

    specs: list[RoleSpec] = [
        StepSpec("inference", [], 300.0, hosts=("n2",), order=serve),
        StepSpec("trainer", [], 300.0, hosts=("n1",), order=train),
    ]
    tree = {"output_dir": str(run_dir.parent), "name": run_dir.name, "kind": "sft", "max_steps": 1}
    tree |= {"supervisor": {"grace_s": 1}, "slurm": {"restart": facts["restart"]}}
    if facts["orchestrator"]:
        specs.append(StepSpec("orchestrator", [], 300.0, hosts=("n1",), order=orchestrate))
        tree |= {"kind": "rl", "model": {"name": "none"}, "orchestrator": {"env": [{"id": "reverse-text"}]}}
    experiment = Experiment.model_validate(
        tree if facts["orchestrator"] else {**tree, "sft": {"data": {"type": "fake"}}}
    )
    write_snapshot(experiment, run_dir, ["led_job"])
    paths = RunPaths(run_dir)
    attempt = begin(paths.attempts, incarnation=claim_incarnation(paths), why="test", resume_step=None, job_id="7")
    steps = StepContext(Allocation("7", (("n1", "n2", "n3"),), "n1", 0), run_dir, no_kill=True)
    supervisor = Supervisor(experiment, run_dir, attempt, RolePlan(specs, {}, dict(os.environ), steps, facts["spares"]))
    code = supervisor.run()
    while supervisor.left and (following := begin_in_place(supervisor, experiment, run_dir, Patience(30.0))):
        supervisor, code = following, following.run()
    return code


if __name__ == "__main__":
    sys.exit(main())
