"""The renderer that `auto` chooses, and its agreement with the tokenizer's chat template."""

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import renderers
from renderers.base import RenderedTokens
from verifiers.v1.types import SamplingConfig, Tool, UserMessage

from prime_hpc.envs import rendering
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.model_client import ContextFullError, PolicyClient, RequestRefusedError
from prime_hpc.envs.rendering import (
    PROBE,
    PromptRenderer,
    agrees_with_template,
    choose_renderer,
    load_prompt_renderer,
    make_renderer,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.tiny_tokenizer import make_tokenizer

PLAIN = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return make_tokenizer(tmp_path)


def probe_text(tokenizer: Any, renderer: Any) -> str:
    return tokenizer.decode(renderer.render(PROBE, add_generation_prompt=True).token_ids)


@pytest.mark.parametrize("thinking", [True, False])
def test_auto_follows_the_template(tokenizer: Any, thinking: bool) -> None:
    renderer = choose_renderer(tokenizer, thinking)
    assert type(renderer).__name__ == "Qwen3Renderer"
    assert agrees_with_template(tokenizer, renderer, thinking)
    assert probe_text(tokenizer, renderer).endswith("assistant\n" if thinking else "</think>\n\n")


def test_auto_sees_a_template_without_think_sections(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    renderer = choose_renderer(tokenizer, False)
    assert type(renderer).__name__ == "Qwen3Renderer"
    assert probe_text(tokenizer, renderer).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2_5", "qwen3"),
        ("qwen3", "qwen3"),
        ("qwen3_instruct_2507", "qwen3"),
        ("qwen3_5_nothink", "qwen3.5"),
        ("qwen3_6", "qwen3.5"),
        ("qwen3_8", "qwen3.8"),
    ],
)
def test_auto_tells_the_families_of_one_vocabulary_apart_by_their_tools(
    template: str, expected: str, thinking: bool
) -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer = pytest.importorskip("prime_hpc.starter.tokenizer").build_tokenizer(512)
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    found = choose_renderer(tokenizer, thinking)
    if template == "qwen3_8" and not thinking:
        expected = "qwen3.5"  # the same prompts and calls
    assert found.config.name == expected
    tokenizer.chat_template += "{{- 'Be brave.' -}}"
    with pytest.raises(EnvError, match="is none that the renderers qwen3, prime-qwen3.* write"):
        choose_renderer(tokenizer, thinking)


LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
NAMED = {
    "glm4moe": ("zai-org/GLM-4.5-Air", "glm45"),
    "llama3_2": (LLAMA, "llama_3"),
    "nemotron_3_nano": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron3"),
    "gemma4_v5": ("google/gemma-4-E2B-it", "gemma4"),
    "qwen3_vl": ("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl"),
}
"""Published chat templates -> a model of theirs, the module of its renderer."""


def with_template(template: str, module: str) -> Any:
    """The starter's tokenizer with a published chat template, and the tokens that a renderer is built on."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer = pytest.importorskip("prime_hpc.starter.tokenizer").build_tokenizer(512)
    code = (Path(renderers.__file__).parent / f"{module}.py").read_text()
    tokens = set(re.findall(r"<[^\s\"'<>{}]{2,30}>|\[gMASK\]", code))
    tokenizer.add_tokens(sorted(tokens))
    tokenizer.bos_token = next((t for t in ("<|begin_of_text|>", "<bos>") if t in tokens), None)
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("template", NAMED)
def test_auto_refuses_a_renderer_whose_model_s_template_writes_something_else(template: str) -> None:
    name, module = NAMED[template]
    tokenizer = with_template(template, module)
    tokenizer.name_or_path = name
    assert agrees_with_template(tokenizer, choose_renderer(tokenizer, True), True)
    spoken = tokenizer.chat_template
    tokenizer.chat_template = spoken + "{{- 'Be brave.' -}}"
    with pytest.raises(EnvError, match=r"is none that the renderer \S+ writes.*Set model.renderer to `default`"):
        choose_renderer(tokenizer, True)
    tokenizer.chat_template = spoken + "{%- if tools -%}{{- ' ' -}}{%- endif -%}"  # where there are tools alone
    with pytest.raises(EnvError, match="is none that the renderer"):
        choose_renderer(tokenizer, True)


def test_auto_leaves_images_to_a_template_that_no_renderer_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-VL's, whose vocabulary has no thoughts."""
    tokenizer = with_template("qwen2_5_vl", "qwen3_vl")
    known = {token: number for token, number in tokenizer.get_vocab().items() if token != "</think>"}
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: known)
    found = PromptRenderer(tokenizer, choose_renderer(tokenizer, False, vision=True), vision=True)
    assert found.renderer.config.name == "default" and found.image_places == {known["<|image_pad|>"]: 1}


