"""`tools/bench simulate`: `prime-hpc simulate` calibrated by one run, and by two, against the measured steps of others.

Real runs on this machine, one after the other: the `rl` command with its supervisor, engines of the `transformers`
backend, the orchestrator and an FSDP2 rank, on the starter model. They differ in async level, batch size, episodes in
flight and number of servers. Engines and trainer take the time of slower devices (`_stretched.py`), since on a few
cores they would take each other's; `--real` does the same without that, and shows by how much.

`PRIME_HPC_BENCH_ONLY=DIR` keeps the runs there, and takes those that lie there already. Also: seconds of the command
for 1,000 nodes of 8 GPUs, by the same calibration.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
DEADLINE_S = 3600.0
NUM_STEPS = 12
CASES: dict[str, dict[str, Any]] = {
    "level-2": {},
    "level-0": {"async_level": 0},
    "level-1": {"async_level": 1},
    "batch-64": {"orchestrator.batch_size": 64},
    "flight-16": {"orchestrator.max_concurrent": 16},
    "flight-64": {"orchestrator.max_concurrent": 64},
    "two-servers": {"inference.num_replicas": 2, "orchestrator.max_concurrent": 64},
}
VARIANTS = {"--real": "_simulate_real", "--splits": "_simulate_splits", "--slurm": "_simulate_slurm"}
CALIBRATIONS = (("level-2",), ("level-0",), ("level-2", "flight-16"))


def experiment(name: str, changes: dict[str, Any], model: Path, folder: Path, *, stretched: bool) -> dict[str, Any]:
    """The experiment of one case."""
    tree: dict[str, Any] = {
        "kind": "rl",
        "name": name,
        "output_dir": str(folder),
        "launch": "local",
        "max_steps": NUM_STEPS,
        "async_level": 2,
        "seq_len": 128,
        "model": {"name": str(model), "dtype": "float32"},
        "trainer": {"threads_per_rank": 1, "micro_batch_tokens": 2048, "optim": {"lr": 1e-5}},
        "orchestrator": {
            "batch_size": 32,
            "rollouts_per_example": 8,
            "max_concurrent": 32,
            "sampling": {"temperature": 1.0, "max_tokens": 48},
            "advantage": {"zero": "keep"},
            "env": [{"id": "reverse-text", "timeout_s": 300}],
        },
        "inference": {"backend": "transformers", "server": {"port": 0}, "cpu_threads": 1},
    }
    if stretched:
        changes = {
            "trainer.loss": {"type": "_stretched:slow_loss"},
            "inference.backend": "_stretched:STRETCHED",
        } | changes
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
    return tree


def measure(name: str, changes: dict[str, Any], model: Path, folder: Path, *, stretched: bool) -> None:
    """Do one run.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    tree = experiment(name, changes, model, folder, stretched=stretched)
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    environment |= {"PYTHONPATH": f"{TOP}:{HERE}"}
    log = folder / f"{name}.log"
    argv = [sys.executable, "-m", "prime_hpc.cli", "rl", "@", str(path)]
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=TOP)
        try:
            code = process.wait(DEADLINE_S)
        finally:
            process.terminate()
            process.wait(60)
    if code:
        raise RuntimeError(f"{name} failed ({code}):\n{log.read_text()[-3000:]}")


def compare(folder: Path, names: tuple[str, ...], cases: Iterable[str] = CASES) -> dict[str, Any]:
    """Calibrate by some cases and predict them all."""
    from prime_hpc.simulate.calibration import Calibration, calibrate
    from prime_hpc.simulate.events import simulate
    from prime_hpc.simulate.measured import read_measured

    runs = {name: read_measured(folder / name, name) for name in cases}
    calibration = calibrate([runs[name] for name in names])
    assert isinstance(calibration, Calibration), calibration
    rows = {}
    for name, run in runs.items():
        outcome = simulate(run.setting, calibration.costs, run.experiment.seed)
        measured = sum(run.step_s) / len(run.step_s)
        rows[name] = {
            "predicted_s": outcome.step_s,
            "measured_s": measured,
            "error": outcome.step_s / measured - 1,
            "trainer_idle": [outcome.trainer_idle, sum(run.wait_s) / sum(run.step_s)],
            "engines_idle": [outcome.engines_idle, sum(run.idle) / len(run.idle)],
            "lag": [outcome.lag, sum(run.lag) / len(run.lag)],
            "calibrates": name in names,
        }
    costs = {key: getattr(calibration.costs, key) for key in ("token_s", "shared_token_s", "train_token_s", "load_s")}
    return {"by": list(names), "rows": rows, "costs": costs}


