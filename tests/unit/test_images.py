"""The recipes of images (slurm/images) fit the checkout that they copy: its setup, its versions, its commands."""

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted(path for path in (ROOT / "slurm" / "images").iterdir())
DEFINITIONS = [path for path in IMAGES if path.suffix == ".def"]
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
    for name in ("setup", "post", "test") if recipe.suffix == ".def" else ("",):
        done = subprocess.run(["bash", "-n"], input=section(recipe, name), text=True, capture_output=True, timeout=280)
        assert done.returncode == 0, done.stderr
    builds = re.findall(r"tools/setup (\w+)", section(recipe, "post"))
    usage = (ROOT / "tools" / "setup").read_text().splitlines()[1]
    assert builds or "rocm" in recipe.name, "AMD's torch comes with the base image, all others with tools/setup"
    assert all(re.search(rf"[\[|]{build}[\]|]", usage) for build in builds)


def test_an_image_has_what_git_knows_of_a_checkout_and_nothing_else() -> None:
    """No environment of gigabytes of another machine's, no outputs, no keys of git's settings; each file counts, for a
    run records what of its checkout was changed or gone."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, timeout=280)
    if listed.returncode:
        pytest.skip("no git checkout")
    tracked = {name.partition("/")[0] for name in listed.stdout.split()}
    for recipe in DEFINITIONS:
        lines = [line.split() for line in section(recipe, "files").splitlines() if line.strip() and "#" not in line]
        assert {target for _, target in lines} == {"/opt/prime-hpc/"}
        assert {name for source, _ in lines for name in tracked if fnmatch(name, source)} == tracked, recipe.name
        assert all(any(fnmatch(name, source) for name in tracked) for source, _ in lines), recipe.name
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not {name for name in tracked for line in ignored if fnmatch(name, line)}
    assert {".git/config", ".venv*", "outputs"} <= set(ignored)


@pytest.mark.parametrize("recipe", DEFINITIONS, ids=lambda path: path.name)
def test_the_commit_goes_in_and_keys_of_git_do_not(recipe: Path, tmp_path: Path) -> None:
    """Run as apptainer does, in a checkout and in what was unpacked from an archive."""
    plain, cloned, author = tmp_path / "plain", tmp_path / "cloned", ["-c", "user.name=x", "-c", "user.email=x@y.z"]
    plain.mkdir()
    for words in (["init", str(cloned)], [*author, "-C", str(cloned), "commit", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], check=True, capture_output=True)
    keys = ["config", "http.extraheader", "AUTHORIZATION: basic key"]
    subprocess.run(["git", "-C", str(cloned), *keys], check=True)
    for checkout in (plain, cloned):
        image = tmp_path / "image" / checkout.name
        environ = {"PATH": os.environ["PATH"], "APPTAINER_ROOTFS": str(image)}
        words = ["sh", "-ex", "-c", section(recipe, "setup")]
        done = subprocess.run(words, cwd=checkout, env=environ, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "image" / "plain" / "opt" / "prime-hpc").iterdir())
    inside = tmp_path / "image" / "cloned" / "opt" / "prime-hpc"
    said = [
        subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        for path in (cloned, inside)
    ]
    assert said[0] == said[1]
    assert not [path for path in inside.rglob("*") if path.is_file() and b"AUTHORIZATION" in path.read_bytes()]


@pytest.mark.parametrize("recipe", DEFINITIONS, ids=lambda path: path.name)
def test_arguments_of_a_definition_have_defaults_and_are_used(recipe: Path) -> None:
    """One that has none ends the build, one that is not used as well."""
    stated = re.findall(r"^ +(\w+)=", section(recipe, "arguments"), re.MULTILINE)
    assert set(re.findall(r"\{\{ (\w+) \}\}", recipe.read_text())) == set(stated)
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"} < set(stated)


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
