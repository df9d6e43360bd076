"""The micro-batch that a plan chooses where `trainer.micro_batch_tokens` is not stated: the largest that fits the GPU.

The choice follows from the experiment, the site profile (on one machine: from its GPUs) and the model's config.json
alone. It is made once, when a run directory is written, and stored in `run.yaml`, where every attempt and rank reads
it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import engine_roles, served_by
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.engine_memory import engine_memory, engine_overhead_gib
from prime_hpc.launch.estimate.model_facts import ModelFacts, read_model
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.runtime.gpus import Runner, memory_gib, run_command
from prime_hpc.slurm.options import known_partitions, resolve
from prime_hpc.slurm.placement import Placement, place_slurm
from prime_hpc.slurm.shared_gpus import gpus_in_common
from prime_hpc.supervisor.roles.spec import split_gpus, usable_gpus

USABLE = 0.9
"""Share of what the trainer has of a GPU's memory that its estimate may take; above it lint warns."""
MOST_TOKENS = 2**17
"""A micro-batch that is chosen is no larger: kernels are long busy, and some count values in 32 bits."""


@dataclass(frozen=True)
class MicroBatch:
    """A choice, and what it rests on."""

    tokens: int
    need_gib: float
    """Estimate of a trainer GPU's peak with it."""
    limit_gib: float
    gpu_gib: float
    share: float = 1.0
    """Of the GPU, that engines leave to the trainer."""
    is_largest: bool = False
    """True if a larger one would fit as well: a rank's whole batch is in this one, or it has MOST_TOKENS."""

    @property
    def fits(self) -> bool:
        """True if the estimate is below the limit: False is one sample that is too long for the GPU."""
        return self.need_gib <= self.limit_gib

    def words(self) -> str:
        """Say for people what was chosen, and why."""
        of = f"{self.gpu_gib:.0f} GiB" + (f", of which engines leave {self.share:.0%}" if self.share < 1 else "")
        room = f"about {self.need_gib:.0f} GiB of the {self.limit_gib:.0f} that are planned with of {of}"
        if not self.fits:
            return f"{self.tokens} tokens, one sample: about {self.need_gib:.0f} GiB, and does not fit {of}"
        why = "more would gain nothing" if self.is_largest else "the most that fit"
        return f"{self.tokens} tokens, chosen: {why} ({room}); trainer.micro_batch_tokens states another"


def with_micro_batch(
    experiment: Experiment,
    site: SiteConfig | None,
    environ: Mapping[str, str] = os.environ,
    run: Runner = run_command,
) -> tuple[Experiment, MicroBatch | None]:
    """Fill in `trainer.micro_batch_tokens`.

    Args:
        site: profile of the cluster that it is for; None: for this machine.

    Returns:
        the experiment as it is, and None, where the key is stated, the trainer computes on no GPU, or the memory of one
        or the model's size is not known: a micro-batch then has the tokens of the longest sample.
    """
    if not _is_open(experiment):
        return experiment, None
    known = (_here(experiment, environ, run), None) if site is None else _in_job(experiment, site)
    chosen = largest_for(experiment, *known)
    return (experiment, None) if chosen is None else (_with(experiment, chosen.tokens), chosen)


def largest_for(experiment: Experiment, gpu_gib: float | None, placement: Placement | None = None) -> MicroBatch | None:
    """Return the choice for a GPU of `gpu_gib`; None where the key is stated, or the GPU or the model is not known."""
    facts = read_model(experiment.model.name) if gpu_gib is not None and _is_open(experiment) else None
    if gpu_gib is None or facts is None or facts.num_params is None:
        return None
    return choose(experiment, facts, gpu_gib, placement)


