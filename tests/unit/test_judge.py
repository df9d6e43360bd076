"""Servers of a model that rewards ask (`judge_inference`): config, placement, and the one address in front of them."""

import asyncio
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prime_hpc.client import judge
from prime_hpc.client.balance import Balance
from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.engine_groups import engine_roles, served_by
from prime_hpc.config.validate import check_complete
from prime_hpc.envs.rows.reward_model import score
from prime_hpc.launch.checks import _judge
from prime_hpc.runtime.role_context import RoleContext, role_environment
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.supervisor.roles.spec import split_gpus
from tests.support.classifier_api import ClassifierApi
from tests.support.lint import findings
from tests.unit.test_placement import SITE

BASE: dict[str, Any] = {
    "output_dir": "/shared/runs",
    "name": "x",
    "orchestrator": {"env": [{"id": "reverse-text"}]},
    "inference": {},
    "judge_inference": {"model": "o/judge"},
}


def experiment(**values: Any) -> Experiment:
    return Experiment.model_validate({**BASE, **values})


def problems(exp: Experiment) -> str:
    try:
        check_complete(exp, exp.kind, {})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_judge_is_served_as_the_policy_is_by_its_own_keys() -> None:
    exp = experiment(
        model={"name": "o/policy", "lora": {}, "vision": "frozen"},
        seq_len=1000,
        judge_gpu_ids=[1],
        teacher_inference={},
        orchestrator={"env": [{"id": "x"}], "advantage": {"type": "opd"}, "teacher": {"model": "o/teacher"}},
    )
    assert engine_roles(exp) == ["inference", "teacher", "judge"]
    view = served_by(exp, "judge")
    assert (view.model.name, view.model.lora, view.model.vision, view.max_model_len) == ("o/judge", None, None, 2000)
    assert view.inference_gpu_ids == [1] and view.judge_inference is None and view.teacher_inference is None
    assert served_by(exp, "teacher").max_model_len == 1001


@pytest.mark.parametrize("kind", ["eval", "synthesize"])
def test_who_only_plays_episodes_may_have_a_judge_too(kind: str) -> None:
    client = {"base_url": "http://api/v1"}
    exp = experiment(kind=kind, orchestrator={}, inference=None, **{kind: {"client": client, "env": [{"id": "x"}]}})
    assert engine_roles(exp) == ["judge"]
    assert problems(exp) == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"kind": "sft", "sft": {"data": {"type": "fake"}}},
            "judge_inference: asked by rewards, and this SFT",
        ),
        ({"slurm": {"env": {"JUDGE_URL": "http://j/v1"}}}, "slurm.env.JUDGE_URL names one that runs"),
        ({"model": {"lora": {}}, "trainer": {"max_concurrent_runs": 2}}, "cannot be shared by the runs"),
        ({"judge_gpu_ids": [0, 1]}, "judge_gpu_ids.*names 2 GPUs, but judge_inference uses 1"),
    ],
)
def test_a_judge_that_nobody_could_ask_is_refused(values: dict[str, Any], said: str) -> None:
    assert re.search(said, problems(experiment(**values)))


def test_a_judge_does_not_sleep_and_states_its_model() -> None:
    for section, said in (
        ({"model": "o/judge", "sleep": True}, "only the policy's engines sleep"),
        ({}, "Field required"),
        ({"model": "o/judge", "runner": "pooling", "backend": "transformers"}, "pooling needs backend = vllm"),
    ):
        with pytest.raises(ValidationError, match=said):
            experiment(judge_inference=section)


def test_a_judge_gets_nodes_and_gpus_of_its_own() -> None:
    slurm = {"partition": "h100"}
    apart = {"model": "o/judge", "num_replicas": 2, "tensor_parallel_size": 8}
    packed = place_slurm(experiment(judge_inference=apart, slurm=slurm), SITE)
    assert [(g.role, g.first_node) for g in packed.groups if g.role == "judge"] == [("judge", 2), ("judge", 3)]
    assert packed.components[0].num_nodes == 4
    het = place_slurm(experiment(slurm={**slurm, "judge": {"partition": "a100"}}), SITE)
    assert [(c.name, c.options["partition"]) for c in het.components] == [
        ("trainer", "h100"),
        ("inference", "h100"),
        ("judge", "a100"),
    ]
    shared = place_slurm(experiment(slurm=slurm), SITE)
    assert {g.role: g.gpus for g in shared.groups if g.gpus} == {"inference": (0,), "judge": (1,), "trainer": (2,)}
    with pytest.raises(ConfigError, match=r"judge needs 2 GPUs, but gets 1 .*judge_inference.data_parallel_size"):
        split_gpus(experiment(judge_inference={"model": "o/judge", "data_parallel_size": 2}), ["0", "1"])


