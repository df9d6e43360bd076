"""Preflight's rules: what it concludes from times, names and the driver's words. Its processes: tests/integration."""

import errno
import json
import math
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.cli.verbs.cluster import preflight as verb
from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import PreflightConfig, SiteConfig
from prime_hpc.runtime.gpus import stated_devices
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.store.messaging import network
from prime_hpc.supervisor.preflight import allreduce as preflight_allreduce
from prime_hpc.supervisor.preflight import allreduce_node
from prime_hpc.supervisor.preflight import node as preflight_node
from prime_hpc.supervisor.preflight import rules as preflight_rules
from prime_hpc.supervisor.preflight.allreduce import NodeFindings, _judge_network
from prime_hpc.supervisor.preflight.allreduce_node import fastest_port, measure
from prime_hpc.supervisor.preflight.gpu import gpu_facts, xid_lines
from prime_hpc.supervisor.preflight.launcher import parse_line
from prime_hpc.supervisor.preflight.phase import Checkup
from prime_hpc.supervisor.preflight.plan import HostCheck, PreflightPlan, Report
from prime_hpc.supervisor.preflight.rules import SUPERVISOR, Sighting, clock_bounds, judge_unseen, lateness
from prime_hpc.supervisor.preflight.run import run_preflight
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs
from prime_hpc.supervisor.roles.slurm_step import StepContext

# ---- the node's own names and lines


def test_a_node_finds_itself_in_the_plan() -> None:
    full = socket.gethostname()
    assert preflight_node.pick_host(["n1", "n2"], {"SLURMD_NODENAME": "n2"}) == "n2"
    assert preflight_node.pick_host(["x", full], {}) == full
    assert preflight_node.pick_host([f"{full.split('.')[0]}.cluster.example"], {}) is not None
    assert preflight_node.pick_host(["x"], {}) is None


