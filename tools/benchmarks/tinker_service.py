"""Supervised and reinforcement learning of sums by the unchanged `tinker` client against our service, beside our own
trainer on the same batches: losses side by side. Run by `tools/bench tinker_service`.

A random Qwen3 of 60 thousand weights learns `a+b=` for digits up to 4, in adapters of rank 4, from a token for each
sum. The supervised loop shows the answers. The loop of reinforcement draws them: the service says how likely each of
the nine answers is (`forward` with several targets a token), the client samples, rewards what is right with 1, and
trains by `importance_sampling` with each group's mean taken off, as the cookbook's arithmetic does, while it draws the
next batch already (on one's own policy that loss is 0 by construction). What it sampled is then given to our own
trainer of many runs, one step after the other. No engines. Takes about 2 minutes.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

STEPS = int(os.environ.get("PRIME_HPC_BENCH_STEPS", "40"))
DIGITS, GROUPS, GROUP = 5, 16, 8
ANSWERS = 2 * DIGITS - 1
_FIRST_ANSWER = 60
"""Token of the sum 0."""
_SHOWN = (1, 2, 3, 5, 10, 20, 30, 40)
Sample = dict[str, Any]


def _prompt(a: int, b: int) -> list[int]:
    return [20 + a, 10, 20 + b, 11]


def _sample(a: int, b: int, answer: int, advantage: float = 0.0, logprob: float = 0.0) -> Sample:
    """A prompt and an answer of one token, which alone is trained."""
    tokens = [*_prompt(a, b), _FIRST_ANSWER + answer]
    last = np.arange(len(tokens)) == len(tokens) - 1
    return {
        "tokens": tokens,
        "mask": last,
        "advantages": np.where(last, advantage, 0.0),
        "logprobs": np.where(last, logprob, 0.0),
    }


def _pairs(rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in rng.integers(0, DIGITS, (GROUPS, 2))]


def _answers(adapter: Any, pairs: list[tuple[int, int]]) -> np.ndarray:
    """Log-probabilities of all answers to each pair, [pairs, ANSWERS]."""
    from tinker import types

    data = []
    for a, b in pairs:
        tokens = _prompt(a, b)
        targets = np.tile(_FIRST_ANSWER + np.arange(ANSWERS), (len(tokens), 1)).astype(np.int64)
        fields: Any = {
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(np.ones(targets.shape, np.float32)),
        }
        data.append(types.Datum(types.ModelInput.from_ints(tokens), fields))
    found = adapter.forward(data, "cross_entropy").result().loss_fn_outputs
    return np.stack([np.asarray(row["logprobs"].data).reshape(row["logprobs"].shape)[-1] for row in found])


def _draw(adapter: Any, rng: np.random.Generator) -> tuple[list[Sample], float]:
    """Groups of answers drawn from the policy, other tokens never; their mean reward."""
    pairs, samples, rewards = _pairs(rng), list[Sample](), list[float]()
    for (a, b), logprobs in zip(pairs, _answers(adapter, pairs), strict=True):
        chances = np.exp(logprobs - logprobs.max())
        drawn = rng.choice(ANSWERS, GROUP, p=chances / chances.sum())
        right = (drawn == a + b).astype(float)
        rewards += right.tolist()
        advantages = right - right.mean()
        samples += [_sample(a, b, int(k), advantages[i], float(logprobs[k])) for i, k in enumerate(drawn)]
    return samples, float(np.mean(rewards))


def run() -> dict[str, Any]:
    """Losses of both examples, of both paths, and the mean reward of each step."""
    from tests.support.tinker_losses import client_losses, own_losses
    from tests.support.tinker_world import TinkerWorld
    from tests.support.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory) / "model")
        rng = np.random.default_rng(0)
        shown = [[_sample(a, b, a + b) for a, b in _pairs(rng) for _ in range(2)] for _ in range(STEPS)]
        drawn, rewards = list[list[Sample]](), list[float]()
        theirs: dict[str, list[float]] = {}
        world = TinkerWorld(Path(directory) / "service", model).start()
        try:
            with world.client() as client:
                adapter = client.create_lora_training_client(base_model=str(model), rank=4, seed=0).result()
                theirs["cross_entropy"] = client_losses(adapter, "cross_entropy", shown)
            with world.client() as client:
                adapter = client.create_lora_training_client(base_model=str(model), rank=4, seed=1).result()
                theirs["importance_sampling"] = []
                for _ in range(STEPS + 1):
                    samples, reward = _draw(adapter, rng)
                    if drawn:
                        theirs["importance_sampling"] += client_losses(adapter, "importance_sampling", drawn[-1:])
                    drawn.append(samples)
                    rewards.append(reward)
        finally:
            world.close()
        ours = own_losses(Path(directory) / "own", model, {"cross_entropy": shown, "importance_sampling": drawn[:-1]})
    return {"tinker": theirs, "own": ours, "rewards": rewards[:-1], "load": os.getloadavg()[0]}


def render(figures: dict[str, Any]) -> str:
    """A row a step, as Markdown, and the largest difference."""
    ours, theirs = figures["own"], figures["tinker"]
    lines = [
        "| step | supervised: tinker | own | RL: tinker | own | mean reward |",
        "|---|---|---|---|---|---|",
    ]
    for step in (step for step in _SHOWN if step <= len(figures["rewards"])):
        cells = [f"{side[loss][step - 1]:.6f}" for loss in ours for side in (theirs, ours)]
        lines.append(f"| {step} | {' | '.join(cells)} | {figures['rewards'][step - 1]:.3f} |")
    worst = {loss: max(abs(a - b) for a, b in zip(ours[loss], theirs[loss], strict=True)) for loss in ours}
    text = ", ".join(f"{loss} {difference:.1e}" for loss, difference in worst.items())
    return "\n".join([*lines, f"largest difference of {len(figures['rewards'])} steps: {text}"])


if __name__ == "__main__":
    print(json.dumps(run()))
