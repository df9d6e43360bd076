"""`tools/bench rehearse`: the rehearsal's peak of memory against the one measured in the real trainer, on gloo ranks.

Small models with real weights on 2 and 4 CPU ranks: RL, SFT and LoRA over the layouts. Measured is what torch's CPU
allocator gave out on rank 0 (the profiler's memory events since start-up, so kernels' own buffers count as well) at the
peak of a step after the first one; the least of a few such steps, because gloo's threads let go of a collective's
tensors some time after it, unseen by the profiler (`step_peaks`). Predicted is `prime_hpc.trainer.rehearsal` of
the same config, which pretends the same CPU.
In bfloat16 the CPU's kernels take memory for themselves that no tensor shows (64 MiB here), so that case is off; so do
oneDNN's in float32, which the trainer uses on other makers' CPUs (a copy of one chunk's logits): left out here.
"""

import bisect
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
DEADLINE_S = 3600
REPEATS = 3
STEP = "one step"
SMALL: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}

RL: dict[str, Any] = {
    "orchestrator": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 64}},
    "trainer": {"backend": "gloo", "data": {"fake": {}}},
    "model": {"dtype": "float32"},
    "seq_len": 512,
}


def _case(name: str, ranks: int, family: str = "qwen3", kind: str = "rl", **changes: Any) -> dict[str, Any]:
    trainer = {"num_ranks": ranks, "micro_batch_tokens": 1024} | changes.get("trainer", {})
    tree = RL | {"trainer": RL["trainer"] | trainer, "model": RL["model"] | changes.get("model", {})}
    return {"name": name, "ranks": ranks, "family": family, "kind": kind, "tree": tree}


SPLIT, ROWS, COPIES = {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}
CASES = [
    _case("rl", 2),
    _case("rl, gradients in shards", 2, trainer={"no_sync": False}),
    _case("rl, bfloat16", 2, trainer={"no_sync": False}, model={"dtype": "bfloat16"}),
    _case("rl, ac", 2, trainer={"no_sync": False}, model={"ac": {}}),
    _case("rl, ac selective", 2, trainer={"no_sync": False}, model={"ac": {"mode": "selective"}}),
    _case("rl, compile", 2, trainer={"no_sync": False}, model={"compile": True}),
    _case("sft, LoRA, compile", 2, kind="sft", model={"lora": {}, "compile": True}),
    _case("rl, MoE, compile, ac", 2, "qwen3_moe", trainer={"no_sync": False}, model={"compile": True, "ac": {}}),
    _case("rl, muon", 2, trainer={"no_sync": False, "optim": {"type": "muon"}}),
    _case("rl, KL to a reference", 2, trainer={"no_sync": False, "loss": {"kl": {}}}),
    _case("rl, tp 2", 2, trainer={"no_sync": False, "parallel": SPLIT}),
    _case("rl, cp 2", 2, trainer={"no_sync": False, "parallel": ROWS}),
    _case("rl, dp_replicate 2", 2, trainer={"no_sync": False, "parallel": COPIES}),
    _case("rl, MoE", 2, "qwen3_moe", trainer={"no_sync": False}),
    _case("rl, MoE, ep 2", 2, "qwen3_moe", trainer={"no_sync": False, "parallel": {"ep": 2}}),
    _case("sft", 2, kind="sft", trainer={"no_sync": False}),
    _case("sft, one row", 2, kind="sft", trainer={"no_sync": False, "micro_batch_tokens": 512}),
    _case("rl, LoRA", 2, model={"lora": {}}),
    _case("sft, LoRA, ac", 2, kind="sft", model={"lora": {}, "ac": {}}),
    _case("rl, 4 shards", 4, trainer={"no_sync": False}),
    _case("rl, dp_replicate 2 x dp_shard 2", 4, trainer={"no_sync": False, "parallel": COPIES}),
    _case("rl, cp 2 x tp 2", 4, trainer={"no_sync": False, "parallel": {"cp": 2, "tp": 2}}),
    _case("sft, dp_shard 2 x tp 2", 4, kind="sft", trainer={"no_sync": False, "parallel": SPLIT}),
    _case("rl, LoRA, dp_shard 2 x cp 2", 4, model={"lora": {}}, trainer={"parallel": ROWS}),
    _case(
        "rl, MoE, cp 2 x tp 2 x ep 4",
        4,
        "qwen3_moe",
        trainer={"no_sync": False, "parallel": {"cp": 2, "tp": 2, "ep": 4}},
    ),
]


def make_model(folder: Path, kind: str) -> None:
    """Random weights of the small shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = SMALL | {"tie_word_embeddings": False}
    if kind == "qwen3":
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    else:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | MOE))).save_pretrained(folder)


def experiment_of(case: dict[str, Any], models: Path) -> Any:
    """The case's experiment."""
    from prime_hpc.config import Experiment

    tree = case["tree"] | {"kind": case["kind"]}
    tree["model"] = tree["model"] | {"name": str(models / case["family"])}
    return Experiment.model_validate(tree)


