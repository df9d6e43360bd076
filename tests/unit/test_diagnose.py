"""Who is named from what is seen of a run: rows of its processes, made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.client.figures import parse_figures
from prime_hpc.runtime import activity
from prime_hpc.supervisor.stalls.collect import from_lines, report, shortened, text_of, to_lines
from prime_hpc.supervisor.stalls.diagnose import diagnose
from prime_hpc.supervisor.stalls.stacks import package_of, user_frame

NOW = 1000.0
TASKSET = "/home/me/envs/mine.py"
LIBRARY = "/venv/lib/python3.11/site-packages/verifiers/rubric.py"
SLEEP = "/usr/lib/python3.11/asyncio/tasks.py"
LOOP = ["/usr/lib/python3.11/selectors.py", 468, "EpollSelector.select"]


def row(role: str, index: int = 0, /, **facts: Any) -> dict[str, Any]:
    """A process as `look` sees it."""
    pid = facts.pop("pid", 100 + 10 * len(role) + index)
    word = {"role": role, "index": index, "phase": facts.pop("phase", "serving"), "awaits": facts.pop("awaits", "")}
    word |= {"since": NOW - facts.pop("seconds", 300.0), "pid": pid, **facts.pop("word", {})}
    answer = {"threads": {"MainThread": [LOOP]}, "tasks": [], "details": facts.pop("details", {})}
    answer |= {key: facts.pop(key) for key in ("tasks", "threads") if key in facts}
    known = {"host": "n1", "pid": pid, "parent": 1, "comm": "python", "state": "S", "cpu": 0.0, "waits": {}}
    return {**known, "word": word, "answer": answer, **facts}


def waiting_trainer(num_ranks: int = 2) -> list[dict[str, Any]]:
    return [
        row("trainer", r, phase="wait", awaits="rank 0" if r else "batch 5 from the orchestrator")
        for r in range(num_ranks)
    ]


def orchestrator(awaits: str = "rollouts", **facts: Any) -> dict[str, Any]:
    episodes = [{"env": "mine", "task": 4, "server": 0, "seconds": 312.0}]
    servers = [{"url": "http://n2:1/v1", "ready": True, "version": 3, "loads": False}]
    details = {"running": 4, "oldest": episodes, "servers": servers, "wanted": 3, **facts.pop("more", {})}
    given = {"phase": "collect batch 5", "awaits": awaits, "details": {"orchestrator": details}}
    return row("orchestrator", **(given | facts))


def server(**figures: Any) -> dict[str, Any]:
    figures = {"running": 0, "waiting": 0, "sampled_per_s": 0.0, **figures}
    return row("inference", word={"url": "http://n2:1/v1"}, details={"figures": figures}, host="n2")


def test_the_reward_function_is_named_with_its_line() -> None:
    stack = [[SLEEP, 649, "sleep"], [TASKSET, 29, "Task.reward_fn"], [LIBRARY, 9, "score"]]
    found = diagnose(
        [*waiting_trainer(), orchestrator(tasks=[{"name": "Task-9", "frames": stack}]), server()], {}, now=NOW
    )
    assert (found.kind, found.role, found.is_hang) == ("environment", "orchestrator", True)
    assert found.headline() == "environment 'mine', in reward_fn (envs/mine.py:29), for 312 s"
    assert [line.split(":")[0] for line in found.chain[:2]] == ["trainer rank 0", "orchestrator"]


def test_a_reward_that_blocks_a_worker_is_found_in_its_dump() -> None:
    dump = f'Thread 0x1 (most recent call first):\n  File "{TASKSET}", line 7 in reward_fn\n\n'
    dump += 'Current thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1 in wait\n'
    worker = row("environment", 7, word={"label": "mine[0]"}, answer=None, stacks=dump)
    found = diagnose([*waiting_trainer(), orchestrator(), server(), worker], {}, now=NOW)
    assert (found.kind, found.where) == ("environment", "reward_fn (envs/mine.py:7)")


@pytest.mark.parametrize("name", ["other task 3", "Task-9"])
def test_no_line_of_another_environment_is_named(name: str) -> None:
    """Of an environment in processes of its own, or beside this one in the orchestrator's."""
    other = [{"name": name, "frames": [["/home/me/envs/other.py", 42, "play"]]}]
    beside = row("environment", 3, word={"label": "other[0]"}, tasks=other)
    dump = f'Thread 0x1 (most recent call first):\n  File "{TASKSET}", line 7 in reward_fn\n\nThread 0x2\n'
    worker = row("environment", 7, word={"label": "mine[0]"}, answer=None, stacks=dump)
    found = diagnose([*waiting_trainer(), orchestrator(), server(), beside, worker], {}, now=NOW)
    assert found.where == "reward_fn (envs/mine.py:7)"
    assert not diagnose([*waiting_trainer(), orchestrator(), server(), beside], {}, now=NOW).where
    if " task " in name:
        assert not diagnose([*waiting_trainer(), orchestrator(tasks=other), server()], {}, now=NOW).where


