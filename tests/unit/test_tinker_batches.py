"""The tinker client's data as micro-batches: targets of one's own, several at once, on ranks that split a row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.tinker.batches import BadRequestError, Collected, check_data, part_of, per_example, retargeted
from prime_hpc.trainer.tinker.requests import LoraShape, OptimStep, adam_step
from prime_hpc.trainer.tinker.wire import MESSAGES, BadWireError, Datum, read_forward_backward, write_forward_backward

ONE = Datum(np.array([5, 6, 7]), {"target_tokens": np.array([6, 7, 8]), "weights": np.array([1.0, 2.0, 3.0])})
TWO = Datum(
    np.array([1, 2]), {"target_tokens": np.array([[9, 10], [11, 12]]), "weights": np.array([[0.1, 0.2], [0.3, 0.4]])}
)


def test_each_token_predicts_its_own_targets() -> None:
    examples = check_data([ONE, TWO], "cross_entropy", 20, 64)
    batch = part_of(examples, 0, 1, 64)
    order = batch.sample_ids.tolist()
    micro = retargeted(make_micro_batch(batch, 0, share_prefixes=False), [examples[i] for i in order])
    ids = micro.input_ids.flatten().numpy()
    predicts = [(int(ids[i]), int(t)) for i, t in zip(micro.target_index, micro.targets, strict=True)]
    expected = {0: [(5, 6), (6, 7), (7, 8)], 1: [(1, 9), (1, 10), (2, 11), (2, 12)]}
    assert predicts == [pair for i in order for pair in expected[i]]
    weights = {0: [1.0, 2.0, 3.0], 1: [0.1, 0.2, 0.3, 0.4]}
    np.testing.assert_allclose(micro.advantages, [w for i in order for w in weights[i]], rtol=1e-6)
    assert micro.targets_of_sequence.tolist() == [{0: 3, 1: 4}[i] for i in order]
    assert micro.sequence.tolist() == sorted(micro.sequence.tolist()) and micro.num_targets == 7


def test_a_rank_of_a_split_row_keeps_the_targets_of_its_tokens() -> None:
    examples = check_data([ONE, TWO], "cross_entropy", 20, 64)
    batch = part_of(examples, 0, 1, 64)
    ordered = [examples[i] for i in batch.sample_ids]
    whole = make_micro_batch(batch, 0, share_prefixes=False)
    expected, found = retargeted(whole, ordered), []
    for own in (slice(0, 2), slice(2, 4), slice(4, 5)):
        part = retargeted(replace(whole, own=own, target_index=whole.target_index[own]), ordered)
        assert part.targets.tolist() == expected.targets.tolist()
        assert part.target_index.tolist() == expected.target_index[part.own].tolist()
        found += part.targets[part.own].tolist()
    assert found == expected.targets.tolist()


def test_results_come_back_in_their_datum_s_shape() -> None:
    examples = check_data([TWO, ONE, TWO], "cross_entropy", 20, 64)
    batch = part_of(examples, 0, 1, 64)
    micro = retargeted(make_micro_batch(batch, 0, share_prefixes=False), [examples[i] for i in batch.sample_ids])
    noted = micro.targets.float()
    rows = per_example(batch, examples, Collected([noted], [noted + 100]))
    for i, example in enumerate(examples):
        np.testing.assert_array_equal(rows[i][0], example.targets)
        np.testing.assert_array_equal(rows[i][1], example.targets + 100)
    answer = MESSAGES["ForwardBackwardOutput"]()
    answer.ParseFromString(write_forward_backward({"logprobs": [rows[i][0] for i in range(3)]}, {"loss:sum": 1.0}))
    records = [(record.num_datums, list(record.fields[0].value.trailing_shape)) for record in answer.loss_fn_outputs]
    assert records == [(1, [2]), (1, []), (1, [2])]


@pytest.mark.parametrize(
    ("targets", "loss", "words"),
    [
        (np.zeros((2, 65)), "cross_entropy", "65 targets a token"),
        (np.zeros((2, 0)), "cross_entropy", "0 targets a token"),
        (np.zeros((2, 2)), "ppo", "one target a token"),
        (np.zeros(3), "cross_entropy", "target_tokens has shape"),
        (np.zeros((2, 1, 1)), "cross_entropy", "target_tokens has shape"),
        (np.full(2, 20), "cross_entropy", "token 20: the model has tokens 0 to 19"),
        (np.full((2, 2), -1), "cross_entropy", "token -1"),
    ],
)
def test_targets_that_cannot_be_trained_on_are_refused(targets: np.ndarray, loss: str, words: str) -> None:
    values = "weights" if loss == "cross_entropy" else "advantages"
    inputs = {"target_tokens": targets, values: np.zeros(targets.shape)}
    if loss != "cross_entropy":
        inputs["logprobs"] = np.zeros(targets.shape)
    with pytest.raises(BadRequestError, match=words):
        check_data([Datum(np.array([1, 2]), inputs)], loss, 20, 64)


def tensor(shape: list[int], rows: list[int], columns: list[int], values: list[float], times: int = 1) -> bytes:
    """A request with one sparse tensor, so many times."""
    request = MESSAGES["ForwardBackwardRequest"](model_id="a", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    sparse = {"values": np.array(values, np.float32), "crow_indices": np.array(rows), "col_indices": np.array(columns)}
    content = MESSAGES["SparseCsr"](**{name: array.tobytes() for name, array in sparse.items()})
    value = MESSAGES["Tensor"](dtype=1, shape=shape, sparse_csr=content)
    datum.loss_fn_inputs.append(MESSAGES["NamedTensor"](key="weights", value=value))
    for _ in range(times - 1):
        request.data.add().CopyFrom(datum)
    return request.SerializeToString()


def test_a_sparse_tensor_takes_no_more_memory_than_its_request_is_worth() -> None:
    (datum,) = read_forward_backward(tensor([2, 3], [0, 1, 2], [2, 0], [5, 7])).data
    assert datum.inputs["weights"].tolist() == [[0, 0, 5], [7, 0, 0]]
    for shape, times in (([10**6, 10**6], 1), ([1, 1 << 20], 65), ([-1, 1 << 27], 1)):  # a few bytes each
        with pytest.raises(BadWireError, match="its sparse tensors have .* values together; .* 67108864"):
            read_forward_backward(tensor(shape, [0, 1], [0], [1.0], times))
    for shape, rows, columns, values in (
        ([-1, 2], [0, 1], [0], [1.0]),
        ([2, 2], [0, 10**10], [0], [1.0]),
        ([2, 2], [0, 2, 1], [0], [1.0]),
        ([5, 2], [0, 2**62, -(2**63), -(2**62), 0, 1], [0], [1.0]),  # sums that go round; numpy wrote beyond its memory
        ([2, 2], [0, 1, 1], [2], [1.0]),
    ):
        with pytest.raises(BadWireError, match="datum 0: weights"):
            read_forward_backward(tensor(shape, rows, columns, values))


def test_numbers_that_nothing_here_can_hold_are_the_requests_error() -> None:
    """They ended the ranks' loop, and with it every client's work, or left later requests to wait for this one."""
    for seed in (2**64 - 1, -(2**63)):
        torch.Generator().manual_seed(LoraShape(seed=seed).seed or 0)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValidationError, match="seed"):
            LoraShape(seed=seed)
    for rate in (10**400, float("inf"), float("nan"), True):
        with pytest.raises(BadRequestError, match="learning_rate = .*must be a finite number"):
            adam_step(OptimStep(model_id="a", seq_id=1, adam_params={"learning_rate": rate}))
