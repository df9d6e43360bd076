"""Tokenizers without torch, in processes that have no other use for it.

transformers' `AutoTokenizer` chooses a class by a few small files. To do so it imports torch with its compiler and two
thousand modules more: over half of what an orchestrator's start costs, and 0.25 GB that it holds for good. Its choice
is noted in the user's cache; the next process imports that class alone.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.store.io.private import check_way, make_private_dir, open_private, user_cache
from prime_hpc.store.model.config import SAVE_TOKENIZER, hub_cache, hub_snapshot, is_local_path

_CHOICE = re.compile(r"(\S+) (transformers(?:\.\w+)+):(\w+)")
"""transformers' version, module and name of a class: of transformers' own, nothing else is imported by a note."""
_MOST_BYTES = 512
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_FEW = 1000
"""A tokenizer of fewer tokens may have none but special ones; a larger one's vocabulary need not be gone through."""
_MISTRALS = "MistralCommonBackend"
_OPTIONAL = ("sentencepiece", "tiktoken", "mistral_common")
"""Packages that transformers chooses by, where they are installed."""


def load_tokenizer(
    name: str,
    otherwise: Callable[[], Any] | None = None,
    *,
    trust_remote_code: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Any:
    """Return what `AutoTokenizer` loads, without it where the class is known that it would take.

    Args:
        name: a local directory or a name of the hub.
        otherwise: loads it where `AutoTokenizer` cannot; what that takes is not noted: the reason may pass.
        trust_remote_code: run a tokenizer's own code, which is never noted either.

    Raises:
        ValueError: what was loaded knows no text, or there is nothing but Mistral's own format.
        Exception: whatever `AutoTokenizer` or `otherwise` does.
    """
    note = _note_of(name, trust_remote_code, environ)
    chosen = _read(note) if note is not None else None
    if chosen is not None:
        with contextlib.suppress(Exception):  # `AutoTokenizer` says what is wrong
            tokenizer = chosen.from_pretrained(name)
            if _note_of(name, trust_remote_code, environ) == note:  # the hub's is still what it was
                _refuse_empty(tokenizer, name)
                return tokenizer
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception:
        if otherwise is None:
            raise
        tokenizer = otherwise()
        _refuse_empty(tokenizer, name)
        return tokenizer
    if type(tokenizer).__name__ == _MISTRALS:
        tokenizer = _beside_mistrals(name)
    _refuse_empty(tokenizer, name)
    note = _note_of(name, trust_remote_code, environ)  # the hub's may have come only now
    if note is not None and type(tokenizer) is not chosen:
        _write(note, type(tokenizer))
    return tokenizer


def _beside_mistrals(name: str) -> Any:
    """Return the tokenizer of `tokenizer.json`, which has a chat template and tells where in a text a token begins.
    mistral-common's has neither, and `AutoTokenizer` prefers it wherever there is a `tekken.json`.
    Raises ValueError: there is nothing but that."""
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
        load = f"AutoTokenizer.from_pretrained({json.dumps(name)})"
        save = 'save_pretrained("DIRECTORY", save_format="hf")'
        program = f"from transformers import AutoTokenizer; {load}.{save}"
        raise ValueError(
            f"{name} holds a tokenizer in Mistral's own format alone (tekken.json). Write tokenizer.json, "
            f"tokenizer_config.json and chat_template.jinja beside it: python -c {shlex.quote(program)}"
        )
    return AutoTokenizer.from_pretrained(name, mistral_format=False)


def _refuse_empty(tokenizer: Any, name: str) -> None:
    """Raise ValueError for a tokenizer that encodes every text as nothing: where a model's directory holds none,
    transformers makes one up for some families, and does not say so."""
    if len(tokenizer) < _FEW and not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"{name} holds no vocabulary: {SAVE_TOKENIZER}")


def is_noted(name: str, *, trust_remote_code: bool) -> bool:
    """Return whether `load_tokenizer` will know the class without `AutoTokenizer`, as far as can be seen."""
    note = _note_of(name, trust_remote_code, os.environ)
    return note is not None and _read(note) is not None


def _note_of(name: str, trust_remote_code: bool, environ: Mapping[str, str]) -> Path | None:
    """Return the file that tells the class of such a tokenizer; None where its files are not here."""
    with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: no home
        folder = Path(name) if is_local_path(name) else hub_snapshot(name, hub_cache(environ))
        if folder is None:
            return None
        # By their names some of the hub's models are treated otherwise than their files say.
        facts = ["" if Path(name).is_absolute() else name, trust_remote_code]
        facts += [find_spec(package) is not None for package in _OPTIONAL]
        digest = hashlib.sha256(repr(facts).encode(errors="surrogateescape"))
        for each in sorted(path.name for path in folder.iterdir() if path.suffix not in _WEIGHTS):
            digest.update(each.encode(errors="surrogateescape") + b"\0")
        for each in ("config.json", "tokenizer_config.json"):
            with contextlib.suppress(FileNotFoundError):
                digest.update((folder / each).read_bytes() + b"\0")
        return user_cache(environ) / "tokenizers" / digest.hexdigest()[:32]
    return None


def _read(note: Path) -> Any:
    """Return the class that a note names; None where there is none that this version of transformers has."""
    try:
        check_way(note.parent)
        descriptor = open_private(note, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            found = _CHOICE.fullmatch(file.read(_MOST_BYTES).decode())
        import transformers

        if found is None or found[1] != transformers.__version__ or found[3] == _MISTRALS:
            return None
        chosen = getattr(importlib.import_module(found[2]), found[3])
        return chosen if issubclass(chosen, transformers.PreTrainedTokenizerBase) else None
    except (OSError, ValueError, ImportError, AttributeError, TypeError):
        return None


def _write(note: Path, chosen: type) -> None:
    """Note a class, where it is transformers' own and a note can be kept."""
    import transformers

    text = f"{transformers.__version__} {chosen.__module__}:{chosen.__name__}"
    if _CHOICE.fullmatch(text):
        with contextlib.suppress(OSError):
            make_private_dir(note.parent)
            write_atomic(note, text, sync=False, mode=0o600)


def pad_of(tokenizer: Any, vocab_size: int) -> int | None:
    """Return the token by which transformers is to know what is padding behind a text: the tokenizer's own, else one
    that ends no text.
    `vocab_size`: of the model, which may have no embedding of a token that was added for padding."""
    ids = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((i for i in ids if i is not None and i < vocab_size), None)
