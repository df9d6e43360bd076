"""`tools/bench eval`: episodes per second of `eval` against what the same engine gives a bare load generator.

One vLLM server with the starter model. The bare side posts the prompts as token ids over as many connections as `eval`
has episodes in flight and looks at nothing; ours is the `eval` command, attached to that server: environment, message
graph, scoring, episodes on disk, from the start of the first episode to the end of the last. Both sample 24 tokens a
reply, no more and no fewer, without log-probabilities. The sides take turns, each beginning every other round;
`ratio_to_engine` is the median of ours over the median of the bare runs. Without start-up times; what follows the last
episode (bootstrap intervals, the summary) is `summary_s`.

Where server and client share all cores, which these runs keep busy, CPU time says the same with less noise:
`cpu_ms` is what one request or episode costs the client (`bare`, `eval`) and the server (`bare_server`,
`eval_server`), medians, and `ratio_by_cpu` is the whole of a bare request over the whole of an episode.

`--apart` gives the server the first of the cores and the client another one, as where engines are on nodes of their
own: whether `eval` then keeps them as busy as the bare side does.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
NUM_EPISODES = 1000
REPLY_TOKENS = 24
SEATS = 128
"""Of the engine."""
CONCURRENCY = 192
"""Of both sides: an engine whose seats are to be full needs some requests that wait."""
ROUNDS = 9
READY_S, RUN_S = 300.0, 600.0
VARIANTS = {"--apart": "_eval_apart"}
SAMPLING = {"temperature": 1.0, "max_tokens": REPLY_TOKENS, "min_tokens": REPLY_TOKENS}


def run(*, apart: bool = False) -> dict[str, Any]:
    """Both sides in turn; `apart`: the server has the first core, the clients the others."""
    from prime_hpc.starter.make import make_starter

    with tempfile.TemporaryDirectory(prefix="prime-hpc-bench-") as name:
        folder = Path(name)
        make_starter(folder / "starter")
        model = folder / "starter" / "model"
        port = _free_port()
        environment = os.environ | {"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1", "BENCH_EVAL_KEY": "of-the-benchmark"}
        server = [
            *_command("inference", model, folder, "--server.port", str(port), "--cpu-kv-cache-gib", "1"),
            *("--max-num-seqs", str(SEATS), "--orchestrator.client.api-key-var", "BENCH_EVAL_KEY"),
        ]
        cores = sorted(os.sched_getaffinity(0))
        with (folder / "server.log").open("w") as log:
            if apart:  # what is started has the cores of who starts it
                os.sched_setaffinity(0, cores[:1])
            process = subprocess.Popen(
                server, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                if apart:
                    os.sched_setaffinity(0, cores[1:])
                url = f"http://127.0.0.1:{port}"
                _wait_ready(url, process, folder / "server.log")
                return _rounds(process.pid, url, model, folder, environment)
            finally:
                os.sched_setaffinity(0, cores)
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _rounds(server: int, url: str, model: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    prompts = _prompts(model)
    asyncio.run(_bare(url, prompts[:CONCURRENCY]))  # warms the server up
    found: dict[str, list[float]] = {name: [] for name in ("bare", "eval", "summary_s")}
    cpu: dict[str, list[float]] = {name: [] for name in ("bare", "bare_server", "eval", "eval_server")}

    def bare(_: int) -> None:
        before, own = _cpu_s(server), time.process_time()
        found["bare"].append(asyncio.run(_bare(url, prompts)))
        cpu["bare"].append(time.process_time() - own)
        cpu["bare_server"].append(_cpu_s(server) - before)

    def ours(number: int) -> None:
        rate, summary_s, cpu_s, server_s = _ours(server, url, model, folder / f"round_{number}", environment)
        cpu["eval_server"].append(server_s)
        cpu["eval"].append(cpu_s)
        found["eval"].append(rate)
        found["summary_s"].append(summary_s)

    for number in range(ROUNDS):
        for side in (bare, ours) if number % 2 == 0 else (ours, bare):
            side(number)
    cpu_ms = {name: 1e3 * statistics.median(values) / NUM_EPISODES for name, values in cpu.items()}
    return {
        "num_episodes": NUM_EPISODES,
        "reply_tokens": REPLY_TOKENS,
        "concurrency": CONCURRENCY,
        "seats": SEATS,
        "bare_per_s": found["bare"],
        "eval_per_s": found["eval"],
        "summary_s": found["summary_s"],
        "cpu_ms": cpu_ms,
        "ratio_to_engine": statistics.median(found["eval"]) / statistics.median(found["bare"]),
        "ratio_by_cpu": (cpu_ms["bare"] + cpu_ms["bare_server"]) / (cpu_ms["eval"] + cpu_ms["eval_server"]),
    }


def _cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and its living descendants."""
    import psutil

    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def _prompts(model: Path) -> list[list[int]]:
    """The very prompts that the environment's episodes have."""
    from transformers import AutoTokenizer

    from prime_hpc.envs.tasksets.reverse_text_data import build_prompt, make_texts

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = make_texts("eval", 0, NUM_EPISODES, min_chars=6, max_chars=16, min_words=2, max_words=3)
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(build_prompt(text), tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )
        for text in texts
    ]


