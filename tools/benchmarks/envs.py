"""`tools/bench envs`: episodes of an environment whose reward takes 20 ms of CPU, in-process and played by workers.

Single-turn episodes against a server that answers at once, a process of its own whose CPU time is not counted. The
sides take turns; each figure is the median of the rounds.

`episodes_per_s`: by the clock. `per_core`: episodes for each CPU second of orchestrator, host and workers together,
which is what a core gives that they have for themselves; 50 is what the reward leaves. `longest_pause_s`: the longest
time for which the orchestrator's event loop did not run a callback that was due, with the machine's own part in it:
`idle_pause_s` is that of a loop with nothing to do, in a process beside. Each round plays twice, once for the first two
figures and once for the pauses: to look at a loop 200 times a second costs up to 1 ms of CPU an episode.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from _idle_loop import watch

REWARD_S = 0.020
NUM_EPISODES = 400
CONCURRENCY = 64
ROUNDS = 3


def run() -> dict[str, Any]:
    """Both sides in turn."""
    here = Path(__file__).resolve().parent
    paths = [str(here.parents[1]), str(here), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.support.tiny_tokenizer import make_tokenizer

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="prime-hpc-bench-") as name:
        make_tokenizer(Path(name))
        with _server(Path(name)) as url:
            sides = asyncio.run(_sides(Path(name), url, cores))
    return {"num_episodes": NUM_EPISODES, "reward_cpu_s": REWARD_S, "cores": cores, **sides}


async def _sides(folder: Path, url: str, cores: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"in_process": [], "workers": []}
    async with _pool(folder, url, cores) as pool:
        for source in (0, 1):
            await _play(pool, source, 4 * cores)  # warm
        for _ in range(ROUNDS):
            for source, side in enumerate(found):
                found[side].append(await _measure(pool, source))
    return {side: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for side, rows in found.items()}


@contextlib.asynccontextmanager
async def _pool(folder: Path, url: str, cores: int) -> AsyncIterator[Any]:
    """The environment twice: played here, and by a worker for each core."""
    from prime_hpc.config.sections.orchestrator import EnvConfig
    from prime_hpc.envs.pool import EnvPool
    from prime_hpc.envs.pool_settings import PoolSettings
    from prime_hpc.runtime.process_memory import freeze_gc

    costly: dict[str, Any] = {"id": "_costly_env", "args": {"cpu_ms": REWARD_S * 1e3}}
    settings = PoolSettings(
        envs=[EnvConfig(**costly, name="here", workers=0), EnvConfig(**costly, name="there", workers=cores)],
        samplings=[{"max_tokens": 8}] * 2,
        model_name="policy",
        tokenizer_path=str(folder),
        urls=[url],
        split="train",
        seed=0,
        max_model_len=2048,
    )
    async with EnvPool(settings) as pool:
        freeze_gc()
        yield pool


async def _play(pool: Any, source: int, number: int) -> None:
    """Play so many episodes, `CONCURRENCY` at once."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(task: int) -> None:
        async with room:
            result = await pool.run_episode(source, task)
            assert result.usable, result.reason

    await asyncio.gather(*(one(task) for task in range(number)))


async def _measure(pool: Any, source: int) -> dict[str, float]:
    used, begin = _cpu_s(), time.perf_counter()
    await _play(pool, source, NUM_EPISODES)
    used, end = _cpu_s() - used, time.perf_counter()
    return {"episodes_per_s": NUM_EPISODES / (end - begin), "per_core": NUM_EPISODES / used} | await _pauses(
        pool, source
    )


async def _pauses(pool: Any, source: int) -> dict[str, float]:
    here = Path(__file__).resolve().parent
    idle = subprocess.Popen(
        [sys.executable, str(here / "_idle_loop.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    await asyncio.sleep(0.5)
    pauses: list[float] = []
    watching = asyncio.create_task(watch(pauses))
    await _play(pool, source, NUM_EPISODES)
    watching.cancel()
    return {"longest_pause_s": max(pauses), "idle_pause_s": float(idle.communicate("")[0])}


def _cpu_s() -> float:
    """CPU seconds that this process and its descendants have used so far; none of them ends meanwhile."""
    own = psutil.Process()
    tree = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(times.user + times.system for times in tree)


@contextlib.contextmanager
def _server(folder: Path) -> Any:
    """A server in a process that this one's CPU clock does not count: its parent is gone."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [*tokenizer.encode("fine", add_special_tokens=False), tokenizer.eos_token_id]
    content = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids]
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(ids)}]
    answer = json.dumps({"request_id": "r", "choices": [choice]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
    ready, told = os.pipe()
    alive, hold = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os.close(hold)
            os.setsid()
            asyncio.run(_serve(head + answer, told, alive))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(alive)
    port = int(os.read(ready, 16))
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.close(hold)


async def _serve(answer: bytes, told: int, alive: int) -> None:
    """Answer every request alike, until the benchmark has gone."""

    class Http(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.received, self.wanted = transport, b"", 0

        def data_received(self, data: bytes) -> None:
            self.received += data
            head, end, body = self.received.partition(b"\r\n\r\n")
            if end and len(body) >= _length(head):
                self.received = b""
                self.transport.write(answer)

    server = await asyncio.get_running_loop().create_server(Http, "127.0.0.1", 0)
    os.write(told, str(server.sockets[0].getsockname()[1]).encode())
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(alive, gone.set)
    await gone.wait()
    os._exit(0)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def render(figures: dict[str, Any]) -> str:
    """A line for each side."""
    lines = [
        f"{figures['num_episodes']} episodes, rewards of {figures['reward_cpu_s'] * 1e3:.0f} ms of CPU, "
        f"{figures['cores']} cores"
    ]
    for side, label in (("in_process", "in the orchestrator"), ("workers", "by workers, one a core")):
        row = figures[side]
        lines.append(
            f"  {label:<24} {row['episodes_per_s']:6.1f} episodes/s, {row['per_core']:5.1f} per CPU second, "
            f"longest pause {row['longest_pause_s']:.3f} s (an idle loop beside: {row['idle_pause_s']:.3f} s)"
        )
    return "\n".join(lines)
