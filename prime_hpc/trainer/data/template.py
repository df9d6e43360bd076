"""Conversations to token ids and a loss mask through the tokenizer's chat template.

Trained are a message's content and its end-of-turn token, never the header that the engine itself writes; of messages
that a template shows in one turn (tool results), each one's content, and the turn's end with the last. This needs
the *prefix property*: what the engine is shown at a turn (the messages before it and the header) and the conversation
up to the turn's end must both be beginnings of the whole conversation's tokens. It is checked at every trained message;
templates that rewrite the past (Qwen3's removes earlier think sections) are refused, with the place and the ways out.

The whole conversation is tokenised once. A place in the text is a place in the tokens where a token begins there and
the text since the last added token (which always stands alone) gives the same tokens when it ends there.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from prime_hpc.store.model.tokenizer import pad_of
from prime_hpc.trainer.data.images import ImageTokens
from prime_hpc.trainer.data.messages import COMMON_ROLES, Conversation, Message, PlainText, SFTDataError
from prime_hpc.trainer.data.sources import fingerprint_of

_MARK = "\u241econtent\u241e"  # stands for a message's content to find where it begins; no data holds it
_MARK_OF_TEXT = "text_that_no_data_holds_{}_"
_MARK_OF_CALL = "name_of_a_call_that_no_data_holds_{}_"
_BEFORE = "\u263a"
"""A character that takes part in no token with what follows it."""
_SHOWN = 12
"""Tokens shown on either side of a break."""


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template, rendering conversation prefixes."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        enable_thinking: bool = False,
        chat_template: str = "auto",
        images: ImageTokens | None = None,
    ) -> None:
        """Args:
            enable_thinking: handed to the template, as the environments do.
            chat_template: `auto`, `none` or a Jinja file, see `sft.data.chat_template`.
            images: reads the model's; None: rows are text alone.
        Raises SFTDataError: the file cannot be read."""
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self.images = images
        self._template, self.name = _read_template(tokenizer, chat_template)
        self._chosen = None if chat_template == "auto" else self._template  # None: of several, the one for tools
        self._added = set(tokenizer.get_added_vocab().values())
        first = tokenizer("a", verbose=False)["input_ids"][:1]
        self._begin = first if first == [tokenizer.bos_token_id] else []
        before = self.encode(_BEFORE)
        adds_space = self.encode(_BEFORE + "a") != before + self.encode("a")
        self._before = before if adds_space else []
        """Tokens to encode text behind, which is not to get the space that such a tokenizer puts before any text."""
        special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)  # not all have a name
        self._ends = {i for i in (tokenizer.eos_token_id, *tokenizer.all_special_ids, *special) if i is not None}

    @property
    def has_template(self) -> bool:
        """True if conversations can be rendered at all."""
        return bool(self._template)

    def pad_id(self, vocab_size: int) -> int:
        """Return the token that fills rows; never trained, never seen by another.
        `vocab_size`: of the model, which may lack a token that was added for padding."""
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(i for i in ids if i is not None and i < vocab_size)

    def score_pad(self, vocab_size: int) -> int | None:
        """Return the token that a published reward model takes for padding. `vocab_size`: of the model."""
        return pad_of(self._tokenizer, vocab_size)

    @property
    def looks(self) -> int:
        """Fingerprint of what a conversation looks like: the template's text, not its file's name."""
        return fingerprint_of(self._template, self._enable_thinking)

    @property
    def fingerprint(self) -> int:
        """Fingerprint of all that makes tokens of a conversation."""
        quick = getattr(self._tokenizer, "backend_tokenizer", None)
        vocabulary = quick.to_str() if quick is not None else sorted(self._tokenizer.get_vocab().items())
        others: list[Any] = [] if self.images is None else [self.images.settings]
        own = getattr(self._tokenizer, "chat_template", None)
        if self._chosen is None and isinstance(own, dict):
            others += sorted(own.items())
        return fingerprint_of(self.looks, vocabulary, self._begin, sorted(self._ends), *others)

    def ends_turns(self, token: int) -> bool:
        """Return whether a token may end a turn: no piece of text does."""
        return token in self._ends or token in self._added

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(list(ids))

    def render(self, messages: Sequence[Message], tools: Any, *, header: bool = False) -> str:
        """Text of a conversation; `header` opens the assistant's next turn.
        Raises SFTDataError: the template refuses these messages."""
        try:
            try:
                return self._write(messages, tools, header)
            except (TemplateError, TypeError) as first:  # DeepSeek's takes arguments as the text of the API
                if not any(message.get("tool_calls") for message in messages):
                    raise
                try:
                    return self._write(_with_json_arguments(messages), tools, header)
                except Exception:  # noqa: BLE001 - it was not that
                    raise first from None
        except Exception as error:
            raise SFTDataError(f"{self.name} refuses the messages: {error}") from error

    def _write(self, messages: Sequence[Message], tools: Any, header: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            chat_template=self._chosen,
            tokenize=False,
            add_generation_prompt=header,
            enable_thinking=self._enable_thinking,
        )

    def conversation(self, talk: Conversation) -> tuple[np.ndarray, np.ndarray, bool]:
        """Tokens int32[L] of a conversation, bool[L], which of them are trained, and whether the template leaves out
        what a trained reply was thought, its text beside calls, or the tools.
        Raises SFTDataError: the prefix property does not hold at a trained message; says where the prefix breaks. Or
        the template merges a trained message with its neighbours, so that its own tokens cannot be told. Or it leaves
        out a message for its role, which may be a typing error, or the text or the tool calls of a trained one."""
        self._check_roles(talk)
        self._check_calls(talk)
        text = self.render(talk.messages, talk.tools)
        lacks_text = self._lacks_text(talk, text)
        _check_text(text)
        tokens = _Tokens(self._tokenizer, text, self._added)
        mask = np.zeros(len(tokens.ids), dtype=bool)
        for start, stop in _turns(talk.messages):
            for at in range(start, stop):
                if talk.trained[at]:
                    is_last = at == stop - 1
                    first, last = self._turn(tokens, talk, stop) if is_last else self._inner(tokens, talk, at, stop)
                    mask[first:last] = True
        return np.array(tokens.ids, dtype=np.int32), mask, lacks_text or _leaves_out(talk, text)

    def _check_roles(self, talk: Conversation) -> None:
        for at, message in enumerate(talk.messages):
            if message["role"] not in COMMON_ROLES and message["content"]:
                marked = [*talk.messages[:at], {**message, "content": _MARK}, *talk.messages[at + 1 :]]
                if _MARK not in self.render(marked, talk.tools):
                    raise SFTDataError(
                        f"message {at + 1}: {self.name} leaves out messages of the role {message['role']!r}. Is it "
                        f"meant to be one of {', '.join(COMMON_ROLES)}? Else: a template that shows it "
                        "(sft.data.chat_template)"
                    )

    def _check_calls(self, talk: Conversation) -> None:
        """Raise SFTDataError where a trained message would be without its tool calls: often it has nothing else, and
        an empty reply would be learned."""
        calls = [len(m.get("tool_calls") or ()) for m in talk.messages]
        sent = {at: number for at, number in enumerate(calls) if number and talk.trained[at]}
        if not sent:
            return
        marked = [
            {**message, "tool_calls": _named(message["tool_calls"], at)} if at in sent else message
            for at, message in enumerate(talk.messages)
        ]
        text = self.render(marked, talk.tools)
        for at, number in sent.items():
            shown = text.count(_MARK_OF_CALL.format(at))
            if shown < number:
                raise SFTDataError(
                    f"message {at + 1}: {self.name} shows {shown} of its {number} tool calls, which are to be trained "
                    "on. Ways out: a template that shows them (sft.data.chat_template), or `train: false` on this "
                    "message"
                )

    def _lacks_text(self, talk: Conversation, text: str) -> bool:
        """Return whether the text of a trained message is left out beside its calls; raise SFTDataError where it has no
        calls: an empty reply would be learned."""
        said = [m["content"].strip() if isinstance(m["content"], str) else "" for m in talk.messages]
        missed = [at for at, content in enumerate(said) if talk.trained[at] and content not in text]
        if not missed:  # as a rule; else it may be written in another form
            return False
        marked = [
            {**message, "content": _MARK_OF_TEXT.format(at)} if at in missed else message
            for at, message in enumerate(talk.messages)
        ]
        shown = self.render(marked, talk.tools)
        absent = [at for at in missed if _MARK_OF_TEXT.format(at) not in shown]
        for at in absent:
            if not talk.messages[at].get("tool_calls"):
                raise SFTDataError(
                    f"message {at + 1} ({talk.messages[at]['role']}): {self.name} leaves out its text, which is to be "
                    "trained on. Ways out: `train: false` on this message, or a template that shows it "
                    "(sft.data.chat_template)"
                )
        return bool(absent)

    def plain(self, text: PlainText) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and completion as plain text: begun, untrained, by the token that the tokenizer itself puts before a
        text (the base model was trained with it), ended by the end-of-sequence token where there is one."""
        _check_text(text.prompt + text.completion)
        head = self.encode(text.prompt)
        tail = self._going_on(text.completion) if text.prompt else self.encode(text.completion)
        if (head or tail)[:1] != self._begin:
            head = self._begin + head
        if self._tokenizer.eos_token_id is not None:
            tail = [*tail, self._tokenizer.eos_token_id]
        return np.array(head + tail, dtype=np.int32), np.arange(len(head) + len(tail)) >= len(head)

    def _going_on(self, text: str) -> list[int]:
        """Token ids of text that follows other text."""
        ids = self.encode(_BEFORE + text) if self._before else []
        cut = len(self._before)
        return ids[cut:] if ids[:cut] == self._before and cut else self.encode(text)

    def _turn(self, tokens: "_Tokens", talk: Conversation, stop: int) -> tuple[int, int]:
        """Return the trained tokens (begin, end) of the last message of a piece."""
        borders = self._borders(talk, stop)
        first, last = (self._place(tokens, border, talk, stop) for border in borders)
        return first, self._end_of_turn(tokens.ids, first, last)

    def _borders(self, talk: Conversation, stop: int) -> tuple[str, str]:
        """Return the rendered text up to where the content of a piece's last message begins, and up to its end."""
        messages = talk.messages
        closed = self.render(messages[:stop], talk.tools)
        if messages[stop - 1]["role"] == "assistant" and stop > 1:  # no template opens a turn of an empty conversation
            return self.render(messages[: stop - 1], talk.tools, header=True), closed
        return self._around(talk, stop - 1, stop)[0], closed

    def _inner(self, tokens: "_Tokens", talk: Conversation, at: int, stop: int) -> tuple[int, int]:
        """Return the trained tokens (begin, end) of a message that its piece goes on after.

        Where the template ends the message as it ends one that is the last, its end of turn is trained too; where it
        merges the piece's messages (tool results in one turn), only the content is this message's.
        """
        opened, rest = self._around(talk, at, stop)
        closed = self.render(talk.messages[:stop], talk.tools)
        is_found = closed.startswith(opened) and closed.endswith(rest) and len(opened) + len(rest) <= len(closed)
        first = tokens.place(opened) if is_found else None
        try:
            alone = self.render(talk.messages[: at + 1], talk.tools)
        except SFTDataError:  # a template may refuse a system message by itself
            alone = ""
        if first is not None and len(alone) > len(opened) and (last := tokens.place(alone)) is not None:
            return first, self._end_of_turn(tokens.ids, first, last)
        last = tokens.place(closed[: len(closed) - len(rest)]) if is_found else None
        if first is None or last is None:
            raise SFTDataError(self._merged(talk, at))
        return first, last

    def _around(self, talk: Conversation, at: int, stop: int) -> tuple[str, str]:
        """Return the rendered text before and after the content of a message, in the conversation up to `stop`."""
        messages = talk.messages
        marked = [*messages[:at], {**messages[at], "content": _MARK}, *messages[at + 1 : stop]]
        parts = self.render(marked, talk.tools).split(_MARK)
        if len(parts) != 2:
            raise SFTDataError(self._merged(talk, at))
        return parts[0], parts[1]

    def _merged(self, talk: Conversation, at: int) -> str:
        return (
            f"message {at + 1} ({talk.messages[at]['role']}) is to be trained on, but its own tokens cannot be told: "
            f"{self.name} leaves it out, changes it or merges it with the messages beside it. Ways out: `train: false` "
            "on this message, other sft.data.loss_roles, or a template that shows it (sft.data.chat_template)."
        )

    def _place(self, tokens: "_Tokens", prefix: str, talk: Conversation, stop: int) -> int:
        place = tokens.place(prefix)
        if place is None:
            raise SFTDataError(self._broken(tokens.ids, prefix, talk, stop))
        return place

    def _end_of_turn(self, ids: Sequence[int], first: int, last: int) -> int:
        """End (exclusive) of a turn's trained tokens: without the blanks that follow a special token at its end, which
        nobody samples. One in the midst of the content ends nothing."""
        end = last
        while end > first and ids[end - 1] not in self._ends and not self.decode(ids[end - 1 : end]).strip():
            end -= 1
        return end if end > first and ids[end - 1] in self._ends else last

    def _broken(self, ids: list[int], prefix: str, talk: Conversation, stop: int) -> str:
        """Word the error where a prefix is none: the first message that breaks it, and both sides of the break."""
        shorter, longer, message = self.encode(prefix), ids, stop
        before = self.encode(self.render(talk.messages[:stop], talk.tools))
        if before[: len(shorter)] == shorter:  # the turn itself is well formed, so a later message rewrites it
            for _, end in (turn for turn in _turns(talk.messages) if turn[1] > stop):
                after = self.encode(self.render(talk.messages[:end], talk.tools))
                if after[: len(before)] != before:
                    shorter, longer, message = before, after, end
                    break
                before = after
        else:
            longer = before
        at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
        shown = self._tokenizer.decode
        return (
            f"{self.name} breaks the prefix property at message {message} (token {at}): the tokens of the "
            f"conversation so far must begin the tokens of the conversation with this message.\n"
            f"  common beginning ends: ...{shown(shorter[max(0, at - _SHOWN) : at])!r}\n"
            f"  before: {shown(shorter[at : at + _SHOWN])!r}...\n"
            f"  after:  {shown(longer[at : at + _SHOWN])!r}...\n"
            "Ways out: sft.data.split_turns = true (each trained turn a sample of its own, with the history as the "
            "template shows it then), sft.data.loss_turns = last, a template that never rewrites earlier turns "
            "(sft.data.chat_template), or model.enable_thinking to fit the data."
        )


