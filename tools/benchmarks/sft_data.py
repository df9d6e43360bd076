"""`tools/bench sft_data`: how fast rows become packed batches, and how long a step waits for them.

On generated multi-turn conversations with a small byte-pair tokenizer, on one rank:

- `whole`: read the file and tokenise every row before the first step, as trainers without streaming do;
- `stream`: the data room as a run uses it, in its thread, taken as fast as it can;
- `per_prefix`: the same rows, tokenising every beginning of a conversation anew to find its turns' places;
- `first_batch`: time from opening the file to the first batch, for both;
- `wait`: share of a step spent waiting when a step takes as long as `step_over_make` times the making of a batch
  (the step is a pause, as a device's work is to the host).
"""

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from prime_hpc.trainer.data.workers import Recipe

NUM_ROWS = 1600
NUM_PREFIX_ROWS = 160
NUM_STEPS = 20
BATCH = 64
MICRO_BATCH_TOKENS = 4096
VOCAB_SIZE = 2000
STEP_OVER_MAKE = 1.5
_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_tokenizer(folder: Path) -> None:
    """A byte-pair tokenizer with ChatML tokens, trained on its own corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text_of(np.random.default_rng(0), 400) for _ in range(20)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def text_of(rng: np.random.Generator, num_words: int) -> str:
    """Words of a Zipf-like vocabulary."""
    return " ".join(f"word{n}" for n in np.minimum(rng.zipf(1.5, num_words), 3000))


def write_rows(path: Path) -> None:
    """Conversations of 1 to 4 turns, about 250 words each."""
    rng = np.random.default_rng(1)
    with path.open("w") as file:
        for _ in range(NUM_ROWS):
            messages = []
            for _ in range(int(rng.integers(1, 5))):
                messages.append({"role": "user", "content": text_of(rng, int(rng.integers(5, 50)))})
                messages.append({"role": "assistant", "content": text_of(rng, int(rng.integers(20, 140)))})
            file.write(json.dumps({"messages": messages}) + "\n")


def time_per_prefix(path: Path, tokenizer: Any) -> float:
    """Seconds for the first rows, the straightforward way."""
    with path.open() as file:
        rows = [json.loads(line)["messages"] for _, line in zip(range(NUM_PREFIX_ROWS), file, strict=False)]
    began = time.perf_counter()
    for messages in rows:
        for i, message in enumerate(messages):
            tokenizer.encode(tokenizer.render(messages[: i + 1], None))
            if message["role"] == "assistant":
                tokenizer.encode(tokenizer.render(messages[:i], None, header=True))
    return time.perf_counter() - began


def recipe_in(folder: Path) -> "Recipe":
    """How the rows of a folder become samples."""
    from prime_hpc.config.sections.sft import SFTDataConfig
    from prime_hpc.store.dataset.files import find_data
    from prime_hpc.trainer.data.workers import Recipe

    config = SFTDataConfig(path=str(folder / "rows.jsonl"), batch_size=BATCH)
    return Recipe(
        source=config,
        config=config,
        found=find_data(config),
        cache=folder / "cache",
        tokenizer=folder / "tokenizer",
        trust_remote_code=False,
        enable_thinking=False,
        seq_len=MICRO_BATCH_TOKENS,
        vocab_size=VOCAB_SIZE,
    )


def run() -> dict[str, Any]:
    """All figures; seconds, samples a second, shares."""
    from prime_hpc.trainer.data.prefetch import Prefetcher
    from prime_hpc.trainer.data.stream import BatchShape, RowOrder, SampleStream
    from prime_hpc.trainer.data.workers import RowReader
    from prime_hpc.trainer.rank_group import RankGroup

    with tempfile.TemporaryDirectory(prefix="prime-hpc-bench-") as name:
        folder = Path(name)
        make_tokenizer(folder / "tokenizer")
        write_rows(folder / "rows.jsonl")
        recipe = recipe_in(folder)
        tokenizer = recipe.load_tokenizer()

        began = time.perf_counter()
        reader = RowReader(recipe, tokenizer=tokenizer)
        results = reader(range(NUM_ROWS))
        whole_s = time.perf_counter() - began
        tokens = sum(len(s.token_ids) for r in results for s in r.samples)
        size = (folder / "rows.jsonl").stat().st_size

        per_prefix_s = time_per_prefix(folder / "rows.jsonl", tokenizer) / NUM_PREFIX_ROWS

        def begin() -> Prefetcher:
            rows = recipe.open_rows()
            shape = BatchShape(BATCH, None, MICRO_BATCH_TOKENS)
            order = RowOrder(rows.num_rows, seed=0, shuffle=True)
            reader = RowReader(recipe, rows, tokenizer)
            return Prefetcher(SampleStream(reader, order, shape, RankGroup(60), share=0, num_shares=1), 2, 60)

        began = time.perf_counter()
        stream = begin()
        first = stream.take()
        first_s = time.perf_counter() - began
        assert first is not None
        fills = [first.fill]
        for _ in range(NUM_ROWS // BATCH - 1):
            batch = stream.take()
            assert batch is not None
            fills.append(batch.fill)
        stream_s = time.perf_counter() - began
        stream.close()

        make_s = stream_s / (NUM_ROWS // BATCH)
        stream = begin()
        stream.take()
        waits = []
        for _ in range(NUM_STEPS):
            time.sleep(STEP_OVER_MAKE * make_s)
            began = time.perf_counter()
            stream.take()
            waits.append(time.perf_counter() - began)
        stream.close()
    done = NUM_ROWS // BATCH * BATCH
    return {
        "num_rows": NUM_ROWS,
        "mean_tokens": tokens / NUM_ROWS,
        "file_bytes": size,
        "whole_samples_per_s": NUM_ROWS / whole_s,
        "stream_samples_per_s": done / stream_s,
        "stream_tokens_per_s": done / stream_s * tokens / NUM_ROWS,
        "per_prefix_samples_per_s": 1 / per_prefix_s,
        "whole_over_per_prefix": NUM_ROWS / whole_s * per_prefix_s,
        "stream_over_whole": (done / stream_s) / (NUM_ROWS / whole_s),
        "first_batch_s": first_s,
        "first_batch_share_of_whole": first_s / whole_s,
        "fill": float(np.mean(fills)),
        "step_over_make": STEP_OVER_MAKE,
        "wait_share": sum(waits) / (NUM_STEPS * STEP_OVER_MAKE * make_s + sum(waits)),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    return "\n".join(
        [
            f"{result['num_rows']:,} conversations of {result['mean_tokens']:.0f} tokens, {BATCH} a step",
            f"whole file first   {result['whole_samples_per_s']:>10.0f} samples/s",
            f"prefix by prefix   {result['per_prefix_samples_per_s']:>10.0f} samples/s, the former is "
            f"{result['whole_over_per_prefix']:.1f} times that",
            f"streamed, packed   {result['stream_samples_per_s']:>10.0f} samples/s "
            f"({result['stream_tokens_per_s']:,.0f} tokens/s), {result['stream_over_whole']:.2f} of the whole file",
            f"first batch after  {result['first_batch_s']:>10.3f} s, {result['first_batch_share_of_whole']:.1%} of "
            "the time that the whole file takes",
            f"fill               {result['fill']:>10.1%} of micro-batches of {MICRO_BATCH_TOKENS} tokens",
            f"waiting            {result['wait_share']:>10.1%} of a step that takes {result['step_over_make']} times "
            "the making of its batch",
        ]
    )
