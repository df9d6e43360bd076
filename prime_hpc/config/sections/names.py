"""Names in the tree that are either known ones or a user's own code."""

import re
from collections.abc import Collection
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from prime_hpc.config.errors import nearest_path
from prime_hpc.config.named_code import ALGORITHMS, BACKENDS, OBJECTIVES, TRANSPORTS

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


_CORRECTION = "it is trainer.loss.correction, beside any objective"
_ELSEWHERE: dict[str, dict[str, str]] = {
    "an objective": {
        **dict.fromkeys(("ppo", "vanilla", "regular"), "it is ppo_clip"),
        "dual_clip": "it is ppo_clip, with trainer.loss.dual_clip",
        "dapo": "it is ppo_clip with trainer.loss.clip_high = 0.28; DAPO's other parts are gates of "
        "orchestrator.curriculum (advantage_range) and orchestrator.advantage.soft_overlong",
        "bnpo": "it is ppo_clip, normalised over the whole batch",
        "geo_mean": "it is gmpo",
        **dict.fromkeys(("dppo_tv", "dppo_kl"), "it is dppo, with trainer.loss.divergence"),
        **dict.fromkeys(("tis", "rollout_is", "importance_sampling"), f"{_CORRECTION}: type = truncate"),
        **dict.fromkeys(("mis", "icepop"), f"{_CORRECTION}: type = mask, with its low and high"),
        "clip_cov": "it is ppo_clip, or any other objective, with trainer.loss.covariance of type = clip",
        "kl_cov": "it is aipo, or any other objective, with trainer.loss.covariance of type = kl",
        "dro": "it is reinforce with trainer.loss.kl of target = behaviour, estimator = k2 and its beta as coef",
        "bypass_mode": "it is ppo_clip or reinforce: ratios are to the engine's log-probabilities as a rule",
        "m2po": "it is ppo_clip with trainer.loss.second_moment (0.04), clip_low = 1 and clip_high = 1000 (no clip)",
        "luspo": "it is gspo with trainer.loss.normalize = batch and batch_tokens = 1",
        "opsm": "it is trainer.loss.off_policy_mask, beside any objective",
        **dict.fromkeys(
            ("gpg", "reinforce++", "reinforce_plus_plus"),
            "it is reinforce or ppo_clip; its advantages are orchestrator.advantage",
        ),
        "cross_entropy": "it is nll",
    },
    "an algorithm": {
        "dapo": "it is grpo; DAPO's other parts are trainer.loss (ppo_clip, clip_high = 0.28), gates of "
        "orchestrator.curriculum (advantage_range) and orchestrator.advantage.soft_overlong",
        **dict.fromkeys(
            ("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "luspo", "clip_cov", "kl_cov"),
            "it is an objective, trainer.loss.type; its paper's advantages are grpo",
        ),
        "ppo": "it is gae, with trainer.critic; the clipped objective is trainer.loss.type = ppo_clip",
        **dict.fromkeys(
            ("vapo", "vc_ppo"), "it is gae, with trainer.critic: its length_adaptive_alpha, critic_lam, warmup_steps"
        ),
        **dict.fromkeys(
            ("reinforce++", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "reinforce_baseline"),
            "it is dr_grpo with orchestrator.advantage.scale = batch",
        ),
        **dict.fromkeys(("group_norm", "grpo_vectorized"), "it is grpo"),
        "rloo_vectorized": "it is rloo",
        "gpg": "it is dr_grpo, with trainer.loss.type = reinforce and trainer.loss.denominators = trained",
        **dict.fromkeys(("otb", "tir_optimal_token_baseline"), "it is optimal_token_baseline"),
        "grpo_passk": "it is pkpo, with orchestrator.advantage.pass_k = the rollouts of a prompt",
        **dict.fromkeys(("passk", "pass_k", "pass@k"), "it is pass_at_k, with orchestrator.advantage.pass_k"),
        "raw_reward": "it is reinforce",
        "normalize_then_sum": "it is gdpo, with orchestrator.advantage.scale = batch",
        "maxrl": "it is max_rl",
    },
}
"""Names that other suites give to what is called otherwise here -> the answer."""


def is_import_path(name: str) -> bool:
    """Return whether a name is written as `module:attribute`."""
    return _IMPORT_PATH.fullmatch(name) is not None


def known_or_import(name: str, known: Collection[str], what: str, form: str = "module:function") -> str:
    """`name` itself, where it is one of `known` or an import path.
    Raises ValueError: it is neither; names the nearest and all known ones."""
    if name in known or is_import_path(name):
        return name
    raise ValueError(f"{_unknown(name, known, what)}; your own is `{form}`")


def known_name(name: str, known: Collection[str], what: str) -> str:
    """`name` itself, where it is one of `known`. Raises ValueError: it is not; names the nearest and all known ones."""
    if name in known:
        return name
    raise ValueError(_unknown(name, known, what))


def _unknown(name: str, known: Collection[str], what: str) -> str:
    near, told = nearest_path(name, known), _ELSEWHERE.get(what, {}).get(name.lower().replace("-", "_"))
    hint = f"{told}; " if told else f"did you mean {near}? " if near else ""
    return f"{name!r} is not {what}: {hint}known are {', '.join(known)}"


ObjectiveName = Annotated[str, AfterValidator(partial(known_or_import, known=OBJECTIVES, what="an objective"))]
AdvantageName = Annotated[str, AfterValidator(partial(known_or_import, known=ALGORITHMS, what="an algorithm"))]
BackendName = Annotated[
    str,
    AfterValidator(partial(known_or_import, known=BACKENDS, what="an inference backend", form="module:ATTRIBUTE")),
]
TransportName = Annotated[str, AfterValidator(partial(known_name, known=TRANSPORTS, what="a weight transport"))]


_MAX_NAME_BYTES = 200


def directory_name(name: str) -> str:
    """Return a name that becomes a directory beside others. Raises a ValueError for one that would be another place."""
    if not name or "/" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise ValueError(f"{name!r} cannot name a directory: no slash, no line break or other control character")
    if name.startswith((".", "-", "~")):
        what = "is the directory itself or the one above" if name in (".", "..") else "begins with . or - or ~"
        raise ValueError(f"{name!r} {what}: choose a name that begins with a letter or a digit")
    if name != name.strip():
        raise ValueError(f"{name!r} begins or ends with a space")
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{name[:40]!r}... is {len(name.encode())} bytes long; at most {_MAX_NAME_BYTES}")
    return name
