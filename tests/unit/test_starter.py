"""The starter model, tokenizer and warm-up data: deterministic, and rendered alike by everyone who renders them."""

import json
import re
from pathlib import Path

import pytest

from prime_hpc.envs.tasksets.reverse_text_data import answer_of, build_prompt, make_texts
from prime_hpc.starter.data import RIGHT_SHARE, demonstrations
from prime_hpc.starter.make import make_starter
from prime_hpc.starter.tokenizer import build_tokenizer, find_phrases

pytest.importorskip("transformers")
pytest.importorskip("torch")

USER = {"role": "user", "content": "cold tea"}
SYSTEM = {"role": "system", "content": "Reverse é the text."}
REPLY = {"role": "assistant", "content": "aet dloc"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <a> & 'b' — über",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}},
    {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
]
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, REPLY, USER],
    [USER, REPLY, SYSTEM, USER, REPLY],
    [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "3"}],
    [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "let me see", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4\n"},
        REPLY,
        USER,
    ],
]


@pytest.fixture(scope="module", params=["reverse-text", "calculator"])
def starter(tmp_path_factory, request):
    """Tokens of bytes alone, and of whole phrases too."""
    directory = tmp_path_factory.mktemp("starter") / "new" / "dir"
    make_starter(directory, seed=3, task=request.param)
    return directory


@pytest.fixture(scope="module")
def tokenizer(starter):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(starter / "model")


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_one_seed_gives_one_starter_and_another_seed_another(starter, tmp_path):
    task = json.loads((starter / "starter.json").read_text())["task"]
    make_starter(tmp_path / "same", seed=3, task=task)
    make_starter(tmp_path / "other", seed=4, task=task)
    first, same, other = contents(starter), contents(tmp_path / "same"), contents(tmp_path / "other")
    assert first == same
    for name in ("model/model.safetensors", "sft.jsonl"):
        assert first[name] != other[name]


def test_a_made_starter_is_left_alone_and_a_broken_or_different_one_is_replaced(tmp_path):
    make_starter(tmp_path, seed=0)
    whole = contents(tmp_path)
    (tmp_path / "model" / "extra").write_text("kept while nothing has to be made")
    assert "already" in make_starter(tmp_path, seed=0)
    assert (tmp_path / "model" / "extra").exists()
    (tmp_path / "starter.json").write_text("{")
    make_starter(tmp_path, seed=0)
    assert contents(tmp_path) == whole
    (tmp_path / "sft.jsonl").unlink()
    make_starter(tmp_path, seed=0)
    (tmp_path / "starter.json").write_bytes(b"\xff")
    make_starter(tmp_path, seed=0)
    assert contents(tmp_path) == whole
    make_starter(tmp_path, seed=1)
    assert contents(tmp_path)["sft.jsonl"] != whole["sft.jsonl"]


def test_unknown_name_is_an_error_that_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"qwen3-tiny, qwen3-vl-tiny, smollm2-135m"):
        make_starter(tmp_path, name="qwen4")


