"""A server's figures of the moment, for whoever asks why nothing goes on: requests, and whether it samples."""

import re
import time

from prime_hpc.client.http import ask

TIMEOUT_S = 0.4
BETWEEN_S = 0.4
KV_USE = "kv_use"
"""Share of the KV cache that is in use, 0 to 1: of several engines the fullest one's."""
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "sampled",
    "vllm:num_preemptions_total": "preempted",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:kv_cache_usage_perc": KV_USE,
}
_LINE = re.compile(rf"^({'|'.join(_NAMES)})(?:\{{.*\}})? (\S+)$", re.MULTILINE)


def server_figures(url: str, key: str) -> dict[str, float | str]:
    """Ask a server for its metrics, twice; takes 1.2 s at most. `url`: of the server, with or without `/v1`.
    Returns `running`, `waiting`: requests; `sampled_per_s`: tokens between the two questions; or `error`."""
    address = f"{url.removesuffix('/v1')}/metrics"
    try:
        first, began = parse_figures(ask(address, timeout_s=TIMEOUT_S, key=key).decode()), time.monotonic()
        time.sleep(BETWEEN_S)
        last = parse_figures(ask(address, timeout_s=TIMEOUT_S, key=key).decode())
    except OSError as error:
        return {"error": f"its own /metrics does not answer: {error}"}
    sampled = last.pop("sampled", 0.0) - first.get("sampled", 0.0)
    return {**last, "sampled_per_s": round(sampled / (time.monotonic() - began), 1)}


def parse_figures(text: str) -> dict[str, float]:
    """Add up the figures of interest over a server's engines; `text` is in Prometheus' form.

    Returns:
        `running`, `waiting`: requests now; since the server's start `sampled`: tokens, `preempted`: requests thrown
        out for want of room, `drafted`, `accepted`: tokens of speculative decoding; `kv_use`. Those that the text does
        not hold are left out.
    """
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        short = _NAMES[name]
        try:
            number = float(value)
        except ValueError:
            continue
        found[short] = max(found.get(short, 0.0), number) if short == KV_USE else found.get(short, 0.0) + number
    return found
