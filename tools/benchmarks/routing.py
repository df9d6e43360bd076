"""`tools/bench routing`: what it is worth that episodes whose prompts begin alike ask one server, for its prefix cache.

Two vLLM servers on the CPU with a random Qwen3 of 20 M parameters, `orchestrator --bench` against both, replies of 8
tokens. Each case two ways, in turn, twice each; the first of four batches warms up.

- `groups`: groups of 8 episodes, prompts of some 900 tokens that share nothing between groups. Groups that stay
  together (as always), and groups whose episodes go wherever there is room.
- `documents`: groups of 2, prompts of 150 tokens of their own behind one of 24 documents of 1,100 tokens, of which a
  server's cache holds some 20 besides what is in flight. Groups that go where their document was sent before (as
  always), and groups that go to the server with the fewest in flight.

`hit_share`: prompt tokens that the servers took from their caches. `cpu_ms`: CPU milliseconds of both servers an
episode. `gain`: episodes per second of the first way over those of the second; `cpu_gain`: CPU time of the second over
that of the first, which other work on the machine changes less. `PRIME_HPC_BENCH_ONLY` names one case.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
BATCH, RUN_S, TURNS = 128, 600.0, 2
KEY = "of-the-benchmark"
WIDER = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 10, "num_attention_heads": 6}
SEQ_LEN = 2048
CASES: dict[str, dict[str, Any]] = {
    "groups": {"group": 8, "args": {}, "cache_gib": 0.5, "ways": ("together", "spread"), "switch": "SPREAD"},
    "documents": {
        "group": 2,
        "args": {"letters": 150, "documents": 24},
        "cache_gib": 0.25,
        "ways": ("near", "apart"),
        "switch": "APART",
    },
}


def make_model(folder: Path) -> Path:
    """Write a Qwen3 that takes longer for a prompt than its server does for a request, with the starter's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prime_hpc.starter.make import make_starter

    make_starter(folder / "starter")
    model = folder / "starter" / "model"
    torch.manual_seed(0)
    stated = {**WIDER, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": SEQ_LEN}
    config = AutoConfig.from_pretrained(model, **stated)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return model


def experiment(case: dict[str, Any], model: Path, folder: Path, urls: list[str], name: str) -> dict[str, Any]:
    """The orchestrator's experiment."""
    return {
        "kind": "rl",
        "name": name,
        "output_dir": str(folder),
        "seq_len": SEQ_LEN,
        "model": {"name": str(model), "dtype": "float32", "renderer": "qwen3"},
        "orchestrator": {
            "batch_size": BATCH,
            "rollouts_per_example": case["group"],
            "max_concurrent": 64,
            "sampling": {"temperature": 1.0, "max_tokens": 8, "extra": {"ignore_eos": True}},
            "advantage": {"zero": "keep"},
            "env": [{"id": "_long_prompt_env", "args": case["args"]}],
            "client": {"base_url": [f"{url}/v1" for url in urls], "api_key_var": "BENCH_KEY"},
            "bench": True,
        },
    }


def counted(urls: list[str]) -> tuple[float, float]:
    """Prompt tokens that were looked up in the servers' caches so far, and found there."""
    from prometheus_client.parser import text_string_to_metric_families

    sums = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for url in urls:
        asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    if sample.name in sums:
                        sums[sample.name] += sample.value
    asked_for, found = sums.values()
    return asked_for, found


def cpu_s(servers: list[Any]) -> float:
    """CPU seconds of the servers' processes so far."""
    times = [process.cpu_times() for server in servers for process in server.members()]
    return sum(t.user + t.system for t in times)


def play(tree: dict[str, Any], servers: list[Any], switch: str) -> dict[str, float]:
    """One orchestrator, to its end; `switch` names what is not to be as always.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    run_dir, urls = Path(tree["output_dir"]) / tree["name"], [server.url for server in servers]
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps(tree))
    environment = os.environ | {"PYTHONPATH": f"{TOP}:{HERE}", "HF_HUB_OFFLINE": "1", "BENCH_KEY": KEY}
    if switch:
        environment[f"PRIME_HPC_BENCH_{switch}"] = "1"
    before, used = counted(urls), cpu_s(servers)
    argv = [sys.executable, "-m", "prime_hpc.cli", "orchestrator", "@", str(path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{tree['name']} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
    used = cpu_s(servers) - used
    report = json.loads((run_dir / "bench" / "orchestrator.json").read_text())
    asked_for, found = (now - then for now, then in zip(counted(urls), before, strict=True))
    return {
        "per_s": report["figures"]["rollouts/s"],
        "hit_share": found / max(1.0, asked_for),
        "cpu_ms": 1e3 * used / (BATCH * len(report["steps"])),
    }


def measure(case: dict[str, Any], folder: Path, model: Path) -> dict[str, Any]:
    """Both ways of a case, in turn."""
    from tests.support.inference_server import ServerProcess

    stated = {"cpu_kv_cache_gib": case["cache_gib"], "api_key": KEY, "cpu_threads": 1}
    stated["vllm"] = {"disable_log_stats": False}
    servers = [ServerProcess(folder / f"server-{i}", model, stated, seq_len=SEQ_LEN) for i in range(2)]
    always, other = case["ways"]
    found: dict[str, list[dict[str, float]]] = {always: [], other: []}
    try:
        urls = [server.wait_ready().url for server in servers]
        for turn in range(TURNS):
            for way, rows in found.items():
                tree = experiment(case, model, folder, urls, f"{way}-{turn}")
                tree["seed"] = 2 * turn + (way == other)  # other prompts each time
                rows.append(play(tree, servers, case["switch"] if way == other else ""))
    finally:
        for server in servers:
            server.close()
    means = {way: {key: statistics.fmean(row[key] for row in rows) for key in rows[0]} for way, rows in found.items()}
    gain = means[always]["per_s"] / means[other]["per_s"]
    cpu_gain = means[other]["cpu_ms"] / means[always]["cpu_ms"]
    return {"ways": means, "runs": found, "gain": gain, "cpu_gain": cpu_gain, "load": os.getloadavg()[0]}


def run() -> dict[str, Any]:
    """All cases, or one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    only = os.environ.get("PRIME_HPC_BENCH_ONLY", "")
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as made:
        model, found = make_model(Path(made)), {}
        for name, case in CASES.items():
            if only in name:
                (folder := Path(made) / name).mkdir()
                found[name] = measure(case, folder, model)
        return found


def render(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for name, found in result.items():
        lines += [
            f"{name}, {way:<9}{row['per_s']:>7.2f} episodes/s, {row['cpu_ms']:>6.1f} ms of the servers' CPU an "
            f"episode, {100 * row['hit_share']:.0f} % of prompt tokens from a cache"
            for way, row in found["ways"].items()
        ]
        lines.append(f"{name}: the first over the second {found['gain']:.2f}, by CPU time {found['cpu_gain']:.2f}")
    return "\n".join(lines)
