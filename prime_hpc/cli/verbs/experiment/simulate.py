"""`prime-hpc simulate FILE`: step time, waits and cost for this shape and others, by what finished runs measured.

Exit codes: 0 predicted; 1 nothing was measured by which it could be (it says what, and the command that measures it);
2 a wrong config, shape or run.
"""

import gc
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.cli.common import Given, load, parse, print_json

if TYPE_CHECKING:
    from prime_hpc.config import Experiment
    from prime_hpc.simulate.measured import Measured


def run(argv: list[str], program: str) -> int:
    """Calibrate, predict, print."""
    given = parse("simulate", argv)
    loaded = load(given.words, "plan", program)
    from prime_hpc.simulate.calibration import Missing, calibrate
    from prime_hpc.simulate.predict import caveats, check, predict
    from prime_hpc.simulate.setting import parse_shape, reshaped, setting_of
    from prime_hpc.simulate.text import missing_text, prediction_text, prediction_tree

    experiment = loaded.experiment
    setting_of(experiment)
    shapes = [parse_shape(text) for text in given.every("--shape")]
    for shape in shapes:
        reshaped(experiment, shape)
    runs = _runs(given, experiment)
    calibration = calibrate(runs)
    if isinstance(calibration, Missing):
        sources = [str(one.path) for one in runs]
        file = next((word for word in given.words if not word.startswith("-") and word != "@"), "exp.yaml")
        text = missing_text(calibration, file, experiment.name, sources)
        if "--json" in given:
            print_json({"name": experiment.name, "missing": calibration.lines, "looked_in": sources})
        print(text, end="", file=sys.stderr if "--json" in given else sys.stdout)
        return 1
    from prime_hpc.launch.plan.this_machine import resolve_launch

    site = None
    if resolve_launch(experiment) == "slurm":
        from prime_hpc.config.site import load_site

        site = load_site(experiment.slurm.site)
    checks = check(calibration)
    gc.disable()  # a tenth of the time: a simulation makes hundreds of thousands of events, and no cycles
    try:
        rows = predict(experiment, calibration, shapes, site)
    finally:
        gc.enable()
    notes = caveats(experiment, calibration, socket.gethostname())
    found = experiment, calibration, checks, rows, notes
    given.tell(lambda: prediction_tree(*found), lambda: prediction_text(*found))
    return 0


def _runs(given: Given, experiment: "Experiment") -> list["Measured"]:
    """Read the runs that calibrate: those that are named, else this experiment's own where it has run."""
    from prime_hpc.simulate.measured import read_measured
    from prime_hpc.store.run_dirs import find_run, is_run

    paths: list[Path] = [find_run(word) for word in given.every("--from")]
    if not paths and is_run(experiment.run_dir):
        paths = [experiment.run_dir]
    unique = {path.resolve(): path for path in paths}
    return [read_measured(path, resolved.name) for resolved, path in unique.items()]
