"""The trainer alone: a resumed run's bits, what saves memory or time against the plain step, host synchronisations."""

import gc
import json
from pathlib import Path
from typing import Any

import yaml
from _setting import Outcome, Setting, make_model, metrics, passed, product, run, shown, skipped, tail

COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ac": {"ac": {}},
    "ac selective": {"ac": {"mode": "selective"}},
    "ac offload": {"ac": {"offload": True}},
    "compile": {"compile": True},
    "compile, ac": {"compile": True, "ac": {}},
    "compile, ac selective": {"compile": True, "ac": {"mode": "selective"}},
    "compile, ac offload": {"compile": True, "ac": {"offload": True}},
    "compile, fp8": {"compile": True, "fp8": True},
    "optimizer offload": {},
}
NEAR, NEAR_FP8 = 0.02, 0.25
"""Relative difference of loss and gradient norm from the plain step's, in bfloat16 and with products in float8."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def small_model(setting: Setting) -> Path:
    """Four blocks of Qwen3-0.6B's width; on a CPU two narrow ones."""
    folder = setting.folder("small")
    if setting.on_gpu:
        return make_model(setting, folder, hidden=1024, layers=4, heads=16, head_dim=128)
    return make_model(setting, folder, hidden=64, layers=2, heads=4, head_dim=16)


