"""TRL's trainers for `tools/bench trainer`: SFTTrainer and GRPOTrainer on given samples, a step of ours after each.

TRL drives: it runs `train()` as its user would; a callback at the end of every optimizer step notes what it took and
then lets our step run on the same samples, so that both see the same machine. Left out of TRL's time: our steps, and
of GRPO everything before training (the completions are given, decoding and rewards are not counted). Kept both in
seconds and in CPU seconds of the process.

TRL's own choices are kept but for what would only slow it down here: gradient checkpointing off, no logging, no saving;
float32 as on our side.
"""

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler

COMMON: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass
class Samples:
    """A batch of ragged samples."""

    token_ids: list[list[int]]
    prompt_lengths: list[int]
    """Leading tokens that are not trained; 0 for SFT on whole samples."""
    logprobs: list[list[float]] = field(default_factory=list)
    """GRPO: of each completion token."""
    rewards: list[float] = field(default_factory=list)


def now() -> np.ndarray:
    """float64[2], seconds on the clock and CPU seconds of this process."""
    return np.array([time.perf_counter(), time.process_time()])


@dataclass
class Alternation:
    """Seconds and CPU seconds of both sides, step by step."""

    ours: Callable[[], Any]
    trl_seconds: list[np.ndarray] = field(default_factory=list)
    our_seconds: list[np.ndarray] = field(default_factory=list)
    excluded: np.ndarray = field(default_factory=lambda: np.zeros(2))
    mark: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def begin(self) -> None:
        """TRL's loop begins."""
        self.mark, self.excluded = now(), np.zeros(2)

    def step_ended(self) -> None:
        """TRL has ended a step: ours follows."""
        self.trl_seconds.append(now() - self.mark - self.excluded)
        start = now()
        self.ours()
        self.our_seconds.append(now() - start)
        self.begin()

    def leave_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time not counted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.excluded += now() - start

        return timed


def callback(alternation: Alternation) -> Any:
    """The alternation as a transformers callback."""
    from transformers import TrainerCallback

    class Alternate(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            alternation.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            alternation.step_ended()

    return Alternate()


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def train_sft(
    folder: Path, samples: Samples, num_steps: int, ours: Callable[[], Any], scratch: Path, **options: Any
) -> Alternation:
    """`num_steps` steps of SFTTrainer on the samples, the same ones at every step.

    Args:
        folder: model and tokenizer.
        samples: one step's.
        num_steps: optimizer steps.
        ours: our step.
        scratch: TRL's output directory.
        options: of SFTConfig; `per_device_train_batch_size` x `gradient_accumulation_steps` make up a step.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    alternation = Alternation(ours)
    model, tokenizer = load(folder)
    repeats = num_steps if not options.get("packing") else num_steps + 1  # the packer may fill its rows otherwise
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(output_dir=str(scratch), max_steps=num_steps, **COMMON, **options),
            train_dataset=Dataset.from_dict({"input_ids": samples.token_ids * repeats}),
            processing_class=tokenizer,
            callbacks=[callback(alternation)],
        )
        rows: Any = trainer.train_dataset  # packed, where the options say so
        vars(trainer)["_get_train_sampler"] = lambda dataset=None: SequentialSampler(rows)
        trainer.train()
    return alternation


def train_grpo(
    folder: Path, samples: Samples, num_steps: int, ours: Callable[[], Any], scratch: Path, **options: Any
) -> Alternation:
    """`num_steps` steps of GRPOTrainer on given completions, the same ones at every step.

    The samples come in groups of `options["num_generations"]`; further arguments as for `train_sft`.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    alternation = Alternation(ours)
    model, tokenizer = load(folder)
    group, num = options["num_generations"], len(samples.token_ids)
    drawn = iter(range(num * num_steps * 2))

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        order = [next(drawn) % num for _ in prompts]
        cuts = [(samples.token_ids[i], samples.prompt_lengths[i]) for i in order]
        return {
            "prompt_ids": [ids[:n] for ids, n in cuts],
            "completion_ids": [ids[n:] for ids, n in cuts],
            "logprobs": [samples.logprobs[i] for i in order],
            "sample": order,
        }

    def reward(completions: Any, sample: list[int], **_: Any) -> list[float | None]:
        return [samples.rewards[i] for i in sample]

    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=str(scratch), max_steps=num_steps, **COMMON, **options),
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(num // group * (num_steps + 1))]}),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[callback(alternation)],
        )
        for name in ("_generate", "_calculate_rewards"):
            setattr(trainer, name, alternation.leave_out(getattr(trainer, name)))
        trainer.train()
    return alternation
