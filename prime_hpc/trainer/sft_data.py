"""Supervised data: JSON lines to token-exact samples with a loss mask, and the order in which steps use them.

Called by `sft.py`. A row holds either

- `messages` (and optionally `tools`): a conversation; every message of a role in `loss_roles` is trained; or
- `prompt` and `completion`: two lists of messages, of which only the completion is trained, or two strings, which
  become a user and an assistant message (plain text with an end-of-sequence token where the tokenizer has no chat
  template).

Trained are a message's content and its end-of-turn token, never the header that the engine itself writes. This needs
the *prefix property*: the tokens of a conversation's first messages must be a prefix of the tokens of the whole. It is
checked message by message; templates that rewrite the past (Qwen3's removes earlier think sections) are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.config.sections.trainer import FakeDataConfig
from prime_hpc.store.batches import RankBatch
from prime_hpc.trainer.batches import build_rank_batch, fake_batch, pack_samples

Message = Mapping[str, Any]
_MARK = "\u241econtent\u241e"  # stands for a message's content to find where it begins; no data holds it


class SFTDataError(ValueError):
    """A row that cannot be trained on; the message names file and line and what to do."""


@dataclass(frozen=True)
class SFTSample:
    """One tokenised conversation."""

    token_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template, rendering conversation prefixes."""

    def __init__(self, tokenizer: Any, *, enable_thinking: bool = False) -> None:
        """
        Args:
            tokenizer: a `PreTrainedTokenizer`.
            enable_thinking: handed to the template, as the environments do.
        """
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._ends = {i for i in (tokenizer.eos_token_id, *tokenizer.all_special_ids) if i is not None}

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered at all."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def name(self) -> str:
        """Name of the template for messages to people."""
        return f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__}"

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(self, messages: Sequence[Message], tools: Any, *, header: bool = False) -> str:
        """Text of a conversation; `header` opens the assistant's next turn.

        Raises:
            SFTDataError: the template refuses these messages.
        """
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=header,
                enable_thinking=self._enable_thinking,
            )
        except Exception as error:  # jinja raises its own classes, templates raise what they like
            raise SFTDataError(f"{self.name} refuses the messages: {error}") from error

    def conversation(
        self, messages: Sequence[Message], tools: Any, loss_roles: Sequence[str], first_trained: int = 0
    ) -> SFTSample:
        """Tokenise a conversation turn by turn.

        Args:
            messages: with `role` and `content`.
            tools: tool definitions for the template, or None.
            loss_roles: roles whose content is trained.
            first_trained: messages before this index are context only.

        Raises:
            SFTDataError: the prefix property does not hold; says where the prefix breaks.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, stop in _turns(messages):
            ids_before = ids
            ids = self.encode(self.render(messages[:stop], tools))
            self._check_prefix(ids_before, ids, stop)
            role = messages[stop - 1]["role"]
            if role in loss_roles and stop > first_trained:
                if role == "assistant":
                    opened = self.render(messages[: stop - 1], tools, header=True)
                else:
                    opened = self._until_content(messages, tools, start, stop)
                header = self.encode(opened)
                self._check_prefix(header, ids, stop)
                spans.append((len(header), self._end_of_turn(ids, len(header))))
        mask = np.zeros(len(ids), dtype=bool)
        for first, last in spans:
            mask[first:last] = True
        return SFTSample(np.array(ids, dtype=np.int32), mask)

    def _until_content(self, messages: Sequence[Message], tools: Any, start: int, stop: int) -> str:
        """The rendered text up to where the content of a piece that no assistant wrote begins."""
        role = messages[stop - 1]["role"]
        at = next(i for i in range(start, stop) if messages[i]["role"] == role)
        marked = [*messages[:at], {**messages[at], "content": _MARK}, *messages[at + 1 : stop]]
        return self.render(marked, tools).split(_MARK)[0]

    def plain(self, prompt: str, completion: str) -> SFTSample:
        """Prompt and completion as plain text, ended by the end-of-sequence token where there is one."""
        head, tail = self.encode(prompt), self.encode(completion)
        if self._tokenizer.eos_token_id is not None:
            tail = [*tail, self._tokenizer.eos_token_id]
        mask = np.arange(len(head) + len(tail)) >= len(head)
        return SFTSample(np.array(head + tail, dtype=np.int32), mask)

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        """End (exclusive) of a turn's trained tokens: after its last special token nothing is sampled."""
        ends = (i for i in range(len(ids) - 1, start - 1, -1) if ids[i] in self._ends)
        return next(ends, len(ids) - 1) + 1

    def _check_prefix(self, prefix: list[int], ids: list[int], num_messages: int) -> None:
        if ids[: len(prefix)] == prefix:
            return
        at = next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), len(ids))
        shown = self._tokenizer.decode
        raise SFTDataError(
            f"{self.name} breaks the prefix property at message {num_messages} (token {at}): the tokens of the "
            f"conversation so far must begin the tokens of the conversation with this message.\n"
            f"  common beginning ends: ...{shown(prefix[max(0, at - 12) : at])!r}\n"
            f"  before: {shown(prefix[at : at + 12])!r}...\n"
            f"  after:  {shown(ids[at : at + 12])!r}...\n"
            "Use a template that never rewrites earlier turns (Qwen3's strips their think sections), set "
            "model.enable_thinking to fit the data, or cut the conversations into single turns."
        )


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


