"""An orchestrator by itself, against servers that run: for benchmarks of rollouts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]


def play(tree: dict[str, Any], key: str, run_s: float, **variables: str) -> dict[str, Any]:
    """Play one to its end; returns its `bench/orchestrator.json`.

    Args:
        tree: the experiment, which finds the servers' key in BENCH_KEY.
        run_s: longest that it may take.
        variables: of its environment.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    run_dir = Path(tree["output_dir"]) / tree["name"]
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps(tree))
    environment = os.environ | {"PYTHONPATH": f"{TOP}:{HERE}", "HF_HUB_OFFLINE": "1", "BENCH_KEY": key, **variables}
    argv = [sys.executable, "-m", "prime_hpc.cli", "orchestrator", "@", str(path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=run_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{tree['name']} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
    report: dict[str, Any] = json.loads((run_dir / "bench" / "orchestrator.json").read_text())
    return report
