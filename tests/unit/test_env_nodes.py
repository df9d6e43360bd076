"""Nodes of a Slurm job that play episodes: where they are, what is started there, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.kubernetes.placement import components_of, for_pods
from prime_hpc.orchestrator.setup import warn_of_few_open_files, with_env_hosts
from prime_hpc.runtime.role_context import ENV_HOSTS, ENV_KEY, NODE_PORTS, RoleContext
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.placement import Placement, place_slurm
from prime_hpc.supervisor.agent import LaunchOrder
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs
from prime_hpc.supervisor.roles.slurm_step import StepSpec

SITE = SiteConfig.model_validate({"name": "test", "partitions": {"gpu": {"gpus_per_node": 8}, "cpu": {}}})
WORKERS: dict[str, Any] = {"env": [{"id": "reverse-text"}], "env_servers": {"workers": 4}}


def make(nodes: int = 3, **values: Any) -> Experiment:
    base: dict[str, Any] = {
        "output_dir": "/shared/runs",
        "name": "x",
        "orchestrator": WORKERS,
        "inference": {},
        "slurm": {"partition": "gpu", "orchestrator": {"partition": "cpu", "nodes": nodes}},
    }
    return Experiment.model_validate(base | values)


def specs_of(tree: Experiment, placement: Placement, missing: int = 0) -> list[StepSpec]:
    """With nodes `c<component>n<number>`; `missing` are gone from the end of the first component."""
    hosts = tuple(
        tuple(f"c{c.index}n{i}" for i in range(c.num_nodes - (missing if c.index == 0 else 0)))
        for c in placement.components
    )
    return slurm_specs(tree, SITE, placement, Allocation("7", hosts, "c0n0", 0), Path("/shared/runs/x"))


def order_of(spec: StepSpec) -> LaunchOrder:
    hellos = {f"{host}/0": {"address": host, "collectives": host, "ports": [31_000]} for host in spec.hosts}
    order = spec.order(spec, hellos, {"inference": ["http://c2n0:1/v1"]})
    assert order is not None
    return order


def test_they_are_the_orchestrator_s_component_but_its_first_node() -> None:
    tree = make()
    placement = place_slurm(tree, SITE)
    assert placement.layout == "het"
    assert [(c.name, c.num_nodes) for c in placement.components] == [
        ("orchestrator", 3),
        ("trainer", 1),
        ("inference", 1),
    ]
    spec = next(spec for spec in specs_of(tree, placement) if spec.name == "orchestrator")
    assert spec.hosts == ("c0n0", "c0n1", "c0n2")
    assert spec.environment[NODE_PORTS] == "1" and len(spec.environment[ENV_KEY]) > 20
    order = order_of(spec)
    assert order.environment[ENV_HOSTS] == "c0n1:31000,c0n2:31000"
    assert order.nodes == list(spec.hosts) and len(order.commands) == 3
    assert "prime_hpc.orchestrator.main" in order.commands[0]
    for command in order.commands[1:]:
        assert command[-4:] == ["prime_hpc.envs.workers.host", "--listen", "[::]:31000", "--of-a-job"]
    assert not any(spec.environment[ENV_KEY] in word for command in order.commands for word in command)


def test_in_a_packed_job_they_come_after_the_engines_and_before_the_spares() -> None:
    slurm = {"partition": "cpu", "trainer": {"nodes": 1}, "inference": {"nodes": 1}, "spare_nodes": 1}
    tree = make(slurm=slurm | {"orchestrator": {"nodes": 3}})
    placement = place_slurm(tree, SITE)
    assert (placement.layout, placement.num_nodes, placement.spares) == ("packed", 5, (4,))
    hosts = {spec.name: spec.hosts for spec in specs_of(tree, placement)}
    assert hosts["orchestrator"] == ("c0n0", "c0n2", "c0n3")
    assert (hosts["trainer"], hosts["inference"]) == (("c0n0",), ("c0n1",))
    smaller = {spec.name: spec.hosts for spec in specs_of(tree, placement, missing=2)}
    assert smaller["orchestrator"] == ("c0n0", "c0n2"), "a job that came back smaller goes on with those that it has"


def test_without_them_nothing_changes() -> None:
    tree = make(nodes=1)
    spec = next(spec for spec in specs_of(tree, place_slurm(tree, SITE)) if spec.name == "orchestrator")
    assert spec.hosts == ("c0n0",) and not spec.environment
    order = order_of(spec)
    assert len(order.commands) == 1 and ENV_HOSTS not in order.environment
    assert with_env_hosts(tree, RoleContext("orchestrator", Path("/x"))) is tree


def test_the_orchestrator_takes_them_as_addresses() -> None:
    environ = {ENV_HOSTS: "c0n1:31000,c0n2:31000"}
    context = RoleContext.from_env("orchestrator", Path("/x"), environ=environ)
    servers = with_env_hosts(make(), context).orchestrator.env_servers
    assert (servers.addresses, servers.key_var, servers.workers) == (["c0n1:31000", "c0n2:31000"], ENV_KEY, 4)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"orchestrator": {"env": [{"id": "reverse-text"}]}}, "nodes.*no environment has workers"),
        ({"orchestrator": WORKERS | {"env": [{"id": "reverse-text", "workers": 0}]}}, "no environment has workers"),
        ({"orchestrator": WORKERS | {"env_servers": {"workers": 2, "addresses": ["h:1"]}}}, "addresses"),
        ({"orchestrator": WORKERS | {"env_servers": {"workers": "auto"}}}, "max_workers"),
    ],
    ids=["no workers", "none of any", "elsewhere", "auto"],
)
def test_nodes_that_would_play_nothing_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        place_slurm(make(**values), SITE)


def test_pods_have_none_yet() -> None:
    with pytest.raises(ConfigError, match=r"slurm.orchestrator.nodes.*your own"):
        components_of(for_pods(make()))


@pytest.mark.parametrize(
    ("workers", "limit", "is_told"),
    [(0, 4096, True), (0, 8448, False), (4, 2000, True), (4, 4096, False), (4, 4, True)],
)
def test_more_connections_than_open_files_are_told_at_the_start(workers: int, limit: int, is_told: bool) -> None:
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING", format="{message}")
    section = {"max_concurrent": 8192, "env": [{"id": "reverse-text"}], "env_servers": {"workers": workers}}
    warn_of_few_open_files(make(orchestrator=section), limit)
    logger.remove(sink)
    assert bool(said) == is_told
    assert not said or (f"{limit} open files" in said[0] and "env_servers.workers" in said[0])
