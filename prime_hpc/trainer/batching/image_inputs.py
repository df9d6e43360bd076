"""Inputs of a model that sees images beside a micro-batch's tokens: pixels, grids, and places in three dimensions.

An image of t x h x w patches stands in a sample as t * (h / m) * (w / m) tokens, where m x m patches become one
embedding. Its tokens are placed by frame, row and column from the place that the next token of text would have; what
follows goes on behind the image's longer side (multimodal rotary embedding: Qwen2-VL, arXiv 2409.12191, section 2.1).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prime_hpc.store.batch.images import image_runs, open_image

CACHE_BYTES = 256 << 20
"""Pixels kept: images come again in other micro-batches, and in later steps."""


class ImageError(ValueError):
    """An image of a batch cannot be shown to the model as the engine showed it."""


@dataclass(frozen=True)
class MicroBatchImages:
    """The images of a micro-batch's computed tokens, in their order."""

    pixel_values: torch.Tensor
    """float32[patches, values of a patch]."""
    grid_thw: torch.Tensor
    """int64[images, 3], patches of each: frames, rows, columns."""
    tokens: torch.Tensor
    """int64[tokens of all images], where they stand among the computed tokens, rows behind each other."""


@dataclass(frozen=True)
class Pixels:
    """One image as the model's processor gives it."""

    values: NDArray[np.float32]
    """[patches, values of a patch]"""
    grid: tuple[int, int, int]
    """Patches: frames, rows, columns."""


class ImageInputs:
    """A model's image processor, and how its tokens are placed. For one thread at a time."""

    def __init__(self, processor: Any, merge: int) -> None:
        """`merge`: m, patches of one embedding in each direction."""
        self.processor, self.merge = processor, merge
        self._cache: OrderedDict[bytes, Pixels] = OrderedDict()
        self._cached_bytes = 0

    @classmethod
    def load(cls, source: Path, merge: int) -> "ImageInputs":
        """Read the processor that lies beside a model's weights: that of the engines, if torchvision is here as there.
        Raises ValueError: there is none."""
        from transformers import AutoImageProcessor

        try:
            return cls(AutoImageProcessor.from_pretrained(source), merge)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{source} holds no image processor (preprocessor_config.json): {error}") from error

    def pixels(self, image: bytes) -> Pixels:
        """Return an encoded image as the model takes it. Raises ImageError: it is none."""
        found = self._cache.get(image)
        if found is None:
            found = self._processed(image)
            self._cache[image] = found
            self._cached_bytes += found.values.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].values.nbytes
        else:
            self._cache.move_to_end(image)
        return found

    def _processed(self, image: bytes) -> Pixels:
        from PIL import Image

        try:
            picture = open_image(image)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            # None: Pillow's errors are OSErrors, and no file system has a part in these bytes
            raise ImageError(f"an image of {len(image)} bytes cannot be read ({error})") from None
        made = self.processor(images=[picture], return_tensors="np")
        frames, rows, columns = (int(n) for n in made["image_grid_thw"][0])
        return Pixels(np.asarray(made["pixel_values"], np.float32), (frames, rows, columns))

    def num_tokens(self, pixels: Pixels) -> int:
        """Tokens that an image stands for."""
        frames, rows, columns = pixels.grid
        return frames * (rows // self.merge) * (columns // self.merge)

    def blank(self) -> Pixels:
        """Return the smallest image, for a rank that has none where others do."""
        merge, size = self.merge, int(self.processor.patch_size)
        width = 3 * int(self.processor.temporal_patch_size) * size * size
        return Pixels(np.zeros((merge * merge, width), np.float32), (1, merge, merge))

    def lay_out(
        self,
        images: NDArray[np.int32],
        encoded: Callable[[int], bytes],
        positions: NDArray[np.int64],
        source: NDArray[np.int64] | None,
        row_positions: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], MicroBatchImages]:
        """Place the computed tokens of a micro-batch that holds an image, and make its images' pixels.

        Args:
            images: int32[T], number of each token's image, 0 of text.
            encoded: returns the image of a number.
            positions: int64[T], the place of each token in its sample.
            source: int64[rows * L], the token of the micro-batch that each computed one is, see `Rows.source`.
            row_positions: int64[rows * L], as `positions` of the computed tokens.

        Returns:
            int64[4, rows * L], places: of text, and the three of the rotary embedding; the images.

        Raises:
            ImageError: an image's tokens are not as many as its pixels ask for.
        """
        runs = image_runs(images, positions == 0)
        shown = {number: self.pixels(encoded(number)) for number in np.unique(runs[:, 2]).tolist()}
        for first, end, number in runs.tolist():
            if end - first != (wanted := self.num_tokens(shown[number])):
                raise ImageError(
                    f"an image has {end - first} tokens in the batch, and {wanted} by its size (patches "
                    f"{shown[number].grid}): is preprocessor_config.json beside model.name that of the engines?"
                )
        places = self._places(positions, [(first, end, shown[number].grid) for first, end, number in runs.tolist()])
        numbers = np.zeros(len(images), np.int64)
        numbers[runs[:, 0]] = runs[:, 2]  # an image's first token stands for it, as often as it is computed
        if source is not None:
            real = source >= 0
            places = np.where(real, places[:, source], row_positions)
            numbers, images = np.where(real, numbers[source], 0), np.where(real, images[source], 0)
        chosen = [shown[number] for number in numbers[numbers > 0].tolist()]
        return np.concatenate([row_positions[None], places]), as_tensors(chosen, np.flatnonzero(images))

    def _places(
        self, positions: NDArray[np.int64], runs: Sequence[tuple[int, int, tuple[int, int, int]]]
    ) -> NDArray[np.int64]:
        """int64[3, T]: frame, row and column of every token."""
        places = np.tile(positions, (3, 1))
        ends = np.append(np.flatnonzero(positions == 0)[1:], len(positions))
        shift, sample = 0, -1
        for first, end, (frames, rows, columns) in runs:
            last = int(ends[np.searchsorted(ends, first, side="right")])
            if last != sample:
                shift, sample = 0, last
            rows, columns = rows // self.merge, columns // self.merge
            begin = int(positions[first]) + shift
            grid = np.stack(np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij"))
            places[:, first:end] = begin + grid.reshape(3, -1)
            shift += max(rows, columns) - (end - first)
            places[:, end:last] = positions[end:last] + shift
        return places


def as_tensors(images: Sequence[Pixels], tokens: NDArray[np.int64] | None = None) -> MicroBatchImages:
    """Join images, of which there is one at least, and say where their tokens stand."""
    values = np.concatenate([image.values for image in images])
    grids = torch.tensor([image.grid for image in images])
    return MicroBatchImages(
        torch.from_numpy(values), grids, torch.from_numpy(np.zeros(0, np.int64) if tokens is None else tokens)
    )


def random_image(seed: int, width: int = 64, height: int = 64) -> bytes:
    """Return a PNG of random pixels, the same for the same seed."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
