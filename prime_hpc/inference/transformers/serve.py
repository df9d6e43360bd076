"""The server process of the transformers backend: loads the model, answers until told to stop."""

import asyncio
import contextlib
import logging
import socket
from typing import Any

import torch
import uvicorn
from loguru import logger
from transformers.utils.logging import disable_progress_bar

from prime_hpc.client.http import SERVERS_KEEP_ALIVE_S
from prime_hpc.inference.backend import POLICY, REPLICA_SEED_STRIDE, Start
from prime_hpc.inference.check_version import base_weights
from prime_hpc.inference.ending import DRAIN_S, End
from prime_hpc.inference.guard import KeyGuard, PendingConnections
from prime_hpc.inference.transformers.app import build_app
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.model import GIB, BatchModel
from prime_hpc.inference.transformers.requests import Reader
from prime_hpc.inference.transformers.weight_updates import BatchPolicy
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.store.model.tokenizer import load_tokenizer


class Server(uvicorn.Server):
    """Leaves signals to us."""

    def capture_signals(self) -> Any:
        """Do nothing about them."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. From then on, and not before, the next server may have the port while connections to this one are
        being forgotten: one that is killed is started again at its own address."""
        for sock in sockets or []:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)


def _build(start: Start) -> tuple[Engine, BatchPolicy, Reader]:
    """Load the model: engine, policy and reader of requests. Raises ValueError: it cannot be served."""
    experiment, config = start.experiment, start.config
    model, on_gpu = experiment.model, start.device.type == "cuda"
    disable_progress_bar()  # in a log it is a line of all its states
    loaded = BatchModel(
        model.name,
        dtype=getattr(torch, model.dtype),
        device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        max_len=experiment.max_model_len,
        cache_gib=config.kv_cache_gib if on_gpu else config.cpu_kv_cache_gib,
        gpu_share=config.gpu_memory_utilization,
        max_rows=config.max_num_seqs,
        trust_remote_code=model.trust_remote_code,
        float32_head=model.head_dtype == "float32",
        float32_routers=model.router_dtype == "float32",
        records_experts=experiment.replays_routers,
    )
    error = loaded.self_test()
    try:
        tokenizer = load_tokenizer(model.name, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as problem:
        logger.warning(f"{model.name} has no tokenizer that can be read, so token ids alone are taken: {problem}")
        tokenizer = None
    logger.info(
        f"transformers backend: {loaded.num_rows} sequences of {loaded.max_len} tokens at once, "
        f"{loaded.num_rows * loaded.max_len * loaded.token_bytes / GIB:.2f} GiB of keys and values; "
        f"a batch differs from single sequences by {error:.1e}"
    )
    seed = experiment.seed + REPLICA_SEED_STRIDE * start.replica
    engine = Engine(loaded, seed=seed, keep_kv_cache=config.keep_kv_cache)
    names = list(dict.fromkeys([POLICY, model.name]))
    reader = Reader(tokenizer, names, loaded.vocab_size, loaded.max_len)
    return engine, BatchPolicy(engine, model.name, base_weights(model.name), start.scratch / "weights"), reader


async def serve(start: Start) -> None:
    """Answer requests until told to stop, or the engine fails."""
    assert start.sock is not None, "headless is refused"
    engine, policy, reader = await asyncio.to_thread(_build, start)
    app = build_app(engine, policy, reader, start.experiment.max_model_len)
    visitors = PendingConnections()
    server = Server(
        uvicorn.Config(
            KeyGuard(app, start.key, visitors),
            http=visitors.protocol(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=SERVERS_KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    ended = End()
    ended.watch_signals()
    engine.start()
    serving = asyncio.create_task(server.serve(sockets=[start.sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    freeze_gc()
    start.on_ready({"num_engines": 1, "version": policy.version})
    await ended.wait(lambda: engine.failure or ("the HTTP server ended by itself" if serving.done() else None))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # 50 lines for each connection that must be cut
    await asyncio.to_thread(engine.stop, DRAIN_S)
    server.should_exit = True
    _, pending = await asyncio.wait([serving], timeout=DRAIN_S + 0.5)
    for task in pending:
        task.cancel()
    if ended.failure is not None:
        raise RuntimeError(ended.failure)
