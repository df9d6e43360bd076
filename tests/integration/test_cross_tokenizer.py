"""A scripted teacher with another tokenizer and chat template through a real orchestrator, turn by turn."""

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from prime_hpc.store.batch.rank_batch import RankBatch
from tests.integration.test_orchestrator import log_of
from tests.support.orchestrator_world import World, make_experiment, varied_reply
from tests.support.other_tokenizer import byte_level
from tests.support.scripted_server import AdminServer, score_of
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(?:<think>\s*</think>\s*)?(.*?)<\|im_end\|>\n", re.DOTALL)


def turns(policy: Any, rank: RankBatch) -> Iterator[tuple[range, str, str]]:
    """The places of every reply, what the teacher should see before it, and its text."""
    for first, stop in pairwise(rank.seq_offsets.tolist()):
        mask = rank.loss_mask[first:stop].tolist()
        begins = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        for begin in begins:
            end = next((i for i in range(begin, len(mask)) if not mask[i]), len(mask))
            ids = rank.token_ids[first : first + end].tolist()
            assert ids[-1] == policy.eos_token_id
            messages = MESSAGE.findall(policy.decode(ids[:begin]))
            seen = "".join(f"<|header|>{role}\n\n{text}<|eot|>" for role, text in messages)
            reply = policy.decode(ids[begin:-1])
            yield range(first + begin, first + end), f"<s>{seen}<|header|>assistant\n\n", reply


def ends(tokenizer: Any, ids: list[int]) -> list[int]:
    return list(accumulate(len(tokenizer.decode([i])) for i in ids))


def test_every_token_has_its_segments_gap_in_every_turn(tmp_path: Path) -> None:
    model, own = make_tiny_model(tmp_path / "model"), byte_level(tmp_path / "teacher")
    policy = PreTrainedTokenizerFast.from_pretrained(model)
    with AdminServer(policy, varied_reply(1)) as server, AdminServer(own, varied_reply(2)) as teacher:
        exp = make_experiment(
            model,
            tmp_path / "run",
            advantage={"type": "opd"},
            env=[{"id": "guess-number", "max_turns": 3, "timeout_s": 20}],
            teacher={"base_url": teacher.url, "model": str(tmp_path / "teacher"), "tokenizer": "own"},
            top={"max_steps": 1, "seq_len": 320, "trainer": {"num_ranks": 1, "micro_batch_tokens": 640}},
        )
        with World(tmp_path / "run", exp, [server]) as world:
            world.start()
            assert world.wait() == 0, log_of(world)
            [rank] = world.ranks(1)
            asked = {own.decode(r["token_ids"]): r["token_ids"] for r in teacher.requests if "token_ids" in r}
            seen, long = 0, 0
            for places, before, reply in turns(policy, rank):
                ids = next(ids for text, ids in asked.items() if text.startswith(f"{before}{reply}<|eot|>"))
                stops = ends(own, ids)
                start = stops.index(len(before)) + 1
                theirs = [stop - len(before) for stop in stops[start:]]
                mine = [*ends(policy, rank.token_ids[places[0] : places[-1]].tolist()), len(reply) + len("<|eot|>")]
                theirs = theirs[: theirs.index(mine[-1]) + 1]
                cuts = sorted({0, *mine} & {0, *theirs})
                for low, high in pairwise(cuts):
                    tokens = [p for p, stop in zip(places, mine, strict=True) if low < stop <= high]
                    said = [i for i, stop in enumerate(theirs, start) if low < stop <= high]
                    gap = sum(score_of(ids[i], i) for i in said) - float(rank.logprobs[tokens].sum())
                    np.testing.assert_allclose(rank.advantages[tokens], gap, atol=1e-4)
                    long += len(said) > 1 or len(tokens) > 1
                seen += 1
            assert seen > exp.orchestrator.batch_size and long  # several turns, some segments of several tokens
            [row] = [row for row in world.metrics() if "teacher/scored_tokens" in row]
            assert row["teacher/scored_tokens"] == 1 and row["teacher/refused"] == 0
