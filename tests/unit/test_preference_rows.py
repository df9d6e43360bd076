"""Rows of preferences: what is trained of the forms that people have, and what is said of rows that cannot be."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.sections.sft import SFTConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.lint.lint import lint
from prime_hpc.store.dataset.files import has_columns, missing_columns, used_columns
from prime_hpc.trainer.data.pairs import parse_pair
from prime_hpc.trainer.data.samples import RowResult, RowTokenizer, SFTSample
from prime_hpc.trainer.data.stream import BatchShape, RowOrder, SampleStream
from prime_hpc.trainer.data.template import ChatTokenizer
from tests.support.sft_samples import trained_text
from tests.unit.test_sft_stream import Peers, ThreadRanks

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "add"), ("assistant", "number"), ("assistant", "lower"))
)
ASKED = [{"role": "system", "content": "be brief"}, USER, GOOD, {"role": "user", "content": "higher"}]
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "add", "chosen": "number", "rejected": "lower"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "prompt as text, replies as messages": {"prompt": "add", "chosen": [GOOD], "rejected": [BAD]},
    "one message each": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback": {
        "prompt": "add", "prompt_id": "17", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD],
        "score_chosen": 8.0, "score_rejected": 2.0,
    },
    "JSON": {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
    "from and value": {
        "prompt": [{"from": "human", "value": "add"}],
        "chosen": {"from": "gpt", "value": "number"}, "rejected": {"from": "gpt", "value": "lower"},
    },
}  # fmt: skip


def result(row: Any, chat: ChatTokenizer, seq_len: int = 4096, **config: Any) -> RowResult:
    data = SFTConfig.model_validate({"data": {"path": "rows.jsonl", **config}, "preference": {}}).data
    return RowTokenizer(chat, data, data, seq_len, 10**6).row(row)


def sides(row: Any, chat: ChatTokenizer, **config: Any) -> list[SFTSample]:
    made = result(row, chat, **config)
    assert made.error is None, made.error
    [one] = made.samples
    return one.sides()


def refusal(row: Any, chat: ChatTokenizer, **config: Any) -> str:
    error = result(row, chat, **config).error
    assert error is not None
    return error


@pytest.mark.parametrize("form", FORMS)
def test_both_replies_are_trained_behind_the_same_prompt(form: str, chat: ChatTokenizer, tokenizer: Any) -> None:
    chosen, rejected = sides(FORMS[form], chat)
    assert trained_text(chosen, tokenizer) == ["number<|im_end|>"]
    assert trained_text(rejected, tokenizer) == ["lower<|im_end|>"]
    for side, reply in ((chosen, GOOD), (rejected, BAD)):
        text = tokenizer.apply_chat_template([USER, reply], tokenize=False)
        assert side.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_of_a_conversation_only_what_differs_is_trained(chat: ChatTokenizer, tokenizer: Any) -> None:
    row = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "prompt": "not read"}
    assert [trained_text(side, tokenizer) for side in sides(row, chat)] == [["number<|im_end|>"], ["lower<|im_end|>"]]
    with_system = {"system": "be brief", "prompt": "add", "chosen": "number", "rejected": "lower"}
    assert all(tokenizer.decode(side.token_ids).startswith("<|im_start|>system") for side in sides(with_system, chat))


def test_texts_without_a_prompt_are_cut_at_a_blank(chat: ChatTokenizer, tokenizer: Any) -> None:
    row = {"chosen": "Human: add\n\nAssistant: number", "rejected": "Human: add\n\nAssistant: name it"}
    chosen, rejected = sides(row, chat)
    assert trained_text(chosen, tokenizer) == [" number<|endoftext|>"] or trained_text(chosen, tokenizer)[0].startswith(
        " number"
    )
    assert trained_text(rejected, tokenizer)[0].startswith(" name it")
    assert tokenizer.decode(chosen.token_ids).startswith("Human: add\n\nAssistant: number")
    meant, _ = sides({**row, "question": "of whom?"}, chat, columns={"prompt": "none"})
    assert np.array_equal(meant.token_ids, chosen.token_ids)


def test_columns_have_their_own_names(chat: ChatTokenizer, tokenizer: Any) -> None:
    row = {"instruction": "add", "input": "two", "good": "number", "bad": "lower"}
    columns = {"prompt": "instruction", "chosen": "good", "rejected": "bad"}
    chosen, _ = sides(row, chat, columns=columns)
    assert "add\n\ntwo" in tokenizer.decode(chosen.token_ids) and trained_text(chosen, tokenizer) == [
        "number<|im_end|>"
    ]
    source = SFTConfig.model_validate({"data": {"path": "x", "columns": columns}, "preference": {}}).data
    assert {"good", "bad", "instruction", "input"} <= used_columns(list(row), source, images=False)
    source = SFTConfig.model_validate({"data": {"path": "x"}, "preference": {}}).data
    assert "question" in used_columns(["question", "chosen", "rejected"], source, images=False)  # of Parquet, to refuse


REFUSED: dict[str, tuple[Any, str]] = {
    "equal sides": ({**FORMS["texts"], "rejected": "number"}, "`chosen` and `rejected` are equal"),
    "equal conversations": ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal"),
    "an empty side": ({**FORMS["texts"], "rejected": " "}, "`rejected` is empty"),
    "an empty message": ({"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "content": ""}]}, "`rejected` is empty"),
    "one ends in what both have": ({"chosen": [USER, GOOD], "rejected": [USER]}, "`rejected` is empty"),
    "no reply": ({"prompt": "add", "chosen": None, "rejected": "x"}, "expected `chosen` as a string or a list"),
    "no prompt": ({"chosen": [GOOD], "rejected": [BAD]}, "there is no `prompt` to them"),
    "two prompts": ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "sub"}, BAD]}, "what is the prompt?"),
    "two texts": ({"chosen": "number", "rejected": "lower"}, "do not begin with the same words"),
    "a prompt of another name": (
        {"question": "add", "chosen": "the number", "rejected": "the lower"},
        "`question` stands beside two texts",
    ),
    "a system text of no prompt": (
        {"system": "be brief", "chosen": "the number", "rejected": "the lower"},
        "`system` stands beside two texts",
    ),
    "a missing column": ({"prompt": "add", "chosen": "number"}, "sft.preference needs `chosen` and `rejected`"),
    "rows of plain SFT": ({"prompt": "add", "completion": "number"}, "rows of single replies train without sft.pref"),
    "a wrong message": ({"prompt": "add", "chosen": [{"x": 1}], "rejected": [BAD]}, "`chosen` is empty"),
    "a prompt in one side": (
        {"prompt": "add", "chosen": [USER, GOOD], "rejected": [BAD]},
        "`rejected` does not: state",
    ),
    "a message in the other's content": (
        {"prompt": "add", "chosen": [{**GOOD, "content": [GOOD]}], "rejected": [BAD]},
        "`chosen`: a content part has no",
    ),
    "a part without a word": (
        {"prompt": "add", "chosen": [{**GOOD, "content": [{"type": "text", "text": ""}]}], "rejected": [BAD]},
        "`chosen` is empty",
    ),
    "no row": ([1], "expected a JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_said(name: str, chat: ChatTokenizer) -> None:
    row, words = REFUSED[name]
    assert words in refusal(row, chat)
    skipped = result(row, chat, bad_rows="skip")
    assert skipped.error is None and skipped.counts.bad == 1 and not skipped.samples


def test_a_pair_is_as_long_as_its_longer_side(chat: ChatTokenizer) -> None:
    row = {"prompt": "add", "chosen": "number", "rejected": "lower " * 30}
    lengths = [len(side.token_ids) for side in sides(row, chat)]
    assert len(sides(row, chat, seq_len=max(lengths))) == 2
    dropped = result(row, chat, seq_len=max(lengths) - 1)
    assert not dropped.samples and dropped.counts.values() == (1, 1, 0, 0, 0, 0, 0)
    assert "more than seq_len" in refusal(row, chat, seq_len=max(lengths) - 1, overlong="error")
    cut = result(row, chat, seq_len=max(lengths) - 1, overlong="truncate")
    assert [len(side.token_ids) for side in cut.samples[0].sides()] == [lengths[0], max(lengths) - 1]
    long = {"prompt": "add " * 40, "chosen": "number", "rejected": "lower"}
    left_out = result(long, chat, seq_len=20, overlong="truncate")  # as a single conversation is
    assert not left_out.samples and left_out.error is None and left_out.counts.values() == (1, 0, 1, 1, 0, 0, 0)
    assert result(long, chat, seq_len=20).counts.overlong == 1


def test_sides_that_are_cut_to_the_same_are_left_out(chat: ChatTokenizer) -> None:
    row = {"prompt": "add", "chosen": "number " * 30 + "add", "rejected": "number " * 30 + "lower"}
    cut = result(row, chat, seq_len=20, overlong="truncate")
    assert not cut.samples and cut.counts.untrained == 1 and cut.error is None


@pytest.mark.parametrize("shown", [(b"", b""), (b"one", b"other"), (b"one", b"one"), (b"", b"other")])
def test_a_sample_travels_with_its_split_and_its_images(shown: tuple[bytes, bytes]) -> None:
    sides = []
    for length, image in zip((3, 5), shown, strict=True):
        numbers = (np.arange(length) == 1).astype(np.int32) if image else None
        data = (image,) if image else ()
        sides.append(SFTSample(np.arange(length, dtype=np.int32), np.arange(length) > 1, numbers, data))
    one = SFTSample.pair(sides)
    packed = one.packed()
    assert len(packed) == one.num_bytes
    for side, again in zip(sides, SFTSample.unpacked(packed, 8, one.split).sides(), strict=True):
        assert again.token_ids.tolist() == side.token_ids.tolist() and (again.loss_mask == side.loss_mask).all()
        assert again.image_data == side.image_data
        assert (again.images is None) is (side.images is None)
        assert again.images is None or again.images.tolist() == side.images.tolist()  # type: ignore[union-attr]


def test_plain_sft_names_the_section_of_pairs() -> None:
    plain = SFTConfig.model_validate({"data": {"path": "x"}}).data
    names = ["prompt", "chosen", "rejected"]
    assert not has_columns(names, plain) and "train with sft.preference" in missing_columns(names, plain)
    assert not {"chosen", "rejected"} & used_columns([*names, "messages"], plain, images=False)


@pytest.mark.parametrize("data", [{"split_turns": True}, {"overlong": "split"}])
def test_keys_that_make_several_samples_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave it out|of pairs: drop"):
        SFTConfig.model_validate({"data": {"path": "x", **data}, "preference": {}})


@pytest.mark.parametrize("key", ["beta", "margin", "nll_weight"])
def test_weights_of_the_loss_are_finite(key: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        SFTConfig.model_validate({"data": {"path": "x"}, "preference": {key: float("inf")}})


def test_both_sides_must_fit_a_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMS["texts"]), encoding="utf-8")
    argv = ["--kind", "sft", "--sft.data.path", str(tmp_path / "rows.jsonl"), "--sft.preference.beta", "0.2"]
    experiment = load_experiment([*argv, "--seq-len", "100"], "plan", environ={}).experiment
    assert experiment.micro_batch_tokens == 200 and experiment.sft.data.holds_pairs
    with pytest.raises(ConfigError, match="of both sides"):
        load_experiment([*argv, "--seq-len", "100", "--trainer.micro-batch-tokens", "150"], "plan", environ={})


@pytest.mark.parametrize(
    ("row", "words"),
    [(REFUSED["rows of plain SFT"][0], "sft.preference needs"), (REFUSED["equal sides"][0], "are equal")],
)
def test_lint_reads_the_first_rows(tmp_path: Path, row: Any, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [FORMS["texts"], row] if "chosen" in row else [row]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    argv = ["--kind", "sft", "--sft.data.path", str(file), "--sft.preference.margin", "0.5"]
    argv += ["--sft.preference.type", "ipo"]
    found = lint(load_experiment(argv, "plan", environ={}).experiment, GENERIC)
    assert any(f.code == "PH207" and words in f.message for f in found)
    assert any(f.key == "sft.preference.margin" for f in found)  # of another loss: it has no effect
    assert not any(f.code == "PH224" for f in found)


def test_pairs_stay_together_on_any_number_of_ranks(chat: ChatTokenizer) -> None:
    rows = [{"prompt": f"add {i}", "chosen": "number " * (1 + i % 3), "rejected": "lower"} for i in range(12)]
    data = SFTConfig.model_validate({"data": {"path": "x"}, "preference": {}}).data
    tokenizer = RowTokenizer(chat, data, data, 4096, 10**6)
    shape = BatchShape(batch_size=6, batch_tokens=None, micro_batch_tokens=90)

    def steps(size: int) -> list[list[int]]:
        """Rows of each of four steps, as the ranks train them."""
        peers, seen = Peers(size), [[] for _ in range(4)]  # type: ignore[var-annotated]

        def work(rank: int) -> None:
            stream = SampleStream(
                lambda indices: [tokenizer.row(rows[i]) for i in indices], RowOrder(12, seed=1, shuffle=True), shape,
                ThreadRanks(peers, rank), share=rank, num_shares=size,
            )  # fmt: skip
            for step in range(4):
                batch = stream.next()
                assert batch is not None and batch.ranked.loss_mask.any()
                for micro in range(batch.ranked.num_micro_batches):
                    part = batch.ranked.sample_ids[batch.ranked.sequences_of(micro)]
                    assert len(part) % 2 == 0 and (part[::2] == part[1::2]).all()
                    seen[step].extend(part[::2].tolist())

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [sorted(step) for step in seen]

    alone = steps(1)
    assert [len(step) for step in alone] == [6] * 4 and sorted(alone[0] + alone[1]) == list(range(12))
    assert steps(3) == alone


def test_a_pair_of_a_row_is_parsed_as_prompt_and_completion_are(chat: ChatTokenizer) -> None:
    data = SFTConfig.model_validate({"data": {"path": "x"}, "preference": {}}).data
    chosen, rejected = parse_pair(FORMS["texts"], data, data, has_template=False)
    assert (chosen.prompt, chosen.completion, rejected.completion) == ("add", "number", "lower")  # type: ignore[union-attr]
