"""Episodes with their conversations on disk; in memory what the filters look at."""

import json
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from prime_hpc.envs.samples import EpisodeResult
from prime_hpc.evals.episodes import EpisodeLog, Key, Record, parse_record
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_paths import RunPaths

THINK_BEGIN, THINK_END = "<think>", "</think>"
CALL_BEGIN = re.compile(r"<[|\uff5c\w:]*tool[_\u2581]call")
"""Of a call that could not be read: of others nothing is left in the text."""
HANDED_ON = "handed_on"
"""Field of a task's data that goes into its rows."""
_LOOKED_AT = ("reward", "completion_tokens", "parsed", "digest")


@dataclass(frozen=True, slots=True)
class Sampled(Record):
    """One episode, with what it said."""

    conversations: list[dict[str, Any]] = field(default_factory=list)
    """`conversations_of` the episode, each with `parsed` and `digest`, a sum over its messages and tools."""
    handed_on: dict[str, Any] | None = None
    """Fields that the task hands on to its rows."""


def sampled(record: Record, result: EpisodeResult, task: Any) -> Sampled:
    """Return a record with the conversations of its result; texts for people would say them again."""
    told = {f.name: getattr(record, f.name) for f in fields(Record)} | {"prompt": "", "completion": ""}
    judged = [row | {"parsed": is_parsed(row["messages"]), "digest": digest(row)} for row in result.conversations]
    return Sampled(**told, conversations=judged, handed_on=getattr(getattr(task, "data", None), HANDED_ON, None))


def digest(row: dict[str, Any]) -> str:
    """Sum over what is said and the tools; the ids of calls do not count."""
    said = [
        {k: _without_ids(v) for k, v in message.items() if k not in ("tool_call_id", "train")}
        for message in row["messages"]
    ]
    text = json.dumps([said, row.get("tools")], sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def _without_ids(value: Any) -> Any:
    are_calls = isinstance(value, list) and value and "function" in value[0]
    return [call["function"] for call in value] if are_calls else value


def is_parsed(messages: list[dict[str, Any]]) -> bool:
    """Return whether every reply of the model says or calls something, ends its thoughts, and calls with an object."""
    return all(_is_reply(m) for m in messages if m["role"] == "assistant" and m.get("train", True))


def _is_reply(message: dict[str, Any]) -> bool:
    content, calls = message.get("content") or "", message.get("tool_calls", [])
    said = content.rpartition(THINK_END)[2] if isinstance(content, str) else content
    if isinstance(said, str) and CALL_BEGIN.search(said):
        return False
    if THINK_BEGIN in said or not (calls or (said.strip() if isinstance(said, str) else said)):
        return False
    try:
        return all(isinstance(json.loads(call["function"]["arguments"] or "{}"), dict) for call in calls)
    except (RecursionError, ValueError):
        return False


class SampledLog(EpisodeLog):
    """The file of a run of `synthesize`; conversations stay on the disk, to be read again one by one."""

    record_type = Sampled

    def __init__(self, paths: RunPaths, incarnation: int) -> None:
        """Read what is there; see `EpisodeLog`."""
        self._starts: dict[Key, int] = {}
        super().__init__(paths, incarnation)

    def _index(self, record: Record, start: int) -> None:
        assert isinstance(record, Sampled)
        self._starts[record.key] = start
        small = [{name: row.get(name) for name in _LOOKED_AT} for row in record.conversations]
        self.records[record.key] = replace(record, conversations=small, handed_on=None)

    def read(self, key: Key) -> Sampled:
        """Return an episode with its conversations. Raises StoreError: the file has changed under us."""
        with self.path.open("rb") as file:
            file.seek(self._starts[key])
            record = parse_record(file.readline(), Sampled)
        if not isinstance(record, Sampled) or record.key != key:
            raise StoreError(
                f"{self.path}: no longer holds {key} where it was written: has another process changed it?"
            )
        return record
