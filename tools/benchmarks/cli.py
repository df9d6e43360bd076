"""How long the command line takes to answer: fresh processes, beside a bare interpreter. Run by `tools/bench cli`.

Rounds go through all commands in turn, so that a busy moment of the machine touches each alike.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "vllm", "verifiers", "numpy")
ROUNDS = 11

_CONFIG = """\
model: {name: starter}
orchestrator: {env: [{id: reverse-text}]}
inference: {max_model_len: "${seq_len}"}
"""


def _commands(config: Path) -> dict[str, list[str]]:
    """Name -> arguments of the Python interpreter. All start as the console scripts do."""
    rl = "import sys; from prime_hpc.cli import rl; sys.exit(rl())"
    main = "import sys; from prime_hpc.cli import main; sys.exit(main())"
    return {
        "python -c pass": ["-c", "pass"],
        "rl --help": ["-c", rl, "--help"],
        "prime-hpc --help": ["-c", main, "--help"],
        "prime-hpc plan": ["-c", main, "plan", str(config)],
    }


def _config(directory: Path) -> Path:
    """A shipped experiment, the first by name, else a small one of our own."""
    shipped = sorted((CHECKOUT / "configs").glob("**/rl.yaml")) + sorted((CHECKOUT / "configs").glob("**/*.yaml"))
    if shipped:
        return shipped[0]
    path = directory / "exp.yaml"
    path.write_text(_CONFIG)
    return path


def _heavy_imports(arguments: list[str]) -> tuple[list[str], int, str]:
    """Heavy top-level modules that a command imports, its exit code, its standard error's last line."""
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=60, check=False)
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    return [name for name in HEAVY if name in imported], result.returncode, said[-1] if said else ""


def run() -> dict[str, Any]:
    """Median and slowest seconds of each command, and the heavy modules that it imports."""
    with tempfile.TemporaryDirectory() as directory:
        config = _config(Path(directory))
        commands = _commands(config)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        details = {name: _heavy_imports(arguments) for name, arguments in commands.items()}  # warms the file cache too
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PRIME_")}
        for _ in range(ROUNDS):
            for name, arguments in commands.items():
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, *arguments],
                    capture_output=True,
                    cwd=CHECKOUT,
                    env=environ,
                    timeout=60,
                    check=False,
                )
                seconds[name].append(time.perf_counter() - began)
    return {
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "slowest_seconds": {name: round(max(values), 4) for name, values in seconds.items()},
        "heavy_imports": {name: detail[0] for name, detail in details.items()},
        "exit_codes": {name: detail[1] for name, detail in details.items()},
        "stderr": {name: detail[2] for name, detail in details.items() if detail[2]},
        "rounds": ROUNDS,
        "config": os.path.relpath(config, CHECKOUT) if config.is_relative_to(CHECKOUT) else "a small one",
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'command':<20} {'median s':>9} {'slowest s':>10} {'exit':>5}  heavy imports"]
    for name, median in figures["seconds"].items():
        heavy = ", ".join(figures["heavy_imports"][name]) or "none"
        code, slowest = figures["exit_codes"][name], figures["slowest_seconds"][name]
        lines.append(f"{name:<20} {median:>9.3f} {slowest:>10.3f} {code:>5}  {heavy}")
    lines.append(f"{figures['rounds']} rounds, in turn; plan of {figures['config']}")
    lines += [f"{name}: {text}" for name, text in figures["stderr"].items()]
    return "\n".join(lines)
