"""The recipes of images (slurm/images) fit the checkout that they copy: its setup, its versions, its commands."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted(path for path in (ROOT / "slurm" / "images").iterdir())
VERSIONS = re.compile(r"(torch|vLLM) (\d+\.\d+)")


def section(recipe: Path, name: str) -> str:
    """Shell of an Apptainer definition's section, or of a Dockerfile's RUN lines."""
    text = recipe.read_text()
    if recipe.suffix == ".def":
        found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL)
        assert found is not None, f"{recipe.name} has no %{name}"
        return found[1]
    runs = re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return "\n".join(re.sub(r"^--mount\S+ ", "", run) for run in runs)


@pytest.mark.parametrize("recipe", IMAGES, ids=lambda path: path.name)
def test_shell_of_a_recipe_is_whole_and_setup_knows_its_words(recipe: Path) -> None:
    for name in ("post", "test") if recipe.suffix == ".def" else ("",):
        done = subprocess.run(["bash", "-n"], input=section(recipe, name), text=True, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    builds = re.findall(r"tools/setup (\w+)", section(recipe, "post"))
    usage = (ROOT / "tools" / "setup").read_text().splitlines()[1]
    assert builds or "rocm" in recipe.name, "AMD's torch comes with the base image, all others with tools/setup"
    assert all(re.search(rf"[\[|]{build}[\]|]", usage) for build in builds)
    assert "rm -rf .venv" in section(recipe, "post"), "the checkout's own environment is of another machine"


@pytest.mark.parametrize("recipe", IMAGES, ids=lambda path: path.name)
def test_versions_in_a_recipe_are_those_of_the_package(recipe: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = dict(re.findall(r"(torch|vllm)==(\d+\.\d+)", " ".join(extras["gpu"])))
    assert set(stated) == {"torch", "vllm"}
    text = recipe.read_text()
    named = {(name.lower(), version) for name, version in VERSIONS.findall(text)}
    named |= {("vllm", version) for version in re.findall(r"vllm-openai-rocm:v(\d+\.\d+)", text)}
    assert named <= stated.items()
    assert named or recipe.name == "prime-hpc-cpu.def", "only the CPU's names none: pip resolves it"
