"""Distillation by the teacher's distribution: what servers say, what a batch holds, what is refused."""

import asyncio
import base64
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from prime_hpc.client.inference import InferenceClient, InferenceError, TopTokens, parse_top, unpack_top
from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.inference.vllm.args import build_argv
from prime_hpc.launch.checks import _distillation, read_vocabulary
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.algorithms.teacher import Teacher
from prime_hpc.orchestrator.batching.batch_builder import build_ranks, score_groups, train_samples, zero_groups
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.batch.rank_batch import RankBatch, select_micro_batches
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import make_micro_batch, objective_part
from prime_hpc.trainer.objectives import loss_of as objective_of
from prime_hpc.trainer.objectives import rl_loss
from tests.proofs.prove_distillation import divergence_of, with_rest
from tests.support.episodes import make_episode, make_sample
from tests.support.random_teacher import with_random_teacher
from tests.support.tiny_model import make_tiny_model, random_rank_batch
from tests.unit.test_mini_batches import built

NONE = np.iinfo(np.int32).max
SHOWN = 2
"""Tokens that the teacher is shown before a sample."""


class Server(InferenceClient):
    """Names, at each place, the tokens after the one that is there."""

    limit = 99

    async def score_top(self, token_ids: Any, model: str, top_k: int, wanted: Any) -> Any:
        if top_k > self.limit:
            raise InferenceError("400 at most 2 prompt logprobs", 400)
        ids = np.asarray(token_ids, np.int32)[:, None] + np.arange(1, top_k + 1, dtype=np.int32)
        kept = np.where(np.asarray(wanted)[:, None], ids, NONE).astype(np.int32)
        scores = np.asarray(token_ids, np.float32) / -100
        return scores, TopTokens(kept, np.where(kept < NONE, -1, 0).astype(np.float32))


def taught(prefix: Any = None, in_loss: bool = True) -> tuple[list[RankBatch], Any]:
    """A group of two rollouts, from its end to a rank's arrays; and its scores."""

    async def run() -> tuple[list[Any], Group]:
        teacher = Teacher([Server("http://127.0.0.1:9")], "p", deadline_s=9, max_concurrent=2, prefix=prefix, top_k=3)
        slots: list[Any] = [make_episode([0, 0], reward=0.0), make_episode([0], reward=1.0)]
        group = Group(Prompt(0, 0, 0, 7), 0, 0, slots, num_ended=2)
        for i, episode in enumerate(slots):
            teacher.begin(group, i, episode)
        return await teacher.collect([group]), group

    references, group = asyncio.run(run())
    scorer = Scorer(AdvantageConfig(type="opd", reward_weight=0.5), max_tokens=9, in_loss=in_loss)
    scored = score_groups([group], scorer, zero="keep", references=references)
    samples = train_samples(scored)
    return build_ranks(samples, num_ranks=1, micro_batch_tokens=64, sampling=SamplingConfig()), scored


@pytest.mark.parametrize("prefix", [None, lambda source, task: [5] * SHOWN])
def test_a_trained_token_has_the_teachers_likeliest_and_no_other_has(prefix: Any) -> None:
    [rank], [scored] = taught(prefix)
    assert rank.teacher_ids is not None and rank.teacher_logprobs is not None
    trained = rank.target_mask()
    wanted = rank.token_ids[trained, None] + np.arange(1, 4)
    np.testing.assert_array_equal(rank.teacher_ids[trained], wanted)
    assert (rank.teacher_ids[~trained] == NONE).all() and not rank.teacher_logprobs[~trained].any()
    assert [list(row) for row in scored.tokens or []] != [] and len(scored.references) == 2  # for the metric


def test_the_rewards_alone_are_the_advantage_where_the_loss_has_the_teachers_word() -> None:
    [rank], _ = taught()
    assert sorted(set(rank.advantages[rank.loss_mask].tolist())) == [-0.25, 0.25]
    [told], _ = taught(in_loss=False)
    assert len(set(told.advantages[told.loss_mask].tolist())) == 3