def test_a_renderer_that_there_is_not_is_said_in_a_line() -> None:
    with pytest.raises(EnvError, match="renderer 'foo' does not fit this model: Input tag 'foo'") as caught:
        make_renderer(with_template("llama3_2", "llama_3"), "foo", False)
    assert "RendererConfig" not in str(caught.value)


def test_a_template_that_writes_the_day_is_compared_without_it() -> None:
    tokenizer = with_template("llama3_2", "llama_3")
    renderer = make_renderer(tokenizer, "llama-3", False)
    assert "26 Jul 2024" in probe_text(tokenizer, renderer)
    assert "26 Jul 2024" not in tokenizer.apply_chat_template(PROBE, tokenize=False)
    assert agrees_with_template(tokenizer, renderer, False)
    tokenizer.chat_template = tokenizer.chat_template.replace("Cutting Knowledge", "Cutoff")
    assert not agrees_with_template(tokenizer, renderer, False)


CALL = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' -}}
{{- ARGUMENTS + '}\\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (CALL.replace("ARGUMENTS", "(c.function.arguments | tojson)"), "qwen3"),
        (CALL.replace("ARGUMENTS", "c.function.arguments"), "qwen3"),  # takes JSON text, as DeepSeek-V3's does
        (CALL.replace("ARGUMENTS", "(c.function.arguments | tojson)").replace("tool_call>", "call>"), None),
        (CALL.replace("ARGUMENTS", "raise_exception('no tools')"), None),
        (PLAIN, None),
    ],
    ids=["objects", "text", "other words", "refused", "no tools"],
)
def test_the_template_itself_gets_the_parser_that_reads_its_calls(
    tokenizer: Any, template: str, parser: str | None
) -> None:
    tokenizer.chat_template = template
    renderer = make_renderer(tokenizer, "default", False)
    assert renderer.config.tool_parser == parser
    assert PromptRenderer(tokenizer, renderer).reads_tool_calls == (parser is not None)


@pytest.mark.parametrize(("template", "parser"), [("qwen3", "qwen3"), ("qwen3_6", "qwen3.5"), ("glm4moe", "glm")])
def test_published_templates_get_the_parser_that_reads_their_calls(template: str, parser: str) -> None:
    tokenizer = with_template(template, "glm45")
    assert make_renderer(tokenizer, "default", False).config.tool_parser == parser


