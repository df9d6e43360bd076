"""`prime-hpc lint FILE ... [--KEY VALUE ...]`: what is wrong, without a cluster."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.cli.common import load, parse, print_json, with_own_flags
from prime_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from prime_hpc.config import Loaded
    from prime_hpc.launch.lint.lint_finding import Finding

CLEAN, WRONG = 0, 2


def run(argv: list[str], program: str) -> int:
    """Lint each file by itself, all with the same overrides; returns 2 where one has an error (--strict: a warning)."""
    given = parse("lint", argv)
    files, overrides = _split(given.words)
    reports = [_lint_one(file, overrides, program) for file in files or [""]]
    severities = {finding["severity"] for report in reports for finding in report["findings"]}
    if "--json" in given:
        print_json([{k: v for k, v in report.items() if k != "lines"} for report in reports])
    else:
        for report in reports:
            _print(report, len(reports) > 1)
    return WRONG if "error" in severities or ("--strict" in given and "warning" in severities) else CLEAN


def _split(rest: list[str]) -> tuple[list[str], list[str]]:
    """Return the files that come first, and what follows for all of them."""
    count = next((i for i, token in enumerate(rest) if token.startswith(("-", "@"))), len(rest))
    return rest[:count], rest[count:]


def _lint_one(file: str, overrides: list[str], program: str) -> dict[str, Any]:
    """One file's findings; a config that does not resolve is one finding a problem."""
    from prime_hpc.launch.lint.lint_finding import Finding

    words = [*([file] if file else []), *overrides]
    try:
        loaded = load(words, "plan", program)
        from prime_hpc.config.site import load_site
        from prime_hpc.launch.lint.lint import lint

        site = load_site(loaded.experiment.slurm.site)
        found = lint(loaded.experiment, site)
        found += _of_shapes(words, loaded, found)
        origins = loaded.provenance
        lines = [f.line(str(origins[f.key]) if f.key in origins else None) for f in found]
        name = site.name
    except ConfigError as raised:
        error = with_own_flags(raised, "lint")
        found = [Finding.error("PH000", p.key, p.message, "") for p in error.problems]
        lines = [f.line(str(p.origin) if p.origin else None) for f, p in zip(found, error.problems, strict=True)]
        name = None
    return {"file": file or None, "site": name, "findings": [f.as_dict() for f in found], "lines": lines}


def _of_shapes(words: list[str], loaded: "Loaded", known: list["Finding"]) -> list["Finding"]:
    """Return what is found in a shape of `slurm.shapes` and not in the experiment as it stands."""
    from prime_hpc.config import load_experiment
    from prime_hpc.config.site import load_site
    from prime_hpc.launch.lint.lint import lint

    found = []
    stated = loaded.experiment.slurm.shapes
    for shape in stated if isinstance(stated, list) else []:  # those of `auto` are asked about when they are derived
        one = load_experiment([*words, "--slurm.shape", shape.name], "plan").experiment
        theirs = [finding for finding in lint(one, load_site(one.slurm.site)) if finding not in known]
        found += [replace(finding, message=f"shape {shape.name!r}: {finding.message}") for finding in theirs]
    return found


def _print(report: dict[str, Any], several: bool) -> None:
    label = f"{Path(report['file'])}: " if several and report["file"] else ""
    for line in report["lines"]:
        print(f"{label}{line}")
    counts = {kind: sum(f["severity"] == kind for f in report["findings"]) for kind in ("error", "warning", "info")}
    if not report["findings"]:
        print(f"{label}clean")
    else:
        print(
            label + ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items() if count)
        )
