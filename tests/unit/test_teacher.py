"""Scores of sampled tokens by a teacher: retried, bounded in time, never of other tokens; refused configs."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic import ValidationError

from prime_hpc.client.inference import InferenceClient, InferenceError, parse_scores
from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import engine_roles, served_by
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.inference.vllm.args import build_argv
from prime_hpc.launch.checks import _teacher
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.algorithms.teacher import Peers, Teacher
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.server_news import ServerNews
from prime_hpc.orchestrator.setup import make_teacher, server_urls, teacher_urls
from prime_hpc.runtime.role_context import RoleContext, role_environment
from tests.support.episodes import make_episode, make_result


class Server(InferenceClient):
    """Answers from a list: an error to raise, or None for scores that are 1 below the token's id."""

    def __init__(self, answers: list[InferenceError | None]) -> None:
        super().__init__("http://127.0.0.1:9")
        self.answers = answers
        self.seen: list[list[int]] = []

    async def score(self, token_ids: Any, model: str = "policy") -> np.ndarray:
        self.seen.append(np.asarray(token_ids).tolist())
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer
        return np.asarray(token_ids, np.float32) - 1


def collect(server: Server, *, deadline_s: float = 30.0, prefix: Any = None) -> Any:
    async def run() -> Any:
        teacher = Teacher([server], "policy", deadline_s=deadline_s, max_concurrent=2, prefix=prefix)
        episode = make_episode([0, 0])
        group = Group(Prompt(0, 0, 0, 7), 0, 0, [None, episode], num_ended=2)
        teacher.begin(group, 1, episode)
        try:
            return await teacher.collect([group]), teacher.num_retries
        finally:
            await teacher.close()

    return asyncio.run(run())


def test_a_failing_server_is_asked_again_and_a_refusal_is_final() -> None:
    server = Server([InferenceError("busy", 503), InferenceError("no answer")])
    [[[scores]]], retries = collect(server)
    assert retries == 2 and scores.tolist() == [0.0, 100.0, 101.0, 102.0, 103.0]
    with pytest.raises(OrchestratorError, match="no log-probabilities of a sequence of 5 tokens: too long"):
        collect(Server([InferenceError("too long", 400)]))
    with pytest.raises(OrchestratorError, match="within 0.1 s, 1 tries: down"):
        collect(Server([InferenceError("down", 503)] * 9), deadline_s=0.1)


def test_a_rollout_that_cannot_be_scored_is_one_that_failed() -> None:
    async def run() -> None:
        teacher = Teacher([Server([InferenceError("too long", 400)])], "policy", deadline_s=9, max_concurrent=1)
        slots: list[Any] = [make_episode([0, 0]), make_episode([0], reward=1.0)]
        group = Group(Prompt(0, 0, 0, 7), 0, 0, slots, num_ended=2)
        for i, episode in enumerate(slots):
            assert teacher.begin(group, i, episode) is episode
        [[[scores]]] = await teacher.collect([group])
        assert scores.tolist() == [0.0, 100.0, 101.0, 102.0]
        assert not slots[0].usable and "sequence of 5 tokens: too long" in slots[0].reason
        assert group.usable == slots[1:]

    asyncio.run(run())


def test_room_for_the_demonstration_is_looked_at_before_anything_is_sampled() -> None:
    class Limited(Server):
        async def model_lengths(self) -> dict[str, int | None]:
            return {"policy": 8}

    def shown(source: int, task: int) -> list[int]:
        return [1] * (2 + task % 3)

    async def run(longest: int, prefix: Any) -> tuple[Teacher, Limited]:
        server = Limited([])
        teacher = Teacher([server], "policy", deadline_s=9, max_concurrent=1, prefix=prefix)
        await teacher.check_room(longest, [5, None])
        return teacher, server

    async def long_rollout() -> None:
        teacher, server = await run(100, shown)  # a warning: short ones can be scored
        episode = make_episode([0, 0, 0])
        group = Group(Prompt(0, 0, 0, 2), 0, 0, [episode], num_ended=1)
        assert "takes 8 tokens, not the 11 of a score" in teacher.begin(group, 0, episode).reason
        assert not server.seen

    asyncio.run(long_rollout())
    with pytest.raises(OrchestratorError, match="takes 20: set inference.max_model_len"):
        asyncio.run(run(10, lambda source, task: [1] * 9))


