"""Engines in a Python environment of their own: `inference.python`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import prime_hpc
from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.inference import environment
from prime_hpc.launch.checks import engine_problems
from prime_hpc.launch.lint.lint import lint
from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.code import package_digest
from prime_hpc.supervisor.roles.spec import inference_spec

PACKAGE = Path(prime_hpc.__file__).parent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other interpreters find the checkout that is tested."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))


def _interpreter(folder: Path, words: str) -> str:
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_an_environment_with_the_same_code_and_the_backend_is_right(tmp_path: Path) -> None:
    assert environment.problem_of(_interpreter(tmp_path, sys.executable), "vllm") == ""


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    said = environment.problem_of(str(tmp_path / "python"), "vllm")
    assert said == f"{tmp_path}/python cannot be started: No such file or directory"


@pytest.mark.parametrize("program", ["true", "echo"])
def test_what_is_no_python(tmp_path: Path, program: str) -> None:
    said = environment.problem_of(_interpreter(tmp_path, program), "vllm")
    assert "is no interpreter of Python" in said


def test_an_environment_without_prime_hpc(tmp_path: Path) -> None:
    said = environment.problem_of(_interpreter(tmp_path, f"{sys.executable} -I -S"), "vllm")
    assert "has no prime-hpc that runs" in said and "No module named" in said and "-m pip install" in said


def test_an_environment_without_the_backend(tmp_path: Path) -> None:
    """`-S`: no installed packages but those that the path names."""
    words = f"env PYTHONPATH={PACKAGE.parent}:{tmp_path} {sys.executable} -S"
    for name in ("loguru", "omegaconf", "pydantic", "pydantic_core", "yaml", "antlr4", "annotated_types"):
        _link(name, tmp_path)
    for name in ("typing_extensions.py", "typing_inspection", "numpy", "xxhash", "psutil", "safetensors"):
        _link(name, tmp_path)
    said = environment.problem_of(_interpreter(tmp_path, words), "vllm")
    assert said.startswith(f"in the environment of {tmp_path}/python: vLLM is not installed")


def _venv(folder: Path) -> Path:
    """A virtual environment with the packages of this one."""
    venv.create(folder, with_pip=False)
    here = sysconfig.get_paths()["purelib"]
    (next(folder.glob("lib/python*/site-packages")) / "here.pth").write_text(here)
    return folder / "bin" / "python"


def test_blanks_links_and_a_shells_pythonhome_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = _venv(tmp_path / "of engines")
    (tmp_path / "linked").symlink_to(tmp_path / "of engines")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "another"))
    assert environment.problem_of(str(python), "vllm") == ""
    assert environment.problem_of(str(tmp_path / "linked" / "bin" / "python"), "vllm") == ""
    (tmp_path / "python").symlink_to(python)
    said = environment.problem_of(str(tmp_path / "python"), "vllm")
    assert "No module named" in said and "name that one's own bin/python" in said
    spec = inference_spec(_experiment(python=str(python)), tmp_path, 0, 8000, [])
    assert spec.environment["PYTHONHOME"] == ""


def test_a_torch_of_pythonpath_is_named_where_there_is_an_own_one(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    words = f"env PYTHONPATH={PACKAGE.parent}:{tmp_path} {sys.executable}"
    said = environment.problem_of(_interpreter(tmp_path, words), "transformers")
    assert f"PYTHONPATH has {tmp_path}, whose torch would be taken" in said


def test_a_server_finds_the_programs_of_its_environment_first(tmp_path: Path) -> None:
    script = "import os; from prime_hpc.inference.environment import enter; enter(); "
    script += "print(os.environ['PATH'], os.environ['VIRTUAL_ENV'], sep='|')"
    python = _venv(tmp_path / "engines")
    environ = {**os.environ, "PATH": "/usr/bin", "VIRTUAL_ENV": "/trainer"}
    asked = subprocess.run([python, "-P", "-c", script], capture_output=True, text=True, env=environ, check=False)
    assert asked.stdout == f"{python.parent}:/usr/bin|{tmp_path}/engines\n", asked.stderr


def _experiment(**inference: Any) -> Experiment:
    return Experiment.model_validate(
        {"launch": "local", "inference": inference, "orchestrator": {"env": [{"id": "reverse-text"}]}}
    )


def _link(name: str, folder: Path) -> None:
    for place in map(Path, sys.path):
        if (place / name).exists():
            (folder / name).symlink_to(place / name)


def test_an_environment_with_another_version_of_prime_hpc(tmp_path: Path) -> None:
    other = tmp_path / "prime_hpc"
    shutil.copytree(PACKAGE, other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "runtime" / "failures.py").open("a") as file:
        file.write("# later\n")
    said = environment.problem_of(_interpreter(tmp_path, f"env PYTHONPATH={tmp_path} {sys.executable}"), "vllm")
    assert f"(in {other}, digest " in said and f"(digest {package_digest()})" in said


def test_a_server_of_another_version_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.require_same_code({})
    environment.require_same_code(environment.told_to_servers("/opt/engines/bin/python"))
    with pytest.raises(NodeError, match="is not the one that runs the rest"):
        environment.require_same_code({environment.CODE: "0123"})


def test_its_servers_are_started_with_it_and_told_the_code(tmp_path: Path) -> None:
    own = _experiment(python="/opt/engines/bin/python")
    spec = inference_spec(own, tmp_path, 0, 8000, [])
    assert spec.command[0] == "/opt/engines/bin/python" and spec.environment[environment.CODE] == package_digest()
    spec = inference_spec(_experiment(), tmp_path, 0, 8000, [])
    assert spec.command[0] == sys.executable and environment.CODE not in spec.environment


def test_lint_and_submit_ask_it(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    experiment = _experiment(python=python)
    [found] = [finding for finding in lint(experiment, SiteConfig(name="here")) if finding.code == "PH125"]
    assert found.key == "inference.python" and "cannot be started" in found.message
    [problem] = [problem for problem in engine_problems(experiment) if problem.key == "inference.python"]
    assert "cannot be started" in problem.message


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ValidationError, match="no absolute path"):
        _experiment(python="engines/bin/python")
