"""`prime-hpc render FILE`: the batch script that `submit` would send, or the objects of the run on Kubernetes."""

import os
import sys
from pathlib import Path

from prime_hpc.cli.common import Given, load, parse
from prime_hpc.config import Loaded
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.site import load_site

TARGETS = ("slurm", "kubernetes")


def run(argv: list[str], program: str) -> int:
    """Print the script or the objects, or write them where `--output` or `--chart` says."""
    given = parse("render", argv)
    target = given.get("--target") or "slurm"
    if target not in TARGETS:
        raise ConfigError(f"{target!r} is none of {', '.join(TARGETS)}", "--target")
    loaded = load(given.words, "plan", program)
    if target == "kubernetes":
        return _kubernetes(loaded, given)
    if "--chart" in given:
        raise ConfigError("a chart is for Kubernetes: add --target kubernetes", "--chart")
    from prime_hpc.config.secret import command_without_secrets
    from prime_hpc.slurm.placement import place_slurm
    from prime_hpc.slurm.script import ArrayPart, command_tail, escape_pattern, interpreter, render_job

    experiment = loaded.experiment
    site = load_site(experiment.slurm.site)
    array = None
    if (tasks := given.whole("--array", 1)) is not None:
        run_dir = experiment.run_dir.resolve()
        pattern = f"{escape_pattern(str(run_dir / 'logs'))}/slurm-%A_%a.out"
        array = ArrayPart(run_dir, list(range(tasks)), None, pattern)
    script = render_job(
        place_slurm(experiment, site),
        experiment,
        site,
        python=interpreter(),
        command_tail=command_tail(loaded.argv),
        array=array,
        cwd=Path.cwd(),
    )
    _, left_out = command_without_secrets(loaded.argv)
    if left_out:
        print(
            f"warning: {', '.join(left_out)} holds a secret and is not in the script, which others can read: "
            "to send it by hand, state the secret in the experiment's file as @FILE, or in the environment (PRIME_...)",
            file=sys.stderr,
        )
    return _show(script, given.path("--output"))


def _kubernetes(loaded: Loaded, given: Given) -> int:
    """Print the objects, which hold the run's key, or write a chart."""
    from prime_hpc.kubernetes.manifests import manifests
    from prime_hpc.kubernetes.placement import SITE, for_pods
    from prime_hpc.kubernetes.text import write_chart, yaml_stream
    from prime_hpc.launch.lint.lint import lint_pods, print_warnings, refuse_errors

    if "--array" in given:
        raise ConfigError("arrays are Slurm's: render each experiment on its own", "--array")
    objects = manifests(loaded.experiment)
    findings = lint_pods(for_pods(loaded.experiment), SITE)
    refuse_errors(loaded, findings)
    print_warnings(findings)
    if (folder := given.path("--chart")) is not None:
        if "--output" in given:
            raise ConfigError("a chart is a folder: --chart says where", "--output")
        for path in write_chart(loaded.experiment, folder):
            print(path)
        return 0
    return _show(yaml_stream(objects), given.path("--output"), mode=0o600)


def _show(text: str, output: Path | None, mode: int = 0o666) -> int:
    if output is None:
        print(text, end="")
        return 0
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}", "--output") from error
    return 0