def test_what_the_teacher_is_shown_comes_first_and_is_not_scored() -> None:
    server = Server([])
    [[[scores]]], _ = collect(server, prefix=lambda source, task: [source, task])
    assert server.seen == [[0, 7, 100, 101, 102, 103, 104]]
    assert scores.tolist() == [0.0, 100.0, 101.0, 102.0, 103.0]


def test_a_rollout_is_scored_after_the_first_other_one_that_succeeded() -> None:
    """Rewards 1, 0, 1, of which the third's text leaves no room for a long rollout; another group has no success."""
    leads = {"": [], "a": [7], "c": [8] * 90}

    def group_of(*rows: tuple[str, float, int], number: int) -> Group:
        results = [replace(make_result([0] * n, reward=r), completion_text=text) for text, r, n in rows]
        return Group(Prompt(number, 0, 0, 7), 0, 0, [to_episode(each, 1000) for each in results], num_ended=len(rows))

    async def run(peers: Peers) -> None:
        class Limited(Server):
            async def model_lengths(self) -> dict[str, int | None]:
                return {"policy": 95}

        server = Limited([])
        teacher = Teacher([server], "policy", deadline_s=9, max_concurrent=1, peers=peers)
        assert not teacher.is_other
        await teacher.check_room(90, [5, None])
        group = group_of(("a", 1.0, 2), ("b", 0.0, 3), ("c", 0.1 + 0.9, 1), number=0)
        failed = group_of(("a", 0.0, 2), ("b", 0.5, 2), number=1)
        for each in (group, failed):
            for i, episode in enumerate(each.usable):
                assert teacher.begin(each, i, episode) is episode
            assert not server.seen
            teacher.begin_complete(each)
        first, second = await teacher.collect([group, failed])
        # the first sees the third, for whose text there is no room; the others see the first
        assert [seen[0] for seen in server.seen] == [7, 7]
        assert server.seen[0][1:] == group.usable[1].result.samples[0].token_ids.tolist()
        own = [sample.logprobs for episode in group.usable for sample in episode.result.samples]
        assert first[0][0].tolist() == own[0].tolist()  # the policy's own: no gap
        assert first[1][0].tolist() == [0.0, *(token - 1.0 for token in server.seen[0][2:])]
        assert all(scores[0] is e.result.samples[0].logprobs for scores, e in zip(second, failed.usable, strict=True))
        assert [teacher.drain_metrics()["teacher/shown"] for _ in range(2)] == [2 / 5, 0]
        scores = Scorer(AdvantageConfig(type="sdpo", max_gap=200.0), max_tokens=9)
        assert not scores.score(failed.usable, references=second).has_signal
        found = scores.score(group.usable, references=first).tokens
        assert found is not None and not found[0][0].any() and found[1][0][3:].min() > 90

    asyncio.run(run(Peers(leads.__getitem__, 1.0)))
    leads.clear()
    with pytest.raises(KeyError):  # a chat template without system messages ends the run before anything is sampled
        asyncio.run(run(Peers(leads.__getitem__, 1.0)))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (None, "none came"),
        ([None], "1 came"),
        ([None, {"9": {"logprob": -1.0}}], "nothing of token 6 at position 1"),
        ([None, None], "nothing of token 6"),
        ([None, {"6": {"logprob": float("nan")}}], "not finite"),
    ],
)
def test_scores_of_other_tokens_are_refused(rows: Any, problem: str) -> None:
    with pytest.raises(InferenceError, match=problem):
        parse_scores(rows, [5, 6])


def test_a_score_that_is_not_finite_leaves_the_group_out_and_is_named() -> None:
    episodes = [make_episode([0], reward=r) for r in (0.0, 1.0)]
    references = [[np.full(4, np.nan, np.float32)] for _ in episodes]
    scores = Scorer(AdvantageConfig(type="opd"), max_tokens=9).score(episodes, references=references)
    assert not scores.kept.any() and "tokens some that are not finite" in scores.problem


def test_a_teacher_is_asked_with_tokens_alone_and_images_are_refused() -> None:
    orchestrator = {"env": [{"id": "shapes"}], "advantage": {"type": "opd"}, "teacher": {"base_url": "http://t:1/v1"}}
    exp = Experiment.model_validate({"orchestrator": orchestrator, "model": {"vision": "frozen"}})
    nobody: Any = None
    with pytest.raises(OrchestratorError, match="opd asks its teacher with tokens alone"):
        make_teacher(exp, nobody, [], nobody, "policy")


