"""One TRL GRPO run of `tools/bench loop`, in a process of its own: `python _trl_grpo.py SPEC.json`.

Trains on reverse-text with transformers' generation and writes what each optimizer step took to `spec["result"]`.
Everything that is not stated in the spec is TRL's default but for what would only slow it down here: gradient
checkpointing off, no logging, no saving.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Train `spec["num_steps"]` steps; the result holds the wall clock at the end of every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from prime_hpc.envs.tasksets.reverse_text_data import build_prompt, make_texts, score

    torch.set_num_threads(spec["num_threads"])
    texts = make_texts("train", spec["seed"], spec["num_prompts"])
    data = Dataset.from_list([{"prompt": build_prompt(text), "text": text} for text in texts])
    ends: list[float] = []
    tokens: list[int] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())

    def reward(completions: Any, text: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        tokens.append(sum(map(len, completion_ids)))
        values = [score(c[0]["content"], t) for c, t in zip(completions, text, strict=True)]
        rewards.append(sum(values) / len(values))
        return [*values]

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=spec["scratch"],
            per_device_train_batch_size=spec["batch_size"],
            num_generations=spec["group_size"],
            max_completion_length=spec["max_tokens"],
            max_steps=spec["num_steps"],
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            bf16=spec["bf16"],
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=spec["seed"],
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    sizes = [num_tokens(tokenizer, row["prompt"]) for row in data.select(range(256))]
    result = {
        "ends": ends,
        "completion_tokens": tokens,
        "rewards": rewards,
        "prompt_tokens": sum(sizes) / len(sizes),
    }
    Path(spec["result"]).write_text(json.dumps(result))


def num_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> int:
    """Tokens of a prompt as TRL renders it."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(ids["input_ids"])


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    main(json.loads(Path(sys.argv[1]).read_text()))
