"""A teacher with another tokenizer: the same bytes in other tokens, what ends where, and what is refused."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from prime_hpc.client.inference import InferenceClient
from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import served_by
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.envs.rendering import PromptRenderer, load_prompt_renderer
from prime_hpc.envs.samples import Sample
from prime_hpc.envs.workers.records import result_from_plain, result_to_plain
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.algorithms.teacher import Teacher
from prime_hpc.orchestrator.cross_tokenizer.reading import Reading, TeacherReader
from prime_hpc.orchestrator.cross_tokenizer.segments import align
from prime_hpc.orchestrator.cross_tokenizer.token_bytes import TokenBytes, UnreadableError, utf8_runs
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.carried import CarriedGroup, decode_groups, encode_groups
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.starter.tokenizer import build_tokenizer
from tests.support.episodes import make_result
from tests.support.other_tokenizer import byte_level, sentencepiece
from tests.support.tiny_tokenizer import make_tokenizer

USER = {"role": "user", "content": "say hello"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizers")
    make_tokenizer(found / "policy")
    byte_level(found / "bytes")
    byte_level(found / "nfc", nfc=True)
    sentencepiece(found / "pieces")
    build_tokenizer(512).save_pretrained(found / "starter")
    return found


@pytest.fixture(scope="module")
def policy(folder: Path) -> PromptRenderer:
    return load_prompt_renderer(str(folder / "policy"), "qwen3", False)


def reader_of(folder: Path, policy: PromptRenderer, teacher: str) -> TeacherReader:
    return TeacherReader(policy, load_prompt_renderer(str(folder / teacher), "default", False))


def ids_of(policy: PromptRenderer, content: bytes, *, letters: bool = False) -> list[int]:
    """Tokens as the policy might have sampled them; `letters`: a byte each, as no tokenizer would."""
    known = TokenBytes(policy.tokenizer, "its")
    return [i for byte in content for i in known.encode(bytes([byte]))] if letters else known.encode(content)


def sample_of(
    policy: PromptRenderer,
    messages: Sequence[dict[str, Any]],
    replies: Sequence[list[int]],
    tools: list[dict[str, Any]] | None = None,
) -> Sample:
    """A conversation whose replies, in order, are these tokens; log-probabilities -1, -2, ..."""
    token_ids: list[int] = []
    starts: list[int] = []
    mask: list[bool] = []
    left = list(replies)
    for index, message in enumerate(messages):
        starts.append(len(token_ids))
        if message["role"] == "assistant":
            new = left.pop(0)
        else:
            is_last = index + 1 < len(messages) and messages[index + 1]["role"] == "assistant"
            new = list(policy.renderer.render([message], tools=tools, add_generation_prompt=is_last).token_ids)
        token_ids += new
        mask += [message["role"] == "assistant"] * len(new)
    sampled = np.cumsum(mask)
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.array(mask),
        logprobs=np.where(mask, -sampled, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        num_turns=len(replies),
        reward=0.0,
        conversation={"messages": list(messages), "starts": starts, "tools": tools or []},
    )


def read(reader: TeacherReader, sample: Sample) -> Reading:
    return asyncio.run(reader.read(sample))


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_segments_are_the_smallest_pieces_that_end_a_token_of_both() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        total = int(rng.integers(1, 30))
        cuts = [sorted({total, *rng.integers(1, total + 1, 6).tolist()}) for _ in range(2)]
        lengths = [np.diff([0, *ends]) for ends in cuts]
        ours, theirs, ends = align(*lengths)
        assert ends.tolist() == sorted(set(cuts[0]) & set(cuts[1]))
        for segments, own in ((ours, cuts[0]), (theirs, cuts[1])):
            assert segments.tolist() == [next(i for i, end in enumerate(ends) if end >= stop) for stop in own]


def test_bytes_of_tokens_are_those_of_the_text_in_every_kind_of_vocabulary(folder: Path) -> None:
    text = "hello there 1234\n\n  café 日本 🙂 <|eot|> </s> <0x41>".encode()
    for name in ("policy", "bytes", "pieces"):
        known = TokenBytes(load_prompt_renderer(str(folder / name), "default", False).tokenizer, "its")
        for content in (
            text,
            b"",
            b" hello",
            b"a\xf0\x9f\x98",
            b"\xff caf\xc3\xa9 \xf0\x9f",
            b"a\xffhello the\xe2\x82\n",
            "é".encode()[:1],
        ):
            assert known.split(known.encode(content))[0] == content, (name, content)
    assert list(utf8_runs(b"a\xffb\xf0\x9f")) == [(b"a", True), (b"\xff", False), (b"b", True), (b"\xf0\x9f", False)]


def test_a_vocabulary_without_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(OrchestratorError, match="do not say which bytes of a text they are"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), "the teacher's")


@pytest.mark.parametrize("teacher", ["bytes", "pieces"])
@pytest.mark.parametrize("letters", [False, True])
def test_the_teacher_reads_its_own_prompt_and_the_very_bytes(
    folder: Path, policy: PromptRenderer, teacher: str, letters: bool
) -> None:
    reader, text = reader_of(folder, policy, teacher), "hello there 🙂"
    reply = [*ids_of(policy, text.encode(), letters=letters), policy.stop_token_ids[0]]
    sample = sample_of(policy, [USER, say(text)], [reply])
    reading = read(reader, sample)
    ([sequence], [turn]) = reading.sequences, reading.turns
    tokenizer = load_prompt_renderer(str(folder / teacher), "default", False).tokenizer
    whole = {
        "bytes": f"<s><|header|>user\n\nsay hello<|eot|><|header|>assistant\n\n{text}<|eot|>",
        "pieces": f"<s> [INST] say hello [/INST] {text}</s>",
    }
    assert tokenizer.decode(sequence) == whole[teacher]
    assert TokenBytes(tokenizer, "its").split(sequence[turn.first : -1])[0] == text.encode()
    assert turn.places.tolist() == np.flatnonzero(sample.loss_mask).tolist() and turn.sure.all()
    found = -0.25 * np.arange(len(sequence), dtype=np.float32)
    scores, gaps = reading.scores_of(sample, [found])
    for segment in range(len(turn.sure)):
        own, said = turn.places[turn.segments == segment], turn.first + np.flatnonzero(turn.teacher_segments == segment)
        assert gaps[own] == pytest.approx(found[said].sum() - sample.logprobs[own].sum(), abs=1e-5)
        assert scores[own].sum() == pytest.approx(found[said].sum(), abs=1e-4)
    assert len(turn.sure) < len(reply) or not letters
    assert np.isnan(gaps[~sample.loss_mask]).all() and gaps[-1] == found[-1] - sample.logprobs[-1]  # the ends


def test_a_teacher_with_the_policys_tokenizer_and_template_is_asked_for_the_very_tokens(
    folder: Path, policy: PromptRenderer
) -> None:
    reply = [*ids_of(policy, b"hello there"), policy.stop_token_ids[0]]
    sample = sample_of(policy, [USER, say("hello there")], [reply])
    reading = read(reader_of(folder, policy, "policy"), sample)
    assert reading.sequences == [sample.token_ids.tolist()]
    found = np.linspace(-9, -1, sample.num_tokens, dtype=np.float32)
    scores, gaps = reading.scores_of(sample, [found])
    trained = sample.loss_mask
    np.testing.assert_allclose(scores[trained], found[trained], rtol=1e-6)
    np.testing.assert_allclose(gaps[trained], (found - sample.logprobs)[trained], rtol=1e-6)


def test_turns_that_go_on_from_each_other_are_asked_for_at_once(folder: Path, policy: PromptRenderer) -> None:
    end = policy.stop_token_ids[0]
    messages = [USER, say("hi"), {"role": "user", "content": "again"}, say("hello there")]
    replies = [[*ids_of(policy, m["content"].encode()), end] for m in messages[1::2]]
    sample = sample_of(policy, messages, replies)
    [sequence], turns = (reading := read(reader_of(folder, policy, "bytes"), sample)).sequences, reading.turns
    assert [turn.sequence for turn in turns] == [0, 0] and turns[0].first < turns[1].first < len(sequence)
    thought = [*messages[:1], say("hi") | {"reasoning_content": "hm"}, *messages[2:]]  # its template leaves it out
    replies[0] = [*ids_of(policy, b"hm</think>hi"), end]
    apart = read(reader_of(folder, policy, "bytes"), sample_of(policy, thought, replies))
    assert len(apart.sequences) == 2 and [turn.sequence for turn in apart.turns] == [1, 0]


def test_of_a_cut_reply_the_last_word_and_half_a_character_are_not_judged(folder: Path, policy: PromptRenderer) -> None:
    reader = reader_of(folder, policy, "bytes")
    for content, sure in ((b"hello there the", 11), (b"hi " + "🙂".encode()[:2], 2), (b"x" * 40, 8), (b"the", 0)):
        sample = sample_of(policy, [USER, say("")], [ids_of(policy, content, letters=True)])
        reading = read(reader, sample)
        _, gaps = reading.scores_of(sample, [np.zeros(len(reading.sequences[0]), np.float32)])
        judged = int(np.isfinite(gaps).sum())
        ends = reading.turns[0].segments[:judged]
        assert judged == sum(np.isfinite(gaps[sample.loss_mask][: len(ends)])) and judged <= sure
        assert (judged > 0) == (sure > 0)


def test_what_cannot_be_read_as_it_was_said_is_refused(folder: Path, policy: PromptRenderer) -> None:
    end = policy.stop_token_ids[0]

    def refusal(teacher: str, messages: Sequence[dict[str, Any]], reply: list[int], **how: Any) -> str:
        with pytest.raises(UnreadableError) as caught:
            read(reader_of(folder, policy, teacher), sample_of(policy, messages, [reply], **how))
        return str(caught.value)

    hi = [*ids_of(policy, b"hi"), end]
    system = {"role": "system", "content": "Be brief."}
    assert "no system messages" in refusal("pieces", [system, USER, say("hi")], hi)
    inside, asked = [policy.tokenizer.convert_tokens_to_ids("<|im_start|>"), *hi], [USER, say("")]
    assert "'<|im_start|>' inside of a reply is a control token of the policy's" in refusal("bytes", asked, inside)
    assert "token 9999 is none of the policy's" in refusal("bytes", asked, [9999, end])
    apart = "e\u0301".encode()
    assert "does not keep" in refusal("nfc", asked, [*ids_of(policy, apart), end])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    called = [USER, say("") | {"tool_calls": [call]}]
    assert "writes tool calls otherwise" in refusal("bytes", called, [*ids_of(policy, said.encode()), end], tools=TOOLS)
    thinking = replace(sample_of(policy, [USER, say("hi")], [hi]))
    opened = thinking.token_ids.copy()
    first = int(np.flatnonzero(thinking.loss_mask)[0])
    opened[:first] = policy.tokenizer.convert_tokens_to_ids("<think>")
    with pytest.raises(UnreadableError, match="the policy's prompt has opened a think section, the teacher's has not"):
        read(reader_of(folder, policy, "bytes"), replace(thinking, token_ids=opened))


def test_calls_that_the_teacher_reads_as_the_environment_did_are_scored(folder: Path, policy: PromptRenderer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = b'<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    messages, end = [USER, say("") | {"tool_calls": [call]}], policy.stop_token_ids[0]
    sample = sample_of(policy, messages, [[*ids_of(policy, said), end]], tools=TOOLS)
    [turn] = read(reader_of(folder, policy, "starter"), sample).turns
    assert turn.teacher_segments[0] == turn.segments[0] == 0 and turn.segments[1] == 1  # `<tool_call>`, a token of both
    other = messages[1] | {"tool_calls": [call | {"function": {"name": "add", "arguments": '{"a": 2}'}}]}
    with pytest.raises(UnreadableError, match="writes tool calls otherwise"):
        read(
            reader_of(folder, policy, "starter"),
            replace(sample, conversation={**sample.conversation, "messages": [USER, other]}),
        )


def test_a_conversation_travels_with_its_sample(policy: PromptRenderer) -> None:
    sample = sample_of(policy, [USER, say("hi")], [[*ids_of(policy, b"hi"), policy.stop_token_ids[0]]], tools=TOOLS)
    taught = replace(sample, teacher_gaps=np.zeros(sample.num_tokens, np.float32))
    [sent] = result_from_plain(result_to_plain(make_result(samples=[sample]))).samples
    carried = CarriedGroup(Prompt(0, 0, 0, 7), [make_result(samples=[taught])])
    [[kept]] = [result.samples for result in decode_groups(encode_groups([carried], {}))[0][0].results]
    assert sent.conversation == kept.conversation == sample.conversation and kept.teacher_gaps is None


class Server(InferenceClient):
    """Gives every token the log-probability -0.5."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")

    async def score(self, token_ids: Any, model: str = "policy") -> np.ndarray:
        return np.full(len(token_ids), -0.5, np.float32)


