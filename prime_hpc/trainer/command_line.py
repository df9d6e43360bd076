r"""A trainer that nobody supervises, on one machine or several: its config comes with its command line.

    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --rdzv-endpoint 10.15.42.1:1234 -m prime_hpc.trainer.main \
        @ train.toml --ckpt.resume-step latest        # `sft @ train.toml` for SFT

Every rank resolves the same words; before anything is trained the ranks compare what they made of them.
"""

import os
from collections.abc import Mapping, Sequence

from prime_hpc.config import ConfigError, Experiment, Problem, load_experiment, write_snapshot
from prime_hpc.config.run_files import ATTEMPTS_JSONL
from prime_hpc.store.attempts import is_held, read_attempts, runs_elsewhere
from prime_hpc.store.checkpoint.checkpoints import newest_first
from prime_hpc.store.messaging.network import GLOO, Place, route_to
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import list_versions
from prime_hpc.trainer.rank_group import RankGroup

ENTRYPOINTS = ("trainer", "sft")
"""In whose scope keys are looked up; the first is taken where none is named."""


def is_by_hand(arguments: Sequence[str]) -> bool:
    """Return whether these are the words of a config; else they name a run directory, whose config is in it."""
    own = arguments[1:] if arguments and arguments[0] in ENTRYPOINTS else arguments
    if {"-h", "--help"} & set(own[:1]):
        return False
    return not arguments or any(word.startswith(("@", "--")) for word in own[:1])


def resolve(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Experiment:
    """Return the experiment of a rank's command line; `trainer.num_ranks` is torchrun's where it is not stated.
    Raises ConfigError: it is wrong, states another number of ranks than torchrun started, wants what a supervisor does,
    or its run directory is in use or would be overwritten."""
    entrypoint, *words = arguments if arguments and arguments[0] in ENTRYPOINTS else (ENTRYPOINTS[0], *arguments)
    world_size = int(environ.get("WORLD_SIZE", "1"))
    loaded = load_experiment(words, entrypoint, {"PRIME_TRAINER__NUM_RANKS": str(world_size), **environ})
    experiment = loaded.experiment
    stated = experiment.trainer.num_ranks
    if stated != world_size:
        raise ConfigError(
            Problem(
                f"is {stated}, but torchrun starts {world_size} ranks: leave it out, or let --nnodes times "
                "--nproc-per-node be the same",
                "trainer.num_ranks",
                loaded.provenance.get("trainer.num_ranks"),
            )
        )
    refuse_taken(experiment)
    return experiment


def refuse_taken(experiment: Experiment) -> None:
    """Raise where a trainer by hand would go over another run, or over its own earlier steps.
    Raises ConfigError: saying what to do."""
    run_dir = experiment.run_dir.resolve()
    if experiment.kind == "sft" and experiment.samples:
        message = "environments are played beside a supervised run alone: submit it, run it with `sft`, or leave it out"
        raise ConfigError(message, "orchestrator.eval")
    for row in read_attempts(run_dir / ATTEMPTS_JSONL):
        if is_held(row):
            raise ConfigError(f"{run_dir}: a run is going on there (process {row['pid']})", "name")
        if (signs := runs_elsewhere(run_dir, row)) is not None:
            raise ConfigError(f"{run_dir}: {signs}; or choose another --name", "name")
    if experiment.ckpt is not None and experiment.ckpt.resume_step is not None:
        return
    paths = RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)
    if (newest := next(newest_first(paths.checkpoints), None)) is not None:
        raise ConfigError(
            f"{run_dir} holds checkpoints up to step {newest.step}: go on with --ckpt.resume-step latest, or "
            "choose another --name",
            "name",
        )
    versions = [] if experiment.trainer.bench else list_versions(paths)
    if versions and versions[-1] > 0:
        message = f"{run_dir} holds weight versions up to {versions[-1]}, and no checkpoint: choose another --name"
        raise ConfigError(message, "name")


def collectives_interface(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that has gloo use the network over which the ranks meet, where none is stated: by itself it
    takes that of the machine's name, which often is the loopback address."""
    head = environ.get("MASTER_ADDR")
    if GLOO in environ or head is None or environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE"):
        return {}
    place: Place | None = route_to(head)
    return {} if place is None else {GLOO: place.interface}


def agree_on_config(experiment: Experiment, words: Sequence[str]) -> None:
    """Raise on every rank where one of them resolved another config than rank 0; rank 0 writes it down. Collective.
    Raises ConfigError: naming the nodes' first differing key, or that another rank has one."""
    ranks, own = RankGroup(), experiment.model_dump(mode="json")
    differs = sorted(_differing(ranks.broadcast(own), own))
    if any(ranks.gather_all(bool(differs))):
        where = f"here {', '.join(differs[:5])} differ from rank 0's" if differs else "other ranks have another one"
        raise ConfigError(f"the ranks were started with different configs: {where}; give all nodes the same words")
    if ranks.rank == 0:
        folder = experiment.run_dir.resolve() / "roles" / "trainer"
        folder.mkdir(parents=True, exist_ok=True)
        write_snapshot(experiment, folder, list(words))


def _differing(a: object, b: object, prefix: str = "") -> set[str]:
    """Return the dotted keys whose values are not the same in two trees."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return {key for k in keys for key in _differing(a.get(k), b.get(k), f"{prefix}.{k}" if prefix else k)}
    return set() if a == b else {prefix or "the config"}
