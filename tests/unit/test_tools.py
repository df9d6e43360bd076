"""tools/quickstart and tools/setup with GPUs and on login nodes: the scripts themselves, in a made-up world."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prime_hpc.config import load_experiment
from prime_hpc.inference.backend import load_backend
from prime_hpc.supervisor.roles.spec import split_gpus

ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "tool", ["bare", "bench", "grafana/make.py", "install", "ladder", "lock", "quickstart", "setup", "test", "tmux"]
)
def test_a_tool_says_how_it_is_used(tool: str) -> None:
    """Also where what it needs is missing (those of argparse do without a word of ours)."""
    command = [str(ROOT / "tools" / tool), "--help"]
    done = subprocess.run(command, env=os.environ | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: tools/{tool}" in done.stdout
    code = [line for line in done.stdout.splitlines() if line.startswith(("#", "set -", "cd "))]
    assert not code, "the head of the file, no line less or more"


@pytest.mark.parametrize(
    ("num_gpus", "engines", "ranks"),
    [(0, 2, 2), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 2, 2), (8, 2, 2)],
)
@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_quickstart_fits_the_gpus_that_are_there(
    tmp_path: Path, num_gpus: int, engines: int, ranks: int, backend: str
) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "quickstart", tmp_path / "tools")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    program(tmp_path / "tools" / "setup", "true")
    venv = tmp_path / (".venv" if backend == "vllm" else "else where")
    program(venv / "bin" / "python", f'[ "$1" != -c ] || echo {num_gpus}')
    said = tmp_path / "said"
    folder = "outputs/reverse-text-sft/weights/step_000400"
    program(venv / "bin" / "prime-hpc", f'mkdir -p {folder}; printf "%s\\n" "$@" END >>{said}')
    environ = os.environ | {"PRIME_HPC_VENV": str(venv)} if backend != "vllm" else None
    words = ["bash", "tools/quickstart", "--backend", backend]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sft, rl = (words.split("\n") for words in said.read_text().removesuffix("\nEND\n").split("\nEND\n"))
    gpus = [str(index) for index in range(num_gpus)]
    for words, count in ((sft, 1 if num_gpus == 1 else 2), (rl, ranks)):
        argv = [words[0], str(tmp_path / words[1]), *words[2:]]
        experiment = load_experiment(argv[1:], "submit", {}).experiment
        assert experiment.device == ("cpu" if num_gpus == 0 else "auto")
        assert experiment.trainer.num_ranks == count
        serving, training = split_gpus(experiment, gpus)  # raises where they do not fit
        assert len(training) == (count if num_gpus else 0)
        if experiment.inference is not None:
            servers = experiment.inference
            assert servers.backend == backend and servers.data_parallel_size * servers.num_replicas == engines
            assert [refusal.key for refusal in load_backend(backend).refusals(experiment)] == []
            own = [gpu for server in serving["inference"] for gpu in server]
            assert len(own) == (engines if num_gpus else 0)
            assert (own == training) == (num_gpus < 2), "one GPU is shared, several are not"


def setup(tmp_path: Path, sinfo: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """tools/setup in a checkout whose environment is up to date, with a Slurm that says this of its GPUs."""
    (tmp_path / "tools").mkdir(exist_ok=True)
    for name in ("tools/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    program(tmp_path / "bin" / "sinfo", f"echo '{sinfo}'")
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PRIME_HPC_VENV": "env"}
    command = ["bash", "tools/setup", *words]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_setup_on_a_login_node_of_a_cluster_with_gpus_wants_to_be_told_the_build(tmp_path: Path) -> None:
    done = setup(tmp_path, "gpu:h100:8")
    assert done.returncode == 1 and "tools/setup gpu or tools/setup cpu" in done.stderr
    key = subprocess.run(
        "cat pyproject.toml tools/setup | sha256sum | cut -c1-16",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / ".prime-hpc-setup").write_text(f"{key}-gpu\n{key}-gpu,dev\n")
    for words in ((), ("gpu",), ("gpu", "--dev")):
        done = setup(tmp_path, "gpu:h100:8", *words)
        assert done.returncode == 0 and "up to date (env, gpu)" in done.stdout, done.stderr
    interpreter = tmp_path / "env" / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to("/nowhere/python3.11")
    done = setup(tmp_path, "gpu:h100:8")
    assert done.returncode == 1 and "leads to /nowhere/python3.11, which is gone" in done.stderr
    interpreter.unlink()
    for made, code in ((tmp_path / "env", 0), (tmp_path / "before" / "env", 1)):
        (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = /usr/bin/python3 -m venv {made}\n")
        done = setup(tmp_path, "gpu:h100:8")
        assert done.returncode == code, done.stderr
    assert f"made as {made} and then moved or copied" in done.stderr and "rm -r env" in done.stderr


def test_setup_does_not_begin_to_change_an_environment_of_another(tmp_path: Path) -> None:
    """One that a group shares, in a checkout that asks for something else."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "env").mkdir(mode=0o555)
    environ = {**os.environ, "PRIME_HPC_VENV": "env"}
    command = ["bash", "tools/setup", "cpu"]
    if os.geteuid() == 0:  # which may write everywhere
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and not list((tmp_path / "env").iterdir())
    assert "env is not what this checkout asks for (cpu), and not for this user to write" in done.stderr


