"""What one environment does otherwise than the others: sampling, algorithm, group size; how often and how much."""

import asyncio
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.orchestrator import EvalConfig
from prime_hpc.envs.samples import EpisodeResult
from prime_hpc.orchestrator.algorithms.sources import load_scorers, make_scorers, scorers_state
from prime_hpc.orchestrator.batching.batch_builder import build_ranks, score_groups, train_samples
from prime_hpc.orchestrator.evaluation import Evaluator
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher, Job, Lane
from prime_hpc.orchestrator.rollouts.groups import Group, GroupBook
from prime_hpc.orchestrator.rollouts.prompts import Prompt, SourceInfo
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.sft_eval_loop import due_sources, due_versions
from tests.support.episodes import make_episode, make_result


def experiment(*envs: dict[str, Any], **orchestrator: Any) -> Experiment:
    section = {"batch_size": 8, "rollouts_per_example": 4, "env": list(envs), **orchestrator}
    return Experiment.model_validate({"orchestrator": section})


OWN = {
    "id": "b",
    "rollouts_per_example": 2,
    "algorithm": "rae",
    "sampling": {"temperature": 0.7, "top_k": 5},
}


def test_what_is_not_stated_is_everybody_s() -> None:
    o = experiment({"id": "a"}, OWN, sampling={"max_tokens": 99, "top_p": 0.9}).orchestrator
    first, second = o.policy_samplings
    assert first == o.sampling
    assert (second.temperature, second.top_k, second.top_p, second.max_tokens) == (0.7, 5, 0.9, 99)
    assert (o.group_size(0), o.group_size(1)) == (4, 2)
    assert (o.advantage_of(0).type, o.advantage_of(1).type) == ("grpo", "rae")
    again = Experiment.model_validate(experiment({"id": "a"}, OWN).model_dump(mode="json"))
    assert again.orchestrator.policy_samplings[1].temperature == 0.7, "a run's own copy says the same"