def test_advantages_are_segments_gaps_and_a_refused_rollout_does_not_train(
    folder: Path, policy: PromptRenderer
) -> None:
    reader, end = reader_of(folder, policy, "bytes"), policy.stop_token_ids[0]
    good = sample_of(policy, [USER, say("hello")], [[*ids_of(policy, b"hello", letters=True), end]])
    bad = sample_of(policy, [USER, say("hi")], [[end, *ids_of(policy, b"hi"), end]])
    cut = sample_of(policy, [USER, say("hello")], [ids_of(policy, b"hello")])

    async def run() -> Any:
        teacher = Teacher([Server()], "p", deadline_s=9, max_concurrent=2, reader=reader)
        slots: list[Any] = [to_episode(make_result(samples=[sample]), 999) for sample in (good, bad, cut)]
        group = Group(Prompt(0, 0, 0, 7), 0, 0, slots, num_ended=3)
        for index, episode in enumerate(slots):
            teacher.begin(group, index, episode)
        references = await teacher.collect([group])
        return group, references[0], teacher.drain_metrics(), teacher.drain_metrics()

    group, references, first, second = asyncio.run(run())
    assert (first, second) == ({"teacher/refused": 1}, {"teacher/refused": 0})
    assert not group.slots[1].usable and "cannot be given a rollout: '<|im_end|>' inside" in group.slots[1].reason
    scores = Scorer(AdvantageConfig(type="opd", max_gap=5), max_tokens=9).score(group.usable, references=references)
    assert scores.tokens is not None
    [[told], [nothing]] = scores.tokens
    # `he` and `llo` are tokens of the teacher; the policy said -1, ..., -6: five letters and the end
    assert told[good.loss_mask].tolist() == [2.5, 2.5, 5, 5, 5, 5] and not nothing.any()


