"""Images in messages: their bytes and back, what logs show of them, what renderers are given."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from prime_hpc.envs.images import ImageError, decode_image, encode_image, in_words, without_images
from prime_hpc.store.dataset.row_images import decode_data_url, is_data_url


def encoded(kind: str, size: tuple[int, int] = (48, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "webp"])
def test_bytes_come_back_as_they_were_and_say_what_they_are(kind: str) -> None:
    content = encoded(kind)
    url = encode_image(content)
    assert url.startswith(f"data:image/{kind};base64,") and decode_image(url) == content
    assert in_words(url) == f"[image 48x32 {kind}, {len(content) / 1000:.1f} kB]"


def test_logs_show_an_image_in_few_words_whatever_it_is() -> None:
    assert in_words("data:image/png;base64," + base64.b64encode(b"x" * 1200).decode()) == "[image png, 1.2 kB]"
    assert in_words("https://example.org/a.png") == "[image 'https://example.org/a.png']"
    for url in ("data:image/png;base64," + "@" * 10**6, "data:text/plain," + "x" * 10**6, "https://" + "x" * 10**6):
        assert len(in_words(url)) < 120


@pytest.mark.parametrize("head", ["", "application/octet-stream", "image", "image/png", "image/svg+xml;name=a.svg"])
def test_an_image_in_an_address_is_read_whatever_it_calls_itself(head: str) -> None:
    """Of environments and of SFT alike (`test_sft_images`)."""
    url = f"data:{head};base64,YWJj"
    assert is_data_url(url) and decode_image(url) == decode_data_url(url) == b"abc"


@pytest.mark.parametrize("url", ["", "data:image/png,abc", "data:text/plain;base64,abcd", "/a/file.png"])
def test_what_is_no_image_is_refused(url: str) -> None:
    with pytest.raises(ImageError, match="is no data: URL"):
        decode_image(url)
    assert not is_data_url(url)


def test_a_renderer_is_given_no_megabytes() -> None:
    """They would be kept with its prompts."""
    large = {"type": "image_url", "image_url": {"url": encode_image(b"\x89PNG\r\n\x1a\n" + bytes(10**6))}}
    text = {"type": "text", "text": "what?"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [large, text], "name": "x"},
    ]
    system, user = without_images(messages)
    assert system == messages[0] and user["name"] == "x" and user["content"][1] == text
    assert user["content"][0]["type"] == "image_url" and len(str(user)) < 200
    assert messages[1]["content"][0] is large
