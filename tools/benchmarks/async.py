"""`tools/bench async`: replies of which a few are very long, at several values of `async_level` on equal devices.

Packed jobs on the dev cluster: a trainer rank and a server of the `transformers` backend, the starter model warmed up
for `long-tail` (configs/long_tail), as many seats as a batch has episodes. Engine and trainer take the time of slower
devices (`_stretched.py`), so that they do not take each other's cores. For each seed the levels run in turn: 0 and 2 as
neighbours, then 1 and 4. Held-out rewards are taken afterwards of the versions that each run published, by `prime-hpc
eval`, so that no evaluation costs a run time.

Time to a reward: from the moment at which the servers were ready until a version was published that has it, between
two versions that were evaluated by interpolation. Idle: the trainer's wait for batches, and empty seats
(`queue/empty_seats`), by cause, of the steps between the first and the last `level` + 1.

`PRIME_HPC_BENCH_ONLY=DIR` keeps what was made and the runs there, and takes those that lie there already;
`PRIME_HPC_BENCH_RATIO` (10: p99 of the replies over their median), `_LEVELS` (0,2,1,4), `_SEEDS` (0,1,2), `_STEPS`,
`_REWARD` (to be reached), `_STALE` (`orchestrator.stale`: resample), `_TOKEN_S`, `_SHARED_TOKEN_S`, `_TARGET_S` and
`_LR` change it; `_RUNS` is how many may be done this time, so that a long series can be made in pieces; `_AT_ONCE` (1)
how many run side by side: 2, a pair of levels meets the same load, where the machine has other work.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.orchestrator.rollouts.seats import CAUSES
from prime_hpc.starter.make import make_starter
from tests.support.runs import rows
from tests.support.slurm import DONE, Cluster

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]


def _setting(name: str, default: str) -> str:
    return os.environ.get(f"PRIME_HPC_BENCH_{name}", default)


RATIO = float(_setting("RATIO", "10"))
LEVELS = [int(word) for word in _setting("LEVELS", "0,2,1,4").split(",")]
SEEDS = [int(word) for word in _setting("SEEDS", "0,1,2").split(",")]
NUM_STEPS = int(_setting("STEPS", "12"))
MOST_RUNS = int(_setting("RUNS", "1000"))
AT_ONCE = int(_setting("AT_ONCE", "1"))
REWARD = float(_setting("REWARD", "0.45"))
LR = float(_setting("LR", "5e-4"))
STALE = _setting("STALE", "resample")
STRETCH = {"TOKEN_S": "0.3", "SHARED_TOKEN_S": "0.001", "TARGET_S": "0.006"}
NUM_PROMPTS, GROUP_SIZE, SEATS = 16, 4, 64
EVERY = 2
"""Versions between two that are evaluated."""
MEDIAN_NUMBERS, MOST_NUMBERS, MOST_HELD_OUT = 4, 80, 20
"""Numbers of the median reply, of the longest replies in training, and of the longest that are held out."""
SEQ_LEN = 384
JOB_S = 1800.0


def name_of(level: int, seed: int) -> str:
    """Name of a run."""
    return f"p99-{RATIO:g}-level-{level}-seed-{seed}" + ("" if STALE == "resample" else f"-{STALE}")


def task(most: int) -> dict[str, Any]:
    """The environment, with its longest reply."""
    args = {"p99_ratio": RATIO, "median_numbers": MEDIAN_NUMBERS, "max_numbers": most, "instructions": None}
    return {"id": "long-tail", "args": args, "timeout_s": 600}


def experiment(level: int, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    """One job."""
    stretch = {f"PRIME_HPC_BENCH_{key}": _setting(key, value) for key, value in STRETCH.items()}
    return {
        "name": name_of(level, seed),
        "output_dir": str(folder),
        "launch": "slurm",
        "seed": seed,
        "max_steps": NUM_STEPS,
        "async_level": level,
        "seq_len": SEQ_LEN,
        "model": {"name": str(model), "dtype": "float32", "renderer": "qwen3"},
        "trainer": {
            "threads_per_rank": 1,
            "micro_batch_tokens": 4 * SEQ_LEN,
            "keep_weights": NUM_STEPS + 1,
            "optim": {"lr": LR},
            "loss": {"type": "_stretched:slow_loss"},
        },
        "orchestrator": {
            "batch_size": NUM_PROMPTS * GROUP_SIZE,
            "rollouts_per_example": GROUP_SIZE,
            "max_concurrent": SEATS,
            "stale": STALE,
            "sampling": {"max_tokens": 4 * MOST_NUMBERS},
            "env": [task(MOST_NUMBERS)],
        },
        "inference": {"backend": "_stretched:STRETCHED", "server": {"port": 0}, "cpu_threads": 1},
        "slurm": {
            "site": "devcluster",
            "layout": "packed",
            "gpus_per_node": 1,
            "cpus_per_task": 2,
            "env": {"PYTHONPATH": f"{TOP}:{HERE}", "OMP_NUM_THREADS": "1", **stretch},
            "preflight": {"allreduce": False},
            "trainer": {"nodes": 1},
            "inference": {"nodes": 1},
        },
    }


def evaluation(run_dir: Path, model: Path, folder: Path) -> dict[str, Any]:
    """The held-out scores of a run's versions."""
    return {
        "kind": "eval",
        "name": f"{run_dir.name}-eval",
        "output_dir": str(folder),
        "seq_len": SEQ_LEN,
        "model": {"name": str(model), "dtype": "float32", "renderer": "qwen3"},
        "eval": {
            "env": [task(MOST_HELD_OUT)],
            "weights_dir": str(run_dir / "weights"),
            "steps": list(range(EVERY, NUM_STEPS + 1, EVERY)),
            "num_examples": 128,
            "max_concurrent": 128,
            "sampling": {"temperature": 1.0, "max_tokens": 4 * MOST_HELD_OUT + 32},
        },
        "inference": {"backend": "transformers", "server": {"port": 0}, "cpu_threads": 1},
    }


