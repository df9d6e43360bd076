"""Messages to prompt tokens: one renderer per tokenizer, chosen by looking at the model, with a prompt cache.

Rendering is the only place where text becomes tokens, and only for text that the model did not sample: what it did
sample is kept as the ids that the engine returned.
"""

import asyncio
import copy
import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

from prime_hpc.envs.errors import EnvError
from prime_hpc.store.model.tokenizer import load_tokenizer

T = TypeVar("T")

CHATML_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
"""Single tokens that Qwen's renderers build on."""
INLINE_CHARS = 20_000
"""A prompt up to this many characters is rendered on the event loop: about a millisecond, less than a thread hop costs
when many episodes wait."""
CHARS_A_TOKEN = 8
"""Texts of more characters a token of the context are not expected to fit."""
TOKENS_OF_A_CUT = 16
"""By which a text has fewer tokens, at most, than its two parts."""
SHORT_CHARS = 64
"""Texts up to this long are remembered with their tokens: headers, separators, markers."""
MAX_TEXTS = 4096
CACHE_PROMPTS = 2048
"""Rendered prompts kept: the episodes of a group start from the same one."""
CACHE_TOKENS = 1 << 20
"""Tokens of all of them, each of which takes some 100 bytes, in every process that plays episodes."""

PROBE: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi, 1+1."}]
"""A conversation on which the renderer and the tokenizer's own chat template must agree."""
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
PROBE_CALL: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
]
"""How it may go on, with `PROBE_TOOLS`."""
SEEING_RENDERERS = ("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")
"""Those of a model that sees images."""
IMAGE_TOKEN = "<|image_pad|>"
"""As Qwen's chat templates write an image."""
PROBE_IMAGE: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "image"}}, {"type": "text", "text": "Hi?"}]}
]
QWEN_RENDERERS = ("qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8")
"""For models with `CHATML_TOKENS`: they differ in tools, their calls, and think sections."""
EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
DATE = re.compile(r"\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w* \d{4}|\d{4}-\d{2}-\d{2}")
"""Of today in some templates, of a fixed day in their renderers."""


