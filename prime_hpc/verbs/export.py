"""`prime-hpc export RUN`: the run's rollouts as one Parquet file.

Exit codes: 0 written; 2 there is nothing to export, or pyarrow is not installed.
"""

from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.verbs.common import print_json, refuse_unknown, take_flags

USAGE = "prime-hpc export RUN [--output FILE.parquet] [--steps A:B] [--compression zstd|snappy|gzip|none] [--json]"


def run(argv: list[str], program: str) -> int:
    """Export; prints what was written."""
    rest, given, values = take_flags(argv, ("--json",), ("--output", "--steps", "--compression"))
    refuse_unknown(rest, 1, USAGE)
    if not rest:
        raise ConfigError(f"name the run; usage: {USAGE}")
    from prime_hpc.config import load_run
    from prime_hpc.launch.runs import find_run
    from prime_hpc.store.batches import list_batches
    from prime_hpc.store.errors import StoreError
    from prime_hpc.store.export import COMPRESSIONS, export_batches
    from prime_hpc.store.layout import RunPaths

    run_dir = find_run(rest[0])
    paths = RunPaths(run_dir)
    steps = _chosen(values.get("--steps"), list_batches(paths), run_dir)
    output = Path(values.get("--output") or run_dir / "rollouts.parquet")
    compression = values.get("--compression", "zstd")
    if compression not in COMPRESSIONS:
        raise ConfigError(f"--compression {compression}: must be one of {', '.join(COMPRESSIONS)}")
    names = [env.name or env.id for env in load_run(run_dir).orchestrator.env]
    try:
        done = export_batches(paths, steps, output, names, compression=compression)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    if "--json" in given:
        facts = {"path": str(done.path), "steps": [steps[0], steps[-1]], "num_steps": done.num_steps}
        facts |= {"num_sequences": done.num_sequences, "num_tokens": done.num_tokens, "num_bytes": done.num_bytes}
        print_json(facts)
    else:
        print(
            f"{done.path}: {done.num_sequences:,} sequences, {done.num_tokens:,} tokens of {done.num_steps} steps, "
            f"{done.num_bytes / 2**20:.1f} MiB ({done.num_bytes / max(done.num_tokens, 1):.1f} bytes a token)"
        )
    return 0


def _chosen(text: str | None, there: list[int], run_dir: Path) -> list[int]:
    """The stored steps within `A:B`, `A:`, `:B` or `A`."""
    if not there:
        raise ConfigError(f"{run_dir}: no rollouts are stored")
    if text is None:
        return there
    first, colon, last = text.partition(":")
    if not all(part.isdigit() for part in (first, last) if part) or text in ("", ":"):
        raise ConfigError(f"--steps {text}: must be A:B, A:, :B or A")
    low = int(first or there[0])
    high = int(last or there[-1]) if colon else low
    chosen = [step for step in there if low <= step <= high]
    if not chosen:
        raise ConfigError(f"--steps {text}: there are {there[0]}..{there[-1]}")
    return chosen
