"""Use of GPUs of both makers, by programs on PATH that answer as theirs do; and where it goes from there."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli.verbs.run.status import render_one
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.runtime import gpu_use as module
from prime_hpc.runtime.gpu_use import GpuUse, gpu_use
from prime_hpc.supervisor import gpu_watch
from prime_hpc.supervisor.gpu_watch import GpuWatch, sample_forever, summary
from prime_hpc.supervisor.prometheus.figures import Figures
from prime_hpc.supervisor.stalls.collect import look_here, report, text_of

GIB = 2.0**30
NVIDIA = "0, 93, 62669, 81559, 412.37\n1, [N/A], 4, 81559, [N/A]\n"
"""Of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; the second one is cut up (MIG)."""
AMD = {
    "gpu": 0,
    "usage": {
        "gfx_activity": {"value": 87, "unit": "%"},
        "umc_activity": {"value": 31, "unit": "%"},
        "mm_activity": "N/A",
    },
    "power": {
        "socket_power": {"value": 542, "unit": "W"},
        "gfx_voltage": "N/A",
        "throttle_status": "UNTHROTTLED",
    },
    "mem_usage": {
        "total_vram": {"value": 196592, "unit": "MB"},
        "used_vram": {"value": 98296, "unit": "MB"},
        "free_vram": {"value": 98296, "unit": "MB"},
    },
}
ROCM = {
    "card0": {
        "GPU use (%)": "99",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "34351349760",
        "Average Graphics Package Power (W)": "412.0",
    },
    "card1": {
        "GPU use (%)": "0",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "10960896",
        "Average Graphics Package Power (W)": "N/A (Secondary die)",
    },
    "system": {"Driver version": "6.3.6"},
}
"""As on a node of MI250X: two dies, of which the first tells the power of both."""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a program on PATH, which has nothing else: prints its answer and keeps its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, answer: str, code: int = 0, *, sleeps: float = 0.0) -> Path:
        (folder / f"{name}.out").write_text(answer)
        script = (
            f'#!/bin/sh\necho "$@" >> "{folder}/{name}.asked"\n/bin/sleep {sleeps}\n/bin/cat "{folder}/{name}.out"\n'
        )
        (folder / name).write_text(f"{script}exit {code}\n")
        (folder / name).chmod(0o755)
        return folder / f"{name}.asked"

    return make


def test_nvidia(install: Install) -> None:
    asked = install("nvidia-smi", NVIDIA)
    first, cut_up = gpu_use()
    assert first == GpuUse("0", 0.93, 62669 * 2.0**20, 81559 * 2.0**20, 412.37)
    assert (cut_up.utilization, cut_up.power_w) == (None, None) and cut_up.memory_used == 4 * 2.0**20
    assert first.text() == "0: 93 %, 61.2/79.6 GiB, 412 W"
    want = "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw --format=csv,noheader,nounits\n"
    assert asked.read_text() == want


@pytest.mark.parametrize("document", [[AMD], {"gpu_data": [AMD]}], ids=["list", "gpu_data"])
def test_amd_smi(install: Install, document: Any) -> None:
    asked = install("amd-smi", json.dumps(document, indent=4))
    assert gpu_use() == [GpuUse("0", 0.87, 98296 * 2.0**20, 196592 * 2.0**20, 542.0)]
    assert asked.read_text() == "metric --usage --mem-usage --power --json\n"


def test_amd_smi_of_a_gpu_that_tells_nothing(install: Install) -> None:
    install("amd-smi", json.dumps([{"gpu": 1, "usage": "N/A", "power": {"socket_power": "N/A"}, "mem_usage": "N/A"}]))
    assert gpu_use() == [GpuUse("1", None, None, None, None)]
    assert gpu_use()[0].text() == "1: tells nothing"


def test_rocm_smi_behind_its_warnings(install: Install) -> None:
    warning = "\n\nWARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
    install("rocm-smi", warning + json.dumps(ROCM) + "\n")
    first, second = gpu_use()
    assert first == GpuUse("0", 0.99, 34351349760.0, 68702699520.0, 412.0)
    assert (second.index, second.utilization, second.power_w) == ("1", 0.0, None)


def test_the_next_program_is_asked_where_one_does_not_answer(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_use() == [] and not module.has_program()
    install("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9)
    with pytest.raises(OSError, match="nvidia-smi ended with 9: NVIDIA-SMI has failed"):
        gpu_use()
    install("amd-smi", "Traceback (most recent call last):\nnothing here is JSON")
    install("rocm-smi", json.dumps(ROCM))
    assert [gpu.index for gpu in gpu_use()] == ["0", "1"]
    monkeypatch.setattr(module, "WITHIN_S", 0.3)
    install("rocm-smi", "{}", sleeps=5)
    with pytest.raises(OSError, match="nvidia-smi ended"):
        gpu_use()
    install("nvidia-smi", NVIDIA, sleeps=5)
    with pytest.raises(OSError, match="nvidia-smi did not answer within"):
        gpu_use()


def test_a_node_says_its_samples_and_the_run_keeps_them(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "EVERY_S", 0.05)
    install("rocm-smi", json.dumps(ROCM))
    watch = GpuWatch(tmp_path / "run", attempt=2)
    over, said = threading.Event(), list[Any]()

    def say(sample: Any) -> None:
        said.append(sample)
        watch.on_message({"event": "gpus", "host": "n1", "gpus": json.loads(json.dumps(sample))})
        over.set()

    sample_forever(say, over, lambda: None)
    watch.on_message({"event": "gpus", "host": "n2", "gpus": [{"error": "rocm-smi did not answer"}]})
    watch.on_message({"event": "beat", "host": "n3"})
    assert len(said) == 1
    facts = watch.facts()
    assert facts["n1"] == {
        "num_gpus": 2, "utilization": 0.495, "least_utilization": 0.0, "memory_used": 34362310656.0,
        "memory_total": 137405399040.0, "power_w": 412.0,
    }  # fmt: skip
    assert facts["n2"] == {"num_gpus": 0, "error": "rocm-smi did not answer"} and "n3" not in facts
    (tmp_path / "run").mkdir()
    watch.start(None)
    end = time.monotonic() + 200
    file = tmp_path / "run" / "metrics" / "gpus.jsonl"
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    watch.close()
    row = json.loads(file.read_text().splitlines()[0])
    assert (row["attempt"], row["num_gpus"], row["power_w"]) == (2, 2, 412.0)
    monkeypatch.setattr(gpu_watch, "FORGET_S", 0.0)
    assert watch.samples() == {}, "a node that is silent tells nothing of now"


def test_where_the_roles_are_processes_here_the_supervisor_samples(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("nvidia-smi", NVIDIA)
    watch, asked = GpuWatch(tmp_path, attempt=1), list[int]()

    def named() -> set[str]:
        asked.append(1)
        return {"1", "2"} if len(asked) > 1 else set()  # no role has begun

    told, take = list[Any](), watch.take

    def keep(host: str, sample: Any) -> None:
        told.append(sample)
        take(host, sample)

    monkeypatch.setattr(watch, "take", keep)
    watch.start("here", named)
    end = time.monotonic() + 200
    while "here" not in watch.facts():
        assert time.monotonic() < end
        time.sleep(0.02)
    watch.close()
    assert [gpu["index"] for gpu in told[0]] == ["1"] and watch.facts()["here"]["num_gpus"] == 1


@pytest.mark.parametrize(
    ("named", "told"),
    [(["1"], ["1"]), (["1", "7"], ["1"]), ([], ["0", "1"]), (None, ["0", "1"]), (["GPU-5"], ["0", "1"])],
)
def test_gpus_of_others_are_no_part_of_the_run(install: Install, named: list[str] | None, told: list[str]) -> None:
    """As far as this process knows its own by their numbers."""
    install("nvidia-smi", NVIDIA)
    over, said = threading.Event(), list[Any]()

    def say(sample: Any) -> None:
        said.append(sample)
        over.set()

    sample_forever(say, over, lambda: named)
    assert [gpu["index"] for gpu in said[0]] == told


def test_nothing_is_started_where_no_program_is(install: Install) -> None:
    sample_forever(lambda sample: pytest.fail("nobody was there to ask"), threading.Event(), lambda: None)


def test_status_prometheus_and_why_show_it(install: Install, tmp_path: Path) -> None:
    install("nvidia-smi", NVIDIA)
    sample = [gpu.as_dict() for gpu in gpu_use()]
    status = RunStatus("demo", str(tmp_path), "running")
    status.gpus = {"n1": summary(sample), "n2": {"num_gpus": 0, "error": "it hangs"}}
    text = render_one(status)
    assert "n1: 2 GPUs, 93 % busy, 61/159 GiB, 412 W" in text and "n2: it hangs" in text
    figures = Figures("demo")
    figures.take_gpus({"n1": sample, "n2": [{"error": "it hangs"}]})
    lines = figures.text().splitlines()
    assert 'prime_hpc_gpu_utilization_ratio{gpu="0",host="n1",run="demo"} 0.93' in lines
    assert 'prime_hpc_gpu_power_watts{gpu="0",host="n1",run="demo"} 412.37' in lines
    assert sum(line.startswith("prime_hpc_gpu_memory_used_bytes{") for line in lines) == 2
    figures.take_gpus({})
    assert "prime_hpc_gpu_utilization_ratio{" not in figures.text()
    document = report(tmp_path, [look_here(tmp_path, pids=[])], patience_s=1.0)
    assert "0: 93 %, 61.2/79.6 GiB, 412 W; 1: 0.0/79.6 GiB" in text_of(document)
