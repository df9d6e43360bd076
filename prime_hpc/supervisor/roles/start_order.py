"""Roles that share a GPU start one after the other, the engines first.

vLLM measures how much of a GPU is free at its start and after a trial pass: what another process takes or gives back
in between makes it end, or gives it too small a KV cache. Once an engine serves, its memory stays as it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec

Spec = TypeVar("Spec", bound=RoleSpec)


def one_after_another(specs: Sequence[Spec]) -> list[Spec]:
    """Fill in `after` of the specs: the servers that come before in the list and share a GPU."""
    ordered: list[Spec] = []
    for spec in specs:
        before = [other.label for other in ordered if other.is_server and spec.held_gpus & other.held_gpus]
        ordered.append(replace(spec, after=tuple(before)))
    return ordered


def may_start(role: Role, roles: Sequence[Role]) -> bool:
    """Return whether all servers that a waiting role starts after are ready, or are not to come."""
    return all(other.state in ("ready", "done", "away") for other in roles if other.spec.label in role.spec.after)
