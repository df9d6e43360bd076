"""tools/install clones and sets up, and leaves what is not its own alone; the locks fit pyproject.toml."""

import hashlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "tools" / "lib" / "locks"


def install(*words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """As `curl ... | bash -s -- WORDS` runs it: the script on standard input."""
    script = (ROOT / "tools" / "install").read_text()
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    command = ["bash", "-s", "--", *map(str, words)]
    return subprocess.run(command, input=script, env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with this checkout's own setup."""
    made = tmp_path / "repository"
    (made / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup"):
        (made / name).write_bytes((ROOT / name).read_bytes())
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(made), *words], check=True)
    return made


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment that setup finds up to date: making one takes minutes, tools/bare tries that."""
    text = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "tools" / "setup").read_bytes()
    (tmp_path / "venv").mkdir()
    want = hashlib.sha256(text).hexdigest()[:16]
    (tmp_path / "venv" / ".prime-hpc-setup").write_text(f"{want}-transformers\n")
    return {"PRIME_HPC_VENV": str(tmp_path / "venv")}


def test_one_line_clones_sets_up_and_says_what_is_next(repository: Path, environment, tmp_path: Path) -> None:
    target = tmp_path / "here"
    done = install(repository, target, "transformers", **environment)
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout and f"cd {target}" in done.stdout
    assert "\x1b" not in done.stdout, "no terminal reads it"
    assert (target / "tools" / "setup").exists()
    (repository / "new").touch()
    for words in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "y"]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    assert install(repository, target, "transformers", **environment).returncode == 0
    assert (target / "new").exists(), "a second time follows the repository"


def test_what_is_not_its_own_is_left_alone(repository: Path, environment, tmp_path: Path) -> None:
    assert install().returncode == 2
    assert "which repository" in install("--dev").stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    done = install(repository, tmp_path / "full", **environment)
    assert done.returncode == 1 and "holds something else" in done.stderr
    target = tmp_path / "mine"
    install(repository, target, "transformers", **environment)
    (target / "tools" / "setup").write_text("mine")
    done = install(repository, target, "transformers", **environment)
    assert done.returncode == 1 and "changes of yours" in done.stderr
    assert (target / "tools" / "setup").read_text() == "mine"
    done = install(tmp_path / "nothing", tmp_path / "new", **environment)
    assert done.returncode == 1 and "cannot be cloned" in done.stderr


def test_a_download_that_breaks_off_runs_nothing(tmp_path: Path) -> None:
    text = (ROOT / "tools" / "install").read_text()
    half = text[: text.index("git clone")]
    done = subprocess.run(["bash", "-s", "--", "x"], input=half, cwd=tmp_path, capture_output=True, text=True)
    assert not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_the_lock_holds_a_fitting_version_of_every_requirement(build: str) -> None:
    """After a change of pyproject.toml: tools/lock."""
    pins: dict[str, list[tuple[str, str]]] = {}
    for line in (LOCKS / f"{build}.txt").read_text().splitlines():
        found = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==([^ ;]+)(?: ; (.*))?", line)
        assert found or line.startswith("#"), line
        if found:
            pins.setdefault(canonicalize_name(found[1]), []).append((found[2], found[3] or ""))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["roles"], *extras[build], *extras["dev"]]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            continue
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement.name} is not in the {build} lock: run tools/lock"
        for version, _ in versions:
            assert requirement.specifier.contains(version, prereleases=True), (
                f"{text}: {version}; run tools/lock {build}"
            )
