"""`tools/bench mfu`: model FLOPs utilisation of RL and SFT steps on one GPU, Qwen3 of 0.6B, 4B and 30B-A3B, 16k packed.

Random weights, random tokens; the product's own commands, `trainer --bench` and `sft --bench`, whose results are read
from `<run>/bench/trainer.json`. bfloat16, torch.compile and flash attention (flash-attn's varlen kernel where it is
installed, else torch's). Each step has 131,072 tokens in rows of 16,384: one sequence a row, or eight packed into it.

`mfu` is against the maker's peak of the device where it is known, `mfu of measured` against a matrix product's FLOP/s
on this very device. Published for PRIME-RL on one H100 at 16k, 0.6B: 11.1 % RL, 23.7 % SFT.

Without a GPU a tiny shape runs instead, in float32 without compilation: it tries the path and says nothing of speed.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
DEADLINE_S = 1800
PUBLISHED = {"rl": 0.111, "sft": 0.237}


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with the numbers of its published config."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    row_tokens: int
    rows: int
    """Micro-batches of `row_tokens` a step."""
    flags: tuple[str, ...]
    experts: int = 0
    """Of a block, of `expert_width` each, 8 of them active; 0: dense."""
    expert_width: int = 0


GPU = ("--model.dtype", "bfloat16", "--model.compile", "--model.attn", "auto")
SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151_936, 16_384, 8, GPU),
    Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151_936, 16_384, 8, (*GPU, "--model.ac")),
    Shape("30B-A3B/8", 2048, 6144, 6, 32, 4, 128, 151_936, 16_384, 8, (*GPU, "--model.ac"), 128, 768),
)
"""The last one is Qwen3-30B-A3B with 6 of its 48 blocks, an eighth, which is what one GPU trains."""
TINY = (Shape("tiny", 64, 128, 2, 4, 2, 16, 512, 256, 2, ("--model.dtype", "float32")),)


def make_model(shape: Shape, folder: Path, on_gpu: bool) -> None:
    """Write random weights of the shape, in a process of its own: a GPU's memory is to be free afterwards."""
    script = f"import mfu; mfu.write_model(mfu.Shape(**{asdict(shape)!r}), {str(folder)!r}, {on_gpu!r})"
    run_child([sys.executable, "-c", script], folder.parent / "make.log")


def write_model(shape: Shape, folder: str, on_gpu: bool) -> None:
    """In the child process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": 8, "norm_topk_prob": True}
        experts |= {"moe_intermediate_size": shape.expert_width}
    config = AutoConfig.for_model(
        "qwen3_moe" if shape.experts else "qwen3",
        **experts,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=not shape.experts,
        dtype="bfloat16",
    )
    with torch.device("cuda" if on_gpu else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


def run_child(argv: list[str], log: Path) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    environment = {**os.environ, "PYTHONPATH": f"{TOP}:{Path(__file__).parent}", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed ({done.returncode}):\n{log.read_text()[-3000:]}")


def command(kind: str, shape: Shape, model: Path, run: Path, per_row: int) -> list[str]:
    """The bench command: `per_row` sequences in each row."""
    samples, length = shape.rows * per_row, shape.row_tokens // per_row
    argv = [sys.executable, "-m", "prime_hpc.cli", "trainer" if kind == "rl" else "sft", "--bench"]
    argv += ["--model.name", str(model), *shape.flags, "--output-dir", str(run.parent), "--name", run.name]
    argv += ["--seq-len", str(length), "--trainer.micro-batch-tokens", str(shape.row_tokens)]
    if kind == "rl":
        data = {"batch_size": samples, "seq_len": length, "micro_batch_size": per_row}
        return [*argv, "--data.fake", json.dumps(data)]
    argv += ["--data.type", "fake", "--data.batch-size", str(samples), "--data.micro-batch-size", str(per_row)]
    return [*argv, "--data.seq-len", str(length)]


def measure(shape: Shape, folder: Path, on_gpu: bool) -> list[dict[str, Any]]:
    """All four workloads of one shape."""
    folder.mkdir()
    make_model(shape, folder / "model", on_gpu)
    rows = []
    for kind in ("rl", "sft"):
        for per_row in (1, 8):
            run = folder / f"{kind}-{per_row}"
            argv = command(kind, shape, folder / "model", run, per_row)
            run_child(argv, folder / f"{run.name}.log")
            report = json.loads((run / "bench" / "trainer.json").read_text())
            rows.append(
                {
                    "model": shape.name,
                    "kind": kind,
                    "sequences_a_row": per_row,
                    "command": " ".join(argv[1:]),
                    **{key: report["figures"][key] for key in ("mfu", "mfu of measured", "tokens/s", "memory, GiB")},
                    "s/step": report["figures"]["s/step"],
                    "setting": report["setting"],
                    "phases": report["phases"],
                }
            )
    return rows


def run() -> dict[str, Any]:
    """All shapes on a GPU, the tiny one without."""

    import torch

    from prime_hpc.trainer.ops.flash import flash_attn_2

    on_gpu = torch.cuda.is_available()
    only = os.environ.get("PRIME_HPC_BENCH_ONLY")
    shapes = [shape for shape in (SHAPES if on_gpu else TINY) if only in (None, shape.name)]
    with tempfile.TemporaryDirectory(prefix="bench-mfu-") as folder:
        cases = [row for shape in shapes for row in measure(shape, Path(folder) / shape.name, on_gpu)]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "flash_attn": flash_attn_2() is not None,
        "cases": cases,
        "published_prime_rl_0.6b": PUBLISHED,
    }


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    flash = "flash-attn" if result["flash_attn"] else "torch's varlen kernel"
    on_cpu = result["device"] == "cpu"
    lines = [
        "cpu, a tiny shape: only the path is tried" if on_cpu else f"{result['device']}, {flash}, compiled, bfloat16",
        f"{'model':<12}{'kind':<5}{'sequences a row':>16}{'MFU':>8}{'of measured':>13}{'tokens/s':>11}{'GiB':>7}",
    ]
    for row in result["cases"]:
        lines.append(
            f"{row['model']:<12}{row['kind']:<5}{row['sequences_a_row']:>16}{row['mfu']:>8.1%}"
            f"{row['mfu of measured']:>13.1%}{row['tokens/s']:>11,.0f}{row['memory, GiB']:>7.1f}"
        )
    published = result["published_prime_rl_0.6b"]
    lines.append(f"PRIME-RL, published, 0.6B at 16k on an H100: RL {published['rl']:.1%}, SFT {published['sft']:.1%}")
    return "\n".join(lines)
