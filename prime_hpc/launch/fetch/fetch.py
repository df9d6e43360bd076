"""Looks for what an experiment needs where its nodes will look for it, and fetches what is missing, one after another.

What is there already is not asked for again; what was broken off goes on. The environment is that of the job's roles
(site profile, `slurm.env`), without what would keep the hub's clients off the network.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.fetch.hub import ask
from prime_hpc.launch.fetch.needs import Need, needs_of
from prime_hpc.launch.fetch.presence import Presence, absent_models, benchmark_file, datasets_cache, job_environ, look
from prime_hpc.launch.for_slurm import is_for_slurm
from prime_hpc.store.model.config import hub_cache, hub_snapshot, is_on

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables that keep the hub's clients off the network."""


@dataclass
class Fetched:
    """Things that were looked for, and the downloads that followed."""

    found: list[Presence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if nothing is missing."""
        return all(one.is_there for one in self.found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            asdict(one.need)
            | {
                "path": None if one.path is None else str(one.path),
                "bytes": one.num_bytes,
                "there": one.is_there,
                "fetched": one.is_new,
                "lacks": one.lacks,
                "can_fetch": one.can_fetch,
                "problem": one.problem,
                "remedy": one.remedy,
            }
            for one in self.found
        ]
        return {"complete": self.is_complete, "needs": rows, "notes": self.notes}


def require_model(loaded: Loaded) -> None:
    """Raise a ConfigError where a role that starts here at once would not find its model: nothing of it is on disk, and
    the environment keeps it off the hub, or the hub has none. Say so where the hub is silent: libraries wait for it,
    for minutes."""
    if "model.name" not in absent_models(loaded.experiment, os.environ):
        return
    name, origin = loaded.experiment.model.name, loaded.provenance.get("model.name")
    missing = f"{name} is not on this disk"
    if said := next((variable for variable in OFFLINE[:2] if is_on(os.environ, variable)), None):
        words = f"{missing}, and {said} keeps it from the hub; `prime-hpc fetch FILE`, or unset {said}"
        raise ConfigError(Problem(words, "model.name", origin))
    word = ask("model", name, os.environ)
    if word is None:
        words = f"{missing}, and the hub does not answer; it is asked again, for minutes"
        print(f"note: model.name: {words}", file=sys.stderr, flush=True)
    elif not word.is_there:
        words = f"the hub has no model {name}, or none that you may see; correct the name, or state HF_TOKEN"
        raise ConfigError(Problem(words, "model.name", origin))


def fetch_all(
    experiment: Experiment,
    site: SiteConfig,
    *,
    into: Path | None = None,
    check: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Fetched:
    """Look for everything, and fetch what is missing.

    Args:
        site: its environment says where the nodes look.
        into: another HF_HOME, to which the hub's models and data sets go.
    """
    theirs = job_environ(experiment, site) if is_for_slurm(experiment, site) else dict(os.environ)
    environ = dict(theirs)
    if into is not None:
        folder = into.expanduser().absolute()
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
            environ.pop(name, None)
        environ["HF_HOME"] = str(folder)
    done = Fetched()
    for need in needs_of(experiment):
        one = look(need, environ)
        if not check and not one.is_there and one.can_fetch:
            say(f"fetching {need.kind} {need.name} ({', '.join(one.lacks)} missing)")
            problem = _download(need, environ)
            one = look(need, environ)
            one.is_new = one.is_there
            one.problem = problem or ("" if one.is_there else f"the hub's copy has no {', '.join(one.lacks)}")
        done.found.append(one)
    kinds = {one.need.kind for one in done.found}
    caches = [cache for kind, cache in (("model", hub_cache), ("dataset", datasets_cache)) if kind in kinds]
    if apart := [str(cache(theirs)) for cache in caches if cache(theirs) != cache(environ)]:
        done.notes.append(
            f"the job looks in {' and '.join(apart)}: state slurm.env.HF_HOME: {environ['HF_HOME']} in the experiment, "
            "or env.HF_HOME in the site profile"
        )
    return done


def _download(need: Need, environ: Mapping[str, str]) -> str:
    """Fetch in a process of its own; returns what went wrong."""
    order: dict[str, Any] = asdict(need)
    if need.kind == "model":
        snapshot = hub_snapshot(need.name, hub_cache(environ))
        order |= {"cache": str(hub_cache(environ)), "revision": snapshot.name if snapshot is not None else None}
    elif need.kind == "benchmark":
        order["to"] = str(benchmark_file(need, environ).parent)
    online = {name: value for name, value in environ.items() if name not in OFFLINE}
    command = [sys.executable, "-P", "-m", "prime_hpc.launch.fetch.download"]
    # no deadline of its own: a model takes as long as it takes, and each read of the hub's clients has one
    process = subprocess.run(command, input=json.dumps(order), env=online, stdout=subprocess.PIPE, text=True)
    try:
        return str(json.loads(process.stdout)["problem"])
    except (ValueError, KeyError):
        return f"the process that fetched ended with exit status {process.returncode}"
