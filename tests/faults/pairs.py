"""Two faults at once on the dev cluster: every pair of the faults that it can make, each under a small real RL job.

The job: a trainer of two FSDP2 ranks on two nodes (the first is the batch host), an orchestrator beside it, and two
scripted servers on nodes of their own; `prime-hpc submit`, srun, agents and checkpoints are real. Its run directory
lies on a FUSE file system of each node, which can be made to hang. After the faults it is watched until it goes on, in
the same attempt or in a later one. Used by `tools/fault-pairs` and tests/slurm.
"""

import itertools
import json
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.checkpoint.checkpoints import list_checkpoints
from tests.support.runs import BIN, ROOT
from tests.support.slurm import Cluster, ClusterError
from tests.support.tiny_model import make_tiny_model

FAULTS = ("batch-host", "trainer-node", "inference-node", "controller", "cable", "file-system")
CONTROLLER_AWAY_S = 15.0
CABLE_CUT_S = 40.0
FILE_SYSTEM_HANGS_S = 40.0
SLURMD_TIMEOUT_S = 20
FENCE_S = 15.0
SILENCE_S = 8.0
STEPS_BEFORE = 7
STEPS_AFTER = 3
START_S = 300.0
WATCH_S = 360.0
PATIENCE_S = 60.0
"""So long a job that was given back may wait for a node without power before a person sets that node down."""
IDLE_S = 3.0
"""A job without a new step for so long does nothing."""


def all_pairs() -> list[tuple[str, str]]:
    """Of different faults, in order."""
    return list(itertools.combinations(FAULTS, 2))


@dataclass
class Outcome:
    """What became of a job after two faults."""

    layout: str
    faults: tuple[str, str]
    end: str = ""
    """`same attempt`, `next attempt`, or what it did instead of going on."""
    idle_s: float = 0.0
    """Longest time that nodes were held and no step was made, until the job went on or was given back."""
    beyond_s: float = 0.0
    """Of it, beyond what Slurm needs to notice (SlurmdTimeout) and what the fault itself lasted."""
    lost_steps: int = 0
    """Steps beyond the newest checkpoint that were done again."""
    lost_checkpoints: int = 0
    """Steps by which the next attempt began below the newest whole checkpoint."""
    by_hand: bool = False
    """Whether a person had to tell Slurm that a node is down: the nodes were given back, but the job waited for it."""
    causes: list[str] = field(default_factory=list)
    """Of the attempts that ended."""


