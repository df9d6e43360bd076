"""The tinker client's data as micro-batches: targets of one's own, several at once, on ranks that split a row."""

from dataclasses import replace

import numpy as np
import pytest

from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.tinker.batches import BadRequestError, Collected, check_data, part_of, per_example, retargeted
from prime_hpc.trainer.tinker.wire import MESSAGES, Datum, write_forward_backward

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
