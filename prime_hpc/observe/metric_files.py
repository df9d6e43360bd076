"""The files of a run's metrics: JSON lines, one file a role."""

from pathlib import Path


def metrics_file(run_dir: Path, role: str) -> Path:
    """Return the file of what a role measures (`trainer`, `orchestrator`, `eval`, `synthesize`, `samples`), or of the
    roles' states (`roles`)."""
    return run_dir / "metrics" / f"{role}.jsonl"