def _as_messages(value: Any, role: str, where: str) -> list[Message]:
    """A column as messages; a string becomes one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value):
        return value
    raise SFTDataError(
        f"{where}: expected a string or a list of messages with `role` and `content`, got {value!r:.120}"
    )


def tokenize_row(row: Any, where: str, tokenizer: ChatTokenizer, loss_roles: Sequence[str]) -> SFTSample:
    """One row as a sample.

    Args:
        row: the parsed JSON.
        where: file and line, for errors.
        tokenizer: see `ChatTokenizer`.
        loss_roles: roles that are trained.

    Raises:
        SFTDataError: columns are missing (names those it has), the template fails, or nothing is trained.
    """
    if not isinstance(row, dict):
        raise SFTDataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    try:
        if row.get("messages"):
            messages = _as_messages(row["messages"], "user", where)
            sample = tokenizer.conversation(messages, row.get("tools"), loss_roles)
        elif "prompt" in row and "completion" in row:
            sample = _prompt_completion(row, where, tokenizer, loss_roles)
        else:
            columns = ", ".join(sorted(row)) or "none"
            raise SFTDataError(f"needs `messages`, or `prompt` and `completion`; the row has: {columns}")
    except SFTDataError as error:
        if str(error).startswith(where):
            raise
        raise SFTDataError(f"{where}: {error}") from error
    if not sample.loss_mask[1:].any():
        raise SFTDataError(
            f"{where}: no token of this row would be trained: it has no content of the roles {', '.join(loss_roles)} "
            "(sft.data.loss_roles)"
        )
    return sample


def _prompt_completion(row: dict[str, Any], where: str, tokenizer: ChatTokenizer, roles: Sequence[str]) -> SFTSample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str) and not tokenizer.has_template:
        return tokenizer.plain(prompt, completion)
    context = _as_messages(prompt, "user", where)
    trained = _as_messages(completion, "assistant", where)
    return tokenizer.conversation([*context, *trained], row.get("tools"), roles, first_trained=len(context))


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, parsed row) of every non-empty line of a JSON-lines file.

    Raises:
        SFTDataError: the file cannot be read or a line is not JSON.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except json.JSONDecodeError as error:
                        raise SFTDataError(f"{path}:{number}: not JSON ({error})") from error
    except OSError as error:
        raise SFTDataError(f"sft.data.path = {path}: {error.strerror or error}") from error


def load_samples(config: SFTDataConfig, tokenizer: ChatTokenizer, seq_len: int) -> list[SFTSample]:
    """Tokenise the whole file.

    Args:
        config: the data section, `type = jsonl`.
        tokenizer: see `ChatTokenizer`.
        seq_len: longest sample in tokens; `config.overlong` says what happens to longer ones.

    Raises:
        SFTDataError: names the row (see `tokenize_row`), or that no row is left.
    """
    if config.path is None:
        raise SFTDataError("sft.data.path is not set: name a JSON-lines file, or use sft.data.type = fake")
    samples, num_dropped, num_cut = [], 0, 0
    for where, row in read_rows(config.path):
        sample = tokenize_row(row, where, tokenizer, config.loss_roles)
        length = len(sample.token_ids)
        if length > seq_len:
            if config.overlong == "error":
                raise SFTDataError(
                    f"{where}: {length} tokens, more than seq_len = {seq_len}; raise it, or set sft.data.overlong"
                )
            if config.overlong == "drop":
                num_dropped += 1
                continue
            num_cut += 1
            sample = SFTSample(sample.token_ids[:seq_len], sample.loss_mask[:seq_len])
            if not sample.loss_mask[1:].any():
                raise SFTDataError(
                    f"{where}: nothing that is trained is left of its {length} tokens after truncation to {seq_len}; "
                    "raise seq_len, or set sft.data.overlong = drop"
                )
        samples.append(sample)
    if not samples:
        raise SFTDataError(f"{config.path}: no usable row ({num_dropped} dropped as longer than seq_len = {seq_len})")
    if num_dropped or num_cut:
        logger.warning(f"{config.path}: {num_dropped} rows dropped, {num_cut} cut: longer than {seq_len} tokens")
    return samples


class SFTData:
    """The endless, shuffled stream of samples; a position in it is one number."""

    def __init__(self, samples: list[SFTSample], config: SFTDataConfig, *, seed: int, micro_batch_tokens: int) -> None:
        self._ids = [s.token_ids for s in samples]
        self._masks = [s.loss_mask for s in samples]
        self._config, self._seed, self._budget = config, seed, micro_batch_tokens
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def batch(self, position: int, rank: int, world_size: int) -> RankBatch:
        """This rank's part of the samples position .. position + batch_size - 1.

        Epoch e is a permutation drawn from (seed, e), so that the position alone says which samples come next.
        """
        chosen = [self._sample_at(position + i) for i in range(self._config.batch_size)]
        lengths = np.array([len(self._ids[i]) for i in chosen], dtype=np.int64)
        packed = pack_samples(lengths, world_size, self._budget)[rank]
        return build_rank_batch([[chosen[i] for i in micro] for micro in packed], self._ids, self._masks)

    def _sample_at(self, index: int) -> int:
        epoch, place = divmod(index, len(self._ids))
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            count = len(self._ids)
            self._order = rng.permutation(count) if self._config.shuffle else np.arange(count)
            self._epoch = epoch
        return int(self._order[place])


class FakeSFTData:
    """Random tokens of the configured shape."""

    def __init__(self, config: SFTDataConfig, *, seed: int, seq_len: int, vocab_size: int) -> None:
        self._shape = FakeDataConfig(
            batch_size=config.batch_size,
            seq_len=seq_len,
            micro_batch_size=config.micro_batch_size,
            length=config.length,
        )
        self._seed, self._vocab_size = seed, vocab_size

    def batch(self, position: int, rank: int, world_size: int) -> RankBatch:
        """This rank's part of a batch that depends on the position alone."""
        return fake_batch(self._shape, self._vocab_size, self._seed, position, rank, world_size)
