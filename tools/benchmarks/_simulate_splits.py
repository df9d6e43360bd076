"""`tools/bench simulate --splits`: four devices shared out between trainer and engines in all three ways, real runs one
after the other, and which of these `simulate` and the end of an attempt name from each of them.

The trainer takes four times as long as in the other cases, so that neither end is the best.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from simulate import measure

TARGET_S = "0.004"
SPLITS = {f"{ranks}+{4 - ranks}": (ranks, 4 - ranks) for ranks in (1, 2, 3)}


def run() -> dict[str, Any]:
    """Measured and predicted seconds of a step, and what is named best."""
    from prime_hpc.simulate.calibration import Calibration, calibrate
    from prime_hpc.simulate.events import simulate
    from prime_hpc.simulate.measured import read_measured
    from prime_hpc.starter.make import make_starter
    from prime_hpc.supervisor.attempt.device_split import best_split

    os.environ["PRIME_HPC_BENCH_TARGET_S"] = TARGET_S
    kept = os.environ.get("PRIME_HPC_BENCH_ONLY")
    with tempfile.TemporaryDirectory(prefix="bench-splits-") as made:
        folder = Path(kept or made)
        folder.mkdir(exist_ok=True)
        make_starter(folder / "made", name="qwen3-tiny")
        for name, (ranks, engines) in SPLITS.items():
            if not (folder / name).is_dir():
                changes = {"trainer.num_ranks": ranks, "inference.num_replicas": engines}
                measure(name, changes, folder / "made" / "model", folder, stretched=True)
        runs = {name: read_measured(folder / name, name) for name in SPLITS}
    measured = {name: sum(each.step_s) / len(each.step_s) for name, each in runs.items()}
    rows = {}
    for name, each in runs.items():
        calibration = calibrate([each])
        assert isinstance(calibration, Calibration), calibration
        predicted = {
            other: simulate(there.setting, calibration.costs, there.experiment.seed).step_s
            for other, there in runs.items()
        }
        idle = sum(each.wait_s) / sum(each.step_s), sum(each.idle) / len(each.idle)
        found = best_split(*SPLITS[name], trainer_idle=idle[0], engines_idle=idle[1], overlap=True)
        rows[name] = {
            "predicted_s": predicted,
            "best": min(predicted, key=lambda split: predicted[split]),
            "trainer_idle": idle[0],
            "engines_idle": idle[1],
            "suggested": f"{found[0]}+{found[1]}",
        }
    return {"measured_s": measured, "best": min(measured, key=lambda split: measured[split]), "by": rows}


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    names = list(result["measured_s"])
    lines = [
        "four slowed devices as trainer + engines, seconds a step",
        f"{'':<24}" + "".join(f"{name:>10}" for name in names) + "      best",
        f"{'measured':<24}" + "".join(f"{result['measured_s'][n]:>10.3g}" for n in names) + f"{result['best']:>10}",
    ]
    for name, row in result["by"].items():
        idle = f"{100 * row['trainer_idle']:.0f} and {100 * row['engines_idle']:.0f} % idle"
        lines.append(
            f"{'predicted from ' + name:<24}"
            + "".join(f"{row['predicted_s'][n]:>10.3g}" for n in names)
            + f"{row['best']:>10}   its end says {row['suggested']} ({idle})"
        )
    return "\n".join(lines)
