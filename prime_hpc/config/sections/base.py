"""Base of every section of the experiment tree: the strict pydantic base class."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


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


def from_here(value: Any) -> Any:
    """Paths are meant from where the command was typed; roles run elsewhere."""
    return value.expanduser().absolute() if isinstance(value, Path) else value