def measured(case: dict[str, Any], models: Path, rank: int, store: str) -> int:
    """In a rank's process: bytes at the peak, of the real trainer's model and steps."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from prime_hpc.trainer.objectives import loss_of
    from prime_hpc.trainer.rehearsal.rehearse import MICRO_BATCHES, full_batch
    from prime_hpc.trainer.trainer import build_train_step, load_base

    experiment = experiment_of(case, models)
    dist.init_process_group("gloo", store=dist.FileStore(store, case["ranks"]), rank=rank, world_size=case["ranks"])
    gc.collect()  # what an earlier case left must not be freed in this one
    # one profile over all steps: what is freed between two of them has to be seen as well
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        base = load_base(experiment, torch.device("cpu"))
        train_step = build_train_step(base, experiment)
        for step, count in enumerate((*MICRO_BATCHES, *[MICRO_BATCHES[-1]] * (REPEATS - 1)), 1):
            batch = full_batch(experiment, base.policy, count)
            dist.barrier()
            with record_function(STEP):
                train_step.run(step, batch, loss_of(experiment))
    dist.barrier()
    dist.destroy_process_group()
    return min(step_peaks(profiler)[-REPEATS:])


def step_peaks(profiler: Any) -> list[int]:
    """Bytes at the peak of each step.

    The profiler does not see what gloo's threads free, and they are often the last to let go of what a collective was
    given. What is given out again must have been free: it ends what was there before.
    """
    from torch._C._profiler import _EventType

    steps: list[tuple[int, int]] = []
    changes: list[tuple[int, int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == STEP:
            steps.append((event.start_time_ns, event.end_time_ns))
    steps.sort()
    peaks, live = [0] * len(steps), Live()
    for time, address, size in sorted(changes, key=lambda change: change[0]):
        live.change(address, size)
        for index, (begin, end) in enumerate(steps):
            if begin <= time <= end:
                peaks[index] = max(peaks[index], live.total)
    return peaks


class Live:
    """Blocks of memory in use."""

    def __init__(self) -> None:
        self.total = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def change(self, address: int, size: int) -> None:
        """Take note of a block that is given out, or with a negative size given back."""
        if size < 0:
            if address in self._sizes:
                self._forget(bisect.bisect_left(self._starts, address))
            return
        at = bisect.bisect_left(self._starts, address)
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] > address:
            at -= 1
        while at < len(self._starts) and self._starts[at] < address + size:
            self._forget(at)
        self._starts.insert(at, address)
        self._sizes[address] = size
        self.total += size

    def _forget(self, at: int) -> None:
        self.total -= self._sizes.pop(self._starts.pop(at))


def predicted(case: dict[str, Any], models: Path) -> dict[str, Any]:
    """In a process of its own: the rehearsal's report."""
    from prime_hpc.trainer.rehearsal.rehearse import rehearse

    with tempfile.TemporaryDirectory() as folder:
        return rehearse(experiment_of(case, models), Path(folder))


def child(argv: list[str]) -> None:
    """`python rehearse.py measured|predicted CASES_JSON MODELS RANK FOLDER`: one JSON line a case into FOLDER."""
    from loguru import logger

    from prime_hpc.trainer.ops import cpu_matmul

    logger.remove()
    vars(cpu_matmul)["onednn_is_faster"] = lambda: False  # measured and predicted
    what, cases, models, rank, folder = argv[0], json.loads(argv[1]), Path(argv[2]), int(argv[3]), Path(argv[4])
    for case in cases:
        if what == "measured":
            result: Any = measured(case, models, rank, str(folder / f"store-{case['name']}"))
        else:
            result = predicted(case, models)
        if rank == 0:
            with (folder / what).open("a") as file:
                file.write(json.dumps([case["name"], result]) + "\n")


def start(what: str, cases: list[dict[str, Any]], models: Path, rank: int, folder: Path) -> "subprocess.Popen[bytes]":
    """A child process."""
    environment = {**os.environ, "PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, __file__, what, json.dumps(cases), str(models), str(rank), str(folder)]
    with (folder / f"log-{what}-{rank}").open("wb") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log)


def compare(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Measured and predicted peak of each case.

    Raises:
        RuntimeError: a process failed; with the end of its log.
    """
    models = folder / "models"
    for kind in {case["family"] for case in cases}:
        make_model(models / kind, kind)
    for ranks in sorted({case["ranks"] for case in cases}):
        own = [case for case in cases if case["ranks"] == ranks]
        _finish([start("measured", own, models, rank, folder) for rank in range(ranks)], folder)
    _finish([start("predicted", cases, models, 0, folder)], folder)
    found = {
        what: dict(map(json.loads, (folder / what).read_text().splitlines())) for what in ("measured", "predicted")
    }
    rows = []
    for case in cases:
        real, said = found["measured"][case["name"]], found["predicted"][case["name"]]
        rows.append(
            {"case": case["name"], "ranks": case["ranks"], "measured": real, "predicted": said["peak"]}
            | {"error": said["peak"] / real - 1, "phase": said["phase"], "by_kind": said["by_kind"]}
        )
    return rows


def _finish(processes: list["subprocess.Popen[bytes]"], folder: Path) -> None:
    try:
        codes = [process.wait(DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        texts = [path.read_text()[-2000:] for path in sorted(folder.glob("log-*"))]
        raise RuntimeError("\n".join(text for text in texts if "Error" in text))


def run() -> dict[str, Any]:
    """All cases."""
    with tempfile.TemporaryDirectory(prefix="bench-rehearse-") as folder:
        return {"cases": compare(CASES, Path(folder))}


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'case':<34}{'ranks':>6}{'measured MiB':>14}{'predicted MiB':>15}{'error':>8}  peak in"]
    for row in result["cases"]:
        lines.append(
            f"{row['case']:<34}{row['ranks']:>6}{row['measured'] / 2**20:>14.1f}{row['predicted'] / 2**20:>15.1f}"
            f"{row['error']:>8.1%}  {row['phase']}"
        )
    worst = max(abs(row["error"]) for row in result["cases"])
    return "\n".join([*lines, f"largest error {worst:.1%}"])


if __name__ == "__main__":
    child(sys.argv[1:])