def thousand_nodes(folder: Path) -> dict[str, float]:
    """Seconds of the whole command for 1,000 nodes of 8 GPUs, six shapes, and of an empty Python."""
    setting = ["--trainer.num-ranks", "2048", "--inference.data-parallel-size", "5952"]
    setting += ["--orchestrator.batch-size", "16384", "--orchestrator.max-concurrent", "65536"]
    argv = [sys.executable, "-m", "prime_hpc.cli", "simulate", str(folder / "level-2.yaml"), "--from"]
    found = {}
    for name, command in (
        ("simulate_s", [*argv, str(folder / "level-2"), *setting, "--json"]),
        ("python_s", [sys.executable, "-c", "import numpy, yaml, pydantic"]),
    ):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run(
                command, check=True, capture_output=True, cwd=TOP, env={**os.environ, "PYTHONPATH": f"{TOP}:{HERE}"}
            )
            times.append(time.perf_counter() - began)
        found[name] = sorted(times)[1]
    return found


def run(*, stretched: bool = True) -> dict[str, Any]:
    """All cases and comparisons."""
    from prime_hpc.starter.make import make_starter

    kept = os.environ.get("PRIME_HPC_BENCH_ONLY")
    loads: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-simulate-") as made:
        folder = Path(kept or made)
        folder.mkdir(exist_ok=True)
        make_starter(folder / "made", name="qwen3-tiny")
        for name, changes in CASES.items():
            if not (folder / name).is_dir():
                measure(name, changes, folder / "made" / "model", folder, stretched=stretched)
                loads[name] = os.getloadavg()[0]
        return {
            "num_cores": len(os.sched_getaffinity(0)),
            "stretched": stretched,
            "loads": loads,
            "comparisons": [compare(folder, names) for names in CALIBRATIONS],
            "thousand_nodes": thousand_nodes(folder),
        }


def render(result: dict[str, Any]) -> str:
    """The figures as tables."""
    kind = "times stretched" if result["stretched"] else "times as they are"
    lines = [f"whole RL loops of the starter model, {result['num_cores']} cores, {kind}", *comparison_lines(result)]
    times = result["thousand_nodes"]
    lines.append(
        f"1,000 nodes of 8 GPUs, all shapes: {times['simulate_s']:.2f} s (imports alone {times['python_s']:.2f} s)"
    )
    return "\n".join(lines)


def comparison_lines(result: dict[str, Any]) -> list[str]:
    """Each calibration's predictions beside what was measured."""
    lines: list[str] = []
    for comparison in result["comparisons"]:
        lines += [
            f"calibrated by {' and '.join(comparison['by'])}",
            f"  {'run':<20}{'predicted':>10}{'measured':>10}{'error':>8}   trainer idle   engines idle   lag",
        ]
        for name, row in comparison["rows"].items():
            idle = [f"{100 * row[key][0]:.0f} / {100 * row[key][1]:.0f} %" for key in ("trainer_idle", "engines_idle")]
            load = result["loads"].get(name)
            lines.append(
                f"  {name + (' (its own)' if row['calibrates'] else ''):<28}{row['predicted_s']:>8.3g}s"
                f"{row['measured_s']:>8.3g}s{100 * row['error']:>+7.0f}%{idle[0]:>15}{idle[1]:>15}"
                f"{row['lag'][0]:>7.2f} / {row['lag'][1]:.2f}{'' if load is None else f'   load {load:.1f}'}"
            )
    return lines