def test_long_episodes_are_no_hang() -> None:
    found = diagnose([*waiting_trainer(), orchestrator(), server(running=4, sampled_per_s=80.0)], {}, now=NOW)
    assert (found.kind, found.is_hang) == ("works", False)


@pytest.mark.parametrize("figures", [{"running": 4}, {"error": "its own /metrics does not answer"}])
def test_an_engine_that_samples_nothing(figures: dict[str, Any]) -> None:
    found = diagnose([*waiting_trainer(), orchestrator(), server(**figures)], {}, now=NOW)
    assert (found.kind, found.role, found.host, found.is_hang) == ("engine", "inference", "n2", True)


SHM = ["/venv/lib/python3.11/site-packages/vllm/distributed/device_communicators/shm_broadcast.py", 9, "acquire_read"]
REDUCE = ["/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 7, "all_reduce"]
KERNEL = ["/venv/lib/python3.11/site-packages/vllm/model_executor/models/qwen3.py", 5, "forward"]
PLUGIN = ["/home/me/plugins/mine.py", 3, "execute_model"]


def part(
    name: str, number: int, frame: list[Any], call: str = "", seconds: float = 200.0, **facts: Any
) -> dict[str, Any]:
    """An engine core or worker of the server."""
    told = {"call": {"name": call, "since": NOW - seconds if call else 0.0, "begun": 0}}
    threads = {"threads": {"MainThread": [frame], **facts.pop("more_threads", {})}}
    word = {"part": name, "number": number}
    return row("inference", 0, host="n2", pid=500 + number + len(name), word=word, **(told | threads | facts))


def hung_engine(*parts: dict[str, Any], **figures: Any) -> Any:
    return diagnose([*waiting_trainer(), orchestrator(), server(**figures), *parts], {}, now=NOW)


def test_the_engine_core_that_does_not_come_back_from_a_step() -> None:
    found = hung_engine(part("engine core", 0, KERNEL, "step"), running=4)
    assert (found.kind, found.role, found.is_hang, found.seconds) == ("engine", "inference", True, 200.0)
    assert found.headline().startswith(
        "engine core 0 of inference server 0 on n2 does not come back from `step`, in forw"
    )
    assert found.evidence[0] == "inference server 0 on n2 has requests and samples nothing"
    without_figures = hung_engine(part("engine core", 0, KERNEL, "step"))  # of a CPU: vLLM computes none
    assert (without_figures.kind, without_figures.pid) == ("engine", found.pid)


def test_an_engine_that_steps_is_no_hang_and_holds_its_episodes() -> None:
    core = part("engine core", 0, KERNEL, "step", seconds=0.1) | {"call": {"name": "", "since": 0.0, "begun": 31}}
    found = hung_engine(core)
    assert (found.kind, found.is_hang) == ("works", False) and "31 steps" in found.culprit


def test_the_worker_for_which_the_others_wait() -> None:
    core = part("engine core", 0, SHM, "step")
    waiting, hung = part("worker", 0, REDUCE, "execute_model"), part("worker", 1, PLUGIN, "execute_model")
    found = hung_engine(core, waiting, hung)
    assert found.culprit == "worker 1 of inference server 0 on n2 does not come back from `execute_model`"
    assert found.where == "execute_model (plugins/mine.py:3)" and found.pid == hung["pid"]
    assert [line.partition(":")[0] for line in found.evidence] == [
        "engine core 0 on n2", "worker 0 on n2", "worker 1 on n2",
    ]  # fmt: skip
    dump = f'Current thread 0x2 (most recent call first):\n  File "{KERNEL[0]}", line 8 in forward\n'
    mute = part("worker", 0, REDUCE, "execute_model", answer=None, stacks=dump)
    found = hung_engine(core, mute, part("worker", 1, REDUCE, "execute_model"))
    assert (found.pid, found.where) == (mute["pid"], "forward (models/qwen3.py:8)")
    assert any("a call in C holds its interpreter" in line for line in found.evidence)


def test_a_worker_that_waits_in_a_collective_in_c_is_not_the_one() -> None:
    """On a CPU it holds the interpreter meanwhile, and does not answer."""
    dump = 'Current thread 0x2 (most recent call first):\n  File "/x/torch/_ops.py", line 1 in __call__\n'
    dump += f'  File "{SHM[0]}", line 8 in all_reduce\n  File "{KERNEL[0]}", line 8 in forward\n'
    waiting = part("worker", 0, REDUCE, "execute_model", answer=None, stacks=dump)
    hung = part("worker", 1, PLUGIN, "execute_model")
    found = hung_engine(part("engine core", 0, SHM, "step"), waiting, hung)
    assert (found.pid, found.where) == (hung["pid"], "execute_model (plugins/mine.py:3)")


def test_a_device_that_does_not_give_its_results() -> None:
    """With asynchronous scheduling the worker has given the order, and another thread waits for what comes of it."""
    copies = [["/venv/lib/python3.11/site-packages/vllm/v1/worker/gpu_model_runner.py", 2, "get_output"]]
    worker = part("worker", 0, SHM, more_threads={"WorkerAsyncOutputCopy": copies})
    found = hung_engine(part("engine core", 0, SHM, "step"), worker)
    assert (found.pid, found.where) == (worker["pid"], "get_output (worker/gpu_model_runner.py:2)")


def test_a_stopped_engine_core_is_named_with_its_call() -> None:
    stopped = part("engine core", 0, KERNEL, "step", seconds=40, state="T", answer=None)
    found = hung_engine(stopped)
    assert found.culprit.startswith("engine core 0 of inference server 0 on n2 is stopped")
    assert "before it was stopped it was at `serving`, in `step` for 40 s" in found.evidence


def test_a_zombie_is_said_once_unless_it_is_what_srun_leaves_behind(tmp_path: Path) -> None:
    names = ("python", "srun")
    dead = [row("", pid=500 + i, state="Z", comm=comm, parent=7) | {"word": {}} for i, comm in enumerate(names)]
    rows = [row("supervisor", pid=7), *waiting_trainer(1), orchestrator(), server(), *dead]
    document = report(tmp_path, [{"host": "n1", "rows": rows, "probe": {}, "gpus": []}], patience_s=60.0)
    said = [line for line in document["diagnosis"]["evidence"] if "zombie" in line]
    assert said == ["python of supervisor on n1 is a zombie (process 500, python)"]
    shown = [line for line in text_of(document).splitlines() if line.endswith(("python", "srun"))]
    assert [line.strip() for line in shown] == ["python of supervisor, n1, process 500: Z, 0% CPU, python"]


@pytest.mark.parametrize(("role", "text"), [("trainer", "trainer rank 1 on n1"), ("inference", "inference server 1")])
def test_a_stopped_process_outweighs_what_waits_for_it(role: str, text: str) -> None:
    stopped = row(role, 1, state="T", phase="optim", pid=77)
    rows = [*waiting_trainer(1), orchestrator(), server(), stopped]
    found = diagnose(rows, {}, now=NOW)
    assert found.headline().startswith(text) and found.kind == "stopped"
    assert "kill -CONT 77" in found.advice


def test_a_suspended_job() -> None:
    child = row("", pid=9, state="D") | {"word": {}, "waits": {"9": "__refrigerator"}}
    found = diagnose([*(one | {"state": "T"} for one in (*waiting_trainer(), orchestrator())), child], {}, now=NOW)
    assert found.culprit.startswith("every process of the run") and "scontrol resume" in found.advice


def test_an_engines_stopped_child_is_named_with_its_server() -> None:
    child = row("inference") | {"word": {}, "state": "T", "comm": "EngineCore", "pid": 9, "parent": server()["pid"]}
    found = diagnose([*waiting_trainer(), orchestrator(), server(), child | {"host": "n2"}], {}, now=NOW)
    assert found.culprit.startswith("EngineCore of inference server 0 on n2 is stopped (process 9)")


def test_a_file_system_that_hangs_and_a_process_that_the_kernel_holds() -> None:
    rows = [*waiting_trainer(), orchestrator(), server()]
    found = diagnose(rows, {"n1": {"seconds": 0.0}, "n2": {"hangs": 3.0}}, now=NOW)
    assert (found.kind, found.host, found.is_hang) == ("file system", "n2", True)
    held = [*rows, row("trainer", 5, waits={"77": "rpc_wait_bit_killable"}, state="D")]
    found = diagnose(held, {"n1": {"seconds": 0.0}}, now=NOW)
    assert (found.kind, found.index) == ("file system", 5) and "rpc_wait_bit_killable" in found.evidence[0]


def collectives(number: int) -> dict[str, Any]:
    return {"collectives": [{"group": "0", "number": number, "name": "all_gather", "sizes": [[4]], "is_over": False}]}


def test_the_rank_that_did_not_come() -> None:
    ranks = [row("trainer", r, phase="forward_backward", details=collectives(70)) for r in range(4)]
    ranks[2] = row("trainer", 2, phase="forward_backward", details=collectives(69))
    found = diagnose([*ranks, orchestrator("weights")], {}, now=NOW)
    assert (found.kind, found.index, found.is_hang) == ("rank", 2, True)
    assert any("rank 2" in line and "number 69" in line for line in found.evidence)


def test_a_rank_at_another_phase_and_one_that_alone_computes() -> None:
    ranks = [row("trainer", r, phase="checkpoint" if r == 1 else "optim") for r in range(3)]
    assert diagnose(ranks, {}, now=NOW).index == 1
    busy = [row("trainer", r, phase="optim", cpu=0.98 if r == 0 else 0.0) for r in range(2)]
    assert diagnose(busy, {}, now=NOW).index == 0


def test_weights_that_engines_load_or_the_trainer_has_not_made() -> None:
    servers = [{"url": "http://n2:1/v1", "ready": True, "version": 3, "loads": True}]
    rows = [*waiting_trainer(), orchestrator("weights", more={"servers": servers, "oldest": []}), server()]
    assert diagnose(rows, {}, now=NOW).kind == "engine"
    publishing = row("trainer", 0, phase="publish")
    found = diagnose([publishing, orchestrator("weights"), server()], {}, now=NOW)
    assert (found.kind, found.role) == ("trainer", "trainer")


def test_an_orchestrator_that_is_blocked_is_gone_or_alone() -> None:
    blocked = orchestrator(threads={"MainThread": [["/x/prime_hpc/orchestrator/loop.py", 3, "score"]]})
    found = diagnose([*waiting_trainer(), blocked, server()], {}, now=NOW)
    assert (found.kind, found.where) == ("orchestrator", "score (orchestrator/loop.py:3)")
    assert diagnose(waiting_trainer(), {}, now=NOW).kind == "gone"
    gone = orchestrator(more={"servers": [{"url": "http://n9:1/v1", "ready": False, "version": 0, "loads": False}]})
    assert diagnose([*waiting_trainer(), gone, server()], {}, now=NOW).kind == "gone"


@pytest.mark.parametrize("awaits", [activity.CLIENTS, activity.RUNS])
def test_a_trainer_whom_nobody_owes_anything_is_no_hang(awaits: str) -> None:
    ranks = [row("trainer", r, phase="wait", awaits=awaits) for r in range(2)]
    found = diagnose([*ranks, server(), row("supervisor")], {}, now=NOW)
    assert not found.is_hang and awaits in found.headline() and "nobody hangs" in found.headline()
    sick = diagnose([*ranks, server(error="ConnectTimeout: ")], {}, now=NOW)
    assert (sick.kind, sick.is_hang) == ("engine", True)


def test_a_node_that_says_nothing_and_a_run_of_another_version() -> None:
    found = diagnose([*waiting_trainer(), orchestrator(), server()], {}, now=NOW, silent=["n7"])
    assert (found.kind, found.host) == ("node", "n7")
    old = row("trainer") | {"word": {}}
    found = diagnose([old], {}, now=NOW)
    assert (found.kind, found.is_hang) == ("silent", False) and "another version" in found.advice


def test_a_wait_that_is_short_is_no_hang() -> None:
    rows = [row("trainer", 0, phase="forward_backward", seconds=2.0), orchestrator("weights", seconds=2.0)]
    assert not diagnose(rows, {}, now=NOW).is_hang


def test_a_report_for_people_and_a_short_one(tmp_path: Path) -> None:
    seen = {"host": "n1", "machine": "m", "rows": [*waiting_trainer(), orchestrator()], "probe": {}, "gpus": []}
    document = report(tmp_path, [seen, seen], patience_s=60.0, facts={"slurm": "job 7 is RUNNING"})
    assert len(document["processes"]) == 3, "two nodes of one machine have seen the same"
    lines = [*to_lines(seen), *to_lines({**seen, "host": "n2"})]
    assert {one["host"] for one in from_lines([*reversed(lines), "srun: something", ""])} == {"n1", "n2"}
    assert from_lines(lines[1:])[-1]["host"] == "n2"
    text = text_of(json.loads(json.dumps(document)), with_stacks=True)
    assert text.splitlines()[0] == document["headline"] and "job 7 is RUNNING" in text and "innermost first" in text
    column = [line[10:12] for line in text.partition("\n\n")[0].splitlines()[1:]]
    assert len(column) > 4 and all(place[0] == " " != place[1] for place in column), (
        "titles, and one column beside them"
    )
    many = {**seen, "rows": [orchestrator(tasks=[{"name": "t", "frames": [LOOP] * 40}] * 64)]}
    assert len(json.dumps(shortened(many, 3000))) < 3000 < len(json.dumps(many))


def test_a_short_report_names_the_same_culprit() -> None:
    ranks = [row("trainer", r, phase="train", cpu=1.0) for r in range(4)]
    del ranks[2]["answer"]
    ranks[2]["stacks"] = "Thread 0x1 (most recent call first):\n" + '  File "/a/b.py", line 3 in f\n' * 500
    seen = {"host": "n1", "machine": "m", "rows": ranks, "probe": {}, "gpus": []}
    short = shortened(seen, 8000)
    assert len(short["rows"][2]["stacks"]) < len(ranks[2]["stacks"]) and "answer" not in short["rows"][2]
    found = [diagnose(rows, {}, now=NOW) for rows in (ranks, short["rows"], [*ranks[:2], ranks[2] | {"answer": None}])]
    assert [(one.kind, one.index) for one in found] == [("rank", 2)] * 3


def test_frames_and_figures() -> None:
    assert package_of(LIBRARY) == "verifiers" and package_of(SLEEP) == "python" and package_of(TASKSET) == ""
    installed = "/venv/lib/python3.11/site-packages/my_env/env.py"
    assert user_frame([[SLEEP, 1, "sleep"], [LIBRARY, 2, "score"], [installed, 3, "f"]]) == "f (my_env/env.py:3)"
    assert user_frame([[SLEEP, 1, "sleep"], [LIBRARY, 2, "score"]]) == ""
    text = '# HELP x\nvllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 1.0\n'
    assert parse_figures(text) == {"running": 3.0}


@pytest.mark.parametrize(("seconds", "is_hang"), [(20.0, False), (300.0, True)])
def test_how_long_is_told_by_the_nodes_own_clock(tmp_path: Path, seconds: float, is_hang: bool) -> None:
    """This one's clock is years behind the supervisor's."""
    rows = [row("trainer", phase="forward_backward", seconds=seconds, call={"name": "step", "since": NOW - 9})]
    seen = {"host": "n1", "time": NOW, "rows": rows, "probe": {}, "gpus": []}
    document = report(tmp_path, [seen], patience_s=60.0)
    assert document["diagnosis"]["is_hang"] is is_hang
    assert document["diagnosis"]["seconds"] == pytest.approx(seconds, abs=5)
    assert "in `step` for 9 s" in text_of(document)
