"""Entry point of a trainer rank, for RL and SFT.

    torchrun --nproc-per-node 2 -m prime_hpc.trainer.main RUN_DIR
    torchrun --nproc-per-node 2 -m prime_hpc.trainer.main [sft] @ FILE --KEY VALUE ...   # by hand: see `command_line`

Started by the supervisor (or by hand) after the run directory's `run.yaml` was written. Exit code 0 after the last
step or an orderly stop, 1 on any failure, with the reason in `logs/attempt_k/trainer/status[_<rank>].json`, 2 where
the config of its command line cannot run. A rank to which GPUs were given, and which does not see exactly those, fails
before it does anything.
"""

import argparse
import contextlib
import datetime
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import ConfigError, Experiment, load_run
from prime_hpc.config.child_config import is_parent
from prime_hpc.observe.logs import separate_native_stderr, setup_logger
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime import activity
from prime_hpc.runtime.device import Device, DeviceError, describe_cpu, describe_gpus, planned_device, require_gpus
from prime_hpc.runtime.limits import raise_descriptor_limit
from prime_hpc.runtime.process_memory import freeze_gc, keep_freed_memory
from prime_hpc.runtime.process_tree import die_with_parent
from prime_hpc.runtime.role_context import LED, RoleContext
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.disk import in_words
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.listeners import shut_listeners
from prime_hpc.trainer.affinity import bind_to_gpu
from prime_hpc.trainer.command_line import agree_on_config, collectives_interface, is_by_hand, resolve
from prime_hpc.trainer.determinism import make_deterministic
from prime_hpc.trainer.profiling import last_collectives, record_collectives, snapshot_when_out_of_memory
from prime_hpc.trainer.ranks import file_store
from prime_hpc.weight_transport.network.nccl import read_again

TERM_GRACE_S = 3.5
"""After SIGTERM: time to leave the current Python code; a rank stuck in a collective is ended after it."""


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: nothing but `main` may stop it."""


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Unlike SIG_IGN it is not handed on to what this process starts."""


