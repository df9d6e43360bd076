"""`prime-hpc cancel RUN ...`: end runs; each saves first, unless told not to.

Exit codes: 0 nothing of them waits or runs any more, 1 one is still ending, 2 no such run, or one that is being
submitted, 3 Slurm cannot be reached.
"""

import sys

from prime_hpc.cli.common import parse, print_json, say
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.cancel import cancel_run
from prime_hpc.store.run_dirs import find_run

TIMEOUT_S = 600.0


def run(argv: list[str], program: str) -> int:
    """Cancel each; what goes wrong with one does not keep the others."""
    given = parse("cancel", argv)
    timeout_s = given.positive("--timeout") or TIMEOUT_S
    run_dirs = [find_run(word) for word in given.arguments(len(argv), least=1)]  # all of them exist before any is ended
    results, code = [], 0
    for run_dir in run_dirs:
        try:
            ended = cancel_run(run_dir.resolve(), now="--now" in given, timeout_s=timeout_s, say=say)
        except ConfigError as error:
            print(f"{program}: {error.render()}", file=sys.stderr)
            results.append({"run_dir": str(run_dir), "ended": False, "outcome": "unknown", "note": str(error)})
            code = max(code, error.exit_code)
            continue
        results.append(ended.as_dict())
        code = max(code, 0 if ended.ended else 1)
        if "--json" not in given:
            print(f"{run_dir}: {ended.note}", flush=True)
    if "--json" in given:
        print_json(results)
    return code
