"""Placement, attempts, resume decisions: the supervisor's parts that start nothing."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.runtime.gpus import visible_gpus
from prime_hpc.store.attempts import Attempt, Ended, begin, is_held, read_attempts, write_attempt
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.messaging.sockets import PortRange
from prime_hpc.store.run_dirs import AttemptRow
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor import main as supervisor_main
from prime_hpc.supervisor.attempt.start import begin_attempt
from prime_hpc.supervisor.main import place
from prime_hpc.supervisor.roles import ports
from prime_hpc.supervisor.roles.process import one_after_another
from prime_hpc.supervisor.roles.slurm_step import StepSpec
from prime_hpc.supervisor.roles.spec import split_gpus
from prime_hpc.supervisor.stop_requests import Controls
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor


def experiment(tmp_path: Path, **values: object) -> Experiment:
    base = {"output_dir": str(tmp_path), "name": "x", "orchestrator": {"env": [{"id": "reverse-text"}]}}
    return Experiment.model_validate({**base, **values})


def test_gpus_are_split_in_order(tmp_path: Path) -> None:
    exp = experiment(tmp_path, inference={"data_parallel_size": 6}, trainer={"num_ranks": 2})
    assert split_gpus(exp, [str(i) for i in range(8)]) == ({"inference": [["0", "1", "2", "3", "4", "5"]]}, ["6", "7"])


def test_gpus_by_id_may_be_shared(tmp_path: Path) -> None:
    exp = experiment(tmp_path, inference={}, inference_gpu_ids=[0], trainer_gpu_ids=[0])
    assert split_gpus(exp, ["0"]) == ({"inference": [["0"]]}, ["0"])


def test_replicas_and_tensor_parallel_take_their_own_gpus(tmp_path: Path) -> None:
    exp = experiment(tmp_path, inference={"num_replicas": 2, "tensor_parallel_size": 2})
    assert split_gpus(exp, list("01234")) == ({"inference": [["0", "1"], ["2", "3"]]}, ["4"])


def test_without_slurm_an_attempt_holds_the_gpus_of_its_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_main, "refuse_cpu_builds", lambda _: None)  # torch is one for CPUs here
    for visible, held in (("0,1,2", {"gpus": 2}), ("", {})):
        run_dir = tmp_path / (visible or "cpu")
        run_dir.mkdir()
        exp = experiment(run_dir, inference=FREE, inference_gpu_ids=[1] if visible else None)
        environment, controls = {"CUDA_VISIBLE_DEVICES": visible}, Controls(run_dir, None, 60.0)
        supervisor = supervisor_main._prepare(exp, run_dir, environment, None, controls, Patience(1.0))
        assert supervisor.attempt.allocated == held


def test_too_few_gpus_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer needs 2 GPUs, but gets 0"):
        split_gpus(experiment(tmp_path, inference={}, trainer={"num_ranks": 2}), ["0"])


@pytest.mark.parametrize(
    ("error", "on_nodes", "code"),
    [
        (PortRange(20000, 20009, "network.port_range").full(), True, 1),
        (StoreError("the message bus cannot listen on 10.0.0.1"), True, 1),
        (ConfigError("ib7: node n1 has no such interface or network"), True, 2),
        (PortRange(20000, 20009, "network.port_range").full(), False, 2),
    ],
)
def test_a_job_whose_batch_host_has_no_port_for_the_hub_comes_back(error: Exception, on_nodes: bool, code: int) -> None:
    """2 would say that the config can run nowhere; with the next attempt the ports, or the node, may be others."""

    class NoHubs:
        def keep(self, roles: list[str]) -> None: ...

        def open(self, *arguments: object, **options: object) -> None:
            raise error

    one: Any = Supervisor.__new__(Supervisor)
    one._led = SimpleNamespace(hubs=NoHubs(), no_servers=[])
    one._plan = RolePlan([], {}, {}, cast(Any, object()) if on_nodes else None)
    one.attempt = Attempt(1, 1, 0.0, "first start")
    with pytest.raises(Ended) as ended:
        one._open_hub()
    assert (ended.value.code, ended.value.cause) == (code, str(error))


FREE: dict[str, Any] = {"server": {"port": 0}}
"""A stated port is promised to one process until it ends: tests beside this one would be refused it."""
TAUGHT: dict[str, Any] = {
    "inference": {"data_parallel_size": 2, "api_key": "p", **FREE},
    "teacher_inference": {"num_replicas": 2, "tensor_parallel_size": 2},
    "orchestrator": {"env": [{"id": "reverse-text"}], "advantage": {"type": "opd"}, "teacher": {"model": "o/teacher"}},
}


def test_a_teacher_gets_the_gpus_after_the_policys_or_those_that_are_named(tmp_path: Path) -> None:
    exp = experiment(tmp_path, **TAUGHT)
    assert split_gpus(exp, list("0123456")) == (
        {"inference": [["0", "1"]], "teacher": [["2", "3"], ["4", "5"]]},
        ["6"],
    )
    with pytest.raises(ConfigError, match=r"teacher needs 4 GPUs, but gets 3 .*teacher_inference.data_parallel_size"):
        split_gpus(exp, list("01234"))
    shared = experiment(tmp_path, **TAUGHT, teacher_gpu_ids=[0, 1, 2, 3], trainer_gpu_ids=[4])
    assert split_gpus(shared, list("0123456")) == (
        {"inference": [["5", "6"]], "teacher": [["0", "1"], ["2", "3"]]},
        ["4"],
    )


def test_a_teachers_servers_are_a_group_of_their_own(tmp_path: Path) -> None:
    specs, urls = place(experiment(tmp_path, **TAUGHT), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert [spec.label for spec in specs] == ["inference[0]", "teacher[0]", "teacher[1]", "orchestrator", "trainer"]
    assert {role: len(known) for role, known in urls.items()} == {"inference": 1, "teacher": 2}
    assert len({url for known in urls.values() for url in known}) == 3
    command = specs[2].command
    assert command[command.index("--role") + 1] == "teacher" and command[command.index("--replica") + 1] == "1"
    assert urls["teacher"][1].startswith((specs[2].health_url or "").removesuffix("/health"))
    assert specs[2].max_restarts == 3 and "--role" not in specs[0].command
    (free,) = ports.choose(1, ports.run_base(tmp_path))
    ports_of_both = {"inference": {"server": {"port": free}}, "teacher_inference": {"server": {"port": free}}}
    with pytest.raises(ConfigError, match=f"teacher_inference.server.port.*another group of engines listens on {free}"):
        place(experiment(tmp_path, **{**TAUGHT, **ports_of_both}), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})


def test_only_who_shares_a_gpu_waits(tmp_path: Path) -> None:
    two = {"num_replicas": 2, **FREE}
    shared = experiment(tmp_path, inference=two, trainer_gpu_ids=[0], inference_gpu_ids=[0, 1])
    specs = one_after_another(place(shared, tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})[0])
    assert {spec.label: spec.after for spec in specs} == {
        "inference[0]": (), "inference[1]": (), "orchestrator": (), "trainer": ("inference[0]",),
    }  # fmt: skip
    for visible in ("0,1,2", ""):  # GPUs of their own, or none at all
        apart = experiment(tmp_path, inference=two)
        specs = one_after_another(place(apart, tmp_path, {"CUDA_VISIBLE_DEVICES": visible})[0])
        assert not any(spec.after for spec in specs)
    hosts = {"hosts": ("a", "b"), "gpus": (0, 1)}
    steps = [
        StepSpec("inference", [], 1.0, **hosts),  # type: ignore[arg-type]
        StepSpec("inference", [], 1.0, index=1, hosts=("c",), gpus=(0, 1)),
        StepSpec("trainer", [], 1.0, hosts=("b", "c"), gpus=(1, 2)),
        StepSpec("orchestrator", [], 1.0, hosts=("b",)),
    ]
    assert [spec.after for spec in one_after_another(steps)] == [(), (), ("inference[0]", "inference[1]"), ()]


def test_visible_gpus_follow_the_environment() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_place_attaches_without_an_inference_section(tmp_path: Path) -> None:
    specs, urls = place(experiment(tmp_path), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert [spec.name for spec in specs] == ["orchestrator", "trainer"]
    assert urls == {}


def test_place_refuses_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        exp = experiment(tmp_path, inference={"server": {"port": port}})
        with pytest.raises(ConfigError, match=rf"inference.server.port = {port}.*already taken"):
            place(exp, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})


def test_chosen_ports_are_free_and_distinct(tmp_path: Path) -> None:
    base = ports.run_base(tmp_path, "4711")
    assert base == ports.run_base(tmp_path / "other", "4711")  # the Slurm job decides
    found, others = ports.choose(3, base), ports.choose(3, base)
    try:
        assert found == list(range(found[0], found[0] + 3))
        assert len({*found, *others}) == 6  # the first are promised, though nobody has bound them yet
        assert not any(ports.is_free(p) for p in found)
    finally:
        ports.release([*found, *others])
    assert all(ports.is_free(p) for p in found)


def test_attempt_lines_are_replaced_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    first = begin(path, incarnation=1, why="first start", resume_step=None, job_id=None)
    first.ended, first.outcome = first.began + 1, "failed"
    write_attempt(path, first)
    begin(path, incarnation=2, why="resumes", resume_step=3, job_id="7")
    rows = read_attempts(path)
    assert [(r["attempt"], r["outcome"], r["resume_step"]) for r in rows] == [(1, "failed", None), (2, None, 3)]


def test_held_means_alive_on_this_host() -> None:
    began = psutil.Process().create_time() + 5
    me: AttemptRow = {"ended": None, "host": socket.gethostname(), "pid": os.getpid(), "began": began}
    assert is_held(me)
    assert not is_held({**me, "ended": 1.0})
    assert not is_held({**me, "began": began - 1e6})  # the number was re-used by a younger process


def test_second_life_beside_a_living_one_is_refused(tmp_path: Path) -> None:
    exp = experiment(tmp_path)
    exp.run_dir.mkdir()
    begin_attempt(exp, exp.run_dir)
    with pytest.raises(ConfigError, match="still runs here"):
        begin_attempt(exp, exp.run_dir)


def end_last(run_dir: Path) -> None:
    path = run_dir / "attempts.jsonl"
    text = path.read_text().replace('"ended": null', '"ended": 1.0')
    path.write_text(text)


def test_lives_are_numbered_and_rewound(tmp_path: Path) -> None:
    exp = experiment(tmp_path)
    paths = RunPaths(exp.run_dir)
    exp.run_dir.mkdir()
    assert begin_attempt(exp, exp.run_dir).incarnation == 1
    end_last(exp.run_dir)
    (paths.rollouts_step(3)).mkdir(parents=True)
    again = begin_attempt(exp, exp.run_dir)
    assert (again.attempt, again.incarnation, again.resume_step) == (2, 2, None)
    assert not paths.rollouts_step(3).exists()


def test_resume_from_a_step_that_does_not_exist_lists_those_that_do(tmp_path: Path) -> None:
    exp = experiment(tmp_path, ckpt={"resume_step": 10})
    exp.run_dir.mkdir()
    with pytest.raises(ConfigError, match=r"ckpt.resume_step = 10.*steps there: none"):
        begin_attempt(exp, exp.run_dir)
