"""Scores of sampled tokens by a teacher: retried, bounded in time, never of other tokens; refused configs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from prime_hpc.client.inference import InferenceClient, InferenceError, parse_scores
from prime_hpc.config import Experiment
from prime_hpc.config.sections.orchestrator import AdvantageConfig
from prime_hpc.launch.checks import _teacher
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.prompts import Prompt
from prime_hpc.orchestrator.teacher import Teacher
from tests.support.episodes import make_episode


class Server(InferenceClient):
    """Answers from a list: an error to raise, or None for scores that are 1 below the token's id."""

    def __init__(self, answers: list[InferenceError | None]) -> None:
        super().__init__("http://127.0.0.1:9")
        self.answers, self.seen = answers, []

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


def test_what_the_teacher_is_shown_comes_first_and_is_not_scored() -> None:
    server = Server([])
    [[[scores]]], _ = collect(server, prefix=lambda source, task: [source, task])
    assert server.seen == [[0, 7, 100, 101, 102, 103, 104]]
    assert scores.tolist() == [0.0, 100.0, 101.0, 102.0, 103.0]


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


OPD = {"type": "opd"}
TEACHER = {"base_url": "http://t:1/v1"}


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

    def problems(teacher: str) -> list[str]:
        tree = {"model": {"name": own}, "orchestrator": {"advantage": OPD, "teacher": TEACHER | {"model": teacher}}}
        return [p.message for p in _teacher(Experiment.model_validate(tree))]

    assert problems(same) == [] and problems("owner/unknown-model") == []
    assert "2 tokens against 2, and 'b' is None there, 1 here" in problems(other)[0]
    assert "is not a directory" in problems(str(tmp_path / "absent"))[0]
