"""One row to its token-exact samples: parse, render, tokenise, cut to length."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.sections.sft import SFTDataConfig, SFTSourceConfig
from prime_hpc.observe.report import left_out
from prime_hpc.store.dataset.token_rows import TokenRow
from prime_hpc.trainer.data.images import EncodedImage
from prime_hpc.trainer.data.messages import Conversation, PlainText, SFTDataError, parse_row
from prime_hpc.trainer.data.pairs import margin_of, parse_pair
from prime_hpc.trainer.data.template import ChatTokenizer


@dataclass(frozen=True)
class SFTSample:
    """One tokenised conversation."""

    token_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""
    images: NDArray[np.int32] | None = None
    """[L] number of the image that the token is a part of, from 1; 0: text. None: it has no image."""
    image_data: tuple[bytes, ...] = ()
    """The encoded images, in the order of their numbers."""
    split: int = 0
    """Of a pair the number of tokens of its first side; 0: it is one sequence."""
    margin: float = 0.0
    """Of a pair for a reward model: by how much the first side should score higher."""

    @classmethod
    def pair(cls, sides: "Sequence[SFTSample]", margin: float = 0.0) -> "SFTSample":
        """Return two sequences as one sample, which goes to one micro-batch."""
        ids, masks = ([getattr(side, name) for side in sides] for name in ("token_ids", "loss_mask"))
        images = [np.zeros(len(side.token_ids), np.int32) if side.images is None else side.images for side in sides]
        images[1] = np.where(images[1] > 0, images[1] + len(sides[0].image_data), 0).astype(np.int32)
        data = sides[0].image_data + sides[1].image_data
        numbers = np.concatenate(images) if data else None
        return cls(np.concatenate(ids), np.concatenate(masks), numbers, data, split=len(ids[0]), margin=margin)

    def sides(self) -> "list[SFTSample]":
        """Return the sequences that it is made of."""
        if not self.split:
            return [self]
        found = []
        for part in slice(self.split), slice(self.split, None):
            numbers = None if self.images is None else self.images[part]
            data: tuple[bytes, ...] = ()
            if numbers is not None:
                used, at = np.unique(np.append(0, numbers), return_inverse=True)
                data, numbers = tuple(self.image_data[n - 1] for n in used[1:]), at[1:].astype(np.int32)
            found.append(SFTSample(self.token_ids[part], self.loss_mask[part], numbers if data else None, data))
        return found

    def first(self, length: int) -> "SFTSample":
        """Return its first tokens: so many at most, and no part of an image without the rest of it."""
        numbers = self.images
        if numbers is None:
            return SFTSample(self.token_ids[:length], self.loss_mask[:length])
        if 0 < length < len(numbers) and numbers[length] and numbers[length - 1] == numbers[length]:
            length = int(np.flatnonzero(numbers == numbers[length])[0])
        numbers = numbers[:length]
        images = self.image_data[: numbers.max(initial=0)]
        return SFTSample(self.token_ids[:length], self.loss_mask[:length], numbers if images else None, images)

    @property
    def num_bytes(self) -> int:
        """Length of `packed`."""
        images = 0 if self.images is None else self.images.nbytes + sum(8 + len(image) for image in self.image_data)
        return self.token_ids.nbytes + self.loss_mask.nbytes + images

    def packed(self) -> NDArray[np.uint8]:
        """Return it as bytes."""
        parts: list[NDArray[Any]] = [self.token_ids, self.loss_mask]
        if self.images is not None:
            parts += [self.images, np.array([len(image) for image in self.image_data], np.int64)]
            parts += [np.frombuffer(image, np.uint8) for image in self.image_data]
        return np.concatenate([part.view(np.uint8) for part in parts])

    @classmethod
    def unpacked(cls, data: NDArray[np.uint8], length: int, split: int = 0) -> "SFTSample":
        """Return what `packed` made of a sample of so many tokens."""
        ids, mask, numbers, rest = np.split(data, np.array([4, 5, 9]) * length)
        tokens = ids.copy().view(np.int32), mask.view(bool)
        if not len(numbers):
            return cls(*tokens, split=split)
        images = numbers.copy().view(np.int32)
        head = 8 * int(images.max())
        ends = np.cumsum(rest[:head].copy().view(np.int64)) + head
        return cls(*tokens, images, tuple(part.tobytes() for part in np.split(rest, [head, *ends])[1:-1]), split)


@dataclass(frozen=True)
class RowCounts:
    """Counts of what became of rows, and of the samples in them."""

    rows: int = 0
    overlong: int = 0
    """Samples dropped for their length."""
    truncated: int = 0
    untrained: int = 0
    """Samples without a token that would be trained: left out."""
    bad: int = 0
    """Rows skipped for an error."""
    unended: int = 0
    """Conversations trained without the end of any reply."""
    unshown: int = 0
    """Those of which the template leaves out reasoning or tools."""

    def __add__(self, other: "RowCounts") -> "RowCounts":
        return RowCounts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """In the fields' order."""
        return self.rows, self.overlong, self.truncated, self.untrained, self.bad, self.unended, self.unshown

    def left_out(self) -> str:
        """Word what did not train as it is, and why."""
        return left_out({f"data/{name}": count for name, count in asdict(self).items()})


