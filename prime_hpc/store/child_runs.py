"""The runs below a run whose trainer trains many: their directories, and the trainer's word on each.

    <parent>/run_<id>/              an ordinary run directory: run.yaml, rollouts/, weights/, checkpoints/, metrics/
    <parent>/run_<id>/state.json    what the trainer says of it: waiting, training, and how it ended

Trainer rank 0 alone writes `state.json`; the supervisor (which starts a run's orchestrator), `prime-hpc runs` and
`status` read it. A run that ended is left alone until `state.json` is removed (`prime-hpc runs resume`).
"""

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.store.io import files

PREFIX = "run_"
STATE = "state.json"
"""In a child's directory: the trainer's word on it."""
_NAME = re.compile(r"run_[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Phase = Literal["waiting", "training", "done", "stopped", "failed", "removed"]
ENDED = ("done", "stopped", "failed", "removed")


@dataclass(frozen=True)
class ChildState:
    """The trainer's last word on one child."""

    phase: Phase
    reason: str | None = None
    """Why it waits, stopped or failed."""
    slot: int | None = None
    """Adapter slot that it holds."""
    incarnation: int = 0
    """Its own attempt."""
    parent_incarnation: int = 0
    """Attempt of the trainer that says so; what an older one said no longer holds."""
    resume_step: int | None = None
    """Step that this attempt went on from."""
    step: int = 0
    """Steps done."""
    max_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    time: float = field(default_factory=time.time)

    @property
    def has_ended(self) -> bool:
        """True if nothing more happens by itself."""
        return self.phase in ENDED


def child_name(identifier: str) -> str | None:
    """Directory name of a child called `identifier` (with or without `run_`); None where it can be none."""
    name = identifier if identifier.startswith(PREFIX) else PREFIX + identifier
    return name if _NAME.fullmatch(name) else None


def parent_of(run_dir: Path) -> Path | None:
    """Return the run whose trainer trains this one beside others; None: it has a trainer of its own."""
    parent = run_dir.resolve().parent
    return parent if _NAME.fullmatch(run_dir.resolve().name) and (parent / RUN_YAML).exists() else None


def list_children(parent: Path) -> list[str]:
    """Sorted names of the `run_*` entries of a run directory, whole or not. One directory listing."""
    return sorted(name for name in files.list_dir(parent) if _NAME.fullmatch(name))


def write_state(child: Path, state: ChildState) -> None:
    """Replace the trainer's word.

    Raises:
        StoreError: disk full, not writable.
        FileNotFoundError: the child's directory is gone.
    """
    files.write_atomic(child / STATE, json.dumps(asdict(state)).encode())


def read_state(child: Path) -> ChildState | None:
    """Return the trainer's last word; None where it never said one, or where it cannot be read."""
    try:
        return read_state_strictly(child)
    except OSError:
        return None


def phase_text(state: ChildState) -> str:
    """Return the trainer's word for people."""
    text = f"{state.phase} {state.step}/{state.max_steps}"
    return f"{text}: {state.reason}" if state.reason else text


def read_state_strictly(child: Path) -> ChildState | None:
    """Return the trainer's last word; None where it never said one. Raises OSError: it cannot be read now."""
    try:
        row: dict[str, Any] = json.loads((child / STATE).read_bytes())
        return ChildState(**row)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):  # absent, half-visible, or foreign
        return None