def test_a_second_setup_waits_for_the_first(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    # a word that only a setup that has waited comes to: no Python to be found
    environ = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    for name in ("dirname", "flock"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    command = ["/bin/bash", "tools/setup", "cpu"]
    second = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert second.stdout is not None
    assert b"another tools/setup is at work" in second.stdout.readline()
    os.close(held)
    assert b"no Python 3.11 to 3.14 found (python3: none)" in second.communicate(timeout=60)[0]


PYTHON = """#!/bin/sh
case $1 in
    --version) echo Python {0}.{1}.9 ;;
    -c) exec {program} -c "import sys, sysconfig; sys.version_info = ({0}, {1}, 9); sys.modules.update({hidden}); $2" ;;
    *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    "there, said",
    [
        ({"python3": (3, 14), "python3.12": (3, 12)}, "with Python 3.12.9 ({bin}/python3.12)"),
        ({"python3": (3, 14), "python3.12": (3, 12, "no venv")}, "with Python 3.14.9 ({bin}/python3)"),
        ({"python3": (3, 14, "no venv")}, "with Python 3.14.9 ({bin}/python3)"),  # root has apt bring what it lacks
        ({"python3": (3, 14), "python3.12": (3, 12, "no venv"), "python3.11": (3, 10)}, "({bin}/python3)"),
        ({"python3": (3, 15)}, "no Python 3.11 to 3.14 found (python3: Python 3.15.9)"),
    ],
)
def test_setup_takes_the_python_that_can_make_an_environment(tmp_path: Path, there: dict, said: str) -> None:
    folder = tmp_path / "bin"
    for made in (folder, tmp_path / "tools"):
        made.mkdir()
    for name in ("tools/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("cat", "cut", "dirname", "flock", "id", "rm", "sed", "sha256sum"):
        (folder / name).symlink_to(shutil.which(name) or "")
    for name, (major, minor, *lacks) in there.items():
        hidden = "{'ensurepip': None}" if lacks else "{}"
        (folder / name).write_text(PYTHON.format(major, minor, program=sys.executable, hidden=hidden))
        (folder / name).chmod(0o755)
    environ = {"PATH": str(folder), "HOME": str(tmp_path), "PRIME_HPC_VENV": "env"}
    command = ["/bin/bash", "tools/setup", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and said.format(bin=folder) in done.stdout + done.stderr


@pytest.mark.parametrize("flag", ["--seed", "--out", "--task", "--backend"])
def test_the_quickstart_misses_a_flags_value(flag: str) -> None:
    done = subprocess.run(["bash", ROOT / "tools" / "quickstart", flag], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"quickstart: {flag} needs a value (see --help)\n")


def test_fault_pairs_says_how_it_is_used_without_the_tests_packages(tmp_path: Path) -> None:
    python, tool = "/usr/bin/env python3", tmp_path / "tools" / "fault-pairs"
    tool.parent.mkdir()
    shutil.copy(ROOT / "tools" / "fault-pairs", tool)
    said = [
        subprocess.run([*python.split(), "-S", tool, *words], capture_output=True, text=True)
        for words in (["--help"], [])
    ]
    assert said[0].returncode == 0 and "usage: tools/fault-pairs" in said[0].stdout
    assert said[1].returncode == 4 and "tools/setup --dev" in said[1].stderr


def test_the_hooks_before_a_commit_are_what_is_tested() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], "nothing is fetched"
    said = {" ".join([hook["entry"], *hook.get("args", [])]) for hook in hooks[0]["hooks"]}
    script = (ROOT / "tools" / "test").read_text()
    checks = {
        re.split(" [>&]", line.strip())[0].replace("$bin", ".venv/bin")
        for line in script.splitlines()
        if re.search(r"^ +\$bin/", line)
    }
    assert len(checks) == 3 and checks <= said


def ladder(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """tools/ladder over programs that say what they were asked, of which those named in `broken` fail."""
    for name in ("ladder", "make-starter"):
        (root / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, root / "tools")
    fails = '! grep -qx "$(basename "$0")" broken 2>/dev/null || { echo boom; exit 1; }'
    body = f'echo "$*" >>"$0.said"; {fails}'
    for name in ("prime-hpc", "trainer", "sft", "eval", "rl"):
        program(root / ".venv" / "bin" / name, body)
    python = '[[ "$*" == *visible_gpus* ]] && echo 0; [[ "$*" != *find_spec* ]] || exec test -e flash-attn; '
    program(root / ".venv" / "bin" / "python", python + '[[ "$*" != *flash_attn_2* ]] || exec test -e works')
    env = {"PATH": f"{root / 'empty'}:/usr/bin:/bin"}
    return subprocess.run([root / "tools" / "ladder", *words], env=env, capture_output=True, text=True, timeout=280)


def test_the_ladder_stops_at_the_first_broken_rung_and_says_what_to_do(tmp_path: Path) -> None:
    done = ladder(tmp_path, "--to", "rl")
    assert done.returncode == 0 and "every rung holds" in done.stdout, done.stdout
    asked = (tmp_path / ".venv" / "bin" / "rl.said").read_text()
    assert "configs/debug/rl.yaml" in asked and "--device cpu" in asked
    (tmp_path / "broken").write_text("sft\n")
    for said in (tmp_path / ".venv" / "bin").glob("*.said"):
        said.unlink()
    done = ladder(tmp_path, "--to", "rl", "--backend", "transformers")
    assert done.returncode == 1
    assert "boom" in done.stdout and "  do: " in done.stdout and "tools/ladder --from sft" in done.stdout
    assert (tmp_path / ".venv" / "bin" / "trainer.said").exists()
    assert not (tmp_path / ".venv" / "bin" / "rl.said").exists(), "what stands on it is not tried"
    assert ladder(tmp_path, "--from", "roof").returncode == 2


def test_flash_attn_is_tried_where_it_is_installed(tmp_path: Path) -> None:
    assert "flash      left out: flash-attn is not installed" in ladder(tmp_path, "--to", "doctor").stdout
    (tmp_path / "flash-attn").touch()
    done = ladder(tmp_path, "--to", "doctor")
    assert done.returncode == 1 and "flash      BROKEN" in done.stdout and "pip uninstall flash-attn" in done.stdout
    (tmp_path / "works").touch()
    done = ladder(tmp_path, "--to", "doctor")
    assert done.returncode == 0 and "flash      holds" in done.stdout


def test_a_rung_that_is_left_out_can_be_the_last(tmp_path: Path) -> None:
    done = ladder(tmp_path, "--from", "flash", "--to", "flash")
    assert done.returncode == 0 and "left out" in done.stdout and "doctor" not in done.stdout
    program(tmp_path / "empty" / "sbatch", "exit 1")  # Debian's package where no slurm.conf is in force
    done = ladder(tmp_path, "--from", "slurm")
    assert done.returncode == 0 and "slurm      left out" in done.stdout, done.stdout


def test_the_rung_of_flash_attn_tells_a_package_that_does_not_load(tmp_path: Path) -> None:
    """The rung's own Python, with a package of that name that another torch was built for."""
    text = (ROOT / "tools" / "ladder").read_text()
    found = re.search(r"^flash\(\) \{\n.*?-c '(.*?)'$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", found[1]], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "its varlen kernel cannot be imported" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_bare_machine_ends_with_the_command_that_made_it(tmp_path: Path, how: signal.Signals) -> None:
    """A limit of time on it would hold for nothing else: each process of the machine keeps the pipe open."""
    roots = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prime-hpc" / "roots"
    env = {"PRIME_HPC_ROOTS": str(roots)} | os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    packages = ("ca-certificates", "git", "python3", "g++", "python3-dev", "python3-venv")
    there = [str(ROOT / "tools" / "lib" / "debian-root"), "--cached", "--check", "bookworm", *packages]
    if os.getuid() or subprocess.run(there, env=env, capture_output=True).returncode:
        pytest.skip("needs root, and a Debian that `tools/bare` has made once")
    command = [str(ROOT / "tools" / "bare"), "--as", "user", "bash", "-c", "sleep 600 & echo it is up; exec sleep 600"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "it is up\n" in iter(process.stdout.readline, "")
        process.send_signal(how)
        process.communicate(timeout=280)
        assert process.returncode == (143 if how is signal.SIGTERM else -how)
    shutil.rmtree(tmp_path / "prime-hpc")  # who is killed leaves it


def test_an_interpreter_that_a_bare_machine_gets_brings_all_of_its_headers(tmp_path: Path) -> None:
    """Debian's pyconfig.h names another one, of the architecture, in a folder of its own."""
    python, says = "/usr/bin/python3", "import sysconfig; print(sysconfig.get_path('include'))"
    if not shutil.which("gcc") or not Path(python).exists():
        pytest.skip("needs a C compiler and the system's Python")
    include = Path(subprocess.run([python, "-c", says], capture_output=True, text=True, check=True).stdout.strip())
    if not (include / "Python.h").exists():
        pytest.skip("needs the headers of the system's Python")
    root = tmp_path / "root"
    (root / "usr" / "local" / "bin").mkdir(parents=True)
    words = f"source <(sed -n '/^bring_python()/,/^}}/p' tools/bare); chroot() {{ :; }}; bring_python {root} {python}"
    subprocess.run(["bash", "-euc", words], cwd=ROOT, check=True, timeout=280)
    makes = ["gcc", "-M", f"-I{include}", "-include", "Python.h", "-x", "c", "/dev/null"]
    needs = subprocess.run(makes, capture_output=True, text=True, check=True, timeout=280).stdout.split()
    headers = [word for word in needs if f"/{include.name}/" in word]
    assert str(include / "pyconfig.h") in headers
    assert [header for header in headers if not Path(f"{root}{header}").exists()] == []


def test_a_list_of_points_is_read_as_far_as_anybody_likes() -> None:
    program = "import runpy; runpy.run_path('tools/faults')['show'](map(str, range(100_000)))"
    command = f"{shlex.join([sys.executable, '-c', program])} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n0\n", "")


@pytest.mark.parametrize("option", [["--dir", "a b"], ["--dir=a b"]])
def test_the_dev_cluster_names_commands_that_can_be_pasted(tmp_path: Path, option: list[str]) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / "devcluster"), *option, "status"], cwd=tmp_path, capture_output=True, text=True
    )
    (told,) = re.findall("`slurm/devcluster (.*) up`", done.stderr)
    assert done.returncode == 3 and shlex.split(told) == option