def test_a_node_whose_own_folders_are_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt would fail on it again; where they lie with the run directory, no node is to blame."""
    full, shm, local = (tmp_path / name for name in ("full", "shm", "local"))
    free, roomy = {"full": 0.0, "shm": 0.5, "local": 9.0}, preflight_node.tempfile.TemporaryFile
    for folder in (full, shm, local):
        folder.mkdir()

    def temporary(dir: str) -> Any:
        if dir == str(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return roomy(dir=dir)

    monkeypatch.setattr(preflight_node.tempfile, "TemporaryFile", temporary)
    monkeypatch.setattr(preflight_node, "_free_gib", lambda folder: free.get(Path(folder).name))
    monkeypatch.setattr(preflight_node, "narrow_limits", lambda **asked: [])
    environ = {"TMPDIR": str(full), "PRIMEHPC_NODE_LOCAL": str(local)}
    problems, shared, warnings = preflight_node.local_room(Path("/proc"), False, environ, str(shm))
    assert len(problems) == 1 and f"its {full} takes no files (No space left on device, 0.00 GiB free)" in problems[0]
    assert not shared and warnings == [f"its {shm} has 0.50 GiB free: roles may fail on it"]
    problems, shared, _ = preflight_node.local_room(tmp_path, False, environ, str(shm))
    assert not problems and len(shared) == 1
    assert preflight_node.local_room(tmp_path, False, {}, "/not/there")[0] == [], "it is no fault"
    assert not [*shm.iterdir(), *local.iterdir()]


def test_messages_are_found_behind_a_launchers_label() -> None:
    message = parse_line('3: PREFLIGHT {"host": "n1", "phase": "started", "at": 1.0}', 2.0)
    assert message is not None and message.data["host"] == "n1" and message.arrived == 2.0
    assert parse_line("srun: error: n1: task 0: Killed", 2.0) is None
    assert parse_line('PREFLIGHT {"host": "n1", "pha', 2.0) is None
    assert parse_line("PREFLIGHT [1]", 2.0) is None


def test_preflight_checks_each_node_for_what_its_roles_need() -> None:
    site = SiteConfig.model_validate({"name": "test", "partitions": {"h100": {"gpus_per_node": 8}}})
    servers: dict[str, Any] = {"num_replicas": 3, "data_parallel_size": 2, "tensor_parallel_size": 2}
    ported = {**servers, "server": {"port": 9000}}
    seen: dict[tuple[str, bool], tuple[Any, ...]] = {}
    for inference in (servers, ported):
        values = {"inference": inference, "trainer": {"num_ranks": 8}, "slurm": {"partition": "h100"}}
        tree = Experiment.model_validate({"name": "x", "orchestrator": {"env": [{"id": "reverse-text"}]}, **values})
        placement = place_slurm(tree, site)
        nodes = tuple(f"n{i}" for i in range(placement.components[0].num_nodes))
        job = Allocation("7", ((*nodes, "spare"),), "n0", 0)
        specs = slurm_specs(tree, site, placement, job, Path("/shared/runs/x"))
        context = StepContext(job, Path("/shared/runs/x"), no_kill=True)
        for check in Checkup(tree, context, specs, Path("/shared/runs/x/logs"))._hosts():
            wanted = (check.gpus_asked, check.on_gpus, sorted(check.roles), check.ports)
            seen[check.host, "server" in inference] = wanted
    assert seen["n0", True] == (8, True, ["orchestrator", "trainer"], ())
    assert seen["n1", True] == (8, True, ["inference[0]", "inference[1]"], (9000, 9001))
    assert seen["n2", True] == (4, True, ["inference[2]"], (9000,))
    assert seen["spare", True] == (0, False, [], ())
    assert {ports for (_, has_port), (*_, ports) in seen.items() if not has_port} == {()}, "those that are not stated"


# ---- rules


@pytest.mark.parametrize("count", [1, 2, 16, 17, 100, 1000])
def test_peers_are_symmetric_few_and_reach_everybody(count: int) -> None:
    peers = [preflight_rules.peers_of(i, count) for i in range(count)]
    assert all(i not in peers[i] and i in peers[j] for i in range(count) for j in peers[i])
    assert max(map(len, peers)) <= max(15, 2 * math.ceil(math.log2(count)))
    reached, frontier = {0}, [0]
    while frontier:
        frontier = [j for i in frontier for j in peers[i] if j not in reached]
        reached.update(frontier)
    assert len(reached) == count


def test_clock_bounds_hold_the_truth_however_late_files_are() -> None:
    true = {"a": 0.0, "b": 40.0, "c": -7.0}
    delay = {("", "b"): 5.0, ("b", ""): 30.0, ("a", "c"): 2.0, ("c", "a"): 0.5, ("", "a"): 0.1, ("a", ""): 0.0}
    offset = {**true, SUPERVISOR: 0.0}
    sightings = [Sighting(w, r, 100 + offset[w], 100 + d + offset[r]) for (w, r), d in delay.items()]
    bounds = clock_bounds(sightings, true)
    for host, (low, high) in bounds.items():
        assert low <= true[host] <= high
    assert bounds["c"][1] - bounds["c"][0] == pytest.approx(2.6), "through a, though the supervisor never met c"
    assert preflight_rules.clock_problem(bounds["b"], 12.0) is None, "as late as that, it may still be right"
    assert preflight_rules.clock_problem(bounds["c"], 5.0) is None
    assert preflight_rules.clock_problem(bounds["c"], 4.0) is not None


def test_lateness_is_not_taken_for_a_wrong_clock_nor_the_other_way_round() -> None:
    bounds = {"a": (-0.01, 0.01), "b": (59.99, 60.01)}
    late = Sighting("a", "b", wrote=100.0, seen=100.0 + 60.0 + 8.0, looking=160.0)
    assert lateness(late, bounds) == pytest.approx((7.98, 8.0))
    before = Sighting("a", "b", wrote=100.0, seen=165.1, looking=165.0)
    assert lateness(before, bounds)[1] == pytest.approx(0.1), "it was there before b began to look"


def test_blame_goes_to_the_side_that_fails_with_several() -> None:
    watchers = {w: [r for r in "abc" if r != w] + [SUPERVISOR] for w in "abc"}
    hidden = judge_unseen({"a": ["c"], "b": ["c"], SUPERVISOR: ["c"]}, watchers)
    assert set(hidden) == {"c"}
    stale = judge_unseen({"a": ["b", "c"], "b": [], "c": [], SUPERVISOR: []}, watchers)
    assert set(stale) == {"a"} and "stale" in stale["a"][0]
    assert judge_unseen({"a": [], SUPERVISOR: []}, watchers) == {}


def test_gpus_are_compared_with_what_was_asked_or_with_the_fellows() -> None:
    component = {"a": 0, "b": 0, "c": 0, "x": 1}
    unknown = dict.fromkeys(component)
    found = preflight_rules.few_gpus({"a": 8, "b": 8, "c": 7, "x": 0}, unknown, component)
    assert set(found) == {"c"}
    asked = preflight_rules.few_gpus({"a": 8, "b": 4, "c": 8, "x": 0}, {"a": 8, "b": 8, "c": 4, "x": 0}, component)
    assert set(asked) == {"b"}


# ---- a launcher that starts nothing

BUSY = "srun: Job 12 step creation temporarily disabled, retrying (Requested nodes are busy)"


def refused(tmp_path: Path, hosts: Sequence[str], words: str) -> Report:
    """The report where srun says this, and ends or (as of a step that has to wait) does not."""
    settings = PreflightConfig(timeout_s=5)
    plan = PreflightPlan(tmp_path, 1, [HostCheck(host) for host in hosts], settings, list(hosts), tmp_path / "logs")

    def run_step(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[Any]":
        command = [
            "sh",
            "-c",
            'echo "$0"; test "$1" = ends || exec sleep 60',
            words,
            "waits" if words == BUSY else "ends",
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return run_preflight(plan, run_step)


@pytest.mark.parametrize(
    "words",
    ["srun: unrecognized option '--mpi-type=none'", "srun: error: Couldn't find the specified plugin name", BUSY],
)
def test_where_no_node_is_reached_none_is_blamed(tmp_path: Path, words: str) -> None:
    report = refused(tmp_path, ["n1", "n2", "n3"], words)
    assert not report.ok and report.bad == {}
    (problem,) = report.problems
    assert "none of 3 nodes began" in problem and words in problem


def test_a_step_that_has_to_wait_is_no_fault_of_a_single_node(tmp_path: Path) -> None:
    report = refused(tmp_path, ["n1"], BUSY)
    checkup = Checkup.__new__(Checkup)
    assert not report.ok and checkup.nodes_at_fault(report) == {}
    silent = refused(tmp_path / "silent", ["n1"], "srun: error: n1: task 0: Killed")
    assert set(checkup.nodes_at_fault(silent)) == {"n1"}


@pytest.mark.parametrize(
    ("because", "blamed"), [("", set()), ("DUE to SIGNAL Terminated ", set()), ("DUE TO NODE FAILURE, SEE ", {"n1"})]
)
def test_a_step_that_slurm_has_ended_is_no_fault_of_its_node(tmp_path: Path, because: str, blamed: set[str]) -> None:
    """Where a preemption's grace time begins, all steps get SIGTERM: the node was kept from every run for a week."""
    words = f"slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T11:23:37 {because}***"
    report = refused(tmp_path, ["n1"], words)
    assert not report.ok and set(Checkup.__new__(Checkup).nodes_at_fault(report)) == blamed


