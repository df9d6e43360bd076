"""`prime-hpc render FILE`: the batch script that `submit` would send."""

import sys
from pathlib import Path

from prime_hpc.cli.common import load, take_flags
from prime_hpc.config.errors import ConfigError, Problem


def run(argv: list[str], program: str) -> int:
    """Print the script, or write it where `--output` says."""
    rest, _, values = take_flags(argv, valued=("--output", "--array"))
    loaded = load(rest, "plan", program)
    from prime_hpc.config.secret import command_without_secrets
    from prime_hpc.config.site import load_site
    from prime_hpc.slurm.placement import place_slurm
    from prime_hpc.slurm.script import ArrayPart, command_tail, escape_pattern, interpreter, render_job

    experiment = loaded.experiment
    site = load_site(experiment.slurm.site)
    array = None
    if "--array" in values:
        run_dir = experiment.run_dir.resolve()
        pattern = f"{escape_pattern(str(run_dir / 'logs'))}/slurm-%A_%a.out"
        array = ArrayPart(run_dir, list(range(_count(values["--array"]))), None, pattern)
    script = render_job(
        place_slurm(experiment, site),
        experiment,
        site,
        python=interpreter(),
        command_tail=command_tail(loaded.argv),
        array=array,
    )
    _, left_out = command_without_secrets(loaded.argv)
    if left_out:
        print(
            f"warning: {', '.join(left_out)} holds a secret and is not in the script, which others can read: "
            "to send it by hand, state the secret in the experiment's file as @FILE, or in the environment (PRIME_...)",
            file=sys.stderr,
        )
    if "--output" not in values:
        print(script, end="")
        return 0
    try:
        Path(values["--output"]).write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(Problem(f"{values['--output']} cannot be written: {error.strerror}", "--output")) from error
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise ConfigError(Problem(f"expected a number of tasks from 1, got {text!r}", "--array"))
    return int(text)
