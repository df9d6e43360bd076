"""`prime-hpc why RUN`: name who holds a run up now, and who waits for whom.

Exit codes: 0 nobody hangs; 1 somebody does, who is named first; 2 there is no such run, or the command line is wrong; 3
nothing runs that could be looked at: the run waits in the queue, is over, or was never started.
"""

from typing import Any

from prime_hpc.cli.common import parse
from prime_hpc.launch.monitor.who_hangs import ask_why, find_target, why_idle
from prime_hpc.supervisor.stalls.collect import text_of
from prime_hpc.supervisor.stalls.diagnose import PATIENCE_S

TIMEOUT_S = 30.0


def run(argv: list[str], program: str) -> int:
    """Say who holds the run up."""
    given = parse("why", argv)
    (word,) = given.arguments(1, least=1)
    patience_s = given.positive("--after") or PATIENCE_S
    timeout_s = given.positive("--timeout") or TIMEOUT_S
    target = find_target(word)
    if target.status is not None and (idle := why_idle(target.status)):
        document: dict[str, Any] = {"run": str(target.path), "headline": idle, "state": target.status.state}
        given.tell(lambda: document, lambda: idle)
        return 3
    document = ask_why(target, patience_s=patience_s, timeout_s=timeout_s)
    given.tell(lambda: document, lambda: text_of(document, with_stacks="--stacks" in given))
    return 1 if document["diagnosis"]["is_hang"] else 0
