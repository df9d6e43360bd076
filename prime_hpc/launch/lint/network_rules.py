"""Lint of ports and networks, and what a plan says of them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import ENGINE_ROLES, SECTIONS, engine_roles, first_port, servers_of
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Subject, rule
from prime_hpc.slurm.placement import Placement, stated_port
from prime_hpc.store.messaging.network import NUM_ENGINE_PORTS, SERVER_PORTS
from prime_hpc.store.messaging.sockets import PortRange
from prime_hpc.supervisor.preflight.node import ephemeral_range

_OF_THE_BATCH_HOST = 3
"""The bus, the handover, preflight's rendezvous."""


def network_facts(experiment: Experiment, site: SiteConfig, placement: Placement) -> dict[str, Any]:
    """For the plan: the section in force, and the HTTP ports that are stated."""
    stated = (stated_port(experiment, placement, group) for group in placement.groups)
    return {
        **experiment.network.over(site.network).model_dump(),
        "network_interface": site.network_interface,
        "server_ports": sorted({port for port in stated if port is not None}),
    }


def network_line(facts: dict[str, Any], *, is_local: bool) -> str:
    """Return the same for people; `is_local`: nothing leaves this machine."""
    ports = f"ports {facts['port_range']}" if facts["port_range"] else "ports below the ephemeral ones"
    if facts["server_ports"]:
        ports += f", HTTP from {facts['server_ports'][0]}"
    if is_local:
        return f"{ports}; all of it on this machine"
    name, chosen = "the node's name", "as NCCL and gloo choose"
    collectives = facts["collectives"] or facts["network_interface"] or chosen
    return (
        f"{ports}; bus and handover by {facts['control'] or name}, HTTP by {facts['serving'] or name}, "
        f"collectives {collectives if collectives == chosen else f'by {collectives}'}"
    )


@rule(*EVERY, slurm=True)
def port_ranges(subject: Subject) -> Iterator[Finding]:
    """Report a range that cannot hold a node's sockets, or out of which something else takes ports."""
    network = subject.experiment.network.over(subject.site.network)
    if network.port_range is None or subject.placement is None:
        return
    stated, within = subject.experiment.network.port_range is not None, PortRange.parse(network.port_range)
    where = "network.port_range" if stated else f"network.port_range of the site profile {subject.site.name!r}"
    need = _most_on_a_node(subject.placement)
    if need > len(within):
        yield Finding.error(
            "PH327",
            where,
            f"{within} has {len(within)} ports, but up to {need} are needed on a node",
            "a wider range; jobs that share a node need as many each",
        )
    low, high = ephemeral_range()
    if within.first <= high and within.last >= low:
        yield Finding.info(
            "PH327",
            where,
            f"{within} overlaps the ports {low}-{high} that this machine's kernel gives to outgoing connections",
            "one outside of them, where a firewall allows; ports in use are passed over",
        )
    for group in subject.placement.groups:
        port = stated_port(subject.experiment, subject.placement, group)
        if group.role in ENGINE_ROLES and port is not None and port not in within:
            yield Finding.warning(
                "PH327",
                f"{SECTIONS[group.role]}.server.port",
                f"{port} lies outside {where} = {within}",
                "leave it out, and one of the range is found",
            )


@rule(*EVERY)
def ports_of_one_machine(subject: Subject) -> Iterator[Finding]:
    """Report groups of engines that would listen on one port of this machine; a placement refuses its own."""
    taken: dict[int, str] = {}
    for role in engine_roles(subject.experiment) if not subject.is_slurm else ():
        servers, key = servers_of(subject.experiment, role), f"{SECTIONS[role]}.server.port"
        first = first_port(subject.experiment, servers)
        for port in range(first, first + servers.num_replicas) if first else ():
            if (other := taken.setdefault(port, SECTIONS[role])) != SECTIONS[role]:
                what = f"{port}: a server of {other} listens on it as well"
                yield Finding.error("PH327", key, what, "leave it out, and a free one is found")
                break


def _most_on_a_node(placement: Placement) -> int:
    """Ports that are taken on the fullest node."""
    needed: Counter[tuple[int, int]] = Counter({(0, 0): _OF_THE_BATCH_HOST})
    for group in placement.groups:
        ports = SERVER_PORTS + NUM_ENGINE_PORTS if group.role in ENGINE_ROLES else int(group.role == "trainer")
        for node in range(group.first_node, group.first_node + group.num_nodes):
            needed[group.component, node] += ports
    return max(needed.values())
