"""The frame of a role whose work is a coroutine: its arguments, its connection to the supervisor, its status, its end.

Ends with status done and exit code 0 after its work, or when it is told to stop (bus "stop", SIGTERM, SIGINT); with
status failed, one line of reason and exit code 1 otherwise.
"""

import argparse
import asyncio
import contextlib
import os
import posix
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import ConfigError, Experiment, load_run
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime import activity
from prime_hpc.runtime.event_loops import new_event_loop
from prime_hpc.runtime.limits import raise_descriptor_limit
from prime_hpc.runtime.role_context import BUS, RoleContext
from prime_hpc.runtime.until_stopped import until_stopped
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.disk import in_words
from prime_hpc.store.messaging.bus import BusClient

Work = Callable[[Experiment, RoleContext, BusClient, RoleStatus], Coroutine[Any, Any, None]]


class OtherCodeError(RuntimeError):
    """Code that is not ours broke the process for all."""


def run_role(
    role: str, work: Work, errors: tuple[type[Exception], ...], *, advice: str = "", argv: Sequence[str] | None = None
) -> int:
    """Run the role; returns the exit code.

    Args:
        errors: those of its work that are no bugs, beside wrong configs and the store's: their message says enough.
        advice: follows the reason in the log where it is told to stop.
    """
    parser = argparse.ArgumentParser(description=f"The process of `{role}`; the supervisor starts it.")
    parser.add_argument("run_dir", type=Path, help="directory that holds run.yaml")
    run_dir = parser.parse_args(argv).run_dir.resolve()
    context = RoleContext.from_env(role, run_dir)
    activity.introduce(role, context.index, run_dir)
    setup_logger(role)
    raise_descriptor_limit()  # also where no supervisor did: a role that was started by hand
    bus = BusClient(context.bus_address, role, incarnation=context.bus_incarnation, run=context.bus_run)
    os.environ.pop(BUS, None)  # the run's messages are no business of programs that episodes start
    status = RoleStatus(context, bus)
    expected: tuple[type[Exception], ...] = (ConfigError, StoreError, *errors)
    status.starting()
    status.start_heartbeat()
    try:
        experiment = load_run(run_dir)
        setup_logger(role, level=experiment.log.level, json_lines=experiment.log.json_lines)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            found = work(experiment, context, bus, status)
            runner.run(until_stopped(found, bus.subscribe, status.done, role, advice))
    except BaseException as error:
        reason = in_words(error)
        if taken := _given_back():
            reason = OtherCodeError(
                f"{error!r}, after code in this process set {', '.join(taken)} to None, as HumanEval's "
                "reliability_guard does: state `workers` of the environment whose rewards run programs themselves"
            )
            expected = (OtherCodeError,)
        if not isinstance(reason, expected):
            logger.exception(f"the process of {role} ends because of a bug")
            status.failed(error)
            raise
        logger.error(str(reason))
        status.failed(reason, str(reason))
        return 1
    else:
        _given_back()
        status.done()
        return 0
    finally:
        bus.close()


def _given_back() -> list[str]:
    """Give `os` the system's functions back that other code has set to None; without them no end could be reported.
    Returns their names."""
    taken = [name for name in sorted(vars(posix)) if vars(os).get(name, name) is None]
    for name in taken:
        setattr(os, name, getattr(posix, name))
    return [f"os.{name}" for name in taken[:3]]


def leave(exit_code: int) -> None:
    """End the process at once: taking apart the thousands of modules behind verifiers would cost a second of CPU.

    What can no longer be written (a full disk, a stream that an environment has closed) is no other end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)
