"""Distillation from scripted teachers through a real orchestrator to the real trainer: opd, opsd, sdpo, sft."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.orchestrator.batching.batch_builder import EPISODE_BITS
from prime_hpc.store.batch.rank_batch import NOT_SAMPLED, RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from tests.integration.test_orchestrator import log_of
from tests.integration.test_trainer import assert_done, run_trainer, write_run
from tests.support.orchestrator_world import World, make_experiment, varied_reply
from tests.support.scripted_server import AdminServer, score_of
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


@pytest.fixture
def servers(tokenizer: Any) -> Iterator[tuple[AdminServer, AdminServer]]:
    with AdminServer(tokenizer, varied_reply(1)) as policy, AdminServer(tokenizer, varied_reply(2)) as teacher:
        yield policy, teacher


def gaps(rank: RankBatch, num_before: int = 0) -> np.ndarray:
    """What every sampled token's advantage should be: the scripted teacher's word against the policy's."""
    wanted = np.zeros(rank.num_tokens, np.float32)
    for first, stop in zip(rank.seq_offsets[:-1].tolist(), rank.seq_offsets[1:].tolist(), strict=True):
        for t in range(first, stop):
            if rank.loss_mask[t]:
                wanted[t] = score_of(int(rank.token_ids[t]), t - first + num_before) - rank.logprobs[t]
    return wanted


def train(tmp_path: Path, model: Path, world: World, loss: dict[str, Any]) -> list[dict[str, Any]]:
    """The batches that the orchestrator made, taken by a real trainer; its metrics."""
    settings = {"loss": loss, "optim": {"lr": 2e-3}, "threads_per_rank": 1, "batch_timeout_s": 20}
    paths = write_run(tmp_path / "trained", model, max_steps=STEPS, seq_len=320, trainer=settings)
    for step in range(1, STEPS + 1):
        write_batch(paths, step, world.ranks(step), state={"step": step})
    assert_done(run_trainer(paths), paths)
    return read_metrics(paths.metrics("trainer"))


def test_opd_gives_every_token_the_teachers_word_and_trains(
    tmp_path: Path, model: Path, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, teacher = servers
    teacher.score_failures = 3  # retried
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "opd"},
        teacher={"base_url": teacher.url, "model": str(model)},
        top={"max_steps": STEPS, "trainer": {"num_ranks": 1, "micro_batch_tokens": 320}},
    )
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, STEPS + 1))
        for step in range(1, STEPS + 1):
            [rank] = world.ranks(step)
            np.testing.assert_allclose(rank.advantages, gaps(rank), atol=1e-5)
        assert teacher.num_scored >= 3 + 2 * 16 and policy.num_scored == 0 and not teacher.updates
        rows = [row for row in world.metrics() if "teacher/reverse_kl" in row]
        [rank] = world.ranks(1)
        assert rows[0]["teacher/reverse_kl"] == pytest.approx(-float(gaps(rank)[rank.loss_mask].mean()), abs=1e-4)
        steps = train(tmp_path, model, world, {"type": "reinforce", "mismatch": {"warn": None}})
        assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps[:STEPS])


def test_the_trainer_learns_the_teachers_distribution(
    tmp_path: Path, model: Path, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, teacher = servers
    loss = {"type": "reinforce", "mismatch": {"warn": None}, "distillation": {"top_k": 3}}
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "opd"},
        teacher={"base_url": teacher.url, "model": str(model)},
        top={"max_steps": STEPS, "trainer": {"num_ranks": 1, "micro_batch_tokens": 320, "loss": loss}},
    )
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        for step in range(1, STEPS + 1):
            [rank] = world.ranks(step)
            assert not rank.advantages.any() and rank.loss_mask.any()  # nothing but the divergence trains
            assert rank.teacher_ids is not None and rank.teacher_logprobs is not None
            named = rank.teacher_ids[rank.target_mask()]
            assert all(len({0, 1, 2} - set(row)) <= 1 for row in named.tolist())  # the token itself may be likelier
        steps = train(tmp_path, model, world, loss)
    first, last = steps[0], steps[STEPS - 1]
    assert last["teacher_divergence"] < first["teacher_divergence"] and first["teacher_mass"] > 0.8
    assert first["loss"] == pytest.approx(first["teacher_divergence"], rel=1e-4)


