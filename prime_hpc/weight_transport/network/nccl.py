"""Settings of NCCL for a communicator whose members are a rank of the trainer and an engine's workers.

Each member reads NCCL's variables by itself, and those that read others wait for each other for ever. Yet they are not
the same everywhere: `trainer.deterministic` states some for the trainer's ranks alone, and `inference.batch_invariant`
for engines.
"""

from collections.abc import Mapping

SHARED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""While a group's communicator is made, on all its members."""
_NOT_KEPT = "NCCL_NO_CACHE"


def read_again(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a process that is to join groups needs before it first uses NCCL, which else may keep what it read
    of `SHARED` for communicators of its own."""
    names = [name for name in environ.get(_NOT_KEPT, "").split(",") if name]
    return {_NOT_KEPT: ",".join(dict.fromkeys([*names, *SHARED]))}
