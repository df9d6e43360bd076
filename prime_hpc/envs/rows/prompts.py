"""prompts: files of prompts as tasks, without a score: a reply is a reply. One turn.

A row of a JSONL or Parquet file holds `prompt` (a string, or a list of messages) or `messages`, or `question`,
`instruction` (with Alpaca's `input`) and their like, and may hold `system`; all its other fields are handed on to the
row that its reply becomes. Images: `rows/shown.py`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.rows.reading import PROMPTS, Row, prompt_column, prompt_in, read_files, system_in, why_refused
from prime_hpc.envs.rows.shown import with_images

__all__ = ["Prompts"]


class PromptData(vf.TaskData):
    """One prompt."""

    handed_on: dict[str, Any] = {}
    """The row's other fields."""


class PromptTask(vf.Task[PromptData]):
    """Has no right answer."""

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        """1 for any text."""
        return float(bool(trace.last_reply.strip()))


class PromptsConfig(vf.TasksetConfig):
    """Arguments of `prompts`."""

    files: list[str] = []
    """JSONL or Parquet files, patterns or directories."""


class Prompts(vf.Taskset[PromptTask, PromptsConfig]):
    """The files' rows, in their order."""

    differ_in_data: Literal[True] = True

    def load(self) -> Iterable[PromptTask]:
        """One task a row. Raises EnvError: a file is not there, or a row is no prompt; names file and line."""
        if not self.config.files:
            raise EnvError("prompts: no file is named: state `--prompts FILE`, or `args.files` of the environment")
        for place, folder, row in read_files(self.config.files, "prompts"):
            try:
                data = _data(row, folder)
            except ValueError as error:
                raise EnvError(f"{place}: no prompt can be read ({why_refused(error)})") from error
            yield PromptTask(data, self.config.task)


def _data(row: Row, folder: Path | None) -> PromptData:
    column = prompt_column(row)
    if column is None:
        raise ValueError(f"it has none of {', '.join(PROMPTS)}, but {', '.join(row) or 'nothing'}")
    prompt = prompt_in(row, column)
    if not isinstance(row.get("system"), str | None):
        raise ValueError(f"`system` is a text, got {row['system']!r:.120}")
    system = system_in(row, prompt)
    prompt, images = with_images(prompt, row, folder)
    rest = {name: value for name, value in row.items() if name not in ("system", column, images)}
    rest = json.loads(json.dumps(rest), parse_constant=lambda _: None)  # Parquet's NaN, which no line of JSON can hold
    return PromptData(prompt=prompt, system_prompt=system, handed_on=rest)
