"""`tools/bench routing`: what it is worth that all episodes of a group ask one server, for its prefix cache.

Two vLLM servers on the CPU with a random Qwen3 of 20 M parameters, `orchestrator --bench` against both: groups of 8
episodes, prompts of some 900 tokens that share nothing between groups, replies of 8 tokens. In turn, twice each: groups
that stay together (as always), and groups whose episodes go wherever there is room. The first of four batches warms up.

`hit_share`: prompt tokens that the servers took from their caches. `gain`: episodes per second, together over spread.
"""

import os
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import _orchestrator_alone

BATCH, GROUP, RUN_S = 128, 8, 600.0
KEY = "of-the-benchmark"
WIDER = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 10, "num_attention_heads": 6}
SEQ_LEN = 1024


def make_model(folder: Path) -> Path:
    """Write a Qwen3 that takes longer for a prompt than its server does for a request, with the starter's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prime_hpc.starter.make import make_starter

    make_starter(folder / "starter")
    model = folder / "starter" / "model"
    torch.manual_seed(0)
    stated = {**WIDER, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2 * SEQ_LEN}
    config = AutoConfig.from_pretrained(model, **stated)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return model


def experiment(model: Path, folder: Path, urls: list[str], name: str) -> dict[str, Any]:
    """The orchestrator's experiment."""
    return {
        "kind": "rl",
        "name": name,
        "output_dir": str(folder),
        "seq_len": SEQ_LEN,
        "model": {"name": str(model), "dtype": "float32", "renderer": "qwen3"},
        "orchestrator": {
            "batch_size": BATCH,
            "rollouts_per_example": GROUP,
            "max_concurrent": 64,
            "sampling": {"temperature": 1.0, "max_tokens": 8, "extra": {"ignore_eos": True}},
            "advantage": {"zero": "keep"},
            "env": [{"id": "_long_prompt_env"}],
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


def play(tree: dict[str, Any], urls: list[str], spread: bool) -> dict[str, float]:
    """One orchestrator, to its end."""
    before = counted(urls)
    spreading = {"PRIME_HPC_BENCH_SPREAD": "1"} if spread else {}
    report = _orchestrator_alone.play(tree, KEY, RUN_S, **spreading)
    asked_for, found = (now - then for now, then in zip(counted(urls), before, strict=True))
    return {"per_s": report["figures"]["rollouts/s"], "hit_share": found / max(1.0, asked_for)}


def run() -> dict[str, Any]:
    """Both ways, in turn."""
    from tests.support.inference_server import ServerProcess

    with tempfile.TemporaryDirectory(prefix="bench-routing-") as made:
        folder = Path(made)
        model = make_model(folder)
        stated = {"cpu_kv_cache_gib": 0.5, "api_key": KEY, "cpu_threads": 1, "vllm": {"disable_log_stats": False}}
        os.environ["OMP_NUM_THREADS"] = "1"
        servers = [ServerProcess(folder / f"server-{i}", model, stated, seq_len=SEQ_LEN) for i in range(2)]
        try:
            urls = [server.wait_ready().url for server in servers]
            found: dict[str, list[dict[str, float]]] = {"together": [], "spread": []}
            for turn in range(2):
                for way, rows in found.items():
                    tree = experiment(model, folder, urls, f"{way}-{turn}")
                    tree["seed"] = 2 * turn + (way == "spread")  # other prompts each time
                    rows.append(play(tree, urls, way == "spread"))
        finally:
            for server in servers:
                server.close()
    means = {way: {key: statistics.fmean(row[key] for row in rows) for key in rows[0]} for way, rows in found.items()}
    gain = means["together"]["per_s"] / means["spread"]["per_s"]
    return {"ways": means, "runs": found, "gain": gain, "load": os.getloadavg()[0]}


def render(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"groups {way:<9}{row['per_s']:>7.2f} episodes/s, {100 * row['hit_share']:.0f} % of prompt tokens from a cache"
        for way, row in result["ways"].items()
    ]
    return "\n".join([*lines, f"together over spread: {result['gain']:.2f}"])
