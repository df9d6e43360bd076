"""Messages to prompt tokens: one renderer per tokenizer, chosen by looking at the model, with a prompt cache.

Used by `prime_hpc.envs.policy`. Rendering is the only place where text becomes tokens, and only for text that the
model did not sample: what it did sample is kept as the ids that the engine returned.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from loguru import logger
from pydantic_core import to_json

from prime_hpc.envs.errors import EnvError

T = TypeVar("T")

CHATML_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
"""Single tokens that the `qwen3` renderer builds on."""
INLINE_CHARS = 20_000
"""A prompt up to this many characters is rendered on the event loop: about a millisecond, less than a thread hop costs
when many episodes wait."""
CACHE_PROMPTS = 2048
"""Rendered prompts kept: the episodes of a group start from the same one."""

PROBE = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi, 1+1."}]
"""A conversation on which the renderer and the tokenizer's own chat template must agree."""


class PromptRenderer:
    """Renders and extends prompts, parses replies. Safe to share by all episodes of one event loop."""

    def __init__(self, tokenizer: Any, renderer: Any) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())
        self._cache: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()  # encoding changes a fast tokenizer's state

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Any:
        """Tokens of a whole prompt, generation prompt included: a `renderers.RenderedTokens`, not to be changed."""
        key = to_json((messages, tools))
        rendered = self._cache.get(key)
        if rendered is not None:
            self._cache.move_to_end(key)
            return rendered
        rendered = await self._run(
            len(key), lambda: self.renderer.render(messages, tools=tools, add_generation_prompt=True)
        )
        self._cache[key] = rendered
        if len(self._cache) > CACHE_PROMPTS:
            self._cache.popitem(last=False)
        return rendered

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
            size, lambda: self.renderer.bridge_to_next_turn(previous[0], previous[1], tail, tools=tools)
        )

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


def load_prompt_renderer(tokenizer_path: str, renderer: str, enable_thinking: bool) -> PromptRenderer:
    """Load the tokenizer and its renderer.

    Args:
        tokenizer_path: local directory or hub name.
        renderer: a name of the `renderers` package, or `auto`.
        enable_thinking: whether the chat template opens a think section.

    Raises:
        EnvError: no tokenizer there, no such renderer, or the tokenizer lacks tokens that the renderer needs.
    """
    from renderers.base import load_tokenizer

    try:
        tokenizer = load_tokenizer(tokenizer_path)
    except (OSError, ValueError, KeyError) as error:
        raise EnvError(f"cannot load a tokenizer from {tokenizer_path!r}: {error}") from error
    if renderer != "auto":
        return PromptRenderer(tokenizer, make_renderer(tokenizer, renderer, enable_thinking))
    return PromptRenderer(tokenizer, choose_renderer(tokenizer, enable_thinking))


def make_renderer(tokenizer: Any, name: str, enable_thinking: bool) -> Any:
    """The `renderers` renderer of that name; `enable_thinking` and whole histories where it has such knobs.

    Raises:
        EnvError: an unknown name, or a tokenizer that does not fit.
    """
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
            options["enable_thinking"] = enable_thinking  # passed on to the template
            if "<tool_call>" in tokenizer.get_vocab():
                options["tool_parser"] = "qwen3"
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(options))
    except (ValidationError, ValueError, AssertionError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise EnvError(
            f"renderer {name!r} does not fit this model: {text}. Set model.renderer to another name of the "
            "`renderers` package, or to `auto`"
        ) from error


def choose_renderer(tokenizer: Any, enable_thinking: bool) -> Any:
    """`auto`: `qwen3` for ChatML models with Qwen3's control tokens, else what `renderers` knows for the model's name,
    else `default` (the tokenizer's own chat template; every turn is then a sample of its own)."""
    from renderers import create_renderer
    from renderers.configs import AutoRendererConfig

    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in CHATML_TOKENS):
        # A ChatML template that knows no think section, or always closes one, is Qwen3's with the other setting.
        for thinking in (enable_thinking, not enable_thinking):
            renderer = make_renderer(tokenizer, "qwen3", thinking)
            if agrees_with_template(tokenizer, renderer, enable_thinking):
                return renderer
        logger.warning(
            "the `qwen3` renderer and the tokenizer's chat template render a probe differently: supervised "
            "fine-tuning and RL would see different prompts. Check model.enable_thinking ({}) or model.renderer",
            enable_thinking,
        )
        return make_renderer(tokenizer, "qwen3", enable_thinking)
    if getattr(tokenizer, "chat_template", None) is None:
        raise EnvError("the tokenizer has no chat template; set model.renderer to one that fits the model")
    try:
        renderer = create_renderer(tokenizer, AutoRendererConfig())
    except (ValueError, OSError) as error:
        logger.debug("renderers has no entry for this model ({}); using its chat template", error)
    else:
        if type(renderer).__name__ != "DefaultRenderer":
            return renderer
    return make_renderer(tokenizer, "default", enable_thinking)


def agrees_with_template(tokenizer: Any, renderer: Any, enable_thinking: bool) -> bool:
    """Whether the renderer gives the chat template's ids on a probe; true when there is no template to compare."""
    if getattr(tokenizer, "chat_template", None) is None:
        return True
    text = tokenizer.apply_chat_template(
        PROBE, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    expected = tokenizer.encode(text, add_special_tokens=False)
    return list(renderer.render(PROBE, add_generation_prompt=True).token_ids) == list(expected)
