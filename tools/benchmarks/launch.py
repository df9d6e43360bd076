"""Costs on the login node: planning, looking, submitting. Run by `tools/bench launch`.

- A job of 1,000 nodes (8,000 GPUs; packed, and as two components) is placed and its batch script rendered; and
  `prime-hpc plan` of it as a process.
- `prime-hpc status` over 1,000 run directories, as a process. Half of them ended well, the others failed, wait and run;
  where there is a squeue it is asked, as a user's command would.
- `prime-hpc submit` beside plain `sbatch` of the script that it sends, in turn, as processes. Needs a Slurm: run it as
  `slurm/devcluster x tools/bench launch`. The jobs are held, so that none starts, and cancelled at the end.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-c", "import sys; from prime_hpc.cli import main; sys.exit(main())"]
NODES = 1000
RUNS = 1000
ROUNDS = 7
_TIMEOUT_S = 120

_LARGE = """\
name: large
output_dir: OUT
model: {name: Qwen/Qwen3-0.6B}
trainer: {num_ranks: 4000}
orchestrator: {batch_size: 8000, rollouts_per_example: 8, env: [{id: reverse-text}]}
inference: {num_replicas: 500, data_parallel_size: 1, tensor_parallel_size: 8}
slurm: {partition: gpu, gpus_per_node: 8, time: "12:00:00", account: project}
"""
_HELD = """\
name: NAME
output_dir: OUT
kind: sft
launch: slurm
max_steps: 10
model: {name: MODEL}
sft: {data: {type: fake}}
trainer: {num_ranks: 1}
ckpt: {interval: 5}
slurm: {gpus_per_node: 0, mem: 1G, time: "60", extra: {hold: true}}
"""


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PRIME_")}


def _timed(command: list[str], cwd: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=_environment(), timeout=_TIMEOUT_S, check=False
    )
    return time.perf_counter() - began, done


def _median(call: Callable[[], float], rounds: int = ROUNDS) -> dict[str, float]:
    values = [call() for _ in range(rounds)]
    return {"median_s": round(statistics.median(values), 4), "slowest_s": round(max(values), 4)}


def plan_and_render(folder: Path) -> dict[str, Any]:
    """Seconds to place and render a job of `NODES` nodes, by layout, and of `prime-hpc plan` as a process."""
    from prime_hpc.config import load_experiment
    from prime_hpc.config.sections.slurm import SiteConfig
    from prime_hpc.slurm.placement import place_slurm
    from prime_hpc.slurm.script import render_job

    path = folder / "large.yaml"
    path.write_text(_LARGE.replace("OUT", str(folder / "outputs")))
    site = SiteConfig(name="bench")
    figures: dict[str, Any] = {}
    for layout in ("packed", "het"):
        argv = [str(path), "--slurm.layout", layout]
        experiment = load_experiment(argv, "submit").experiment

        def once(experiment: Any = experiment, argv: list[str] = argv) -> float:
            began = time.perf_counter()
            placement = place_slurm(experiment, site)
            render_job(placement, experiment, site, python=sys.executable, command_tail=argv, token="bench")
            return time.perf_counter() - began

        placement = place_slurm(experiment, site)
        figures[layout] = {"nodes": placement.num_nodes, "groups": len(placement.groups)} | _median(once)
    figures["plan"] = _median(lambda: _checked([*CLI, "plan", str(path)], folder), 3)
    return figures


def _checked(command: list[str], cwd: Path) -> float:
    seconds, done = _timed(command, cwd)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[-2:])} failed: {done.stderr or done.stdout}")
    return seconds


def make_runs(folder: Path, count: int) -> None:
    """Run directories as `submit` and the supervisor leave them: 40 steps of metrics, two attempts each."""
    now = time.time()
    for number in range(count):
        kind = ("completed", "failed", "completed", "running", "completed", "pending")[number % 6]
        run, job, sent = folder / f"run-{number:04d}", str(10**6 + number), now - 600 * number - 600
        (run / "metrics").mkdir(parents=True)
        (run / "run.yaml").write_text("kind: rl\nname: x\nmax_steps: 40\n")
        record = {"token": f"bench{number}", "state": "sent", "job_id": job, "time": sent, "successor": None}
        (run / "submit.json").write_text(json.dumps(record | {"command": ["prime-hpc", "submit", "exp.yaml"] * 5}))
        if kind == "pending":
            continue
        ends = {"ended": sent + 300, "outcome": kind, "cause": "done" if kind == "completed" else "trainer rank 1: OOM"}
        first = {"attempt": 1, "incarnation": 1, "began": sent + 9, "why": "first start", "host": "n1", "pid": 7}
        first |= {
            "job_id": job,
            "ended": sent + 99,
            "outcome": "requeued",
            "cause": "warned by USR1",
            "next": "requeue",
        }
        nodes = {"trainer": [f"n{i}" for i in range(1, 9)], "inference[0]": ["n9"], "inference[1]": ["n10"]}
        second = first | {"attempt": 2, "began": sent + 120, "why": "resumes at step 20", "nodes": nodes, "next": None}
        second |= ends if kind != "running" else {"ended": None, "outcome": None, "cause": None}
        (run / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
        word = {"time": now if kind == "running" else sent + 300, "state": "running" if kind == "running" else "ended"}
        word |= {"step": 30, "max_steps": 40, "reward": 0.7, "attempt": 2, "job_id": job, "host": "n1", "pid": 7}
        (run / "status.json").write_text(json.dumps(word | {"nodes": nodes, "roles": dict.fromkeys(nodes, "ready")}))
        for role, key in (("orchestrator", "reward/mean"), ("trainer", "time/step")):
            rows = ({"step": s, "time": sent + s, key: s / 40, **{f"m/{i}": 0.5 for i in range(25)}} for s in range(40))
            (run / "metrics" / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def status(folder: Path) -> dict[str, Any]:
    """Seconds of `prime-hpc status` over `RUNS` run directories."""
    runs = folder / "runs"
    make_runs(runs, RUNS)
    figures: dict[str, Any] = {"runs": RUNS, "squeue": _slurm_answers()}
    figures["default"] = _median(lambda: _checked([*CLI, "status", str(runs)], folder), 5)
    figures["all"] = _median(lambda: _checked([*CLI, "status", str(runs), "--all"], folder), 5)
    return figures


def _slurm_answers() -> bool:
    from prime_hpc.slurm.client import SlurmError, run_slurm

    try:
        run_slurm(["sinfo", "-h"])
    except SlurmError:
        return False
    return shutil.which("sbatch") is not None


def submit(folder: Path) -> dict[str, Any]:
    """Seconds of `prime-hpc submit` and of plain `sbatch`, in turn; empty without a Slurm."""
    if not _slurm_answers():
        return {}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 64}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    ids: list[str] = []
    ours: list[float] = []
    plain: list[float] = []
    try:
        for number in range(ROUNDS):
            config = folder / f"held{number}.yaml"
            text = _HELD.replace("OUT", str(folder / "outputs")).replace("NAME", f"held{number}")
            config.write_text(text.replace("MODEL", str(model)))
            seconds, done = _timed([*CLI, "submit", str(config), "--no-follow", "--json"], folder)
            if done.returncode != 0:
                raise RuntimeError(f"submit failed: {done.stderr or done.stdout}")
            ids.append(str(json.loads(done.stdout)["job_id"]))
            ours.append(seconds)
            script = folder / f"held{number}.sbatch"
            _checked([*CLI, "render", str(config), "--output", str(script)], folder)
            seconds, done = _timed(["sbatch", "--parsable", str(script)], folder)
            if done.returncode != 0:
                raise RuntimeError(f"sbatch failed: {done.stderr}")
            ids.append(done.stdout.split(";")[0].strip())
            plain.append(seconds)
    finally:
        if ids:
            subprocess.run(["scancel", *ids], timeout=_TIMEOUT_S, check=False)
    above = [a - b for a, b in zip(ours, plain, strict=True)]
    return {
        "rounds": ROUNDS,
        "submit_s": round(statistics.median(ours), 4),
        "sbatch_s": round(statistics.median(plain), 4),
        "above_s": round(statistics.median(above), 4),
        "most_above_s": round(max(above), 4),
    }


def run() -> dict[str, Any]:
    """All three."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return {"place": plan_and_render(folder), "status": status(folder), "submit": submit(folder)}


