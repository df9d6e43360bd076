"""The agent between srun and a role: led over the bus, and never left behind. Real processes, no Slurm."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.runtime.process_tree import family, send
from prime_hpc.runtime.role_context import role_environment
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.agent import EXIT_FENCED, FENCE, LaunchOrder
from tests.support.processes import is_alive

LABEL = "trainer"
WAIT_S = 120.0
ANY = Network()


class Lead:
    """The supervisor's side: a hub that pulses while told to, and the agent's messages."""

    def __init__(
        self, run_dir: Path, fence_s: float, label: str = LABEL, network: Network = ANY, job: str = ""
    ) -> None:
        self.paths = RunPaths(run_dir)
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        incarnation = claim_incarnation(self.paths)
        self.hub = BusServer(on_message=lambda topic, m: self.messages.put(m), incarnation=incarnation)
        facts = role_environment(
            bus_address=self.hub.address, attempt=1, incarnation=incarnation, resume_step=None, urls={}
        )
        environment = {**os.environ, **facts, FENCE: str(fence_s), "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
        environment["SLURMD_NODENAME"] = "n1"
        environment |= network.to_env() | ({"SLURM_JOB_ID": job} if job else {})
        command = [sys.executable, "-m", "prime_hpc.supervisor.agent", str(run_dir), label, "1"]
        self.agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def hear(self, event: str) -> dict[str, Any]:
        """The next message of that kind; pulses meanwhile."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.hub.publish("pulse")
            try:
                message = self.messages.get(timeout=0.2)
            except queue.Empty:
                continue
            if message["event"] == event:
                return message
        raise AssertionError(f"the agent never said {event}")

    def order(self, *command: str, **more: Any) -> None:
        self.hub.publish(f"launch/{LABEL}", **vars(LaunchOrder(1, ["n0", "n1"], [list(command)], grace_s=1.0, **more)))

    def close(self) -> None:
        if self.agent.poll() is None:
            send(family(self.agent.pid), signal.SIGKILL)
        self.agent.communicate()
        self.hub.close()


@pytest.fixture
def lead(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lead]:
    one = Lead(tmp_path, getattr(request, "param", 20.0))
    yield one
    one.close()


def sleeper(marker: Path) -> list[str]:
    """A process that writes its id and sleeps, with a child in a session of its own."""
    code = (
        "import os, subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],"
        f" start_new_session=True); open({str(marker)!r}, 'w').write(f'{{os.getpid()}} {{c.pid}}'); time.sleep(300)"
    )
    return [sys.executable, "-c", code]


