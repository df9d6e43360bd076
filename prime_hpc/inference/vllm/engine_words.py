"""vLLM's engine cores and workers tell what they do, as the server does (`runtime.activity`), forked and spawned alike.

vLLM starts its processes by two functions. `install` puts `core_main` and `worker_main` in their places: importable by
name, so that a spawned process finds them, and installed again in every core, for the workers that it starts. In each
process the calls that may hang are wrapped: an engine's step, a request of the server's (a weight update), an order to
a worker. That costs two writes of 56 bytes into memory a call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.sched import output
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from prime_hpc.runtime import activity

Function = Callable[..., Any]
CORE, WORKER = "engine core", "worker"
"""`part` of a server's words: its own has none."""
_core_main: Function = EngineCoreProc.run_engine_core
_worker_main: Function = WorkerProc.worker_main


def install() -> None:
    """Have the engines that this process starts tell what they do, where it does itself."""
    _set(EngineCoreProc, "run_engine_core", staticmethod(partial(core_main, activity.introduced())))


def core_main(server: dict[str, Any], *args: Any, dp_rank: int = 0, **more: Any) -> None:
    """Be an engine core of a server.

    Args:
        server: `role`, `index` and `run_dir` of the server; empty: it tells nothing.
        dp_rank: data-parallel rank of the core, among all nodes.
    """
    _send_every_image()
    if not server:
        _core_main(*args, dp_rank=dp_rank, **more)
        return
    activity.introduce(**server, part=CORE, number=dp_rank)
    _set(WorkerProc, "worker_main", staticmethod(partial(worker_main, server, dp_rank)))
    for kind in (EngineCoreProc, DPEngineCoreProc):
        if "run_busy_loop" in vars(kind):
            _wrap(kind, "run_busy_loop", _serving)
    _wrap(EngineCoreProc, "_process_engine_step", partial(_telling, lambda core: "step"))
    _wrap(EngineCoreProc, "_handle_client_request", partial(_telling, _request_name))
    _core_main(*args, dp_rank=dp_rank, **more)


def _send_every_image() -> None:
    """Have this engine core's scheduler send its workers every image of a request, for as long as that lives.

    vLLM leaves out the pixels of images whose keys and values are cached. A new version empties the cache: requests in
    flight begin anew, and the worker would have no pixels to compute them from.
    """

    def whole(features: Any, *_: Any, **__: Any) -> Any:
        return features

    vars(output)["strip_covered_mm_data"] = whole


def worker_main(server: dict[str, Any], dp_rank: int, *args: Any, **more: Any) -> None:
    """Be a worker of an engine core."""
    activity.introduce(**server, part=WORKER, number=more.get("rank", 0), core=dp_rank)
    _wrap(WorkerProc, "worker_busy_loop", _serving)
    _wrap(WorkerProc, "_execute_worker_rpc", partial(_telling, lambda worker, order: str(order[0])[:40]))
    _worker_main(*args, **more)


def _set(kind: Any, name: str, function: Any) -> None:
    setattr(kind, name, function)


def _wrap(kind: type, name: str, wrapper: Callable[[Function], Function]) -> None:
    _set(kind, name, wrapper(vars(kind)[name]))


def _serving(loop: Function) -> Function:
    def begin(process: Any) -> Any:
        activity.doing("serving")
        return loop(process)

    return begin


def _telling(name_of: Function, function: Function) -> Function:
    def tell(*args: Any) -> Any:
        activity.enter(name_of(*args))
        try:
            return function(*args)
        finally:
            activity.leave()

    return tell


def _request_name(core: Any, kind: Any, request: Any) -> str:
    """Name a request; a utility's is a tuple of client, call, method and arguments."""
    method = request[2] if isinstance(request, tuple) and len(request) == 4 else ""
    return f"{getattr(kind, 'name', kind)} {method}".strip().lower()[:40]
