"""`python -m prime_hpc.trainer.replay`, see the package. Exit codes: 0 done; 1 a step was refused; 2 wrong usage."""

import argparse
import sys
import tempfile
from pathlib import Path

from prime_hpc.store.batches import list_batches
from prime_hpc.store.run_paths import RunPaths


def main(arguments: list[str] | None = None) -> int:
    """Train again; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.trainer.replay")
    parser.add_argument("run_dir", type=Path, help="the run, or RUN/failed/step_<n>")
    parser.add_argument("scratch", type=Path, nargs="?", help="of a run: directory for what this writes")
    parser.add_argument("--after", type=int, default=0, help="0: the base model; else the step of a checkpoint")
    parser.add_argument("--until", type=int, help="last step; absent: it is a kept step")
    options = parser.parse_args(arguments)
    if options.until is not None:
        if options.scratch is None:
            parser.error("--until needs SCRATCH")
        from prime_hpc.trainer.replay.replay import run_steps

        return 0 if run_steps(options.run_dir, options.scratch, options.after, options.until) else 1
    kept = RunPaths(options.run_dir)
    if len(list_batches(kept)) != 1 or not kept.run_yaml.exists():
        print(f"error: {kept.root} holds no kept step: expected RUN_DIR/failed/step_<n>", file=sys.stderr)
        return 2
    from prime_hpc.trainer.replay.replay import kept_step

    with tempfile.TemporaryDirectory(prefix="prime-hpc-replay-") as scratch:
        return 0 if kept_step(kept, options.scratch or Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
