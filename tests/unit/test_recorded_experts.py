"""The experts of each token from an engine's answer through samples, processes and files to the trainer's tokens."""

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from verifiers.v1.errors import ProviderError

from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs.model_client import _routing_of
from prime_hpc.envs.routing import RoutingError, RoutingOf, parse_routing
from prime_hpc.envs.samples import EpisodeResult, EpisodeState, Sample, episode_result, trace_samples
from prime_hpc.envs.workers.records import result_from_plain, result_to_plain
from prime_hpc.orchestrator.batching.batch_builder import TrainSample, build_ranks
from prime_hpc.orchestrator.rollouts.carried import CarriedGroup, decode_groups, encode_groups
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.batch.rank_batch import RankBatch, decode_rank, encode_rank, select_micro_batches
from prime_hpc.store.batch.shared_prefixes import find_sharing, token_keys
from prime_hpc.trainer.batching.micro_batches import make_micro_batch, redistribute
from tests.support.tiny_families import random_routing
from tests.support.tiny_model import random_rank_batch
from tests.unit.test_envs_samples import make_episode, make_trace, prompt_node, reply_node, versions_of


def wire(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def rows(first: int, count: int) -> np.ndarray:
    """Recognisable experts of two layers, one a token: uint8 [count, 2, 1]."""
    return (first + np.arange(2 * count)).astype(np.uint8).reshape(count, 2, 1)


def test_an_answer_is_read() -> None:
    sent = rows(0, 5)
    found = parse_routing({"routed_experts": wire(sent)})
    assert found is not None and found.dtype == np.uint8 and np.array_equal(found, sent)
    assert parse_routing({"routed_experts": None}) is None and parse_routing({}) is None
    got = _routing_of({"routed_experts": wire(sent)}, 6)
    assert got is not None and np.array_equal(got, sent)
    with pytest.raises(ProviderError, match="experts of 5 tokens, of 6 expected"):
        _routing_of({"routed_experts": wire(sent)}, 7)
    assert _routing_of({"routed_experts": wire(sent), "finish_reason": "abort"}, 7) is None


@pytest.mark.parametrize(
    "text", ["!!", wire(np.zeros(3, np.uint8)), wire(np.zeros((2, 2, 2))), base64.b64encode(b"nothing").decode(), 7]
)
def test_a_damaged_answer_is_no_record(text: Any) -> None:
    with pytest.raises(RoutingError, match="recorded experts"):
        parse_routing({"routed_experts": text})
    with pytest.raises(ProviderError):
        _routing_of({"routed_experts": text}, 4)


def test_rows_of_the_call_that_sampled_a_token_count() -> None:
    first, second = reply_node([3], [4, 5]), reply_node([8, 9], [10])
    turns = [prompt_node(1, 2), first, prompt_node(7), second]
    recorded = {id(first): rows(0, 4), id(second): rows(100, 8)}
    (sample,) = trace_samples(make_trace(turns), versions_of, routing_of=lambda node: recorded.get(id(node)))
    assert sample.routed is not None and sample.routed.shape == (9, 2, 1)
    assert sample.routed[:4].ravel().tolist() == list(range(8))
    assert sample.routed[4:8].ravel().tolist() == list(range(108, 116))
    assert sample.routed[8].ravel().tolist() == [255, 255]
    (without,) = trace_samples(make_trace(turns), versions_of, routing_of=lambda node: None)
    assert without.routed is None


def _found_in(recorded: dict[int, np.ndarray]) -> RoutingOf:
    return lambda node: recorded.get(id(node))


def test_rows_of_other_tokens_make_an_episode_unusable() -> None:
    reply = reply_node([3], [4, 5])
    for wrong in (rows(0, 5), rows(0, 3)):
        episode, recorded = make_episode(make_trace([prompt_node(1, 2), reply])), {id(reply): wrong}
        result = episode_result(episode, versions_of, 1.0, _found_in(recorded))
        assert not result.usable and result.error_type == "RoutingError" and "ends with token 4" in result.reason
    second = reply_node([], [7])
    kinds = {id(reply): rows(0, 4), id(second): rows(0, 6).astype(np.uint16)}
    trace = make_trace([prompt_node(1, 2), reply, prompt_node(6), second])
    result = episode_result(make_episode(trace), versions_of, 1.0, lambda node: kinds[id(node)])
    assert result.error_type == "RoutingError" and "beside" in result.reason


def sample(ids: list[int], routed: np.ndarray | None) -> Sample:
    mask = np.arange(len(ids)) > 0
    zeros = np.zeros(len(ids), np.float32)
    return Sample(np.array(ids, np.int32), mask, zeros, np.where(mask, 0, -1).astype(np.int32), 1, 0.0, routed=routed)


def test_samples_travel_between_processes_and_attempts() -> None:
    samples = [sample([1, 2, 3], rows(0, 3)), sample([4, 5], rows(50, 2))]
    result = EpisodeResult(EpisodeState.COMPLETED, usable=True, samples=samples)
    back = result_from_plain(msgpack.unpackb(msgpack.packb(result_to_plain(result))))
    prompt = Prompt(0, 0, 0, 0)
    (group,), _ = decode_groups(encode_groups([CarriedGroup(prompt, [result])], {}))
    for found in (back.samples, group.results[0].samples):
        for one, other in zip(found, samples, strict=True):
            assert one.routed is not None and other.routed is not None and one.routed.dtype == np.uint8
            assert np.array_equal(one.routed, other.routed)
    none = EpisodeResult(EpisodeState.COMPLETED, usable=True, samples=[sample([1, 2], None)])
    (group,), _ = decode_groups(encode_groups([CarriedGroup(prompt, [none])], {}))
    assert group.results[0].samples[0].routed is None


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_batch_on_disk_is_cut_and_dealt_out_with_its_experts(kind: Any) -> None:
    plain = random_rank_batch([[5, 3], [], [7], [2]], seed=0)
    routed = random_routing(plain.num_tokens, 0).astype(kind)
    batch = dataclasses.replace(plain, routed=routed)
    raw = np.frombuffer(b"".join(bytes(memoryview(part)) for part in encode_rank(batch)), np.uint8)
    found = decode_rank(raw, Path("there"))
    assert found.routed is not None and found.routed.dtype == kind and np.array_equal(found.routed, routed)
    empty = batch.micro_batch(1)
    assert empty.routed is not None and empty.routed.tolist() == [[[np.iinfo(kind).max] * 2] * 3]
    for rank in range(2):
        part = redistribute([found], rank, 2)
        part.check()
        assert part.routed is not None
        for token, experts in zip(part.token_ids, part.routed, strict=True):
            assert any(np.array_equal(experts, routed[i]) for i in np.flatnonzero(batch.token_ids == token))
    mixed = select_micro_batches([(batch, 0), (plain, 2)], 3)
    assert mixed.routed is not None and mixed.routed[:8].tolist() == routed[:8].tolist()
    assert (mixed.routed[8:] == np.iinfo(kind).max).all() and RankBatch.empty(2).routed is None
    with pytest.raises(ValueError, match="routed: must be a uint16 array of 3 dimensions"):
        dataclasses.replace(batch, routed=routed[:, 0]).check()
    with pytest.raises(ValueError, match="routed: has"):
        dataclasses.replace(batch, routed=routed[:-1]).check()


def test_a_micro_batch_names_the_experts_of_its_tokens() -> None:
    batch = random_rank_batch([[5, 3], []], seed=0)
    routed = random_routing(8, 1).astype(np.uint16)
    routed[2], routed[3, 0], routed[4, 1] = 65535, (255, 7), (300, 1)
    batch = dataclasses.replace(batch, routed=routed)
    micro = make_micro_batch(batch, 0)
    want = np.where(routed == 65535, -1, routed.astype(np.int64))
    assert micro.routed is not None and micro.routed.numpy().tolist() == want.tolist()
    padded = make_micro_batch(batch, 0, single_rows=True).routed
    assert padded is not None
    assert padded.tolist() == [*want[:5].tolist(), *want[5:].tolist(), *[[[-1, -1]] * 3] * 2]
    empty = make_micro_batch(batch, 1).routed
    assert empty is not None and (empty == -1).all()
    assert make_micro_batch(dataclasses.replace(batch, routed=None), 0).routed is None


def test_the_packer_knows_what_the_trainer_will_share() -> None:
    """Six tokens begin two samples; where the fourth goes to other experts, only three are shared."""
    ids = [[1, 2, 3, 4, 5, 6, n, n, n, n] for n in (7, 8)]
    routed = random_routing(10, 0)
    other = routed.copy()
    other[3] = (other[3] + 1) % 8
    for second, shared in ((routed, 6), (other, 3)):
        samples = [sample(ids[0], routed), sample(ids[1], second)]
        keys = [token_keys(s.token_ids, s.routed) for s in samples]
        assert find_sharing(keys, [0, 0]).num_tokens == shared
        zeros = np.zeros(10, np.float32)
        trained = [TrainSample(s, zeros, 0.0, i, 0, 0) for i, s in enumerate(samples)]
        (batch,) = build_ranks(trained, num_ranks=1, micro_batch_tokens=20, sampling=SamplingConfig())
        assert batch.num_micro_batches == 1 and make_micro_batch(batch, 0).num_shared == shared
