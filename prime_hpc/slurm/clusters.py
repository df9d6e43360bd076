"""The cluster that Slurm's commands are meant for, where a site has several (`-M`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CLUSTER: ContextVar[str | None] = ContextVar("cluster", default=None)


@contextmanager
def on_cluster(name: str | None) -> Iterator[None]:
    """Within it, questions and orders go to another cluster of the site; None: to this one."""
    before = _CLUSTER.set(name)
    try:
        yield
    finally:
        _CLUSTER.reset(before)


def asked_cluster() -> str | None:
    """The cluster that `on_cluster` has chosen."""
    return _CLUSTER.get()
