"""One inference server: `python -m prime_hpc.inference.main RUN_DIR --replica I --port P [--role teacher]`.

Started by the supervisor (which exports CUDA_VISIBLE_DEVICES and the planned device), or by hand. The backend that the
config names (`backend`) serves in this process, so that signals reach it. SIGTERM: requests in flight are answered with
`abort`, engines end, exit code 0, all within 5 s. Exit code 1 means a failure; its reason is the last line of the log
and in the status file.
"""

import argparse
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from prime_hpc.client.figures import server_figures
from prime_hpc.client.keys import server_key
from prime_hpc.config import load_run
from prime_hpc.config.engine_groups import ENGINE_ROLES, SECTIONS, first_port, served_by
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.secret import revealed
from prime_hpc.inference import server_process
from prime_hpc.inference.backend import Start, check_backend, section
from prime_hpc.inference.environment import enter
from prime_hpc.observe.logs import setup_logger
from prime_hpc.runtime import activity
from prime_hpc.runtime.device import planned_device
from prime_hpc.runtime.failures import NodeError
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging import sockets

STATUS_VARIABLES = ("PRIMEHPC_BUS", "PRIMEHPC_ATTEMPT")


class Stopped(BaseException):
    """SIGTERM or SIGINT before serving began. Not an Exception: nobody on the way may swallow it."""


def main(argv: list[str] | None = None) -> int:
    """Run one server to its end; returns the exit code."""
    args = _parse(argv)
    stopping = _end_on_signal()
    activity.introduce(args.role, args.replica, args.run_dir.absolute())
    setup_logger(f"{args.role}[{args.replica}]")
    # the engines of a further node speak through their head
    status = _NoStatus() if args.headless else _status(args.run_dir, args.role, args.replica)
    scratch = server_process.make_scratch()
    code = 1
    try:
        status.starting()
        status.start_heartbeat()
        stated = load_run(args.run_dir)
        setup_logger(f"{args.role}[{args.replica}]", level=stated.log.level, json_lines=stated.log.json_lines)
        experiment = _placed(served_by(stated, args.role), args)
        port = args.port if args.port is not None else _default_port(experiment, args.replica)
        _run(experiment, args, port, scratch, status)
        code = 0
        status.done()
    except (Stopped, Exception) as error:
        if stopping.is_set():  # whatever else the interrupted start-up made of it
            status.done()
            return 0
        status.failed(error)
        print(f"{args.role} server {args.replica} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if not isinstance(error, (ValueError, OSError)):
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return code


def _run(experiment: Experiment, args: argparse.Namespace, port: int, scratch: Path, status: Any) -> None:
    """Bind the port and hand over to the backend."""
    config, section_key = section(experiment), SECTIONS[args.role]
    if config.python is not None:
        enter()
    _require_model(experiment.model.name)
    device = planned_device(experiment.device)
    backend = check_backend(experiment, args.role, device)
    sock = None if config.headless else _bind(config.server.host, port, f"{section_key}.server.port")
    key = server_key(revealed(config.api_key), args.role, experiment.orchestrator.client.api_key_var)

    def on_ready(facts: dict[str, Any]) -> None:
        assert sock is not None
        host = socket.gethostname() if sockets.is_wildcard(config.server.host) else config.server.host
        url = sockets.http_url(host, sock.getsockname()[1])
        print(f"{args.role} server {args.replica} is ready at {url}: {backend.title}, {facts}", flush=True)
        status.ready(url=url, **facts)
        activity.doing("serving", url=url)
        here = sockets.http_url(sockets.reached_at(config.server.host), sock.getsockname()[1])
        activity.explain("figures", lambda: server_figures(here, key))

    backend.serve(Start(experiment, args.role, args.replica, device, scratch, sock, key, on_ready))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.inference.main", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run directory with its run.yaml")
    parser.add_argument("--role", choices=ENGINE_ROLES, default="inference", help="whose engines (default inference)")
    parser.add_argument("--replica", type=int, default=0, help="index of this server (default 0)")
    parser.add_argument("--port", type=int, help="HTTP port (default: inference.server.port + replica)")
    parser.add_argument("--host", help="address to bind (default: inference.server.host)")
    for name in ("data-parallel-size", "data-parallel-size-local", "data-parallel-rpc-port"):
        parser.add_argument(f"--{name}", type=int, help=f"instead of inference.{name.replace('-', '_')}")
    parser.add_argument("--data-parallel-start-rank", type=int, help="first rank of this node's engines")
    parser.add_argument("--data-parallel-address", help="address of the group's head node")
    parser.add_argument("--headless", action="store_true", help="this node's engines belong to another node's head")
    return parser.parse_args(argv)


