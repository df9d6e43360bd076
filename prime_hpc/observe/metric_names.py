"""Names of the metrics that alarms may watch: `<file>.<name>` of `metrics/<file>.jsonl`, and facts of the run."""

import re
from difflib import get_close_matches

from prime_hpc.observe import metric_table

TRAINER = (*(metric for family in metric_table.TRAINER.values() for metric in family.metrics), "idle_share")
"""`idle_share` is made of `time/wait` and `time/step`: the share of a step in which the trainer waits for its batch."""
ORCHESTRATOR = tuple(metric for family in metric_table.ORCHESTRATOR.values() for metric in family.metrics)
RUN = ("stall_s", "free_gib", "free_share", "time_left_s", "no_successor_s")
"""Seconds of a stall, space of the run directory's file system, seconds to the job's end, seconds without a successor
where one should wait: looked at every 10 s."""
NAMES = {"trainer": TRAINER, "orchestrator": ORCHESTRATOR, "run": RUN}
_OPEN = {
    "trainer": re.compile(r"(time|ckpt|loss|eval)/.+|nll|kl_penalty|teacher_(divergence|mass)"),
    "orchestrator": re.compile(
        r"(env|eval|env_workers|episode_time|teacher|curriculum|advantage)/.+|reward/.+/(mean|std)"
        r"|groups/.+/(in_batch|solved_all|solved_none)"
    ),
}
"""Names that depend on environments, objectives and algorithms."""


def split_metric(metric: str) -> tuple[str, str]:
    """Split `trainer.time/step` into its file and its name there."""
    file, _, name = metric.partition(".")
    return file, name


def is_known(metric: str) -> bool:
    """Return whether the product writes a metric of this name, or may."""
    file, name = split_metric(metric)
    is_open = file in _OPEN and _OPEN[file].fullmatch(name) is not None
    return name in NAMES.get(file, ()) or is_open


def evaluated(key: str) -> str:
    """Return the environment, slashes in its name and all, whose held-out mean reward a key of the rows is; "" of any
    other key."""
    name = key.removeprefix("eval/").removesuffix("/mean_reward")
    return name if key == f"eval/{name}/mean_reward" else ""


def held_out_set(key: str) -> str:
    """Return the set of held-out rows of SFT whose loss a key of the rows is; "" of any other key."""
    name = key.removeprefix("eval/").removesuffix("/loss")
    return name if key == f"eval/{name}/loss" else ""


def near(metric: str) -> list[str]:
    """Return up to three names that are meant where this one is unknown, the likeliest first."""
    every = {f"{file}.{name}": f"{file}.{name}" for file, names in NAMES.items() for name in names}
    plain = {full.partition(".")[2]: full for full in every}
    name = split_metric(metric)[1]
    found = [plain[name]] if name in plain else []
    found += get_close_matches(metric, every, n=3, cutoff=0.6)
    found += [plain[close] for close in get_close_matches(name, plain, n=3, cutoff=0.6)]
    return list(dict.fromkeys(found))[:3]
