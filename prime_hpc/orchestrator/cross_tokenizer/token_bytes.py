"""The bytes of every token of a vocabulary, and tokens for any bytes.

Three ways in which vocabularies write text are known: bytes as characters (byte-level BPE: GPT-2, Llama 3, Qwen), a
character for the blank and `<0xNN>` for single bytes (SentencePiece: Llama 2, Mistral, Gemma), and plain text. The one
with which a sentence comes out as it went in is taken.

Some SentencePiece tokenizers put a blank before the first word. It is no part of the text: it is left out here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_hpc.orchestrator.errors import OrchestratorError

SENTENCE = "Hi there, 1+1 is  2.\nSay it again"
"""Has what ways to write text differ in: blanks, two of them, a new line."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"
"""SentencePiece's."""
_SHOWN = 20


class UnreadableError(Exception):
    """This text cannot be given to the teacher; says why."""


class TokenBytes:
    """See the module."""

    def __init__(self, tokenizer: Any, whose: str) -> None:
        """Look at a tokenizer of transformers. `whose`: for messages.
        Raises OrchestratorError: its tokens have no bytes that can be known."""
        self._tokenizer, self._whose = tokenizer, whose
        added = tokenizer.added_tokens_decoder
        tokens: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        sentence = self._encode_text(SENTENCE)
        for bytes_of in (_of_characters(), _of_sentencepiece, str.encode):
            try:
                self._bytes = [
                    (None if added[i].special else added[i].content.encode())
                    if i in added
                    else (None if token is None else bytes_of(token))
                    for i, token in enumerate(tokens)
                ]
            except KeyError:
                continue  # a token with a character that stands for no byte
            found = b"".join(self._bytes[i] or b"" for i in sentence)
            self._prefixes_blank = found == b" " + SENTENCE.encode()
            if self._prefixes_blank or found == SENTENCE.encode():
                break
        else:
            raise OrchestratorError(
                f"orchestrator.teacher.tokenizer = own: the tokens of {whose} tokenizer ({type(tokenizer).__name__}) "
                "do not say which bytes of a text they are: it is neither byte-level BPE nor SentencePiece"
            )
        self._single = {part[0]: i for i, part in enumerate(self._bytes) if part is not None and len(part) == 1}

    def is_control(self, token: int) -> bool:
        """Return whether a token stands for no text."""
        return token < len(self._bytes) and self._bytes[token] is None

    def split(self, ids: Sequence[int]) -> tuple[bytes, NDArray[np.int64]]:
        """Return the bytes of a reply, and how many of them each token is, int64 [n].
        Raises UnreadableError: a control token, which is no text, or one that the tokenizer does not know."""
        parts: list[bytes] = []
        for i in ids:
            if i >= len(self._bytes):
                raise UnreadableError(f"token {i} is none of {self._whose} tokenizer's")
            if (part := self._bytes[i]) is None:
                name = self._tokenizer.convert_ids_to_tokens(int(i))
                raise UnreadableError(f"{name!r} inside of a reply is a control token of {self._whose}, no text")
            parts.append(part)
        if self._prefixes_blank and parts and parts[0].startswith(b" "):
            parts[0] = parts[0][1:]
        return b"".join(parts), np.fromiter(map(len, parts), np.int64, len(parts))

    def encode(self, content: bytes) -> list[int]:
        """Return tokens whose bytes are `content`: text as the tokenizer cuts it, also what spells a control token;
        bytes that are no UTF-8 each as a token of its own.
        Raises UnreadableError: it cannot write them, or changes them (by Unicode normalisation, say)."""
        ids: list[int] = []
        for piece, is_text in utf8_runs(content):
            if is_text:
                ids += self._encode_text(piece.decode(), goes_on=bool(ids))
            elif unknown := set(piece) - self._single.keys():
                raise UnreadableError(f"{self._whose} tokenizer has no token for the byte {min(unknown):#04x}")
            else:
                ids += [self._single[byte] for byte in piece]
        found, _ = self.split(ids)
        if found != content:
            place = next((i for i, (a, b) in enumerate(zip(found, content, strict=False)) if a != b), len(found))
            shown = content[max(0, place - 4) : place + _SHOWN].decode(errors="replace")
            raise UnreadableError(f"{self._whose} tokenizer does not keep {shown!r} as it is")
        return ids

    def _encode_text(self, text: str, *, goes_on: bool = False) -> list[int]:
        """`goes_on`: bytes stand before it, so that it has no blank before its first word."""
        if goes_on and self._prefixes_blank:  # nothing merges with a new line
            return self._encode_text(f"\n{text}")[len(self._encode_text("\n")) :]
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def utf8_runs(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of `content` that are UTF-8, marked true, and those that are not, in order."""
    while content:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield content[: error.start], True
            yield content[error.start : error.end], False
            content = content[error.end :]
        else:
            yield content, True
            return


def _of_characters() -> Callable[[str], bytes]:
    """Return the reader of byte-level BPE's tokens: printable bytes of Latin-1 stand for themselves, the characters
    from 256 on for the others, in order. It raises KeyError: a character stands for none."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    of = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return lambda token: bytes(of[character] for character in token)


def _of_sentencepiece(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_BLANK, " ").encode()
