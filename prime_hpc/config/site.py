"""Site profiles: found by name, path or cluster, checked, and kept with the run that used them.

    site = load_site(experiment.slurm.site)      # login node
    write_site(site, run_dir)                    # at submit: the job reads what was true then
    site = read_site(run_dir)                    # inside the job

A profile is `slurm/sites/<name>.yaml`. Looked for in $PRIMEHPC_SITES (a path list), `~/.config/prime-hpc/sites`, and
the `slurm/sites` of the checkout that prime-hpc is installed from.
"""

import os
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.run_files import SITE_YAML
from prime_hpc.config.secret import OF_SITE, anchored, put_back, secrets_of, written_secrets
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sources.files import dump_yaml, parse_yaml
from prime_hpc.runtime.atomic_write import write_atomic

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

GENERIC = SiteConfig(name="generic")
"""A cluster of which nothing is known."""


def site_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """List the folders in which profiles are looked for, first match wins."""
    named = [Path(p).expanduser() for p in environ.get("PRIMEHPC_SITES", "").split(os.pathsep) if p]
    checkout = Path(__file__).resolve().parents[2] / "slurm" / "sites"
    return [*named, Path.home() / ".config" / "prime-hpc" / "sites", checkout]


def list_sites(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Name -> file of every profile that can be found."""
    found: dict[str, Path] = {}
    for folder in site_folders(environ):
        for path in sorted(folder.glob("*.yaml")) if os.path.isdir(folder) else []:  # noqa: PTH112 - closed: none
            if path.name[0] != "." and os.path.isfile(path):  # noqa: PTH113 - an editor's lock is a link to nowhere
                found.setdefault(path.stem, path)
    return found


def load_site(
    name: str | None = None, environ: Mapping[str, str] = os.environ, cluster: str | None = None
) -> SiteConfig:
    """Return the profile called `name` (or at that path), else $PRIMEHPC_SITE's, else this cluster's, else a generic
    one.
    `cluster`: another cluster of the site, which takes this one's place.
    Raises ConfigError: a named profile does not exist or is wrong."""
    name = name or environ.get("PRIMEHPC_SITE") or None
    sites = list_sites(environ)
    if name is not None:
        path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) or "/" in name else sites.get(name)
        if path is None or not path.is_file():
            near = get_close_matches(name, sites, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"no site profile {name!r}; {hint}found are {', '.join(sites) or 'none'}", "slurm.site")
        return _usable(parse_site(path), path)
    cluster = cluster or cluster_name(environ)
    if cluster is not None:
        for path in sites.values():
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:  # of another cluster, as likely as not
                print(f"warning: site profile {path} is passed over: {error.strerror}", file=sys.stderr)
                continue
            if re.search(rf"^cluster:\s*['\"]?{re.escape(cluster)}['\"]?\s*(#.*)?$", text, re.MULTILINE):
                return _usable(parse_site(path), path)
    return GENERIC


def _usable(site: SiteConfig, path: Path) -> SiteConfig:
    """Raise a ConfigError where a file that is to hold a secret cannot be used."""
    problems = [
        Problem(f"{path}: {'.'.join(at)}: {s.problem}", "slurm.site") for at, s in secrets_of(site) if s.problem
    ]
    if problems:
        raise ConfigError(problems)
    return site


def parse_site(path: Path) -> SiteConfig:
    """Read and check one profile. Raises ConfigError: naming the file and every key that is wrong."""
    from pydantic import ValidationError

    try:
        data, _ = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: {why}", "slurm.site") from error
    try:
        return SiteConfig.model_validate({"name": path.stem, **anchored(data, path.parent)})
    except ValidationError as error:
        raise ConfigError(_problem(path, detail) for detail in error.errors()) from error


def _problem(path: Path, detail: "ErrorDetails") -> Problem:
    """Describe what is wrong with one key, and the line that states it."""
    names = [str(part) for part in detail["loc"]]
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        model: type[Section] | None = SiteConfig
        for name in names[:-1]:  # `partitions.gpu.x`: a mapping's names are the site's own
            field = model.model_fields.get(name) if model is not None else None
            model = _section(field.annotation) if field is not None else model
        known = list(model.model_fields) if model is not None else []
        near = get_close_matches(names[-1], known, n=1, cutoff=0.5)
        message = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; there are {', '.join(known)}"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    stated = [i for i, line in enumerate(lines, 1) if re.search(rf"(?:^|[\s{{,]){re.escape(names[-1])}\s*:", line)]
    where = f"{path}:{stated[0]}" if len(stated) == 1 else str(path)
    return Problem(f"{where}: {'.'.join(names)}: {message}", "slurm.site")


def _section(annotation: Any) -> type[Section] | None:
    """Return the section in `Section`, `Section | None` or `dict[str, Section]`; None where there is none."""
    found = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Section)
    ]
    return found[0] if found else None


def write_site(site: SiteConfig, run_dir: Path) -> None:
    """Keep the profile with the run."""
    tree, texts = put_back(site.model_dump(mode="json", exclude_defaults=True), site, prefix=OF_SITE)
    with written_secrets(run_dir, texts, only=OF_SITE):
        write_atomic(run_dir / SITE_YAML, dump_yaml(tree | {"name": site.name}))


def read_site(run_dir: Path) -> SiteConfig:
    """Return the profile that the run was submitted with; a generic one where there is none."""
    path = run_dir / SITE_YAML
    return parse_site(path) if path.exists() else GENERIC


def has_accounting(run_dir: Path) -> bool:
    """Return whether accounting answers where a run (or a sweep) was sent, as its profile says."""
    try:
        return read_site(run_dir).sacct
    except ConfigError:  # the file is damaged: to ask in vain costs nothing
        return True


def other_cluster(stated: str | None) -> str | None:
    """Return the cluster that a job is to be sent to with `-M`: as stated, else $SLURM_CLUSTERS'; None: this one."""
    chosen = stated or os.environ.get("SLURM_CLUSTERS") or None
    return None if chosen == cluster_name() else chosen


def cluster_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """ClusterName from the slurm.conf that is in force, where it can be read. No command is run."""
    places = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
    for path in (environ.get("SLURM_CONF"), *places):  # the last is of a host that got its files from the controller
        if path and os.access(path, os.R_OK):
            match = re.search(r"^\s*ClusterName\s*=\s*(\S+)", Path(path).read_text(errors="replace"), re.M | re.I)
            if match:
                return match.group(1)
    return None
