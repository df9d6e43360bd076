"""Trial questions to `sbatch --test-only`: may this user submit to a partition? One node for one minute each.

    said = try_partitions(run_slurm, ["gpu", "cpu"], accounts=["rl"], with_gpus={"gpu"})
    said["gpu"]        # ["this user may submit here ...", "--mem=0: accepted", ...]

Nothing is submitted. Where `--test-only` is not answered, or the time is over, that is said and no more is asked.
"""

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.sbatch_errors import error_lines

QUESTION_S = 10.0
TOTAL_S = 60.0
"""No further question is asked after this: a site may have a hundred partitions."""
_MOST_ACCOUNTS = 4
_MOST_CHARACTERS = 200
_GPU_REQUESTS = ("--gres=gpu:1", "--gpus-per-node=1")
_MADE = re.compile(r"Submitted batch job (\d+)")


class Ask(Protocol):
    """Runs a Slurm command with a deadline in seconds; raises SlurmError. `client.run_slurm` is one."""

    def __call__(
        self, argv: Sequence[str], timeout_s: float, /, *, stdin: str | None = None, with_stderr: bool = False
    ) -> str:
        """Return what the command printed, with standard error behind it where that is asked for."""


class _NoMoreError(Exception):
    """No further question is asked, for this reason."""


class _Questions:
    """Asks about jobs until the time is over or nobody answers."""

    def __init__(self, ask: Ask, total_s: float, clock: Callable[[], float]) -> None:
        self._ask, self._clock, self._total_s = ask, clock, total_s
        self._end = clock() + total_s
        self.stopped = False

    def refusal(self, components: Sequence[Sequence[str]]) -> str | None:
        """Slurm's words against a job, whose components have these options; None: it is accepted."""
        if self._clock() >= self._end:
            self._stop(f"not asked: the questions before took {self._total_s:.0f} s")
        body = "\n#SBATCH hetjob\n".join("\n".join(f"#SBATCH {o}" for o in options) for options in components)
        try:
            said = self._ask(
                ["sbatch", "--test-only"], QUESTION_S, stdin=f"#!/bin/sh\n{body}\nexit 0\n", with_stderr=True
            )
        except SlurmError as error:
            if error.is_unreachable:
                self._stop(f"`sbatch --test-only` gave no answer, no more was asked: {_short(str(error))}")
            return _short(error_lines(error.stderr))
        if (made := _MADE.search(said)) is not None:
            self._undo(made[1])
        return None

    def _undo(self, job_id: str) -> None:
        """Cancel a job that a site's own sbatch made all the same, and ask no more."""
        try:
            self._ask(["scancel", job_id], QUESTION_S)
            fate = "it was cancelled"
        except SlurmError:
            fate = "cancel it"
        self._stop(f"this site's sbatch overlooks --test-only and made job {job_id} of one minute; {fate}")

    def _stop(self, why: str) -> None:
        self.stopped = True
        raise _NoMoreError(why)


def try_partitions(
    ask: Ask,
    partitions: Sequence[str],
    *,
    accounts: Sequence[str] = (),
    with_gpus: Collection[str] = (),
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[str]]:
    """Ask about a job in each partition.

    Args:
        ask: runs `sbatch --test-only`.
        accounts: of this user, tried where a job without one is refused.
        with_gpus: partitions whose nodes have GPUs: one is asked for where a job without is refused.
        total_s: no further question after so many seconds.

    Returns:
        Partition -> lines for people; of those that were not reached any more the first says why.
    """
    questions = _Questions(ask, total_s, clock)
    lines: dict[str, list[str]] = {}
    for name in partitions:
        said: list[str] = []
        try:
            _try(questions, name, list(accounts[:_MOST_ACCOUNTS]), name in with_gpus, said)
        except _NoMoreError as reason:
            said.append(str(reason))
        lines[name] = said
        if questions.stopped:
            break
    return lines


def _try(questions: _Questions, partition: str, accounts: list[str], has_gpus: bool, said: list[str]) -> None:
    common = [f"--partition={partition}", "--nodes=1", "--time=1"]
    refused: dict[str, str] = {}
    for gpus in ("", *_GPU_REQUESTS) if has_gpus else ("",):
        for account in (None, *accounts):
            more = [*([f"--account={account}"] if account else []), *([gpus] if gpus else [])]
            words = questions.refusal([[*common, *more]])
            if words is None:
                shown = "".join(f", {option}" for option in more)
                said.append(f"this user may submit here (sbatch --test-only: one node for a minute{shown})")
                if account:
                    said.append(f"without --account: refused: {refused[gpus]}")
                else:
                    said.append("without --account: accepted")
                return _variants(questions, [*common, *more], said)
            refused.setdefault(gpus, words)
    words = "; ".join(dict.fromkeys(refused.values()))
    said.append(f"this user may not submit here (sbatch --test-only: one node for a minute): {words}")
    return None


def _variants(questions: _Questions, base: list[str], said: list[str]) -> None:
    for name, components in (
        ("--mem=0", [[*base, "--mem=0"]]),
        ("--exclusive", [[*base, "--exclusive"]]),
        ("a het job", [base, base]),
    ):
        words = questions.refusal(components)
        said.append(f"{name}: accepted" if words is None else f"{name}: refused: {words}")


def _short(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 4]} ..."
