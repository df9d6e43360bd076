"""`prime-hpc doctor [--path DIR [--other DIR]]`: what of this machine, its Slurm or a directory would trouble a run.

Exit codes: 0 nothing fails (there may be warnings); 1 something does; 2 wrong usage.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.cli.common import parse, print_json
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.doctor.doctor import as_json, examine, worst
from prime_hpc.launch.doctor.finding import Finding

if TYPE_CHECKING:
    from prime_hpc.launch.doctor.fs_view import FolderView


def run(argv: list[str], program: str) -> int:
    """Examine the machine, or with --path measure a directory; print one line a finding."""
    given = parse("doctor", argv)
    given.arguments(0)
    path = given.path("--path")
    if "--other" in given and path is None:
        raise ConfigError(f"--other is the directory of --path through another mount; usage: {given.usage}")
    as_data = "--json" in given
    extra: dict[str, Any] = {}
    if path is not None:
        findings, extra["measured"] = _path(path, given.path("--other"))
    else:
        findings = examine()
    if as_data:
        print_json(as_json(findings) | extra)
    else:
        for finding in findings:
            print(finding.line())
        counts = {state: sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")}
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if worst(findings) == "fail" else 0


def _path(path: Path, other: Path | None) -> tuple[list[Finding], dict[str, Any]]:
    from prime_hpc.launch.doctor.advice import advise
    from prime_hpc.launch.doctor.filesystem import measure
    from prime_hpc.launch.doctor.fs_view import FolderView

    view: Callable[[str], FolderView] | None = _other_node(path)
    if other is not None:
        if not other.is_dir():
            raise ConfigError(f"--other {other} is not a directory")

        def view(name: str) -> FolderView:
            return FolderView(other.resolve() / name)

    found = measure(path, view)
    return advise(found), found.as_json()


def _other_node(path: Path) -> "Callable[[str], FolderView] | None":
    """Inside an allocation: the view from one of its nodes that is not this machine."""
    from prime_hpc.launch.doctor.fs_view import RemoteView
    from prime_hpc.launch.doctor.manual_preflight import step_on
    from prime_hpc.slurm.allocation import read_allocation
    from prime_hpc.supervisor.preflight.node import local_hostnames

    allocation = read_allocation()
    others = [host for host in allocation.all_hosts if host not in local_hostnames()] if allocation is not None else []
    if allocation is None or not others:
        return None
    command, environment = step_on(
        allocation, others[0], path.resolve(), ["prime_hpc.launch.doctor.fs_view"], os.environ
    )
    return lambda name: RemoteView(command, path.resolve() / name, environment)
