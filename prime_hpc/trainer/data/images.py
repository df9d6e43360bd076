"""Images of a row: where they are read from, and the tokens that stand for them.

A chat template writes one placeholder for an image. The model is shown as many as its image processor makes embeddings
of it, which follows from the image's measures alone; pixels are made in the trainer, from the same bytes. Each image is
decoded once here (a JPEG at an eighth of its size), so that a broken one is named with its row before it trains.

Sources: `store.dataset.row_images`; paths are meant from the folder of the rows.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from prime_hpc.store.batch.images import upright_size
from prime_hpc.store.dataset.row_images import decode_data_url, stated
from prime_hpc.store.errors import PROOFS
from prime_hpc.store.io.retry_reads import read_bytes
from prime_hpc.trainer.batching.image_inputs import ImageInputs
from prime_hpc.trainer.data.messages import SFTDataError


@dataclass(frozen=True)
class EncodedImage:
    """An image of a row."""

    content: bytes
    """PNG, JPEG, ..., as it was given."""
    num_tokens: int


class ImageTokens:
    """Reads a model's images, and puts their tokens where a template shows them."""

    def __init__(self, model: Path) -> None:
        """Args:
            model: directory with config.json and preprocessor_config.json.
        Raises SFTDataError: one of them is not there, or is another's."""
        try:
            config = json.loads((model / "config.json").read_bytes())
            self.token: int = config["image_token_id"]
            self._merge: int = config["vision_config"]["spatial_merge_size"]
            self._processor = ImageInputs.load(model, self._merge).processor
        except (OSError, ValueError, KeyError) as error:
            raise SFTDataError(f"{model} is of no model that sees images, as model.vision has it: {error}") from error

    @property
    def settings(self) -> str:
        """Settings that decide how many tokens an image has."""
        return f"{self._processor.size} {self._processor.patch_size} {self._merge}"

    def read(self, source: Any, folder: Path | None) -> EncodedImage:
        """Return the image of a source. `source`: see `store.dataset.row_images`.
        Raises SFTDataError: it cannot be had, is no image, or is too large."""
        content, name = _content(source, folder)
        width, height = _measures(content, name)
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise SFTDataError(f"{name}: {width} x {height} pixels: {error}; crop it") from error
        return EncodedImage(content, patches // self._merge**2)

    def expand(
        self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], images: Sequence[EncodedImage]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
        """Repeat each placeholder as often as its image has tokens; none of them is trained.

        Args:
            token_ids, loss_mask: [L], with one placeholder an image.
            images: in the order of their placeholders.

        Returns:
            [M] token ids, loss mask, and the number of each token's image: 1 for the first one, 0 for text.

        Raises:
            SFTDataError: there are not as many placeholders as images.
        """
        places = np.flatnonzero(token_ids == self.token)
        if len(places) != len(images):
            raise SFTDataError(
                f"{len(images)} images, and {len(places)} places for them in what the chat template writes: it must "
                "show each image once (sft.data.chat_template), and no text may spell the image's token"
            )
        counts = np.ones(len(token_ids), np.int64)
        counts[places] = [image.num_tokens for image in images]
        numbers = np.zeros(len(token_ids), np.int32)
        numbers[places] = np.arange(1, len(images) + 1)
        numbers = np.repeat(numbers, counts)
        return np.repeat(token_ids, counts), np.repeat(loss_mask, counts) & (numbers == 0), numbers


def _content(source: Any, folder: Path | None) -> tuple[bytes, str]:
    """Return an image's bytes, and its name for people. An OSError: the file system does not answer."""
    source = stated(source)
    if isinstance(source, bytes | bytearray):
        return bytes(source), f"an image of {len(source)} bytes"
    if not isinstance(source, str):
        raise SFTDataError(f"expected an image as a path, a data: URL or bytes, got {source!r:.120}")
    name = f"image {source:.200}"
    if source.startswith("data:"):
        head = source.partition(",")[0][:40]
        try:
            return decode_data_url(source), f"an image of {head}"
        except ValueError as error:
            raise SFTDataError(f"image {head},...: {error}") from error
    if source.startswith(("http://", "https://")):
        raise SFTDataError(f"{name}: images are not downloaded; save it beside the rows and name the file")
    path = Path(unquote(source.removeprefix("file://")) if source.startswith("file://") else source)
    if not path.is_absolute():
        if folder is None:
            raise SFTDataError(f"{name}: a relative path, and these rows lie in no folder: put the image into the row")
        path = folder / path
    try:
        return read_bytes(path), f"image {path}"
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in PROOFS:
            raise  # nothing is known of the image: its row is not a bad one
        why = getattr(error, "strerror", None) or error
        raise SFTDataError(f"{name}: {why}; relative paths are meant from {folder}") from error


def _measures(content: bytes, name: str) -> tuple[int, int]:
    """Return width and height of an image that can be decoded."""
    from PIL import Image

    most = Image.MAX_IMAGE_PIXELS or 0
    try:
        with Image.open(io.BytesIO(content)) as picture:
            width, height = upright_size(picture)
            if width * height <= most:
                picture.draft("RGB", (max(1, picture.width // 8), max(1, picture.height // 8)))
                picture.load()
    except Image.DecompressionBombError as error:
        raise SFTDataError(f"{name}: {error}; make it smaller") from error
    except Exception as error:  # decoders raise errors of many classes
        raise SFTDataError(f"{name} cannot be decoded ({type(error).__name__}: {error})") from error
    if width * height > most:
        raise SFTDataError(f"{name}: {width} x {height} pixels, more than {most:,}; make it smaller")
    return width, height