def _placed(experiment: Experiment, args: argparse.Namespace) -> Experiment:
    """Return the experiment with this server's own place in the job instead of the config's general words."""
    config = section(experiment)
    names = ("size", "size_local", "address", "rpc_port", "start_rank")
    stated = {f"data_parallel_{n}": getattr(args, f"data_parallel_{n}") for n in names}
    changes: dict[str, Any] = {key: value for key, value in stated.items() if value is not None}
    if args.host:
        changes["server"] = config.server.model_copy(update={"host": args.host})
    if args.headless:
        changes["headless"] = True
    return experiment.model_copy(update={"inference": config.model_copy(update=changes)}) if changes else experiment


def _default_port(experiment: Experiment, replica: int) -> int:
    """Of a server that was told none: the config's, 0 for a free one."""
    first = first_port(experiment, section(experiment))
    return first + replica if first else 0


def _require_model(name: str) -> None:
    """Raise NodeError for a path at which nothing is: backends take it for a name at the hub, and never say so."""
    if name.startswith(("/", ".")) and not Path(name).exists():
        raise NodeError(f"the model {name}: no such directory on {socket.gethostname()}")


def _bind(host: str, port: int, key: str) -> socket.socket:
    """Take the port before the slow part of the start-up.
    Raises ValueError: the port is taken or the address is not this machine's."""
    if port:
        sockets.reserve(port)  # under a supervisor, that one has
    try:
        return sockets.bind(host, port)
    except OSError as error:
        where = sockets.join(host, port)
        raise ValueError(f"cannot listen on {where}: {error.strerror}; set {key} to a free one, or 0") from error


def _end_on_signal() -> threading.Event:
    """Until serving begins, SIGTERM and SIGINT break off the start-up; the event says that they did."""
    stopping = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stopping.set()
        server_process.end_hard_soon()
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stopping


def _status(run_dir: Path, role: str, replica: int) -> Any:
    """Return where to report: the run's status file under a supervisor, nowhere when started by hand."""
    if not any(name in os.environ for name in STATUS_VARIABLES):
        return _NoStatus()
    from prime_hpc.observe.role_status import RoleStatus
    from prime_hpc.store.messaging.bus import BusClient

    context = RoleContext.from_env(role, run_dir, index=replica)
    return RoleStatus(context, BusClient(context.bus_address, f"{role}-{replica}", incarnation=context.incarnation))


class _NoStatus:
    """A server that nobody supervises reports to nobody."""

    def starting(self) -> None: ...

    def ready(self, **info: Any) -> None: ...

    def start_heartbeat(self) -> None: ...

    def done(self) -> None: ...

    def failed(self, error: BaseException) -> None: ...


if __name__ == "__mp_main__":  # so Python calls this module in what it spawns, before that does anything else
    server_process.die_with_spawner()

if __name__ == "__main__":
    try:
        exit_code = main()
    except Exception:  # noqa: BLE001 - as Python itself would, but for what native modules say at its end
        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is ended and cleaned up; tearing down torch's and the backend's modules would only take 2 s more.
    os._exit(exit_code)
