"""The whole loop with real engines: agreement with vLLM, one shared GPU, a killed server, the run again."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml
from _setting import Outcome, Setting, environment, metrics, passed, policy_model, product, run, shown, skipped, tail

TEMPERATURES = (1.0, 0.7)
STEPS = 3
WORSE_AT_LOWER_T = 1.6
"""Logits are divided by 0.7, and so are their rounding errors: 1.43 times as far, and room for chance."""
WORSE_AFTER = 2.0
KL_LIMIT = 0.02
POLL_S = 0.5


def experiment(setting: Setting, folder: Path, name: str, temperature: float, max_steps: int) -> Path:
    """A small RL experiment on one GPU that engine and trainer share, synchronous, every step an update."""
    renderer = {} if setting.model else {"renderer": "qwen3"}
    tree: dict[str, Any] = {
        "kind": "rl",
        "name": name,
        "output_dir": str(folder),
        "max_steps": max_steps,
        "async_level": 0,
        "seq_len": 512,
        "model": {"name": str(policy_model(setting)), "dtype": "bfloat16", **renderer},
        "trainer": {
            "micro_batch_tokens": 4096,
            # larger steps of random weights end in one reply to everything: no reward, no gradient
            "optim": {"lr": 1e-5 if setting.on_gpu else 1e-4},
            "deterministic": True,
        },
        "orchestrator": {
            "batch_size": 64 if setting.on_gpu else 32,
            "rollouts_per_example": 8,
            "sampling": {"temperature": temperature, "max_tokens": 256 if setting.on_gpu else 16},
            "env": [{"id": "reverse-text", "timeout_s": 120}],
        },
        "inference": {
            "gpu_memory_utilization": 0.3,
            "cpu_kv_cache_gib": 0.25,
            "server": {"port": 0},
        },
    }
    if setting.on_gpu:
        tree |= {"trainer_gpu_ids": [0], "inference_gpu_ids": [0]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def agreement(setting: Setting) -> Outcome:
    """Mean |log pi - log mu| over sampled tokens in bfloat16: of the base model, and after real updates."""
    folder = setting.folder("agreement")
    figures: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        name = f"t{temperature:g}"
        argv = product(setting, "rl", "@", str(experiment(setting, folder, name, temperature, STEPS)), "--clean")
        if run(argv, folder / f"{name}.log"):
            return Outcome("fail", f"T = {temperature:g} failed: {tail(folder / f'{name}.log')}", figures, shown(argv))
        rows = metrics(folder / name)
        if len(rows) != STEPS or not all(row["grad_norm"] > 0 for row in rows):
            return Outcome("fail", f"T = {temperature:g}: {len(rows)} steps, not {STEPS} with a gradient", figures)
        figures[name] = {
            "before": rows[0]["logprob_diff"],
            "after": max(row["logprob_diff"] for row in rows[1:]),
            "kl": max(row["kl"] for row in rows),
            "largest": max(row["logprob_diff_max"] for row in rows),
        }
    one, low = figures["t1"], figures["t0.7"]
    holds = (
        low["before"] <= WORSE_AT_LOWER_T * one["before"]
        and all(case["after"] <= WORSE_AFTER * case["before"] + 1e-4 for case in (one, low))
        and all(case["kl"] < KL_LIMIT for case in (one, low))
    )
    words = (
        f"T = {t}: {case['before']:.2e} nats before, {case['after']:.2e} after updates, KL {case['kl']:.1e}"
        for t, case in (("1", one), ("0.7", low))
    )
    return passed(holds, "; ".join(words), figures, shown(argv))


def sharing(setting: Setting) -> Outcome:
    """In the run of `agreement`: the trainer was started when the engine was ready, and both lived."""
    if not setting.on_gpu:
        return skipped("no GPU to share (tests/integration/test_supervisor.py tries the order of the start)")
    run_dir = setting.folder("agreement") / "t1"
    log = run_dir / "logs" / "supervisor.log"
    text = log.read_text() if log.exists() else ""
    ready, started = text.find("inference[0] is ready"), text.find("started trainer")
    if min(ready, started) < 0:
        return skipped("the run of `agreement` did not get so far")
    took = re.search(r"inference\[0\] is ready after (\d+) s", text)
    order = "after" if ready < started else "BEFORE"
    summary = f"the trainer was started {order} the engine was ready ({took[1] if took else '?'} s)"
    return passed(ready < started and len(metrics(run_dir)) == STEPS, summary)


def replay(setting: Setting) -> Outcome:
    """The steps of `agreement` at T = 0.7 again from the stored batches: attention, shared prompts, the objective."""
    run_dir = setting.folder("agreement") / "t0.7"
    if len(metrics(run_dir)) != STEPS:
        return skipped("the run of `agreement` did not get so far")
    log = setting.folder("replay") / "replay.log"
    argv = [*product(setting)[:3], "replay", str(run_dir)]
    code = run(argv, log)
    return passed(code == 0, f"exit code {code}: {tail(log, 1)}", {}, shown(argv))


def restart(setting: Setting) -> Outcome:
    """SIGKILL to the server's API process in the middle of a run: it is started again, and nothing stays behind."""
    folder = setting.folder("restart")
    before = _used_mib() if setting.on_gpu else 0
    argv = product(setting, "rl", "@", str(experiment(setting, folder, "run", 1.0, 6)), "--clean")
    log, run_dir = folder / "run.log", folder / "run"
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment())
    killed = None
    while process.poll() is None:  # the check's own deadline is the limit
        time.sleep(POLL_S)
        if killed is None and len(metrics(run_dir)) >= 2:
            killed = _kill_server(run_dir)
    text = (run_dir / "logs" / "supervisor.log").read_text()
    steps = [row["step"] for row in metrics(run_dir)]
    restarts = len(re.findall(r"it is started again \(\d", text))
    left = (_used_mib() - before) if setting.on_gpu else 0
    figures = {"killed": killed, "restarts": restarts, "steps": steps, "mib_left": left}
    summary = f"exit code {process.returncode}, {restarts} restart, steps {steps}, {left} MiB left on the GPU"
    holds = process.returncode == 0 and killed is not None and restarts >= 1 and steps == [1, 2, 3, 4, 5, 6]
    return passed(holds and left < 500, summary, figures, f"{shown(argv)}; kill -9 of the server after step 2")


def _kill_server(run_dir: Path) -> int | None:
    text = (run_dir / "logs" / "supervisor.log").read_text()
    found = re.findall(r"started inference\[0\] \(process (\d+)\)", text)
    if not found:
        return None
    os.kill(int(found[-1]), signal.SIGKILL)
    return int(found[-1])


def _used_mib() -> int:
    """Memory in use on GPU 0, of everybody."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0])
