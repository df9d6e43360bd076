"""Warm-up demonstrations for the reverse-text task, of mixed quality on purpose.

Called by `prime_hpc.starter.make`. Part of the demonstrations reverse the text, the others merely copy it. A model
warmed up on them can do both and prefers the wrong one, which leaves reinforcement something to choose. (A warm-up
on right answers only, cut short, leaves a model that RL hardly improves within 40 steps.)
"""

import json
import random
from pathlib import Path

from prime_hpc.envs.tasksets.reverse_text_data import answer_of, build_prompt, make_texts

REVERSED_SHARE = 0.4
"""Share of demonstrations that reverse the text; the rest copy it."""
NUM_DEMONSTRATIONS = 8192
SEED_OFFSET = 1_000_000
"""Added to the seed of the texts, so that an environment of the same seed poses mostly other train texts."""


def demonstrations(seed: int, num: int = NUM_DEMONSTRATIONS) -> list[dict[str, list[dict[str, str]]]]:
    """`num` rows {"prompt": [messages], "completion": [messages]} over distinct texts of the train split."""
    texts = make_texts("train", SEED_OFFSET + seed, num)
    num_reversed = round(num * REVERSED_SHARE)
    chosen = set(random.Random(f"starter-demonstrations:{seed}").sample(range(num), num_reversed))
    return [
        {
            "prompt": build_prompt(text),
            "completion": [{"role": "assistant", "content": answer_of(text) if i in chosen else text}],
        }
        for i, text in enumerate(texts)
    ]


def write_demonstrations(path: Path, seed: int) -> int:
    """Write the demonstrations as JSON lines; returns the number of rows."""
    rows = demonstrations(seed)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)
