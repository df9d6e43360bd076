"""The supervisor's section: its deadlines."""

from pydantic import Field

from prime_hpc.config.sections.base import Section


class SupervisorConfig(Section):
    """What runs inside the job and watches the roles."""

    start_timeout_s: float = Field(900, gt=0)
    """Deadline by which the trainer and the orchestrator must report ready."""
    heartbeat_timeout_s: float = Field(300, gt=0)
    """A role silent for longer is dead."""
    grace_s: float = Field(5, gt=0, le=60)
    """From the polite end of a role to its kill."""