async def _bare(url: str, prompts: list[list[int]]) -> float:
    """Requests per second."""
    import aiohttp

    bodies = iter([json.dumps({"model": "policy", "token_ids": p, "sampling_params": SAMPLING}) for p in prompts])
    headers = {"Authorization": "Bearer of-the-benchmark", "Content-Type": "application/json"}

    async def worker(session: aiohttp.ClientSession) -> None:
        for body in bodies:
            async with session.post(f"{url}/inference/v1/generate", data=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(CONCURRENCY)))
        return len(prompts) / (time.perf_counter() - began)


def _ours(
    server: int, url: str, model: Path, folder: Path, environment: dict[str, str]
) -> tuple[float, float, float, float]:
    """Episodes per second, from the first one's start to the last one's end; seconds from there to the summary; CPU
    seconds of the process that plays, while it plays, and of the server from then on."""
    argv = [
        *_command("eval", model, folder, "--environment-ids", "reverse-text", "--num-examples", str(NUM_EPISODES)),
        *("--max-concurrent", str(CONCURRENCY), "--sampling.temperature", "1", "--client.base-url", f"{url}/v1"),
        *("--sampling.max-tokens", str(REPLY_TOKENS), "--client.api-key-var", "BENCH_EVAL_KEY"),
        *("--sampling.extra", json.dumps({"min_tokens": REPLY_TOKENS})),
    ]
    path, log = folder / "eval" / "metrics" / "eval.jsonl", folder.with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(argv, env=environment, stdout=said, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + RUN_S
    while process.poll() is None and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    before = _cpu_s(server)
    try:
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
    if code:
        raise RuntimeError(f"eval failed ({code}):\n{log.read_text()[-3000:]}")
    server_s = _cpu_s(server) - before
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["step"] == 0 and rows[-1]["step"] == NUM_EPISODES
    last = next(row for row in rows if row["step"] == NUM_EPISODES)
    played_s, cpu_s = (last[key] - rows[0][key] for key in ("time", "cpu_s"))
    return NUM_EPISODES / played_s, rows[-1]["time"] - last["time"], cpu_s, server_s


def _command(verb: str, model: Path, folder: Path, *more: str) -> list[str]:
    common = ["--model.name", str(model), "--model.dtype", "float32", "--seq-len", "128", "--output-dir", str(folder)]
    return [sys.executable, "-m", "prime_hpc.cli", verb, *common, "--model.renderer", "qwen3", *more]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {READY_S:g} s:\n{log.read_text()[-3000:]}")


def render(figures: dict[str, Any]) -> str:
    """For people."""
    bare, ours = (", ".join(f"{v:.1f}" for v in figures[key]) for key in ("bare_per_s", "eval_per_s"))
    summary = ", ".join(f"{value:.2f}" for value in figures["summary_s"])
    cpu = figures["cpu_ms"]
    return (
        f"{figures['num_episodes']} episodes of {figures['reply_tokens']} tokens, {figures['concurrency']} at once on "
        f"{figures['seats']} seats\n"
        f"bare load generator: {bare} requests/s\neval: {ours} episodes/s, then {summary} s for the summary\n"
        f"CPU a request: {cpu['bare']:.2f} ms and {cpu['bare_server']:.2f} of the server; an episode of eval: "
        f"{cpu['eval']:.2f} and {cpu['eval_server']:.2f}\n"
        f"ratio to the engine: {figures['ratio_to_engine']:.3f}, by CPU time {figures['ratio_by_cpu']:.3f}"
    )