def test_the_model_loads_and_has_exactly_the_tokenizers_vocabulary(starter, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(starter / "model")
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (starter / "model" / "model.safetensors").stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("text", ["cold tea", "  é\n\t日本語 🙂 ", "<think>\n\n</think>\n\na<tool_call>", "\x00ÿ"])
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("generation", [False, True], ids=["whole", "generation"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_template_equals_the_qwen3_renderer(tokenizer, messages, tools, generation):
    configs = pytest.importorskip("renderers.configs")
    qwen3 = pytest.importorskip("renderers.qwen3")
    renderer = qwen3.Qwen3Renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=False))
    expected = renderer.render_ids(messages, tools=tools, add_generation_prompt=generation)
    assert render(tokenizer, messages, tools=tools, add_generation_prompt=generation) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_prefix_property(tokenizer, messages):
    """A conversation's tokens begin with those of its first messages, and a reply with the generation prompt's."""
    whole = render(tokenizer, messages, tools=[TOOL])
    for end in range(1, len(messages)):
        if messages[end - 1]["role"] == messages[end]["role"] == "tool":
            continue  # results of one turn share one block: it is closed after the last
        is_reply = messages[end]["role"] == "assistant"
        prefix = render(tokenizer, messages[:end], tools=[TOOL], add_generation_prompt=is_reply)
        assert whole[: len(prefix)] == prefix


def test_demonstrations_are_written_for_sft(starter):
    task = json.loads((starter / "starter.json").read_text())["task"]
    rows = [json.loads(line) for line in (starter / "sft.jsonl").read_text().splitlines()]
    assert rows == demonstrations(3, task=task)


def test_demonstrations_are_a_mixture_of_reversed_and_copied_train_texts():
    rows = demonstrations(3)
    pairs = [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in rows]
    reversed_rows = sum(reply == answer_of(text) != text for text, reply in pairs)
    palindromes = sum(answer_of(text) == text for text, _ in pairs)
    assert abs(reversed_rows - RIGHT_SHARE * len(rows)) <= palindromes + 1
    assert all(reply in (text, answer_of(text)) for text, reply in pairs)
    assert len({text for text, _ in pairs}) == len(rows)


def test_no_held_out_text_is_in_the_demonstrations():
    held_out = set(make_texts("eval", 0, 512)) | set(make_texts("eval", 3, 512))
    shown = {row["prompt"][0]["content"] for row in demonstrations(3)}
    assert not held_out & shown


def test_demonstrations_are_posed_as_the_environment_poses_them():
    row = demonstrations(0, 4)[0]
    assert row["prompt"] == build_prompt(row["prompt"][0]["content"])
    assert [message["role"] for message in row["completion"]] == ["assistant"]


def guesses_of(row) -> tuple[int, int, list[int], list[str]]:
    """Range, guesses and the environment's answers of a demonstrated game."""
    first, *rest = [message["content"] for message in row["messages"]]
    low, high = (int(n) for n in re.findall(r"\d+", first))
    return low, high, [int(text) for text in rest[::2]], rest[1::2]


def test_demonstrated_games_halve_the_range_or_count_up():
    rows = demonstrations(3, 200, "guess-number")
    halving = counting = 0
    for row in rows:
        low, high, guesses, answers = guesses_of(row)
        assert row["messages"][-1]["role"] == "assistant" and len(answers) == len(guesses) - 1 < 5
        counting += guesses == list(range(low, low + len(guesses)))
        ends = (low, high)
        expected = []
        for answer in [*answers, ""]:
            guess = sum(ends) // 2
            expected.append(guess)
            ends = (guess + 1, ends[1]) if answer == "higher" else (ends[0], guess - 1)
        halving += guesses == expected
    assert counting >= 120 and halving >= 80 and max(counting, halving) < 200


def test_demonstrated_calls_are_what_the_tools_answer():
    rows = demonstrations(3, 200, "calculator")
    right = sums = 0
    for row in rows:
        question, *middle, last = row["messages"]
        expression = question["content"].removeprefix("What is ").removesuffix("?")
        assert {tool["function"]["name"] for tool in row["tools"]} == {"add", "multiply"}
        assert last["content"] == middle[-1]["content"]
        right += int(last["content"]) == eval(expression)
        sums += "*" not in expression
        assert len(middle) == 2 * (len(expression.split()) // 2), "a call for each sign"
        called = set()
        for call, result in zip(middle[::2], middle[1::2], strict=True):
            function = call["tool_calls"][0]["function"]
            a, b = function["arguments"].values()
            assert int(result["content"]) == (a + b if function["name"] == "add" else a * b)
            called.add(function["name"])
        assert int(last["content"]) == eval(expression) or called == {"add"}
    assert 200 * RIGHT_SHARE <= right <= 200 * RIGHT_SHARE + sums, "adding is right where a sum is asked"


def test_a_demonstrated_episode_is_short_and_tokenised_as_the_environment_does():
    qwen3 = pytest.importorskip("renderers.qwen3")
    configs = pytest.importorskip("renderers.configs")
    rows = demonstrations(3, 200, "calculator")
    tokenizer = build_tokenizer(4096, find_phrases(rows))
    renderer = qwen3.Qwen3Renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=False))
    for row in rows[:40]:
        messages, tools = row["messages"], row["tools"]
        whole = render(tokenizer, messages, tools=tools)
        assert len(whole) < 160, "declarations of tools cost about 640 bytes"
        tokens = renderer.render_ids(messages[:1], tools=tools, add_generation_prompt=True)
        for reply, result in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
            so_far = render(tokenizer, messages[: messages.index(reply) + 1], tools=tools)[:-1]  # less the line's end
            assert so_far[: len(tokens)] == tokens
            tokens = renderer.bridge_to_next_turn(tokens, so_far[len(tokens) :], [result], tools=tools).token_ids
            assert whole[: len(tokens)] == tokens


def test_unknown_task_is_an_error_that_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"reverse-text, guess-number, calculator"):
        make_starter(tmp_path, task="chess")