@dataclass(frozen=True)
class RowResult:
    """Result of one row."""

    samples: list[SFTSample]
    counts: RowCounts
    error: str | None = None
    """Why it cannot be trained on."""


class RowTokenizer:
    """Rows to samples, as the config has it."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: SFTSourceConfig,
        config: SFTDataConfig,
        seq_len: int,
        vocab_size: int,
    ) -> None:
        """Args:
        tokenizer: with its template.
        config: what is trained and what happens to long samples.
        seq_len: longest sample in tokens.
        """
        self._tokenizer, self._source, self._config, self._seq_len = tokenizer, source, config, seq_len
        self._vocab_size = vocab_size

    def row(self, row: Any, folder: Path | None = None) -> RowResult:
        """One row's samples; with `bad_rows = skip`, an error is only counted.
        `folder`: from where its images' paths are meant."""
        try:
            return self._samples(row, folder)
        except SFTDataError as error:
            if self._config.bad_rows == "skip":
                return RowResult([], RowCounts(rows=1, bad=1))
            return RowResult([], RowCounts(rows=1), str(error))

    def _samples(self, row: Any, folder: Path | None) -> RowResult:
        rest, sees = (self._source, self._config, self._tokenizer.has_template), self._tokenizer.images is not None
        if not self._source.holds_pairs:
            return self._made(parse_row(row, *rest, sees_images=sees), folder)
        results = [self._made(parsed, folder) for parsed in parse_pair(row, *rest, sees_images=sees)]
        counts = [result.counts for result in results]
        several = (min(1, a + b) for a, b in zip(*(count.values() for count in counts), strict=True))
        total, sides = RowCounts(*several), [side for result in results for side in result.samples]
        if len(sides) < len(results):
            kept = total if total.overlong else RowCounts(rows=1, truncated=total.truncated, untrained=1)
            return RowResult([], kept)
        if np.array_equal(sides[0].token_ids, sides[1].token_ids):
            if not total.truncated:
                raise SFTDataError(f"both sides are the same tokens: {self._tokenizer.name} shows no difference")
            return RowResult([], RowCounts(rows=1, truncated=1, untrained=1))
        if not self._source.scores:
            return RowResult([SFTSample.pair(sides)], total)
        return RowResult([SFTSample.pair(list(map(self._scored, sides)), margin_of(row, self._source))], total)

    def _scored(self, side: SFTSample) -> SFTSample:
        """Return a side that is read at its last token. Raises SFTDataError: transformers takes it for padding."""
        last = int(side.token_ids[-1])
        if last == self._tokenizer.score_pad(self._vocab_size):
            raise SFTDataError(
                f"a side ends with the tokenizer's padding token {self._tokenizer.decode([last])!r}, behind which "
                "transformers looks for no score: state another pad_token in tokenizer_config.json of the model"
            )
        return replace(side, loss_mask=np.arange(len(side.token_ids)) == len(side.token_ids) - 1)

    def _made(self, parsed: Conversation | PlainText | TokenRow, folder: Path | None) -> RowResult:
        """Return the samples of a row, or of one side of a pair."""
        reader = self._tokenizer.images
        sources = parsed.images if isinstance(parsed, Conversation) else ()
        images = [reader.read(source, folder) for source in sources] if reader is not None else []
        samples: list[SFTSample] = []
        counts = RowCounts(rows=1)
        for talk, sample, lacks in self._tokenised(parsed, images):
            length = len(sample.token_ids)
            unended = isinstance(talk, Conversation) and self._is_unended(talk, sample)
            if length > self._seq_len:
                if self._config.overlong in ("error", "split"):
                    what = "" if self._config.overlong == "error" else ", and only what is trained whole is split"
                    raise SFTDataError(
                        f"{length} tokens{_of_images(sample)}, more than seq_len = {self._seq_len}{what}; raise it, "
                        "or set sft.data.overlong"
                    )
                if self._config.overlong == "drop":
                    counts += RowCounts(overlong=1)
                    continue
                counts += RowCounts(truncated=1)
                sample = sample.first(self._seq_len)
            self._refuse_unknown(talk, sample.token_ids)
            if reader is not None and sample.images is None and (sample.token_ids == reader.token).any():
                raise SFTDataError(f"token {reader.token} stands for an image, and the row has none for it")
            if sample.loss_mask[1:].any():  # a first token has nothing it could be predicted from
                samples.append(sample)
                counts += RowCounts(unended=int(unended), unshown=int(lacks))
            else:
                counts += RowCounts(untrained=1)
        return RowResult(samples, counts)

    def _tokenised(
        self, parsed: Conversation | PlainText | TokenRow, images: Sequence[EncodedImage]
    ) -> Iterator[tuple[Any, SFTSample, bool]]:
        """Yield what becomes a sample, its tokens, and whether they are `unshown`; with `overlong = split`, pieces of
        what is trained whole."""
        for talk in self._talks(parsed):
            lacks = False
            if isinstance(talk, Conversation):
                (whole, lacks), is_all = self._conversation(talk, images), False
            elif isinstance(talk, PlainText):
                whole, is_all = SFTSample(*self._tokenizer.plain(talk)), not talk.prompt
            else:
                whole, is_all = SFTSample(talk.token_ids, talk.loss_mask), bool(talk.loss_mask.all())
            length, size = len(whole.token_ids), self._seq_len
            if length <= size or self._config.overlong != "split" or not is_all:
                yield talk, whole, lacks
                continue
            for at in range(0, length - 1, size - 1):  # each begins with the token before it: every token is predicted
                yield talk, SFTSample(whole.token_ids[at : at + size], whole.loss_mask[at : at + size]), lacks

    def _conversation(self, talk: Conversation, images: Sequence[EncodedImage]) -> tuple[SFTSample, bool]:
        """Return a conversation's tokens, and whether they lack something; `images` are those that it begins with, and
        maybe more."""
        ids, mask, lacks = self._tokenizer.conversation(talk)
        own, reader = images[: len(talk.images)], self._tokenizer.images
        if not own or reader is None:
            return SFTSample(ids, mask), lacks
        return SFTSample(*reader.expand(ids, mask, own), tuple(image.content for image in own)), lacks

    def _is_unended(self, talk: Conversation, sample: SFTSample) -> bool:
        """Return whether no reply that is trained ends with a token of its own: nothing teaches the model to stop."""
        roles = (message["role"] for message, trained in zip(talk.messages, talk.trained, strict=True) if trained)
        last = np.flatnonzero(sample.loss_mask & ~np.append(sample.loss_mask[1:], False))
        return "assistant" in roles and not any(self._tokenizer.ends_turns(int(sample.token_ids[i])) for i in last)

    def _refuse_unknown(self, talk: Conversation | PlainText | TokenRow, token_ids: NDArray[np.int32]) -> None:
        """Raise for a token that the model has no embedding of: a split embedding would give zeros in its place."""
        if isinstance(talk, TokenRow) and (beyond := talk.beyond(self._vocab_size)):
            raise SFTDataError(beyond)
        largest = int(token_ids.max(initial=-1))
        if largest >= self._vocab_size:
            raise SFTDataError(
                f"token {largest} ({self._tokenizer.decode([largest])!r}) is beyond the model's vocabulary of "
                f"{self._vocab_size}: its tokenizer has more tokens than the model has embeddings. Resize them "
                "(resize_token_embeddings of transformers), or take the tokenizer that the model came with"
            )

    def _talks(self, parsed: Conversation | PlainText | TokenRow) -> list[Any]:
        """Return the conversation itself, or with `split_turns` one for every trained message."""
        if not isinstance(parsed, Conversation) or not self._config.split_turns:
            return [parsed]
        ends = [i + 1 for i, trained in enumerate(parsed.trained) if trained]
        only = lambda stop: tuple(i == stop - 1 for i in range(stop))  # noqa: E731
        return [parsed.up_to(stop, only(stop)) for stop in ends] or [parsed]


def _of_images(sample: SFTSample) -> str:
    return "" if sample.images is None else f" ({np.count_nonzero(sample.images)} of them images)"
