"""Servers that come and go as jobs of their own (`slurm.elastic`): what is asked for, and who goes on without them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.validate import check_complete
from prime_hpc.orchestrator import weight_sync
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.server_news import ServerNews
from prime_hpc.runtime.role_context import NOWHERE
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.supervisor.roles.led_roles import LedRoles
from prime_hpc.supervisor.roles.process import known_urls
from prime_hpc.supervisor.roles.replicas import Replicas
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs
from prime_hpc.supervisor.roles.slurm_step import StepContext, StepRole, StepSpec
from tests.support.lint import findings
from tests.support.policy_servers import Bus, Server
from tests.unit.test_placement import SITE, experiment, on_h100
from tests.unit.test_weight_sync import sync_of, until


def options(elastic: dict[str, Any], **values: Any) -> dict[str, str | bool] | None:
    own = {"elastic": {"servers": 1, **elastic}, "qos": "high", "inference": {"constraint": "ib"}, "mail_type": "END"}
    return place_slurm(experiment(**{"slurm": on_h100(**own), **values}), SITE).elastic


def test_its_job_asks_for_the_nodes_of_the_others_and_for_the_gpus_of_one_server() -> None:
    two = {"data_parallel_size": 2, "tensor_parallel_size": 2, "num_replicas": 4}
    found = options({"partition": "spot", "time": "4:00:00"}, inference=two)
    assert found is not None
    assert found.pop("gres") == "gpu:4", "of which the others share a node"
    assert found == {"partition": "spot", "time": "4:00:00", "qos": "high", "constraint": "ib", "signal": "B:USR1@120"}
    stated = options({"gpus_per_node": 8, "comment": "mine", "extra": {"nice": 100}}, inference=two)
    assert stated is not None
    assert (stated["gres"], stated["comment"], stated["nice"]) == ("gpu:8", "mine", "100") and "mail-type" not in stated
    assert place_slurm(experiment(slurm=on_h100()), SITE).elastic is None


def test_a_server_over_several_nodes_cannot_be_elastic() -> None:
    with pytest.raises(ConfigError, match="a server is on 2 nodes, and an elastic one is a job of one node"):
        options({}, inference={"data_parallel_size": 2, "tensor_parallel_size": 8, "across_nodes": "engine_group"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "sft", "sft": {"data": {"type": "fake"}}}, "adds to the servers that an RL run starts"),
        ({"weights": {"transport": "nccl"}}, "weights.transport = nccl goes to the servers that there are at first"),
        ({"inference": {"sleep": True}, "async_level": 0, "inference_gpu_ids": [0]}, "on GPUs of their own"),
    ],
)
def test_who_cannot_take_them_in_is_told_so(values: dict[str, Any], words: str) -> None:
    tree = {"inference": {}, "orchestrator": {"env": [{"id": "reverse-text"}]}, "slurm": {"elastic": {"servers": 1}}}
    with pytest.raises(ConfigError, match=words):
        check_complete(Experiment.model_validate(tree | values), "submit", {})


def specs() -> list[StepSpec]:
    tree = experiment(inference={"num_replicas": 2}, slurm=on_h100(elastic={"servers": 2}))
    placement = place_slurm(tree, SITE)
    nodes = tuple(f"n{i}" for i in range(placement.components[0].num_nodes))
    return slurm_specs(tree, SITE, placement, Allocation("7", (nodes,), "n0", 0), Path("/shared/runs/x"))


def test_the_orchestrator_starts_without_them_and_knows_their_places() -> None:
    found = specs()
    elastic = [spec for spec in found if spec.is_elastic]
    assert [(spec.label, spec.hosts, spec.gpus) for spec in elastic] == [
        ("inference[2]", (), (0,)),
        ("inference[3]", (), (0,)),
    ]
    (orchestrator,) = [spec for spec in found if spec.name == "orchestrator"]
    hello = {f"{host}/0": {"address": host, "ports": [1, 2]} for host in orchestrator.hosts}
    assert orchestrator.order(orchestrator, hello, {"inference": ["http://a/v1"]}) is None
    order = orchestrator.order(orchestrator, hello, {"inference": ["http://a/v1", "http://b/v1"]})
    assert order is not None
    urls = order.environment["PRIMEHPC_INFERENCE_URLS"].split(",")
    assert urls == ["http://a/v1", "http://b/v1", f"{NOWHERE}0/v1", f"{NOWHERE}1/v1"]
    assert [server.is_absent for server in ServerTable(urls, 0.0).servers] == [False, False, True, True]


def role(label: str, *, is_elastic: bool = True, **facts: Any) -> Any:
    name, _, index = label.partition("[")
    spec = SimpleNamespace(label=label, name=name, index=int(index.rstrip("]")), is_elastic=is_elastic)
    own = {"state": "ready", "url": "http://e/v1", "hosts": ["m7"], "is_server": True, "was_ready": True}
    own |= {"is_substitute_job": False, "can_be_substituted": True, "is_alive": False, "has_node": False}
    made = Mock(was_started=False, **{**own, **facts})
    made.spec = spec
    return made


def test_urls_of_those_that_have_joined_are_not_counted_with_the_others() -> None:
    """They would stand in the places of others: the second may have a node before the first."""
    joined, own = role("inference[1]", url="http://b/v1"), role("inference[0]", is_elastic=False, url="http://a/v1")
    assert known_urls({}, [joined, own]) == {"inference": ["http://a/v1"]}


@pytest.fixture
def said() -> Iterator[list[str]]:
    words: list[str] = []
    sink = logger.add(lambda message: words.append(message.record["message"]), level="WARNING")
    yield words
    logger.remove(sink)


def test_it_is_sent_at_once_and_again_and_what_slurm_refuses_is_said_once(said: list[str]) -> None:
    now, started = 100.0, list[Any]()
    replicas = Replicas(retry_s=60.0, spares=["n8"], clock=lambda: now)
    server = role("inference[2]")
    server.log_excerpt.return_value = "...\nsbatch: error: invalid partition specified: sp0t\n"
    replicas.invite(server)
    assert (server.state, server.is_substitute_job) == ("away", True)
    for _ in range(3):
        replicas.restart_lost([server], started.append)
        server.was_started = True
        replicas.restart_lost([server], started.append)
        now += 61.0
    assert len(started) == 3 and len(said) == 1 and "invalid partition specified: sp0t" in said[0]
    server.is_alive = server.has_node = True
    replicas.restart_lost([server], started.append)
    assert server.state == "starting" and len(started) == 3
    assert "as a job of its own in 60 s" in replicas.mark_lost(server, []) and replicas.take_spares(["n1"]) is not None


def test_the_run_goes_on_without_it_and_starts_again_in_place_beside_it() -> None:
    hubs = Mock()
    led = LedRoles(Replicas(60.0, [], lambda: 0.0), hubs, Mock(), Mock(), Mock())
    own, elastic = role("inference[0]", is_elastic=False), role("inference[1]", was_ready=False)
    led.roles = [own, elastic]
    assert not led.let_go(own, "cause") and led.let_go(elastic, "its job was cancelled")
    elastic.kill.assert_called_once_with()
    told = {"role": "inference", "index": 1, "state": "lost", "url": "http://e/v1"}
    hubs.publish.assert_called_once_with("server", **told)
    left = led.servers_without([])
    assert left is not None and left.roles == [own, elastic]
    own.was_ready = False
    assert led.servers_without([]) is None


def test_a_warning_of_its_own_job_is_none_of_the_runs(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    context = StepContext(Allocation("7", (("n1",),), "n1", 0), tmp_path, no_kill=True)
    spec = StepSpec("inference", [], 900.0, index=1, is_elastic=True)
    server = StepRole(spec, tmp_path, {}, {}, context, lambda topic, **row: told.append({"topic": topic, **row}), 1.0)
    server.is_substitute_job, server.start_number, server.url = True, 1, "http://e/v1"
    server.on_message({"event": "warned", "signal": 10, "start_number": 1, "host": "m7", "key": "m7/0"})
    assert not server.warned
    assert told == [
        {"topic": "server", "role": "inference", "index": 1, "state": "leaving", "url": "http://e/v1"},
    ]


def test_nobody_waits_for_it_and_it_gets_the_newest_version_when_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wait_for_artifact", "newest_of_attempt", "set_floor"):
        monkeypatch.setattr(weight_sync, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(weight_sync, "list_versions", lambda paths: [1, 2])
    own, elastic = Server(), Server()
    elastic.is_up = False
    bus, table = Bus(), ServerTable(["http://a/v1", f"{NOWHERE}0/v1"], 0.0)
    sync = sync_of([own, elastic], table, bus, tmp_path)
    pools = {"train_pool": Mock(), "eval_pool": None}
    parts: Any = SimpleNamespace(clients=[own, elastic], teacher=None, **pools)
    dispatcher = Mock()
    dispatcher.drop_server.return_value = 2
    fail: Any = pytest.fail
    news = ServerNews(experiment(), parts, table, sync, dispatcher, fail)

    def hear(state: str) -> None:
        news.act({"role": "inference", "index": 1, "state": state, "url": "http://e/v1"})

    async def main() -> None:
        await sync.prepare(0)
        assert table.ready_indices == [0]
        running = asyncio.create_task(sync.run())
        bus.said["weights"] = {"version": 1}
        await until(lambda: table.served_version == 1)
        elastic.is_up = True
        await asyncio.sleep(0)
        hear("starting")
        assert elastic.base_url == "http://e/v1"
        parts.train_pool.move_server.assert_called_once_with(1, "http://e/v1")
        await until(lambda: table.ready_indices == [0, 1])
        assert elastic.version == 1
        hear("leaving")
        assert table.ready_indices == [0]
        dispatcher.drop_server.assert_not_called()
        bus.said["weights"] = {"version": 2}
        await until(lambda: table.served_version == 2)
        assert elastic.version == 1 and table.ready_indices == [0]
        hear("lost")
        dispatcher.drop_server.assert_called_once_with(1)
        hear("starting")
        await until(lambda: table.ready_indices == [0, 1])
        assert elastic.version == 2 and not running.done()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())


def test_lint_knows_their_partition_and_that_a_constant_is_shared(model: Path) -> None:
    slurm = {"elastic": {"servers": 3, "partition": "h10"}}
    found = {(one.code, one.key): one for one in findings(model, {"slurm": slurm})}
    assert found["PH301", "slurm.elastic.partition"].remedy == "did you mean h100?"
    assert "8 to 11 servers share" in found["PH203", "orchestrator.max_concurrent"].message
    slurm["elastic"]["partition"] = "spot"
    assert findings(model, {"slurm": slurm, "orchestrator": {"adaptive_concurrency": {}}}) == []
