"""Use of this node's GPUs of the moment, of both makers: asked of nvidia-smi, amd-smi or rocm-smi, the first that
answers.

A call costs a process for a moment (amd-smi and rocm-smi are Python programs: up to a second of one core), so nobody
asks more often than every `EVERY_S`. Formats: `nvidia-smi --help-query-gpu`; AMD SMI's and ROCm SMI's own `--json`, in
which a value is a number, a string, or `{"value", "unit"}`, and what a GPU does not tell is `N/A`.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prime_hpc.runtime.gpus import run_command

EVERY_S = 30.0
WITHIN_S = 5.0
"""A driver that hangs lets these programs hang."""
MIB = 2.0**20
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class GpuUse:
    """One GPU as its maker's program tells of it; None: it does not tell that."""

    index: str
    utilization: float | None
    """Share of the last moment in which it computed, 0 to 1."""
    memory_used: float | None
    """Bytes."""
    memory_total: float | None
    power_w: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """For people: `0: 93 %, 61.2/80.0 GiB, 412 W`."""
        parts = [f"{self.utilization:.0%}".replace("%", " %")] if self.utilization is not None else []
        if self.memory_used is not None and self.memory_total is not None:
            parts.append(f"{self.memory_used / MIB / 1024:.1f}/{self.memory_total / MIB / 1024:.1f} GiB")
        parts += [f"{self.power_w:.0f} W"] if self.power_w is not None else []
        return f"{self.index}: {', '.join(parts) or 'tells nothing'}"


def has_program() -> bool:
    """Return whether a program is here that may tell of GPUs."""
    return any(shutil.which(command[0]) for command, _ in _PROGRAMS)


def gpu_use() -> list[GpuUse]:
    """Ask the first program that is here and answers. Returns [] where no program is there, or the node has no GPU.
    Raises OSError: none of those that are here answered; says why the first did not."""
    problem: OSError | None = None
    for command, parse in _PROGRAMS:
        program = shutil.which(command[0])
        if program is None:
            continue
        try:
            code, text = run_command([program, *command[1:]], WITHIN_S)
            if code:
                raise OSError(f"{command[0]} ended with {code}: {(text.strip().splitlines() or [''])[-1]}")
            return parse(text)
        except subprocess.TimeoutExpired:
            problem = problem or OSError(f"{command[0]} did not answer within {WITHIN_S:g} s")
        except OSError as error:
            problem = problem or error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = problem or OSError(f"{command[0]} answered in a form that is not known: {error}")
    if problem is not None:
        raise problem
    return []


def _number(value: Any, scale: float = 1.0) -> float | None:
    """Read a number, a text that begins with one, or `{"value": ...}`; None for `N/A` and the like."""
    if isinstance(value, Mapping):
        value = value.get("value")
    if isinstance(value, bool) or value is None:
        return None
    match = _NUMBER.match(str(value))
    return float(match[1]) * scale if match else None


def _of_nvidia(text: str) -> list[GpuUse]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not cells[0].isdigit():
            raise ValueError(line)
        index, busy, used, total, power = cells
        found.append(GpuUse(index, _number(busy, 0.01), _number(used, MIB), _number(total, MIB), _number(power)))
    return found


def _of_amd(text: str) -> list[GpuUse]:
    document = _json(text)
    rows: Iterable[Mapping[str, Any]] = document["gpu_data"] if isinstance(document, Mapping) else document
    return [
        GpuUse(
            str(row["gpu"]),
            _number(_part(row, "usage").get("gfx_activity"), 0.01),
            _number(_part(row, "mem_usage").get("used_vram"), MIB),
            _number(_part(row, "mem_usage").get("total_vram"), MIB),
            _number(_part(row, "power").get("socket_power")),
        )
        for row in rows
    ]


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a GPU's facts; `N/A` stands for a whole part, too."""
    part = row.get(name)
    return part if isinstance(part, Mapping) else {}


def _of_rocm(text: str) -> list[GpuUse]:
    cards = {name.removeprefix("card"): card for name, card in _json(text).items() if name.startswith("card")}
    powers = ("Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)")
    return [
        GpuUse(
            index,
            _number(card.get("GPU use (%)"), 0.01),
            _number(card.get("VRAM Total Used Memory (B)")),
            _number(card.get("VRAM Total Memory (B)")),
            next((watts for name in powers if (watts := _number(card.get(name))) is not None), None),
        )
        for index, card in sorted(cards.items(), key=lambda pair: (len(pair[0]), pair[0]))
    ]


def _json(text: str) -> Any:
    """Read JSON behind the warnings that these programs print before it."""
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
    if start is None:
        raise ValueError("no JSON")
    return json.JSONDecoder().raw_decode(text[start.start() :].lstrip())[0]


_NVIDIA_FIELDS = "index,utilization.gpu,memory.used,memory.total,power.draw"
_PROGRAMS: tuple[tuple[tuple[str, ...], Callable[[str], list[GpuUse]]], ...] = (
    (("nvidia-smi", f"--query-gpu={_NVIDIA_FIELDS}", "--format=csv,noheader,nounits"), _of_nvidia),
    (("amd-smi", "metric", "--usage", "--mem-usage", "--power", "--json"), _of_amd),
    (("rocm-smi", "--showuse", "--showmeminfo", "vram", "--showpower", "--json"), _of_rocm),
)
