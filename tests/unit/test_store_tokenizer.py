"""Tokenizers are what `AutoTokenizer` makes of them, also where its choice is only remembered."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer

from prime_hpc.store.model.tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import make_tokenizer


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """A user's cache of its own."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def _model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    return folder


def _load(folder: Path | str, cache: dict[str, str], **options: Any) -> tuple[Any, bool]:
    """The tokenizer, and whether `AutoTokenizer` was asked."""
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        real = AutoTokenizer.from_pretrained

        def note(*args: Any, **named: Any) -> Any:
            asked.append(args)
            return real(*args, **named)

        patch.setattr(AutoTokenizer, "from_pretrained", note)
        return load_tokenizer(str(folder), environ=cache, **options), bool(asked)


def _facts(tokenizer: Any) -> tuple[Any, ...]:
    said = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
    return (
        type(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.name_or_path,
        said,
    )


@pytest.mark.parametrize("stated", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "deepseek_v3", "mistral"])
def test_a_remembered_choice_is_autotokenizers(
    tmp_path: Path, cache: dict[str, str], stated: str, model_type: str
) -> None:
    """For models whose own class, whose stated class or neither is taken."""
    model = _model(tmp_path / "model", model_type=model_type)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": stated}))
    first, was_asked = _load(model, cache)
    again, is_asked = _load(model, cache)
    assert was_asked and not is_asked
    assert _facts(again) == _facts(first)


def test_another_tokenizer_is_asked_for_anew(tmp_path: Path, cache: dict[str, str]) -> None:
    """A config, a file more, a user who trusts its code; a place alone is no other tokenizer."""
    model = _model(tmp_path / "model")
    assert _load(model, cache)[1]
    assert not _load(_model(tmp_path / "copy"), cache)[1]
    assert _load(model, cache, trust_remote_code=True)[1]
    assert _load(_model(model, model_type="llama"), cache)[1]
    (model / "tokenizer.model").write_bytes(b"")
    assert _load(model, cache)[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.0.1 transformers.tokenization_utils_tokenizers:TokenizersBackend",
        f"{transformers.__version__} os:system",
        f"{transformers.__version__} transformers.no_such:TokenizersBackend",
        f"{transformers.__version__} transformers.configuration_utils:PreTrainedConfig",
    ],
)
def test_a_note_that_cannot_be_used_is_none(tmp_path: Path, cache: dict[str, str], text: str) -> None:
    """Of another version, cut off, or of what is no tokenizer; it is written anew."""
    model = _model(tmp_path / "model")
    _load(model, cache)
    (note,) = (tmp_path / "cache" / "prime-hpc" / "tokenizers").iterdir()
    good = note.read_text()
    note.write_text(text)
    assert _load(model, cache)[1]
    assert note.read_text() == good


def test_a_note_that_others_may_write_is_none(tmp_path: Path, cache: dict[str, str]) -> None:
    """Nor is it a reason to fail."""
    model = _model(tmp_path / "model")
    _load(model, cache)
    (note,) = (tmp_path / "cache" / "prime-hpc" / "tokenizers").iterdir()
    note.chmod(0o666)
    assert _load(model, cache)[1]


def test_what_is_loaded_otherwise_is_not_remembered(tmp_path: Path, cache: dict[str, str]) -> None:
    """The hub, or a file system, may have failed for a moment."""
    model = _model(tmp_path / "model")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text("{")
    another = AutoTokenizer.from_pretrained(str(_model(tmp_path / "another")))
    assert load_tokenizer(str(model), lambda: another, environ=cache) is another
    assert not (tmp_path / "cache").exists()
    (model / "config.json").write_text(config)
    assert _load(model, cache)[1]


