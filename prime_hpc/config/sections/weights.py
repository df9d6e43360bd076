"""The weights section: how the policy's versions get from the trainer into the engines."""

from pydantic import Field

from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import TransportName


class WeightsConfig(Section):
    """Weight versions on their way from the trainer to the engines; adapters (`model.lora`) always go as files."""

    transport: TransportName = "files"
    """`files`: each version is a directory that Hugging Face loads, in the run directory. `delta`: most hold only what
    changed since the one before, to the bit: of bfloat16 at learning rates of 1e-6 some percent of the bytes. Whole
    versions come between, and by themselves where too much changes. For file systems that are slower than the nodes'
    memory; each server's node keeps a version's bytes in its temporary directory. `gloo`, `nccl`: from the trainer's
    memory into vLLM's workers over the network, through host memory or from GPU to GPU; files come between. The whole
    model trains, engines are vLLM's. All but `files` cost each rank its share of the published weights in host memory
    (twice where versions are published beside the next step, as they are from GPUs); where a node has too little for
    that, versions go as whole files."""
    whole_interval: int = Field(32, ge=1)
    """With `delta`, `gloo` and `nccl`: of so many versions one is whole, from which a server begins that has none or
    missed some."""