def call(verb: str, tree: dict[str, Any], log: Path, *more: str) -> None:
    """Run a command of this machine on a tree.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    path = log.with_suffix(".yaml")
    path.write_text(json.dumps(tree))  # JSON is YAML
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": f"{TOP}:{HERE}"}
    argv = [sys.executable, "-m", "prime_hpc.cli", verb, "@", str(path), *more]
    with log.open("w") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=TOP, timeout=JOB_S)
    if done.returncode:
        raise RuntimeError(f"{path} failed ({done.returncode}):\n{log.read_text()[-3000:]}")


def warm_model(folder: Path) -> Path:
    """Make the model that both habits are known to: configs/long_tail/sft.yaml."""
    made = folder / "long-tail-sft" / "weights"
    if not made.is_dir():
        make_starter(folder / "starter", task="long-tail")
        import yaml

        tree = yaml.safe_load((TOP / "configs" / "long_tail" / "sft.yaml").read_text())
        tree["base"] = str(TOP / "configs" / "reverse_text" / "sft.yaml")
        tree |= {"output_dir": str(folder)}
        tree["model"]["name"] = str(folder / "starter" / "model")
        tree["sft"]["data"]["path"] = str(folder / "starter" / "sft.jsonl")
        call("sft", tree, folder / "sft.log")
    return max(made.iterdir())


def submit(cluster: Cluster, level: int, seed: int, model: Path) -> str:
    """Send one job; returns its id.

    Raises:
        RuntimeError: it was refused.
    """
    there = cluster.shared / "model"
    if not there.exists():
        shutil.copytree(model, there)
    path = cluster.shared / f"{name_of(level, seed)}.yaml"
    path.write_text(json.dumps(experiment(level, seed, there, cluster.shared / "out")))
    argv = [sys.executable, "-m", "prime_hpc.cli", "submit", str(path), "--json"]
    done = cluster.x(argv, env={"PYTHONPATH": f"{TOP}:{HERE}"}, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    job: str = json.loads(done.stdout)["job_id"]
    return job


def play(cluster: Cluster, pairs: Sequence[tuple[int, int]], model: Path, folder: Path) -> None:
    """Do jobs of these levels and seeds at once, and bring what they wrote into the folder.

    Raises:
        RuntimeError: one was refused, or did not end well.
    """
    jobs = {name_of(level, seed): submit(cluster, level, seed, model) for level, seed in pairs}
    for name, job in jobs.items():
        state = cluster.wait_state(job, DONE, timeout=JOB_S)
        run_dir = cluster.shared / "out" / name
        if state != "COMPLETED":
            raise RuntimeError(f"{name} is {state}:\n{(run_dir / 'logs' / 'supervisor.log').read_text()[-3000:]}")
        (run_dir / "load.json").write_text(json.dumps(os.getloadavg()[1]))
        shutil.copytree(run_dir, folder / f"{name}.part", symlinks=True)
        (folder / f"{name}.part").rename(folder / name)
        shutil.rmtree(run_dir)


def held_out(run_dir: Path, model: Path, folder: Path) -> dict[int, float]:
    """Rewards of the versions that were evaluated, version 0 too."""
    results = folder / f"{run_dir.name}-eval" / "results"
    if not (results / "done").exists():
        call("eval", evaluation(run_dir, model, folder), folder / f"{run_dir.name}-eval.log")
        (results / "done").touch()
    summary = json.loads((results / "summary.json").read_text())
    return {version["step"]: version["environments"]["long-tail"]["avg"]["value"] for version in summary["versions"]}


def reached(rewards: dict[int, float], seconds: dict[int, float], wanted: float) -> float | None:
    """Seconds until a reward, interpolated between versions; None: never."""
    last: tuple[float, float] | None = None
    for version in sorted(rewards):
        now = (seconds[version], rewards[version])
        if now[1] >= wanted:
            if last is None:
                return now[0]
            return last[0] + (now[0] - last[0]) * (wanted - last[1]) / (now[1] - last[1])
        last = now
    return None


def figures(run_dir: Path, level: int, rewards: dict[int, float]) -> dict[str, Any]:
    """One run's figures."""
    trained, served = rows(run_dir, "trainer"), rows(run_dir, "orchestrator")
    served = [row for row in served if "time/step" in row]
    began = served[0]["time"] - served[0]["time/step"]
    seconds = {0: 0.0} | {row["step"]: row["time"] - began for row in trained}
    middle = range(2, NUM_STEPS - level)
    busy = [row for row in trained if row["step"] in middle]
    steps = [row for row in served if row["step"] in middle]
    total = sum(row["time/step"] for row in steps)
    episodes = sorted(episode[0] for row in served for episode in row["episode_sample"])
    found: dict[str, Any] = {
        "step_s": statistics.fmean(row["time/step"] for row in busy),
        "seconds": seconds[NUM_STEPS],
        "rewards": rewards,
        "reached_s": reached(rewards, seconds, REWARD),
        "episode_p99_over_median": episodes[int(0.99 * len(episodes))] / statistics.median(episodes),
        "trainer_idle": sum(row["time/wait"] for row in busy) / sum(row["time/step"] for row in busy),
        "lag_mean": statistics.fmean(row["lag/mean"] for row in served),
        "groups_stale": sum(row["groups/stale"] for row in served),
        "tokens_stale": statistics.fmean(row.get("tokens/stale", 0.0) for row in served),
        "load": json.loads((run_dir / "load.json").read_text()),
    }
    for name in ("idle_share", "empty_seats", *(f"empty_{cause}" for cause in CAUSES)):
        found[name] = sum(row[f"queue/{name}"] * row["time/step"] for row in steps) / total
    return found


