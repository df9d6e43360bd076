"""`prime-hpc eval`: evaluate in the foreground, or compare two evaluations that are there.

Exit codes: 0 done, 1 it failed (or too many episodes did; the results are there), 2 wrong usage or config,
130 interrupted; started again, it goes on with the episodes that are missing.
"""

import json
import sys

from prime_hpc.cli.common import load, print_json, refuse_unknown, take_flags
from prime_hpc.config.errors import ConfigError

COMPARE = "--compare"
USAGE = "eval --compare RUN_A[@STEP] RUN_B[@STEP] [--json]"


def run(argv: list[str], program: str) -> int:
    """Do it; returns the exit code. Raises ConfigError."""
    rest, given, _ = take_flags(argv, switches=("--json", COMPARE))
    if COMPARE in given:
        return _compare(rest, "--json" in given)
    loaded = load(rest, "eval", program)
    from prime_hpc import launch

    if "--json" not in given:
        return launch.run(loaded)
    code = _with_stdout_aside(lambda: launch.run(loaded))
    path = loaded.experiment.run_dir / "results" / "summary.json"
    if path.is_file():
        print_json(json.loads(path.read_text(encoding="utf-8")))
    return code


def _with_stdout_aside(call):  # type: ignore[no-untyped-def]
    """Standard output is for the JSON alone; what the run says meanwhile goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        return call()
    finally:
        sys.stdout = out


def _compare(rest: list[str], as_json: bool) -> int:
    refuse_unknown(rest, 2, USAGE)
    if len(rest) != 2:
        raise ConfigError(f"two evaluations are compared; usage: {USAGE}")
    from prime_hpc.evals.compare import compare, lines, read_side

    found = compare(read_side(rest[0]), read_side(rest[1]))
    if as_json:
        print_json(found)
    else:
        print("\n".join(lines(found)))
    return 0