class Site:
    """A cluster with a file system that can hang, and the experiment on it."""

    def __init__(self, cluster: Cluster, back: Path, view: Path) -> None:
        """
        Args:
            cluster: its `--shared-cmd` shows `back` as `view` on each node.
            back, view: folders; this process looks at `back`, which never hangs.
        """
        self.cluster, self.back, self.view = cluster, back, view
        self._number = 0
        make_tiny_model(back / "model")

    def experiment(self) -> Path:
        """The file as the nodes see it."""
        tree: dict[str, Any] = {
            "output_dir": str(self.view / "out"),
            "max_steps": 100_000,
            "async_level": 1,
            "seq_len": 96,
            "model": {"name": str(self.view / "model"), "dtype": "float32", "renderer": "qwen3"},
            "ckpt": {"interval": 5},
            "supervisor": {"grace_s": 2},
            "trainer": {"num_ranks": 2, "threads_per_rank": 1, "keep_weights": 1, "optim": {"lr": 1e-4}},
            "orchestrator": {
                "batch_size": 8,
                "rollouts_per_example": 4,
                "max_concurrent": 8,
                "sampling": {"max_tokens": 16},
                "env": [{"id": "reverse-text"}],
            },
            "inference": {"data_parallel_size": 2, "server": {"port": 0}},
            "slurm": {
                "site": "devcluster",
                "gpus_per_node": 1,
                "cpus_per_task": 2,
                "trainer": {"nodes": 2},
                "inference": {"nodes": 2},
                "env": {"PYTHONPATH": f"{ROOT}/tests/support/scripted_engines:{ROOT}"},
                "preflight": {"enabled": False},
                "restart": {"node_timeout_s": SILENCE_S, "fence_s": FENCE_S, "replica_retry_s": 5},
            },
        }
        path = self.back / "exp.yaml"
        path.write_text(yaml.safe_dump(tree))
        return self.view / "exp.yaml"

    def sft(self, num_steps: int) -> Path:
        """Two trainer nodes alone, on made-up data: bit for bit repeatable."""
        tree = yaml.safe_load((self.back / self.experiment().name).read_text())
        del tree["orchestrator"], tree["inference"], tree["slurm"]["inference"], tree["async_level"]
        del tree["trainer"]["keep_weights"], tree["model"]["renderer"]
        tree |= {"kind": "sft", "max_steps": num_steps, "seq_len": 64}
        tree["supervisor"]["heartbeat_timeout_s"] = FENCE_S
        tree["sft"] = {"data": {"type": "fake", "batch_size": 96}}
        path = self.back / "sft.yaml"
        path.write_text(yaml.safe_dump(tree))
        return self.view / "sft.yaml"

    def submit(
        self, layout: str, *flags: object, experiment: Path | None = None, env: Mapping[str, str] | None = None
    ) -> "Job":
        """A job of that layout; `env`: more environment of `prime-hpc submit`."""
        self._number += 1
        name = f"{layout}-{self._number}"
        # components in partitions without a common node: Slurm 22.05 plans both of a requeued job onto the same nodes
        more = ["--slurm.trainer.partition", "cpu", "--slurm.trainer.gpus-per-node", "0"]
        if layout == "packed":
            more = ["--slurm.partition", "all", "--slurm.gpus-per-node", "0"]
        path = experiment or self.experiment()
        words = ["submit", path, "--name", name, "--slurm.layout", layout, *more, *flags, "--json"]
        done = self.cluster.x([str(BIN / "prime-hpc"), *map(str, words)], cwd=Path("/"), timeout=120, env=env)
        if done.returncode:
            raise ClusterError(done.stdout + done.stderr)
        return Job(self.cluster, json.loads(done.stdout)["job_id"], self.back / "out" / name, layout)


class Job:
    """A submitted job, seen from outside."""

    def __init__(self, cluster: Cluster, job_id: str, run_dir: Path, layout: str) -> None:
        self.cluster, self.job_id, self.run_dir, self.layout = cluster, job_id, run_dir, layout
        self.known: dict[str, str] = {}

    def step(self) -> int:
        """The last one that the trainer has done."""
        path = self.run_dir / "metrics" / "trainer.jsonl"
        if not path.exists():
            return 0
        numbers = re.findall(r'"step": (\d+)', path.read_text()[-20_000:])
        return int(numbers[-1]) if numbers else 0

    def attempts(self) -> list[dict[str, Any]]:
        """Its attempts."""
        return [dict(row) for row in read_attempts(self.run_dir / "attempts.jsonl")]

    def saved(self) -> int:
        """The newest checkpoint."""
        return max((info.step for info in list_checkpoints(self.run_dir / "checkpoints")), default=0)

    def state(self) -> tuple[str, str] | None:
        """JobState and Restarts; None while nobody can tell."""
        done = self.cluster.x(["timeout", "3", "scontrol", "-o", "show", "job", self.job_id], cwd=Path("/"))
        line = next(iter(done.stdout.splitlines()), "")
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        return (words["JobState"], words["Restarts"]) if "JobState" in words else None

    def nodes(self) -> dict[str, str]:
        """Node that each fault strikes."""
        placed = self.attempts()[-1]["nodes"]
        first, second = placed["trainer"]
        return {"batch-host": first, "trainer-node": second, "inference-node": placed["inference[1]"][0]}


