"""A sample as a teacher with a tokenizer of its own reads it, and what its scores say of the policy's tokens.

For every turn that trains: the messages before it by the teacher's own chat template, up to where its reply begins,
then the bytes that the policy sampled, in the teacher's tokens, and the teacher's end of a turn where the policy ended
its own. A turn whose tokens begin with all of the turn before is asked for with it.

What cannot be given to the teacher as it was said is not scored, and its rollout does not train (`UnreadableError`): a
conversation that its template refuses, control tokens inside of a reply, text that its tokenizer changes, tool calls
that it reads otherwise, a think section that only one of the prompts has opened.

A turn that a limit cut short might have gone on: of its last word, and of a character of which bytes are missing, the
teacher's tokens say nothing. They are left out (`teacher_gaps` is NaN).
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from renderers.reasoning import prompt_ends_in_reasoning

from prime_hpc.envs.rendering import PROBE, PromptRenderer
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.cross_tokenizer.segments import align, segment_gaps
from prime_hpc.orchestrator.cross_tokenizer.token_bytes import TokenBytes, UnreadableError

MOST_UNSURE_BYTES = 32
"""Of a cut turn's end without white space: few tokens are longer."""
_REPLY = "Hi."


@dataclass(frozen=True)
class Turn:
    """A reply in both tokenizations."""

    places: NDArray[np.intp]
    """int [n], of the policy's tokens in its sample."""
    segments: NDArray[np.int64]
    """int64 [n], the segment of each."""
    sure: NDArray[np.bool_]
    """bool [number of segments], those that no longer reply would have been cut into otherwise."""
    sequence: int
    """Of the reading, which has the turn in it."""
    first: int
    """Place of the reply's first token in it."""
    teacher_segments: NDArray[np.int64]
    """int64 [m], the segment of each of the teacher's tokens from `first` on."""


@dataclass(frozen=True)
class Reading:
    """A sample in the teacher's tokens."""

    sequences: list[list[int]]
    """To be scored."""
    turns: list[Turn]

    def scores_of(self, sample: Sample, found: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float32], ...]:
        """Return a log-probability of every token, float32 [L], and the gap of its segment, float32 [L], NaN where the
        teacher has no word. The log-probabilities of a segment add up to the teacher's of the segment; within it each
        is as far from the policy's as every other, and as the policy's where the teacher has no word.
        `found`: its log-probabilities of the sequences, float32."""
        scores, gaps = sample.logprobs.copy(), np.full(sample.num_tokens, np.nan, np.float32)
        for turn in self.turns:
            said = found[turn.sequence][turn.first : turn.first + len(turn.teacher_segments)]
            own = sample.logprobs[turn.places]
            of_segment = segment_gaps(
                own.astype(np.float64), said.astype(np.float64), turn.segments, turn.teacher_segments
            )
            share = np.where(turn.sure, of_segment, 0.0) / np.maximum(1, np.bincount(turn.segments))
            gaps[turn.places] = np.where(turn.sure, of_segment, np.nan)[turn.segments]
            scores[turn.places] = own + share[turn.segments]
        return scores, gaps


