"""The code that a config may name: objectives, advantage algorithms, inference backends, weight transports, one
row each.

A row says where the code is (`module:attribute`, imported by the role that runs it) and the facts about it that the
config, lint and the other rooms must know without importing it. To add one, write its file and a row here. Code of a
user's own is named by its import path.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """The trust region's width on both sides of a ratio of 1 (`gmpo`: of its logarithm; `dppo`, `ipo`: of a
    probability)."""

    low: float
    high: float


@dataclass(frozen=True)
class ObjectiveEntry:
    """An objective of `trainer.loss.type`, with what its paper sets."""

    place: str
    normalize: Literal["token", "sequence", "batch"] = "token"
    """The divisor of a token's loss with `trainer.loss.normalize = auto`."""
    bounds: Bounds = Bounds(0.2, 0.2)
    """Its own, used where `clip_low` and `clip_high` state none."""
    kl_bounds: Bounds | None = None
    """The same with `divergence = kl`, where that differs."""
    clips: bool = True
    """It takes `trainer.loss.clip_low` and `clip_high`."""
    dual_clip: bool = False
    """It takes `trainer.loss.dual_clip`."""
    masks_mismatch: bool = False
    """It masks tokens by their distance to the engine's policy itself: no importance correction beside it."""
    imitates: bool = False
    """It learns the batch's tokens whoever sampled them: it has no importance ratio and looks at no advantage."""


_TRAINER = "prime_hpc.trainer.objectives.policy_gradient"
OBJECTIVES = {
    "aipo": ObjectiveEntry(f"{_TRAINER}.aipo:aipo", clips=False),
    "reinforce": ObjectiveEntry(f"{_TRAINER}.reinforce:reinforce", clips=False),
    "ppo_clip": ObjectiveEntry(f"{_TRAINER}.ppo_clip:ppo_clip", dual_clip=True),
    "grpo": ObjectiveEntry(f"{_TRAINER}.grpo:grpo", "sequence", dual_clip=True),
    "dr_grpo": ObjectiveEntry(f"{_TRAINER}.grpo:dr_grpo", "batch", dual_clip=True),
    "gspo": ObjectiveEntry(f"{_TRAINER}.gspo:gspo", "sequence", Bounds(3e-4, 4e-4)),
    "gmpo": ObjectiveEntry(f"{_TRAINER}.gmpo:gmpo", "sequence", Bounds(0.4, 0.4)),
    "sapo": ObjectiveEntry(f"{_TRAINER}.sapo:sapo", "sequence", clips=False),
    "vespo": ObjectiveEntry(f"{_TRAINER}.vespo:vespo", clips=False),
    "cispo": ObjectiveEntry(f"{_TRAINER}.cispo:cispo", bounds=Bounds(1.0, 4.0)),
    "dppo": ObjectiveEntry(f"{_TRAINER}.dppo:dppo", kl_bounds=Bounds(0.05, 0.05), masks_mismatch=True),
    "ipo": ObjectiveEntry(f"{_TRAINER}.ipo:ipo", bounds=Bounds(0.1, 0.1), masks_mismatch=True),
    "nll": ObjectiveEntry("prime_hpc.trainer.objectives.nll:nll", clips=False, imitates=True),
}
"""Name -> objective. One of your own (`module:function`) has the defaults."""


@dataclass(frozen=True)
class AlgorithmEntry:
    """An algorithm of `orchestrator.advantage.type`."""

    place: str
    min_group: int = 2
    """Fewest rollouts of a prompt that it can score; 2: it compares them."""
    teacher: Literal["", "model", "self", "peer"] = ""
    """The scorer of the tokens before it is called: nobody, `orchestrator.teacher`, or the policy itself, shown the
    task's demonstration (`self`) or another rollout of the group that has succeeded (`peer`)."""
    imitates: bool = False
    """`orchestrator.teacher` samples in the policy's place."""
    critic: bool = False
    """It gives tokens rewards, of which `trainer.critic` makes advantages."""
    greedy: bool = False
    """Each prompt has one more rollout, of the likeliest tokens, which never trains: it is told that one's reward."""


