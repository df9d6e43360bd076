"""Which role runs on which nodes of a Slurm job, and with which sbatch options."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.runtime.role_context import INFERENCE_URLS
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.options import gres_gpus, parse_mem_mib, resolve
from prime_hpc.slurm.placement import Placement, RoleGroup, choose_layout, place_slurm
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs
from prime_hpc.supervisor.roles.slurm_step import StepSpec, http_port

SITE = SiteConfig.model_validate(
    {
        "name": "test",
        "partitions": {
            "h100": {"gpus_per_node": 8, "gpu_memory_gib": 80},
            "a100": {"gpus_per_node": 4, "gpu_type": "a100"},
            "cpu": {"gpus_per_node": 0},
        },
    }
)


def experiment(**values: Any) -> Experiment:
    base = {"output_dir": "/shared/runs", "name": "x", "orchestrator": {"env": [{"id": "reverse-text"}]}}
    return Experiment.model_validate({**base, **values})


def place(site: SiteConfig = SITE, **values: Any) -> Placement:
    return place_slurm(experiment(**values), site)


def groups(placement: Placement, role: str) -> list[RoleGroup]:
    return [group for group in placement.groups if group.role == role]


def on_h100(**slurm: Any) -> dict[str, Any]:
    return {"partition": "h100", **slurm}


def test_what_fits_one_node_shares_it() -> None:
    placement = place(inference={"data_parallel_size": 4}, trainer={"num_ranks": 4}, slurm=on_h100())
    assert (placement.layout, placement.num_nodes) == ("packed", 1)
    (trainer,), (server,) = groups(placement, "trainer"), groups(placement, "inference")
    assert server.gpus == (0, 1, 2, 3)
    assert trainer.gpus == (4, 5, 6, 7)
    assert placement.components[0].options == {"partition": "h100", "gres": "gpu:8"}


def test_what_does_not_fit_gets_nodes_of_its_own_trainer_first() -> None:
    placement = place(inference={"data_parallel_size": 8}, trainer={"num_ranks": 16}, slurm=on_h100(spare_nodes=2))
    (trainer,), (server,) = groups(placement, "trainer"), groups(placement, "inference")
    assert (trainer.first_node, trainer.num_nodes, trainer.processes_per_node) == (0, 2, 8)
    assert (server.first_node, server.num_nodes, server.dp_size) == (2, 1, 8)
    assert placement.spares == (3, 4)
    assert placement.num_nodes == 5


def test_stated_nodes_are_never_shared() -> None:
    placement = place(inference={}, trainer={}, slurm=on_h100(trainer={"nodes": 1}))
    assert placement.num_nodes == 2


def test_the_orchestrator_sits_on_the_first_node_of_component_0() -> None:
    for slurm in (on_h100(), on_h100(layout="het"), on_h100(orchestrator={"partition": "cpu"})):
        (group,) = groups(place(inference={}, slurm=slurm), "orchestrator")
        assert (group.component, group.first_node, group.num_nodes, group.gpus) == (0, 0, 1, None)


def test_without_gpus_everything_is_on_one_node_unless_nodes_are_stated() -> None:
    shared = place(inference={"data_parallel_size": 2}, trainer={"num_ranks": 2}, slurm={"partition": "cpu"})
    assert shared.num_nodes == 1
    assert all(group.gpus is None for group in shared.groups)
    assert shared.components[0].options == {"partition": "cpu"}
    apart = place(
        inference={"data_parallel_size": 2},
        trainer={"num_ranks": 2},
        slurm={"partition": "cpu", "trainer": {"nodes": 2}, "inference": {"nodes": 2}},
    )
    assert [(g.first_node, g.dp_size) for g in groups(apart, "inference")] == [(2, 1), (3, 1)]


def test_servers_or_one_group_over_several_nodes() -> None:
    values: dict[str, Any] = {"data_parallel_size": 16, "num_replicas": 2}
    servers = groups(place(inference=values, slurm=on_h100()), "inference")
    assert [(g.index, g.first_node, g.num_nodes, g.dp_size) for g in servers] == [
        (0, 1, 1, 8),
        (1, 2, 1, 8),
        (2, 3, 1, 8),
        (3, 4, 1, 8),
    ]
    values["vllm"] = {"enable_expert_parallel": True}
    grouped = groups(place(inference=values, slurm=on_h100()), "inference")
    assert [(g.first_node, g.num_nodes, g.processes_per_node, g.dp_size) for g in grouped] == [
        (1, 2, 8, 16),
        (3, 2, 8, 16),
    ]
    forced = place(inference={**values, "across_nodes": "servers"}, slurm=on_h100())
    assert len(groups(forced, "inference")) == 4


def test_several_replicas_of_a_node_have_gpus_of_their_own() -> None:
    values = {"num_replicas": 3, "data_parallel_size": 2, "tensor_parallel_size": 2}
    servers = groups(place(inference=values, trainer={"num_ranks": 8}, slurm=on_h100()), "inference")
    assert [(g.first_node, g.gpus) for g in servers] == [(1, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (2, (0, 1, 2, 3))]


def specs_of(**values: Any) -> list[StepSpec]:
    """The roles of a job whose nodes are n0, n1, ..."""
    tree = experiment(**values)
    placement = place_slurm(tree, SITE)
    nodes = tuple(f"n{i}" for i in range(placement.components[0].num_nodes))
    return slurm_specs(tree, SITE, placement, Allocation("7", (nodes,), "n0", 0), Path("/shared/runs/x"))


def listening(**values: Any) -> list[tuple[str, str]]:
    """(host, port) of every server as its order states them, where node agents have found 31000 and up."""
    found = []
    for number, spec in enumerate(specs_of(**values)):
        if spec.is_server:
            own = [31_000 + 10 * number, 31_001 + 10 * number]
            order = spec.order(spec, {f"{spec.hosts[0]}/0": {"address": "a", "collectives": "a", "ports": own}}, {})
            assert order is not None
            words = order.commands[0]
            assert words[words.index("--port") + 1] == str(http_port(spec, {"ports": own}))
            found.append((spec.hosts[0], words[words.index("--port") + 1]))
    return found


def test_a_service_s_trainer_starts_when_it_can_be_told_where_all_engines_are() -> None:
    service = {"trainer": {"num_ranks": 8, "max_concurrent_runs": 2, "tinker": {}}, "model": {"lora": {}}}
    specs = specs_of(inference={"num_replicas": 2}, slurm=on_h100(), **service)
    (trainer,) = [spec for spec in specs if spec.name == "trainer"]
    hellos = {f"{trainer.hosts[0]}/0": {"address": "a", "collectives": "a", "ports": [31_000, 31_001]}}
    assert trainer.order(trainer, hellos, {"inference": ["http://n1:1/v1"]}) is None
    order = trainer.order(trainer, hellos, {"inference": ["http://n1:1/v1", "http://n2:1/v1"]})
    assert order is not None and order.environment[INFERENCE_URLS] == "http://n1:1/v1,http://n2:1/v1"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_torchrun_is_ours_which_keeps_its_files_where_they_are_removed(num_nodes: int) -> None:
    specs = specs_of(trainer={"num_ranks": 8 * num_nodes}, slurm=on_h100())
    (trainer,) = [spec for spec in specs if spec.name == "trainer"]
    hellos = {f"{host}/0": {"address": "a", "collectives": "10.0.0.1", "ports": [31_000]} for host in trainer.hosts}
    order = trainer.order(trainer, hellos, {})
    assert order is not None and len(trainer.hosts) == num_nodes
    words = order.commands[0]
    assert words[words.index("-m") + 1] == "prime_hpc.trainer.torchrun"
    assert ("10.0.0.1" in words) == (num_nodes > 1), "on one node nothing listens"


def test_the_nodes_of_an_engine_group_are_a_head_and_headless_ones() -> None:
    inference = {"data_parallel_size": 16, "vllm": {"enable_expert_parallel": True}}
    (spec,) = [spec for spec in specs_of(inference=inference, slurm=on_h100()) if spec.is_server]
    assert len(spec.hosts) == 2
    hello = {"address": "a", "collectives": "10.0.0.1", "ports": [31_000, 31_001, 31_002, 31_003]}
    order = spec.order(spec, {f"{host}/0": hello for host in spec.hosts}, {})
    assert order is not None
    head, rest = order.commands
    stated = dict(pairwise(head))
    assert (stated["--data-parallel-size"], stated["--data-parallel-size-local"]) == ("16", "8")
    assert (stated["--data-parallel-rpc-port"], stated["--data-parallel-address"]) == ("31001", "10.0.0.1")
    assert "--headless" not in head
    assert "--headless" in rest and rest[rest.index("--data-parallel-start-rank") + 1] == "8"


def test_servers_of_one_node_listen_on_ports_of_their_own() -> None:
    many: dict[str, Any] = {"trainer": {"num_ranks": 8}, "slurm": on_h100(layout="packed")}
    found = listening(inference={"num_replicas": 8}, **many)
    assert len(found) == len(set(found)) == 8 and {host for host, _ in found} == {"n1"}
    stated = listening(inference={"num_replicas": 9, "server": {"port": 8100}}, **many)
    assert sorted(stated) == [*(("n1", str(8100 + i)) for i in range(5)), *(("n2", str(8100 + i)) for i in range(4))]
    both = taught({"server": {"port": 8101}}, inference={"num_replicas": 2, "server": {"port": 8100}})
    with pytest.raises(ConfigError, match="teacher_inference.server.port: 8101: on a node that both use, server 1 of"):
        place(**both, slurm=on_h100())
    assert place(**both, slurm=on_h100(teacher={"nodes": 1}, inference={"nodes": 1})).num_nodes == 3


def taught(teacher: dict[str, Any], **values: Any) -> dict[str, Any]:
    orchestrator = {"env": [{"id": "reverse-text"}], "advantage": {"type": "opd"}, "teacher": {"model": "o/teacher"}}
    return {"orchestrator": orchestrator, "teacher_inference": teacher, **values}


def test_a_teacher_is_a_group_of_engines_with_places_of_its_own() -> None:
    together = place(**taught({}, inference={"data_parallel_size": 4}, trainer={"num_ranks": 3}, slurm=on_h100()))
    assert together.num_nodes == 1
    assert [(g.role, g.gpus) for g in together.groups] == [
        ("orchestrator", None),
        ("trainer", (5, 6, 7)),
        ("inference", (0, 1, 2, 3)),
        ("teacher", (4,)),
    ]
    wide: dict[str, Any] = {"num_replicas": 2, "tensor_parallel_size": 8}
    apart = place(**taught(wide, inference={}, trainer={"num_ranks": 8}, slurm=on_h100(spare_nodes=1)))
    assert [(g.role, g.first_node) for g in apart.groups[1:]] == [
        ("trainer", 0),
        ("inference", 1),
        ("teacher", 2),
        ("teacher", 3),
    ]
    assert apart.spares == (4,)
    other = on_h100(teacher={"partition": "a100", "nodes": 1})
    het = place(**taught({"data_parallel_size": 4}, inference={}, slurm=other))
    assert (het.layout, [(c.name, c.num_nodes) for c in het.components]) == (
        "het",
        [("trainer", 1), ("inference", 1), ("teacher", 1)],
    )
    assert groups(het, "teacher")[0].component == 2
    with pytest.raises(ConfigError, match=r"slurm.teacher.nodes.*8 GPUs a node are needed.*has 4; use 2 nodes"):
        place(**taught({"data_parallel_size": 8}, inference={}, slurm=other))
    with pytest.raises(ConfigError, match="teacher_inference.tensor_parallel_size.*larger than a node of 8"):
        place(**taught({"tensor_parallel_size": 16}, inference={}, slurm=on_h100()))


def test_an_imitated_teacher_is_the_only_group_of_engines() -> None:
    values = taught({}, trainer={"loss": {"type": "nll"}}, slurm=on_h100())
    values["orchestrator"] = {**values["orchestrator"], "advantage": {"type": "sft"}}
    assert [(g.role, g.gpus) for g in place(**values).groups[1:]] == [("trainer", (1,)), ("teacher", (0,))]


def test_named_gpus_win_and_may_overlap() -> None:
    shared = place(inference={}, inference_gpu_ids=[3], trainer_gpu_ids=[3], slurm=on_h100())
    assert [g.gpus for g in shared.groups] == [None, (3,), (3,)]
    one = place(inference={}, trainer_gpu_ids=[0], slurm=on_h100())
    assert [g.gpus for g in one.groups] == [None, (0,), (1,)]
    with pytest.raises(ConfigError, match="trainer_gpu_ids: .*different GPUs of a node, from 0 to 7"):
        place(inference={}, trainer_gpu_ids=[8], slurm=on_h100())
    with pytest.raises(ConfigError, match="1 GPUs, but 2 are needed"):
        place(inference={}, trainer={"num_ranks": 2}, trainer_gpu_ids=[0], slurm=on_h100())


def test_supervised_and_attached_runs_place_no_server() -> None:
    sft = place(kind="sft", sft={"data": {"type": "fake"}}, trainer={"num_ranks": 8}, slurm=on_h100())
    assert [group.role for group in sft.groups] == ["trainer"]
    attached = place(trainer={"num_ranks": 8}, slurm=on_h100())
    assert [group.role for group in attached.groups] == ["orchestrator", "trainer"]


def test_auto_is_het_only_where_node_types_differ() -> None:
    same = experiment(inference={}, slurm=on_h100(trainer={"time": "1:00:00", "mem": "1G"}, inference={"mem": "2G"}))
    assert choose_layout(same, SITE)[0] == "packed"
    assert place_slurm(same, SITE).components[0].options["mem"] == "2G"
    for other in (
        {"partition": "a100"},
        {"constraint": "ib"},
        {"gpus_per_node": 4},
        {"gpu_type": "h200"},
        {"qos": "low"},
        {"account": "b"},
    ):
        layout, why = choose_layout(experiment(inference={}, slurm=on_h100(inference=other)), SITE)
        assert layout == "het"
        assert "inference" in why
    assert choose_layout(experiment(inference={}, slurm=on_h100(orchestrator={})), SITE)[0] == "het"


def test_het_components() -> None:
    placement = place(
        inference={"data_parallel_size": 4},
        trainer={"num_ranks": 16},
        slurm={
            "account": "a",
            "trainer": {"partition": "h100", "account": "b"},
            "inference": {"partition": "a100"},
            "orchestrator": {"partition": "cpu", "cpus_per_task": 8},
        },
    )
    assert [(c.index, c.name, c.num_nodes) for c in placement.components] == [
        (0, "orchestrator", 1),
        (1, "trainer", 2),
        (2, "inference", 1),
    ]
    assert placement.components[0].options == {"partition": "cpu", "account": "a", "cpus-per-task": "8"}
    assert placement.components[1].options == {"partition": "h100", "account": "b", "gres": "gpu:8"}
    assert [g.component for g in placement.groups] == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainer": {"num_ranks": 9}}, r"trainer.num_ranks: 9 ranks.*evenly over 2 nodes; use 8 or 10"),
        (
            {"trainer": {"num_ranks": 16}, "slurm": on_h100(trainer={"nodes": 1})},
            "slurm.trainer.nodes.*16 a node, but a node has 8 GPUs; use at least 2",
        ),
        ({"inference": {"tensor_parallel_size": 16}}, "inference.tensor_parallel_size.*larger than a node of 8"),
        (
            {"inference": {"data_parallel_size": 6}, "slurm": on_h100(inference={"nodes": 4})},
            "slurm.inference.nodes: 6 engines cannot be spread evenly over 4 nodes; use 1, 2, 3 or 6 nodes",
        ),
        (
            {"inference": {"num_replicas": 2, "data_parallel_size": 8}, "slurm": on_h100(inference={"nodes": 1})},
            "16 GPUs a node are needed.*has 8; use 2 nodes",
        ),
        (
            {"inference": {}, "slurm": on_h100(layout="packed", inference={"partition": "a100"})},
            "slurm.layout: packed is one homogeneous job.*partition: trainer h100, inference a100",
        ),
        (
            {"inference": {}, "slurm": on_h100(spare_nodes=1, inference={"partition": "a100"})},
            "slurm.spare_nodes: spare nodes exist in homogeneous jobs alone",
        ),
        ({"inference": {}, "slurm": on_h100(orchestrator={"nodes": 2})}, "slurm.orchestrator.nodes.*one node"),
        ({"slurm": on_h100(extra={"time-min": "1"})}, "state slurm.time_min"),
        ({"slurm": on_h100(extra={"wckey": ["a"]})}, "must be text, a number or true"),
        ({"slurm": on_h100(trainer={"comment": "a\nb"})}, "slurm.trainer.comment.*line break"),
    ],
)
def test_what_cannot_be_placed_says_why_and_what_to_do(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(**{"slurm": on_h100(), **values})


def test_a_site_without_het_jobs_names_a_way_out() -> None:
    site = SITE.model_copy(update={"het_jobs": False})
    for slurm in (on_h100(layout="het"), on_h100(inference={"partition": "a100"})):
        with pytest.raises(ConfigError, match="accepts no het jobs.*slurm.layout = packed"):
            place(site, inference={}, slurm=slurm)


def test_precedence_of_options() -> None:
    site = SITE.model_copy(
        update={"options": SITE.options.model_copy(update={"qos": "site", "account": "site", "extra": {"nice": 5}})}
    )
    one = experiment(
        inference={}, slurm=on_h100(qos="job", exclusive=True, inference={"qos": "role", "exclusive": False})
    )
    assert resolve("inference", one, site).options == {
        "partition": "h100",
        "account": "site",
        "qos": "role",
        "gres": "gpu:8",
        "nice": "5",
    }
    assert resolve("trainer", one, site).options["qos"] == "job"
    assert resolve("trainer", one, site).options["exclusive"] is True
    taken_back = experiment(slurm=on_h100(extra={"nice": False, "hint": "nomultithread", "spread-job": True}))
    options = resolve("trainer", taken_back, site).options
    assert "nice" not in options
    assert (options["hint"], options["spread-job"]) == ("nomultithread", True)


def test_how_gpus_are_asked_for() -> None:
    def asked(slurm: dict[str, Any], site: SiteConfig = SITE) -> tuple[int, dict[str, Any]]:
        found = resolve("trainer", experiment(slurm=slurm), site)
        return found.gpus_per_node, {k: v for k, v in found.options.items() if k in ("gres", "gpus-per-node")}

    assert asked({"partition": "unknown"}) == (0, {})
    assert asked({"partition": "h100", "gpus_per_node": 0}) == (0, {})
    assert asked({"partition": "h100, a100"}) == (4, {"gres": "gpu:4"})
    assert asked({"partition": "h100", "gpu_type": "h100"}) == (8, {"gres": "gpu:h100:8"})
    assert asked({"partition": "h100", "gres": "gpu:h100:2,lustre:1"}) == (2, {"gres": "gpu:h100:2,lustre:1"})
    assert asked({"gres": "gpu:2", "trainer": {"gpus_per_node": 3}}) == (3, {"gres": "gpu:3"})
    other = SITE.model_copy(update={"gpu_option": "gpus-per-node"})
    assert asked({"partition": "h100", "gpu_type": "h100"}, other) == (8, {"gpus-per-node": "h100:8"})
    unknown_to_slurm = SITE.model_copy(update={"gpu_option": "none"})
    assert asked({"partition": "h100", "gpu_type": "h100"}, unknown_to_slurm) == (8, {})


def test_a_run_on_cpus_asks_for_no_gpu_that_nobody_stated() -> None:
    many: dict[str, Any] = {"inference": {"data_parallel_size": 4}, "trainer": {"num_ranks": 16}, "device": "cpu"}
    placed = place(**many, slurm=on_h100())
    assert (placed.num_nodes, placed.components[0].options) == (1, {"partition": "h100"})
    stated = place(inference={}, device="cpu", slurm=on_h100(gpus_per_node=2))
    assert stated.components[0].options["gres"] == "gpu:2"  # where a partition starts no job without


@pytest.mark.parametrize(
    ("text", "count"),
    [("gpu", 1), ("gpu:8", 8), ("gpu:h100:4", 4), ("lustre:1", 0), ("gres:gpu:2", 2), ("gpu:a(S:0)", 1)],
)
def test_gpus_of_a_gres_request(text: str, count: int) -> None:
    assert gres_gpus(text) == count


def test_memory_sizes() -> None:
    assert [parse_mem_mib(text) for text in ("0", "512", "512M", "2G", "1t", "1024K")] == [0, 512, 512, 2048, 2**20, 1]
    with pytest.raises(ConfigError, match="no memory size"):
        parse_mem_mib("lots")


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    def maybe(values: st.SearchStrategy[int]) -> dict[str, int]:
        number = draw(st.none() | values)
        return {} if number is None else {"nodes": number}

    partition = st.sampled_from(["h100", "a100", "cpu", "unknown"])
    slurm: dict[str, Any] = {
        "layout": draw(st.sampled_from(["auto", "packed", "het"])),
        "spare_nodes": draw(st.sampled_from([0, 0, 2])),
        "trainer": {"partition": draw(partition), **maybe(st.integers(1, 8))},
        "inference": {"partition": draw(partition), **maybe(st.integers(1, 12))},
    }
    if draw(st.booleans()):
        slurm["inference"]["partition"] = slurm["trainer"]["partition"]
    if draw(st.booleans()):
        slurm["orchestrator"] = {"partition": "cpu"}
    values = {
        "slurm": slurm,
        "trainer": {"num_ranks": draw(st.integers(1, 48))},
        "inference": {
            "num_replicas": draw(st.integers(1, 6)),
            "data_parallel_size": draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32])),
            "tensor_parallel_size": draw(st.sampled_from([1, 2, 4, 8])),
            "across_nodes": draw(st.sampled_from(["auto", "servers", "engine_group"])),
        },
    }
    if draw(st.booleans()):
        slurm["teacher"] = {"partition": slurm["inference"]["partition"], **maybe(st.integers(1, 4))}
        size = {"num_replicas": draw(st.integers(1, 3)), "data_parallel_size": draw(st.sampled_from([1, 2, 8, 16]))}
        values |= taught({**size, "tensor_parallel_size": draw(st.sampled_from([1, 2, 4]))})
    return values


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_every_rank_and_engine_has_its_place(values: dict[str, Any]) -> None:
    """Whatever is not refused is whole: all ranks and engines once, in range, no GPU twice, spares untouched."""
    one = experiment(**values)
    try:
        placement = place_slurm(one, SITE)
    except ConfigError as error:
        assert all(problem.key for problem in error.problems)
        return
    (trainer,) = groups(placement, "trainer")
    assert trainer.num_nodes * trainer.processes_per_node == values["trainer"]["num_ranks"]
    engines = {"inference": values["inference"], "teacher": values.get("teacher_inference")}
    for name, section in engines.items():
        servers = groups(placement, name)
        want = section["num_replicas"] * section["data_parallel_size"] if section else 0
        assert sum(s.dp_size for s in servers) == want
        assert [s.index for s in servers] == list(range(len(servers)))
        assert all(s.dp_size == s.processes_per_node * s.num_nodes for s in servers)
    busy: dict[tuple[int, int], list[int]] = {}
    for group in placement.groups:
        assert group.first_node >= 0
        assert group.first_node + group.num_nodes <= placement.components[group.component].num_nodes
        for node in range(group.first_node, group.first_node + group.num_nodes):
            busy.setdefault((group.component, node), []).extend(group.gpus or ())
        role: Any = group.role
        gpus = resolve(role, one, SITE).gpus_per_node
        if group.role == "orchestrator" or gpus == 0:
            assert group.gpus is None
        else:
            section = engines.get(group.role)
            width = section["tensor_parallel_size"] if section else 1
            assert group.gpus is not None
            assert len(group.gpus) == group.processes_per_node * width
            assert max(group.gpus) < gpus
    assert all(len(used) == len(set(used)) for used in busy.values())
    assert {node for _, node in busy}.isdisjoint(placement.spares)
    assert len(busy) + len(placement.spares) == placement.num_nodes, "a node that nobody uses"


@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]))
def test_whole_nodes_are_never_refused(nodes: int, replicas: int, width: int, engines: int) -> None:
    placement = place(
        trainer={"num_ranks": 8 * nodes},
        inference={"num_replicas": replicas, "data_parallel_size": engines, "tensor_parallel_size": width},
        slurm=on_h100(),
    )
    assert groups(placement, "trainer")[0].num_nodes == nodes


def test_a_thousand_nodes() -> None:
    placement = place(
        trainer={"num_ranks": 4000}, inference={"num_replicas": 500, "data_parallel_size": 8}, slurm=on_h100()
    )
    assert placement.num_nodes == 1000
    assert [g.first_node for g in groups(placement, "inference")] == list(range(500, 1000))
