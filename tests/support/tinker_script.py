"""A user's script on the login node.

    python -m tests.support.tinker_script RUN_DIR FIRST LAST [--from PATH] [--leave] [--sample]

It trains an adapter with the unchanged `tinker` client against the service of a job, steps FIRST to LAST, and prints
what came of it as JSON. It saves after the last step; with `--leave` it goes away in the middle of its session instead.
With `--sample` it also samples from what it has trained, and has the trainer say how likely these tokens are.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)
LENGTHS = (17, 40, 9, 33, 26)
"""Of a step's sequences: an odd number, so that ranks have unequal shares."""


def datum(tokens: list[int], weights: Any) -> types.Datum:
    """Tokens, each the target of the one before it."""
    arrays: dict[str, Any] = {
        "weights": np.asarray(weights, np.float32),
        "target_tokens": np.asarray(tokens[1:], np.int64),
    }
    fields: Any = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields)


def data_of(step: int) -> list[types.Datum]:
    """A step's data: every third time a single sequence, of which all ranks but one get nothing."""
    rng = np.random.default_rng(step)
    lengths = LENGTHS if step % 3 else LENGTHS[:1]
    return [datum(rng.integers(0, 260, n).tolist(), rng.random(n - 1) / n) for n in lengths]


def train(adapter: Any, first: int, last: int) -> dict[str, list[float]]:
    """Losses and norms of the gradients, a step each."""
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(first, last + 1):
        passed, stepped = adapter.forward_backward(data_of(step), "cross_entropy"), adapter.optim_step(ADAM)
        found["losses"].append(passed.result().metrics["loss:sum"])
        found["norms"].append(stepped.result().metrics["grad_norm:mean"])
    return found


def sample(adapter: Any) -> dict[str, list[float]]:
    """Log-probabilities of two sequences by the engine that sampled them, by the trainer, and by the trainer after
    another step."""
    params = types.SamplingParams(max_tokens=12, seed=1, temperature=1.0)
    prompt = [5, 6, 7, 8]
    sampler = adapter.save_weights_and_get_sampling_client()
    answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params).result()
    rows = [[*prompt, *sequence.tokens] for sequence in answer.sequences]
    found = {"engine": [x for sequence in answer.sequences for x in sequence.logprobs]}
    for name in ("trainer", "later"):
        passed = adapter.forward([datum(row, np.ones(len(row) - 1)) for row in rows], "cross_entropy").result()
        found[name] = [x for row in passed.loss_fn_outputs for x in row["logprobs"].data[len(prompt) - 1 :]]
        train(adapter, 1, 1)
    return found


def main() -> None:
    """Parse, train, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.tinker_script")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--from", dest="path")
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--sample", action="store_true")
    given = parser.parse_args()
    url, key = ((given.run_dir / name).read_text().strip() for name in ("tinker.url", "tinker.key"))
    client = tinker.ServiceClient(base_url=url, api_key=key)
    if given.path is None:
        served = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result().supported_models
        adapter = client.create_lora_training_client(base_model=str(served[0].model_name), rank=4, seed=3).result()
    else:
        adapter = client.create_training_client_from_state_with_optimizer(given.path).result()
    found: dict[str, Any] = {"url": url, "adapter": adapter.model_id, **train(adapter, given.first, given.last)}
    if given.sample:
        found["samples"] = sample(adapter)
    if not given.leave:
        found["saved"] = adapter.save_state(f"step-{given.last}").result().path
        client.close("success").result()
    print(json.dumps(found), flush=True)
    os._exit(0)  # the client's threads would go on


if __name__ == "__main__":
    main()
