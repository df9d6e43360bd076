"""Policy version of every sampled token, from the spans that vLLM reports with a completion.

vLLM 0.32 answers `weight_versions: [{"version": "3", "start": 0, "end": 7}, ...]`: half-open spans over
the completion's tokens, in order, without gaps. A new span begins where the weights changed mid-request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class VersionSpanError(ValueError):
    """The engine's version spans do not describe the completion's tokens."""


def versions_from_spans(spans: Sequence[Mapping[str, Any]] | None, num_tokens: int) -> np.ndarray:
    """Expand version spans to one policy version per token.

    Args:
        spans: `weight_versions` of one completion; None or [] is allowed only for zero tokens.

    Returns:
        int32 array, shape [num_tokens].

    Raises:
        VersionSpanError: a span is malformed, overlaps, leaves a gap, or its version is not an integer.
    """
    versions = np.empty(num_tokens, dtype=np.int32)
    filled = 0
    for span in spans or ():
        try:
            version, start, end = int(span["version"]), int(span["start"]), int(span["end"])
        except (KeyError, TypeError, ValueError) as error:
            raise VersionSpanError(
                f"version span {dict(span)!r} has no integer version, start and end; "
                "is the server prime-hpc's own (it labels the base model 0)?"
            ) from error
        if start != filled or end < start or end > num_tokens:
            raise VersionSpanError(
                f"version span [{start}, {end}) does not continue at token {filled} of {num_tokens}: {spans}"
            )
        versions[start:end] = version
        filled = end
    if filled != num_tokens:
        raise VersionSpanError(f"version spans cover {filled} of {num_tokens} tokens: {spans}")
    return versions
