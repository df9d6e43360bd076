"""Lint of the trainer's layout against the model and the nodes.

What the sizes themselves must satisfy is refused by the config already (`config.sections.parallel`); the trainer
refuses once more what is seen here, for models whose config.json the login node cannot read.
"""

from collections.abc import Iterator

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import trained_names
from prime_hpc.config.families import OWN_EXPERTS, count_experts, family_of
from prime_hpc.launch.lint.lint_finding import TRAINING, Finding, Subject, rule
from prime_hpc.store.model.config import read_config


@rule(*TRAINING, pods=True)
def tensor_parallel(subject: Subject) -> Iterator[Finding]:
    """Heads and vocabulary are split evenly."""
    facts, width, key = subject.facts, subject.experiment.trainer.parallel.tp, "trainer.parallel.tp"
    if width > 1:
        yield from _plans(subject.experiment, key)
    if width == 1 or facts is None:
        return
    sizes = {
        "attention heads": facts.num_heads,
        "key-value heads": facts.num_kv_heads,
        "tokens of the vocabulary": facts.vocab_size,
    }
    if not facts.num_experts:
        sizes["channels of the feed-forward blocks"] = facts.intermediate
    good = [n for n in range(2, facts.num_kv_heads + 1) if all(size % n == 0 for size in sizes.values())]
    remedy = f"use {' or '.join(map(str, good))}" if good else "leave it at 1: this model cannot be split"
    for what, size in sizes.items():
        if size % width:
            yield Finding.error("PH109", key, f"{width} does not divide the model's {size} {what}", remedy)


def _plans(experiment: Experiment, key: str) -> Iterator[Finding]:
    """Of each model that the trainer loads: whether its family can be split."""
    for name in trained_names(experiment).values():
        config = read_config(name)
        family = family_of(config) if config is not None else None
        if family is None or not family.model_type or family.refused or family.splits:
            continue
        kind = f"{name}: models of model_type {family.model_type}"
        if family.splits is None:
            message = f"{kind} are not among those whose tensor-parallel plan is proved to compute what one rank does"
            remedy = "set it to 1 (FSDP shards the model all the same), or compare gradients first"
            yield Finding.warning("PH109", key, message, remedy)
        else:
            message = f"{kind} cannot be split: transformers has no plan for them that the trainer follows"
            yield Finding.error("PH109", key, message, "set it to 1: FSDP shards the model all the same")


@rule(*TRAINING, pods=True)
def context_parallel(subject: Subject) -> Iterator[Finding]:
    """Attention trades tokens for heads, of which every rank must get some."""
    facts, parallel, key = subject.facts, subject.experiment.trainer.parallel, "trainer.parallel.cp"
    width = parallel.cp
    if width == 1 or facts is None:
        return
    heads, kv = facts.num_heads // parallel.tp, facts.num_kv_heads // parallel.tp
    good = [n for n in range(2, heads + 1) if heads % n == 0 and (kv % n == 0 or n % max(kv, 1) == 0)]
    remedy = f"use {' or '.join(map(str, good))}" if good else "leave it at 1"
    whose = " of a tensor-parallel rank" if parallel.tp > 1 else ""
    if heads % width:
        yield Finding.error("PH110", key, f"{width} does not divide the {heads} attention heads{whose}", remedy)
    elif width not in good:
        message = f"the {kv} key-value heads{whose} can be neither split nor repeated over {width} ranks"
        yield Finding.error("PH110", key, message, remedy)


@rule(*TRAINING, pods=True)
def expert_parallel(subject: Subject) -> Iterator[Finding]:
    """Experts are split evenly, and there must be some."""
    facts, width, key = subject.facts, subject.experiment.trainer.parallel.ep, "trainer.parallel.ep"
    if width == 1:
        return
    for name in trained_names(subject.experiment).values():
        kind = family_of(read_config(name) or {}).model_type
        if kind in OWN_EXPERTS:
            message = (
                f"{name}: models of model_type {kind} compute their experts by code of their own, which stays whole"
            )
            yield Finding.error("PH111", key, message, "set it to 1: FSDP shards the experts all the same")
            return
    config = read_config(subject.experiment.model.name) or {}
    if facts is None and (not family_of(config).known or count_experts(config)):
        return
    if facts is None or not facts.num_experts:
        yield Finding.error("PH111", key, f"{width} ranks would split the experts of a dense model", "set it to 1")
    elif facts.num_experts % width:
        good = [n for n in range(2, facts.num_experts + 1) if facts.num_experts % n == 0]
        message = f"{width} does not divide the model's {facts.num_experts} experts"
        yield Finding.error("PH111", key, message, f"use {' or '.join(map(str, good))}")


@rule(*TRAINING, pods=True)
def nodes(subject: Subject) -> Iterator[Finding]:
    """Tensor-parallel ranks exchange activations in every matrix: between nodes that takes most of the step."""
    width, count = subject.experiment.trainer.parallel.tp, subject.num_trainer_nodes()
    on_node = subject.experiment.trainer.num_ranks // count
    if width > 1 and count > 1 and on_node % width:
        yield Finding.warning(
            "PH112",
            "trainer.parallel.tp",
            f"groups of {width} ranks do not fit into nodes of {on_node}: some exchange activations over the network",
            f"a divisor of {on_node}",
        )
