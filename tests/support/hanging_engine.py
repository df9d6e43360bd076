"""A plugin for vLLM (`install`) that makes a step hang where a file says: [process of the server] [how].

worker 1 sleep      that worker waits in the model's execution while the file is there
engine core 0 C     ... and keeps the interpreter to itself, in a call in C that never comes back
"""

import ctypes
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from prime_hpc.runtime import activity

FILE, METHOD = "HANGING_ENGINE", "HANGING_ENGINE_METHOD"


def environment(folder: Path, *, spawn: bool = False) -> Mapping[str, str]:
    """Make the plugin known to the interpreters that get these variables, as an installed package would be."""
    facts = folder / "plugins" / "hanging_engine-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging-engine\nVersion: 0\n")
    target = "hanging_engine = tests.support.hanging_engine:register\n"
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{target}")
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(facts.parent), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, FILE: str(folder / "hang"), METHOD: "spawn" if spawn else ""}


def register() -> None:
    """Be called by vLLM in each of its processes."""
    import multiprocessing

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if os.environ[METHOD]:  # on a CPU our server forks
        for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
            _set(import_module(name), "get_mp_context", lambda: multiprocessing.get_context("spawn"))
    execute = GPUModelRunner.execute_model
    if getattr(execute, "hangs", False):  # forked from a process that has it
        return

    def execute_model(self: Any, *args: Any, **more: Any) -> Any:
        stand_still(Path(os.environ[FILE]))
        return execute(self, *args, **more)

    _set(execute_model, "hangs", True)
    _set(GPUModelRunner, "execute_model", execute_model)


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def stand_still(file: Path) -> None:
    """Wait while the file names this process."""
    word = activity._page.row if activity._page is not None else {}
    while file.exists():
        who, _, how = file.read_text().rpartition(" ")
        if who != f"{word.get('part')} {word.get('number')}":
            return
        if how == "C":
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        time.sleep(0.05)
