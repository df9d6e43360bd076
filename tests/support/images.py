"""Samples with images for tiny models that see them (`tiny_vision`), and policies of those."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.trainer import ParallelConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.parallel.mesh import build_parallel
from tests.support.tiny_vision import make_image

WIDE, TALL, OTHER = (make_image(1), 6), (make_image(2, 32, 64), 8), (make_image(3), 6)
"""Images, each with the number of tokens that it stands for."""


class Shown(NamedTuple):
    """A sample as models take it."""

    ids: np.ndarray
    numbers: np.ndarray
    """Of each token's image among `images`, from 1; 0 of text."""
    images: tuple[bytes, ...]


def vision_policy(model: Path, vision: str = "frozen", **changes: Any) -> Policy:
    """The policy over this process's ranks."""
    config = ModelConfig.model_validate({"name": str(model), "vision": vision, "dtype": "float32", **changes})
    parallel = build_parallel(ParallelConfig().dims(torch.distributed.get_world_size()), "cpu")
    return load_policy(config, model, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=512)


def text(count: int, seed: int) -> list[int]:
    """Tokens of text."""
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def sample(policy: Policy, *parts: list[int] | tuple[bytes, int]) -> Shown:
    """A sample of text and images."""
    config = policy.hf.config
    ids: list[int] = []
    numbers: list[int] = []
    images: list[bytes] = []
    for part in parts:
        if isinstance(part, list):
            ids, numbers = ids + part, numbers + [0] * len(part)
            continue
        image, length = part
        images += [] if image in images else [image]
        middle = [config.image_token_id] * length
        ids += [config.vision_start_token_id, *middle, config.vision_end_token_id]
        numbers += [0, *[images.index(image) + 1] * length, 0]
    return Shown(np.array(ids, np.int32), np.array(numbers, np.int32), tuple(images))


def batch_of(samples: Sequence[Shown], micro_batches: list[list[int]]) -> RankBatch:
    """A batch of these, all of whose tokens train."""
    masks = [np.ones(len(s.ids), bool) for s in samples]
    images = [(s.numbers, s.images) for s in samples]
    return build_rank_batch(micro_batches, [s.ids for s in samples], masks, images=images)


def logprobs(policy: Policy, batch: RankBatch, index: int, *, share: bool = False) -> torch.Tensor:
    """Log-probabilities of a micro-batch's targets."""
    micro = make_micro_batch(
        batch,
        index,
        parallel=policy.parallel,
        share_prefixes=share,
        single_rows=policy.single_rows,
        image_inputs=policy.image_inputs,
    )
    with policy.packing(micro):
        return policy(micro)[0]
