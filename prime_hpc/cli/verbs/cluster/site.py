"""`prime-hpc site list | show NAME | probe`: the site profiles that can be found, and a draft of a new one.

Exit codes: 0 done; 2 wrong usage, no such profile, or a file is in the way; 3 Slurm is missing or does not answer.
"""

import os
import sys
from pathlib import Path

from prime_hpc.cli.common import parse, print_json
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.site import list_sites, load_site, site_folders
from prime_hpc.observe.table import pad


def run(argv: list[str], program: str) -> int:
    """Dispatch to the one of the three."""
    given = parse("site", argv)
    rest = given.arguments(2)
    what = rest[0] if rest else None
    as_json = "--json" in given
    if "--output" in given and what != "probe":
        raise ConfigError(f"--output is for `site probe`; usage: {given.usage}")
    if what == "list" and len(rest) == 1:
        return _list(as_json)
    if what == "show":
        return _show(rest[1] if len(rest) > 1 else None, as_json)
    if what == "probe" and len(rest) == 1:
        return _probe(given.path("--output"), as_json, program)
    raise ConfigError(f"usage: {given.usage}")


def _list(as_json: bool) -> int:
    sites = list_sites()
    chosen = load_site()
    if as_json:
        print_json({"sites": {name: str(path) for name, path in sites.items()}, "in_force": chosen.name})
        return 0
    rows = [("*" if name == chosen.name else " ", name, str(path)) for name, path in sites.items()]
    for mark, name, path in pad(rows):
        print(f"{mark} {name}  {path}")
    if not sites:
        print("no site profile found; looked in " + ", ".join(map(str, site_folders())))
    print(f"in force here: {chosen.name}" + ("" if chosen.name in sites else " (nothing is known of this cluster)"))
    return 0


def _show(name: str | None, as_json: bool) -> int:
    site = load_site(name)
    data = site.model_dump(mode="json", exclude_defaults=True) | {"name": site.name}
    if as_json:
        print_json(data)
        return 0
    import yaml

    print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
    return 0


def _probe(output: Path | None, as_json: bool, program: str) -> int:
    from prime_hpc.slurm.client import SlurmError
    from prime_hpc.slurm.probe_site import probe

    if output is not None and os.path.lexists(output):
        raise ConfigError(f"{output} exists and is not overwritten; choose another --output, or move it away")
    try:
        draft = probe()
    except SlurmError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return error.exit_code
    if output is not None:
        _write_new(output, draft.text)
        print(f"wrote {output}: check its lines marked `check`", file=sys.stderr)
    if as_json:
        print_json(draft.site.model_dump(mode="json", exclude_defaults=True) | {"name": draft.site.name})
    elif output is None:
        print(draft.text, end="")
    return 0


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