def _read_template(tokenizer: Any, chosen: str) -> tuple[str | None, str]:
    """Return the template, and its name for people."""
    model = tokenizer.name_or_path or type(tokenizer).__name__
    if chosen == "none":
        return None, "no chat template"
    if chosen == "auto":
        own = getattr(tokenizer, "chat_template", None)
        try:
            return (tokenizer.get_chat_template() if isinstance(own, dict) else own), f"the chat template of {model}"
        except ValueError as error:
            names = ", ".join(sorted(own or ()))
            raise SFTDataError(
                f"{model} has several chat templates ({names}), and none of them is called default: state the file of "
                "one as sft.data.chat_template"
            ) from error
    try:
        return Path(chosen).read_text(encoding="utf-8"), f"the chat template {chosen} (model {model})"
    except (OSError, UnicodeDecodeError) as error:
        raise SFTDataError(f"sft.data.chat_template = {chosen}: {error}") from error


def _leaves_out(talk: Conversation, text: str) -> bool:
    """Return whether a conversation's text is without the reasoning of a trained message, or the name of a tool."""
    trained = [message for message, trained in zip(talk.messages, talk.trained, strict=True) if trained]
    thought = [message.get("reasoning_content") for message in trained]
    thought += [_thought_in(message["content"]) for message in trained]
    names = [(tool.get("function") or tool).get("name") for tool in talk.tools or () if isinstance(tool, dict)]
    return not all(part.strip() in text for part in (*thought, *names) if isinstance(part, str))


