"""What environments' processes tell each other, byte by byte."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prime_hpc.envs.samples import EpisodeResult, EpisodeState, Sample
from prime_hpc.envs.workers.frames import MAX_FRAME, FrameError, Unpacker, pack
from prime_hpc.envs.workers.records import result_from_plain, result_to_plain


def a_result(reward: float = 0.1 + 0.2) -> EpisodeResult:
    sample = Sample(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.1, -1e-30], dtype=np.float32),
        versions=np.array([-1, 3, 4], dtype=np.int32),
        num_turns=1,
        reward=reward,
        rewards={"exact": [reward / 3, 3.0]},
    )
    metrics: dict[str, Any] = {"share": np.float64(1 / 3), "single": np.float32(0.5)}
    text = "a lone surrogate \ud800"
    return EpisodeResult(
        EpisodeState.COMPLETED, True, samples=[sample], reward=reward, metrics=metrics, prompt_text=text
    )


def sent(message: bytes) -> dict[str, Any]:
    (found,) = Unpacker().feed(message)
    return found


def test_a_result_comes_back_to_the_last_bit() -> None:
    result = a_result()
    found = result_from_plain(sent(pack("ended", result=result_to_plain(result)))["result"])
    assert (found.reward, found.metrics, found.prompt_text) == (result.reward, result.metrics, result.prompt_text)
    for name, value in vars(result.samples[0]).items():
        other = vars(found.samples[0])[name]
        assert np.array_equal(other, value) and getattr(other, "dtype", None) == getattr(value, "dtype", None)
    found.samples[0].token_ids[0] = 1  # as writable as one that was played here


def test_images_come_back_byte_for_byte() -> None:
    (sample,) = a_result().samples
    seen = replace(sample, images=np.array([1, 0, 0], np.int32), image_data=(bytes(range(256)),))
    result = replace(a_result(), samples=[seen])
    (found,) = result_from_plain(sent(pack("ended", result=result_to_plain(result)))["result"]).samples
    assert found.image_data == seen.image_data and type(found.image_data[0]) is bytes
    assert found.images is not None and found.images.dtype == np.int32 and found.images.tolist() == [1, 0, 0]


def test_messages_come_whole_however_they_are_cut() -> None:
    stream = pack("one", n=1) + pack("two", data=b"\x00" * 1000)
    unpacker = Unpacker()
    found = [message for byte in stream for message in unpacker.feed(bytes([byte]))]
    assert [m["op"] for m in found] == ["one", "two"] and found[1]["data"] == b"\x00" * 1000


def test_arguments_may_have_numbers_for_names() -> None:
    args = {"levels": {1: 0.5, 2: 0.5}}
    assert Unpacker().feed(pack("open", args=args)) == [{"op": "open", "args": args}]


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x05",
        b"\x00\x00\x00\x02\x81\x01",
        b"\x00\x00\x00\x04\xc7\x01\x05\x00",
    ],
    ids=["too long", "no msgpack", "no map", "cut short", "an extension type"],
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    with pytest.raises(FrameError):
        Unpacker().feed(data)


@pytest.mark.parametrize(
    "change",
    [{"state": "splendid"}, {"surprise": 1}, {"samples": [{}]}, {"samples": 3}],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        result_from_plain(result_to_plain(a_result()) | change)


def test_arrays_of_different_length_are_refused() -> None:
    plain = result_to_plain(a_result())
    plain["samples"][0]["versions"] = b"\x00" * 4
    with pytest.raises(FrameError, match="differ in length"):
        result_from_plain(plain)
