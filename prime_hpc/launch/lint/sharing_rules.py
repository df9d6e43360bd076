"""Lint of GPUs that several roles use: the shares of their memory."""

from collections.abc import Iterator, Mapping

from prime_hpc.launch.estimate.micro_batch import engine_share, left_to_trainer
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.launch.lint.lint_finding import TRAINING, Finding, Subject, rule
from prime_hpc.slurm.shared_gpus import gpu_places, gpus_in_common

_ALMOST_ALL = 0.8
"""For a GPU of unknown memory: engines that take more leave a trainer too little."""


@rule(*TRAINING)
def shared_gpus(subject: Subject) -> Iterator[Finding]:
    """Engines take their share when they start and keep it; the trainer lives on what they leave."""
    experiment = subject.experiment
    of_trainer = gpu_places(experiment, "trainer", subject.placement)
    places = {group.role: gpu_places(experiment, group.role, subject.placement) for group in subject.engines}
    told: set[tuple[object, ...]] = set()  # of other nodes the same is to be said
    limit = subject.gpu_gib("trainer")
    parts = trainer_gib(experiment, subject.facts) if subject.facts is not None else None
    for place in sorted(of_trainer.union(*places.values())):
        there = [group for group in subject.engines if place in places[group.role]]
        gpu, trains = place[-1], place in of_trainer
        case = (gpu, trains, *(group.role for group in there))
        if not there or len(there) + trains < 2 or case in told:
            continue
        told.add(case)
        share = sum(engine_share(group.view, group.facts, limit) for group in there)
        keys = " and ".join(f"{group.section}.gpu_memory_utilization" for group in there)
        remedy = f"lower {keys}: what an engine needs is its weights, about 2 GiB and a KV cache (kv_cache_gib)"
        key = f"{there[0].section}.gpu_memory_utilization"
        if share > 1:
            yield Finding.error("PH120", key, f"engines on GPU {gpu} take {share:.0%} of its memory together", remedy)
        elif trains and parts is not None and limit is not None and experiment.engines_sleep:
            yield from _taking_turns(subject, gpu, parts, share, limit)
        elif trains and parts is not None and limit is not None:
            need, left = sum(parts.values()), (1 - share) * limit
            if need > left:
                # as for a trainer alone: the rough parts of the estimate do not refuse a run
                certain = need - parts["activations"] - parts["logits"] > left
                message = (
                    f"{share:.0%} of GPU {gpu} are the engines', {left:.0f} GiB are left; the trainer needs about "
                )
                yield Finding("PH120", "error" if certain else "warning", key, f"{message}{need:.0f}", remedy)
        elif trains and share > _ALMOST_ALL and not experiment.engines_sleep:
            message = f"{share:.0%} of GPU {gpu}, on which the trainer runs too, are the engines'"
            yield Finding.warning("PH120", key, message, remedy)


def _taking_turns(
    subject: Subject, gpu: int, parts: Mapping[str, float], share: float, limit: float
) -> Iterator[Finding]:
    """Find what does not fit on a GPU whose engine sleeps while the trainer computes.

    While the engine samples, the trainer keeps its state; while the trainer computes, engines that do not sleep keep
    their share, those that do their context and graphs.
    """
    key, held = "inference.gpu_memory_utilization", parts["state"] + parts["context"]
    if held + share * limit > limit:
        message = f"while engines sample they take {share:.0%} of GPU {gpu}, and the trainer keeps {held:.0f} GiB of it"
        remedy = f"lower {key}, or trainer.optim.offload: only what the trainer computes with is freed"
        yield Finding.error("PH120", key, f"{message}: more than {limit:.0f}", remedy)
    need, left = sum(parts.values()), left_to_trainer(subject.experiment, limit, subject.placement) * limit
    if need > left:
        certain = need - parts["activations"] - parts["logits"] > left
        message = f"GPU {gpu} has {left:.0f} GiB while its engines sleep; the trainer needs about {need:.0f}"
        remedy = "--model.ac, a smaller trainer.micro_batch_tokens, or trainer.optim.offload"
        yield Finding("PH120", "error" if certain else "warning", "trainer.micro_batch_tokens", message, remedy)


@rule(*TRAINING)
def sleeping(subject: Subject) -> Iterator[Finding]:
    """Sleep is for engines that have a GPU in common with the trainer."""
    experiment = subject.experiment
    if not experiment.engines_sleep:
        return
    if not subject.trains_on_gpus:
        message = "on a CPU engines only pause: vLLM gives memory back on GPUs alone"
        yield Finding.warning("PH120", "inference.sleep", message, "leave it out")
    elif not gpus_in_common(experiment, placement=subject.placement):
        message = "engines and trainer have no GPU in common, so that they would sleep for nothing"
        yield Finding.warning(
            "PH120", "inference.sleep", message, "leave it out, or name trainer_gpu_ids and inference_gpu_ids"
        )
