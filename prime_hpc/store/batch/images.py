"""Images of a batch: each encoded image (PNG, JPEG, ...) stands once in a table, and tokens name it by its number.

Numbers begin at 1, so that 0 stands for a token of text. What a model sees of an image are the pixels that its
processor makes of the bytes; the trainer makes them anew, from the same bytes, so that files stay small.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


_ORIENTATION = 0x0112
"""EXIF's tag."""


class ImageTable:
    """Distinct encoded images in the order in which they came."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def number(self, image: bytes) -> int:
        """Return the number of an image, which is added where it is new."""
        return self._numbers.setdefault(image, len(self._numbers) + 1)

    def renumber(self, numbers: Numbers, images: Sequence[bytes]) -> Numbers:
        """Return int32[T] numbers of this table for those of another list of images (1: its first)."""
        known = np.array([0, *(self.number(image) for image in images)], np.int32)
        return known[numbers]

    def images(self) -> tuple[bytes, ...]:
        """Return all images, that of number 1 first."""
        return tuple(self._numbers)

    def arrays(self) -> tuple[Bytes, Offsets]:
        """Return all images behind each other, and where each begins and the last one ends."""
        images = self.images()
        offsets = np.concatenate([[0], np.cumsum([len(image) for image in images])]).astype(np.int64)
        return np.frombuffer(b"".join(images), np.uint8), offsets


def images_of(content: Bytes, offsets: Offsets) -> list[bytes]:
    """Return the images of a table's arrays."""
    return [content[a:b].tobytes() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def open_image(image: bytes) -> Any:
    """Return an encoded image in RGB as vLLM sees it, a PIL image: upright, whatever way the camera was held (EXIF),
    and on white where it is transparent. Raises what Pillow raises."""
    from PIL import Image, ImageOps

    with Image.open(BytesIO(image)) as opened:
        picture: Image.Image = opened
        with contextlib.suppress(Exception):  # a tag that cannot be read: as it lies
            picture = ImageOps.exif_transpose(opened)
        picture.load()
        if picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info:
            return picture.convert("RGB")
        picture = picture.convert("RGBA")
        shown = Image.new("RGB", picture.size, (255, 255, 255))
        shown.paste(picture, mask=picture.getchannel("A"))
        return shown


def upright_size(opened: Any) -> tuple[int, int]:
    """Return width and height of an opened PIL image as `open_image` shows it, without decoding it."""
    width, height = opened.size
    with contextlib.suppress(Exception):
        if opened.getexif().get(_ORIENTATION) in (5, 6, 7, 8):  # it lies on its side
            return height, width
    return width, height


def image_key(image: bytes) -> int:
    """Return a number that is the same for the same bytes, and another for others up to a chance of 2**-63."""
    return int.from_bytes(hashlib.sha256(image).digest()[:8], "little") >> 1


def image_keys(numbers: Numbers, images: Iterable[bytes]) -> npt.NDArray[np.int64]:
    """Return int64[T], `image_key` of each token's image, 0 where it has none."""
    return np.array([0, *map(image_key, images)], np.int64)[numbers]


def image_runs(numbers: Numbers, starts: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
    """Find where images stand: runs of tokens with the same number.

    Args:
        numbers: int32[T], of tokens behind each other.
        starts: bool[T], tokens at which a run ends whatever comes: the first ones of sequences or rows.

    Returns:
        int64[images, 3]: first token, end, number.
    """
    if not len(numbers):
        return np.zeros((0, 3), np.int64)
    begins = np.append(True, numbers[1:] != numbers[:-1])
    if starts is not None:
        begins |= starts
    first = np.flatnonzero(begins)
    runs = np.stack([first, np.append(first[1:], len(numbers)), numbers[first]], 1).astype(np.int64)
    return runs[runs[:, 2] > 0]