def watch_sigterm(status: RoleStatus) -> None:
    """Make SIGTERM raise `Terminated` in the main thread, and end the process if that does not help in time.

    Led by an agent (a step of a Slurm job) it is SIGINT instead: SIGTERM then is Slurm's warning to the whole job, and
    the supervisor may still want a save.

    A rank that waits inside a collective runs no Python code, and so no signal handler; but the interpreter's C
    handler still writes to the wake-up socket, which a thread watches.
    """
    wanted = signal.SIGINT if os.environ.get(LED) else signal.SIGTERM
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def run(reader: socket.socket, _writer: socket.socket) -> None:
        # Both are held for as long as this thread lives: the interpreter knows only the number of the writer's
        # descriptor, and would write into whatever file got it next.
        while wanted not in reader.recv(64):
            continue
        time.sleep(TERM_GRACE_S)
        status.failed("ended by SIGTERM (while waiting for other ranks)")
        os._exit(1)

    threading.Thread(target=run, args=(reader, writer), name="sigterm", daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(wanted, _on_sigterm)


def select_device(experiment: Experiment) -> tuple[torch.device, str]:
    """Return this rank's device and the backend of its process group, as the plan has them; nothing is decided here.
    Raises DeviceError: GPUs were planned and are not there, `trainer.backend = nccl` was planned on the CPU, or there
    are more ranks than GPUs on this node."""
    backend = experiment.trainer.backend
    device = Device("cpu", why="trainer.backend = gloo") if backend == "gloo" else planned_device(experiment.device)
    if device.type == "cpu":
        if backend == "nccl":
            raise DeviceError(f"trainer.backend = nccl, but the trainer was given no GPU ({device.why}); use auto")
        logger.log("INFO" if device.is_stated else "WARNING", describe_cpu(device))
        return torch.device("cpu"), "gloo"
    count = require_gpus(device, process="the trainer's ranks on this node")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= count:
        raise DeviceError(
            f"local rank {local_rank} has no GPU: {count} visible; lower trainer.num_ranks or check trainer_gpu_ids"
        )
    own = torch.device("cuda", local_rank)
    torch.cuda.set_device(own)
    if experiment.trainer.bind_cpus:
        bind_to_gpu(own, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    logger.info(f"{describe_gpus(device, count)}; local rank {local_rank} on {torch.cuda.get_device_name(own)}")
    return own, "nccl"


def start_process_group(experiment: Experiment) -> torch.device:
    """Join torchrun's process group (alone where there is no torchrun); returns this rank's device."""
    if experiment.trainer.deterministic:
        make_deterministic()
    device, backend = select_device(experiment)
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's optimizers would make a context on the first GPU
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(experiment.trainer.threads_per_rank or max(1, cores // local_size))
        keep_freed_memory()
    timeout = datetime.timedelta(seconds=experiment.trainer.dist_timeout_s)
    bound = device if device.type == "cuda" else None
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    engines_join = experiment.weights.transport == "nccl"
    if engines_join:
        os.environ.update(read_again(os.environ))
    meeting = file_store(world_size, engines_join=engines_join) if "RANK" in os.environ else dist.HashStore()
    if meeting is None:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    else:
        dist.init_process_group(
            backend, timeout=timeout, device_id=bound, store=meeting, rank=rank, world_size=world_size
        )
    return device


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch; ranks differ."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def train(
    experiment: Experiment,
    context: RoleContext,
    bus: BusClient,
    status: RoleStatus,
    by_hand: Sequence[str] | None = None,
) -> None:
    """One rank's whole life between start-up and status `done`; `by_hand`: the words that hold its config."""
    from prime_hpc.trainer.replay.dump_failed_step import dump_for_replay
    from prime_hpc.trainer.rl import run_rl
    from prime_hpc.trainer.sft import run_sft
    from prime_hpc.trainer.train_step import StepRefused
    from prime_hpc.trainer.trainer import build_trainer

    record_collectives(context.log_dir)
    device = start_process_group(experiment)
    if device.type == "cuda":
        profile = experiment.trainer.profile
        snapshot_when_out_of_memory(context.log_dir, dist.get_rank(), with_stacks=bool(profile and profile.stacks))
    activity.explain("collectives", last_collectives)
    if by_hand is not None:
        agree_on_config(experiment, by_hand)
    seed_everything(experiment.seed, dist.get_rank())
    if is_parent(experiment):
        from prime_hpc.trainer.multi.loop import run_multi
        from prime_hpc.trainer.tinker.worker import run_tinker

        run_many = run_multi if experiment.trainer.tinker is None else run_tinker
        run_many(experiment, context, device, bus, status)
        dist.barrier()
        dist.destroy_process_group()
        return
    trainer = build_trainer(experiment, context, device, bus, status)
    if device.type == "cpu":  # NCCL may still need its listeners, for peers that it has not talked to yet
        dist.barrier()
        shut_listeners()
    freeze_gc()
    try:
        (run_rl if experiment.kind == "rl" else run_sft)(trainer)
        dist.barrier()
    except StepRefused as error:
        status.ends_for(f"rank {trainer.rank}: {type(error).__name__}: {error}")
        try:
            dump_for_replay(trainer, error)
        except StoreError as failure:
            logger.error(f"step {error.step} could not be kept for a replay: {failure}")
        # The first rank to leave makes torchrun end the others: by then each has said why.
        status.failed(error)
        dist.barrier()
        raise
    finally:
        trainer.close()
    dist.destroy_process_group()


def _run_dir(arguments: Sequence[str]) -> tuple[Path, Experiment | None]:
    """Return the run directory, and the experiment where the command line states it.
    Raises ConfigError: that experiment cannot run."""
    if is_by_hand(arguments):
        experiment = resolve(arguments)
        os.environ.update(collectives_interface())
        return experiment.run_dir.resolve(), experiment
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.trainer.main", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="run directory that holds run.yaml")
    return parser.parse_args(arguments).run_dir, None


def main(arguments: list[str] | None = None) -> int:
    """Parse, train, report; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # a torchrun that is killed would leave its ranks behind, to write beside the next ones
    try:
        run_dir, stated = _run_dir(arguments)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this node would say the same
            print(f"trainer: {error.render()}", file=sys.stderr)
        return 2
    raise_descriptor_limit()  # also where no supervisor did: a trainer that was started by hand
    rank = int(os.environ.get("RANK", "0"))
    context = RoleContext.from_env("trainer", run_dir, index=rank)
    activity.introduce("trainer", rank, run_dir.absolute())
    bus = BusClient(context.bus_address, f"trainer[{rank}]", incarnation=context.incarnation)
    status = RoleStatus(context, bus)
    watch_sigterm(status)
    try:
        status.starting()
        separate_native_stderr(context.log_dir / f"rank_{rank}.stderr.log")
        experiment = load_run(run_dir) if stated is None else stated
        level = experiment.log.level if rank == 0 else "WARNING"
        setup_logger(
            f"trainer[{rank}]",
            level=level,
            file=context.log_dir / f"rank_{rank}.log",
            file_level=experiment.log.level,
            json_lines=experiment.log.json_lines,
        )
        warnings.filterwarnings("ignore", category=FutureWarning)
        status.start_heartbeat()  # every rank: the supervisor goes by the one that is silent longest
        train(experiment, context, bus, status, by_hand=arguments if stated is not None else None)
        status.done()
        return 0
    except Terminated:
        status.failed(f"rank {rank}: ended by SIGTERM (by the supervisor, or because another rank failed)")
        return 1
    except Exception as error:  # noqa: BLE001 - the process's outermost frame: any reason is written down, then exit 1
        logger.opt(exception=True).error(f"rank {rank} failed")
        reason = in_words(error)
        status.failed(reason, f"rank {rank}: {type(reason).__name__}: {reason}")
        return 1
    finally:
        bus.close()


def _exit(code: int) -> None:
    """Leave at once: after a failure, other threads (NCCL's watchdog, gloo) may wait for ranks that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