@pytest.mark.parametrize("kind", ["eval", "synthesize"])
def test_an_evaluation_shares_its_node_with_the_judge_and_has_no_trainer(kind: str) -> None:
    def placed(policy: int, **slurm: Any) -> tuple[list[str], list[Any]]:
        servers = {"inference": {"data_parallel_size": policy}, "judge_inference": {"model": "j", "num_replicas": 2}}
        parts = {"orchestrator": {}, kind: {"env": [{"id": "x"}]}, **servers}
        found = place_slurm(experiment(kind=kind, slurm={"partition": "h100", **slurm}, **parts), SITE)
        groups = [(g.role, g.component, g.first_node, g.gpus) for g in found.groups if g.role != "orchestrator"]
        return [f"{c.name} {c.num_nodes}" for c in found.components], groups

    shared = [("inference", 0, 0, (0, 1, 2, 3)), ("judge", 0, 0, (4,)), ("judge", 0, 0, (5,))]
    assert placed(4) == placed(4, trainer={"nodes": 2}) == (["all 1"], shared)
    assert placed(8)[0] == placed(4, judge={"nodes": 1})[0] == ["all 2"]
    assert placed(4, judge={"partition": "a100"}) == (
        ["inference 1", "judge 1"],
        [("inference", 0, 0, (0, 1, 2, 3)), ("judge", 1, 0, (0,)), ("judge", 1, 0, (1,))],
    )


def test_a_judge_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    (problem,) = _judge(experiment(judge_inference={"model": str(tmp_path / "absent")}))
    assert problem.key == "judge_inference.model" and "is not a directory" in problem.message


def test_lint_holds_the_judge_to_what_its_model_and_nodes_can(model: Path) -> None:
    """Every finding names the judge's own key."""

    def said(servers: dict[str, Any], **change: Any) -> set[tuple[str, str, str | None]]:
        found = findings(model, {"judge_inference": {"model": str(model), "num_replicas": 8, **servers}} | change)
        return {(f.code, f.severity, f.key) for f in found}

    assert said({}) == set()
    assert said({}, seq_len=8192) == {("PH104", "error", "judge_inference.max_model_len")}
    assert said({"max_model_len": 8192}, seq_len=8192) == set()
    assert ("PH101", "error", "judge_inference.tensor_parallel_size") in said({"tensor_parallel_size": 3})
    assert ("PH308", "error", "slurm.judge.nodes") in said({"num_replicas": 9}, slurm={"judge": {"nodes": 1}})
    assert ("PH107", "info", "judge_inference.model") in said({"model": "o/judge"})


# ---- one address


def ask(url: str, timeout_s: float = 30.0) -> str:
    with urllib.request.urlopen(f"{url}/models", timeout=timeout_s) as answer:
        return json.load(answer)["data"][0]["id"]


def test_connections_are_shared_out_and_a_lost_server_s_are_cut() -> None:
    with ClassifierApi("a") as a, ClassifierApi("b") as b:
        listener = sockets.listen(sockets.loopback())
        balance = Balance(listener, [a.url, b.url], 60.0)
        url = sockets.http_url(sockets.loopback(), listener.getsockname()[1])
        try:
            a.hold.clear()
            b.hold.clear()
            answers: list[str] = []
            threads = [threading.Thread(target=lambda: answers.append(ask(url))) for _ in range(4)]
            for thread in threads:
                thread.start()
            _until(lambda: (a.waiting, b.waiting) == (2, 2))
            a.hold.set()
            b.hold.set()
            for thread in threads:
                thread.join()
            assert sorted(answers) == ["a", "a", "b", "b"]

            a.hold.clear()
            b.hold.clear()
            failed: list[Exception] = []

            def fails() -> None:
                try:
                    ask(url)
                except OSError as error:
                    failed.append(error)

            pair = [threading.Thread(target=fails) for _ in range(2)]
            for thread in pair:
                thread.start()
            _until(lambda: (a.waiting, b.waiting) == (1, 1))
            balance.move(0, None)
            _until(lambda: len(failed) == 1)
            b.hold.set()
            for thread in pair:
                thread.join()
            assert [ask(url) for _ in range(3)] == ["b"] * 3 and len(failed) == 1
        finally:
            a.hold.set()
            balance.close()