class PromptRenderer:
    """Renders and extends prompts, parses replies. Safe to share by all episodes of one event loop."""

    def __init__(self, tokenizer: Any, renderer: Any, *, vision: bool = False) -> None:
        """Take a tokenizer and its renderer.
        Raises EnvError: prompts hold images (`vision`), and the renderer writes none."""
        cache_short_texts(tokenizer)
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())
        self.reads_tool_calls: bool = getattr(renderer, "supports_tools", True)
        """False if nothing tells the model's tool calls from its text."""
        self.image_places: dict[int, int] = {}
        """Tokens that stand for images (1) or videos (2); none where prompts are text alone."""
        self._how: dict[str, Any] = {}
        if vision:
            self.image_places = _image_places(tokenizer, renderer)
            if getattr(renderer, "supports_process_multimodal", False):
                self._how = {"process_multimodal": False}  # one token for an image: the engine makes the others
        self._cache: OrderedDict[bytes, Any] = OrderedDict()
        self._num_cached_tokens = 0
        self._lock = threading.Lock()  # encoding changes a fast tokenizer's state

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Any:
        """Tokens of a whole prompt, generation prompt included: a `renderers.RenderedTokens`, not to be changed."""
        key = to_json((messages, tools))
        rendered = self._cache.get(key)
        if rendered is not None:
            self._cache.move_to_end(key)
            return rendered
        rendered = await self._run(
            len(key), lambda: self.renderer.render(messages, tools=tools, add_generation_prompt=True, **self._how)
        )
        self._keep(key, rendered)
        return rendered

    def _keep(self, key: bytes, rendered: Any) -> None:
        """Remember a prompt, and forget those that were asked for longest ago where there are too many."""
        if key in self._cache:  # another episode has rendered it meanwhile
            return
        self._cache[key] = rendered
        self._num_cached_tokens += len(rendered.token_ids)
        while self._cache and (len(self._cache) > CACHE_PROMPTS or self._num_cached_tokens > CACHE_TOKENS):
            _, forgotten = self._cache.popitem(last=False)
            self._num_cached_tokens -= len(forgotten.token_ids)

    def lead(self, text: str) -> list[int]:
        """Tokens of a system message that a conversation may follow."""
        messages = [{"role": "system", "content": text}]
        return list(self._locked(lambda: self.renderer.render(messages, add_generation_prompt=False).token_ids))

    async def bridge(
        self,
        previous: tuple[list[int], list[int]],
        tail: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> Any | None:
        """Extend (prompt ids, completion ids) by new messages without touching them; None where it cannot."""
        size = sum(len(str(message.get("content") or "")) for message in tail)
        return await self._run(
            size, lambda: self.renderer.bridge_to_next_turn(previous[0], previous[1], tail, tools=tools, **self._how)
        )

    async def overflows(self, messages: list[dict[str, Any]], most: int) -> bool:
        """Return whether the texts of messages have more tokens than `most`, without encoding more of them than shows
        it: a tool's ten megabytes take most of a minute, in which no other episode's text is encoded."""
        texts = [text for message in messages for text in _texts(message.get("content"))]
        if sum(map(len, texts)) <= CHARS_A_TOKEN * most:
            return False
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), INLINE_CHARS):
                piece = text[start : start + INLINE_CHARS]
                encode = functools.partial(self.tokenizer.encode, piece, add_special_tokens=False)
                num_tokens += len(await asyncio.to_thread(self._locked, encode)) - TOKENS_OF_A_CUT
                if num_tokens > most:
                    return True
        return False

    def exclusively(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call what uses this tokenizer, while nobody else does; for threads, since it may wait."""
        return self._locked(functools.partial(call, *arguments))

    async def _run(self, num_chars: int, call: Callable[[], T]) -> T:
        """Call inline when short, else on a thread; one encode at a time either way."""
        if num_chars <= INLINE_CHARS and self._lock.acquire(blocking=False):
            try:
                return call()
            finally:
                self._lock.release()
        return await asyncio.to_thread(self._locked, call)

    def _locked(self, call: Callable[[], T]) -> T:
        with self._lock:
            return call()


def _texts(content: Any) -> list[str]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [part["text"] for part in parts if part["type"] == "text"]


def _image_places(tokenizer: Any, renderer: Any) -> dict[int, int]:
    """Return the tokens that stand for images (1) or videos (2): the renderer's, or of one that leaves all to the chat
    template, the one that this writes for an image. Raises EnvError: it writes none."""
    if getattr(renderer, "supports_process_multimodal", False):
        return dict(renderer.mm_token_type_id_map)
    name = getattr(getattr(renderer, "config", None), "name", type(renderer).__name__)
    token = tokenizer.get_vocab().get(IMAGE_TOKEN)
    if name == "default" and token is not None:
        written = tokenizer.encode(_by_template(tokenizer, PROBE_IMAGE, None, False), add_special_tokens=False)
        if written.count(token) == 1:
            return {token: 1}
    raise EnvError(
        f"renderer {name!r} writes prompts without images, and model.vision is set: set model.renderer to one of "
        f"{', '.join(SEEING_RENDERERS)}, or to `default` where the model's chat template writes {IMAGE_TOKEN} for an "
        "image; or leave model.vision out"
    )


def cache_short_texts(tokenizer: Any) -> None:
    """Have a tokenizer keep the tokens of short texts: renderers encode the same headers for every reply. Idempotent.
    `tokenizer`: its vocabulary must not change any more."""
    encode = tokenizer.encode
    if getattr(encode, "remembers", False):
        return
    known: dict[str, tuple[int, ...]] = {}

    def encode_once(text: Any, *args: Any, **options: Any) -> Any:
        plain = not args and options == {"add_special_tokens": False}
        if not plain or not isinstance(text, str) or len(text) > SHORT_CHARS:
            return encode(text, *args, **options)
        found = known.get(text)
        if found is None:
            if len(known) >= MAX_TEXTS:
                known.clear()
            found = known[text] = tuple(encode(text, **options))
        return list(found)

    vars(encode_once)["remembers"] = True
    tokenizer.encode = encode_once


def load_prompt_renderer(
    tokenizer_path: str,
    renderer: str,
    enable_thinking: bool,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    vision: bool = False,
) -> PromptRenderer:
    """Load the tokenizer and its renderer.

    Args:
        tokenizer_path: local directory or hub name.
        renderer: a name of the `renderers` package, or `auto`.
        chat_template: what the weights were trained with, in the place of the tokenizer's own.

    Raises:
        EnvError: no tokenizer there, no such renderer, the tokenizer lacks tokens that the renderer needs, or the
            renderer writes no images.
    """
    from renderers import base

    by_name = functools.partial(base.load_tokenizer, tokenizer_path)
    try:
        if not trust_remote_code and tokenizer_path in base.TRUSTED_REVISIONS | base.TOKENIZER_SOURCE_OVERRIDES:
            tokenizer = by_name()
        else:
            otherwise = None if trust_remote_code else by_name
            tokenizer = load_tokenizer(tokenizer_path, otherwise, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise EnvError(f"cannot load a tokenizer from {tokenizer_path!r}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if renderer != "auto":
        return PromptRenderer(tokenizer, make_renderer(tokenizer, renderer, enable_thinking), vision=vision)
    return PromptRenderer(tokenizer, choose_renderer(tokenizer, enable_thinking, vision=vision), vision=vision)


def make_renderer(tokenizer: Any, name: str, enable_thinking: bool) -> Any:
    """Return the `renderers` renderer of that name; `enable_thinking` and whole histories where it has such knobs.
    Raises EnvError: an unknown name, or a tokenizer that does not fit."""
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig, create_renderer

    options: dict[str, Any] = {"name": name}
    try:
        config_type = type(TypeAdapter(RendererConfig).validate_python(options))
        if "enable_thinking" in config_type.model_fields:
            options["enable_thinking"] = enable_thinking
            # A new user message must extend the tokens so far, or every turn becomes a training sample of its own.
            options["thinking_retention"] = "all"
        elif name == "default":
            _require_shown(tokenizer, enable_thinking)
            options["enable_thinking"] = enable_thinking  # passed on to the template
            options["tool_parser"] = _tool_parser(tokenizer, enable_thinking)
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(options))
    except (ValidationError, ValueError, AssertionError, TypeError, RuntimeError, OSError) as error:
        # of a union pydantic's first line names every type in it
        text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise EnvError(
            f"renderer {name!r} does not fit this model: {text}. Set model.renderer to another name of the "
            "`renderers` package, or to `auto`"
        ) from error


def choose_renderer(tokenizer: Any, enable_thinking: bool, *, vision: bool = False) -> Any:
    """`auto`: what `renderers` knows for the model's name; else, of a ChatML model with Qwen's control tokens, the one
    of Qwen's renderers that agrees with its chat template; else `default` (the tokenizer's own chat template; every
    turn is then a sample of its own).
    Raises EnvError: neither a template nor a name that is known, or no renderer agrees with the template: RL would show
    the model other prompts than supervised fine-tuning does, and read its tool calls otherwise."""
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(hub_name(tokenizer))
    if known is not None:
        return _agreeing(tokenizer, [known], enable_thinking, vision)
    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in CHATML_TOKENS):
        return _agreeing(tokenizer, SEEING_RENDERERS if vision else QWEN_RENDERERS, enable_thinking, vision)
    if getattr(tokenizer, "chat_template", None) is None:
        raise EnvError("the tokenizer has no chat template; set model.renderer to one that fits the model")
    return make_renderer(tokenizer, "default", enable_thinking)


def hub_name(tokenizer: Any) -> str:
    """`organisation/model` of a tokenizer loaded by that name or from the hub's cache, else where it is from."""
    path = str(getattr(tokenizer, "name_or_path", ""))
    cached = re.search(r"models--([^/]+)--([^/]+)(/|$)", path)
    return f"{cached[1]}/{cached[2]}" if cached else path


