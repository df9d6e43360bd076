"""Models with latent attention (MLA) on CPU engines: which of vLLM's kernels follow the policy.

Where a CPU has AMX, vLLM 0.32 takes kernels that pack `kv_b_proj` at the start and drop it: a new version finds nothing
to be written into, and float32 does not start. Its plain ones keep it, in the one size that DeepSeek's models have.
"""

from collections.abc import Mapping
from typing import Any

FAMILIES = frozenset(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_linear", "longcat_flash"))
"""model_type of those that vLLM 0.32 serves with it, without the sparse ones, which it has for GPUs alone."""
PLAIN_SIZE = 576
"""Values that the plain kernels keep of a token in each layer."""
PLAIN = {"attention_backend": "CPU_MLA"}


def latent_size(config: Mapping[str, Any]) -> int | None:
    """Return how many values of a token a layer keeps by a model's config.json; None without latent attention."""
    text = config.get("text_config")
    own = {**config, **text} if isinstance(text, Mapping) else config
    rank, rotary = own.get("kv_lora_rank"), own.get("qk_rope_head_dim")
    if own.get("model_type") not in FAMILIES or not isinstance(rank, int) or not isinstance(rotary, int):
        return None
    return rank + rotary


def cpu_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which an engine on a CPU can load new versions of such a model; none for others."""
    return dict(PLAIN) if latent_size(config) == PLAIN_SIZE else {}