def test_a_server_says_the_likeliest_and_the_prompts_own_token() -> None:
    rows: list[Any] = [
        None,
        {"4": {"logprob": -9.0, "rank": 60}, "7": {"logprob": -0.5}, "2": {"logprob": -1.0}},
        {"7": {"logprob": -0.1}, "1": {"logprob": -9999.5}},
        {"3": {"logprob": -0.1}},
    ]
    found = parse_top(rows, 2, [False, True, True, False])
    assert found.ids.tolist() == [[NONE, NONE], [7, 2], [7, 1], [NONE, NONE]]
    np.testing.assert_allclose(found.logprobs, np.array([[0, 0], [-0.5, -1], [-0.1, -9999], [0, 0]]), rtol=1e-6)
    assert parse_top(rows, 4, [False, False, False, True]).ids[3].tolist() == [3, NONE, NONE, NONE]


def test_a_server_of_ours_packs_them() -> None:
    ids, logprobs = np.array([[6, 7, 2], [7, 7, 1]], "<i4"), np.array([[-9, -0.5, -1], [-np.inf, -0.1, -np.inf]], "<f4")
    packed = {
        name: base64.b64encode(array.tobytes()).decode() for name, array in (("token_ids", ids), ("logprobs", logprobs))
    }
    scores, found = unpack_top(packed, [5, 6, 7], 2, [True, False, True])
    assert scores.tolist() == [0, -9, -9999] and found.ids.tolist() == [[NONE, NONE], [NONE, NONE], [7, 1]]
    np.testing.assert_allclose(found.logprobs, np.array([[0, 0], [0, 0], [-0.1, -9999]]), rtol=1e-6)
    for wrong, of, top_k in ((packed, [5, 6, 8], 2), (packed, [5, 6, 7], 3), ({"token_ids": ""}, [5, 6, 7], 2)):
        with pytest.raises(InferenceError, match="packed log-probabilities"):
            unpack_top(wrong, of, top_k, [True] * 3)


def test_a_server_with_a_lower_limit_is_named_before_anything_is_sampled() -> None:
    class Limited(Server):
        limit = 2

        async def wait_ready(self, deadline_s: float) -> None:
            return None

        async def model_lengths(self) -> dict[str, int | None]:
            return {"p": None}

    teacher = Teacher([Limited("http://127.0.0.1:9")], "p", deadline_s=9, max_concurrent=2, top_k=3)
    with pytest.raises(OrchestratorError, match=r"top_k = 3: http://127.0.0.1:9 .* --max-logprobs 3"):
        asyncio.run(teacher.check(10))


def test_a_batch_keeps_it_over_the_store_and_every_cut(tmp_path: Path) -> None:
    batch = with_random_teacher(random_rank_batch([[9, 4], [6]], seed=1, vocab_size=50), 50, top_k=5)
    batch.check()
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [batch], state={})
    read = read_rank_batch(paths.rollouts_step(1), 0)
    without = replace(batch, teacher_ids=None, teacher_logprobs=None)
    joined = select_micro_batches([(read, 1), (without, 0), (read, 0)], 4)
    joined.check()
    assert joined.teacher_ids is not None and batch.teacher_ids is not None and joined.teacher_logprobs is not None
    np.testing.assert_array_equal(
        joined.teacher_ids, np.concatenate([batch.teacher_ids[13:], np.full((13, 5), NONE), batch.teacher_ids[:13]])
    )
    micro = make_micro_batch(joined, 3)
    assert micro.num_targets == 0 and micro.teacher_logprobs is not None and micro.teacher_logprobs.shape == (0, 5)
    with pytest.raises(ValueError, match="teacher_logprobs: must be there, as teacher_ids is"):
        replace(batch, teacher_logprobs=None).check()


