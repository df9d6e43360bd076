"""The multi-run proof on two ranks, and that it notices when runs are not kept apart."""

from dataclasses import replace
from typing import Any

import pytest

from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.trainer.multi import child_run as child_module
from prime_hpc.trainer.multi import loop
from prime_hpc.trainer.multi.admission import Admission
from prime_hpc.trainer.trainer import Base
from tests.proofs import prove_multi_run

pytestmark = pytest.mark.slow


def test_runs_together_are_bit_for_bit_what_they_are_alone() -> None:
    errors = prove_multi_run.errors_of(2, 1)
    assert errors == {claim: [0.0] for claim in prove_multi_run.CLAIMS}


def in_one_slot(base: Base, admission: Admission, budget: int, bus: BusClient) -> child_module.Child:
    """A trainer that gives every run the same adapter."""
    return child_module.begin_child(base, replace(admission, slot=0), budget, bus)


def work_with_one_slot(*args: Any) -> None:
    """A rank of that trainer."""
    loop.begin_child = in_one_slot
    prove_multi_run.work(*args)


@pytest.mark.exhaustive
def test_the_proof_sees_runs_that_share_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = prove_multi_run.spawn
    monkeypatch.setattr(prove_multi_run, "spawn", lambda _, *rest: spawn(work_with_one_slot, *rest))
    errors = prove_multi_run.errors_of(1, 1, ["together"])
    assert errors["together"][0] > 1e-3