@contextmanager
def site() -> Iterator[Site]:
    """A cluster of 8 nodes for the drills: 4 with GPUs, 4 without.

    Raises:
        ClusterError: no Slurm, no namespaces or no bindfs here.
    """
    import shutil
    import tempfile

    if shutil.which("bindfs") is None:
        raise ClusterError("bindfs is missing: apt-get install bindfs", 4)
    folder = Path(tempfile.mkdtemp(prefix="prime-hpc-pairs-", dir="/tmp"))
    back, view = folder / "back", folder / "view"
    back.mkdir()
    view.mkdir()
    options = ("--gpu-nodes", "4", "--slurmd-timeout", str(SLURMD_TIMEOUT_S), "--shared-cmd", f"bindfs {back} {view}")
    cluster = Cluster(*options, num_nodes=8)
    try:
        if not cluster.netns:
            raise ClusterError("the nodes have no namespaces of their own here (not root)", 4)
        yield Site(cluster, back, view)
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


def strike(
    cluster: Cluster, faults: tuple[str, str], nodes: dict[str, str]
) -> list[tuple[float, Callable[[], object]]]:
    """Both faults, one right after the other; what repairs them, and when after now (nodes without power stay so)."""
    repairs: list[tuple[float, Callable[[], object]]] = []
    for fault in sorted(faults, key=lambda f: f != "controller"):  # nobody may tell it of the other one
        if fault in nodes:
            cluster.drill("power-off", nodes[fault])
        elif fault == "controller":
            cluster.drill("kill-controller")
            repairs.append((CONTROLLER_AWAY_S, lambda: cluster.drill("start-controller")))
        elif fault == "cable":
            # of a node that has its power: the second trainer node, else the inference node's
            node = nodes["trainer-node"] if "trainer-node" not in faults else nodes["inference-node"]
            cluster.drill("cut", node)
            repairs.append((CABLE_CUT_S, partial(cluster.drill, "join", node)))
        else:
            cluster.drill("hang-shared")
            repairs.append((FILE_SYSTEM_HANGS_S, lambda: cluster.drill("wake-shared")))
    return repairs


def lasted_s(faults: tuple[str, str]) -> float:
    """How long nothing can be done by anybody: until Slurm could notice, the controller or the files are back."""
    times = {"controller": CONTROLLER_AWAY_S, "file-system": FILE_SYSTEM_HANGS_S}
    if any(fault not in times for fault in faults):  # Slurm counts from when it runs
        return SLURMD_TIMEOUT_S + sum(times.get(fault, 0.0) for fault in faults)
    return max(times[fault] for fault in faults)


def drill(place: Site, layout: str, faults: tuple[str, str], *flags: object) -> Outcome:
    """One pair under a fresh job."""
    cluster = place.cluster
    cluster.heal()
    job = place.submit(layout, *flags)
    cluster.wait_until(lambda: job.step() >= STEPS_BEFORE, f"step {STEPS_BEFORE} of {job.run_dir.name}", START_S)
    outcome = Outcome(layout, faults)
    nodes = job.nodes()
    repairs = strike(cluster, faults, nodes)
    try:
        _watch(job, outcome, repairs, [nodes[fault] for fault in faults if fault in nodes])
    finally:
        for _, repair in repairs:
            try:
                repair()
            except ClusterError:
                pass
        cluster.x(["timeout", "20", "scancel", "-f", "-s", "KILL", job.job_id], cwd=Path("/"))
        cluster.x(["timeout", "20", "scancel", job.job_id], cwd=Path("/"))
    outcome.causes = [str(row["cause"]) for row in job.attempts() if row["cause"]]
    return outcome


def drill_all(todo: list[tuple[str, tuple[str, str]]], jobs: int, log: Path | None) -> list[Outcome]:
    """Layouts and pairs, on `jobs` clusters at once; each row is said, and appended to `log`, as it is known."""
    left: queue.SimpleQueue[tuple[str, tuple[str, str]]] = queue.SimpleQueue()
    for item in todo:
        left.put(item)

    def work() -> list[Outcome]:
        done: list[Outcome] = []
        with site() as place:
            while True:
                try:
                    layout, faults = left.get_nowait()
                except queue.Empty:
                    return done
                done.append(drill(place, layout, faults))
                print(table(done[-1:]).splitlines()[1], file=sys.stderr, flush=True)
                if log is not None:
                    with log.open("a") as file:
                        file.write(as_json(done[-1:]) + "\n")

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        workers = [pool.submit(work) for _ in range(min(max(1, jobs), len(todo)))]
        found = [outcome for worker in workers for outcome in worker.result()]
    return sorted(found, key=lambda one: todo.index((one.layout, one.faults)))


