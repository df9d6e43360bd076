"""Prompts of rows with images: content parts with addresses, as OpenAI's API takes them.

A file is named here and read before the first turn (`envs.images`), so that a million rows hold no pictures.
"""

from pathlib import Path
from typing import Any

from prime_hpc.envs.rows.reading import IMAGES, Row
from prime_hpc.store.dataset.row_images import (
    as_sources,
    has_marks,
    image_parts,
    other_media,
    place_images,
    shows_other_media,
    stated,
)


def with_images(prompt: Any, row: Row, folder: Path | None, named: str | None = None) -> tuple[Any, str | None]:
    """Return a prompt with its images, and the column that they come from; a prompt of text as it is, and None.

    Args:
        prompt: a text or messages.
        folder: from which paths are meant; None: there is none.
        named: the column, where it is stated; else the first of `images`, `image`.

    Raises:
        ValueError: images without a place, places without an image, a path that is meant from nowhere, a video.
    """
    column = named or next((name for name in IMAGES if row.get(name)), None)
    given = as_sources(row.get(column)) if column is not None else []
    if isinstance(prompt, str) and not given and not shows_other_media(prompt):
        return prompt, column  # as nearly all rows: of millions each microsecond counts
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return prompt, None
    if other := other_media(messages, row):
        raise ValueError(other)
    if not any(image_parts(messages)) and not (given and has_marks(messages)):
        if named is None and all(isinstance(one, str) and not one.startswith("data:") for one in given):
            return prompt, None  # a column of something else, for all that is known
        if not given:
            return prompt, column
    placed, sources = place_images(messages, given)
    addresses = iter([_address(source, folder) for source in sources])
    for message in placed:
        if isinstance(message["content"], list):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": next(addresses)}} if part == {"type": "image"} else part
                for part in message["content"]
            ]
    return placed, column


def _address(source: Any, folder: Path | None) -> str:
    found = stated(source)
    if not isinstance(found, str):
        raise ValueError(f"expected an image as a path, an address or bytes, got {found!r:.120}")
    if found.startswith(("data:", "http://", "https://", "file://")) or Path(found).is_absolute():
        return found
    if folder is None:
        raise ValueError(f"image {found:.200}: a relative path, and these rows lie in no folder")
    return str(folder.absolute() / found)
