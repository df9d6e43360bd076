"""The runs of a trainer that trains many (`trainer.max_concurrent_runs`): what is a child's own, what is its parent's.

A child is a whole experiment in `<parent>/run_<id>/run.yaml`, so that every role reads it as it reads any other. It
shares the model, the engines and the trainer's ranks with its siblings: those keys must be its parent's.
"""

from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.experiment import Experiment

OWN = (
    *("name", "output_dir", "seed", "max_steps", "async_level", "seq_len", "ckpt", "log"),
    *("wandb", "mlflow", "tensorboard", "prometheus"),
    "orchestrator",
    *("trainer.optim", "trainer.scheduler", "trainer.loss", "trainer.batch_timeout_s", "trainer.keep_weights"),
    *("trainer.num_mini_batches", "trainer.epochs_per_batch"),
    *("trainer.micro_batch_tokens", "trainer.max_concurrent_runs", "trainer.runs_idle_timeout_s"),
    # of the job and of the login node: nothing of a child run depends on them
    *(
        "supervisor",
        "launch",
        "slurm",
        "kubernetes",
        "clean",
        "inference_gpu_ids",
        "teacher_gpu_ids",
        "judge_gpu_ids",
        "trainer_gpu_ids",
        "sft",
    ),
    "device",
)
"""Keys that a child states for itself. All others are its parent's."""


def is_parent(experiment: Experiment) -> bool:
    """Return whether its trainer trains many runs."""
    return experiment.trainer.max_concurrent_runs > 1


def as_child(experiment: Experiment, parent_dir: Path, name: str) -> Experiment:
    """Return the experiment as a child of the run in `parent_dir`: one run, in its directory there."""
    trainer = experiment.trainer.model_copy(update={"max_concurrent_runs": 1})
    return experiment.model_copy(update={"output_dir": parent_dir, "name": name, "trainer": trainer, "clean": False})


def with_shared(parent: Experiment, child: Experiment) -> Experiment:
    """Return a child with the keys that it shares as its parent states them now; its micro-batches are no larger than
    the parent's, as far as one of its samples goes into these."""
    names = [name.removeprefix("trainer.") for name in OWN if name.startswith("trainer.")]
    own = {name: getattr(child.trainer, name) for name in names}
    tokens, most = own["micro_batch_tokens"], parent.micro_batch_tokens
    if tokens is not None and tokens > most >= child.seq_len:
        own["micro_batch_tokens"] = most
    trainer = parent.trainer.model_copy(update=own)
    shared = {name: getattr(parent, name) for name in _shared_sections()}
    return child.model_copy(update={**shared, "trainer": trainer})


def _shared_sections() -> list[str]:
    """Names of the top-level keys that a child shares as a whole."""
    return [name for name in Experiment.model_fields if name not in OWN and name not in ("kind", "trainer")]


def check_child(parent: Experiment, child: Experiment) -> None:
    """Raise a ConfigError with everything in which a child cannot be trained beside the others."""
    problems = [
        Problem(f"is {_short(theirs)} here and {_short(ours)} in the parent, which it shares with its siblings", key)
        for key, theirs, ours in _differences(parent, child)
    ]
    if child.kind != "rl":
        problems.append(Problem("only RL runs share a trainer", "kind"))
    if is_parent(child):
        problems.append(Problem("a child is one run: leave it out", "trainer.max_concurrent_runs"))
    if child.micro_batch_tokens > parent.micro_batch_tokens:
        message = f"{child.micro_batch_tokens} tokens are more than the parent's {parent.micro_batch_tokens}"
        problems.append(Problem(f"{message}, for which the trainer's memory was planned", "trainer.micro_batch_tokens"))
    if child.max_model_len > parent.max_model_len:
        message = f"{child.seq_len} tokens are more than the engines' {parent.max_model_len}"
        problems.append(Problem(f"{message} (inference.max_model_len of the parent)", "seq_len"))
    kl = child.trainer.loss.kl
    if kl is not None and kl.model not in (None, parent.model.name):
        message = f"{kl.model} would be one more model in memory: only the shared base model can be the reference"
        problems.append(Problem(message, "trainer.loss.kl.model"))
    if child.ckpt is not None and child.ckpt.resume_step is not None:
        problems.append(
            Problem("a child always goes on from its own newest checkpoint: leave it out", "ckpt.resume_step")
        )
    if child.ckpt is not None and child.ckpt.path is not None:
        problems.append(Problem("a child's checkpoints lie in its own directory: leave it out", "ckpt.path"))
    if problems:
        raise ConfigError(problems)


def _differences(parent: Experiment, child: Experiment) -> list[tuple[str, Any, Any]]:
    """(key, the child's value, the parent's) of every shared key that differs."""
    rows = [(name, getattr(child, name), getattr(parent, name)) for name in _shared_sections()]
    for name in type(parent.trainer).model_fields:
        if f"trainer.{name}" not in OWN:
            rows.append((f"trainer.{name}", getattr(child.trainer, name), getattr(parent.trainer, name)))
    return [(f"{key}{sub}", a, b) for key, x, y in rows for sub, a, b in _leaves(x, y)]


def _leaves(child: Any, parent: Any) -> list[tuple[str, Any, Any]]:
    """List where two values differ, below a key: [] where they are equal."""
    if child == parent:
        return []
    if not hasattr(child, "model_dump") or type(child) is not type(parent):
        return [("", child, parent)]
    rows = []
    for name in type(child).model_fields:
        inner = _leaves(getattr(child, name), getattr(parent, name))
        rows += [(f".{name}{sub}", a, b) for sub, a, b in inner]
    return rows


def _short(value: Any) -> str:
    text = "off" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
