"""How the transformers backend answers on OpenAI's text routes."""

import pytest

from prime_hpc.inference.transformers.requests import Reader, _text_logprobs
from prime_hpc.inference.transformers.sampling import Drawn


class _Piece(str):
    """Counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        _Piece.asked += 1
        return super().__len__()


def test_offsets_of_a_long_reply_take_one_look_at_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(None, ["policy"], 9, 10_000)
    monkeypatch.setattr(reader, "piece", lambda token: _Piece("x" * token))
    drawn = [Drawn(1 + n % 3, -0.5, 1, []) for n in range(2000)]
    answer = _text_logprobs(drawn, 0, reader, chat=False)
    assert answer is not None and answer["text_offset"][:5] == [0, 1, 3, 6, 7]
    assert len(answer["text_offset"]) == 2000 and _Piece.asked <= 4000  # it was 2 million
    nothing = _text_logprobs([], 0, reader, chat=False)
    assert nothing is not None and nothing["text_offset"] == []
