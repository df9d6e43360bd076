"""Preflight on real processes that stand for nodes: each bad node is named, and hides behind no other's failure."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config.sections.slurm import PreflightConfig
from prime_hpc.runtime.gpus import driver_version
from prime_hpc.supervisor.preflight import allreduce as preflight_allreduce
from prime_hpc.supervisor.preflight import facts
from prime_hpc.supervisor.preflight.launcher import module_arguments
from prime_hpc.supervisor.preflight.phase import Checkup
from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan, Report, summary
from prime_hpc.supervisor.preflight.run import run_preflight

LAUNCH = """
import json, os, signal, subprocess, sys

def end(*_):  # as srun does
    for process in running:
        process.kill()
    os._exit(1)

commands, running = json.loads(sys.argv[1]), []
signal.signal(signal.SIGTERM, end)
running += [subprocess.Popen(c, env={**os.environ, "SLURMD_NODENAME": host}) for host, c in commands.items()]
sys.exit(max([process.wait() for process in running], default=0))
"""
SKEWED = """
import sys, time
real, ahead = time.time, float(sys.argv[1])
time.time = lambda: real() + ahead
from prime_hpc.supervisor.preflight.node import main
sys.exit(main(sys.argv[2:]))
"""

FULL = """
import errno, sys
from prime_hpc.store.io import disk, files
from prime_hpc.supervisor.preflight.node import main

def write(path, data, **options):
    with disk.disk_errors(path):
        raise OSError(errno.ENOSPC, "No space left on device")

files.write_atomic = write
sys.exit(main(sys.argv[1:]))
"""

LATE = """
import sys, time
from pathlib import Path
from prime_hpc.supervisor.preflight.node import main, RESULT

while len(list(Path(sys.argv[1]).parent.glob("[ab]" + RESULT))) < 2:
    time.sleep(0.05)
sys.exit(main(sys.argv[1:]))
"""


class Nodes:
    """Stands for srun: the command once a host, as plain processes; `odd` changes a host's command."""

    def __init__(self, odd: dict[str, Callable[[list[str]], list[str]]] | None = None, piped: bool = True) -> None:
        self.odd = odd or {}
        self.piped = piped
        self.calls: list[list[str]] = []

    def __call__(self, argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
        self.calls.append(hosts)
        commands = {host: self.odd.get(host, list)(argv) for host in hosts}
        out = subprocess.PIPE if self.piped else subprocess.DEVNULL
        words = [sys.executable, "-c", LAUNCH, json.dumps(commands)]
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT if self.piped else out)


def make_plan(folder: Path, hosts: Sequence[HostCheck | str], **config: Any) -> PreflightPlan:
    checks = [HostCheck(host) if isinstance(host, str) else host for host in hosts]
    settings = PreflightConfig(**{"timeout_s": 40, "min_free_gib": 0, **config})
    return PreflightPlan(folder, 1, checks, settings, [], folder / "logs")


def by_host(report: Report) -> dict[str, list[str]]:
    return {verdict.host: verdict.problems for verdict in report.verdicts}


# ---- with real processes


def test_good_nodes_pass_and_the_report_is_kept(tmp_path: Path) -> None:
    nodes = Nodes()
    report = run_preflight(make_plan(tmp_path, [HostCheck("a"), HostCheck("b", 1), HostCheck("c", 1)]), nodes)
    assert report.ok, report.lines()
    assert nodes.calls == [["a"], ["b", "c"]]
    kept = json.loads(report.path.read_text())
    assert report.path == tmp_path / "logs" / "preflight" / "report.json"
    assert kept["ok"] and [v["host"] for v in kept["verdicts"]] == ["a", "b", "c"]
    facts = kept["verdicts"][1]["facts"]
    assert facts["free_gib"] > 0 and facts["memory"]["total"] > 0 and facts["component"] == 1
    low, high = facts["clock_bounds_s"]
    assert low <= 0 <= high, "the clock is the supervisor's own"
    assert "all good" in summary(kept)[0]


def test_without_a_pipe_the_files_are_enough(tmp_path: Path) -> None:
    report = run_preflight(make_plan(tmp_path, ["a", "b"]), Nodes(piped=False))
    assert report.ok, report.lines()


