"""Base of every section of the experiment tree: the strict pydantic base class."""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from prime_hpc.runtime.failures import missing_home


class Section(BaseModel):
    """A part of the experiment tree: unknown keys are errors, values are checked, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
        defer_build=True,  # a validator is made at first use, of the whole tree at once
    )


def in_home(path: str | os.PathLike[str]) -> Path:
    """Return a path without its `~`. Raises ValueError: there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {missing_home(error) or error}") from error


def from_here(value: Any) -> Any:
    """Paths are meant from where the command was typed; roles run elsewhere."""
    return in_home(value).absolute() if isinstance(value, Path) else value
