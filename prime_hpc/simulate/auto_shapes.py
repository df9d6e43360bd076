"""`slurm.shapes: auto`: shapes that an experiment's job could have, derived from the one that is stated.

Other splits of as many devices between trainer and engines, and the stated split on half and on twice as many; of these
the ones that can be placed, and in which lint finds no error (the partition's nodes and GPUs, a GPU's memory).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prime_hpc.config import ConfigError, Experiment, Loaded, load_experiment
from prime_hpc.config.site import load_site
from prime_hpc.launch.lint.lint import lint
from prime_hpc.simulate.setting import Setting, other_shapes, reshaped, setting_of

AUTO = "auto"
_MEMORY = ("PH105", "PH106")
"""Findings about a GPU's memory, errors or not: a shape that is derived has to fit."""


@dataclass(frozen=True)
class Derived:
    """Shapes of an experiment that stated `auto`."""

    words: list[str]
    """The command line with the shapes in it."""
    loaded: Loaded
    left_out: list[str]
    """Shapes that cannot be, each with the reason."""


def derive_shapes(words: Sequence[str], loaded: Loaded) -> Derived:
    """Put derived shapes in the place of `auto`; an experiment that states shapes, or none, stays as it is.
    Raises ConfigError: shapes are derived for `kind: rl` with engines of its own alone, and this is another run; or a
    shape is chosen already."""
    experiment = loaded.experiment
    if experiment.slurm.shapes != AUTO:
        return Derived(list(words), loaded, [])
    if experiment.slurm.shape is not None:
        raise ConfigError(f"it is {experiment.slurm.shape}, and slurm.shapes = auto derives others", "slurm.shape")
    try:
        setting = setting_of(experiment)
    except ConfigError as error:
        raise ConfigError(f"auto derives no shapes here: {error}", "slurm.shapes") from error
    if not setting.gpus_per_engine:
        raise ConfigError("auto derives no shapes here: the engines are not the run's own", "slurm.shapes")
    rows: list[dict[str, Any]] = []
    left_out = []
    for shape in _tried(setting):
        name = f"t{shape['trainer']}-i{shape['inference']}"
        try:
            other = reshaped(experiment, shape)
            overrides = _overrides(other)
            stated = [*words, "--slurm.shapes", json.dumps([{"name": name, "overrides": overrides}])]
            why = _why_not(load_experiment([*stated, "--slurm.shape", name], "submit").experiment)
        except ConfigError as error:
            why = "; ".join(problem.message for problem in error.problems)
        if why:
            left_out.append(f"{name}: {why}")
        else:
            rows.append({"name": name, "overrides": overrides})
    if not rows:
        raise ConfigError(f"auto: no shape is left: {'; '.join(left_out)}", "slurm.shapes")
    stated = [*words, "--slurm.shapes", json.dumps(rows)]
    return Derived(stated, load_experiment(stated, "submit"), left_out)


def _tried(setting: Setting) -> Iterator[dict[str, int]]:
    """Yield the stated split first, on as many devices, on half of them and on twice as many; then the other splits."""
    yield {"trainer": setting.ranks, "inference": setting.inference}
    if setting.ranks % 2 == 0 and setting.inference % (2 * setting.gpus_per_engine) == 0:
        yield {"trainer": setting.ranks // 2, "inference": setting.inference // 2}
    yield {"trainer": 2 * setting.ranks, "inference": 2 * setting.inference}
    yield from other_shapes(setting)


def _overrides(experiment: Experiment) -> dict[str, Any]:
    engines = experiment.inference
    assert engines is not None
    return {
        "trainer.num_ranks": experiment.trainer.num_ranks,
        "inference.num_replicas": engines.num_replicas,
        "inference.data_parallel_size": engines.data_parallel_size,
    }


def _why_not(experiment: Experiment) -> str:
    """Return why a job of this shape cannot be; empty: nothing says so."""
    found = lint(experiment, load_site(experiment.slurm.site))
    return "; ".join(f"{f.message} ({f.code})" for f in found if f.severity == "error" or f.code in _MEMORY)