def pids(lead: Lead, marker: Path) -> list[int]:
    """Of the role and its child; pulses until they run."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        lead.hub.publish("pulse")
        if marker.exists() and len(words := marker.read_text().split()) == 2:
            return [int(word) for word in words]
        time.sleep(0.05)
    raise AssertionError("the role's process never started")


def gone(numbers: list[int]) -> bool:
    return not any(map(is_alive, numbers))


def test_it_runs_what_it_is_told_and_says_how_it_ended(lead: Lead, tmp_path: Path) -> None:
    hello = lead.hear("hello")
    assert hello["key"] == "n1/0"
    assert len(set(hello["ports"])) == 1  # a trainer needs its rendezvous alone
    out = tmp_path / "out"
    script = 'echo "$CUDA_VISIBLE_DEVICES $RANK $1" > "$2"; exit 3'
    lead.order("bash", "-c", script, "x", "{node_rank}", str(out), environment={"RANK": "{rank}"}, gpus=[1, 2])
    assert lead.hear("exited")["code"] == 3
    assert lead.agent.wait(WAIT_S) == 3
    assert out.read_text() == "5,6 1 1\n"


def test_a_process_that_can_be_replaced_is_started_again_and_leaves_nothing(lead: Lead, tmp_path: Path) -> None:
    """Killed twice, it comes back each time, with nothing left of the one before; told to end, it ends."""
    lead.hear("hello")
    marker = tmp_path / "pids"
    lead.order(*sleeper(marker), replaced=[1])
    for _ in range(2):
        members = pids(lead, marker)
        marker.unlink()
        os.kill(members[0], signal.SIGKILL)
        assert lead.hear("replaced")["code"] == -signal.SIGKILL
        assert gone(members)
    members = pids(lead, marker)
    lead.hub.publish(f"end/{LABEL}", start_number=1, grace_s=1.0)
    assert lead.agent.wait(WAIT_S) == 0
    assert gone(members)


@pytest.mark.parametrize(("code", "starts"), [(7, 4), (0, 1), (2, 1)], ids=["crashes", "done", "misused"])
def test_one_that_always_fails_is_given_up(lead: Lead, tmp_path: Path, code: int, starts: int) -> None:
    lead.hear("hello")
    out = tmp_path / "out"
    lead.order("bash", "-c", f"echo start >> {out}; exit {code}", replaced=[1])
    assert lead.hear("exited")["code"] == code
    assert out.read_text().count("start") == starts


def test_told_to_end_it_leaves_nothing(lead: Lead, tmp_path: Path) -> None:
    lead.hear("hello")
    lead.order(*sleeper(tmp_path / "pids"))
    members = pids(lead, tmp_path / "pids")
    lead.hub.publish(f"end/{LABEL}", start_number=1, grace_s=1.0)
    assert lead.agent.wait(WAIT_S) == 0
    assert gone(members)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_slurms_signals_are_warnings_to_all_of_a_step(lead: Lead, tmp_path: Path, number: signal.Signals) -> None:
    lead.hear("hello")
    lead.order(*sleeper(tmp_path / "pids"))
    members = pids(lead, tmp_path / "pids")
    for pid in [*members, lead.agent.pid]:
        os.kill(pid, number)
    assert lead.hear("warned")["signal"] == number
    lead.hear("beat")
    assert lead.agent.poll() is None and not gone(members)


@pytest.mark.parametrize("lead", [2.5], indirect=True)
def test_without_a_supervisor_it_ends_its_role(lead: Lead, tmp_path: Path) -> None:
    lead.hear("hello")
    lead.order(*sleeper(tmp_path / "pids"))
    members = pids(lead, tmp_path / "pids")
    assert lead.agent.wait(WAIT_S) == EXIT_FENCED  # nobody pulses any more
    assert gone(members)


@pytest.mark.parametrize("lead", [8.0], indirect=True)
def test_a_newer_life_ends_it_though_the_old_supervisor_still_pulses(lead: Lead, tmp_path: Path) -> None:
    lead.hear("hello")
    lead.order(*sleeper(tmp_path / "pids"))
    members = pids(lead, tmp_path / "pids")
    claim_incarnation(lead.paths)
    assert lead.hear("exited")["code"] == EXIT_FENCED
    lead.agent.wait(WAIT_S)
    assert gone(members)


@pytest.mark.parametrize("lead", [8.0], indirect=True)
def test_adopted_by_the_next_life_it_goes_on_until_one_begins_after_that(lead: Lead, tmp_path: Path) -> None:
    lead.hear("hello")
    lead.order(*sleeper(tmp_path / "pids"))
    members = pids(lead, tmp_path / "pids")
    lead.hub.publish(f"adopt/{LABEL}", start_number=1, incarnation=2)
    assert lead.hear("adopted")["incarnation"] == 2
    assert claim_incarnation(lead.paths) == 2
    for _ in range(3):  # longer than it takes to look for a newer one
        lead.hear("beat")
    assert lead.agent.poll() is None and not gone(members)
    claim_incarnation(lead.paths)
    assert lead.hear("exited")["code"] == EXIT_FENCED


def test_an_order_for_a_newer_start_of_the_step_ends_it(lead: Lead) -> None:
    lead.hear("hello")
    lead.hub.publish(f"launch/{LABEL}", **vars(LaunchOrder(2, ["n2"], [["true"]])))
    assert lead.agent.wait(WAIT_S) == EXIT_FENCED


def test_servers_of_one_node_are_given_different_ports(tmp_path: Path) -> None:
    leads = [
        Lead(tmp_path / label, 20.0, label, job="4711") for label in ("inference[0]", "inference[1]", "teacher[0]")
    ]
    try:
        offered = [port for lead in leads for port in lead.hear("hello")["ports"]]
        assert len(offered) == len(set(offered)) == 6, "of the same job, by agents that know nothing of one another"
    finally:
        for lead in leads:
            lead.close()


def test_an_agent_says_what_its_node_lacks(tmp_path: Path) -> None:
    lead = Lead(tmp_path, 20.0, LABEL, Network(serving="ib7"))
    try:
        exited = lead.hear("exited")
        assert exited["code"] == 2
        assert "network.serving: ib7: node" in exited["problem"]
    finally:
        lead.close()


def test_an_interpreter_that_a_node_does_not_have_is_named(lead: Lead) -> None:
    """That of servers with an environment of their own."""
    lead.hear("hello")
    lead.hub.publish(f"launch/{LABEL}", **vars(LaunchOrder(1, ["n1"], [["/opt/engines/bin/python", "-P"]])))
    exited = lead.hear("exited")
    assert exited["code"] == 2 and exited["problem"].endswith(
        f"cannot start {LABEL}: /opt/engines/bin/python is not here"
    )
