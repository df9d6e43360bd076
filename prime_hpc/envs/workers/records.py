"""Ended episodes as plain values for the socket, and back, to the last bit: arrays travel as their bytes."""

from dataclasses import fields
from typing import Any

import numpy as np

from prime_hpc.envs.samples import ARRAYS, EpisodeResult, EpisodeState, Sample
from prime_hpc.envs.workers.frames import FrameError

_ROUTED = "routed"
"""An array whose type and shape travel with it."""
_RESULT = tuple(field.name for field in fields(EpisodeResult))
_SAMPLE = tuple(field.name for field in fields(Sample))


def result_to_plain(result: EpisodeResult) -> dict[str, Any]:
    """Return an ended episode as msgpack takes it."""
    plain = {name: getattr(result, name) for name in _RESULT}
    return plain | {"state": result.state.value, "samples": [_sample_to_plain(sample) for sample in result.samples]}


def _sample_to_plain(sample: Sample) -> dict[str, Any]:
    plain = {name: getattr(sample, name) for name in _SAMPLE}
    for name, kind in ARRAYS.items():
        if plain[name] is not None:
            plain[name] = np.ascontiguousarray(plain[name], dtype=kind).tobytes()
    if sample.routed is not None:
        plain[_ROUTED] = [str(sample.routed.dtype), list(sample.routed.shape), sample.routed.tobytes()]
    return plain


def result_from_plain(plain: Any) -> EpisodeResult:
    """Return the ended episode that was sent.
    Raises FrameError: fields are missing or unknown, or arrays of a sample differ in length."""
    try:
        samples = [_sample_from_plain(sample) for sample in plain["samples"]]
        return EpisodeResult(**(plain | {"state": EpisodeState(plain["state"]), "samples": samples}))
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError(f"not the record of an episode: {type(error).__name__}: {error}") from error


def _sample_from_plain(plain: dict[str, Any]) -> Sample:
    arrays = {}
    for name, kind in ARRAYS.items():
        if plain[name] is not None:
            arrays[name] = np.frombuffer(bytearray(plain[name]), dtype=kind)  # a bytearray: it may be written to
    if plain[_ROUTED] is not None:
        kind, shape, content = plain[_ROUTED]
        arrays[_ROUTED] = np.frombuffer(bytearray(content), dtype=kind).reshape(shape)
    sample = Sample(**(plain | {"image_data": tuple(plain["image_data"])} | arrays))
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("the arrays of a sample differ in length")
    return sample
