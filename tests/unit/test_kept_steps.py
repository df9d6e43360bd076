"""The config beside a refused step, with which it is computed again."""

import pytest

from prime_hpc.config import load_experiment
from prime_hpc.trainer.replay.dump_failed_step import _with_model


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