def test_a_hub_model_is_that_of_its_main_branch(
    tmp_path: Path, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions that share a config.json: the one that is loaded decides, not the newest file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--owner--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "snapshots").mkdir()
    environ = cache | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    for commit, chosen in (("b" * 40, "TokenizersBackend"), ("a" * 40, "LlamaTokenizer")):
        model = _model(kept / "snapshots" / commit)
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": chosen}))
        (kept / "refs" / "main").write_text(commit)
        for is_first in (True, False):
            tokenizer, was_asked = _load("owner/model", environ)
            assert type(tokenizer).__name__ == chosen and was_asked is is_first


def test_no_cache_is_no_failure(tmp_path: Path) -> None:
    """A home that cannot be written."""
    (tmp_path / "file").write_text("")
    model = _model(tmp_path / "model")
    for _ in range(2):
        assert _load(model, {"XDG_CACHE_HOME": str(tmp_path / "file")})[1]


def test_what_cannot_be_loaded_is_said_by_autotokenizer(tmp_path: Path, cache: dict[str, str]) -> None:
    """A note does not stand before its words."""
    model = _model(tmp_path / "model")
    _load(model, cache)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(Exception) as stated:
        AutoTokenizer.from_pretrained(model)
    with pytest.raises(type(stated.value)):
        _load(model, cache)


@pytest.mark.exhaustive
def test_a_renderer_needs_no_torch(tmp_path: Path) -> None:
    """Of a tokenizer that was loaded before: half of an orchestrator's start."""
    model = _model(tmp_path / "model")
    program = (
        "import sys; from prime_hpc.envs.rendering import load_prompt_renderer; "
        "import prime_hpc.orchestrator.main, prime_hpc.envs.episode_runner, prime_hpc.evals.run; "
        f"load_prompt_renderer({str(model)!r}, 'qwen3', False); print('torch' in sys.modules)"
    )
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    said = [
        subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [text.split()[-1] for text in said] == ["True", "False"]


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt2"])
def test_weights_without_a_tokenizer_have_none(tmp_path: Path, cache: dict[str, str], model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    made_up = AutoTokenizer.from_pretrained(str(tmp_path))
    assert not set(made_up.encode("every text", add_special_tokens=False)) - set(made_up.all_special_ids)
    for _ in range(2):  # nothing of it is remembered
        with pytest.raises(ValueError, match="holds no vocabulary: copy the files"):
            _load(tmp_path, cache)
    with pytest.raises(ValueError, match="holds no vocabulary"):
        _load(tmp_path / "nowhere" / "at" / "all", cache, otherwise=lambda: made_up)


def _tekken(folder: Path) -> None:
    """A tokenizer of bytes in Mistral's own format."""
    pieces = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    config = {"pattern": r"\S+|\s+", "num_vocab_tokens": 256, "default_vocab_size": 512, "version": "v3"}
    config |= {"default_num_special_tokens": 256}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": pieces}))


@pytest.mark.parametrize("is_noted", [False, True])
def test_beside_mistrals_own_format_other_files_count(tmp_path: Path, cache: dict[str, str], is_noted: bool) -> None:
    """`AutoTokenizer` prefers mistral-common's, without template and offsets; earlier versions noted that choice."""
    pytest.importorskip("mistral_common")
    folder = _model(tmp_path / "model", model_type="mistral")
    wanted = AutoTokenizer.from_pretrained(folder)
    _tekken(folder)
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "MistralCommonBackend"
    if is_noted:
        _load(folder, cache)
        (note,) = (Path(cache["XDG_CACHE_HOME"]) / "prime-hpc" / "tokenizers").iterdir()
        mistrals = "transformers.tokenization_mistral_common:MistralCommonBackend"
        note.write_text(f"{transformers.__version__} {mistrals}")
    for _ in range(2):
        found, _ = _load(folder, cache)
        assert found.chat_template == wanted.chat_template
        assert found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()


def test_mistrals_own_format_alone_is_refused(tmp_path: Path, cache: dict[str, str]) -> None:
    pytest.importorskip("mistral_common")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    _tekken(tmp_path)
    with pytest.raises(ValueError, match=r"tekken\.json.*python -c '.*save_format=\"hf\"\)'$"):
        _load(tmp_path, cache)
