"""`prime-hpc diff RUN_A RUN_B`: what differs between two runs, or between two files of benchmark figures.

Exit codes: 0 compared, whatever differs; 2 a run does not exist, or a file holds no figures.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from prime_hpc.cli.common import parse
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.monitor.diff import compare_files, compare_runs
from prime_hpc.observe.table import align
from prime_hpc.store.run_dirs import find_run


def run(argv: list[str], program: str) -> int:
    """Compare and print."""
    given = parse("diff", argv)
    rest = given.arguments(2, least=2)
    are_files = [Path(word).expanduser().is_file() for word in rest]
    if all(are_files):
        found = compare_files(*(Path(word).expanduser() for word in rest))
    elif any(are_files):
        raise ConfigError(f"{rest[are_files.index(True)]} is a file: a run is compared with a run, a file with a file")
    else:
        found = compare_runs(*(find_run(word) for word in rest))
    given.tell(lambda: found, lambda: render(found))
    return 0


def render(found: dict[str, Any]) -> str:
    """Return the differences for people; a section without any is one line."""
    lines = [f"a  {found['runs'][0]}", f"b  {found['runs'][1]}"]
    lines += [f"missing: {name}" for name in found.get("missing", [])]
    lines += _pairs("config", found["config"])
    if "code" in found:
        lines += _code(found["code"])
        lines += _pairs("packages", found["packages"])
        lines += _pairs("environment", found["environment"])
        lines += _command(found["command"])
    lines += ["", "figures"]
    rows = [("", "a", "b", "b/a")]
    for name, row in found["figures"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        rows.append((name, _figure(row["a"]), _figure(row["b"]), ratio))
    lines += [f"  {line}" for line in align(rows, right=True)]
    return "\n".join(lines) + "\n"


def _pairs(title: str, pairs: dict[str, Any]) -> list[str]:
    if not pairs:
        return ["", f"{title}: the same"]
    rows = [(key, f"{_text(a)} -> {_text(b)}") for key, (a, b) in pairs.items()]
    return ["", f"{title}: {len(pairs)} differ", *(f"  {line}" for line in align(rows))]


def _code(code: dict[str, Any]) -> list[str]:
    (a, b), (changed_a, changed_b) = code["sha"], code["changed"]
    if a is None and b is None:
        return ["", "code: neither run was made from a git checkout"]
    same = a == b and code["same_changes"]
    lines = ["", "code: the same" if same else "code: differs"]
    if not same or changed_a or changed_b:
        for label, sha, changed in (("a", a, changed_a), ("b", b, changed_b)):
            dirty = f", {changed} file(s) changed or untracked" if changed else ", nothing changed"
            lines.append(f"  {label}  {sha or 'no checkout'}{dirty if sha else ''}")
        if a == b and not same:
            lines.append("  the same commit with other changes: see git.diff in the two lock.json")
    return lines


def _command(commands: list[Any]) -> list[str]:
    texts = [shlex.join(map(str, command)) if command else "unknown" for command in commands]
    return (
        ["", "command: the same"] if texts[0] == texts[1] else ["", "command", f"  a  {texts[0]}", f"  b  {texts[1]}"]
    )


def _text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value % 1 == 0 else f"{value:.4g}"
