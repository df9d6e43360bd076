"""Teachers that score the policy's tokens for distillation: a frozen teacher's servers, which the run starts or others
have, or the policy itself, shown the answer. One with a tokenizer of its own (`cross_tokenizer`) reads the same text.

`loop` begins the scores of an episode when it ends, so that they come while others are still played, and collects those
of a batch before it is assembled. Every sequence is asked for until `deadline_s`, at one server after the other. A
rollout that cannot be scored (too long for the teacher, with what that is shown) is one that failed.

Also here: `FrozenServer`, a server whose weights nobody changes, for runs whose teacher samples (`advantage = sft`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.client.inference import InferenceClient, InferenceError, TopTokens
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms.scorer import References
from prime_hpc.orchestrator.cross_tokenizer.reading import TeacherReader
from prime_hpc.orchestrator.cross_tokenizer.token_bytes import UnreadableError
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.runtime.event_loops import loop_time

RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between tries; the last one repeats."""
_WORTH_ANOTHER_TRY = (408, 429)
_OF_THE_SEQUENCE = (400, 413, 422)
"""Statuses that refuse one sequence and say nothing of others."""
_ROUNDING = 1e-9
"""A reward of 0.1 + 0.2 has reached 0.3."""
_NUM_SHOWN = 16
"""Tasks of each environment whose demonstrations are measured beforehand."""


@dataclass(frozen=True)
class Score:
    """The teacher's word on a sample."""

    logprobs: NDArray[np.float32]
    """float32[L]"""
    top: TopTokens | None = None
    """Its likeliest tokens, where these are asked for."""
    gaps: NDArray[np.float32] | None = None
    """float32[L], as `Sample.teacher_gaps`."""


class _RefusedError(Exception):
    """There is no score of this sample; says why."""


Prefix = Callable[[int, int], Sequence[int]]
"""(source, task) -> tokens that the teacher sees before the sample's own."""


@dataclass(frozen=True)
class Peers:
    """How rollouts that succeeded are shown to the others of their group."""

    lead: Callable[[str], Sequence[int]]
    """Text of a rollout -> tokens that the teacher sees before the others' own."""
    success: float
    """The reward from which on a rollout has succeeded."""

    def of(self, index: int, slots: Sequence[Episode | None]) -> str:
        """Return the text of the first rollout but `index` that succeeded; empty where none has."""
        others = [slot.result for j, slot in enumerate(slots) if j != index and slot is not None and slot.usable]
        texts = [other.completion_text for other in others if other.reward >= self.success - _ROUNDING]
        return next(filter(None, texts), "")


