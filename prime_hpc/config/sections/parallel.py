"""How the trainer's ranks share the work: the section `trainer.parallel`, and the dimensions that it gives.

`ParallelDims` is plain arithmetic, used by the trainer (meshes), by the orchestrator (how many parts a batch has), and
by `plan` and `lint` on the login node.
"""

from dataclasses import dataclass

from pydantic import Field

from prime_hpc.config.sections.base import Section


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the dimensions over which the ranks are laid out, outermost first; their product is the world size.

    Rank = ((replicate x shard + s) x cp + c) x tp + t: ranks of one tensor-parallel group are neighbours, so that they
    share a node, then those of one context-parallel group.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert parallel is no further dimension: it divides the `fsdp` x `tp` ranks of one replica."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is split: every part is read by `ranks_per_part` ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_part(self) -> int:
        """Ranks that work on one part of the batch together."""
        return self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards what tensor parallelism leaves to it: context-parallel ranks hold the same
        weights, so they are sharded over them, too."""
        return self.dp_shard * self.cp

    @property
    def expert_shard(self) -> int:
        """Ranks over which FSDP shards one rank's experts."""
        return self.fsdp * self.tp // self.ep

    def data_rank(self, rank: int) -> int:
        """Return the part of the batch that a rank reads."""
        return rank // self.ranks_per_part

    def describe(self) -> str:
        """For people: the dimensions that are used, or `dp_shard 1`."""
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        used = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1] or ["dp_shard 1"]
        return " x ".join(used) + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def suffix(self) -> str:
        """`describe` in brackets; nothing where all ranks do is share one copy (plain FSDP)."""
        return "" if self.dp_shard == self.world_size and self.ep == 1 else f" ({self.describe()})"


class ParallelConfig(Section):
    """How the ranks share the work; `dp_replicate x dp_shard x cp x tp` is `trainer.num_ranks`."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP): parameters are gathered within one copy, gradients summed over all."""
    dp_shard: int | None = Field(None, ge=1)
    """Data-parallel ranks that share the parameters of one copy (FSDP); default: all that the others leave."""
    tp: int = Field(1, ge=1)
    """Tensor parallel: ranks that split every matrix, the heads and the vocabulary; keep them on one node."""
    cp: int = Field(1, ge=1)
    """Context parallel: ranks that split the tokens of one packed row (`--model.cp`; alone it means 2)."""
    ep: int = Field(1, ge=1)
    """Expert parallel (mixture of experts): ranks that split the experts, out of those of one copy."""

    def dims(self, num_ranks: int) -> ParallelDims:
        """Return the sizes of all dimensions.
        Raises ValueError: they do not multiply to `num_ranks`, or `ep` does not divide one copy's ranks."""
        fixed = {"dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp}
        if self.dp_shard is not None:
            fixed["dp_shard"] = self.dp_shard
        product = self.dp_replicate * self.cp * self.tp * (self.dp_shard or 1)
        shown = " x ".join(f"{name} {size}" for name, size in fixed.items() if size > 1) or "1"
        if self.dp_shard is not None and product != num_ranks:
            raise ValueError(
                f"trainer.parallel ({shown}) makes {product} ranks and trainer.num_ranks is {num_ranks}: change one, "
                "or leave trainer.parallel.dp_shard out"
            )
        if num_ranks % product:
            raise ValueError(
                f"trainer.parallel ({shown}) does not divide trainer.num_ranks = {num_ranks}: use a multiple of "
                f"{product}"
            )
        shard = num_ranks // product if self.dp_shard is None else self.dp_shard
        one_copy = shard * self.cp * self.tp
        if one_copy % self.ep:
            good = [n for n in range(2, one_copy + 1) if one_copy % n == 0]
            raise ValueError(
                f"trainer.parallel.ep = {self.ep} does not divide the {one_copy} ranks of one copy (dp_shard x cp x "
                f"tp): use {' or '.join(map(str, good)) or '1'}"
            )
        return ParallelDims(self.dp_replicate, shard, self.cp, self.tp, self.ep)
