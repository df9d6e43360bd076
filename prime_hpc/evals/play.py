"""Plays the episodes of one version: those that are missing, many at once, each recorded when it ends."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import xxhash

from prime_hpc.envs.held_out import as_json
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.evals.episodes import COMPLETED, FAILED, TIMEOUT, EpisodeLog, Key, Record
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.servers import Servers
from prime_hpc.evals.versions import Version
from prime_hpc.runtime.event_loops import task_group

OLD_VERSION = "OldVersion"
SERVER_ERRORS = frozenset({"ProviderError", "VersionSpanError", "AbortedGeneration", "BlockedLoop", OLD_VERSION})
"""Failures in which the episode is innocent: on own servers it is played again."""
REFUSALS = frozenset({"EndpointRefusedError"})
"""Failures that every further episode would share."""
MAX_PLAYS = 4


RecordMaker = Callable[[Record, EpisodeResult, Any], Record]
"""(record, result, task) -> the record that is kept; the task is None where it could not be made."""


def task_id(task: Any) -> str:
    """Sum over a task's data, without what its taskset says is no content: the arguments that it was loaded with.

    Raises EnvError where it cannot be told."""
    return xxhash.xxh3_64_hexdigest(as_json(task.data, set(getattr(type(task.data), "no_content", ()))).encode())


class Player:
    """Plays what is asked for; one at a time of `play` runs."""

    def __init__(
        self,
        pool: EnvPool,
        servers: Servers,
        log: EpisodeLog,
        *,
        max_concurrent: int,
        is_api: bool,
        kind: str = "eval",
        on_end: Callable[[Record], None] = lambda record: None,
        make_record: RecordMaker = lambda record, result, task: record,
    ) -> None:
        self._pool, self._servers, self._log = pool, servers, log
        self._sources = {source.name: (index, source) for index, source in enumerate(pool.sources)}
        self._max_concurrent = max_concurrent
        self._slots = asyncio.Semaphore(max_concurrent)
        """What plays holds one; what was played and is looked at does not, for it takes no seat of an engine."""
        self._is_api = is_api
        self._kind = kind
        self._on_end = on_end
        self._make_record = make_record

    async def play(self, version: Version, keys: Sequence[Key]) -> None:
        """Play these episodes and record each.

        Raises:
            EvalError: no further one can succeed (the API refuses us, no server answers).
            StoreError: a result cannot be written, or a newer attempt has begun.
        """
        self._slots = asyncio.Semaphore(self._max_concurrent)
        async with task_group() as tasks:
            for number, key in enumerate(keys):
                await self._slots.acquire()
                tasks.create_task(self._play_and_record(version, key), name=f"episode-{number}")

    async def _play_and_record(self, version: Version, key: Key) -> None:
        record = await self._episode(version, key)
        self._log.add(record)
        self._on_end(record)
        if self._log.is_sync_due:
            await asyncio.to_thread(self._log.sync)

    async def _play_in_slot(self, source_index: int, task_index: int) -> tuple[int, EpisodeResult | None]:
        """Play once, as `Servers.play` does, and give up the slot that is held."""
        try:
            return await self._servers.play(partial(self._pool.run_episode, source_index, task_index))
        finally:
            self._slots.release()

    async def _episode(self, version: Version, key: Key) -> Record:
        """Play an episode for which a slot is held, until it is one of the version."""
        index, source = self._sources[key.env]
        num_plays = 0
        while True:
            server, result = await self._play_in_slot(index, key.task)
            if result is None:  # its server is gone: no fault of the episode, nor of the model
                await self._slots.acquire()
                continue
            num_plays += 1
            error, reason = _judge(result, version, self._is_api)
            if error in ("", OLD_VERSION) and not await self._servers.still_serves(server) and not error:
                error, reason = OLD_VERSION, f"the server no longer says that it serves version {version.step}"
            if result.state is EpisodeState.CANCELLED:
                raise EvalError(f"the environments were closed: {result.reason}")
            if error in REFUSALS:
                raise EvalError(_refused(reason, self._kind))
            if error not in SERVER_ERRORS or self._is_api or num_plays == MAX_PLAYS:
                break
            self._servers.report(server)
            await self._slots.acquire()
        try:
            # an endless taskset's code may block, and a worker's process has made this one
            endless = source.num_tasks is None
            task = await asyncio.to_thread(source.task, key.task) if endless else source.task(key.task)
        except Exception:  # an endless taskset's code, which raises anything
            if not error:
                raise
            task = None  # the episode has failed of it, and says so
        identity = task_id(task) if task is not None else ""
        return self._make_record(_record(key, identity, result, error, reason), result, task)


def _judge(result: EpisodeResult, version: Version, is_api: bool) -> tuple[str, str]:
    """Class of the failure and its words; ("", "") of an episode that has a score."""
    if result.state is not EpisodeState.COMPLETED:
        return result.error_type or result.state.value, result.reason
    if is_api or set(result.versions) <= {version.step}:  # none: the others ended it before the policy's turn
        return "", ""
    found = sorted(set(result.versions))
    return OLD_VERSION, f"tokens of version {found} instead of {version.step}: the server came back without"


def _record(key: Key, identity: str, result: EpisodeResult, error: str, reason: str) -> Record:
    state = FAILED if error else COMPLETED
    if result.state is EpisodeState.TIMEOUT:
        state = TIMEOUT
    reward = {COMPLETED: result.reward, TIMEOUT: 0.0, FAILED: None}[state]
    return Record(
        *key,
        state=state,
        reward=reward,
        truncated=result.truncated,
        task_id=identity,
        prompt_tokens=result.num_prompt_tokens,
        completion_tokens=result.num_completion_tokens,
        seconds=round(result.duration_s, 3),
        reason=reason,
        error=error,
        metrics={name: round(value, 6) for name, value in result.metrics.items()},
        prompt=result.prompt_text,
        completion=result.completion_text,
    )


def _refused(reason: str, kind: str) -> str:
    hints = {
        " 401": f"set the environment variable that {kind}.client.api_key_var names to a key that is valid there",
        " 403": f"the key in the variable that {kind}.client.api_key_var names may not use this model",
        " 404": f"check {kind}.client.base_url (up to and with /v1) and the model's name ({kind}.client.model)",
    }
    hint = next((text for code, text in hints.items() if f"answered{code}" in reason), f"check {kind}.client")
    return f"the API refuses every request: {reason}; {hint}"