# ---- GPUs, with recorded words of nvidia-smi


def smi(table: str, code: int = 0, remapped: str = "", dmesg: str = "") -> Callable[..., tuple[int, str]]:
    def run(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        if argv[0] == "dmesg":
            return 0, dmesg
        return (0, remapped) if "remapped" in argv[1] else (code, table)

    return run


ROW = "{0}, GPU-{0}aaa, NVIDIA H100 80GB HBM3, 81559, {1}, {2}, 31\n"


def test_gpus_by_slurm_and_driver() -> None:
    table = "".join(ROW.format(i, 4, 0) for i in range(8))
    facts = gpu_facts(4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, smi(table))
    assert facts.count == 4 and [row["index"] for row in facts.listed] == ["4", "5", "6", "7"]
    assert facts.problems == facts.warnings == []
    assert gpu_facts(8, {}, smi(table)).count == 8


def test_sick_gpus_are_named() -> None:
    table = ROW.format(0, 4, 3) + ROW.format(1, 40000, "[N/A]")
    remapped = "GPU-0aaa, No, Yes\nGPU-1aaa, Yes, No\n"
    facts = gpu_facts(None, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, smi(table, remapped=remapped))
    assert any("GPU 0" in p and "3 uncorrected ECC" in p for p in facts.problems)
    assert any("GPU 2" in p and "not listed" in p for p in facts.problems)
    assert any("GPU 0" in p and "replaced" in p for p in facts.problems)
    assert any("GPU 1" in w and "in use" in w for w in facts.warnings)
    assert any("GPU 1" in w and "reset" in w for w in facts.warnings)


def test_memory_that_others_hold_is_a_problem_with_their_process_ids() -> None:
    table = ROW.format(0, 4, 0) + ROW.format(1, 40000, 0)
    apps = "GPU-1aaa, 4711, 39000\nGPU-0aaa, 1, 2\n"

    def run(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return (0, apps) if "compute-apps" in " ".join(argv) else smi(table)(argv, timeout_s)

    facts = gpu_facts(2, {"CUDA_VISIBLE_DEVICES": "0,1"}, run)
    assert [p for p in facts.problems if "40000 of 81559 MiB in use by process 4711 (39000 MiB)" in p]
    assert gpu_facts(2, {}, run, used_share=0.5).problems == []
    assert gpu_facts(0, {}, run).problems == [] and gpu_facts(None, {}, run).warnings


def test_a_driver_in_trouble_matters_where_gpus_were_asked_for() -> None:
    lost = smi("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.", code=15)
    assert "GPU is lost" in gpu_facts(8, {}, lost).problems[0]
    assert gpu_facts(0, {}, lost).problems == []

    def hangs(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        raise subprocess.TimeoutExpired(list(argv), timeout_s)

    assert "driver hangs" in gpu_facts(8, {}, hangs).problems[0]


def test_hidden_gpus() -> None:
    assert stated_devices({}) is None
    assert stated_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert stated_devices({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == []
    assert stated_devices({"CUDA_VISIBLE_DEVICES": "0,-1,2"}) == ["0"]


def test_recent_hardware_xids_only() -> None:
    log = (
        "[  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "[ 9000.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid=2, an application's fault\n"
        "[ 9001.000000] NVRM: Xid (PCI:0000:af:00): 63, pid=3, row remapping\n"
    )
    assert xid_lines(smi("", dmesg=log), uptime_s=9100.0) == [
        "the kernel logged Xid 63 of PCI:0000:af:00 1 times in the last hour"
    ]


# ---- the judge of the all-reduce


def judged(nodes: dict[str, dict[str, Any]], silent: Sequence[str] = ()) -> preflight_allreduce.AllreduceOutcome:
    states = {host: preflight_allreduce._Node(**state) for host, state in nodes.items()}
    return preflight_allreduce.judge(states, {}, list(silent), False)


def named(outcome: preflight_allreduce.AllreduceOutcome) -> set[str]:
    return {host for host, found in outcome.nodes.items() if found.problems}


def test_who_holds_up_an_allreduce() -> None:
    far, near = {"phase": "joined"}, {"phase": "imported torch"}
    assert named(judged({"a": far, "b": near, "c": far})) == {"b"}
    assert named(judged({"a": far, "b": far, "c": far}, silent=["c"])) == {"c"}
    assert named(judged({"a": far, "b": {}, "c": far})) == {"b"}
    nobody = judged({"a": far, "b": far, "c": far})
    assert named(nobody) == set() and "no single node stands out" in nobody.problems[0]


def test_a_fault_names_its_node_and_the_others_only_follow() -> None:
    failed = {"phase": "joined", "result": {"problem": "connection closed by peer"}}
    no_cuda = {"phase": "joined", "result": {"problem": "torch sees no CUDA device", "blamed": "b"}}
    outcome = judged({"a": failed, "b": no_cuda, "c": failed})
    assert named(outcome) == {"b"} and "follows from b" in outcome.nodes["a"].warnings[0]
    unreachable = {"phase": "used its device", "result": {"problem": "it cannot reach port 1 of a", "blamed": "a"}}
    assert named(judged({"a": {"phase": "joined"}, "b": unreachable, "c": unreachable})) == {"a"}


def test_sockets_beside_infiniband_are_judged(tmp_path: Path) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "800 Gb/sec")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    assert fastest_port(tmp_path) == ("mlx5_0 port 1", 50.0)
    assert fastest_port(tmp_path / "none") is None
    base = {"ports": "mlx5_0 port 1", "fastest_port_gb_per_s": 50.0}

    def judged_as(transport: str, speed: float, hosts: str = "ab") -> NodeFindings:
        found = {h: NodeFindings({**base, "transport": transport, "gb_per_s": speed}) for h in hosts}
        _judge_network(found, 0.1)
        return found["a"]

    assert "TCP sockets (2.0 GB/s)" in judged_as("Socket", 2.0).problems[0]
    assert judged_as("Socket", 9.0).problems == [] and judged_as("Socket", 9.0).warnings
    for fine in (judged_as("IB", 2.0), judged_as("Socket", 2.0, hosts="a")):
        assert fine.problems == fine.warnings == []


def test_every_gpu_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allreduce_node.try_device(0) == 0
    monkeypatch.setattr(allreduce_node, "visible_gpus", lambda: [])
    assert allreduce_node.try_device(None) == 0
    monkeypatch.setattr(allreduce_node, "require_gpus", lambda device, process: 2)
    with pytest.raises(ValueError, match="torch sees 2 of the 4 GPUs"):
        allreduce_node.try_device(4)
    made: list[str] = []
    ones = torch.ones

    def on_cpu(*shape: int, device: str) -> torch.Tensor:
        made.append(device)
        return ones(*shape) * (2 if device == wrong else 1)

    monkeypatch.setattr(torch, "ones", on_cpu)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: x)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    wrong = ""
    assert allreduce_node.try_device(2) == 2 and made == ["cuda:0", "cuda:1"]
    wrong = "cuda:1"
    with pytest.raises(RuntimeError, match="its GPU 1 computes a wrong matrix product"):
        allreduce_node.try_device(2)


def test_nodes_whose_own_names_are_their_loopback_meet_on_the_way_to_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As their roles do: Debian has a machine's name at 127.0.1.1, and gloo led every node back to itself."""

    def say_interface(gpus: int | None) -> int:
        raise RuntimeError(os.environ.get(network.GLOO, "gloo's own choice"))

    for name in (network.GLOO, "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # of this process: as before once the test is over
    monkeypatch.delenv(network.GLOO)
    monkeypatch.setattr(network, "_is_hostname_loopback", lambda: True)
    monkeypatch.setattr(network, "route_to", lambda host: network.Place(f"towards {host}", "10.0.0.1"))
    monkeypatch.setattr(allreduce_node, "try_device", say_interface)
    progress = allreduce_node.Progress("n2", tmp_path, "token")
    with pytest.raises(RuntimeError, match="^towards n1$"):
        measure({"hosts": ["n1", "n2"], "gpus": [0, 0]}, tmp_path, 1, progress, 60.0, tmp_path / "nccl.log")


def test_a_slow_link_is_a_warning() -> None:
    def result(speed: float) -> dict[str, Any]:
        link = {"host": "next", "gb_per_s": speed}
        return {"phase": "done", "result": {"backend": "gloo", "gb_per_s": 1.0, "latency_us": 1.0, "to_next": link}}

    outcome = judged({"a": result(10.0), "b": result(9.0), "c": result(1.0)})
    assert named(outcome) == set() and outcome.nodes["c"].warnings and not outcome.nodes["a"].warnings


def test_a_gpu_that_its_neighbour_reaches_slowly_is_a_warning() -> None:
    def result(*speeds: float) -> dict[str, Any]:
        found = {"backend": "nccl", "gb_per_s": 1.0, "latency_us": 1.0, "gpu_links_gb_per_s": list(speeds)}
        return {"phase": "done", "result": found}

    outcome = judged({"a": result(150.0, 150.0, 20.0), "b": result(150.0, 148.0, 151.0)})
    assert named(outcome) == set() and not outcome.nodes["b"].warnings
    (said,) = outcome.nodes["a"].warnings
    assert "GPU 2 sends 20 GB/s to its GPU 0, other pairs carry 150" in said
    assert not judged({"a": result(150.0, 20.0)}).nodes["a"].warnings  # of two, nobody knows which is usual
    assert not judged({"a": result()}).nodes["a"].warnings


def test_each_gpu_s_link_to_the_next_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[str, str]] = []
    ones = torch.ones

    class Placed(torch.Tensor):
        where = ""  # type: ignore[assignment]

        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            moves.append((source.where, self.where))
            return self

    def placed(tensor: torch.Tensor, device: str) -> Placed:
        found = tensor.as_subclass(Placed)
        found.where = device
        return found

    monkeypatch.setattr(allreduce_node, "LINK_BYTES", {"nccl": 64})
    monkeypatch.setattr(torch, "ones", lambda size, device: placed(ones(size), device))
    monkeypatch.setattr(torch, "empty_like", lambda x, device: placed(ones(len(x)), device))
    waited: list[int] = []
    links = allreduce_node.try_gpu_links(3, waited.append)
    assert len(links) == 3 and min(links) >= 0
    assert list(dict.fromkeys(moves)) == [("cuda:0", "cuda:1"), ("cuda:1", "cuda:2"), ("cuda:2", "cuda:0")]
    assert waited[:4] == [0, 1, 0, 1]  # before a copy and after it
    assert allreduce_node.try_gpu_links(1, waited.append) == []


# ---- the verb


def test_a_runs_newest_report_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    for attempt, ok in ((1, True), (2, False)):
        folder = run_dir / "logs" / f"attempt_{attempt}" / "preflight"
        folder.mkdir(parents=True)
        verdict = {"host": "n1", "ok": ok, "problems": [] if ok else ["it sees 7 of 8"], "facts": {}}
        report = {"ok": ok, "seconds": 1.0, "time": attempt, "problems": [], "verdicts": [verdict]}
        (folder / "report.json").write_text(json.dumps(report))
    torn = run_dir / "logs" / "attempt_3" / "preflight"
    torn.mkdir(parents=True)
    (torn / "report.json").write_text('{"ok": tr')
    (run_dir / "run.yaml").write_text("kind: rl\n")
    assert verb.run([str(run_dir)], "prime-hpc preflight") == 1
    assert "n1: it sees 7 of 8" in capsys.readouterr().out


def test_a_run_without_a_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("kind: rl\n")
    with pytest.raises(ValueError, match="no preflight report"):
        verb.run([str(tmp_path)], "prime-hpc preflight")


def test_this_machine_alone_is_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    assert verb.run(["--dir", str(tmp_path), "--json"], "prime-hpc preflight") == 0
    said = json.loads(capsys.readouterr().out)
    assert [verdict["host"] for verdict in said["verdicts"]] == [socket.gethostname()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        *(["a", "b"], ["--x"], ["run", "--dir", "."], ["--timeout", "soon"], ["--dir", "/nonexistent"]),
        ["--allreduce", "--no-allreduce"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(ValueError):
        verb.run(words, "prime-hpc preflight")
