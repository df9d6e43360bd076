"""The experiment config: one tree, four sources, one snapshot. Every room may read it; it imports none of them.

    from prime_hpc.config import Experiment, load_run
    experiment = load_run(run_dir)                       # what every role does

    from prime_hpc.config import ConfigError, load_experiment, write_snapshot
    loaded = load_experiment(argv, "rl")                 # what the command line does

Names are loaded on first use, so that `--help` pays for none of pydantic, yaml and tomlkit.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_hpc.config.errors import ConfigError, Origin, Problem
    from prime_hpc.config.experiment import COMPONENTS, Experiment
    from prime_hpc.config.snapshot import load_run, write_snapshot
    from prime_hpc.config.sources.load import Loaded, load_experiment

__all__ = [
    "COMPONENTS",
    "ConfigError",
    "Experiment",
    "Loaded",
    "Origin",
    "Problem",
    "load_experiment",
    "load_run",
    "write_snapshot",
]

_HOMES = {
    "errors": ("ConfigError", "Origin", "Problem"),
    "experiment": ("COMPONENTS", "Experiment"),
    "snapshot": ("load_run", "write_snapshot"),
    "sources.load": ("Loaded", "load_experiment"),
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
