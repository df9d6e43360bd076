"""The protobuf messages of the client: requests with training data, answers with arrays.

The messages are stated in a table of names, numbers and types, from which protobuf makes its classes. Enumerations are
plain numbers here, and what this service never reads (pictures, sound, where tokens came from) is left as bytes or out:
on the wire that is the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

PACKAGE = "prime_hpc_tinker"
PROTOBUF = "application/x-protobuf"
MOST_VALUES = 1 << 26
"""Of all sparse tensors of a request together: one of a few bytes may claim any shape. Dense ones end with what one
request may weigh (`app.MOST_BYTES`)."""
STOP, LENGTH = 0, 1
"""Why a sequence ended."""
_MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape *int64",
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "NamedTensor": "1 key string, 2 value Tensor",
    "NamedNumber": "1 key string, 2 value double",
    "LossConfigValue": "1 number double, 2 text string",
    "NamedConfigValue": "1 key string, 2 value LossConfigValue",
    "Datum": "1 model_input *Chunk, 2 loss_fn_inputs *NamedTensor",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, "
    "5 loss_fn_config *NamedNumber, 6 forward_only bool, 7 loss_fn_config_v2 *NamedConfigValue",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape *int64",
    "NamedBatchedTensor": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields *NamedBatchedTensor, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics *NamedNumber",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences *SampledSequence, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
    "4 prompt_cache_hit_tokens int32",
}
"""Message -> its fields: number, name, type; `*` repeats."""
_DTYPES: dict[int, Any] = {1: np.float32, 2: np.int64, 3: np.int32, 4: np.uint16}
"""The wire's numbers of array types; the last one is bfloat16."""
_FLOAT32, _BFLOAT16 = 1, 4
_ABSENT = -99999.0
"""Log-probability that the client takes for none."""


class BadWireError(ValueError):
    """The bytes are not what they claim to be; the message says why."""


@dataclass(frozen=True)
class Datum:
    """One training example."""

    tokens: NDArray[np.int64]
    """[T] the model's input."""
    inputs: dict[str, NDArray[Any]]
    """Inputs of the loss, by name, in the tensors' own shapes."""


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a forward pass, and by default a backward pass."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: NDArray[np.int32]
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L]"""
    stop_reason: int
    top: list[list[tuple[int, float]]] | None = None
    """[L] the likeliest tokens with their log-probabilities, where they were asked for."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto2")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, stated in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for row in stated.split(", "):
            number, field, kind = row.split()
            repeats, kind = kind.startswith("*"), kind.lstrip("*")
            label = kinds.LABEL_REPEATED if repeats else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            if kind in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{n}")) for n in _MESSAGES}


MESSAGES = _classes()
"""Message -> its class."""


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request. Raises BadWireError: it is no such message, or a tensor in it is no tensor."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadWireError(f"the body is no ForwardBackwardRequest: {error}") from error
    config: dict[str, float | str] = {row.key: row.value for row in message.loss_fn_config}
    for row in message.loss_fn_config_v2:
        config[row.key] = row.value.text if row.value.HasField("text") else row.value.number
    inputs = (named.value for row in message.data for named in row.loss_fn_inputs)
    claimed = sum(abs(math.prod(value.shape)) for value in inputs if value.HasField("sparse_csr"))
    if claimed > MOST_VALUES:
        raise BadWireError(f"its sparse tensors have {claimed} values together; a request may have {MOST_VALUES}")
    data = [_datum(row, i) for i, row in enumerate(message.data)]
    return ForwardBackward(
        message.model_id, message.seq_id, data, message.loss_fn, config, forward_only=message.forward_only
    )


def _datum(message: Any, index: int) -> Datum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadWireError(f"datum {index}: pictures and sound are not served here, only tokens")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"datum {index}: model_input"))
    inputs = {row.key: _tensor(row.value, f"datum {index}: {row.key}") for row in message.loss_fn_inputs}
    return Datum(np.concatenate([np.zeros(0, np.int64), *parts]), inputs)


