"""prompts: files of prompts as tasks, without a score: a reply is a reply. One turn.

A row of a JSONL file holds `prompt` (a string, or a list of messages) or `messages`, and may hold `system`; all its
other fields are handed on to the row that its reply becomes.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.store.datafiles import find_data

__all__ = ["Prompts"]

_OWN = ("prompt", "messages", "system")


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
    """JSONL files, patterns or directories."""


class Prompts(vf.Taskset[PromptTask, PromptsConfig]):
    """The files' rows, in their order."""

    def load(self) -> Iterable[PromptTask]:
        """One task a row.

        Raises:
            EnvError: a file is not there, or a row is no prompt; names file and line.
        """
        if not self.config.files:
            raise EnvError("prompts: no file is named: state `--prompts FILE`, or `args.files` of the environment")
        try:
            found = find_data(SFTSourceConfig(path=self.config.files))
        except ValueError as error:
            raise EnvError(f"prompts: {error}") from error
        if found.kind != "jsonl":
            raise EnvError(f"prompts: {found.files[0]} is no JSONL file")
        for path in found.files:
            yield from (PromptTask(data, self.config.task) for data in _read(path))


def _read(path: Path) -> Iterator[PromptData]:
    reached = 0
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        try:
            for line in file:
                reached += 1
                if line.strip():
                    yield _data(json.loads(line, parse_constant=_refuse))
        except (ValueError, OSError, EOFError, zlib.error, ValidationError) as error:
            text = " ".join(str(error).split())[:300]
            raise EnvError(f"{path}, line {reached}: no prompt can be read ({text})") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON, and no row that is written could hold it")


def _data(row: Any) -> PromptData:
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    prompt = row.get("prompt") or row.get("messages")
    if not prompt:
        raise ValueError(f"it has no `prompt` or `messages`, but {', '.join(row) or 'nothing'}")
    rest = {name: value for name, value in row.items() if name not in _OWN}
    return PromptData(prompt=prompt, system_prompt=row.get("system"), handed_on=rest)