def test_opd_without_an_answering_teacher_ends_in_time_and_says_so(
    tmp_path: Path, model: Path, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, teacher = servers
    teacher.score_failures = 10_000
    settings = {"base_url": teacher.url, "deadline_s": 1.0}
    exp = make_experiment(model, tmp_path / "run", advantage={"type": "opd"}, teacher=settings)
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 1
        assert "the teacher gave no log-probabilities" in world.status()["error"] and "503" in world.status()["error"]


def test_opsd_shows_the_policy_the_answer(
    tmp_path: Path, model: Path, tokenizer: Any, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, _ = servers
    shown = "Solution: {demonstration}"
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "opsd", "demonstration": "text", "demonstration_text": shown},
        top={"max_steps": 1, "trainer": {"num_ranks": 1, "micro_batch_tokens": 320}},
    )
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        [rank] = world.ranks(1)
        whole = [r["token_ids"] for r in policy.requests if r["sampling_params"].get("prompt_logprobs") is not None]
        starts = set()
        for first, stop in zip(rank.seq_offsets[:-1].tolist(), rank.seq_offsets[1:].tolist(), strict=True):
            ids = rank.token_ids[first:stop].tolist()
            [before] = {tuple(w[: -len(ids)]) for w in whole if w[-len(ids) :] == ids}
            text = tokenizer.decode(list(before))
            assert text.startswith("<|im_start|>system\nSolution: ") and text.endswith("<|im_end|>\n")
            starts.add(text)
            for t in range(first, stop):
                if rank.loss_mask[t]:
                    wanted = score_of(int(rank.token_ids[t]), t - first + len(before)) - rank.logprobs[t]
                    assert rank.advantages[t] == pytest.approx(wanted, abs=1e-5)
        assert len(starts) == 4  # each prompt its own


def test_sdpo_shows_the_policy_a_rollout_of_the_group_that_succeeded(
    tmp_path: Path, model: Path, tokenizer: Any, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, _ = servers
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "sdpo", "success_reward": 0.0, "demonstration_text": "Shown: {demonstration}"},
        top={"max_steps": 1, "trainer": {"num_ranks": 1, "micro_batch_tokens": 320}},
        traces={},
    )
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        [rank] = world.ranks(1)
        lines = [json.loads(line) for file in (tmp_path / "run" / "traces").glob("*") for line in file.open()]
        played = {(r["position"], r["rollout"]): r for r in lines if r["kind"] == "rollout"}
        whole = [r["token_ids"] for r in policy.requests if r["sampling_params"].get("prompt_logprobs") is not None]
        for ident, first, stop in zip(
            rank.sample_ids.tolist(), rank.seq_offsets[:-1].tolist(), rank.seq_offsets[1:].tolist(), strict=True
        ):
            position, own = ident >> EPISODE_BITS, ident % (1 << EPISODE_BITS)
            text = played[position, 1 if own == 0 else 0]["completion"]  # all have succeeded: the first other one
            ids, trains = rank.token_ids[first:stop].tolist(), rank.loss_mask[first:stop]
            before = tokenizer.encode(f"<|im_start|>system\nShown: {text}<|im_end|>\n", add_special_tokens=False)
            assert [*before, *ids] in whole
            wanted = [score_of(token, len(before) + t) for t, token in enumerate(ids)] - rank.logprobs[first:stop]
            np.testing.assert_allclose(rank.advantages[first:stop], np.where(trains, wanted, 0), atol=1e-5)
        assert rank.num_sequences == 16
        [row] = [row for row in world.metrics() if "reward/mean" in row]
        assert row["teacher/shown"] == 1


def test_sft_learns_what_the_teacher_samples_whatever_the_policys_version(
    tmp_path: Path, model: Path, servers: tuple[AdminServer, AdminServer]
) -> None:
    _, teacher = servers
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "sft"},
        teacher={"base_url": teacher.url},
        top={"max_steps": STEPS, "async_level": 0, "trainer": {"num_ranks": 1, "loss": {"type": "nll"}}},
    )
    with World(tmp_path / "run", exp, []) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        assert not teacher.updates and teacher.version == 0
        for step in range(1, STEPS + 1):
            [rank] = world.ranks(step)
            assert (rank.versions == NOT_SAMPLED).all() and (rank.advantages[rank.loss_mask] == 1).all()
            assert rank.logprobs[rank.loss_mask].any()
        steps = train(tmp_path, model, world, {"type": "nll"})
        assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in steps[:STEPS])
        assert "mismatch_alarm" not in steps[0]


def test_echo_learns_what_the_environment_said(
    tmp_path: Path, model: Path, servers: tuple[AdminServer, AdminServer]
) -> None:
    policy, _ = servers
    exp = make_experiment(
        model,
        tmp_path / "run",
        advantage={"type": "dr_grpo", "zero": "keep", "echo": {"weight": 0.5}},
        env=[{"id": "guess-number", "max_turns": 3, "timeout_s": 20}],
        top={"max_steps": STEPS, "seq_len": 320, "trainer": {"num_ranks": 1, "micro_batch_tokens": 640}},
    )
    with World(tmp_path / "run", exp, [policy]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        for step in range(1, STEPS + 1):
            [rank] = world.ranks(step)
            assert rank.ce_weights is not None and set(np.unique(rank.ce_weights)) == {0.0, 0.5}
            assert not rank.ce_weights[rank.loss_mask].any()
        steps = train(tmp_path, model, world, {"type": "reinforce", "mismatch": {"warn": None}})
        assert all(row["echo_loss"] > 0 and math.isfinite(row["loss"]) for row in steps[:STEPS])
