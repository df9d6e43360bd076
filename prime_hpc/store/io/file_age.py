"""How old a file is, by the clock of its file system: those of nodes differ."""

from pathlib import Path

from prime_hpc.store.io import files


def file_age_s(path: Path) -> float:
    """Seconds since a file was changed. Raises OSError: it is not there, or nothing can be written beside it."""
    probe = path.with_name(f".tmp-clock-{files.unique_suffix()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
