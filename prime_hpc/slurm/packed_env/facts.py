"""Facts of a packed environment, in a file of `key value` lines beside it that a shell reads; and its hash.

env.sqsh          the packed environment
env.sqsh.facts    format, kind, machine, python, hash, size, blake2b, venv, files, start
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.runtime.atomic_write import write_atomic

FORMAT = "2"
SHARED_PYTHON = "PRIMEHPC_SHARED_PYTHON"
"""Set by `enter.sh`: the Python on shared storage, which other nodes find too."""
ENTER = Path(__file__).with_name("enter.sh")


@dataclass(frozen=True)
class PackFacts:
    """A packed environment, all as texts."""

    kind: str
    """`squashfs`, `tar.zst` or `tar.gz`."""
    machine: str
    """As `uname -m` says."""
    python: str
    """Version."""
    hash: str
    """Of the environment, see `environment_hash`."""
    size: str
    """Bytes."""
    blake2b: str
    """512 bits, as `b2sum` says: 0.4 of the CPU time of SHA-256 where the processor has no instructions for that."""
    venv: str
    files: str
    """How many were packed."""
    start: str = "unpack"
    """How nodes start from it: `unpack`, or `mount` where they can."""
    format: str = FORMAT

    def write(self, pack: Path) -> None:
        """Write them beside the pack."""
        write_atomic(facts_file(pack), "".join(f"{name} {value}\n" for name, value in asdict(self).items()))

    @classmethod
    def read(cls, pack: Path) -> "PackFacts":
        """Read them. Raises ConfigError: there are none, or of another format."""
        path = facts_file(pack)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}): prime-hpc env pack", "slurm.env_pack") from error
        found = {"start": "unpack"} | {name: value for name, _, value in (line.partition(" ") for line in lines)}
        names = {item.name for item in fields(cls)}
        if found.get("format") != FORMAT or not names <= found.keys():
            problem = f"{path}: is of format {found.get('format')!r}, this prime-hpc reads {FORMAT}: prime-hpc env pack"
            raise ConfigError(problem, "slurm.env_pack")
        return cls(**{name: found[name] for name in names})


def facts_file(pack: Path) -> Path:
    """Return the file with a pack's facts."""
    return pack.with_name(f"{pack.name}.facts")


def environment_hash(venv: Path) -> str:
    """Return 16 hex digits that change with what is installed: the packages' own records, their hooks, the interpreter.

    A module that was edited in place, and packages installed as links to a checkout, do not change it.
    """
    digest = hashlib.sha256(f"{platform.machine()} {platform.python_version()}".encode())
    for folder in sorted(venv.glob("lib/python3*/site-packages")):
        for path in sorted((*folder.glob("*.dist-info/RECORD"), *folder.glob("*.pth"))):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(venv).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


def pack_of(experiment: Experiment, site: SiteConfig) -> Path | None:
    """Return the packed environment that a job's nodes are to start from; None: none, or they are in a container."""
    return None if site.container is not None else experiment.slurm.env_pack or site.env_pack


def python_words(pack: Path | None, node_local: str | None, python: str) -> Sequence[str]:
    """Return the command that is followed by Python's own arguments.

    Args:
        node_local: of the site profile; variables are expanded on the node.
        python: the one on shared storage.
    """
    return [python] if pack is None else ["sh", str(ENTER), str(pack), node_local or "", python]