def missing(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield level and seed of the runs that are not there yet, as many as may be done."""
    found = [(level, seed) for seed in SEEDS for level in LEVELS if not (folder / name_of(level, seed)).is_dir()]
    yield from found[:MOST_RUNS]


def run() -> dict[str, Any]:
    """All runs' figures."""
    kept = os.environ.get("PRIME_HPC_BENCH_ONLY")
    with tempfile.TemporaryDirectory(prefix="bench-async-") as made:
        folder = Path(kept or made)
        folder.mkdir(parents=True, exist_ok=True)
        model = warm_model(folder)
        if todo := list(missing(folder)):
            cluster = Cluster(num_nodes=6)
            try:
                for first in range(0, len(todo), AT_ONCE):
                    play(cluster, todo[first : first + AT_ONCE], model, folder)
            finally:
                cluster.down()
        found: dict[str, dict[str, Any]] = {}
        for level in sorted(LEVELS):
            for seed in SEEDS:
                if (run_dir := folder / name_of(level, seed)).is_dir():
                    rewards = held_out(run_dir, model, folder)
                    found.setdefault(str(level), {})[str(seed)] = figures(run_dir, level, rewards)
    return {"ratio": RATIO, "stale": STALE, "reward": REWARD, "steps": NUM_STEPS, "lr": LR, "levels": found}


def render(result: dict[str, Any]) -> str:
    """The figures as a table, and level 0 over the others."""
    lines = [
        f"long-tail, p99 = {result['ratio']:g} medians, {result['steps']} steps; reward {result['reward']:g} reached",
        "level seed  s/step   all s  reached s  reward  p99/med  trainer idle  no episode  empty seats"
        "  (tail gate weights)  lag  stale  masked  load",
    ]
    for level, seeds in result["levels"].items():
        for seed, row in seeds.items():
            until = "-" if row["reached_s"] is None else f"{row['reached_s']:.0f}"
            causes = " ".join(f"{100 * row[f'empty_{cause}']:.0f}" for cause in ("tail", "gate", "weights"))
            lines.append(
                f"{level:>5}{seed:>5}{row['step_s']:>8.2f}{row['seconds']:>8.0f}{until:>11}"
                f"{list(row['rewards'].values())[-1]:>8.3f}{row['episode_p99_over_median']:>9.1f}"
                f"{100 * row['trainer_idle']:>12.0f} %{100 * row['idle_share']:>10.0f} %"
                f"{100 * row['empty_seats']:>11.0f} %  ({causes:>17})"
                f"{row['lag_mean']:>7.2f}{row['groups_stale']:>6.0f}"
                f"{100 * row['tokens_stale']:>6.1f} %{row['load']:>6.1f}"
            )
    slow = result["levels"].get("0", {})
    for level, seeds in result["levels"].items():
        for what, key in (("a step", "step_s"), ("to the reward", "reached_s")):
            both = [(slow[s][key], seeds[s][key]) for s in seeds if s in slow and level != "0"]
            ratios = sorted(a / b for a, b in both if a and b)
            if ratios:
                each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                lines.append(
                    f"level {level}, {what}: {statistics.median(ratios):.2f} times as fast as level 0 ({each})"
                )
    return "\n".join(lines)