def test_every_bad_node_is_named_with_its_own_reason(tmp_path: Path) -> None:
    """None hides behind another: too few GPUs, a taken port, a wrong clock, no shared directory, never started."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        private = tmp_path / "private"
        odd: dict[str, Callable[[list[str]], list[str]]] = {
            "skewed": lambda argv: [sys.executable, "-c", SKEWED, "100", *module_arguments(argv)[1:]],
            "blind": lambda argv: [*argv[: argv.index("-m") + 2], str(private / "spec.json"), "0.5"],
            "dead": lambda argv: [sys.executable, "-c", "print('slurmstepd: error: dead: cannot start')"],
        }
        hosts: list[HostCheck | str] = [
            *("good", "skewed", "blind", "dead"),
            HostCheck("poor", gpus_asked=8),
            HostCheck("busy", ports=(port,)),
        ]
        report = run_preflight(make_plan(tmp_path, hosts), Nodes(odd))
    problems = by_host(report)
    assert not report.ok and problems["good"] == []
    assert "sees 0 of the 8 GPUs" in problems["poor"][0]
    assert f"port {port} is taken" in problems["busy"][0]
    assert "ahead of the supervisor's" in problems["skewed"][0] and len(problems["skewed"]) == 1
    assert "does not see" in problems["blind"][0] and "spec.json" in problems["blind"][0]
    assert "gave no answer" in problems["dead"][0] and "dead: cannot start" in problems["dead"][0]
    assert set(report.bad) == {"skewed", "blind", "dead", "poor", "busy"}
    assert len([line for line in report.lines() if line.startswith("  ")]) >= 5


def test_a_step_that_fails_as_a_whole_is_tried_again_node_by_node(tmp_path: Path) -> None:
    """srun refuses a step when one of its nodes is down: the others must get their turn."""

    class Refusing(Nodes):
        def __call__(self, argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
            if "down" in hosts:
                self.calls.append(hosts)
                code = "import sys; sys.exit('srun: error: Required node not available (down)')"
                return subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=subprocess.STDOUT)
            return super().__call__(argv, hosts, component)

    nodes = Refusing()
    report = run_preflight(make_plan(tmp_path, ["a", "down", "b"]), nodes)
    problems = by_host(report)
    assert problems["a"] == problems["b"] == []
    assert "Required node not available" in problems["down"][0]
    assert nodes.calls[0] == ["a", "down", "b"] and sorted(nodes.calls[1:]) == [["a"], ["b"], ["down"]]


def hurry(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Have the deadline come as soon as this node has answered."""
    ahead, take = [0.0], facts.FactsRound._take

    def take_and_hurry(self: Any, node: Any, result: dict[str, Any]) -> None:
        take(self, node, result)
        ahead[0] += 1000.0 * (node.check.host == host)

    monkeypatch.setattr(facts.FactsRound, "_take", take_and_hurry)
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(facts, "time", clock)


def test_a_node_that_hangs_is_named_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, "a")
    odd = {"stuck": lambda argv: [sys.executable, "-c", "import time; time.sleep(600)"]}
    began = time.monotonic()
    report = run_preflight(make_plan(tmp_path, ["a", "stuck"], timeout_s=100, max_visibility_s=1), Nodes(odd))
    assert by_host(report)["a"] == []
    assert re.search(r"gave no answer within \d+ s \(never heard of\)", by_host(report)["stuck"][0])
    assert time.monotonic() - began < 100, "its process was ended"


def test_a_directory_of_the_same_name_that_is_not_shared(tmp_path: Path) -> None:
    """The node has the specification, but writes where nobody else looks."""
    private = tmp_path / "private"
    private.mkdir()

    def elsewhere(argv: list[str]) -> list[str]:
        code = (
            "import shutil, sys; from prime_hpc.supervisor.preflight.node import main; "
            "shutil.copy(sys.argv[1], sys.argv[2]); sys.exit(main([sys.argv[2], sys.argv[3]]))"
        )
        _, spec, wait_s = module_arguments(argv)
        return [sys.executable, "-c", code, spec, str(private / "spec.json"), wait_s]

    report = run_preflight(
        make_plan(tmp_path, ["a", "b", "alone"], timeout_s=12, max_visibility_s=3), Nodes({"alone": elsewhere})
    )
    problems = by_host(report)
    assert problems["a"] == problems["b"] == [], problems
    assert "its file was not seen by the supervisor" in problems["alone"][0]


def test_a_node_that_starts_when_the_others_have_looked_already_is_not_at_fault(tmp_path: Path) -> None:
    def late(argv: list[str]) -> list[str]:
        return [sys.executable, "-c", LATE, *module_arguments(argv)[1:]]

    report = run_preflight(
        make_plan(tmp_path, ["a", "b", "late"], timeout_s=40, max_visibility_s=1), Nodes({"late": late})
    )
    assert report.ok, report.lines()


def test_stop_ends_the_checks(tmp_path: Path) -> None:
    odd = {"stuck": lambda argv: [sys.executable, "-c", "import time; time.sleep(600)"]}
    report = run_preflight(make_plan(tmp_path, ["stuck"]), Nodes(odd), stop=lambda: True)
    assert report.problems == ["preflight was interrupted"] and not report.ok