class TeacherReader:
    """Writes conversations for the teacher."""

    def __init__(self, policy: PromptRenderer, teacher: PromptRenderer) -> None:
        """Take the policy's renderer and the teacher's.
        Raises OrchestratorError: of one of the tokenizers nobody can say which bytes its tokens are."""
        self._policy, self._teacher = policy, teacher
        self._stops = set(policy.stop_token_ids)
        self._policy_bytes = TokenBytes(policy.tokenizer, "the policy's")
        self._teacher_bytes = TokenBytes(teacher.tokenizer, "the teacher's")
        self._end = self._end_of_turn()

    async def read(self, sample: Sample) -> Reading:
        """Return a sample in the teacher's tokens. Raises UnreadableError: it cannot be; says why."""
        starts = sample.conversation["starts"]
        turns: list[tuple[list[int], Turn]] = []
        for index, (first, stop) in enumerate(zip(starts, [*starts[1:], sample.num_tokens], strict=True)):
            places = first + np.flatnonzero(sample.loss_mask[first:stop])
            if len(places):  # one at a time: of hundreds, others' are read in between
                turns.append(await asyncio.to_thread(self._teacher.exclusively, self._turn, sample, places, index))
        return await asyncio.to_thread(_joined, turns)

    def _turn(self, sample: Sample, places: NDArray[np.intp], index: int) -> tuple[list[int], Turn]:
        """Return a turn's tokens with all before it, and what they are of the policy's. `index`: of its message."""
        messages, tools = sample.conversation["messages"], sample.conversation["tools"] or None
        try:
            prompt = self._teacher.renderer.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
        except Exception as error:  # a chat template's own words, of any class
            raise UnreadableError(f"its chat template refuses the conversation: {error}") from error
        message = messages[index]
        ids, before = sample.token_ids[places].tolist(), sample.token_ids[: places[0]].tolist()
        if places[-1] - places[0] + 1 != len(places):
            raise UnreadableError("a reply with tokens in it that were not sampled")
        self._check_reasoning(before, prompt)
        is_ended = ids[-1] in self._stops
        content, lengths = self._policy_bytes.split(ids[:-1] if is_ended else ids)
        reply = self._teacher_bytes.encode(content)
        if message.get("tool_calls"):
            self._check_calls(message["tool_calls"], reply, prompt, tools)
        teacher_lengths = self._teacher_bytes.split(reply)[1]
        if is_ended:
            reply = [*reply, self._end]
            lengths, teacher_lengths = np.append(lengths, 1), np.append(teacher_lengths, 1)
        segments, teacher_segments, ends = align(lengths, teacher_lengths)
        sure = np.full(len(ends), True) if is_ended else ends <= _sure_bytes(content)
        turn = Turn(places, segments, sure, 0, len(prompt), teacher_segments)
        return prompt + reply, turn

    def _check_reasoning(self, before: list[int], prompt: list[int]) -> None:
        """Raise UnreadableError where one of the prompts has opened a think section, and the other one has not."""
        ours = self._policy.exclusively(_is_thinking, self._policy.tokenizer, before, self._stops)
        theirs = _is_thinking(self._teacher.tokenizer, prompt, {self._end})
        if ours != theirs:
            which = ("the policy's", "the teacher's") if ours else ("the teacher's", "the policy's")
            raise UnreadableError(
                f"{which[0]} prompt has opened a think section, {which[1]} has not: see model.enable_thinking"
            )

    def _check_calls(self, calls: Sequence[Any], reply: list[int], prompt: list[int], tools: Any) -> None:
        """Raise UnreadableError unless the teacher reads the same calls in a reply: to one that writes them otherwise
        the policy's are unlikely text, which would unlearn them."""
        found: list[tuple[Any, Any]] = []
        if self._teacher.reads_tool_calls:
            parsed = self._teacher.renderer.parse_response([*reply, self._end], prompt_ids=prompt, tools=tools)
            found = [(call.name, _plain(call.arguments)) for call in parsed.tool_calls]
        if found != [(call["function"]["name"], _plain(call["function"]["arguments"])) for call in calls]:
            raise UnreadableError("the teacher's chat template writes tool calls otherwise than the policy's")

    def _end_of_turn(self) -> int:
        """Return the control token that the teacher's template writes behind a reply; of one that writes none, the end
        of the text."""
        reply = [{"role": "assistant", "content": _REPLY}]
        ids = self._teacher.renderer.render_ids([*PROBE[1:], *reply], add_generation_prompt=False)
        text = self._teacher.tokenizer
        for start in range(len(ids) - 1, -1, -1):
            if not self._teacher_bytes.is_control(ids[start]) and text.decode(ids[start:]).strip():
                ids = ids[start + 1 :]
                break
        controls = [i for i in ids if self._teacher_bytes.is_control(i)]
        return controls[0] if controls else int(text.eos_token_id)


def _joined(turns: Sequence[tuple[list[int], Turn]]) -> Reading:
    """Return the turns with the sequences to be scored: one that another one begins with is a part of that."""
    sequences: list[list[int]] = []
    found: list[Turn] = []
    for ids, turn in reversed(turns):
        if not sequences or sequences[-1][: len(ids)] != ids:
            sequences.append(ids)
        found.append(Turn(**{**vars(turn), "sequence": len(sequences) - 1}))
    return Reading(sequences, found[::-1])


def _sure_bytes(content: bytes) -> int:
    """Return how much of a cut reply would be cut into the same tokens, however it went on."""
    text = content.rstrip()
    last_blank = max(text.rfind(blank) for blank in (b" ", b"\n", b"\t"))
    return max(last_blank, len(content) - MOST_UNSURE_BYTES, 0)


def _is_thinking(tokenizer: Any, prompt: list[int], stops: set[int]) -> bool:
    return bool(prompt_ends_in_reasoning(tokenizer, prompt, stop_ids=stops, initial_only=False))


def _plain(arguments: Any) -> Any:
    """Return a call's arguments as an object, also those that are JSON text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