class Teacher:
    """Log-probabilities of sampled tokens under another model, or under the same one with more to see."""

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        name: str,
        *,
        deadline_s: float,
        max_concurrent: int,
        prefix: Prefix | None = None,
        peers: Peers | None = None,
        top_k: int = 0,
        reader: TeacherReader | None = None,
    ) -> None:
        """Args:
        name: under which these serve it.
        deadline_s: for one sequence, all tries together.
        max_concurrent: sequences asked for at once.
        prefix: what it sees beforehand; None: nothing, but for `peers`.
        peers: it sees other rollouts of the group, once that is complete (`begin_complete`).
        top_k: its likeliest tokens at every trained place are asked for, too, and become arrays of the samples.
        reader: of a teacher that has a tokenizer of its own.
        """
        self._clients, self._name, self._deadline_s = list(clients), name, deadline_s
        self._prefix, self._room, self._turn, self._top_k = prefix, asyncio.Semaphore(max_concurrent), 0, top_k
        self._peers, self._num_shown, self._num_collected = peers, 0, 0
        self._shown: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
        """Rollouts of a group that have a peer to be shown."""
        self._reader = reader
        self._pending: WeakKeyDictionary[Group, dict[int, list[asyncio.Task[Score | str]]]]
        self._pending = WeakKeyDictionary()
        self._length_limit: int | None = None
        self.num_retries = 0
        self._num_refused = 0

    @property
    def is_other(self) -> bool:
        """True if it is another model than the policy."""
        return self._prefix is None and self._peers is None

    def move(self, index: int, url: str) -> None:
        """Use another address: the server is being started again there."""
        self._clients[index].move(url)

    async def check(self, longest: int, ready_timeout_s: float | None = None) -> None:
        """Ask every server for a sequence of `longest` tokens' room, once, before anything is sampled.

        Args:
            longest: sample, in tokens.
            ready_timeout_s: for a server that is being started; default: the deadline of a score.

        Raises:
            OrchestratorError: unknown model, too short a context, or no answer within the deadline.
        """
        for client in self._clients:
            await client_ready(client, ready_timeout_s or self._deadline_s)
            try:
                served = await client.model_lengths()
            except InferenceError as error:
                raise OrchestratorError(f"orchestrator.teacher: {error}") from error
            if self._name not in served:
                raise OrchestratorError(
                    f"orchestrator.teacher.served_name = {self._name}: {client.base_url} serves {', '.join(served)}"
                )
            room = served[self._name]
            if room is not None and room <= longest and self._reader is None:
                raise OrchestratorError(
                    f"orchestrator.teacher: {client.base_url} takes {room} tokens; scoring samples of seq_len = "
                    f"{longest} needs a max_model_len of {longest + 1} or more there"
                )
            await self._check_top(client)

    async def _check_top(self, client: InferenceClient) -> None:
        """Ask once for as many log-probabilities a token as will be asked for.
        Raises OrchestratorError: the server has a lower limit."""
        if not self._top_k:
            return
        try:
            await client.score_top([0, 1], self._name, self._top_k, [False, True])
        except InferenceError as error:
            if error.status not in _OF_THE_SEQUENCE:
                return  # it is brought back, or named by the first score
            raise OrchestratorError(
                f"trainer.loss.distillation.top_k = {self._top_k}: {client.base_url} gives fewer log-probabilities a "
                f"token: start it with --max-logprobs {self._top_k} (prime-hpc's own `inference` with "
                f"--inference.vllm.max_logprobs {self._top_k}), or lower top_k. Its words: {error}"
            ) from error

    async def check_room(self, longest: int, num_tasks: Sequence[int | None]) -> None:
        """Of the policy as its own teacher, once its servers answer: is there room for what it is shown?

        Args:
            longest: sample, in tokens.
            num_tasks: of each environment, None of an endless one; the first few tasks are measured.

        Raises:
            OrchestratorError: not even the demonstration fits.
            EnvError: a task has nothing to show.
        """
        limits: list[int] = []
        for client in self._clients:
            await self._check_top(client)
            try:
                served = await client.model_lengths()
            except InferenceError:
                continue  # it was ready a moment ago, and is brought back; the others' limit is its own
            limits += [served[self._name] or 0] if self._name in served else [n or 0 for n in served.values()]
        self._length_limit = min((n for n in limits if n), default=None)
        if self._peers is not None:
            self._peers.lead("")  # a chat template that refuses such a message does so now
        if self._prefix is None:
            return  # what is shown is not known yet, and nobody counts as failed for want of room
        counts = [min(_NUM_SHOWN, n or _NUM_SHOWN) for n in num_tasks]
        shown = max(len(self._prefix(source, task)) for source, n in enumerate(counts) for task in range(n))
        limit, needed = self._length_limit, longest + shown + 1
        if limit is None or limit >= needed:
            return
        text = (
            f"the policy's servers take {limit} tokens; with a demonstration of {shown} tokens before a sample of "
            f"seq_len = {longest}, scoring takes {needed}: set inference.max_model_len to that"
        )
        if limit <= shown + 1:
            raise OrchestratorError(f"orchestrator.advantage.type = opsd: {text}")
        logger.warning(f"{text}, or every rollout of more than {limit - shown - 1} tokens counts as failed")

    def begin(self, group: Group, index: int, episode: Episode) -> Episode:
        """Start the scores of `group.slots[index]`, but for those that wait for the whole group; returns the episode,
        unusable where it is known to be too long."""
        if self._peers is not None:
            return episode
        samples, limit = episode.result.samples, self._length_limit
        if limit is not None and self._prefix is not None and samples:
            shown = len(self._prefix(group.prompt.source, group.prompt.task))
            length = shown + max(sample.num_tokens for sample in samples) + 1
            if length > limit:
                return _unusable(episode, f"the teacher takes {limit} tokens, not the {length} of a score")
        self._start(group, index, samples, self._prefix(group.prompt.source, group.prompt.task) if self._prefix else [])
        return episode

    def begin_complete(self, group: Group) -> None:
        """Start the scores that have waited for the group's last episode: of each one that has a peer to be shown; with
        `top_k` of the others, too, without."""
        if self._peers is None:
            return
        leads: dict[str, Sequence[int]] = {"": []}
        for i, slot in enumerate(group.slots):
            if slot is None or not slot.usable:
                continue
            text = self._peers.of(i, group.slots)
            if text not in leads:
                leads[text] = self._peers.lead(text)
            longest = max((sample.num_tokens for sample in slot.result.samples), default=0)
            fits = self._length_limit is None or len(leads[text]) + longest + 1 <= self._length_limit
            before = leads[text] if fits else []
            if len(before) or self._top_k:
                self._start(group, i, slot.result.samples, before)
            self._shown[group] = self._shown.get(group, 0) + bool(before)

    def _start(self, group: Group, index: int, samples: Sequence[Sample], before: Sequence[int]) -> None:
        tasks = [asyncio.create_task(self._score(before, sample), name="teacher") for sample in samples]
        self._pending.setdefault(group, {})[index] = tasks

    def drain_metrics(self) -> dict[str, float]:
        """Return figures since the last call: rollouts that could not be scored and do not train; the share that was
        shown a peer, where peers are shown."""
        row: dict[str, float] = {"teacher/refused": self._num_refused}
        if self._peers is not None:
            row["teacher/shown"] = self._num_shown / max(self._num_collected, 1)
        self._num_refused = self._num_shown = self._num_collected = 0
        return row

    def discard(self, group: Group) -> None:
        """Nobody will ask for this group's."""
        for task in [t for tasks in self._pending.pop(group, {}).values() for t in tasks]:
            task.cancel()

    async def collect(self, groups: Sequence[Group]) -> list[References]:
        """For each group, for its usable episodes in order, float32[L] of each sample; nothing for a group without
        tokens. An episode that a server refuses to score becomes unusable. The teacher's likeliest tokens, where they
        are asked for, go into the groups' samples.

        Raises:
            OrchestratorError: no server answered in time, or none of the episodes could be scored; says why.
            EnvError: a task has nothing to show (`prefix`).
        """
        found: list[References] = []
        refused: list[str] = []
        for group in groups:
            tasks, rows = self._pending.pop(group, {}), []
            self._num_shown += self._shown.pop(group, 0)
            for i, slot in enumerate(group.slots):
                if slot is None or not slot.usable:
                    continue
                self._num_collected += 1
                if self._peers is not None and i not in tasks:  # shown nothing, the teacher is the policy itself
                    rows.append([sample.logprobs for sample in slot.result.samples])
                    continue
                scores = [await task for task in tasks.get(i, [])]
                wrong = [score for score in scores if isinstance(score, str)]
                if wrong:
                    refused += wrong[:1]
                    group.slots[i] = _unusable(slot, wrong[0])
                    continue
                known = [score for score in scores if not isinstance(score, str)]
                rows.append([score.logprobs for score in known])
                if self._top_k or self._reader is not None:
                    group.slots[i] = _taught_by(slot, known)
            found.append(rows if group.has_tokens else [])
        self._num_refused += len(refused)
        if refused:
            if not any(found):
                raise OrchestratorError(refused[0])
            logger.warning(f"{len(refused)} rollouts do not train: {refused[0]}")
        return found

    async def close(self) -> None:
        """Cancel what is still asked for."""
        tasks = [t for by_index in list(self._pending.values()) for ts in by_index.values() for t in ts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.is_other:
            for client in self._clients:
                await client.close()

    async def _score(self, shown: Sequence[int], sample: Sample) -> Score | str:
        """Return what the teacher says of a sample, or why it says nothing."""
        try:
            if self._reader is not None:
                reading = await self._reader.read(sample)
                found = [(await self._ask(np.asarray(ids, np.int32)))[0] for ids in reading.sequences]
                scores, gaps = reading.scores_of(sample, found)
                return Score(scores, gaps=gaps)
            before = np.asarray(shown, np.int32)
            wanted = np.concatenate([np.zeros(len(before), bool), sample.loss_mask])
            wanted[len(before)] = False  # nothing predicts it in the sample itself
            scores, top = await self._ask(np.concatenate([before, sample.token_ids]), wanted)
        except UnreadableError as error:
            return f"the teacher cannot be given a rollout: {error}"
        except _RefusedError as error:
            return str(error)
        own = scores[len(before) :].copy()
        own[0] = 0.0
        return Score(own, top)

    async def _ask(
        self, sequence: NDArray[np.int32], wanted: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], TopTokens | None]:
        """Return the teacher's log-probabilities of a sequence, and its likeliest tokens where they are `wanted`.
        Raises _RefusedError: it takes no such sequence. Raises OrchestratorError: no answer within the deadline."""
        tries = 0
        async with self._room:
            end = loop_time() + self._deadline_s
            while True:
                client = self._clients[self._turn % len(self._clients)]
                self._turn += 1
                try:
                    if self._top_k and wanted is not None:
                        return await client.score_top(sequence, self._name, self._top_k, wanted)
                    return await client.score(sequence, self._name), None
                except InferenceError as error:
                    pause = RETRY_S[min(tries, len(RETRY_S) - 1)]
                    final = error.status is not None and error.status < 500 and error.status not in _WORTH_ANOTHER_TRY
                    if final or loop_time() + pause > end:
                        reason = (
                            f"the teacher gave no log-probabilities of a sequence of {len(sequence)} tokens"
                            f"{'' if final else f' within {self._deadline_s:g} s, {tries + 1} tries'}: {error}"
                        )
                        if error.status in _OF_THE_SEQUENCE:
                            raise _RefusedError(reason) from error
                        raise OrchestratorError(reason) from error
                    logger.debug(f"the teacher is asked again in {pause:g} s: {error}")
                    tries += 1
                    self.num_retries += 1
                    await asyncio.sleep(pause)