def _array(content: bytes, dtype: Any, where: str) -> NDArray[Any]:
    if len(content) % np.dtype(dtype).itemsize:
        raise BadWireError(f"{where}: {len(content)} bytes are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(content, dtype)


def _tensor(message: Any, where: str) -> NDArray[Any]:
    """One tensor in its shape; what a sparse one does not name is 0."""
    if message.dtype not in _DTYPES:
        raise BadWireError(f"{where}: unknown type {message.dtype}")
    shape, sparse = tuple(message.shape), message.HasField("sparse_csr")
    if min(shape, default=0) < 0:
        raise BadWireError(f"{where}: a tensor of the shape {list(shape)}")
    values = _array(message.sparse_csr.values if sparse else message.dense, _DTYPES[message.dtype], where)
    if message.dtype == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if not sparse:
        if shape and math.prod(shape) != len(values):
            raise BadWireError(f"{where}: {len(values)} values do not fill the shape {list(shape)}")
        return values.reshape(shape) if shape else values
    rows = _array(message.sparse_csr.crow_indices, np.int64, where)
    columns = _array(message.sparse_csr.col_indices, np.int64, where)
    counts, dense = np.diff(rows), np.zeros(shape, values.dtype)
    try:
        # before so many indices are made; each by itself, too: sums of large ones begin anew at 0
        if ((counts < 0) | (counts > len(values))).any() or int(counts.sum()) != len(values):
            raise ValueError(f"rows of {int(counts.sum())} values")
        dense[np.repeat(np.arange(len(counts)), counts), columns] = values
    except (ValueError, IndexError) as error:
        raise BadWireError(f"{where}: its sparse indices do not fit the shape {list(shape)}: {error}") from error
    return dense


def write_forward_backward(outputs: Mapping[str, Sequence[NDArray[np.float32]]], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to a forward (and backward) pass.

    Args:
        outputs: name -> an array for each datum, in order; of one datum all have one shape, [T] or [T, K].
        metrics: `<name>:<how the client joins those of several requests>`.
    """
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    rows = [dict(zip(outputs, arrays, strict=True)) for arrays in zip(*outputs.values(), strict=True)]
    for trailing, group in groupby(rows, lambda row: next(iter(row.values())).shape[1:]):
        data = list(group)  # a record has one trailing shape
        record = answer.loss_fn_outputs.add(num_datums=len(data))
        for name in outputs:
            arrays = [np.ascontiguousarray(row[name], np.float32) for row in data]
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
            content = b"".join(array.tobytes() for array in arrays)
            tensor = {"data": content, "offsets": offsets.tobytes(), "dtype": _FLOAT32, "trailing_shape": trailing}
            record.fields.append(MESSAGES["NamedBatchedTensor"](key=name, value=MESSAGES["BatchedTensor"](**tensor)))
    answer.metrics.extend(MESSAGES["NamedNumber"](key=name, value=value) for name, value in metrics.items())
    return answer.SerializeToString()


def write_samples(
    sequences: Sequence[SampledSequence],
    prompt_logprobs: NDArray[np.float32] | None,
    prompt_top: list[list[tuple[int, float]]] | None,
) -> bytes:
    """Return the answer to a request for samples.

    Args:
        prompt_logprobs: [L] of the prompt's tokens, NaN where there is none; None: not asked for.
        prompt_top: [L] the likeliest tokens at each of them; None: not asked for.
    """
    answer = MESSAGES["SampleResponse"]()
    for sequence in sequences:
        row = answer.sequences.add(
            stop_reason=sequence.stop_reason,
            tokens=sequence.tokens.astype(np.int32).tobytes(),
            logprobs=sequence.logprobs.astype(np.float32).tobytes(),
        )
        if sequence.top is not None:
            row.topk_sampled_logprobs.CopyFrom(_top(sequence.top))
    if prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if prompt_top is not None:
        answer.topk_prompt_logprobs.CopyFrom(_top(prompt_top))
    return answer.SerializeToString()


def _top(rows: list[list[tuple[int, float]]]) -> Any:
    """Rows of (token, log-probability) as two matrices; places that a row lacks are 0 and `_ABSENT`."""
    width = max(map(len, rows), default=0)
    ids, logprobs = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), _ABSENT, np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row):
            ids[i, j], logprobs[i, j] = token, logprob
    return MESSAGES["TopkLogprobs"](token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))
