"""A rank's part of a training batch, and all that is known of each of its fields.

`RankBatch` is the one table of the batch's fields. A field states its shape, type, range, value where it is absent, and
column of the export beside its description; building it (`drop_idle`), checking, the file format (`encode_rank`,
`decode_rank`), cutting and joining (`RankBatch.micro_batch`, `select_micro_batches`) and `export` follow from that.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prime_hpc.store.batch.images import ImageTable
from prime_hpc.store.errors import ArtifactError

NOT_SAMPLED = -1
"""Value of `RankBatch.versions` for tokens that no policy sampled (prompt, tool output)."""
TRUNCATION = ("top_ps", "top_ks", "min_ps")
"""Fields that say which tokens were sampled from."""
OF_TEACHER = ("teacher_ids", "teacher_logprobs")
"""Fields that hold a teacher's likeliest tokens."""

_LAG_NONE = np.iinfo(np.uint16).max  # on disk: lag to the file's newest version; this value says "not sampled"
_ST_NAMES = {"F64": np.float64, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U16": np.uint16, "U8": np.uint8}
_ST_DTYPES = {np.dtype(dtype): name for name, dtype in _ST_NAMES.items()}


@dataclass(frozen=True)
class FieldSpec:
    """Facts of one field of `RankBatch`."""

    per: Literal["token", "sequence", "offsets", "step", "table"]
    """One value a token, one a sequence, offsets of the parts, two counts of the whole step, or a table whose entries
    tokens name."""
    dtype: type[np.generic]
    absent: "float | Callable[[RankBatch], npt.NDArray[Any]] | None" = None
    """Value that stands for a field that a batch does not have, or a function that computes all of them. None: a batch
    has the field, or nothing stands for it."""
    least: float = -math.inf
    most: float = math.inf
    column: str = ""
    """Of a value a sequence: its column in `export`. Values a token are lists under the field's name."""
    attribute: str = ""
    """Of a value a sequence: the attribute that is its source, where that is not named as the column."""
    together: str = ""
    """Fields with the same word here are all present or none of them."""
    filler: float = 0
    """Value of the token, or sequence, that an empty micro-batch computes on."""
    trailing: int = 0
    """Dimensions behind the first one. The largest integer stands for an entry that is not known."""
    narrow: type[np.generic] | None = None
    """The type that it may have as well."""

    def stand_in(self, length: int, like: npt.NDArray[Any], value: float) -> npt.NDArray[Any]:
        """Return `length` entries of a value, or of nothing known, in the type and shape of `like`'s."""
        filler = np.iinfo(like.dtype).max if self.trailing and like.dtype.kind in "iu" else value
        return np.full((length, *like.shape[1:]), filler, like.dtype)


def _spec(*args: Any, **kwargs: Any) -> dict[str, FieldSpec]:
    return {"spec": FieldSpec(*args, **kwargs)}


@dataclass(frozen=True)
class RankBatch:
    """One data-parallel rank's part of a step's batch: M packed micro-batches.

    T tokens in S sequences lie one after another; sequence s is tokens [seq_offsets[s], seq_offsets[s + 1]),
    micro-batch m is sequences [micro_offsets[m], micro_offsets[m + 1]). Every rank of a batch has the same M; a
    micro-batch may hold no sequence. Arrays from `read_rank_batch` may be read-only views of the file.
    """

    token_ids: npt.NDArray[np.int32] = field(metadata=_spec("token", np.int32))
    """[T]"""
    loss_mask: npt.NDArray[np.bool_] = field(metadata=_spec("token", np.bool_))
    """[T] whether the token is trained on."""
    logprobs: npt.NDArray[np.float32] = field(metadata=_spec("token", np.float32))
    """[T] the engine's log-probability of the token, 0 where not sampled."""
    versions: npt.NDArray[np.int32] = field(metadata=_spec("token", np.int32))
    """[T] policy version that sampled the token, -1 where not sampled."""
    advantages: npt.NDArray[np.float32] = field(metadata=_spec("token", np.float32))
    """[T]"""
    seq_offsets: npt.NDArray[np.int64] = field(metadata=_spec("offsets", np.int64))
    """[S + 1] in tokens; first 0, last T."""
    micro_offsets: npt.NDArray[np.int64] = field(metadata=_spec("offsets", np.int64))
    """[M + 1] in sequences; first 0, last S."""
    temperatures: npt.NDArray[np.float32] = field(
        metadata=_spec("sequence", np.float32, column="temperature", filler=1)
    )
    """[S] sampling temperature."""
    rewards: npt.NDArray[np.float32] = field(metadata=_spec("sequence", np.float32, column="reward"))
    """[S]"""
    sample_ids: npt.NDArray[np.int64] = field(metadata=_spec("sequence", np.int64, column="sample_id"))
    """[S] sequences of one episode share it."""
    group_ids: npt.NDArray[np.int64] = field(metadata=_spec("sequence", np.int64, column="group_id"))
    """[S] episodes of one prompt share it."""
    env_ids: npt.NDArray[np.int32] = field(metadata=_spec("sequence", np.int32, attribute="env_id"))
    """[S] index of the environment in the config."""
    ce_weights: npt.NDArray[np.float32] | None = field(
        default=None, metadata=_spec("token", np.float32, absent=0, least=0)
    )
    """[T] weight of the token in a cross-entropy beside the objective, 0 for none; absent where no token has any."""
    top_ps: npt.NDArray[np.float32] | None = field(
        default=None,
        metadata=_spec("sequence", np.float32, absent=1, least=0, most=1, column="top_p", together="truncation"),
    )
    """[S] probability of the tokens that were sampled from, at the temperature; 1: all. Absent where all are."""
    top_ks: npt.NDArray[np.int32] | None = field(
        default=None, metadata=_spec("sequence", np.int32, absent=0, least=0, column="top_k", together="truncation")
    )
    """[S] number of tokens that were sampled from; 0: all."""
    min_ps: npt.NDArray[np.float32] | None = field(
        default=None,
        metadata=_spec("sequence", np.float32, absent=0, least=0, most=1, column="min_p", together="truncation"),
    )
    """[S] least probability of those, relative to the likeliest."""
    rollout_tokens: npt.NDArray[np.int32] | None = field(
        default=None,
        metadata=_spec(
            "sequence",
            np.int32,
            absent=lambda batch: batch.targets_per_sequence(),
            least=0,
            column="rollout_tokens",
            filler=1,
        ),
    )
    """[S] trained tokens of the rollout (an agent's part of an episode) that it is a piece of, with those that are
    masked because they are too old; absent: those of the sequence."""
    reference_sums: npt.NDArray[np.float64] | None = field(
        default=None, metadata=_spec("sequence", np.float64, absent=0)
    )
    """[S] sum of the log-probabilities of the sequence's targets under the weights that training began with, of pairs
    of preferences; absent: they are not compared. Of a reward model's pairs: `SFTSample.margin` of the chosen side."""
    routed: npt.NDArray[np.uint16] | npt.NDArray[np.uint8] | None = field(
        default=None, metadata=_spec("token", np.uint16, trailing=2, narrow=np.uint8)
    )
    """[T, layers, k] the experts to which the engine sent each token in each layer of the model (anything in a layer
    that has none), uint8 where there are 256 at most; the largest number where nothing was recorded."""
    teacher_ids: npt.NDArray[np.int32] | None = field(
        default=None, metadata=_spec("token", np.int32, trailing=1, least=0, together="teacher")
    )
    """[T, k] the teacher's likeliest tokens where the token is trained; the largest number elsewhere."""
    teacher_logprobs: npt.NDArray[np.float32] | None = field(
        default=None, metadata=_spec("token", np.float32, trailing=1, together="teacher")
    )
    """[T, k] their log-probabilities under the teacher, at temperature 1."""
    images: npt.NDArray[np.int32] | None = field(
        default=None, metadata=_spec("token", np.int32, absent=0, least=0, together="images")
    )
    """[T] number of the image that the token stands for a part of, 1 for the table's first; 0: it is text."""
    image_bytes: npt.NDArray[np.uint8] | None = field(
        default=None, metadata=_spec("table", np.uint8, together="images")
    )
    """[B] the table: encoded images (PNG, JPEG, ...) behind each other, each once."""
    image_offsets: npt.NDArray[np.int64] | None = field(
        default=None, metadata=_spec("table", np.int64, together="images")
    )
    """[P + 1] in bytes; first 0, last B."""
    mini_batches: npt.NDArray[np.int32] | None = field(
        default=None, metadata=_spec("sequence", np.int32, absent=0, least=0, column="mini_batch")
    )
    """[S] mini-batch of the step that the sequence belongs to, the same throughout a micro-batch; absent: all are one
    optimizer step."""
    totals: npt.NDArray[np.int64] | None = field(default=None, metadata=_spec("step", np.int64, least=0))
    """[2] trained tokens and rollouts of the step, all ranks', with those that are left out for want of a signal."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.seq_offsets) - 1

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.micro_offsets) - 1

    def sequences_of(self, micro: int) -> slice:
        """Sequences of micro-batch `micro`."""
        return slice(int(self.micro_offsets[micro]), int(self.micro_offsets[micro + 1]))

    def tokens_of(self, micro: int) -> slice:
        """Tokens of micro-batch `micro`."""
        sequences = self.sequences_of(micro)
        return slice(int(self.seq_offsets[sequences.start]), int(self.seq_offsets[sequences.stop]))

    def first_tokens(self) -> npt.NDArray[np.bool_]:
        """bool[T], true at the first token of every sequence."""
        first = np.zeros(self.num_tokens + 1, dtype=bool)
        first[self.seq_offsets] = True  # an empty sequence shares its start with its successor
        return first[:-1]

    def target_mask(self) -> npt.NDArray[np.bool_]:
        """bool[T], the tokens that are trained: in the loss mask and not the first of their sequence."""
        return self.loss_mask & ~self.first_tokens()

    def computed_mask(self) -> npt.NDArray[np.bool_]:
        """bool[T], the tokens whose log-probability is computed: those that are trained, or weigh in `ce_weights`."""
        weighed = self.loss_mask if self.ce_weights is None else self.loss_mask | (self.ce_weights > 0)
        return weighed & ~self.first_tokens()

    def targets_per_sequence(self) -> npt.NDArray[np.int32]:
        """int32[S], the number of trained tokens of each sequence."""
        ends = np.concatenate([[0], np.cumsum(self.target_mask())])[self.seq_offsets]
        return np.diff(ends).astype(np.int32)

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return a field, and where it is absent the values that stand for it."""
        found, spec = getattr(self, name), SPECS[name]
        if found is not None:
            return found
        assert spec.absent is not None, f"a batch has {name}"
        if callable(spec.absent):
            return spec.absent(self)
        return np.full(self.num_tokens if spec.per == "token" else self.num_sequences, spec.absent, spec.dtype)

    def micro_batch(self, index: int) -> "RankBatch":
        """Return one micro-batch by itself, without its empty sequences; views where there are none.

        One without tokens gets a sequence of a single token that is no target.
        """
        sequences, tokens = self.sequences_of(index), self.tokens_of(index)
        lengths = np.diff(self.seq_offsets[sequences.start : sequences.stop + 1])
        kept = slice(None) if lengths.all() else lengths > 0
        lengths = lengths[kept] if tokens.stop > tokens.start else np.ones(1, np.int64)
        arrays: dict[str, Any] = {"seq_offsets": _offsets(lengths), "micro_offsets": _offsets([len(lengths)])}
        for name, spec in SPECS.items():
            array = getattr(self, name)
            if array is None or spec.per == "offsets":
                continue
            if spec.per in ("step", "table"):
                arrays[name] = array
            elif tokens.stop == tokens.start:
                arrays[name] = spec.stand_in(1, array, spec.filler)
            else:
                arrays[name] = array[tokens] if spec.per == "token" else array[sequences][kept]
        return RankBatch(**arrays)

    @classmethod
    def empty(cls, num_micro_batches: int) -> "RankBatch":
        """Return a rank that holds nothing, for `num_micro_batches` micro-batches."""
        arrays: dict[str, Any] = {name: np.zeros(0, SPECS[name].dtype) for name in REQUIRED}
        arrays["seq_offsets"] = np.zeros(1, np.int64)
        arrays["micro_offsets"] = np.zeros(num_micro_batches + 1, np.int64)
        return cls(**arrays)

    def check(self) -> None:
        """Verify dtypes, lengths, offsets and ranges. Raises ValueError: names the first field that is wrong."""
        present = {name: getattr(self, name) for name in SPECS if name in REQUIRED or getattr(self, name) is not None}
        for name, array in present.items():
            spec, ndim = SPECS[name], 1 + SPECS[name].trailing
            if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype not in (spec.dtype, spec.narrow):
                found = f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"
                kind = "vector" if ndim == 1 else f"array of {ndim} dimensions"
                raise ValueError(f"{name}: must be a {np.dtype(spec.dtype)} {kind}, is {found}")
        for name, end in (("seq_offsets", self.num_tokens), ("micro_offsets", self.num_sequences)):
            offsets = getattr(self, name)
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
                raise ValueError(f"{name}: must grow from 0 to {end}, is {offsets[:4]}..{offsets[-2:]}")
        lengths = {"token": self.num_tokens, "sequence": self.num_sequences, "step": 2}
        for name, array in present.items():
            spec = SPECS[name]
            length = lengths.get(spec.per, len(array))
            if len(array) != length:
                raise ValueError(f"{name}: has {len(array)} values, must have {length}")
            if array.dtype == np.float32 and not np.isfinite(array).all():
                raise ValueError(f"{name}: holds values that are not finite")
            bounded = math.isfinite(spec.least) or math.isfinite(spec.most)
            if bounded and not ((array >= spec.least) & (array <= spec.most)).all():
                bounds = f"outside {spec.least:g} .. {spec.most:g}" if spec.most < math.inf else f"below {spec.least:g}"
                raise ValueError(f"{name}: holds values {bounds}")
        self._check_images()
        groups = {SPECS[name].together: name for name in present if SPECS[name].together}
        for name, spec in SPECS.items():
            if spec.together in groups and name not in present:
                raise ValueError(f"{name}: must be there, as {groups[spec.together]} is")

    def _check_images(self) -> None:
        offsets = self.image_offsets
        if self.images is None or self.image_bytes is None or offsets is None:
            return
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(self.image_bytes) or (np.diff(offsets) <= 0).any():
            raise ValueError(f"image_offsets: must grow from 0 to {len(self.image_bytes)}, is {offsets[:4]}..")
        if (most := int(self.images.max(initial=0))) >= len(offsets):
            raise ValueError(f"images: names image {most} of {len(offsets) - 1}")

    def encoded_image(self, number: int) -> bytes:
        """Return an image of the table, from 1."""
        assert self.image_bytes is not None and self.image_offsets is not None, "the batch has images"
        begin, end = self.image_offsets[number - 1 : number + 1].tolist()
        return self.image_bytes[begin:end].tobytes()


SPECS: dict[str, FieldSpec] = {item.name: item.metadata["spec"] for item in fields(RankBatch)}
REQUIRED = tuple(item.name for item in fields(RankBatch) if item.default is not None)
"""Fields that every batch has. Later ones are optional: batches on disk do not have them."""


def _offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def drop_idle(ranks: Sequence[RankBatch]) -> list[RankBatch]:
    """Leave out the optional fields that say of no sequence of any rank more than their absence does; fields that
    belong together stay together, and all ranks have the same ones."""
    telling = set()
    optional = [name for name, spec in SPECS.items() if spec.per == "sequence" and name not in REQUIRED]
    for name in optional:
        absent: dict[str, Any] = {name: None}
        if any(not np.array_equal(rank.values(name), replace(rank, **absent).values(name)) for rank in ranks):
            telling.add(SPECS[name].together or name)
    idle: dict[str, Any] = {name: None for name in optional if (SPECS[name].together or name) not in telling}
    return [replace(rank, **idle) for rank in ranks]


def select_micro_batches(source: Sequence[tuple[RankBatch, int]], num_micro_batches: int) -> RankBatch:
    """Return a rank batch of the given (batch, micro-batch index) pairs, padded with empty micro-batches."""
    picked = [(batch, batch.sequences_of(i), batch.tokens_of(i)) for batch, i in source]
    sequence_lengths = [np.diff(batch.seq_offsets[s.start : s.stop + 1]) for batch, s, _ in picked]
    counts = [s.stop - s.start for _, s, _ in picked] + [0] * (num_micro_batches - len(picked))
    arrays: dict[str, Any] = {
        "seq_offsets": _offsets(np.concatenate([np.zeros(0, np.int64), *sequence_lengths])),
        "micro_offsets": _offsets(counts),
    }
    for name, spec in SPECS.items():
        if spec.per in ("offsets", "table") or not (
            name in REQUIRED or any(getattr(batch, name) is not None for batch, *_ in picked)
        ):
            continue
        if spec.per == "step":
            arrays[name] = getattr(picked[0][0], name)  # the same for all
            continue
        like = next((found for batch, *_ in picked if (found := getattr(batch, name)) is not None), None)
        parts = [
            _values(batch, name, like)[tokens if spec.per == "token" else sequences]
            for batch, sequences, tokens in picked
        ]
        arrays[name] = np.concatenate(parts or [np.zeros(0, spec.dtype)])
    if "images" in arrays:
        arrays |= _joined_images(arrays["images"], [(batch, tokens) for batch, _, tokens in picked])
    return RankBatch(**arrays)


def _joined_images(
    images: npt.NDArray[np.int32], source: Sequence[tuple[RankBatch, slice]]
) -> dict[str, npt.NDArray[Any]]:
    """One table for tokens of several batches, which have one each.

    Args:
        images: [T] their numbers in their own batch's table.
        source: batch and tokens of each part, in order.
    """
    table, at, parts = ImageTable(), 0, [images[:0]]
    for batch, tokens in source:
        own = images[at : (at := at + tokens.stop - tokens.start)]
        if own.any():
            used = np.unique(own[own > 0])
            encoded = [batch.encoded_image(number) for number in used.tolist()]
            own = table.renumber(np.where(own > 0, np.searchsorted(used, own) + 1, 0), encoded)
        parts.append(own)
    content, offsets = table.arrays()
    return {"images": np.concatenate(parts), "image_bytes": content, "image_offsets": offsets}


def _values(batch: RankBatch, name: str, like: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """`RankBatch.values`; of a field with more dimensions, as another batch has them."""
    spec = SPECS[name]
    if spec.trailing and like is not None and getattr(batch, name) is None:
        return spec.stand_in(batch.num_tokens, like, 0)
    return batch.values(name)


# ------------------------------------------------------------------------------------------------ file format


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """int64 as int32 where it fits: offsets and ids nearly always do."""
    if array.dtype == np.int64 and (not len(array) or (array.min() >= -(2**31) and array.max() < 2**31)):
        return array.astype(np.int32)
    return array


def _to_lags(versions: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.uint16], int]:
    """Versions as distances to the newest one.
    Raises ValueError: a version below -1, or more than 65,534 versions apart."""
    newest = int(versions.max(initial=NOT_SAMPLED))
    sampled = versions != NOT_SAMPLED
    oldest = int(versions.min(where=sampled, initial=newest))
    if oldest < NOT_SAMPLED or newest - oldest >= _LAG_NONE:
        raise ValueError(f"versions: must be -1 or lie within {_LAG_NONE} of each other, are {oldest} .. {newest}")
    return np.where(sampled, newest - versions, _LAG_NONE).astype(np.uint16), newest


def encode_rank(batch: RankBatch) -> Iterator[Any]:
    """Return the buffers of one rank's safetensors file: header, then arrays, widest first so that each is aligned."""
    lags, newest = _to_lags(batch.versions)
    found = {name: np.ascontiguousarray(getattr(batch, name)) for name in SPECS if getattr(batch, name) is not None}
    arrays = {name: _narrow(array) if name in REQUIRED else array for name, array in found.items()}
    arrays["lags"] = lags
    del arrays["versions"]
    arrays["loss_mask"] = arrays["loss_mask"].view(np.uint8)
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "prime-hpc-batch-1", "newest_version": str(newest)}}
    begin = 0
    for name, array in ordered:
        end = begin + array.nbytes
        header[name] = {
            "dtype": _ST_DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, array in ordered:
        yield array


def decode_rank(raw: npt.NDArray[np.uint8], path: Path) -> RankBatch:
    """Return the arrays of one file's content, uint8[size]; `path` is for the error.
    Raises ArtifactError: it is none."""
    try:
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        newest = int(header.pop("__metadata__")["newest_version"])
        arrays = {name: _view(raw, start, spec) for name, spec in header.items()}
        lags = arrays.pop("lags")
        arrays["versions"] = np.where(lags == _LAG_NONE, NOT_SAMPLED, newest - lags.astype(np.int32))
        arrays["loss_mask"] = arrays["loss_mask"].view(np.bool_)
        batch = RankBatch(**{name: _as_stated(array, SPECS[name]) for name, array in arrays.items()})
        batch.check()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(path, "a batch file of this format", f"one that cannot be read ({error})") from error
    return batch


def _as_stated(array: npt.NDArray[Any], spec: FieldSpec) -> npt.NDArray[Any]:
    return array if array.dtype == spec.narrow else array.astype(spec.dtype, copy=False)


def _view(raw: npt.NDArray[np.uint8], start: int, spec: Mapping[str, Any]) -> npt.NDArray[Any]:
    begin, end = spec["data_offsets"]
    dtype = np.dtype(_ST_NAMES[spec["dtype"]])
    if end - begin != math.prod(spec["shape"]) * dtype.itemsize:
        raise ValueError(f"an array of shape {spec['shape']} in {end - begin} bytes")
    # A plain ndarray on the same buffer: np.memmap's own slices cost microseconds each in __array_finalize__.
    return np.frombuffer(raw, np.uint8)[start + begin : start + end].view(dtype).reshape(spec["shape"])
