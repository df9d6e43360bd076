"""Images of a rehearsal: pixels without values, in grids whose sizes the code of what sees images reads as they are."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prime_hpc.config.families import IMAGE_SHARE
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching import image_inputs
from prime_hpc.trainer.batching.image_inputs import ImageInputs, MicroBatchImages, Pixels
from prime_hpc.trainer.model import policy, vision
from prime_hpc.trainer.rehearsal.tracker import HOST, MemoryTracker


class PretendedImages(ImageInputs):
    """Images of one size, the largest that the model's processor makes, of which there are no pixels."""

    def __init__(self, source: Path, merge: int) -> None:
        """Args:
        source: holds config.json, and preprocessor_config.json where somebody put it there.
        merge: see `ImageInputs`.
        """
        shape = json.loads((source / "config.json").read_text(encoding="utf-8"))["vision_config"]
        patch, frames = int(shape.get("patch_size", 16)), int(shape.get("temporal_patch_size", 2))
        super().__init__(SimpleNamespace(patch_size=patch, temporal_patch_size=frames), merge)
        stated, self.largest = source / "preprocessor_config.json", None
        if stated.is_file():
            sizes = json.loads(stated.read_text(encoding="utf-8"))
            pixels = sizes.get("max_pixels") or (sizes.get("size") or {}).get("longest_edge")
            self.largest = max(1, int(pixels) // (patch * merge) ** 2) if pixels else None
        self._shown, self.words = self.blank(), ""

    def pixels(self, image: bytes) -> Pixels:
        """Return the one that is shown."""
        return self._shown

    def show(self, batch: RankBatch, longest: int) -> RankBatch:
        """Put images, whose tokens do not train, into samples that are all as long as this."""
        budget = max(1, int(longest * IMAGE_SHARE))
        size = max(1, min(self.largest or budget, longest - 2))
        rows = isqrt(size)
        columns = size // rows
        size, merge = rows * columns, self.merge
        grid = (1, rows * merge, columns * merge)
        self._shown = Pixels(np.broadcast_to(self._shown.values[:1], (prod(grid), self._shown.values.shape[1])), grid)
        count = max(1, budget // (size + 1))  # one token of text before each
        sample = np.zeros(longest, np.int32)
        for at in range(count):
            sample[1 + at * (size + 1) :][:size] = 1
        images = np.tile(sample, len(batch.token_ids) // longest)
        content, offsets = np.zeros(1, np.uint8), np.array([0, 1], np.int64)
        mask = batch.loss_mask & (images == 0)
        of = "as preprocessor_config.json lets them become" if self.largest else "no preprocessor_config.json says more"
        self.words = f"a sample of {longest} tokens holds {count} image(s) of {size} tokens ({of})"
        return replace(batch, images=images, image_bytes=content, image_offsets=offsets, loss_mask=mask)


class _GridsKnown(TorchDispatchMode):
    """Compute what comes of real tensors alone, grids and places, with its values: sizes are read from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if tensors:
            is_real = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
        else:  # FSDP's buffers are made so as well
            is_real = "arange" in str(func) or kwargs.get("dtype") in (torch.int32, torch.int64, torch.bool)
        if not is_real:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def pretend_images(change: Callable[..., None], tracker: MemoryTracker, *, on_gpu: bool) -> None:
    """Let a model that sees images see `PretendedImages`."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel  # of no use to a model of text
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    embeddings = vision.image_embeddings

    def image_embeddings(body: Any, images: MicroBatchImages) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with _GridsKnown():
            return embeddings(body, images)

    def as_tensors(images: Sequence[Pixels], tokens: NDArray[np.int64] | None = None) -> MicroBatchImages:
        patches = sum(len(image.values) for image in images)
        with tracker.kind("activations" if on_gpu else HOST):  # a CPU's are numpy's
            values = torch.empty(patches, images[0].values.shape[1])
        with unset_fake_temporarily():
            grids = torch.tensor([image.grid for image in images])
            return MicroBatchImages(
                values, grids, torch.from_numpy(np.zeros(0, np.int64) if tokens is None else tokens)
            )

    change(policy.ImageInputs, "load", PretendedImages)
    change(vision, "image_embeddings", image_embeddings)
    for module in (image_inputs, vision):
        change(module, "as_tensors", as_tensors)
    for model in (Qwen3VLTextModel, Qwen3VLMoeTextModel):
        change(model, "_deepstack_process", _deepstack_process)


def _deepstack_process(_: Any, hidden: torch.Tensor, _mask: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Add at as many places as transformers does at those of a mask, whose number is a value."""
    hidden = hidden.clone()
    flat, at = hidden.view(-1, hidden.shape[-1]), torch.arange(len(embeddings))
    flat[at] = flat[at] + embeddings.to(hidden.dtype)
    return hidden
