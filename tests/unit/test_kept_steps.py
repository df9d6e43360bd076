"""The config with which steps are computed again, and that beside a refused one."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.cli.common import print_json
from prime_hpc.cli.verbs.run.replay import Replay, _progress, compare, run
from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.monitors import open_metrics
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.replay import replay
from prime_hpc.trainer.replay.dump_failed_step import _with_model, _write_beside
from prime_hpc.trainer.replay.replay import plain
from prime_hpc.trainer.train_step import StepRefused
from tests.unit.test_store_batches import make_rank


def test_steps_that_are_computed_again_are_sent_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--wandb.project", "p", "--mlflow.tracking-uri", "http://mlflow.invalid", "--tensorboard"]
    flags += ["--weights.transport", "nccl"]
    experiment = load_experiment(["--model.name", "org/base", *flags], "trainer", {}).experiment
    assert plain(experiment, 1).weights.transport == "files"  # nccl's sender ended it where there is no GPU
    asked: list[object] = []
    monkeypatch.setattr(MetricsWriter, "__init__", lambda self, path, *monitors: asked.extend(monitors))
    open_metrics(plain(experiment, 1), "trainer", tmp_path / "m.jsonl", tmp_path)
    assert asked == [None, None, None]


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        (["--trainer.loss.kl.coef", "0.1"], "org/base"),
        (["--trainer.loss.kl.coef", "0.1", "--trainer.loss.kl.model", "org/other"], "org/other"),
        ([], None),
    ],
)
def test_a_kept_version_is_the_policy_and_not_the_reference(flags: list[str], reference: str | None) -> None:
    experiment = load_experiment(["--model.name", "org/base", *flags], "trainer", {}).experiment
    kept = _with_model(experiment, "/run/failed/step_000003/weights/step_000002")
    assert kept.model.name.endswith("step_000002")
    kl = kept.trainer.loss.kl
    assert (kl.model if kl is not None else None) == reference
    assert kept.trainer.loss.kl is None or kept.trainer.loss.kl.coef == 0.1
    assert experiment.model.name == "org/base"


def test_a_kept_step_has_the_entropy_coefficient_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model.name", "org/base", "--trainer.loss.entropy.target", "0.5", "--max-steps", "9"]
    experiment = load_experiment(flags, "trainer", {}).experiment
    assert experiment.trainer.loss.entropy is not None

    def trainer(bonus: EntropyBonus) -> Any:
        policy = SimpleNamespace(adapters=None)
        state = {"entropy_bonus": bonus.state}
        step = SimpleNamespace(state=state, policy=policy, run=lambda *_, done: {"entropy_coef": bonus.coef + done})
        layout = SimpleNamespace(dims=SimpleNamespace(ranks_per_part=1))
        return SimpleNamespace(experiment=experiment, train_step=step, parallel=layout, part=(0, 1), rank=0)

    moved = EntropyBonus(experiment.trainer.loss.entropy)
    for _ in range(3):
        moved.observe(0.25)
    again, kept = EntropyBonus(experiment.trainer.loss.entropy), RunPaths(tmp_path / "kept")
    refused = StepRefused("a loss", 4, batch := make_rank([20, 20], [2]))
    refused.updates = 3
    _write_beside(trainer(moved), kept, refused, [batch])
    monkeypatch.setattr(replay, "opened", lambda *_: contextlib.nullcontext(trainer(again)))
    monkeypatch.setattr(replay, "sequence_lines", lambda *_: [])
    assert replay.kept_step(kept, tmp_path) and again.state.tolist() == moved.state.tolist()
    assert f"entropy_coef {moved.coef + 3:.4g}" in capsys.readouterr().out and moved.coef > 0


def test_a_kept_step_is_one_and_takes_no_steps(tmp_path: Path) -> None:
    kept = tmp_path / "failed" / "step_000001"
    kept.mkdir(parents=True)
    (kept / "run.yaml").touch()
    for flag in (["--json"], ["--steps", "1:2"], ["--timeout", "9"]):
        with pytest.raises(ConfigError, match=f"{flag[0]} is for the steps of a run"):
            run([str(kept), *flag], "replay")


def test_a_step_whose_record_was_torn_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    rows = [f'{{"step": {step}, "loss": 0.5}}\n' for step in (1, 2, 4)]
    (tmp_path / "metrics" / "trainer.jsonl").write_text('{"step": 3, "lo\n'.join(["".join(rows[:2]), rows[2]]))
    again = [{"step": step, "loss": 0.5} for step in (1, 2, 3, 4)]
    found = compare(Replay(tmp_path, 1, 4, 0, 1, None, None), again)
    assert (found["equal"], found["num_steps"], len(found["rows"])) == (True, 3, 3)
    assert not compare(Replay(tmp_path, 1, 4, 0, 1, None, None), again[:3])["equal"]


def test_a_step_whose_loss_is_nan_again_is_equal_and_told_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "trainer.jsonl").write_text('{"step": 1, "loss": "nan"}\n{"step": 2, "loss": "nan"}\n')
    again = [{"step": 1, "loss": "nan"}]
    found = compare(Replay(tmp_path, 1, 1, 0, 1, None, None), again)
    assert found["equal"] and found["max_loss_difference"] == 0.0
    print_json(compare(Replay(tmp_path, 1, 2, 0, 1, None, None), [*again, {"step": 2, "loss": 0.5}]))

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["max_loss_difference"] == "nan"


def test_progress_reads_what_is_new_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").mkdir()
    file, shown = tmp_path / "metrics" / "trainer.jsonl", _progress(tmp_path, quiet=False)
    next(shown)
    file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    next(shown)
    file.write_text("x" * 24 + '\n{"step": 2, "loss": "nan"}\n{"step": 3, "refused": "its norm"}\n')
    next(shown)
    assert capsys.readouterr().out == "  step 1: loss 0.5\n  step 2: loss nan\n  step 3: loss refused\n"