def _taught_by(episode: Episode, scores: Sequence[Score]) -> Episode:
    """Return the same episode whose samples have what the teacher says besides log-probabilities."""
    samples = [_taught(sample, score) for sample, score in zip(episode.result.samples, scores, strict=True)]
    return replace(episode, result=replace(episode.result, samples=samples))


def _taught(sample: Sample, score: Score) -> Sample:
    if score.top is None:
        return replace(sample, teacher_gaps=score.gaps)
    first = len(score.top.ids) - sample.num_tokens  # without what the teacher was shown
    return replace(sample, teacher_ids=score.top.ids[first:], teacher_logprobs=score.top.logprobs[first:])


def _unusable(episode: Episode, reason: str) -> Episode:
    """Return the same episode as one that failed."""
    return replace(episode, usable=False, reason=reason)


async def client_ready(client: InferenceClient, deadline_s: float) -> None:
    """Wait for a server that starts, or that others have started.
    Raises OrchestratorError: it does not answer in time."""
    try:
        await client.wait_ready(deadline_s)
    except InferenceError as error:
        raise OrchestratorError(f"orchestrator.teacher: {error}") from error


class FrozenServer(InferenceClient):
    """A server that keeps its weights: the run's versions pass it by, so that batches keep the trainer's pace."""

    _version = 0

    async def policy_version(self, name: str = "") -> int:
        """Return the version that it was last told of."""
        return self._version

    async def update_weights(self, path: Path | str, version: int, name: str = "") -> dict[str, Any]:
        """Take note of the version."""
        self._version = version
        return {"version": version, "path": str(path), "changed": False}

    async def reload_weights(self, name: str = "") -> dict[str, Any]:
        """Take note of version 0."""
        return await self.update_weights("", 0)

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Nothing to do: it has a name of its own."""
        return {"version": self._version}
