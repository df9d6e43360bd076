"""`python -m MODULE` without its seconds of imports: the process forks instead of starting an interpreter anew.

`install` replaces `subprocess.Popen` in a process that has imported everything a run needs (torch, transformers,
verifiers). Children that would run `sys.executable -m MODULE ...` become forks of it: real processes with their own
pid, session, environment, descriptors and signals, children of the process that started them, ended and waited for as
always. What would become such a program by `os.execv` runs it. The product's code is untouched and knows nothing of it.
Everything else is started as usual.

Used by the fault harness (`tools/faults`) and `tests.support.fork_server`, never inside pytest's own process.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import runpy
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger

from prime_hpc.runtime.process_tree import die_with_parent
from prime_hpc.runtime.tied_process import split
from tests.faults import inject

PRELOAD = [
    "anyio._backends._asyncio",
    "httpcore",
    "matplotlib.pyplot",
    "prime_hpc.cli",
    "prime_hpc.launch.local",
    "prime_hpc.supervisor.main",
    "prime_hpc.supervisor.reaper",
    "prime_hpc.orchestrator.main",
    "prime_hpc.envs.workers.worker",
    "prime_hpc.envs.legacy.surface",
    "prime_hpc.envs.episode_runner",
    "prime_hpc.envs.harness",
    "prime_hpc.envs.tasksets.reverse_text",
    "prime_hpc.envs.tasksets.shapes",
    "prime_hpc.trainer.main",
    "prime_hpc.trainer.replay",
    "prime_hpc.trainer.rl",
    "prime_hpc.trainer.sft",
    "renderers",
    "safetensors.torch",
    "tests.support.scripted_server",
    "prime_hpc.trainer.torchrun",
    "torch.distributed.run",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.optim",
    "transformers.generation.configuration_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "verifiers.v1.utils.loaders",
    "yaml",
]
"""What the processes of a run spend their first seconds on."""
SERVER = "prime_hpc.inference.main"
"""Imports vLLM by itself, after it has set the environment for it: never forked from a process that has vLLM, nor is
anything that vLLM starts."""
NETWORK = "PRIME_HPC_TEST_NETWORK"
"""Names the network namespace that a fork enters, which takes root (`tests.support.two_machines`)."""
_CLONE_NEWNET = 0x40000000
_FLAGS = ("-u", "-B", "-P", "-I", "-E", "-s", "-S")


def module_of(args: Sequence[Any]) -> list[str] | None:
    """`[MODULE, argument, ...]` where the command is this interpreter with `-m MODULE`, else None."""
    words = [os.fspath(word) for word in args]
    if not words or words[0] != sys.executable:
        return None
    rest = words[1:]
    while rest and rest[0] in _FLAGS:
        rest = rest[1:]
    if len(rest) < 2 or rest[0] != "-m" or ("vllm" in sys.modules and rest[1].startswith((SERVER, "vllm."))):
        return None
    return rest[1:]


class ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` whose Python children are forks."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        """As in CPython 3.11; only the exec is left out."""
        words = [] if isinstance(args, str | bytes) else [os.fspath(word) for word in args]
        ties = split(words)
        command = module_of(ties[1] if ties else words)
        if command is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        _close_fds, pass_fds, cwd, env, _info, _flags, _shell, p2cread, p2cwrite, c2pread, c2pwrite = rest[:11]
        errread, errwrite, _signals, _gid, _gids, _uid, _umask, new_session, _group = rest[11:]
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()  # what is unreachable now stays so in the fork (`begin_anew`)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, env, cwd, new_session, ties[0] if ties else None, (p2cread, c2pwrite, errwrite), pass_fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def install() -> None:
    """Import everything, then fork from now on."""
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    os.execv = _execv  # type: ignore[assignment]
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = ForkingPopen  # type: ignore[misc]
    gc.collect()
    gc.freeze()  # or every collection in every child would copy the pages of what is shared


_real_execv = os.execv


def _execv(path: Any, args: Sequence[Any]) -> None:
    """As `os.execv`; a Python module needs no new interpreter."""
    command = module_of(args)
    if command is None:
        _real_execv(path, list(args))
    else:
        _become(command, None, None, False, None, (-1, -1, -1), ())


def _enter(network: str) -> None:
    with Path("/run/netns", network).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {network} cannot be entered")


def _become(
    command: list[str],
    env: Any,
    cwd: Any,
    new_session: bool,
    deaf_to: list[int] | None,
    ends: tuple[int, int, int],
    passed: Sequence[int],
) -> None:
    """In the child: what exec would have made new, then the module as `__main__`. Never returns."""
    code = 1
    try:
        begin_anew()
        if new_session:
            os.setsid()
        logger.remove()  # the parent's sinks, before their descriptors get other owners
        replace_descriptors(ends, passed)
        faulthandler.enable(2)  # SIGABRT: where one that is stuck waits
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(k): os.fsdecode(v) for k, v in env.items()})
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:0] = [path for path in paths if path and path not in sys.path]
        if NETWORK in os.environ:
            _enter(os.environ[NETWORK])
        if deaf_to is not None:
            die_with_parent()
            for ignored in deaf_to:
                signal.signal(ignored, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, deaf_to)
        module, sys.argv = command[0], ["-m", *command[1:]]
        Path("/proc/self/comm").write_text(module.removeprefix("prime_hpc.")[-15:])  # for `top`: a fork has no command
        inject.begin(module)
        if module == SERVER:
            _heed_the_compilers_switch()
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the child's outermost frame: what an interpreter does
        traceback.print_exc()
    finally:
        leave(code)


def _heed_the_compilers_switch() -> None:
    """Of the variables that a server of vLLM sets before it imports torch, one is read as torch is imported."""
    import torch._dynamo.config

    from prime_hpc.inference.vllm import args, backend

    build = backend.build_env

    def build_env(*given: Any, **more: Any) -> dict[str, str]:
        env = build(*given, **more)
        torch._dynamo.config.disable = env.get(args.NO_COMPILER) == "1"
        return env

    vars(backend)["build_env"] = build_env


def begin_anew() -> None:
    """In a fork: forget what is to be done at the parent's end.

    Nor are unreachable objects of the parent's ever collected: an open file among them would close its number, which is
    another file's by then.
    """
    gc.freeze()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def leave(code: int) -> NoReturn:
    """End a fork as an interpreter ends, with what is to be done at its end, but for the parent's objects."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


_KEPT: list[Any] = []
"""The parent's streams: collected, they would close descriptors that are others' by now."""


def replace_descriptors(ends: Sequence[int], passed: Sequence[int] = ()) -> None:
    """Standard input, output and error as the parent wants them; all but those `passed` is closed."""
    copies = [os.dup(end) if end != -1 else -1 for end in ends]
    for number, copy in enumerate(copies):
        if copy != -1:
            os.dup2(copy, number)
    bounds = [2, *sorted(passed), 1024]
    for below, above in itertools.pairwise(bounds):
        os.closerange(below + 1, above)
    _KEPT.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
