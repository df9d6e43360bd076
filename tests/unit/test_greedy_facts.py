"""What plan, lint and simulate know before a run of greedy rollouts and of passes that look at a batch: also of an
algorithm of the user's own, whose source is read and not run."""

from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.named_code import says_so
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.estimate.forward_passes import looked_at_for
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.plan import words
from prime_hpc.orchestrator.metrics import StepStats
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from prime_hpc.simulate.calibration import differences
from prime_hpc.simulate.predict import caveats
from prime_hpc.simulate.setting import setting_of
from tests.support.episodes import make_result
from tests.support.measured_runs import calibrated, make_measured, tree_of

SOURCE = """
raise RuntimeError("the source is read, and not run")
class Base:
    greedy: bool = True
class Own(Base):
    pass
class Not(Base):
    greedy = False
class Late:
    pass
Late.greedy = True
def function(group):
    return group.rewards
def other(group):
    return group.rewards
function.greedy = True
undone = function
undone.greedy = 1
undone.greedy = 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module that nobody has imported."""
    (tmp_path / "package_of_own").mkdir()
    (tmp_path / "package_of_own" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "package_of_own" / "algorithms.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "package_of_own.algorithms"


def experiment(folder: Path, *types: str, **changes: Any) -> Experiment:
    """Of an environment each algorithm."""
    envs = [{"id": "reverse-text", "name": f"env-{i}", "algorithm": own} for i, own in enumerate(types)]
    return Experiment.model_validate(tree_of("x", folder, orchestrator__env=envs, **changes))


def test_own_code_says_by_its_source_that_it_is_greedy(own: str) -> None:
    told = {n: says_so(f"{own}:{n}", "greedy") for n in ("Base", "Own", "Not", "Late", "function", "other", "undone")}
    assert [name for name, is_so in told.items() if is_so] == ["Base", "Own", "Late", "function"]
    for nothing in (f"{own}:absent", "no_such_module:f", f"{own}.deeper:f", "package_of_own:f", "sys:path"):
        assert not says_so(nothing, "greedy")


def test_a_module_that_is_loaded_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.unit.test_greedy_facts as here

    assert not says_so(f"{here.__name__}:experiment", "greedy")
    monkeypatch.setattr(here.experiment, "greedy", True, raising=False)
    assert says_so(f"{here.__name__}:experiment", "greedy")


def test_an_own_algorithm_with_a_greedy_rollout_is_counted_as_remax_is(own: str, tmp_path: Path) -> None:
    for name in ("remax", f"{own}:Own"):
        every, plain = experiment(tmp_path, name), experiment(tmp_path, f"{own}:other")
        assert every.episodes_per_step == 32 + 8 and plain.episodes_per_step == 32
        assert setting_of(every).greedy and not setting_of(plain).greedy
        assert "8 prompts x 4 rollouts and a greedy one a step" in words.orchestrator_line(every)
        assert "8 prompts x 4 rollouts a step" in words.orchestrator_line(plain)
        one = experiment(tmp_path, name, orchestrator__rollouts_per_example=1, orchestrator__max_concurrent=65)
        found = [f.message for f in lint(one, GENERIC) if f.code in ("PH201", "PH203")]
        assert len(found) == 0, found
        some = experiment(tmp_path, name, "grpo")
        assert "4 rollouts and a greedy one (of env-0) a step" in words.orchestrator_line(some)
        run = make_measured(tmp_path / name.rpartition(":")[2])
        assert any("some have greedy rollouts" in caveat for caveat in caveats(some, calibrated(run), "other-node"))
        gated = experiment(tmp_path, name, orchestrator__curriculum={"gates": [{"type": "advantage_range"}]})
        (finding,) = [f for f in lint(gated, GENERIC) if f.code == "PH208"]
        assert f"{name} has a signal where the greedy rollout's reward is another" in finding.message


def test_a_pass_that_looks_at_each_batch_is_told_and_makes_another_calibration(tmp_path: Path) -> None:
    def looked(**trainer: Any) -> list[str]:
        return looked_at_for(experiment(tmp_path, "grpo", **{f"trainer__{key}": v for key, v in trainer.items()}))

    correction: dict[str, Any] = {"correction": {}}
    assert looked() == looked(loss=correction) == []
    assert looked(loss=correction, num_mini_batches=2) == ["trainer.loss.correction"]
    assert looked(loss={"second_moment": 0.04}) == ["trainer.loss.second_moment"]
    normalized = {"correction": {"batch_normalize": True}, "top_entropy_quantile": 0.2}
    keys = ["trainer.loss.top_entropy_quantile", "trainer.loss.correction.batch_normalize"]
    assert looked(loss=normalized) == keys
    other = experiment(tmp_path, "grpo", trainer__loss=normalized)
    assert words.looks(other) == f"; one more forward pass over each batch, for {' and '.join(keys)}"
    found = differences(calibrated(make_measured(tmp_path / "run")).runs[0], other)
    assert "forward passes before a batch's first update 0, here 1" in found


def test_the_engines_rates_count_greedy_rollouts_which_stand_by_themselves() -> None:
    stats = StepStats(0.0)
    for is_greedy in (False, True):
        stats.add_episode(to_episode(make_result([1, 1, 1]), 100), is_greedy=is_greedy)
    row = stats.drain(2.0)
    assert row["tokens/sampled"] == row["tokens/greedy"] == 3 and row["tokens/sampled_per_second"] == 3.0
    assert row["episodes/usable"] == row["episodes/greedy"] == 1 and row["episodes/per_second"] == 1.0