def test_who_asks_while_no_server_is_there_waits_until_one_is() -> None:
    listener = sockets.listen(sockets.loopback())
    balance = Balance(listener, ["http://127.0.0.1:9/v1"], 60.0)
    url = sockets.http_url(sockets.loopback(), listener.getsockname()[1])
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(ask(url)))
    thread.start()
    try:
        with pytest.raises(OSError, match="timed out"):  # one who does not wait is forgotten
            ask(url, timeout_s=1.0)
        with ClassifierApi("late") as late:
            balance.move(0, late.url)
            thread.join(30)
            assert answers == ["late"]
            assert late.num_asked == 1
    finally:
        balance.close()


def _until(condition: Any, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rewards_find_the_judge_in_the_environment_and_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in judge.VARIABLES:
        monkeypatch.setenv(name, "of somebody else's")
    monkeypatch.setenv(KEY_VARIABLES["judge"], "the-key")
    hub = BusServer()
    bus = BusClient(hub.address, "orchestrator")

    async def run() -> None:
        with ClassifierApi("a", key="the-key") as a, ClassifierApi("b", key="the-key") as b:
            urls = {"judge": [a.url]}
            facts = role_environment(bus_address=hub.address, attempt=1, incarnation=1, resume_step=None, urls=urls)
            context = RoleContext.from_env("orchestrator", tmp_path, environ=facts)
            async with AsyncExitStack() as stack:
                await judge.open_judge(stack, experiment(), context, bus)
                assert judge.variables(experiment()) == {
                    "JUDGE_URL": os.environ["JUDGE_URL"],
                    "JUDGE_MODEL": "o/judge",
                    "JUDGE_API_KEY": "the-key",
                }
                messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
                assert await asyncio.to_thread(score, messages) == 4.0
                hub.publish("server", role="judge", index=0, state="starting", url=b.url)
                await asyncio.to_thread(_until, lambda: b.num_asked > 0 or score(messages) is None)
                assert a.last["messages"] == messages and a.last["use_activation"] is False
                os.environ["JUDGE_API_KEY"] = "another"
                with pytest.raises(ValueError, match="the judge answered 401"):
                    await asyncio.to_thread(score, messages)

    try:
        asyncio.run(run())
    finally:
        bus.close()
        hub.close()


def test_the_key_of_anothers_judge_is_not_sent_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in judge.VARIABLES:
        monkeypatch.setenv(name, "the user's")
    assert judge.variables(experiment(judge_inference=None)) == {}


def test_no_proxy_is_asked_for_a_judge_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*judge.VARIABLES, "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    judge.set_variables({"JUDGE_URL": "http://10.1.2.3:8000/v1", "JUDGE_MODEL": "m"})
    assert os.environ["JUDGE_MODEL"] == "m"
    assert urllib.request.proxy_bypass("10.1.2.3:8000") and not urllib.request.proxy_bypass("10.1.2.4:8000")


def test_half_an_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"data": [{"probs": [2.5]}]}).encode()
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), part) for part in (body[:9], body)]
    answers.insert(0, b"HTT")

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

    monkeypatch.setattr("prime_hpc.envs.rows.reward_model.PAUSE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("JUDGE_URL", sockets.http_url("127.0.0.1", listener.getsockname()[1]))
        monkeypatch.setenv("JUDGE_MODEL", "o/judge")
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        assert score([{"role": "user", "content": "2 + 2?"}]) == 2.5
        thread.join()
