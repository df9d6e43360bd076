"""Token ids as pieces of text, by the tokenizer that lies beside the run's weights; without one the ids are shown.

Needs the `tokenizers` package, which comes with the roles; a login node may lack it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_hpc.store.run_paths import RunPaths, list_steps

_REPLACEMENT = "�"


class TokenText:
    """Decodes a token at a time, keeping characters whole that several tokens make."""

    def __init__(self, tokenizer: Any, problem: str = "") -> None:
        """`tokenizer` of the `tokenizers` package, or None with the `problem` that there is none."""
        self._tokenizer, self.problem = tokenizer, problem

    @classmethod
    def of(cls, paths: RunPaths, model: str) -> "TokenText":
        """Return the run's: of its newest weights, or of a model that is a directory."""
        try:
            versions = list_steps(paths.weights)
        except OSError:
            versions = []
        folders = [paths.weights_step(version) for version in reversed(versions)] + [Path(model)]
        file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
        if file is None:
            return cls(None, "no tokenizer.json beside the weights or the model: token ids are shown instead of text")
        try:
            from tokenizers import Tokenizer

            return cls(Tokenizer.from_file(str(file)))
        except ImportError:
            return cls(None, "the tokenizers package is not installed here: token ids are shown instead of text")
        except Exception as error:  # noqa: BLE001 - the package raises bare Exception for a file that it cannot read
            return cls(None, f"{file} cannot be read ({error}): token ids are shown instead of text")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return one text a token; a character's last token has all of it, its earlier ones nothing."""
        if self._tokenizer is None:
            return []
        found: list[str] = []
        held: list[int] = []
        for token in ids:
            held.append(token)
            text = self._tokenizer.decode(held, skip_special_tokens=False)
            if text.endswith(_REPLACEMENT) and len(held) < 8:
                found.append("")
                continue
            found.append(text)
            held = []
        return found