def resume(setting: Setting) -> Outcome:
    """Four steps at once, and two and two with a checkpoint between: the weights' bits."""
    folder = setting.folder("resume")
    length = 1024 if setting.on_gpu else 64
    tree = {
        "kind": "sft",
        "output_dir": str(folder),
        "seq_len": length,
        "model": {"name": str(small_model(setting)), "dtype": "bfloat16"},
        "trainer": {"micro_batch_tokens": 4 * length, "deterministic": True, "optim": {"lr": 1e-4}},
        "sft": {"data": {"type": "fake", "batch_size": 16, "seq_len": length, "length": "variable"}},
        "ckpt": {"interval": 2},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    base = product(setting, "sft", "@", str(folder / "sft.yaml"))
    lives = (
        ("whole", ["--max-steps", "4", "--clean"]),
        ("halves", ["--max-steps", "2", "--clean"]),
        ("halves", ["--max-steps", "4", "--ckpt.resume-step", "2"]),
    )
    for number, (name, flags) in enumerate(lives):
        log = folder / f"{number}.log"
        if run([*base, "--name", name, *flags], log):
            return Outcome("fail", f"{name} {' '.join(flags)} failed:\n{tail(log)}", command=shown(base))
    files = {name: _bytes_of(folder / name / "weights" / "step_000004") for name in ("whole", "halves")}
    losses = {name: [row["loss"] for row in metrics(folder / name)] for name in files}
    same = files["whole"] == files["halves"] and bool(files["whole"])
    equal = sum(a == b for a, b in zip(losses["whole"], losses["halves"], strict=False))
    summary = f"weights {'equal to the last bit' if same else 'DIFFER'}; {equal} of {len(losses['whole'])} losses equal"
    return passed(same and equal == 4, summary + " (trainer.deterministic)", {"losses": losses}, shown(base))


def _bytes_of(version: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(version.glob("*.safetensors"))}


def tree_of(setting: Setting, name: str, model: Path, **trainer: Any) -> dict[str, Any]:
    """An RL trainer on random batches."""
    length = 1024 if setting.on_gpu else 64
    fake = {"batch_size": 8, "seq_len": length, "micro_batch_size": 4, "length": "variable"}
    return {
        "kind": "rl",
        "name": "x",
        "device": setting.device,
        "output_dir": str(setting.folder(name)),
        "seq_len": length,
        "model": {"name": str(model), "dtype": "bfloat16"},
        "trainer": {
            "micro_batch_tokens": 4 * length,
            "optim": {"lr": 1e-4},
            "loss": {"type": "nll"},  # far from 0, unlike a policy gradient on random advantages
            "data": {"fake": fake},
            **trainer,
        },
    }


def combinations(setting: Setting) -> Outcome:
    """Two steps each; what the config refuses is named, and no failure."""
    import torch
    import torch.distributed as dist

    model = small_model(setting)
    rows: dict[str, dict[str, Any]] = {}
    for name, change in COMBINATIONS.items():
        tree = tree_of(setting, "combinations", model)
        tree["model"] |= change
        if name == "optimizer offload":
            tree["trainer"]["optim"]["offload"] = True
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        try:
            rows[name] = _steps(tree, setting.folder("combinations"), 2)
            rows[name]["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        except ValueError as error:
            rows[name] = {"refused": " ".join(str(error).split())[:200]}
        except Exception as error:  # noqa: BLE001 - any way in which a combination can break is a row of the table
            rows[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        print(name, rows[name], flush=True)
    wrong = [name for name, row in rows.items() if not _holds(name, row, rows["plain"])]
    refused = [name for name, row in rows.items() if "refused" in row]
    words = f"{len(rows) - len(wrong) - len(refused)} of {len(rows)} agree with the plain step"
    words += f"; refused: {', '.join(refused)}" if refused else ""
    return passed(not wrong, words + (f"; wrong: {', '.join(wrong)}" if wrong else ""), {"cases": rows})


def _steps(tree: dict[str, Any], scratch: Path, num_steps: int) -> dict[str, Any]:
    """Loss and gradient norm of each step on this process alone."""
    from prime_hpc.config import Experiment
    from prime_hpc.trainer.data.fake import fake_source
    from prime_hpc.trainer.objectives import loss_of
    from prime_hpc.trainer.replay.replay import opened

    experiment = Experiment.model_validate(tree)
    with opened(experiment, scratch) as trainer:
        source = fake_source(trainer)
        assert source is not None
        found = [trainer.train(n, source(n), loss_of(experiment)) for n in range(1, num_steps + 1)]
    return {"loss": [m["loss"] for m in found], "grad_norm": [m["grad_norm"] for m in found]}


def _holds(name: str, row: dict[str, Any], plain: dict[str, Any]) -> bool:
    if "refused" in row:
        return name != "plain"
    if "error" in row or "error" in plain or ("compile" in name) != (row["graphs"] > 0):
        return False
    limit = NEAR_FP8 if "fp8" in name else NEAR
    pairs = [(a, b) for key in ("loss", "grad_norm") for a, b in zip(row[key], plain[key], strict=True)]
    scale = max(abs(b) for _, b in pairs)
    return all(abs(a - b) <= limit * max(abs(b), 0.05 * scale) for a, b in pairs)


def syncs(setting: Setting) -> Outcome:
    """Waits of the host for the GPU in a step of six micro-batches beyond those of a step of two, by micro-batch."""
    if not setting.on_gpu:
        return skipped("a CPU has no queue to wait for (tests/unit counts the calls that would)")
    from torch.profiler import ProfilerActivity, profile

    from prime_hpc.config import Experiment
    from prime_hpc.trainer.batching.micro_batches import fake_batch
    from prime_hpc.trainer.objectives import loss_of
    from prime_hpc.trainer.replay.replay import opened

    tree = tree_of(setting, "syncs", small_model(setting), share_prefixes=False)
    experiment = Experiment.model_validate(tree)
    counts: dict[int, dict[str, int]] = {}
    with opened(experiment, setting.folder("syncs")) as trainer:
        shape = experiment.trainer.data.fake
        assert shape is not None
        for step, micro_batches in enumerate((2, 2, 6), start=1):  # the first warms up
            sized = shape.model_copy(update={"batch_size": 4 * micro_batches})
            batch = fake_batch(sized, trainer.vocab_size, 0, step, 0, 1)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                trainer.train(step, batch, loss_of(experiment))
            rows = {event.key: event.count for event in profiler.key_averages()}
            counts[micro_batches] = {name: rows.get(name, 0) for name in WAITS}
    each = {name: (counts[6][name] - counts[2][name]) / 4 for name in WAITS}
    total = sum(each.values())
    summary = f"{total:g} a micro-batch ({json.dumps(each)})"
    return passed(total == 0, summary, {"counts": {str(k): v for k, v in counts.items()}})
