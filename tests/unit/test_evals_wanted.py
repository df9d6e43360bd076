"""Runs that are asked again when their episodes are all on disk: nothing is played, and no engine is started for it."""

from pathlib import Path

import pytest

from prime_hpc.config import Experiment, load_experiment
from prime_hpc.evals.episodes import FAILED, EpisodeLog, Record
from prime_hpc.evals.wanted import FILE, CountedBefore, is_all_played, record_tasks, wanted_keys
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.store.attempts import Attempt
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor import main as supervisor_main
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs
from prime_hpc.supervisor.stop_requests import Controls
from tests.unit.test_env_nodes import SITE

SOURCES = [CountedBefore("reverse-text", 3), CountedBefore("calculator", None)]


def experiment(kind: str, *argv: str) -> Experiment:
    envs = ("--environment-ids", "reverse-text,calculator", "--inference.server.port", "0")
    argv = ("--model.name", "m", *envs, "--num-examples", "4", "--rollouts-per-example", "2", *argv)
    return load_experiment([*argv], kind, {}).experiment


def play(run_dir: Path, tree: Experiment, steps: tuple[int, ...] = (0,), *, failed: bool = False) -> None:
    """Leave what a run leaves that has played all, the last episode maybe in vain."""
    paths = RunPaths(run_dir)
    run_dir.mkdir(exist_ok=True)
    log = EpisodeLog(paths, claim_incarnation(paths))
    record_tasks(run_dir, SOURCES, tree.episodes)
    keys = [key for step in steps for key in wanted_keys(step, SOURCES, tree.episodes)]
    for key in keys:
        lost = failed and key == keys[-1]
        log.add(Record(*key, state=FAILED if lost else "completed", reward=None if lost else 1.0))
    log.close()


@pytest.mark.parametrize("kind", ["eval", "synthesize"])
def test_all_is_played_until_more_is_asked_for(tmp_path: Path, kind: str) -> None:
    tree = experiment(kind)
    assert not is_all_played(tree, tmp_path)
    play(tmp_path, tree)
    assert len(wanted_keys(0, SOURCES, tree.episodes)) == 2 * (3 + 4)
    for same in ((), ("--rollouts-per-example", "1"), ("--num-examples", "2"), ("--retry-failed",)):
        assert is_all_played(experiment(kind, *same), tmp_path), same
    for more in (("--rollouts-per-example", "3"), ("--num-examples", "5"), ("--environment-ids", "guess-number")):
        assert not is_all_played(experiment(kind, *more), tmp_path), more
    (tmp_path / "results" / FILE).write_text("[1")
    assert not is_all_played(tree, tmp_path)


def test_an_episode_that_failed_is_asked_for_again_where_that_is_wanted(tmp_path: Path) -> None:
    play(tmp_path, experiment("eval"), failed=True)
    assert is_all_played(experiment("eval"), tmp_path)
    assert not is_all_played(experiment("eval", "--retry-failed"), tmp_path)


def test_a_version_that_joins_has_all_to_play(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / "weights" / f"step_{step:06d}").mkdir(parents=True)
    argv = ("--weights-dir", str(tmp_path / "weights"), "--steps")
    play(tmp_path / "run", experiment("eval"), steps=(0, 1))
    assert is_all_played(experiment("eval", *argv, "1"), tmp_path / "run")
    assert not is_all_played(experiment("eval", *argv, "1,2"), tmp_path / "run")
    assert not is_all_played(experiment("eval", *argv, "1,3"), tmp_path / "run")  # there is none: the role says so


def test_no_engine_is_started_where_all_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(supervisor_main, "one_after_another", lambda specs: seen.append([s.name for s in specs]))
    monkeypatch.setattr(supervisor_main, "close_crashed_attempts", lambda *arguments: None)
    monkeypatch.setattr(supervisor_main, "begin_attempt", lambda *arguments, **more: Attempt(1, 1, 0.0, "first start"))
    tree, controls = experiment("eval", "--output-dir", str(tmp_path)), Controls(tmp_path, None, 60.0)
    for _ in range(2):
        supervisor_main._prepare(tree, tmp_path, {"CUDA_VISIBLE_DEVICES": ""}, None, controls, Patience(1.0))
        play(tmp_path, tree)
    assert seen == [["inference", "eval"], ["eval"]]


def test_nor_is_one_in_a_job_of_engines(tmp_path: Path) -> None:
    tree = experiment("eval", "--inference.data-parallel-size", "8", "--slurm.gpus-per-node", "4")
    placement, job = place_slurm(tree, SITE), Allocation("7", (("n0", "n1"),), "n0", 0)
    idle = tree.model_copy(update={"inference": None})
    found = [[s.name for s in slurm_specs(each, SITE, placement, job, tmp_path)] for each in (tree, idle)]
    assert found == [["inference", "inference", "eval"], ["eval"]]
