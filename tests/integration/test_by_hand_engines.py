"""One group of engines by hand on two machines (two network namespaces): a head and a headless one, of real vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.test_trainer import environment
from tests.support.inference_server import save_model
from tests.support.two_machines import Machine, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
INFERENCE = [sys.executable, "-P", "-c", "from prime_hpc.cli.entrypoints import inference as i; raise SystemExit(i())"]
KEY = "of-both"
ASK = """
import concurrent.futures, json, os, re, sys, urllib.request
url, key = sys.argv[1], os.environ["VLLM_API_KEY"]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
        return answer.read().decode()

if sys.argv[2] == "ready":
    urllib.request.urlopen(url + "/health", timeout=5).read()
else:
    body = {"model": "policy", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: call("/v1/completions", body), range(16)))
    texts = {json.loads(reply)["choices"][0]["text"] for reply in replies}
    metrics = call("/metrics")
    done = re.findall(r'vllm:generation_tokens_total{engine="(\\d)".*} (\\S+)', metrics)
    counts = {engine: float(count) for engine, count in done}
    print(json.dumps({"texts": sorted(texts), "tokens": counts}))
"""


def start(machine: Machine, log: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    environ = environment(VLLM_API_KEY=KEY, **variables)
    environ.pop("GLOO_SOCKET_IFNAME", None)
    with log.open("wb") as file:
        return subprocess.Popen(
            [*machine.enter, *INFERENCE, *words], env=environ, stdout=file, stderr=file, start_new_session=True
        )


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def ask(machine: Machine, url: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [*machine.enter, sys.executable, "-c", ASK, url, what]
    return subprocess.run(command, env=environment(VLLM_API_KEY=KEY), capture_output=True, text=True, timeout=120)


def test_engines_of_two_machines_answer_at_one_address(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Where the head is, the variables say; which engines are here, the flags of the reference pages."""
    model = save_model(tmp_path / "model", tied=True, seed=0)
    config = tmp_path / "infer.yaml"
    config.write_text(
        f"output_dir: {tmp_path}\nname: group\nseq_len: 64\nmodel: {{name: {model}, dtype: float32}}\ndevice: cpu\n"
        "inference: {cpu_kv_cache_gib: 0.1, vllm: {disable_log_stats: false}}\n"
    )
    words = ["@", str(config), "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    where = {"DATA_PARALLEL_ADDRESS": machines[0].address, "DATA_PARALLEL_RPC_PORT": "13345"}
    logs = [tmp_path / "head.log", tmp_path / "headless.log"]
    url = f"http://{machines[0].address}:8123"
    with ExitStack() as stack:
        address = ["--server.host", machines[0].address, "--server.port", "8123"]
        head = start(machines[0], logs[0], *words, *address, **where)
        stack.callback(end, head)
        other = start(machines[1], logs[1], *words, "--data-parallel-start-rank", "1", "--headless", **where)
        stack.callback(end, other)
        deadline = time.monotonic() + 280
        while ask(machines[0], url, "ready").returncode:
            alive = head.poll() is None and other.poll() is None
            said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
            assert alive and time.monotonic() < deadline, said
            time.sleep(2)
        answer = ask(machines[1], url, "generate")  # from the other machine, over the cable
        assert answer.returncode == 0, answer.stderr[-2000:]
        found = json.loads(answer.stdout)
        assert len(found["texts"]) == 1, found  # the same weights, greedy
        assert set(found["tokens"]) == {"0", "1"} and min(found["tokens"].values()) > 0, found
        os.kill(head.pid, signal.SIGTERM)
        assert head.wait(200) in (0, -signal.SIGTERM)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(200)