OPD = {"type": "opd"}
TEACHER = {"base_url": "http://t:1/v1"}
STARTED: dict[str, Any] = {"teacher_inference": {}}


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"orchestrator": {"advantage": OPD}}, "opd needs a teacher: set orchestrator.teacher.base_url"),
        ({"orchestrator": {"advantage": {"type": "sft"}}}, "sft needs a teacher"),
        ({"orchestrator": {"teacher": TEACHER}}, "teacher is not used by orchestrator.advantage.type = grpo"),
        ({"orchestrator": {"teacher": {"base_url": []}}}, "names no server"),
        (
            {"orchestrator": {"advantage": OPD, "teacher": TEACHER, "sampling": {"temperature": 0.7}}},
            "temperature must be 1, not 0.7",
        ),
        ({"orchestrator": {"advantage": {"type": "sft"}, "teacher": TEACHER}}, "set trainer.loss.type = nll"),
        (
            {
                "orchestrator": {"advantage": {"type": "sft"}, "teacher": TEACHER},
                "trainer": {"loss": {"type": "nll"}},
                "inference": {},
            },
            "leave inference out",
        ),
        ({"orchestrator": {"advantage": OPD, "teacher": {"model": "o/t"}}}, "base_url names no server"),
        ({**STARTED, "orchestrator": {"advantage": OPD, "teacher": TEACHER | {"model": "o/t"}}}, "leave one of them"),
        ({**STARTED, "orchestrator": {"advantage": OPD}}, "serves orchestrator.teacher.model, which is not stated"),
        ({**STARTED, "orchestrator": {"teacher": {"model": "o/t"}}}, "not used by orchestrator.advantage.type = grpo"),
        ({**STARTED, "orchestrator": {"advantage": {"type": "opsd"}}}, "not used by .* opsd"),
        ({**STARTED, "kind": "sft"}, "this is sft: leave it out"),
        (
            {
                "teacher_inference": {"max_model_len": 64},
                "seq_len": 64,
                "orchestrator": {"advantage": OPD, "teacher": {"model": "o/t"}},
            },
            r"max_model_len \(64\) is too short.*at least 65",
        ),
        (
            {
                **STARTED,
                "orchestrator": {"advantage": OPD, "teacher": {"model": "o/t"}},
                "trainer": {"max_concurrent_runs": 2},
                "model": {"lora": {}},
            },
            "cannot be shared by the runs",
        ),
        ({"orchestrator": {"advantage": {"demonstration_text": "x"}}}, "must hold {demonstration}"),
        ({"trainer": {"loss": {"type": "nll", "correction": {}}}}, "no importance ratio"),
    ],
)
def test_what_cannot_distil_is_refused(tree: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=problem):
        Experiment.model_validate(tree)


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return str(folder)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "own", {"a": 0, "b": 1})
    same = write_tokenizer(tmp_path / "same", {"b": 1, "a": 0})
    other = write_tokenizer(tmp_path / "other", {"a": 0, "c": 1})

    def problems(teacher: str, **how: str) -> list[str]:
        asked = {**TEACHER, "model": teacher, **how}
        tree = {"model": {"name": own}, "orchestrator": {"advantage": OPD, "teacher": asked}}
        return [p.message for p in _teacher(Experiment.model_validate(tree))]

    assert problems(same) == [] and problems("owner/unknown-model") == []
    assert "2 tokens against 2, and 'b' is None there, 1 here" in problems(other)[0]
    assert problems(other, tokenizer="own") == [] and problems("owner/unknown-model", tokenizer="own") == []
    (tmp_path / "other" / "tokenizer.json").unlink()
    assert "holds no tokenizer to read with" in problems(other, tokenizer="own")[0]
    assert "is not a directory" in problems(str(tmp_path / "absent"))[0]


@pytest.mark.parametrize("who", ["own", "teacher"])
def test_a_tokenizer_that_is_torn_is_named_and_one_of_another_kind_is_let_pass(tmp_path: Path, who: str) -> None:
    names = {name: write_tokenizer(tmp_path / name, {"a": 0}) for name in ("own", "teacher")}
    orchestrator = {"advantage": OPD, "teacher": TEACHER | {"model": names["teacher"]}}
    one = Experiment.model_validate({"model": {"name": names["own"]}, "orchestrator": orchestrator})
    path = tmp_path / who / "tokenizer.json"
    for text in ("[]", '{"model": null}', '{"model": {"vocab": [["a", -1.5]]}}'):
        path.write_text(text)
        assert _teacher(one) == []
    path.write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 3}]}')
    assert _teacher(one) == []
    path.write_text('{"model": {"vo')
    (problem,) = _teacher(one)
    assert f"{path} is no tokenizer" in problem.message
    assert problem.key == {"own": "model.name", "teacher": "orchestrator.teacher.model"}[who]


