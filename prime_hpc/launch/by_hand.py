"""A trainer by hand over several machines: torchrun on each of them, its ranks resolve the command line themselves."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem
from prime_hpc.config.errors import whole_number
from prime_hpc.launch.checks import check
from prime_hpc.launch.fetch.fetch import require_model
from prime_hpc.supervisor.roles.caches import node_caches
from prime_hpc.supervisor.roles.spec import role_gpus, trainer_spec, usable_gpus


@dataclass(frozen=True)
class Nodes:
    """The machines of a trainer by hand, as one of them is told."""

    count: int
    rank: int
    """This machine's number; 0 is the head."""
    address: str
    """At which the ranks meet: the head's."""
    port: int

    @classmethod
    def of(cls, flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> "Nodes | None":
        """Read torchrun's flags and variables; None: one machine.
        Raises ConfigError: they do not say where the ranks meet, or which machine this is."""
        count = whole_number("--nnodes", flags.get("--nnodes"), 1) or 1
        rank = whole_number("--node-rank", flags.get("--node-rank"), 0)
        if count == 1:
            if rank:
                raise ConfigError(f"--node-rank {rank}: of how many machines? state --nnodes")
            return None
        if rank is None or rank >= count:
            raise ConfigError(f"state which of the {count} machines this is: --node-rank 0 (the head) to {count - 1}")
        host, port = _meeting_point(flags, environ)
        return cls(count, rank, host, port)


def _meeting_point(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port of `--rdzv-endpoint`, else of the flags or variables that name the head.
    Raises ConfigError: nothing names them, or they are none."""
    endpoint = flags.get("--rdzv-endpoint")
    if endpoint is None:
        address = flags.get("--master-addr", environ.get("MASTER_ADDR"))
        port = flags.get("--master-port", environ.get("MASTER_PORT"))
        if not address or not port:
            raise ConfigError(
                "state where the ranks of all machines meet: --rdzv-endpoint HOST:PORT, or MASTER_ADDR and "
                "MASTER_PORT in the environment: an address of machine 0, and a port that is free there"
            )
    else:
        address, _, port = endpoint.rpartition(":")
    address = address.strip("[]")
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{address}:{port}: must be HOST:PORT, as 10.15.42.1:29500")
    return address, int(port)


def ranks_of_all(flags: Mapping[str, str]) -> int | None:
    """Return the ranks of all machines, where `--nproc-per-node` says how many each has."""
    per_node = whole_number("--nproc-per-node", flags.get("--nproc-per-node"), 1)
    return None if per_node is None else per_node * (whole_number("--nnodes", flags.get("--nnodes"), 1) or 1)


def run_trainer(loaded: Loaded, nodes: Nodes) -> NoReturn:
    """Become this machine's torchrun.
    Raises ConfigError: the experiment cannot run here, or its ranks do not divide among the machines."""
    experiment = loaded.experiment
    check(loaded, "trainer")
    require_model(loaded)
    ranks = experiment.trainer.num_ranks
    if ranks % nodes.count:
        message = f"is {ranks}, which does not divide among {nodes.count} machines: state --nproc-per-node"
        raise ConfigError(Problem(message, "trainer.num_ranks", loaded.provenance.get("trainer.num_ranks")))
    here = experiment.trainer.model_copy(update={"num_ranks": ranks // nodes.count})
    of_this_node: Experiment = experiment.model_copy(update={"trainer": here})
    gpus = role_gpus(of_this_node, "trainer", usable_gpus(experiment, os.environ))
    meets = ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
    meets += ["--master-addr", nodes.address, "--master-port", str(nodes.port)]
    spec = trainer_spec(of_this_node, experiment.run_dir, gpus, meets, [loaded.entrypoint, *loaded.argv])
    os.environ.update(node_caches(os.environ))
    os.environ.update(spec.environment)
    sys.stdout.flush()
    os.execv(spec.command[0], spec.command)
