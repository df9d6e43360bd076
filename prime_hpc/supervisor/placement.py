"""Which role runs on which nodes of a Slurm job: a pure function of the experiment and the site profile.

`launch` renders the job from it (`components`), the supervisor starts the roles by it (`groups`) once Slurm has named
the nodes. Nothing here asks the machine or the cluster anything.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Component:
    """One component of the job (a packed job has exactly one): what is asked of Slurm."""

    index: int
    name: str
    """For people: `trainer`, `inference`, `orchestrator`, or `all`."""
    num_nodes: int
    options: dict[str, str | bool] = field(default_factory=dict)
    """sbatch options by long name (`partition`, `gres`, `time`, ...), without `nodes` and `ntasks-per-node`."""


@dataclass(frozen=True)
class RoleGroup:
    """One supervised role: where it runs. A step of its own in the job."""

    role: Literal["inference", "orchestrator", "trainer"]
    index: int
    """Server index for inference, else 0."""
    component: int
    first_node: int
    """Offset into the component's node list."""
    num_nodes: int
    processes_per_node: int
    """Trainer ranks, or data-parallel engines, on each node (the last node of the trainer may hold fewer)."""
    gpus: tuple[int, ...] | None = None
    """Positions, among the GPUs that the job sees on each node, of those this role uses; None: no GPU."""
    dp_size: int = 1
    """Inference: data-parallel size of this server, over all its nodes."""


@dataclass(frozen=True)
class Placement:
    """The whole job."""

    layout: Literal["packed", "het"]
    components: tuple[Component, ...]
    groups: tuple[RoleGroup, ...]
    spares: tuple[int, ...] = ()
    """Packed: node offsets that no role uses at first."""

    @property
    def num_nodes(self) -> int:
        """Nodes of all components."""
        return sum(component.num_nodes for component in self.components)
