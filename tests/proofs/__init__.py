"""Proofs: our code against independent float64 references, and invariances. `tools/proofs` runs them all.

A module here named `prove_*.py` has `prove(trials: int) -> Iterable[Proof]`; pytest runs the same checks with drawn
inputs through `test_*.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """One checked property."""

    subject: str
    """What is proved: an objective, an algorithm, a layout."""
    claim: str
    """Column of the table."""
    count: int
    """Random instances that were checked."""
    worst: float
    """Greatest relative error."""
    bound: float
    """What `worst` must stay below."""
    verdict: str = ""
    """How the subject was found, where there is more than true and false; counted by `tools/proofs`."""
    reason: str = ""
    """Why."""

    @property
    def holds(self) -> bool:
        """False also where the error is NaN, or nothing was checked."""
        return self.count > 0 and self.worst < self.bound
