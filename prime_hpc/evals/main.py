"""`python -m prime_hpc.evals.main RUN_DIR`: the process that evaluates. The supervisor starts it.

Ends with status done and exit code 0 after the last episode, or when it is told to stop (every episode that ended is on
disk); with status failed, one line of reason and exit code 1 otherwise.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import ConfigError, load_run
from prime_hpc.envs.errors import EnvError
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.run import evaluate
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.event_loops import new_event_loop
from prime_hpc.runtime.open_files import raise_descriptor_limit
from prime_hpc.runtime.role_context import LED, RoleContext
from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging.bus import Doorbell

ROLE = "eval"
STOP_GRACE_S = 4.0
"""From being told to stop to the end of the process, at most; the supervisor kills after its own grace."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.evals.main", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory that holds run.yaml")
    run_dir = parser.parse_args(argv).run_dir.resolve()
    context = RoleContext.from_env(ROLE, run_dir)
    setup_logger(ROLE)
    raise_descriptor_limit()
    bell = Doorbell(context.doorbell_address, ROLE, incarnation=context.doorbell_incarnation, run=context.doorbell_run)
    status = RoleStatus(context, bell)
    status.starting()
    status.start_heartbeat()
    try:
        experiment = load_run(run_dir)
        setup_logger(ROLE, level=experiment.log.level, json_lines=experiment.log.json_lines)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_until_stopped(lambda: evaluate(experiment, context, bell, status), bell, status))
    except (ConfigError, EnvError, EvalError, StoreError) as error:
        logger.error(str(error))
        status.failed(str(error))
        return 1
    except BaseException as error:
        logger.exception("the evaluation ends because of a bug")
        status.failed(error)
        raise
    else:
        status.done()
        return 0
    finally:
        bell.close()


async def _until_stopped(begin: Any, bell: Doorbell, status: RoleStatus) -> None:
    """Run until the work is done or somebody says stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reason: list[str] = []

    def request_stop(why: str) -> None:
        reason.append(why)
        stop.set()

    def on_doorbell(message: dict[str, Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(request_stop, str(message.get("reason", "stop on the doorbell")))

    if os.environ.get(LED):  # there SIGTERM is Slurm's warning to the whole job; the supervisor decides
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    numbers = (signal.SIGINT,) if os.environ.get(LED) else (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, request_stop, signal.Signals(number).name)
    bell.subscribe("stop", on_doorbell)
    work = asyncio.create_task(begin(), name="evaluation")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        work.result()
        return
    logger.info(f"stopping: {reason[0]}; started again, the evaluation goes on with the episodes that are missing")
    _end_in_time(status)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _end_in_time(status: RoleStatus) -> None:
    """A thread that cannot be interrupted (tasks being loaded) must not hold up the end."""

    def end() -> None:
        status.done()
        os._exit(0)

    timer = threading.Timer(STOP_GRACE_S, end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # taking apart the thousands of modules behind verifiers would cost another second of CPU
