"""How a run has ended that was asked to, and what it saved."""

from pathlib import Path

from prime_hpc.config import ConfigError
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.experiment import ALONE
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, read_record, read_rows
from prime_hpc.store.tinker_files import adapters_root


def last_row(run_dir: Path, job_id: str | None = None) -> AttemptRow | None:
    """Return the newest attempt, if it is this job's."""
    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    theirs = rows[-1].get("job_id") if rows else None
    return rows[-1] if rows and (theirs is None or job_id is None or str(theirs) == job_id) else None


def is_well(row: AttemptRow) -> bool:
    """Return whether an attempt saved and ended, as it was asked to; the exit code is that of one that could not."""
    return row.get("outcome") in ("stopped", "completed") and not row.get("exit_code")


def saved_step(run_dir: Path, job_id: str | None = None) -> int | None:
    """Return the step that the last attempt saved; None of a service, whose saves alone are counted."""
    is_service = adapters_root(run_dir).is_dir()
    return None if is_service else (last_row(run_dir, job_id) or {}).get("saved_step")


def has_saved(run_dir: Path, outcome: str | None) -> bool:
    """Return whether a run that ended so, when it was asked to save and end, left something to go on from."""
    if outcome != "stopped":
        return outcome == "completed"
    return saved_step(run_dir) is not None or not _has_checkpoints(run_dir)


def _has_checkpoints(run_dir: Path) -> bool:
    """Return whether what the run saves are steps of training: not episodes, nor what users of a service train."""
    from prime_hpc.config.snapshot import load_run

    try:
        experiment = load_run(run_dir)
    except ConfigError:
        return False
    return experiment.trains and not is_parent(experiment) and not adapters_root(run_dir).is_dir()


def _plays_alone(run_dir: Path) -> bool:
    return line_of(run_dir / RUN_YAML, "kind: ") in ALONE


def own_end(run_dir: Path, row: AttemptRow, step: int | None) -> tuple[str, str]:
    """Return outcome and note of a run that ended while it was asked to, with attempt `row`, which saved `step`: it
    need not have obeyed, nor had anything to save."""
    if row.get("outcome") == "completed" and step is None:
        return "stopped", "completed meanwhile"
    at = "" if step is None else f" at step {step}"
    saved = f"saved{at}" if at or not _has_checkpoints(run_dir) else "nothing to save yet"
    if _plays_alone(run_dir):
        saved = f"{step} episodes are kept" if step else "nothing to save yet"
    if is_well(row):
        return "stopped", f"{saved} and ended" if saved.startswith("saved") else f"ended; {saved}"
    if row.get("next") is not None and row.get("exit_code") == 0:  # at its time limit, or for a preemption
        return "stopped", f"{saved}; taken out of the queue"
    return "over", f"ended by itself: {row.get('outcome')} ({row.get('cause')}){newest_words(run_dir, step)}"


def newest_words(run_dir: Path, step: int | None) -> str:
    """Return what to go on from, for the end of a sentence."""
    if step is None:
        return ""
    return f"; {step} episodes are kept" if _plays_alone(run_dir) else f"; the newest checkpoint is step {step}"


def how_it_ended(run_dir: Path, rows: list[AttemptRow]) -> str:
    """Say why there is nothing to end, by a run's attempts and its submission."""
    record = read_record(run_dir) or SubmissionRecord()
    if rows and rows[-1].get("ended") is not None:
        return f"it is over already: {rows[-1].get('outcome')} ({rows[-1].get('cause')})"
    if rows and rows[-1].get("job_id") is None and rows[-1].get("host"):
        return f"its process {rows[-1].get('pid')} is not on this host ({rows[-1]['host']}) or is gone: nothing to end"
    if record.get("state") == "sending":
        return "its submission never reached Slurm: nothing to end"
    if record.get("state") == "failed":
        return "Slurm refused it: nothing to end"
    return "Slurm has no job of it (any more): nothing to end"