def loss_of(batch: RankBatch, distillation: dict[str, Any] | None, *, seed: int = 0) -> float:
    """The loss beside `reinforce`, of log-probabilities that each token and place decides."""
    total = 0.0
    for i in range(batch.num_micro_batches):
        micro = make_micro_batch(batch, i)
        assert micro.teacher_ids is not None
        ids = micro.teacher_ids.double()
        micro.listed_logprobs = torch.where(ids < 50, -4 - (ids % 7) / 5, -torch.inf).float()
        micro = micro if micro.trained is None else objective_part(micro)
        config = LossConfig.model_validate({"type": "reinforce", "distillation": distillation})
        logprobs = micro.behaviour_logprobs.clone()
        total += float(rl_loss(config, micro, logprobs, torch.ones(micro.num_targets))[0])
    return total


def test_the_loss_is_the_objective_and_the_divergence_however_samples_are_packed_and_beside_echo() -> None:
    batch = with_random_teacher(random_rank_batch([[9, 4], [6]], seed=1, vocab_size=50), 50, top_k=5)
    plain, one = loss_of(batch, None), loss_of(batch, {})
    assert one > plain and loss_of(batch, {"coef": 3.0}) - plain == pytest.approx(3 * (one - plain), rel=1e-5)
    single = replace(batch, micro_offsets=np.arange(4))
    assert loss_of(single, {}) == pytest.approx(one, rel=1e-6)
    heard = replace(batch, ce_weights=np.where(batch.loss_mask, 0, 0.5).astype(np.float32))
    assert loss_of(heard, {}) == pytest.approx(one, rel=1e-6)
    bare = make_micro_batch(replace(batch, teacher_ids=None, teacher_logprobs=None), 0)
    config = LossConfig.model_validate({"distillation": {}})
    with pytest.raises(ConfigError, match="nothing of a teacher's distribution"):
        rl_loss(config, bare, bare.behaviour_logprobs, torch.ones(bare.num_targets))


def test_a_rank_without_a_token_takes_part() -> None:
    micro = make_micro_batch(select_micro_batches([], 2), 0)
    logprobs = torch.zeros(0, requires_grad=True)
    loss, stats = rl_loss(LossConfig.model_validate({"distillation": {}}), micro, logprobs, torch.ones(0))
    loss.backward()
    assert float(loss.detach()) == 0 and {"teacher_divergence", "teacher_mass"} <= stats.sums.keys()


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_a_train_step_compares_where_the_token_is_predicted(tmp_path: Path, group: None, num_mini_batches: int) -> None:
    """Against transformers, sequence by sequence; the teacher is the policy at half its temperature."""
    top_k, source = 5, make_tiny_model(tmp_path)
    loss = {"type": "reinforce", "mismatch": {"warn": None}, "distillation": {"top_k": top_k}}
    trainer = {"loss": loss, "optim": {"lr": 1e-9}, "num_mini_batches": num_mini_batches}
    tree = {"model": {"name": str(source), "dtype": "float32"}, "trainer": trainer, "max_steps": 9}
    experiment = Experiment.model_validate(tree | {"orchestrator": {"teacher": TEACHER}})
    batch = random_rank_batch([[9, 14], [16]], seed=1)
    ids, values = np.full((batch.num_tokens, top_k), NONE, np.int32), np.zeros((batch.num_tokens, top_k), np.float32)
    wanted, hf, trained = [], AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), batch.target_mask()
    for first, stop in itertools.pairwise(batch.seq_offsets.tolist()):
        at = np.flatnonzero(trained[first:stop])
        with torch.no_grad():
            logits = hf(torch.from_numpy(batch.token_ids[None, first:stop]).long()).logits[0].double()[at - 1]
        p, q = (2 * logits).log_softmax(1), logits.log_softmax(1)
        found = p.topk(top_k, dim=1)
        ids[first + at], values[first + at] = found.indices.numpy(), found.values.numpy()
        wanted.append(divergence_of("forward_kl", 0.5, with_rest(p, found.indices), with_rest(q, found.indices)))
    whole: dict[str, Any] = {
        "temperatures": np.ones_like(batch.temperatures),
        "mini_batches": np.array([0, 0, 1], np.int32),
    }
    batch = replace(batch, teacher_ids=ids, teacher_logprobs=values, **whole)
    metrics = built(experiment).run(1, batch, objective_of(experiment))
    assert metrics["teacher_divergence"] == pytest.approx(float(torch.cat(wanted).mean()), rel=1e-4)


