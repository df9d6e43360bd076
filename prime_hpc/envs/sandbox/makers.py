"""The makers of sandboxes, by `sandbox.runtime`: how it is found, its command, and what it says where it cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.sandbox import apptainer, bubblewrap
from prime_hpc.envs.sandbox.bubblewrap import Stage

__all__ = ["MAKERS", "Maker"]


@dataclass(frozen=True)
class Maker:
    """One runtime."""

    find: Callable[[], str]
    """Its program; EnvError where a node has none that will do."""
    shown_paths: Callable[[SandboxConfig], list[str]]
    """The files that a stage holds ready."""
    command: Callable[[str, SandboxConfig, Stage, str], list[str]]
    """The command whose last descendant, process 1 of the sandbox, runs a line of Python."""
    own_environment: Callable[[], dict[str, str] | None]
    """Of the program; None: this process's."""
    environment: Callable[[SandboxConfig], dict[str, str]]
    """Of a command inside."""
    guest: Callable[[], CodeType | str]
    """The program of the first process, as its Python takes it."""
    explain_refusal: Callable[[str], str]


def _bubblewrap_command(program: str, config: SandboxConfig, stage: Stage, boot: str) -> list[str]:
    return [*bubblewrap.command(program, config, stage), *bubblewrap.python_of(config), "-c", boot]


MAKERS: dict[str, Maker] = {
    "bubblewrap": Maker(
        bubblewrap.find_bwrap,
        bubblewrap.shown_paths,
        _bubblewrap_command,
        lambda: None,
        bubblewrap.environment,
        bubblewrap.guest_code,
        bubblewrap.explain_refusal,
    ),
    "apptainer": Maker(
        apptainer.find_apptainer,
        apptainer.shown_paths,
        apptainer.command,
        apptainer.own_environment,
        apptainer.environment,
        apptainer.guest_source,
        apptainer.explain_refusal,
    ),
}
"""`sandbox.runtime` -> its maker."""
