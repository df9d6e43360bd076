"""Images in messages: OpenAI's content parts with `data:` URLs, which hold the encoded image (PNG, JPEG, ...) itself.

The engine and the trainer make the model's input from the same bytes. A task may also name a file or an address; it is
read once, before the first turn, so that what was seen cannot change and nothing is fetched twice.

Messages are read by attribute (verifiers' `Message` and its parts), so nothing here imports verifiers.
"""

import asyncio
import base64
import io
import mimetypes
from collections.abc import Iterable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from prime_hpc.store.dataset.row_images import decode_data_url
from prime_hpc.store.io.retry_reads import read_bytes

FETCH_S = 30.0
"""How long an address that holds an image may say nothing."""
MOST_BYTES = 32 << 20
"""Of one encoded image."""
_KINDS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


class ImageError(ValueError):
    """An image cannot be read, or is none."""


def image_urls(messages: Iterable[Any]) -> list[str]:
    """Return the URLs of all images in order."""
    return [
        part.image_url.url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if part.type == "image_url"
    ]


def decode_image(url: str) -> bytes:
    """Return the encoded image that a `data:` URL holds, byte for byte.
    Raises ImageError: it is no `data:` URL of an image in base64."""
    try:
        return decode_data_url(url)
    except ValueError as error:
        raise ImageError(f"image {_short(url)}: {error}") from error


def encode_image(content: bytes, kind: str | None = None) -> str:
    """Return encoded bytes as a `data:` URL; `kind`: its media type, looked up in the bytes where it is not given."""
    if kind is None:
        webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
        found = next((kind for magic, kind in _KINDS.items() if content.startswith(magic)), None)
        kind = "image/webp" if webp else found or "image/unknown"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _described(content: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return f"{image.width}x{image.height} {(image.format or '?').lower()}"


def in_words(url: str) -> str:
    """Return what logs show of an image, e.g. `[image 48x32 png, 1.2 kB]`: never the megabytes that it holds."""
    try:
        content = decode_image(url)
    except ImageError:
        return f"[image {_short(url)}]"
    try:
        about = _described(content)
    except (ImportError, OSError, ValueError, SyntaxError, ArithmeticError):  # no Pillow here, or no image
        about = url.partition(";")[0].rpartition("/")[2]
    return f"[image {about}, {len(content) / 1000:.1f} kB]"


def without_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of the API whose images are named alone: what a renderer that writes one token for each needs."""
    return [
        message | {"content": [_named(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _named(part: Any) -> Any:
    is_image = isinstance(part, dict) and part.get("type") == "image_url"
    return {"type": "image_url", "image_url": {"url": "image"}} if is_image else part


async def inlined(messages: list[Any], *, fetch: bool) -> list[Any]:
    """Return messages with images that are files as `data:` URLs; with `fetch` those at addresses, too.
    Raises ImageError: one cannot be read; names it."""
    found = []
    for message in messages:
        content = message.content
        if isinstance(content, list) and any(_is_elsewhere(part, fetch) for part in content):
            parts = [await _inlined(part) if _is_elsewhere(part, fetch) else part for part in content]
            message = message.model_copy(update={"content": parts})
        found.append(message)
    return found


def _is_elsewhere(part: Any, fetch: bool) -> bool:
    if part.type != "image_url" or part.image_url.url.startswith("data:"):
        return False
    return fetch or not _is_address(part.image_url.url)


def _is_address(url: str) -> bool:
    return url.startswith(("http://", "https://"))


async def _inlined(part: Any) -> Any:
    url = part.image_url.url
    content = await asyncio.to_thread(_read, url)
    encoded = encode_image(content)
    if encoded.startswith("data:image/unknown"):
        kind = mimetypes.guess_type(urlsplit(url).path)[0] or ""
        if not kind.startswith("image/"):
            raise ImageError(f"{_short(url)} is no image: it begins with {content[:8]!r}")
        encoded = encode_image(content, kind)
    return part.model_copy(update={"image_url": part.image_url.model_copy(update={"url": encoded})})


def _read(url: str) -> bytes:
    """Return what a file or an address holds."""
    try:
        if _is_address(url):
            with urlopen(url, timeout=FETCH_S) as answer:  # follows redirects and proxy variables
                content: bytes = answer.read(MOST_BYTES + 1)
        else:
            path = Path(unquote(urlsplit(url).path) if url.startswith("file://") else url)
            content = read_bytes(path, MOST_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise ImageError(f"image {_short(url)} cannot be read: {error}") from error
    if len(content) > MOST_BYTES:
        raise ImageError(f"image {_short(url)} has more than {MOST_BYTES >> 20} MiB")
    return content


def _short(url: str) -> str:
    return repr(url if len(url) <= 80 else url[:60] + "...")
