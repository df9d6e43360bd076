"""One line of the doctor: what was found, how it is, what to do."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    """The remedy; empty where it is ok."""

    @classmethod
    def of(cls, name: str, is_well: bool, detail: str, remedy: str, bad: State = "warn") -> "Finding":
        """Return what is ok, or `bad` with its remedy."""
        return cls(name, "ok", detail) if is_well else cls(name, bad, detail, remedy)

    def line(self) -> str:
        """For people."""
        remedy = f"\n        -> {self.remedy}" if self.remedy else ""
        return f"{self.state:<4}  {self.name}: {self.detail}{remedy}"
