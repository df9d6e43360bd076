"""torchrun for the ranks of a node: `python -m prime_hpc.trainer.torchrun --nproc-per-node N ... -m MODULE ...`.

Takes torchrun's own options. On one node the agent and the ranks meet over a file (`ranks`), so that nothing listens;
with `--nnodes` of more than one they meet as torchrun's options say. When a rank fails the others are ended by the
signal that they heed: torchrun's SIGTERM is Slurm's warning to them, and what waits in a collective of NCCL would be
there for the 30 s after which torchrun kills it.
"""

import os
import signal
import sys

from torch.distributed import PrefixStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from prime_hpc.runtime.role_context import LED, RANKS_FILE
from prime_hpc.trainer.ranks import meeting_file, open_store, stay_on_loopback

_BACKEND = "file"


class _FileRendezvous(RendezvousHandler):
    """The agent is alone: there is nobody to wait for."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._store = PrefixStore("agent", open_store(params.endpoint, 1))

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _end_ranks_by(wanted: signal.Signals) -> None:
    """Have the ranks that are left when one has failed get this signal instead of SIGTERM."""
    vars(multiprocessing)["_get_default_signal"] = lambda: wanted


def main(arguments: list[str] | None = None) -> None:
    """Run torchrun; its exit codes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if os.environ.get(LED):
        _end_ranks_by(signal.SIGINT)  # see `main.watch_sigterm`
    several = torchrun.get_args_parser().parse_args(arguments).nnodes.split(":")[-1] != "1"
    os.environ["PYTHONSAFEPATH"] = "1"  # torchrun starts the ranks without -P
    with meeting_file() as path:
        logs = ["--log-dir", str(path.parent / "logs")]  # else torchrun leaves a folder in /tmp
        if several:
            torchrun.main([*logs, *arguments])
            return
        rendezvous_handler_registry.register(_BACKEND, _FileRendezvous)
        stay_on_loopback(engines_join=True)  # each rank knows whether they do
        os.environ[RANKS_FILE] = str(path)
        meets = ["--rdzv-backend", _BACKEND, "--rdzv-endpoint", f"{path}.agent"]
        torchrun.main(["--nnodes", "1", *meets, *logs, *arguments])


if __name__ == "__main__":
    main()
