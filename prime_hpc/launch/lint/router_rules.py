"""Lint of what is asked of a mixture of experts' routers."""

from collections.abc import Iterator

from prime_hpc.config.engine_groups import sampling_role
from prime_hpc.launch.lint.lint_finding import Finding, Subject
from prime_hpc.store.model_config import read_config

REPLAY, DTYPE = "trainer.router_replay", "model.router_dtype"
OTHER_ROUTERS = frozenset({"deepseek_v4", "phimoe", "zaya"})
"""model_type of those whose routers do not choose by one `topk` over all experts (`tests/unit/test_router_families.py`
tries every family of the installed transformers)."""


def router_dtype(subject: Subject) -> Iterator[Finding]:
    """Report a dense model: it has no routers."""
    facts, model = subject.facts, subject.experiment.model
    if model.router_dtype == "float32" and facts is not None and not facts.num_experts:
        yield Finding("PH127", "error", DTYPE, f"{model.name} has no experts, so no routers", "leave it out")


def router_replay(subject: Subject) -> Iterator[Finding]:
    """Report where no engine of the run can record what the trainer is to follow, and where following it would help."""
    experiment, facts = subject.experiment, subject.facts
    name, is_moe = experiment.model.name, facts is not None and bool(facts.num_experts)
    family = (read_config(name) or {}).get("model_type")
    if not experiment.trainer.router_replay:
        if subject.is_rl and is_moe and family not in OTHER_ROUTERS and experiment.model.dtype != "float32":
            yield Finding(
                "PH127",
                "info",
                REPLAY,
                f"in {experiment.model.dtype} engine and trainer send some tokens of {name} to other experts: their "
                "importance ratios are off by more than rounding",
                f"true: the trainer follows the engine's choice; and {DTYPE} = float32",
            )
        return
    if not subject.is_rl:
        yield Finding("PH127", "error", REPLAY, "only rollouts of RL have recorded experts", "leave it out")
    elif facts is not None and not is_moe:
        yield Finding("PH127", "error", REPLAY, f"{name} has no experts, so nothing to follow", "leave it out")
    elif family in OTHER_ROUTERS:
        yield Finding("PH127", "error", REPLAY, f"routers of {family} choose in a way of their own", "leave it out")
    elif experiment.model.lora is not None:
        yield Finding("PH127", "error", REPLAY, "engines with adapters record no experts", "leave it or model.lora out")
    elif sampling_role(experiment) == "teacher":
        yield Finding("PH127", "error", REPLAY, "a teacher samples the rollouts, by routers of its own", "leave it out")


CHECKS = (router_dtype, router_replay)