def _agreeing(tokenizer: Any, names: Sequence[str], enable_thinking: bool, vision: bool) -> Any:
    """Return the first of the renderers that agrees with the chat template; without a template the first that fits."""
    unfit: list[EnvError] = []
    # A ChatML template that knows no think section, or always closes one, is a renderer's with the other setting.
    for name in names:
        for thinking in (enable_thinking, not enable_thinking):
            try:
                renderer = make_renderer(tokenizer, name, thinking)
            except EnvError as error:  # it builds on tokens that this tokenizer lacks
                unfit.append(error)
                continue
            if agrees_with_template(tokenizer, renderer, enable_thinking, vision=vision):
                return renderer
    if len(unfit) == 2 * len(names):
        raise unfit[0]
    write = f"the renderers {', '.join(names)} write" if len(names) > 1 else f"the renderer {names[0]} writes"
    raise EnvError(
        f"the tokenizer's chat template (model.enable_thinking = {enable_thinking}) is none that {write}: RL would "
        "show the model other prompts or tools than its template. Set model.renderer to `default` (the template "
        "itself; every turn is then a sample of its own) or to the one that you mean"
    )


def agrees_with_template(tokenizer: Any, renderer: Any, enable_thinking: bool, *, vision: bool = False) -> bool:
    """Return whether the renderer gives the chat template's prompts; true when there is no template to compare.

    Compared are a first prompt, with `vision` one with an image, and where the template knows tools, one with tools,
    and one after a tool call and its result. In the past, empty think sections do not count: templates take out or
    leave what was sampled there, and a renderer that extends the tokens so far must not. Nor do dates: a template that
    writes today's gives other prompts every day.
    """
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return True
    probes: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [(PROBE, None)]
    if "tools" in str(template):
        probes += [(PROBE, PROBE_TOOLS), ([*PROBE, *PROBE_CALL], PROBE_TOOLS)]
    if vision and getattr(renderer, "supports_process_multimodal", False):
        probes.append((PROBE_IMAGE, None))
    for messages, tools in probes:
        how = {"process_multimodal": False} if messages is PROBE_IMAGE else {}
        text = _by_template(tokenizer, messages, tools, enable_thinking)
        expected = tokenizer.encode(text, add_special_tokens=False)
        found = list(renderer.render(messages, tools=tools, add_generation_prompt=True, **how).token_ids)
        if found != expected and not _same_but_for(tokenizer, found, expected, past=len(messages) > 2):
            return False
    return True