def test_a_launcher_that_is_missing(tmp_path: Path) -> None:
    def no_launcher(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
        return subprocess.Popen(["/nonexistent/srun"])

    report = run_preflight(make_plan(tmp_path, ["a"]), no_launcher)
    assert "could not be launched" in by_host(report)["a"][0]


def test_a_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file is in the way")
    report = run_preflight(make_plan(tmp_path, ["a"]), Nodes())
    assert not report.ok and "preflight could not be run" in report.problems[0]


def test_too_little_space(tmp_path: Path) -> None:
    report = run_preflight(make_plan(tmp_path, ["a", "b"], min_free_gib=1e9), Nodes())
    assert "GiB are needed (slurm.preflight.min_free_gib)" in by_host(report)["a"][0]
    checkup = Checkup.__new__(Checkup)
    assert not report.ok and checkup.nodes_at_fault(report) == {}, "every node sees the same directory"
    report.verdicts[1].problems.append("port 8000 is taken on it")
    assert set(checkup.nodes_at_fault(report)) == {"b"}


def test_a_node_that_writes_nothing_for_want_of_room_is_not_at_fault(tmp_path: Path) -> None:
    odd = {"b": lambda argv: [sys.executable, "-c", FULL, *module_arguments(argv)[1:]]}
    report = run_preflight(make_plan(tmp_path, ["a", "b"]), Nodes(odd))
    assert "disk full" in by_host(report)["b"][0]
    assert Checkup.__new__(Checkup).nodes_at_fault(report) == {}


def test_old_files_of_another_attempt_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path, ["a", "b"], timeout_s=100, max_visibility_s=1)
    assert run_preflight(plan, Nodes()).ok
    hurry(monkeypatch, "a")
    odd = {"b": lambda argv: [sys.executable, "-c", "import time; time.sleep(600)"]}
    report = run_preflight(plan, Nodes(odd))
    assert by_host(report)["a"] == [] and "gave no answer" in by_host(report)["b"][0]


# ---- the all-reduce: processes that join through a real store


SPOILED = """
import os, sys, time
from prime_hpc.supervisor.preflight import allreduce_node as allreduce
allreduce.try_device = eval(sys.argv[1])
allreduce.main(sys.argv[2:])
"""


def spoiled(device: str) -> dict[str, Callable[[list[str]], list[str]]]:
    """Host `b` tries its device in this way instead."""

    def change(argv: list[str]) -> list[str]:
        module, *words = module_arguments(argv)
        return [sys.executable, "-c", SPOILED, device, *words] if module.endswith("allreduce_node") else argv

    return {"b": change}


def trainer_plan(folder: Path, timeout_s: float) -> PreflightPlan:
    plan = make_plan(folder, ["a", "b", "c"], timeout_s=timeout_s, allreduce_timeout_s=timeout_s)
    return replace(plan, trainer_hosts=["a", "b", "c"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_allreduce_is_measured_on_every_trainer_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    report = run_preflight(trainer_plan(tmp_path, 200), Nodes())
    assert list((tmp_path / "tmp").glob("preflight-*")) == [], "nothing stays on the nodes"
    assert report.ok, report.lines()
    for verdict, after in zip(report.verdicts, "bca", strict=True):
        found = verdict.facts["allreduce"]
        assert found["backend"] in ("gloo", "nccl") and found["reached"] == "done"
        assert found["to_next"]["host"] == after and found["to_next"]["gb_per_s"] > 0
        assert found["gb_per_s"] > 0 and found["latency_us"] > 0
    assert "all-reduce" in report.lines()[-1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_node_that_hangs_in_the_allreduce_is_named(tmp_path: Path) -> None:
    report = run_preflight(trainer_plan(tmp_path, 40), Nodes(spoiled("lambda gpus: time.sleep(600)")))
    assert set(report.bad) == {"b"}, report.lines()
    assert "imported torch and came no further" in report.bad["b"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_node_that_dies_in_the_allreduce_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_allreduce, "SILENT_S", 5.0)
    monkeypatch.setattr(preflight_allreduce, "GIVE_UP_S", 10.0)
    began = time.monotonic()
    report = run_preflight(trainer_plan(tmp_path, 200), Nodes(spoiled("lambda gpus: os._exit(1)")))
    assert set(report.bad) == {"b"}, report.lines()
    assert "gave no more sign of life" in report.bad["b"]
    assert time.monotonic() - began < 150, "nobody waited for the deadline"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_gpu_that_computes_wrong_is_named_with_its_words(tmp_path: Path) -> None:
    wrong = "lambda gpus: (_ for _ in ()).throw(RuntimeError('its GPU computes a wrong matrix product'))"
    report = run_preflight(trainer_plan(tmp_path, 60), Nodes(spoiled(wrong)))
    assert set(report.bad) == {"b"}, report.lines()
    assert "wrong matrix product" in report.bad["b"]


@pytest.mark.slow
def test_gpus_that_were_planned_are_asked_for_on_one_node_too(tmp_path: Path) -> None:
    if driver_version() is not None:
        pytest.skip("this machine has an NVIDIA driver")
    plan = replace(make_plan(tmp_path, [HostCheck("a", gpus_asked=0, on_gpus=True)]), trainer_hosts=["a"])
    report = run_preflight(plan, Nodes())
    assert not report.ok and "no NVIDIA driver" in report.bad["a"], "the node itself says so, without torch"
    plan = replace(make_plan(tmp_path, ["a"], allreduce=True), trainer_hosts=["a"])
    report = run_preflight(plan, Nodes())
    assert report.ok and report.verdicts[0].facts["allreduce"]["backend"] == "gloo"
