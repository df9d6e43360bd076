"""The network section: which ports a run may listen on, and by which of a node's networks it is reached.

Stated in the experiment (`network`) or in the site profile (`network`); the experiment's keys win, one by one.
"""

from ipaddress import ip_network

from pydantic import Field, field_validator

from prime_hpc.config.sections.base import Section


class NetworkConfig(Section):
    """Ports and networks. Networks by interface (`ib0`) or by address (`10.1.0.0/16`, `fd00::/8`); several with commas:
    the first that a node has."""

    port_range: str | None = Field(None)
    """Ports that may be listened on, as FIRST-LAST (`20000-20999`); default: below the ephemeral ones."""
    control: str | None = None
    """Network of the message bus and of batches that are handed over; default: the one of the node's name."""
    serving: str | None = None
    """Network of the HTTP servers; default: all, announced by the node's name."""
    collectives: str | None = None
    """Network of NCCL, gloo, their rendezvous, and vLLM's engines among themselves; default: as those choose."""

    @field_validator("port_range")
    @classmethod
    def _is_range(cls, text: str | None) -> str | None:
        if text is not None:
            first, dash, last = text.partition("-")
            if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
                raise ValueError("must be FIRST-LAST with 1024 <= FIRST <= LAST <= 65535, for instance 20000-20999")
        return text

    @field_validator("control", "serving", "collectives")
    @classmethod
    def _is_network(cls, text: str | None) -> str | None:
        for word in (text or "").split(",") if text is not None else ():
            if not word.strip():
                raise ValueError("must name an interface (`ib0`) or a network (`10.1.0.0/16`)")
            if "/" in word:
                try:
                    ip_network(word.strip(), strict=False)
                except ValueError as error:
                    raise ValueError(f"{error}; write a network as `10.1.0.0/16` or `fd00::/8`") from error
        return text

    def over(self, other: "NetworkConfig") -> "NetworkConfig":
        """Return this one's keys where they are set, else the other's."""
        return other.model_copy(update=self.model_dump(exclude_none=True))