def _watch(job: Job, outcome: Outcome, repairs: list[tuple[float, Callable[[], object]]], dead: list[str]) -> None:
    """Until the job goes on; repairs what is due meanwhile."""
    began = last_new = given_back = time.monotonic()
    before, first_life = job.step(), len(job.attempts())
    newest, held = before, True
    restarts = "0"
    saved_before = job.saved()
    settled = began + max([2 * FENCE_S + SLURMD_TIMEOUT_S, *(after + FENCE_S for after, _ in repairs)])
    while (now := time.monotonic()) < began + WATCH_S:
        for item in [item for item in repairs if now >= began + item[0]]:
            repairs.remove(item)
            item[1]()
        step, lives = job.step(), job.attempts()
        if step != newest:
            newest, last_new = step, now
            if len(lives) == first_life:
                before = max(before, step)
        state = job.state()
        if state is not None:
            held = state == ("RUNNING", restarts)
            given_back = now if held else given_back
        if state is not None and state[0] == "COMPLETING" and now > given_back + PATIENCE_S and not outcome.by_hand:
            outcome.by_hand = True
            for node in dead:
                job.cluster.x(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=dead"], cwd=Path("/"))
        if held and now - last_new > IDLE_S:
            outcome.idle_s = max(outcome.idle_s, now - last_new)
        saved_before = max(saved_before, job.saved() if len(lives) == first_life else 0)
        if state is not None and state[0] in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "COMPLETED"):
            outcome.end = f"ended: {state[0]}"
            break
        if len(lives) > first_life and lives[-1]["resume_step"] is not None and lives[-1]["ended"] is None:
            if step >= lives[-1]["resume_step"] + STEPS_AFTER and step != before and now - last_new < IDLE_S:
                outcome.end = "next attempt"
                outcome.lost_steps = max(0, before - lives[-1]["resume_step"])
                outcome.lost_checkpoints = max(0, saved_before - lives[first_life]["resume_step"])
                break
        elif now > settled and not repairs and len(lives) == first_life and now - last_new < IDLE_S:
            outcome.end = "same attempt"
            break
        time.sleep(0.5)
    else:
        outcome.end = "never went on"
    outcome.beyond_s = max(0.0, outcome.idle_s - lasted_s(outcome.faults))


def table(outcomes: list[Outcome]) -> str:
    """For people."""
    head = f"{'layout':7} {'faults':32} {'then':16} {'idle s':>7} {'beyond s':>9} {'lost steps':>11} {'lost saves':>11}"
    lines = [f"{head}  why"]
    for one in outcomes:
        end = one.end + (" *" if one.by_hand else "")
        lines.append(
            f"{one.layout:7} {' + '.join(one.faults):32} {end:16} {one.idle_s:7.0f} {one.beyond_s:9.0f} "
            f"{one.lost_steps:11} {one.lost_checkpoints:11}  {'; '.join(one.causes)[:90]}"
        )
    if any(one.by_hand for one in outcomes):
        lines.append("* the nodes were free, but the job waited for the dead one until `scontrol update State=DOWN`")
    return "\n".join(lines)


def as_json(outcomes: list[Outcome]) -> str:
    """For scripts: the rows, and the longest time that nodes were held with nothing running."""
    longest = max((one.beyond_s for one in outcomes), default=0.0)
    stuck = [one.faults for one in outcomes if one.end not in ("same attempt", "next attempt")]
    lost = sum(one.lost_checkpoints for one in outcomes)
    rows = [asdict(one) for one in outcomes]
    return json.dumps({"pairs": rows, "longest_beyond_s": longest, "stuck": stuck, "lost_checkpoints": lost})
