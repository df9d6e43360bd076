"""Rollouts that are written token by token: which, when, and what a report makes of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from prime_hpc.report.rollouts import choose_rollouts
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.token_log import STEPS_LOGGED, TokenLog, token_rows, watching
from tests.support.tiny_model import random_rank_batch

LENGTHS = [[9, 12, 7, 10]]


def part() -> RankBatch:
    return random_rank_batch(LENGTHS, seed=1, step=3).micro_batch(0)


def seen(batch: RankBatch) -> np.ndarray:
    return -np.arange(1, int(batch.target_mask().sum()) + 1, dtype=np.float32) / 7


def micro_of(batch: RankBatch) -> Any:
    return SimpleNamespace(advantages=torch.from_numpy(seen(batch)))


def test_the_best_and_the_worst_are_taken_first() -> None:
    batch = part()
    order = np.argsort(-batch.rewards, kind="stable")
    ids = batch.sample_ids[order].tolist()
    for count, expected in ((1, ids[:1]), (2, [ids[0], ids[-1]]), (3, [ids[0], ids[-1], ids[1]]), (9, sorted(ids))):
        found = [row["sample"] for row in token_rows(batch, seen(batch), seen(batch), count)]
        assert (sorted(found) if count == 9 else found) == expected


def test_values_stand_at_their_tokens() -> None:
    batch, values = part(), seen(part())
    rows = {row["sample"]: row for row in token_rows(batch, values, -values, 9)}
    given = [v for s in batch.sample_ids.tolist() for v in rows[s]["trainer"] if v is not None]
    assert given == pytest.approx(values.tolist(), abs=1e-5)
    for row in rows.values():
        assert [v is not None for v in row["trainer"]] == [bool(t) for t in row["trained"]]
        assert [v is not None for v in row["logprobs"]] == [v >= 0 for v in row["versions"]]
        own = [v for v in row["trainer"] if v is not None]
        assert row["advantage"] == pytest.approx(-np.mean(own), abs=1e-5)  # the objective's, which may be a critic's


def test_what_is_not_finite_is_left_out_of_the_file() -> None:
    batch, values = part(), seen(part())
    values[0] = np.nan
    assert "NaN" not in json.dumps(token_rows(batch, values, seen(batch), 9))


@pytest.mark.parametrize("max_steps", [1, 5, 40, 1000, 100_000])
def test_about_forty_steps_of_any_run(tmp_path: Path, max_steps: int) -> None:
    log = TokenLog(tmp_path / "tokens.jsonl", 2, max_steps)
    due = [step for step in range(1, max_steps + 1) if log.is_due(step)]
    assert (due[0] == 1 and due[-1] > 0.97 * max_steps and len(due) <= STEPS_LOGGED + 1) or max_steps < 80
    assert len(due) == max_steps or max_steps > 40


def test_a_step_that_is_refused_is_written_and_others_do_nothing(tmp_path: Path) -> None:
    path, batch = tmp_path / "metrics" / "tokens.jsonl", part()
    log = TokenLog(path, 2, 400)
    with watching(log, 3) as watch:
        assert watch is None
    with pytest.raises(RuntimeError), watching(log, 10) as watch:
        assert watch is not None
        objective = watch(batch, cast("Any", lambda *_: "loss"))
        for values in (seen(batch), seen(batch) * 0):  # the first micro-batch counts
            assert objective(micro_of(batch), torch.from_numpy(values), cast("Any", None)) == "loss"
        raise RuntimeError("refused")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 10] and min(rows[0]["trainer"], key=lambda v: v or 0) < 0


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file is in the way")
    log, batch = TokenLog(tmp_path / "metrics" / "tokens.jsonl", 2, 1), part()
    with watching(log, 1) as watch:
        assert watch is not None
        watch(batch, cast("Any", lambda *_: "loss"))(micro_of(batch), torch.from_numpy(seen(batch)), cast("Any", None))


def test_a_report_shows_both_sides_and_the_later_attempts_words(tmp_path: Path) -> None:
    paths, batch = RunPaths(tmp_path), part()
    log = TokenLog(paths.metrics("tokens"), 2, 2)
    for scale in (1, 2):  # step 2 is done again
        log.watch(batch, cast("Any", lambda *_: "loss"))(
            micro_of(batch), torch.from_numpy(scale * seen(batch)), cast("Any", None)
        )
        log.write(2)
    with paths.metrics("tokens").open("a") as file:
        file.write(json.dumps({"step": 2, "sample": 1, "ids": [1], "trainer": []}) + "\n")  # of another version
        file.write('{"step": 2, "sam')
    chosen = choose_rollouts(paths, ["sums"], "no-model", 1_000_000)
    expected = token_rows(batch, 2 * seen(batch), seen(batch), 2)
    assert [row["sample"] for row in chosen.rollouts] == [row["sample"] for row in expected]
    for row, written in zip(chosen.rollouts, expected, strict=True):
        assert row["kind"] == "both sides" and row["env"] == "sums" and row["ids"] == written["ids"]
        assert [v is None for v in row["trainer"]] == [v is None for v in written["trainer"]]
        near = [(a, b) for a, b in zip(row["trainer"], written["trainer"], strict=True) if b is not None]
        assert all(a == pytest.approx(b, abs=1e-3) for a, b in near)
    few = choose_rollouts(paths, ["sums"], "no-model", 900)
    assert len(few.rollouts) + few.left_out == 2 and few.left_out
