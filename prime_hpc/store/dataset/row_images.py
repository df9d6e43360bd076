"""Images in the rows of a data set: where they stand in the messages, and where each is to be read from.

A content part is an image where its `type` is `image` or `image_url`. It states its source (`image`, `image_url`, `url`
or `path`), or takes the next one of a column of the row; so does `<image>` in the text of a message. A source is a
path, a `data:` URL, bytes, or what `datasets` makes of an image: `{"bytes": ..., "path": ...}`.
"""

import base64
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_hpc.config.sections.sft import IMAGE_PARTS

Message = dict[str, Any]
IMAGE_HERE = "<image>"
"""In a text: an image of the column stands here."""
_OTHER_MEDIA = {"<video>": ("videos", "video"), "<audio>": ("audios", "audio")}
"""In a text, with the columns that say what stands there; neither is shown here."""
MEDIA_COLUMNS = tuple(column for columns in _OTHER_MEDIA.values() for column in columns)

_DATA_URL = re.compile(r"data:(?:image(?:/[^;,]*)?|application/octet-stream)?(?:;[^;,]+)*;base64,")
"""`data:image;base64,` is what Qwen's documents write."""


def is_data_url(url: str) -> bool:
    """Return whether a URL holds an encoded image itself."""
    return _DATA_URL.match(url) is not None


def decode_data_url(url: str) -> bytes:
    """Return the encoded image (PNG, JPEG, ...) that a `data:` URL holds, byte for byte.
    Raises ValueError: it is no `data:` URL of an image in base64, or its text is damaged."""
    head = _DATA_URL.match(url)
    if head is None:
        raise ValueError("it is no data: URL of an image in base64")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"its text is no base64 ({error})") from error


def as_sources(column: Any) -> list[Any]:
    """Return the value of a column of images, one or a list of them, as a list."""
    return [] if column is None else column if isinstance(column, list) else [column]


def stated(source: Any) -> Any:
    """Return the bytes, the path or the URL of a source; None where it states none."""
    if not isinstance(source, Mapping):
        return source
    return next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), None)


def image_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the content parts that are images, in their order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict) and part.get("type") in IMAGE_PARTS)


def other_media(messages: Sequence[Message], row: Mapping[str, Any]) -> str:
    """Say what a row shows that is neither text nor image; empty: nothing."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = {str(part.get("type", "text")) for part in parts} - {"text", *IMAGE_PARTS}
    texts = [text for text in (*contents, *(part.get("text") for part in parts)) if isinstance(text, str)]
    for mark, columns in _OTHER_MEDIA.items():
        if any(row.get(column) for column in columns) and any(mark in text for text in texts):
            kinds.add(mark)
    return f"{', '.join(sorted(kinds))} in a message: only text and images can be shown" if kinds else ""


def shows_other_media(value: Any) -> bool:
    """Return whether a text in a row, or in a part of it, holds a mark of what is neither text nor image."""
    if isinstance(value, Mapping | list):
        return any(map(shows_other_media, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and any(mark in value for mark in _OTHER_MEDIA)


def has_marks(messages: Sequence[Message]) -> bool:
    """Return whether a text holds `<image>`."""
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, str) and IMAGE_HERE in content for content in contents)


def place_images(messages: Sequence[Message], column: Sequence[Any]) -> tuple[list[Message], tuple[Any, ...]]:
    """Return messages with a part `{"type": "image"}` for each image, and the images' sources in their order.

    Args:
        messages: contents are texts, or lists of parts.
        column: sources for parts that state none, and for `<image>`, which without any is text.

    Raises:
        ValueError: there are not as many places as sources.
    """
    left, sources, placed = deque(column), [], []
    for message in messages:
        content = message.get("content")
        if column and isinstance(content, str) and IMAGE_HERE in content:
            content = _split(content)
        if isinstance(content, list):
            own = [_source_of(part) for part in image_parts([{"content": content}])]
            if own.count(None) > len(left):
                raise ValueError(f"more places for images than the {len(column)} that the column of images holds")
            sources += [left.popleft() if source is None else source for source in own]
            is_image = lambda part: isinstance(part, dict) and part.get("type") in IMAGE_PARTS  # noqa: E731
            content = [{"type": "image"} if is_image(part) else part for part in content]
        placed.append({**message, "content": content})
    if left:
        raise ValueError(
            f"the column of images holds {len(column)}, and {len(left)} of them have no place in the messages: mark it "
            f'by a content part {{"type": "image"}}, or by {IMAGE_HERE} in the text'
        )
    return placed, tuple(sources)


def _source_of(part: dict[str, Any]) -> Any:
    return next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)


def _split(text: str) -> list[dict[str, Any]]:
    first, *others = ({"type": "text", "text": piece} for piece in text.split(IMAGE_HERE))
    parts = [first, *(part for other in others for part in ({"type": "image"}, other))]
    return [part for part in parts if part.get("text") != ""]