def test_tools_are_refused_where_nothing_reads_their_calls(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    client = PolicyClient(
        "http://127.0.0.1:9", None, PromptRenderer(tokenizer, make_renderer(tokenizer, "default", False)), 64, 1.0
    )
    tools = [Tool(name="add", description="", parameters={})]
    sampling = SamplingConfig(max_tokens=4)
    messages: list[Any] = [UserMessage(content="hi")]
    with pytest.raises(RequestRefusedError, match=r"tools \(add\), and nothing here reads calls"):
        asyncio.run(client.sample(messages, tools, sampling, "policy", None, None))


def test_auto_takes_the_renderer_of_the_model_s_name(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    for path in ("PrimeIntellect/Qwen3-0.6B", "/cache/hub/models--PrimeIntellect--Qwen3-0.6B/snapshots/0123"):
        tokenizer.name_or_path = path
        assert type(choose_renderer(tokenizer, True)).__name__ == "PrimeQwen3Renderer"
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    assert type(choose_renderer(tokenizer, True)).__name__ == "Qwen3Renderer"


def test_auto_falls_back_to_the_template_of_other_models(tokenizer: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>")
    with pytest.raises(EnvError, match="no chat template"):
        choose_renderer(other, False)
    other.chat_template = PLAIN
    assert type(choose_renderer(other, False)).__name__ == "DefaultRenderer"


def test_the_starter_s_tokenizer_and_the_renderer_agree() -> None:
    starter = pytest.importorskip("prime_hpc.starter.tokenizer")
    tokenizer = starter.build_tokenizer(512)
    assert agrees_with_template(tokenizer, choose_renderer(tokenizer, False), False)


def test_unknown_renderers_are_refused(tokenizer: Any) -> None:
    with pytest.raises(EnvError, match="renderer 'qwenn' does not fit"):
        make_renderer(tokenizer, "qwenn", False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError"),
        ("{{ raise_exception('not this one') }}", "not this one"),
        ("{{ messages | unknown_filter }}", "unknown_filter"),
        ("{{ messages + 1 }}", "TypeError"),
        ({"rag": PLAIN, "tool_use": PLAIN}, "no default specified"),
    ],
)
@pytest.mark.parametrize("renderer", ["auto", "default"])
def test_a_template_that_cannot_write_a_prompt_is_named(
    tokenizer: Any, tmp_path: Path, template: Any, said: str, renderer: str
) -> None:
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(EnvError, match=rf"the chat template of .*model cannot write a prompt .*{said}"):
        load_prompt_renderer(str(tmp_path / "model"), renderer, enable_thinking=False)


def test_the_template_that_the_weights_were_trained_with_goes_before_the_tokenizers(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(tmp_path / "model")
    own = "{{- '<|im_start|>own' -}}" + PLAIN
    loaded = load_prompt_renderer(str(tmp_path / "model"), "default", False, chat_template=own)
    ids = loaded.renderer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True).token_ids
    assert tokenizer.decode(ids).startswith("<|im_start|>own")


def test_a_template_without_the_user_s_words_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "<|im_start|>assistant\n"
    with pytest.raises(EnvError, match="leaves out what the user says"):
        make_renderer(tokenizer, "default", False)


def test_identical_prompts_are_rendered_once(tokenizer: Any) -> None:
    renderer = PromptRenderer(tokenizer, choose_renderer(tokenizer, False))

    async def render(text: str) -> Any:
        return await renderer.render([{"role": "user", "content": text}], None)

    first, second, other = (asyncio.run(render(text)) for text in ("red fox", "red fox", "red box"))
    assert first is second and first.token_ids != other.token_ids
    long = asyncio.run(render("word " * 20_000))  # on a thread
    assert long.token_ids[:3] == first.token_ids[:3] and len(long.token_ids) > 20_000


def test_a_tokenizer_s_own_code_runs_only_where_it_is_trusted(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (tmp_path / "own_tokenizer.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).write_text('it ran')\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    path.write_text(json.dumps(config))
    with contextlib.suppress(EnvError):  # without its code it may still be read as a plain one
        load_prompt_renderer(str(tmp_path), "auto", False)
    assert not ran.exists()
    renderer = load_prompt_renderer(str(tmp_path), "auto", False, trust_remote_code=True)
    assert ran.exists() and type(renderer.tokenizer).__name__ == "OwnTokenizer"


class Plain:
    """A renderer of which a prompt has as many tokens as letters."""

    def get_stop_token_ids(self) -> list[int]:
        return [0]

    def render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return RenderedTokens(token_ids=list(range(len(messages[0]["content"]))))


def test_prompts_are_kept_by_number_and_by_tokens(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CACHE_PROMPTS", 4)
    monkeypatch.setattr(rendering, "CACHE_TOKENS", 100)
    renderer = PromptRenderer(tokenizer, Plain())

    def kept(*prompts: str) -> list[int]:
        async def render() -> None:
            for prompt in prompts:
                await renderer.render([{"role": "user", "content": prompt}], None)

        asyncio.run(render())
        lengths = [len(one.token_ids) for one in renderer._cache.values()]
        assert renderer._num_cached_tokens == sum(lengths)
        return lengths

    assert kept("a", "ab", "abc", "abcd") == [1, 2, 3, 4]
    assert kept("a", "abcde") == [3, 4, 1, 5], "the one that was asked for again stays"
    assert kept("x" * 95) == [5, 95]
    assert kept("y" * 200) == [], "one that is too long by itself is not kept"
    assert kept("a", "b", "c", "d", "e") == [1, 1, 1, 1]


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BAD = "<tool_call>\n{no JSON}\n</tool_call>"
UNREADABLE = [  # by Python, though it is JSON, or as a call
    ONE.replace("1}}", "1" * 5000 + "}}"),
    ONE.replace("1}}", "[" * 11_000 + "]" * 11_000 + "}}"),  # Python 3.13 reads 10,000
    ONE.replace('"add"', "5"),
]


async def ask(server: ScriptedServer, renderer: PromptRenderer, prompt: str) -> Any:
    client = PolicyClient(server.url, "key", renderer, 40_000, patience_s=0)
    messages: list[Any] = [UserMessage(content=prompt)]
    tools = [Tool(name="add", description="Add.", parameters={})]
    try:
        return await client.sample(messages, tools, SamplingConfig(), "policy", None, None)
    finally:
        await client.close()


def test_a_reply_that_the_engine_cut_off_for_repeating_itself_is_a_truncated_one(tokenizer: Any) -> None:
    """vLLM's word for it (`repetition_detection`) passed for none at all, and that for a generation that was aborted:
    another reply was sampled, until the prompt had one that does not repeat itself."""
    renderer = PromptRenderer(tokenizer, make_renderer(tokenizer, "qwen3", False))
    with ScriptedServer(tokenizer, lambda prompt, number: Reply("a a a", finish_reason="repetition")) as server:
        response = asyncio.run(ask(server, renderer, "say"))
    assert (response.finish_reason, response.message.content) == ("length", "a a a")


def test_a_text_that_cannot_fit_is_not_encoded_to_its_end(tokenizer: Any) -> None:
    """It would hold up all other episodes for a minute."""
    encode, seen = tokenizer.encode, [0]

    def counted(text: str, **options: Any) -> Any:
        seen[0] += len(text)
        return encode(text, **options)

    tokenizer.encode = counted
    renderer = PromptRenderer(tokenizer, make_renderer(tokenizer, "qwen3", False))
    full = "more tokens than the model's context, 40000"
    with ScriptedServer(tokenizer, lambda prompt, number: "hi") as server, pytest.raises(ContextFullError, match=full):
        asyncio.run(ask(server, renderer, "two words " * 200_000))
    assert seen[0] < 200_000
    spaces = [{"role": "user", "content": " " * 200_000}]  # many to a token
    tokenizer.encode = lambda text, **options: [0] * (len(text) // 100)
    assert not asyncio.run(renderer.overflows(spaces, 10_000))


@pytest.mark.parametrize("name", ["qwen3", "default"])
@pytest.mark.parametrize(
    ("reply", "content", "num_calls"),
    [
        ("plain", "plain", 0),
        (f"I add. {ONE}", "I add.", 1),
        (ONE[:-20], ONE[:-20], 0),
        (f"I add. {BAD} So it is 2.", f"I add.\n{BAD} So it is 2.", 0),
        (f"<think>so</think>{BAD}", BAD, 0),
        (f"I add. {ONE} and {BAD}", f"I add.\n{BAD}", 1),
        *((text, text, 0) for text in UNREADABLE),
    ],
)
def test_a_call_that_cannot_be_read_stays_in_the_text(
    name: str, reply: str, content: str, num_calls: int, tokenizer: Any
) -> None:
    """Rewards, traces and the next prompt would see an empty reply."""
    if name == "default":
        tokenizer.chat_template = CALL.replace("ARGUMENTS", "(c.function.arguments | tojson)")
    made = make_renderer(tokenizer, name, False)
    with ScriptedServer(tokenizer, lambda prompt, number: reply) as server:
        message = asyncio.run(ask(server, PromptRenderer(tokenizer, made), "1 + 1")).message
    assert ((message.content or "").rstrip(), len(message.tool_calls or [])) == (content, num_calls)