def _same_but_for(tokenizer: Any, found: list[int], expected: list[int], *, past: bool) -> bool:
    """Return whether two prompts differ in dates alone; with `past` also in empty think sections."""
    texts = [DATE.sub("<date>", tokenizer.decode(ids, skip_special_tokens=False)) for ids in (found, expected)]
    dated = "<date>" in texts[0]  # else the same text in other tokens is another prompt
    if past:
        texts = [EMPTY_THINK.sub("", text) for text in texts]
    return (past or dated) and texts[0] == texts[1]


def _tool_parser(tokenizer: Any, enable_thinking: bool) -> str | None:
    """Return the parser of `renderers` that reads a tool call as the chat template writes it; None: none does."""
    from renderers.parsers import TOOL_PARSERS, get_tool_parser

    if "tool_calls" not in str(getattr(tokenizer, "chat_template", None)):
        return None
    try:
        called = _by_template(tokenizer, [*PROBE, *PROBE_CALL[:1]], PROBE_TOOLS, enable_thinking)
    except EnvError:  # it speaks of them, and refuses them
        return None
    reply = called.rpartition(PROBE[-1]["content"])[2]
    wanted = PROBE_CALL[0]["tool_calls"][0]["function"]
    for name in TOOL_PARSERS:
        try:
            _, calls = get_tool_parser(name, tokenizer).extract(tokenizer.encode(reply, add_special_tokens=False))
        except (ValueError, TypeError, KeyError, IndexError):  # it builds on tokens that this tokenizer lacks
            continue
        if [(call.name, call.arguments) for call in calls] == [(wanted["name"], wanted["arguments"])]:
            return name
    return None


def _by_template(tokenizer: Any, messages: Sequence[Any], tools: Sequence[Any] | None, enable_thinking: bool) -> str:
    """Return a prompt as the tokenizer's chat template writes it; the arguments of tool calls as objects or, where it
    takes these, as the JSON text that they are in the API. Raises EnvError: the template cannot."""
    from jinja2 import TemplateError

    def write(messages: Sequence[Any]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=messages[-1]["role"] != "assistant",
            enable_thinking=enable_thinking,
        )
        return text

    try:
        try:
            return write(messages)
        except (TemplateError, TypeError):
            if not any("tool_calls" in message for message in messages):
                raise
            return write(_with_json_arguments(messages))
    except (TemplateError, TypeError, ValueError) as error:  # the last: of several templates none is the default
        raise EnvError(
            f"the chat template of {hub_name(tokenizer)} cannot write a prompt ({type(error).__name__}: {error}): mend "
            "it (chat_template.jinja or tokenizer_config.json beside the model), or set model.renderer to one of the "
            "`renderers` package that fits the model"
        ) from error


def _with_json_arguments(messages: Sequence[Any]) -> list[Any]:
    changed = copy.deepcopy(list(messages))
    for message in changed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed


def _require_shown(tokenizer: Any, enable_thinking: bool) -> None:
    """Raise EnvError where the chat template writes prompts without what the user said: nothing could be answered."""
    if getattr(tokenizer, "chat_template", None) is None:
        return
    said = PROBE[-1]["content"]
    if said not in _by_template(tokenizer, PROBE[-1:], None, enable_thinking):
        raise EnvError(
            f"the chat template of {hub_name(tokenizer)} leaves out what the user says: it is not this model's, or "
            "damaged (chat_template.jinja or tokenizer_config.json beside the model)"
        )