_ADVANTAGES = "prime_hpc.orchestrator.algorithms"
ALGORITHMS = {
    "grpo": AlgorithmEntry(f"{_ADVANTAGES}.grpo:grpo"),
    "grpo_no_std": AlgorithmEntry(f"{_ADVANTAGES}.grpo:dr_grpo"),
    "dr_grpo": AlgorithmEntry(f"{_ADVANTAGES}.grpo:dr_grpo"),
    "grpo_shuffled": AlgorithmEntry(f"{_ADVANTAGES}.shuffled:grpo_shuffled"),
    "gdpo": AlgorithmEntry(f"{_ADVANTAGES}.gdpo:gdpo"),
    "rloo": AlgorithmEntry(f"{_ADVANTAGES}.rloo:rloo"),
    "remax": AlgorithmEntry(f"{_ADVANTAGES}.rloo:remax", min_group=1, greedy=True),
    "opo": AlgorithmEntry(f"{_ADVANTAGES}.opo:opo"),
    "optimal_token_baseline": AlgorithmEntry(f"{_ADVANTAGES}.opo:OptimalTokenBaseline"),
    "max_rl": AlgorithmEntry(f"{_ADVANTAGES}.max_rl:max_rl"),
    "pass_at_k": AlgorithmEntry(f"{_ADVANTAGES}.pass_at_k:pass_at_k"),
    "pkpo": AlgorithmEntry(f"{_ADVANTAGES}.pass_at_k:pkpo"),
    "rae": AlgorithmEntry(f"{_ADVANTAGES}.rae:RoleAdvantage", min_group=1),
    "reinforce": AlgorithmEntry(f"{_ADVANTAGES}.reinforce:reinforce", min_group=1),
    "gae": AlgorithmEntry(f"{_ADVANTAGES}.reinforce:TokenRewards", min_group=1, critic=True),
    "none": AlgorithmEntry(f"{_ADVANTAGES}.reinforce:reinforce", min_group=1),
    "hierarchical_grpo": AlgorithmEntry(f"{_ADVANTAGES}.hierarchical_grpo:HierarchicalGRPO", min_group=1),
    "opd": AlgorithmEntry(f"{_ADVANTAGES}.opd:Distillation", min_group=1, teacher="model"),
    "opsd": AlgorithmEntry(f"{_ADVANTAGES}.opd:Distillation", min_group=1, teacher="self"),
    "sdpo": AlgorithmEntry(f"{_ADVANTAGES}.opd:Distillation", teacher="peer"),
    "sft": AlgorithmEntry(f"{_ADVANTAGES}.sft_distill:sft", min_group=1, imitates=True),
}
"""Name -> algorithm. One of your own says `min_group`, `teacher` and `greedy` as attributes, read where it runs, and
`greedy` in its source before (`says_so`)."""

BACKENDS = {
    "vllm": "prime_hpc.inference.vllm.backend:VLLM",
    "transformers": "prime_hpc.inference.transformers.backend:TRANSFORMERS",
}
"""Inference backend -> where it is (`prime_hpc/inference/backend.py` states what it must be able to)."""

TRANSPORTS = {
    "files": "prime_hpc.weight_transport.files:FILES",
    "delta": "prime_hpc.weight_transport.delta:DELTA",
    "gloo": "prime_hpc.weight_transport.network.transport:GLOO",
    "nccl": "prime_hpc.weight_transport.network.transport:NCCL",
}
"""Weight transports (`weights.transport`): `WeightTransport` of prime_hpc/weight_transport/transport.py."""

NETWORK_TRANSPORTS = ("gloo", "nccl")
"""Those whose versions go from memory to memory: engines receive them by themselves."""

NAMES: dict[str, Collection[str]] = {
    "ObjectiveName": OBJECTIVES,
    "AdvantageName": ALGORITHMS,
    "BackendName": BACKENDS,
    "TransportName": TRANSPORTS,
}
"""Type of a key in the schema -> the names that it takes besides an import path."""


def import_object(name: str, key: str) -> Any:
    """Import the function or class at `module:attribute`.
    Raises ConfigError: the import fails, or what is there cannot be called; names the key."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything, and hold what is no Python
        raise ConfigError(f"cannot import {name!r}: {type(error).__name__}: {error}", key) from error
    if not callable(found):
        raise ConfigError(f"{name!r} is a {type(found).__name__}, not a function or class", key)
    return found


def find_module(module: str) -> ModuleSpec | None:
    """Return where a module is, looked up without importing the packages above it.
    Raises ImportError or ValueError: a module that is loaded says nothing of where it is from."""
    parts = module.split(".")
    spec = find_spec(parts[0])  # also by the finders of editable installs
    for number in range(1, len(parts)):
        if spec is None or not spec.submodule_search_locations:
            return None
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), list(spec.submodule_search_locations))
    return spec


def says_so(name: str, attribute: str) -> bool:
    """Return whether the function or class at `module:attribute` has an attribute that is true: of a module that is
    not loaded as far as its source tells, which is read and not run. False where it cannot be found."""
    module, _, own = name.partition(":")
    if (loaded := sys.modules.get(module)) is not None:
        return bool(getattr(getattr(loaded, own, None), attribute, False))
    try:
        spec = find_module(module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec is not None and spec.origin is not None else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return False
    return tree is not None and _is_written(tree.body, own, attribute)


def _is_written(body: Sequence[ast.stmt], owner: str, attribute: str) -> bool:
    """Return whether statements give a function or class a true attribute, itself or by a class that it extends."""
    found = False
    for place, node in enumerate(body):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            inherited = any(_is_written(body[:place], base, attribute) for base in bases)
            found = _last_assigned(node.body, attribute, inherited)
        found = _last_assigned([node], f"{owner}.{attribute}", found)
    return found


def _last_assigned(body: Sequence[ast.stmt], target: str, before: bool) -> bool:
    """Return whether the last constant that statements assign to a name is true; `before` where none does."""
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if target in map(ast.unparse, targets):
            before = bool(node.value.value)
    return before


def signature_of(function: Callable[..., Any], follow_wrapped: bool = True) -> inspect.Signature:
    """Return the parameters of a function as `inspect.signature` does, whatever names its annotations hold: Python 3.14
    evaluates them when asked, and what is imported for type checkers alone is not there."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF)
    return inspect.signature(function, follow_wrapped=follow_wrapped)
