"""`prime-hpc env pack`: the Python environment as one file, which a job's nodes unpack or mount; and `env show FILE`.

Exit codes: 0 packed, or there already, or shown and of this environment; 1 the pack could not be made (a full disk), or
`show`: it is of another environment; 2 no such environment or file, or the command line is wrong.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from prime_hpc.cli.common import Given, parse, print_json, say
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.env_pack import SUFFIXES, best_kind, pack_environment
from prime_hpc.slurm.packed_env.facts import PackFacts, environment_hash
from prime_hpc.store.errors import StoreError


def run(argv: list[str], program: str) -> int:
    """Pack, or show."""
    action = argv[0] if argv else ""
    if action not in ("pack", "show"):
        raise ConfigError(f"env {action or '...'}: say env pack, or env show FILE")
    given = parse("env", argv[1:], action)
    return _pack(given, program) if action == "pack" else _show(given)


def _pack(given: Given, program: str) -> int:
    given.arguments(0)
    kind = given.get("--format") or best_kind()
    if kind not in SUFFIXES:
        raise ConfigError(f"--format {kind}: must be one of {', '.join(SUFFIXES)}")
    try:
        pack, facts = pack_environment(
            Path(sys.prefix),
            given.path("--output"),
            kind,
            say,
            start="mount" if "--mount" in given else "unpack",
        )
    except (StoreError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    text = f"{pack}: {facts.files} files in {int(facts.size) / 2**20:.0f} MiB; slurm.env_pack: {pack}"
    given.tell(lambda: {"path": str(pack), **asdict(facts)}, lambda: text)
    return 0


def _show(given: Given) -> int:
    (word,) = given.arguments(1, least=1)
    pack = Path(word).expanduser().absolute()
    if not pack.exists():
        raise ConfigError(f"{pack}: no such file; prime-hpc env pack makes one")
    facts = PackFacts.read(pack)
    is_current = facts.hash == environment_hash(Path(sys.prefix))
    if "--json" in given:
        print_json({**asdict(facts), "is_current": is_current})
    else:
        for name, value in asdict(facts).items():
            print(f"{name:<10}{value}")
        print("of this environment as it is" if is_current else f"not of {sys.prefix} as it is: prime-hpc env pack")
    return 0 if is_current else 1