@pytest.mark.parametrize(
    ("envs", "section", "words"),
    [
        ([{"id": "a", "rollouts_per_example": 1}], {}, "orchestrator.env.0: grpo compares rollouts of one prompt"),
        ([{"id": "a", "algorithm": "gpro"}], {}, "algorithm"),
        ([{"id": "a", "algorithm": "opd"}], {}, "orchestrator.env.0.algorithm = opd"),
        ([{"id": "a", "sampling": {"max_tokens": 4096}}], {}, "orchestrator.env.0.sampling.max_tokens \\(4096\\)"),
        ([{"id": "a", "sampling": {"extra": {"seed": 3}}}], {}, "orchestrator.env.0.sampling.extra.seed"),
        ([{"id": "a", "interval": 3}], {}, "interval"),
        (
            [{"id": "a"}],
            {"eval": {"env": [{"id": "a", "sampling": {"max_tokens": 4096}}]}},
            "orchestrator.eval.env.0.samp",
        ),
        ([{"id": "a"}], {"eval": {"env": [{"id": "a", "interval": 0}]}}, "interval"),
        ([{"id": "a"}], {"eval": {"prefer": "both"}}, "prefer"),
    ],
)
def test_errors_name_the_environment_and_the_key(envs: list[Any], section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment(*envs, **section)


def test_groups_of_their_own_size_are_scored_by_their_own_algorithm() -> None:
    o = experiment({"id": "a"}, OWN).orchestrator
    scorers = make_scorers(o)
    book = GroupBook(
        num_prompts=2,
        async_level=2,
        last_batch=9,
        sizes=[o.group_size(0), o.group_size(1)],
        minima=[scorer.min_group for scorer in scorers],
    )
    groups: list[Group] = []
    for position, source in enumerate((0, 1)):
        group = book.open(Prompt(position, source, 0, 0), 0)
        groups.append(group)
        for index in range(len(group.slots)):
            book.add(group, index, make_episode([0], reward=float(index == 0)))
    assert [len(group.slots) for group in book.complete] == [4, 2] and book.batch_ready()
    scored = score_groups(groups, scorers, zero="keep", env_names=["a", "b"])
    assert scored[0].advantages.sum() == pytest.approx(0.0, abs=1e-6)
    assert scored[1].advantages[0] > 0.9, "a moving average begins at 0 and not at the group's mean"
    (rank,) = build_ranks(train_samples(scored), num_ranks=1, micro_batch_tokens=64, sampling=o.policy_samplings)
    by_env = dict(zip(rank.env_ids.tolist(), rank.temperatures.tolist(), strict=True))
    assert by_env == {0: 1.0, 1: pytest.approx(0.7)}
    assert rank.top_ks is not None and set(rank.top_ks[rank.env_ids == 0].tolist()) == {0}
    assert set(rank.top_ks[rank.env_ids == 1].tolist()) == {5}
    state = scorers_state(scorers)
    fresh = make_scorers(o)
    load_scorers(fresh, state)
    assert state and scorers_state(fresh) == state


@pytest.mark.parametrize("name", ["others", "algorithm", "other_algorithms"])
def test_what_an_algorithm_remembers_of_an_environment_may_have_any_name(name: str) -> None:
    o = experiment({"id": "a", "name": name}, OWN | {"algorithm": "rloo"}, advantage={"type": "rae"}).orchestrator
    scorers = make_scorers(o)
    scorers[0].score([make_episode([0], reward=1.0)], env=name)
    fresh = make_scorers(o)
    load_scorers(fresh, {"step": 3} | scorers_state(scorers))
    assert scorers[0].state_dict()[name] and fresh[0].state_dict() == scorers[0].state_dict()


class Runner:
    """Every episode ends at once, or when `go` is set."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.go = asyncio.Event()

    async def run_episode(self, source_index: int, task_index: int, url_index: int) -> EpisodeResult:
        self.started.append((source_index, task_index))
        await self.go.wait()
        return make_result(reward=1.0)


def ready_table() -> ServerTable:
    table = ServerTable(["http://s"], now=0.0)
    table.mark_ready(0, 0)
    return table


def test_each_evaluated_environment_has_its_own_interval_and_number() -> None:
    config = EvalConfig.model_validate(
        {
            "interval": 4,
            "num_examples": 3,
            "env": [{"id": "a"}, {"id": "b", "interval": 6, "num_examples": 1, "rollouts_per_example": 2}],
        }
    )

    async def scenario() -> list[tuple[int, dict[str, float]]]:
        reports: list[tuple[int, dict[str, float]]] = []
        runner = Runner()
        runner.go.set()
        dispatcher = Dispatcher(ready_table(), 4, refill=lambda: False, on_server_error=lambda index: None)
        evaluator = Evaluator(
            config,
            runner,
            [SourceInfo("a", 1.0, None), SourceInfo("b", 1.0, None)],
            dispatcher,
            start_version=0,
            last_version=9,
            on_report=lambda v, row, samples: reports.append(
                (v, {k.split("/")[1]: n for k, n in row.items() if k.endswith("num_episodes")})
            ),
        )
        for version in range(10):
            evaluator.served(version)
            while evaluator._run is not None:
                await asyncio.sleep(0)
        assert not evaluator.pending
        return reports

    assert asyncio.run(scenario()) == [
        (0, {"a": 3, "b": 2}),
        (4, {"a": 3}),
        (6, {"b": 2}),
        (8, {"a": 3}),
        (9, {"a": 3, "b": 2}),
    ]
    assert due_versions([4, 6], 9, 0, [], set()) == [0, 4, 6, 8, 9]
    assert [due_sources([4, 6], version, 9) for version in (0, 4, 6, 9)] == [[0, 1], [0], [1], [0, 1]]


@pytest.mark.parametrize(("prefer", "num_evaluated"), [("eval", 32), ("train", 2)])
def test_whose_episodes_start_first(prefer: str, num_evaluated: int) -> None:
    """32 places, 64 held-out tasks, and rollouts without end: `train` leaves the evaluation a sixteenth of them."""

    async def scenario() -> None:
        evaluated, trained = Runner(), Runner()
        waiting = [Job(trained, 0, number, Lane(), lambda result: None) for number in range(200)]
        reports: list[int] = []

        def refill() -> bool:
            if waiting:
                dispatcher.add(waiting.pop())
            return bool(waiting)

        dispatcher = Dispatcher(ready_table(), 32, refill=refill, on_server_error=lambda index: None)
        evaluator = Evaluator(
            EvalConfig.model_validate({"num_examples": 64, "prefer": prefer}),
            evaluated,
            [SourceInfo("a", 1.0, None)],
            dispatcher,
            start_version=0,
            last_version=1,
            on_report=lambda version, row, samples: reports.append(version),
        )
        evaluator.served(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (len(evaluated.started), len(trained.started)) == (num_evaluated, 32 - num_evaluated)
        waiting.clear()  # no rollout is wanted any more: the rest runs on
        evaluated.go.set()
        trained.go.set()
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(evaluated.started) == 64 and reports == [0]
        await dispatcher.close()

    asyncio.run(scenario())
