"""Memory of what makes embeddings of images (a vision transformer and its mergers), from a model's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_hpc.config.families import IMAGE_SHARE


@dataclass(frozen=True)
class VisionFacts:
    """Shape of a vision transformer of the kind of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5."""

    num_params: int
    depth: int
    kept: int
    """Values that the backward pass of one block takes, of the patches of one token."""
    ends: int
    """The same of what is before and behind all blocks: pixels, and the mergers."""

    def tower_bytes(
        self, state: float | None, tokens: float, width: int, ranks: int, shares: float, later: float
    ) -> float:
        """Return the bytes that it takes of a trainer's GPU.

        Every rank gathers it whole, as it does the token tables; its blocks are not computed again
        (`model.ac` is of the language model's). Frozen, it has no gradients, and one block's values, which are gone
        before the language model has its own.

        Args:
            state: bytes of a parameter, its gradient and its optimizer state; None: it is frozen.
            tokens: of a micro-batch.
            width: bytes of a value in the compute type.
            ranks: of the trainer.
            shares: ranks that share one copy.
            later: bytes that the language model's values and logits take.
        """
        whole = self.num_params * width * ((ranks > 1) + (state is not None))
        of_token = tokens * IMAGE_SHARE * width
        kept = of_token * (self.kept * self.depth + self.ends) if state is not None else of_token * self.kept - later
        return self.num_params * (state or 4) / shares + whole + max(kept, 0.0)


def vision_facts(config: Mapping[str, Any]) -> VisionFacts | None:
    """Return the shape of the model's part that sees images; None where it has none, or one of another kind."""
    stated = config.get("vision_config")
    try:
        if not isinstance(stated, Mapping):
            return None
        is_qwen2 = "embed_dim" in stated  # Qwen2-VL, whose hidden_size is the language model's
        if is_qwen2:
            width = int(stated["embed_dim"])
            stated = {**stated, "intermediate_size": width * int(stated.get("mlp_ratio") or 4)}
            stated |= {"out_hidden_size": stated["hidden_size"], "hidden_size": width}
        hidden, inner, depth, out = (
            int(stated[name]) for name in ("hidden_size", "intermediate_size", "depth", "out_hidden_size")
        )
        places = int(stated.get("num_position_embeddings") or 0)
        patch, frames = int(stated["patch_size"]), int(stated.get("temporal_patch_size", 2))
        merge = int(stated["spatial_merge_size"]) ** 2
        merged = hidden * merge
        layers = stated.get("deepstack_visual_indexes")
        behind = len(layers) if isinstance(layers, list) else 0
    except (KeyError, TypeError, ValueError):
        return None
    ends = merge * 3 * 3 * frames * patch * patch + (1 + behind) * 4 * merged  # pixels in float32 and the compute type
    embedding = 3 * frames * patch * patch * hidden
    if "fullatt_block_indexes" in stated:  # Qwen2.5-VL: RMS norms, gated feed-forward blocks, places by rotation alone
        block = 4 * hidden * hidden + 3 * hidden * inner + 7 * hidden + 2 * inner
        mergers = merged * merged + merged * out + merged + out + hidden
        return VisionFacts(depth * block + mergers + embedding, depth, merge * (10 * hidden + 4 * inner), ends)
    block = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    mergers = (1 + behind) * (merged * merged + merged * out + merged + out) + 2 * hidden + behind * 2 * merged
    beside = 0 if is_qwen2 else hidden + places * hidden  # the embedding's bias, and places that are learnt
    return VisionFacts(depth * block + mergers + embedding + beside, depth, merge * (10 * hidden + 2 * inner), ends)