def choose(experiment: Experiment, facts: ModelFacts, gpu_gib: float, placement: Placement | None = None) -> MicroBatch:
    """Return the largest multiple of the longest sample whose estimate fits; one sample where none does.

    Args:
        experiment: whose `trainer.micro_batch_tokens` is open.
        facts: of a model whose parameters are counted.
        placement: of the job, which may have the engines on other nodes; None: on one machine.
    """
    longest = _longest(experiment)
    share = left_to_trainer(experiment, gpu_gib, placement)
    limit = USABLE * share * gpu_gib
    most = max(1, min(-(-_tokens_of_rank(experiment) // longest), MOST_TOKENS // longest))

    def need(samples: int) -> float:
        parts = trainer_gib(_with(experiment, samples * longest), facts)
        assert parts is not None
        return sum(parts.values())

    samples = _last(most, lambda number: need(number) <= limit)
    return MicroBatch(samples * longest, need(samples), limit, gpu_gib, share, samples == most)


def left_to_trainer(experiment: Experiment, gpu_gib: float | None, placement: Placement | None = None) -> float:
    """Return the share of a GPU that engines on it leave to the trainer while it computes: 1 where each has its own.

    Engines that sleep keep their context and graphs.
    """
    taken = 0.0
    for role in engine_roles(experiment):
        if gpus_in_common(experiment, role, placement):
            view = served_by(experiment, role)
            if role == "inference" and experiment.engines_sleep and gpu_gib is not None:
                taken += engine_overhead_gib(view) / gpu_gib
            else:
                taken += engine_share(view, read_model(view.model.name), gpu_gib)
    return max(0.0, 1 - taken)


def engine_share(view: Experiment, facts: ModelFacts | None, gpu_gib: float | None) -> float:
    """Return the share of a GPU that an engine takes. `view`: the experiment as the group of engines sees it."""
    assert view.inference is not None
    share, cache = view.inference.gpu_memory_utilization, view.inference.kv_cache_gib
    if cache is None or gpu_gib is None or facts is None:
        return share
    memory = engine_memory(view, facts, gpu_gib)
    if memory is None:
        return share
    return (memory.weights_gib + engine_overhead_gib(view) + cache + memory.step_gib) / gpu_gib


def _last(most: int, fits: Callable[[int], bool]) -> int:
    """Return the last number of 1 .. most for which `fits` holds, which does for all below it; 1 where for none."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _is_open(experiment: Experiment) -> bool:
    """Return whether the key decides something that nobody has stated."""
    trainer, data = experiment.trainer, experiment.sft.data
    if not experiment.trains or trainer.micro_batch_tokens is not None or is_parent(experiment):
        return False
    if experiment.device == "cpu" or trainer.backend == "gloo" or trainer.bench or trainer.data.fake is not None:
        return False
    return experiment.kind == "rl" or (data.type != "fake" and data.pack)


def _longest(experiment: Experiment) -> int:
    sft = experiment.sft
    return (sft.data.seq_len or experiment.seq_len) * sft.num_sides if experiment.kind == "sft" else experiment.seq_len


def _tokens_of_rank(experiment: Experiment) -> int:
    """Return the tokens that a data rank gets of a batch, at most."""
    dims, data = experiment.trainer.parallel_dims, experiment.sft.data
    if experiment.kind == "sft":
        tokens = data.batch_tokens or data.batch_size * _longest(experiment)
    else:
        tokens = experiment.orchestrator.batch_size * experiment.seq_len
    return -(-tokens // (dims.dp_replicate * dims.dp_shard))


def _with(experiment: Experiment, tokens: int) -> Experiment:
    trainer = experiment.trainer.model_copy(update={"micro_batch_tokens": tokens})
    return experiment.model_copy(update={"trainer": trainer})


def _in_job(experiment: Experiment, site: SiteConfig) -> tuple[float | None, Placement | None]:
    """Memory of a trainer's GPU in a Slurm job, by the site profile, and the placement; None: not known, or no GPU
    computes."""
    try:
        placement = place_slurm(experiment, site)
        partitions = resolve("trainer", experiment, site).partitions
    except ConfigError:  # lint and submit say so
        return None, None
    if not any(group.role == "trainer" and group.device == "cuda" for group in placement.groups):
        return None, None
    sizes = [part.gpu_memory_gib for part in known_partitions(partitions, site)]
    return min((size for size in sizes if size is not None), default=None), placement


def _here(experiment: Experiment, environ: Mapping[str, str], run: Runner) -> float | None:
    """Memory of the smallest of the GPUs on which the trainer would run on this machine; None: none, or not known."""
    try:
        _, own = split_gpus(experiment, usable_gpus(experiment, environ))
    except ConfigError:  # the start says so
        return None
    return memory_gib(own, run) if own else None
