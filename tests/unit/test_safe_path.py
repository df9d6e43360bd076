"""Python that a run starts does not import from the directory in which it was submitted."""

import subprocess
from pathlib import Path

import pytest

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.slurm import ContainerConfig
from prime_hpc.slurm.containers import Container
from prime_hpc.supervisor.main import place
from prime_hpc.supervisor.roles.slurm_step import StepContext

TREE = {"orchestrator": {"env": [{"id": "reverse-text"}]}, "inference": {"server": {"port": 0}}}


def is_safe(command: list[str]) -> bool:
    """Whether the interpreter is told not to look in the working directory."""
    module = command.index("-m")
    return "-P" in command[:module]


def test_roles_of_one_machine(tmp_path: Path) -> None:
    specs, _ = place(Experiment.model_validate(TREE), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert [spec.name for spec in specs] == ["inference", "orchestrator", "trainer"]
    assert all(is_safe(spec.command) for spec in specs)


@pytest.mark.parametrize("runtime", [None, "pyxis", "apptainer"])
def test_steps_and_stand_ins(tmp_path: Path, runtime: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ContainerConfig.model_validate({"image": "/x.sif", "runtime": runtime}) if runtime else None
    box = Container(config, tmp_path, ()) if config else None
    allocation = type("A", (), {"is_het": False, "by_slurm": True})()
    context = StepContext(allocation=allocation, run_dir=tmp_path, no_kill=False, container=box)
    assert is_safe(context.srun(["a"], 0, 1, "trainer", ["module"]))
    assert " -P -m module" in " ".join(context.substitute_command({}, "name", tmp_path / "log", ["module"]))


def test_a_module_in_the_submit_directory_is_not_executed(tmp_path: Path) -> None:
    """As the batch script does: the rendered command, in a directory with a file named like a package."""
    (tmp_path / "loguru.py").write_text("print('STRANGER CODE', flush=True)\nraise SystemExit(0)\n")
    specs, _ = place(Experiment.model_validate(TREE), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    command = next(spec.command for spec in specs if spec.name == "orchestrator")[:-1]
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert "STRANGER CODE" not in done.stdout
