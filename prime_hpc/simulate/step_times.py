"""Step times of an experiment's shapes, simulated from a run that was measured: for `plan --when` and `submit --best`.

predictor = find_predictor(experiment, [])
if isinstance(predictor, StepTimes):
    predictor(experiment)             # (2.4, "simulated from warm-up, own error 3 %")
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.simulate.calibration import Calibration, Missing, calibrate, differences
from prime_hpc.simulate.measured import Measured, read_measured
from prime_hpc.simulate.predict import check, predict_step
from prime_hpc.simulate.setting import setting_of
from prime_hpc.store.run_dirs import find_run, is_run, list_runs

MOST_LOOKED_AT = 20
"""Runs of the output folder, the newest first."""
_SAME = ("model.name", "model.lora", "orchestrator.env")
"""A run that differs in one of these is of another experiment: its times say nothing."""


@dataclass(frozen=True)
class StepTimes:
    """Predicts a step of any shape; says from what, and how far off it is for the run itself."""

    calibration: Calibration
    source: str
    error: float | None
    """Largest relative error of the runs' own predicted steps; None: a bench, whose steps are none of both sides."""

    def __call__(self, experiment: Experiment) -> tuple[float, str] | None:
        """Return seconds of a step, at worst, and how they are known; None: what is simulated is no such run."""
        try:
            setting = setting_of(experiment)
        except ConfigError:
            return None
        outcome, range_s, _ = predict_step(setting, self.calibration, experiment.seed)
        own = "own error not known" if self.error is None else f"own error {self.error:.0%}"
        said = f"simulated from {self.source}, {own}"
        if range_s is None:
            return outcome.step_s, said
        return range_s[1], f"{said}; {range_s[0]:.3g} s at best, the engines' load is beyond what was measured"

    def notes(self, experiment: Experiment) -> list[str]:
        """Name what makes the calibrating runs something else than the experiment."""
        found = [(run.name, differences(run, experiment)) for run in self.calibration.runs]
        return [f"{name} was measured with {'; '.join(other)}" for name, other in found if other]


def find_predictor(experiment: Experiment, named: Sequence[str]) -> StepTimes | str:
    """Calibrate by the runs that are named, else by the experiment's own run, else by the newest one like it.

    Args:
        experiment: its output folder is where runs like it are looked for: of the same model, environments and LoRA.

    Returns:
        the predictor; or why there is none, in a sentence.

    Raises:
        ConfigError: a run that is named is none, or nothing was measured in it.
    """
    try:
        setting_of(experiment)
    except ConfigError as error:
        if named:
            raise
        return f"no step is simulated: {error}"
    if named:
        paths = {path.resolve(): path for path in map(find_run, named)}
        found = calibrate([read_measured(path, resolved.name) for resolved, path in paths.items()])
        if isinstance(found, Missing):
            raise ConfigError(f"--from {' '.join(named)}: not measured there: {'; '.join(found.lines)}")
        return _of(found)
    for run in _like(experiment):
        found = calibrate([run])
        if isinstance(found, Calibration):
            return _of(found)
    where = f"below {experiment.output_dir} (--from RUN names one)"
    return f"no step is simulated: no run of this model and these environments was measured {where}"


def _of(calibration: Calibration) -> StepTimes:
    errors = [abs(one.error) for one in check(calibration) if one.error is not None]
    source = " and ".join(run.name for run in calibration.runs)
    return StepTimes(calibration, source, max(errors) if errors else None)


def _like(experiment: Experiment) -> Iterable[Measured]:
    """Yield measured runs of the same thing: its own first, then the newest."""
    own = experiment.run_dir
    others = [path for path in list_runs(experiment.output_dir) if path.resolve() != own.resolve()]
    newest = sorted(others, key=_written, reverse=True)[:MOST_LOOKED_AT]
    for path in [own, *newest] if is_run(own) else newest:
        try:
            run = read_measured(path, path.name)
        except (ConfigError, OSError):  # of another kind or version, or gone meanwhile
            continue
        if not any(line.startswith(_SAME) for line in differences(run, experiment)):
            yield run


def _written(path: Path) -> float:
    """Return when the run's trainer last said something, epoch seconds; 0: never."""
    try:
        return metrics_file(path, "trainer").stat().st_mtime
    except OSError:
        return 0.0
