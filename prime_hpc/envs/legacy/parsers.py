"""Parsers of the older verifiers interface: from a completion to the answer that a reward function compares."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from prime_hpc.envs.legacy.messages import Messages


def _same(text: str) -> str:
    return text


class Parser:
    """Takes the last reply as it is, through `extract_fn`."""

    def __init__(self, extract_fn: Callable[[str], Any] = _same) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        """Return the answer in one text."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Any) -> Any:
        """Return the answer in a completion: of its last reply; None without any."""
        if isinstance(completion, str):
            return self.parse(completion)
        replies = self.get_assistant_messages(completion)
        return self.parse(text_of(replies[-1])) if replies else None

    def get_assistant_messages(self, completion: Messages) -> Messages:
        """Return the model's messages."""
        return _of_role(completion, "assistant")

    def get_user_messages(self, completion: Messages) -> Messages:
        """Return the user's messages."""
        return _of_role(completion, "user")

    def get_system_messages(self, completion: Messages) -> Messages:
        """Return the system's messages."""
        return _of_role(completion, "system")

    def get_tool_messages(self, completion: Messages) -> Messages:
        """Return the tools' messages."""
        return _of_role(completion, "tool")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function for the format: the mean over the replies of `format_score`, 0 without any."""

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            if isinstance(completion, str):
                return self.format_score(completion)
            replies = self.get_assistant_messages(completion)
            return sum(self.format_score(text_of(reply)) for reply in replies) / max(1, len(replies))

        return format_reward_func

    def format_score(self, text: str) -> float:
        """In [0, 1]; without a format every reply has it."""
        return 1.0


class MaybeThinkParser(Parser):
    """Parser of what follows `</think>`, or the whole reply where there is none."""

    def __init__(self, extract_fn: Callable[[str], Any] = _same) -> None:
        super().__init__(extract_fn)

    def parse(self, text: str) -> Any:
        """Return the answer after the last `</think>`, or of the whole text where there is none."""
        return self.extract_fn(text.rpartition("</think>")[2].strip())


class ThinkParser(Parser):
    """Parser of what follows `</think>`; nothing counts as an answer without it."""

    def parse(self, text: str) -> Any:
        """Return the answer after the last `</think>`; of the empty text where there is none."""
        _, found, answer = text.rpartition("</think>")
        return self.extract_fn(answer.strip() if found else "")

    def format_score(self, text: str) -> float:
        """1 for one think section in front of an answer."""
        once = text.count("<think>") == 1 and text.count("</think>") == 1
        return float(once and text.strip().startswith("<think>") and bool(text.rpartition("</think>")[2]))


class XMLParser(Parser):
    """Named sections `<field>...</field>`; a tuple names a field and the tags that may stand for it."""

    def __init__(
        self,
        fields: Sequence[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = _same,
    ) -> None:
        super().__init__(extract_fn)
        self._fields = [(field,) if isinstance(field, str) else tuple(field) for field in fields]
        names = self.get_fields()
        if not all(self._fields) or len(set(names)) < len(names):
            raise ValueError(f"XMLParser: fields must have names of their own, not {fields!r}")
        self.answer_field = answer_field

    def get_fields(self) -> list[str]:
        """Return the fields' names."""
        return [tags[0] for tags in self._fields if tags]

    def parse(self, text: str, strip: bool = True, last: bool = False) -> Any:
        """Return an object with an attribute for every tag: the first (or last) section's text, None without one."""
        found: dict[str, str | None] = {}
        for tags in self._fields:
            for tag in tags:
                there = sections(text, tag)
                found[tag] = there[-1 if last else 0] if there else None
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Any) -> Any:
        """Return the answer field of the last reply that has it."""
        if isinstance(completion, str):
            return getattr(self.parse(completion, last=True), self.answer_field, None)
        for reply in reversed(self.get_assistant_messages(completion)):
            answer = getattr(self.parse(text_of(reply)), self.answer_field, None)
            if answer is not None:
                return answer
        return None

    def get_format_str(self) -> str:
        """Return the format, to be shown to the model."""
        tags = [names[0] if len(names) == 1 else f"[ {' | '.join(names)} ]" for names in self._fields]
        return "\n".join(f"<{tag}>\n...\n</{tag}>" for tag in tags)

    def format(self, **values: Any) -> str:
        """Return the sections written out, each field under its first name. Raises ValueError: a field has no value."""
        parts = []
        for tags in self._fields:
            given = [values[tag] for tag in tags if tag in values]
            if not given:
                raise ValueError(f"XMLParser.format: no value for the field {tags[0]!r}")
            parts.append(f"<{tags[0]}>\n{given[0]}\n</{tags[0]}>")
        return "\n".join(parts)

    def format_score(self, text: str) -> float:
        """0.4 for the share of fields that are there, 0.2 each for whole sections only, for beginning with the first
        field and for ending with the last one: the weights that the older interface had."""
        parsed = self.parse(text)
        whole = [any(getattr(parsed, tag) is not None for tag in tags) for tags in self._fields]
        begun = [any(f"<{tag}>" in text or f"</{tag}>" in text for tag in tags) for tags in self._fields]
        stripped = text.strip()
        score = 0.4 * sum(begun) / len(begun) if any(whole) else 0.0
        starts = any(stripped.startswith(f"<{tag}>") for tag in self._fields[0])
        ends = any(stripped.endswith(f"</{tag}>") for tag in self._fields[-1])
        return score + 0.2 + 0.2 * starts + 0.2 * ends


def sections(text: str, tag: str) -> list[str]:
    """Return what stands in each `<tag>...</tag>`, without white space around it.

    Not by a regular expression, which a reply of blanks or opening tags alone keeps busy for minutes, and with it the
    loop of all episodes.
    """
    begin, end = f"<{tag}>", f"</{tag}>"
    return [part.partition(begin)[2].strip() for part in text.split(end)[:-1] if begin in part]


def text_of(message: Any) -> str:
    """Return a message's text; text parts joined."""
    content = message.get("content") if isinstance(message, dict) else message.content
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content or "")


def _of_role(completion: Messages, role: str) -> Messages:
    return [message for message in completion if message["role"] == role]


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    r"""Return the content of the last `\boxed{...}`, braces balanced; without one the whole text, or if `strict`
    nothing."""
    start = text.rfind("\\boxed{")
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return "" if strict else text


def extract_hash_answer(text: str) -> str:
    """Return what follows `####`; the whole text without it."""
    _, found, answer = text.partition("####")
    return answer.strip() if found else text
