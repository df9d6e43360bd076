"""`tools/bench concurrency`: episodes per second at constant numbers in flight, and at the engines' own asking.

One vLLM server on the CPU for each of two environments, the starter model, and `orchestrator --bench` against it, once
for every number; the first of its four batches warms up and is not counted.

- `cache`: replies of 32, 96 and 384 tokens (six, three and one of ten), and a KV cache of 6,144 tokens: above some
  number the engine throws requests out and computes them again.
- `tools`: replies of 32 tokens, 32 seats in the engine's batch, and a reward that takes 2 s in which nothing is asked
  of the engine: it idles below some number in flight, far above its seats.

`preempted_share`: requests thrown out an episode. `of_best`: episodes per second over those of the best constant.
"""

import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import _orchestrator_alone

BATCH = 2048
RUN_S = 900.0
SEQ_LEN = 512
CASES: dict[str, dict[str, Any]] = {
    "cache": {
        "server": {"max_num_seqs": 512, "vllm": {"num_gpu_blocks_override": 193}},
        "env": [
            {"id": "reverse-text", "name": f"tokens-{tokens}", "ratio": ratio, "sampling": {"max_tokens": tokens}}
            for tokens, ratio in ((32, 6), (96, 3), (384, 1))
        ],
        "constants": (32, 64, 128, 256),
    },
    "tools": {
        "server": {"max_num_seqs": 32},
        "env": [{"id": "_tool_env", "sampling": {"max_tokens": 32}}],
        "constants": (128, 256, 512, 1024),
    },
}
STARTS = (8, 512)
"""Of the adaptive runs."""


def experiment(
    case: dict[str, Any], model: Path, folder: Path, url: str, flight: int, adaptive: bool
) -> dict[str, Any]:
    """The orchestrator's experiment."""
    return {
        "kind": "rl",
        "name": f"{'adaptive-' if adaptive else ''}{flight}",
        "output_dir": str(folder),
        "seq_len": SEQ_LEN,
        "model": {"name": str(model), "dtype": "float32", "renderer": "qwen3"},
        "orchestrator": {
            "batch_size": BATCH,
            "rollouts_per_example": 4,
            "max_concurrent": flight,
            **({"adaptive_concurrency": {}} if adaptive else {}),
            "sampling": {"temperature": 1.0, "max_tokens": 32, "extra": {"ignore_eos": True}},
            "advantage": {"zero": "keep"},
            "env": case["env"],
            "client": {"base_url": f"{url}/v1", "api_key_var": "BENCH_KEY"},
            "bench": True,
        },
    }


def preempted(url: str, key: str) -> float:
    """Requests that the server has thrown out so far."""
    from prime_hpc.client.figures import parse_figures

    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return parse_figures(answer.read().decode()).get("preempted", 0.0)


def play(tree: dict[str, Any], url: str, key: str) -> dict[str, Any]:
    """One orchestrator, to its end."""
    before = preempted(url, key)
    report = _orchestrator_alone.play(tree, key, RUN_S)
    rows = report["steps"]
    return {
        "per_s": report["figures"]["rollouts/s"],
        "in_flight": sum(row["queue/in_flight_mean"] for row in rows[1:]) / len(rows[1:]),
        "preempted_share": (preempted(url, key) - before) / (BATCH * len(rows)),
        "limits": [row["queue/limit"] for row in rows if "queue/limit" in row],
    }


def measure(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """All runs of one case, on one server."""
    from tests.support.inference_server import ServerProcess

    case, key = CASES[name], "of-the-benchmark"
    stated = {"cpu_kv_cache_gib": 0.5, "api_key": key, **case["server"]}
    stated["vllm"] = {"disable_log_stats": False, **stated.get("vllm", {})}
    server = ServerProcess(folder / "server", model, stated)
    try:
        server.wait_ready()
        warm = experiment(case, model, folder, server.url, 130, False)
        warm["orchestrator"]["batch_size"] = 128
        play(warm, server.url, key)
        constants = {
            flight: play(experiment(case, model, folder, server.url, flight, False), server.url, key)
            for flight in case["constants"]
        }
        adaptive = {
            start: play(experiment(case, model, folder, server.url, start, True), server.url, key) for start in STARTS
        }
    finally:
        server.close()
    best = max(constants, key=lambda flight: constants[flight]["per_s"])
    for row in (*constants.values(), *adaptive.values()):
        row["of_best"] = row["per_s"] / constants[best]["per_s"]
    return {"constants": constants, "adaptive": adaptive, "best": best}


def run() -> dict[str, Any]:
    """Both environments."""
    from prime_hpc.starter.make import make_starter

    with tempfile.TemporaryDirectory(prefix="bench-concurrency-") as made:
        make_starter(Path(made) / "starter")
        only = os.environ.get("PRIME_HPC_BENCH_ONLY", "")
        found = {}
        for name in CASES:
            if only in name:
                folder = Path(made) / name
                folder.mkdir()
                found[name] = measure(name, folder, Path(made) / "starter" / "model")
        return found


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = []
    for name, found in result.items():
        lines.append(f"{name:<20}{'episodes/s':>12}{'of best':>9}{'in flight':>11}{'preempted':>11}")
        rows = {f"{flight} in flight": row for flight, row in found["constants"].items()}
        rows |= {f"adaptive from {start}": row for start, row in found["adaptive"].items()}
        for label, row in rows.items():
            limits = " -> ".join(f"{limit:.0f}" for limit in row["limits"])
            lines.append(
                f"  {label:<18}{row['per_s']:>12.1f}{row['of_best']:>9.2f}{row['in_flight']:>11.1f}"
                f"{row['preempted_share']:>11.3f}  {limits}"
            )
    return "\n".join(lines)
