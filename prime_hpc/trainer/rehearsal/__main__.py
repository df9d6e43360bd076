"""`python -m prime_hpc.trainer.rehearsal RUN_DIR`: rehearse the experiment in RUN_DIR/run.yaml.

The report is one JSON object, the last line of standard output. Exit code 1 with the reason on standard error.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a rehearsal downloads nothing

from prime_hpc.config import load_run
from prime_hpc.trainer.rehearsal.rehearse import rehearse


def main(argv: list[str]) -> int:
    """Rehearse and report."""
    if len(argv) != 1:
        print("usage: python -m prime_hpc.trainer.rehearsal RUN_DIR", file=sys.stderr)
        return 2
    from loguru import logger

    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="{message}")
    warnings.simplefilter("ignore")
    try:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            report = rehearse(load_run(Path(argv[0])), Path(folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