@pytest.mark.parametrize(
    ("orchestrator", "top", "problem"),
    [
        ({"teacher": {"base_url": "http://t:1/v1", "tokenizer": "own"}}, {}, "is read from orchestrator.teacher.model"),
        ({}, {"trainer": {"loss": {"distillation": {}}}}, "trainer.loss.distillation do not fit"),
        ({"advantage": {"type": "sft"}}, {"trainer": {"loss": {"type": "nll"}}}, "own does not fit .* sft"),
    ],
)
def test_a_word_on_tokens_is_refused(orchestrator: dict[str, Any], top: dict[str, Any], problem: str) -> None:
    teacher = {"base_url": "http://t:1/v1", "model": "o/t", "tokenizer": "own"}
    tree = {"orchestrator": {"advantage": {"type": "opd"}, "teacher": teacher, **orchestrator}, **top}
    with pytest.raises(ValidationError, match=problem):
        Experiment.model_validate(tree)


def test_its_engines_have_room_for_more_tokens() -> None:
    def room(tokenizer: str) -> int | None:
        taught = {"advantage": {"type": "opd"}, "teacher": {"model": "o/t", "tokenizer": tokenizer}}
        exp = Experiment.model_validate({"orchestrator": taught, "teacher_inference": {}, "seq_len": 64})
        inference = served_by(exp, "teacher").inference
        return inference.max_model_len if inference is not None else None

    assert (room("same"), room("own")) == (65, 130)