def started(own: str, teacher: str, **values: Any) -> Experiment:
    tree = {
        "model": {"name": own, "lora": {}},
        "orchestrator": {"advantage": OPD, "teacher": {"model": teacher}},
        "inference": {"api_key": "policys"},
        "teacher_inference": {"data_parallel_size": 2},
        "teacher_gpu_ids": [3, 4],
        "slurm": {"teacher": {"partition": "big"}},
        "seq_len": 64,
    }
    return Experiment.model_validate(tree | values)


def test_a_started_teacher_sees_its_own_model_servers_and_nodes_where_the_policys_are() -> None:
    exp = started("o/policy", "o/teacher")
    view = served_by(exp, "teacher")
    options = build_argv(view, device="cpu", replica=0, port=7)
    stated = dict(pairwise(options))
    assert (stated["--model"], stated["--max-model-len"], stated["--data-parallel-size"]) == ("o/teacher", "65", "2")
    assert view.inference is not None and revealed(view.inference.api_key) == "policys"
    assert "--enable-lora" not in options
    assert (view.inference_gpu_ids, view.slurm.inference.partition) == ([3, 4], "big")
    assert served_by(exp, "inference") is exp and engine_roles(exp) == ["inference", "teacher"]
    own = served_by(
        started("o/p", "o/t", teacher_inference={"api_key": "own", "data_parallel_size": 2}), "teacher"
    ).inference
    assert own is not None and own.api_key is not None and own.api_key.reveal() == "own"


def test_the_orchestrator_finds_a_started_teacher_by_the_supervisors_word(tmp_path: Path) -> None:
    exp = started("o/policy", "o/teacher")
    environ = role_environment(
        bus_address="",
        attempt=1,
        incarnation=1,
        resume_step=None,
        urls={"inference": ["http://p/v1"], "teacher": ["http://a/v1", "http://b/v1"]},
    )
    context = RoleContext.from_env("orchestrator", tmp_path, environ=environ)
    assert teacher_urls(exp, context) == ["http://a/v1", "http://b/v1"]
    assert server_urls(exp, context) == ["http://p/v1"]
    imitated = started("o/p", "o/t", inference=None, trainer={"loss": {"type": "nll"}}).model_copy(
        update={"orchestrator": exp.orchestrator.model_copy(update={"advantage": AdvantageConfig(type="sft")})}
    )
    assert server_urls(imitated, context) == ["http://a/v1", "http://b/v1"]
    with pytest.raises(OrchestratorError, match=r"by hand takes its urls from orchestrator.teacher.base_url"):
        teacher_urls(exp, RoleContext.from_env("orchestrator", tmp_path, environ={}))


def test_a_started_teacher_must_be_whole_and_hold_a_sample_and_one_token(tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "own", {"a": 0})
    teacher = write_tokenizer(tmp_path / "teacher", {"a": 0})

    def problems() -> list[tuple[str | None, str]]:
        return [(p.key, p.message) for p in _teacher(started(own, teacher))]

    [(key, message)] = problems()
    assert key == "orchestrator.teacher.model" and "no weights" in message
    (tmp_path / "teacher" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert problems() == []
    (tmp_path / "teacher" / "config.json").write_text('{"max_position_embeddings": 64}')
    [(key, message)] = problems()
    assert key == "seq_len" and "65 tokens are beyond the teacher's max_position_embeddings = 64" in message


def test_a_teachers_server_that_moves_is_asked_at_its_new_address_and_no_policys_with_it() -> None:
    server, policys = Server([]), Server([])
    teacher = Teacher([server], "policy", deadline_s=1.0, max_concurrent=1)
    parts = SimpleNamespace(teacher=teacher, clients=[policys], train_pool=None, eval_pool=None)
    table, anything = ServerTable(["http://p/v1"], 0.0), Mock()
    shared: Any = parts
    news = ServerNews(started("o/policy", "o/teacher"), shared, table, anything, anything, anything)
    news.act({"role": "teacher", "index": 0, "state": "lost", "url": "http://p/v1"})
    news.act({"role": "teacher", "index": 0, "state": "starting", "url": "http://there:5/v1"})
    assert (server.base_url, policys.base_url) == ("http://there:5", "http://127.0.0.1:9")
    news.act({"role": "inference", "index": 0, "state": "starting", "url": "http://here:6/v1"})
    assert (server.base_url, policys.base_url) == ("http://there:5", "http://here:6")
