"""The scalar head of a reward model: where it comes from, how it begins, what config.json says of it.

transformers' `*ForSequenceClassification` of one label has `score.weight` [1, hidden] in the place of the language
model's head, and reads it at the last token that is no padding; so does vLLM (`runner: pooling`). Of a model that sees
(Gemma 3, Qwen 3.5) the language model alone becomes one, which transformers and vLLM know without the rest.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_hpc.config import Experiment
from prime_hpc.store.model.files import SCORE, StoredTensor, headless, read_config
from prime_hpc.store.model.tokenizer import load_tokenizer, pad_of
from prime_hpc.trainer.lora.linear import LoraLinear
from prime_hpc.trainer.model.hf_checkpoint import inside, local_box
from prime_hpc.trainer.parallel.tensor import local

_NOWHERE = "a new head"


def config_of(hf_config: Any) -> Any:
    """Return the config of a model's text part with one label. Raises ValueError: transformers has no such model, or
    none whose head is `score`."""
    from transformers import AutoModelForSequenceClassification

    text = hf_config.get_text_config()
    if type(text) not in AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"transformers has no {text.model_type} with a head for labels (AutoModelForSequenceClassification): there "
            "is no reward model of this family; begin with another one"
        )
    text.num_labels = 1
    return text


def stored_with_score(stored: Mapping[str, StoredTensor], hf: Any, source: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a reward model of what a language model's checkpoint holds: the language model's head is
    left out, a scalar one is added; in a reward model's own there is one. Raises ValueError: its head is another."""
    head = getattr(hf, "score", None)
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(f"{type(hf).__name__} has no head `score` without a bias: no engine would serve it")
    vars(hf)["get_output_embeddings"] = lambda: hf.score  # what asks for the output head means this one
    rest = headless(stored)
    if SCORE in rest and rest[SCORE].shape[0] != 1:
        raise ValueError(f"{source} is a classifier of {rest[SCORE].shape[0]} labels, and a reward model has one")
    return {SCORE: StoredTensor(source / _NOWHERE, "F32", tuple(head.weight.shape)), **rest}


def is_new(stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the scalar head is none of the checkpoint's."""
    return SCORE not in stored or stored[SCORE].file.name == _NOWHERE


@torch.no_grad()
def begin(score: torch.Tensor, hf_config: Any, seed: int) -> None:
    """Draw a (sharded) head as transformers does, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    deviation = getattr(hf_config.get_text_config(), "initializer_range", 0.02)
    whole = torch.randn(score.shape, generator=generator) * deviation
    box = local_box(score)
    local(score).copy_(whole[inside(box, tuple((0, size) for size in score.shape))])


def weight_of(head: nn.Linear) -> torch.Tensor:
    """Return a head's whole weight in float32, float32[hidden], with the adapter that is in use."""
    weight = local(head.weight)[0].float()
    if isinstance(head, LoraLinear) and head.lora_a is not None and head.lora_b is not None:
        return weight + head.lora_scale * (head.lora_b @ head.lora_a)[0]
    return weight


def stated(hf: Any, source: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the config.json by which transformers and vLLM know a reward model.
    Raises ValueError: without a tokenizer, nobody knows what is padding."""
    try:
        tokenizer = load_tokenizer(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {source} ({error})") from error
    if (pad := pad_of(tokenizer, hf.config.vocab_size)) is None:
        raise ValueError(
            f"{source}: its tokenizer has none of the special tokens within the model's vocabulary of "
            f"{hf.config.vocab_size}, so nobody could tell padding: state pad_token in its tokenizer_config.json"
        )
    whole = read_config(source)
    config = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    # vLLM, which has no `Text` in the names of its language models, knows it by this one; transformers by model_type.
    kind = type(hf).__name__.replace("TextForSequenceClassification", "ForSequenceClassification")
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    own = {"architectures": [kind], "model_type": hf.config.model_type, "pad_token_id": pad}
    return config | own | labels


def padding_tokenizer(source: Path, pad: int) -> dict[str, bytes]:
    """Return tokenizer_config.json with the padding token of a reward model's config.json where the tokenizer has none,
    or one that the model has no embedding of: who scores several conversations at once could not fill up the shorter
    ones; {}: it is that one, or is code of its own."""
    path = source / "tokenizer_config.json"
    try:
        tokenizer = load_tokenizer(str(source))
        stated = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    if tokenizer.pad_token_id == pad:
        return {}
    own = {"pad_token": tokenizer.convert_ids_to_tokens(pad)}
    return {path.name: (json.dumps(stated | own, indent=2, ensure_ascii=False) + "\n").encode()}


def head_seed(experiment: Experiment) -> int | None:
    """Return the seed of a reward model's new head; under an adapter one for all runs: no checkpoint holds what it
    adapts."""
    if not experiment.trains_reward_model:
        return None
    return experiment.seed if experiment.model.lora is None else 0