def render(figures: dict[str, Any]) -> str:
    """The figures as lines."""
    place, looked, sent = figures["place"], figures["status"], figures["submit"]
    lines = [f"{'what':<56} {'median s':>9} {'slowest s':>10}"]

    def line(what: str, row: dict[str, float]) -> None:
        lines.append(f"{what:<56} {row['median_s']:>9.4f} {row['slowest_s']:>10.4f}")

    for layout in ("packed", "het"):
        row = place[layout]
        line(f"placed and rendered: {row['nodes']} nodes, {row['groups']} roles, {layout}", row)
    line("prime-hpc plan of it, as a process", place["plan"])
    asked = "squeue is asked" if looked["squeue"] else "no Slurm here"
    line(f"prime-hpc status, {looked['runs']} runs ({asked})", looked["default"])
    line(f"prime-hpc status --all, {looked['runs']} runs", looked["all"])
    if not sent:
        lines.append("submit: no Slurm here; run `slurm/devcluster x tools/bench launch`")
    else:
        both = f"prime-hpc submit {sent['submit_s']:.3f} s, plain sbatch {sent['sbatch_s']:.3f} s"
        above = f"{sent['above_s']:.3f} s above (most {sent['most_above_s']:.3f} s)"
        lines.append(f"{both}: {above}, {sent['rounds']} rounds in turn")
    return "\n".join(lines)
