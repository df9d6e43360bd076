"""Keys that make a trainer's memory smaller, by what it holds."""

from prime_hpc.config.experiment import Experiment


def remedies(experiment: Experiment, kind: str) -> list[str]:
    """Keys to change, what is likely to help most first; those that are set already are left out.
    `kind`: `weights`, `gathered`, `gradients`, `optimizer`, `activations` or `head`; others have no remedy."""
    trainer, model = experiment.trainer, experiment.model
    more_ranks = (
        "more trainer.num_ranks"
        if trainer.parallel_dims.dp_replicate == 1
        else "a smaller trainer.parallel.dp_replicate"
    )
    split = "more of trainer.parallel.tp (or ep)"
    found: list[str | None] = []
    if kind == "weights":
        found = [more_ranks, None if model.lora else "--model.lora"]
    elif kind == "gathered":
        found = [None if trainer.reshard_after_forward else "trainer.reshard_after_forward = true", split]
    elif kind == "gradients":
        found = [None if trainer.no_sync is False else "trainer.no_sync = false", more_ranks, split]
    elif kind == "optimizer":
        found = [None if trainer.optim.offload else "--trainer.optim.offload", more_ranks]
    elif kind == "activations":
        found = [
            _recompute(experiment),
            "a smaller trainer.micro_batch_tokens (or seq_len)",
            "more of trainer.parallel.cp",
        ]
    elif kind == "head":
        found = ["a smaller trainer.logits_chunk_tokens", "more of trainer.parallel.tp"]
    return [remedy for remedy in found if remedy]


def _recompute(experiment: Experiment) -> str | None:
    ac = experiment.model.ac
    if ac is None:
        return "--model.ac (recompute)"
    if ac.mode == "selective":
        return "--model.ac.mode full"
    if ac.freq > 1:
        return "--model.ac.freq 1"
    return None if ac.offload else "--model.ac.offload"


def advice(experiment: Experiment, by_kind: dict[str, float], limit: int = 2) -> str:
    """`head 3.1 GiB: a smaller ...; activations 2.0 GiB: ...` of the largest kinds that anything helps against.
    `by_kind`: GiB."""
    largest = sorted(by_kind, key=lambda kind: -by_kind[kind])
    named = [(kind, remedies(experiment, kind)) for kind in largest]
    shown = [f"{kind} {by_kind[kind]:.1f} GiB: {', '.join(keys)}" for kind, keys in named if keys]
    return "; ".join(shown[:limit])