LOSS: dict[str, Any] = {"trainer": {"loss": {"distillation": {}}}}
TEACHER = {"base_url": "http://t:1/v1"}
ENV = [{"id": "reverse-text"}]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"orchestrator": {"env": ENV}}, "trainer.loss.distillation needs a teacher: set orchestrator.teacher"),
        ({"kind": "sft"}, "for RL with a teacher, this is sft"),
        ({"orchestrator": {"teacher": TEACHER, "sampling": {"temperature": 0.7}}}, "temperature must be 1, not 0.7"),
        ({"orchestrator": {"teacher": TEACHER, "sampling": {"top_p": 0.9}}}, "over the whole vocabulary"),
        (
            {"orchestrator": {"teacher": TEACHER, "env": [{"id": "reverse-text", "sampling": {"temperature": 0.5}}]}},
            "env.0.sampling: trainer.loss.distillation needs temperature 1",
        ),
        ({"orchestrator": {"teacher": TEACHER}, "model": {"vision": "frozen"}}, "with tokens alone, without images"),
        ({"orchestrator": {"advantage": {"type": "opsd"}, "teacher": TEACHER}}, "teacher is not used by .* opsd"),
    ],
)
def test_what_does_not_fit_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Experiment.model_validate(LOSS | tree)


@pytest.mark.parametrize("kind", ["grpo", "opsd"])
def test_more_tokens_than_there_are_are_refused_whoever_the_teacher_is(kind: str, tmp_path: Path) -> None:
    known = len(read_vocabulary(str(make_tiny_model(tmp_path))) or ())

    def problems(top_k: int) -> list[str]:
        tree = {"model": {"name": str(tmp_path)}, "trainer": {"loss": {"distillation": {"top_k": top_k}}}}
        teacher = {} if kind == "opsd" else {"teacher": TEACHER}
        exp = Experiment.model_validate(tree | {"orchestrator": {"advantage": {"type": kind}, **teacher}})
        return [problem.message for problem in _distillation(exp)]

    assert problems(known) == []
    assert problems(known + 1) == [f"{known + 1} tokens of a vocabulary of {known}: {known} at most"]


@pytest.mark.parametrize("kind", ["grpo", "opd", "opsd", "sft"])
def test_it_stands_beside_any_advantage_and_no_group_is_dropped(kind: str) -> None:
    orchestrator: dict[str, Any] = {"advantage": {"type": kind}, "env": ENV}
    tree = {"trainer": {"loss": {"distillation": {"top_k": 32}, **({"type": "nll"} if kind == "sft" else {})}}}
    orchestrator |= {} if kind == "opsd" else {"teacher": TEACHER}
    exp = Experiment.model_validate(tree | {"orchestrator": orchestrator})
    assert zero_groups(exp) == "keep"


def test_engines_that_the_run_starts_give_as_many_log_probabilities_as_are_asked_for() -> None:
    def options(top_k: int) -> list[str]:
        tree = {"trainer": {"loss": {"distillation": {"top_k": top_k}}}, "inference": {}}
        exp = Experiment.model_validate(tree | {"orchestrator": {"teacher": TEACHER}})
        return build_argv(exp, device="cpu", replica=0, port=7)

    found = options(64)
    assert found[found.index("--max-logprobs") + 1] == "64" and "--max-logprobs" not in options(20)


def test_what_the_next_attempt_takes_over_is_asked_for_again() -> None:
    from prime_hpc.orchestrator.rollouts.carried import CarriedGroup, decode_groups, encode_groups

    known = replace(make_sample([0, 0]), teacher_ids=np.zeros((5, 2), np.int32), teacher_logprobs=np.zeros((5, 2)))
    result = replace(make_episode([0]).result, samples=[known])
    [back], _ = decode_groups(encode_groups([CarriedGroup(Prompt(0, 0, 0, 7), [result])], {}))
    assert back.results[0].samples[0].teacher_ids is None
    np.testing.assert_array_equal(back.results[0].samples[0].token_ids, known.token_ids)