def _thought_in(content: Any) -> str:
    """Return the think section of a message's text."""
    return content.partition("</think>")[0].rpartition("<think>")[2] if "</think>" in content else ""


def _with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as JSON."""

    def changed(call: Any) -> Any:
        function, arguments = call["function"], call["function"]["arguments"]
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": as_text}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _named(calls: Sequence[Any], at: int) -> list[Any]:
    """Return a message's tool calls by a name that tells where they are."""
    name = {"name": _MARK_OF_CALL.format(at)}
    return [{**call, **name, "function": {**call["function"], **name}} for call in calls]


def _check_text(text: str) -> None:
    """Raise SFTDataError where a character is cut in half, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SFTDataError(
            f"the text holds half a character (\\u{ord(text[error.start]):04x}), after "
            f"{text[max(0, error.start - 20) : error.start]!r}: it was cut there"
        ) from error


class _Tokens:
    """A text's tokens, and where in them a beginning of the text ends."""

    def __init__(self, tokenizer: Any, text: str, added: set[int]) -> None:
        self._tokenizer, self._text, self._added = tokenizer, text, added
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)
        self.ids: list[int] = encoded["input_ids"]
        self._encoding: Any = encoded.encodings[0] if encoded.encodings else None

    def place(self, prefix: str) -> int | None:
        """How many of the tokens are those of `prefix`; None where its tokens are not their beginning."""
        if not self._text.startswith(prefix):
            return None
        if len(prefix) == len(self._text):
            return len(self.ids)
        place = self._quick_place(prefix)
        if place is not None:
            return place
        ids = self._encode(prefix)
        return len(ids) if self.ids[: len(ids)] == ids else None

    def _quick_place(self, prefix: str) -> int | None:
        """Return the place if offsets and the last added token before it settle it; None: only encoding it all does."""
        end = len(prefix)
        place = self._encoding.char_to_token(end) if self._encoding is not None else None
        if place is None or self._encoding.token_to_chars(place)[0] != end:
            return None
        anchor = next((i for i in range(place - 1, -1, -1) if self.ids[i] in self._added), -1)
        begin = 0 if anchor < 0 else self._encoding.token_to_chars(anchor)[1]
        return place if self._encode(prefix[begin:]) == self.ids[anchor + 1 : place] else None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def _turns(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces whose ends are prefixes that a template can render: single messages, but a leading
    system message goes, as context, with its successor (some templates refuse it alone), and tool results of one turn
    go together."""
    start = 0
    for i, message in enumerate(messages):
        last = i == len(messages) - 1
        if not last and message["role"] == "system" and i == 0:
            continue
        if not last and message["role"] == "tool" and messages[i + 1]["role"] == "tool":
            continue
        yield start, i + 1
        start = i + 1
