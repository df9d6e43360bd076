"""`tools/tmux` with a real tmux, on a server of the test's own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "tmux"
ROLES = ("Trainer", "Orchestrator", "Inference", "Status")


class Tmux:
    """tools/tmux and tmux in an environment where nobody else's sessions are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, TOOL
        self.outputs = folder / "outputs"
        (folder / "sockets").mkdir()
        quiet = {k: v for k, v in os.environ.items() if not k.startswith(("TMUX", "PRIME"))}
        self.env = {**quiet, "TMUX_TMPDIR": str(folder / "sockets"), "PRIMEHPC_OUTPUTS": str(self.outputs)}
        self.env |= {"HOME": str(folder), "TERM": "xterm"}

    def tool(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run tools/tmux; returns what it printed."""
        return self._run([str(self.program), *arguments], code, env)

    def tmux(self, *arguments: str) -> str:
        """Run tmux itself."""
        return self._run(["tmux", *arguments], 0, {})

    def _run(self, command: list[str], code: int, env: dict[str, str]) -> str:
        result = subprocess.run(
            command, env=self.env | env, cwd=self.folder, capture_output=True, text=True, timeout=280, check=False
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    def sessions(self) -> list[str]:
        """Their names; none where the server has ended."""
        command = ["tmux", "list-sessions", "-F", "#{session_name}"]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=280, check=False
        ).stdout.split()

    def panes(self, session: str) -> dict[str, str]:
        """What each pane shows, by its title."""
        rows = self.tmux("list-panes", "-s", "-t", f"={session}", "-F", "#{pane_title}\t#{pane_id}").splitlines()
        ids = dict(row.split("\t") for row in rows)
        return {title: self.tmux("capture-pane", "-p", "-J", "-t", pane) for title, pane in ids.items()}


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    tool = Tmux(tmp_path)
    yield tool
    subprocess.run(["tmux", "kill-server"], env=tool.env, capture_output=True, timeout=280, check=False)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def make_run(path: Path, process: "subprocess.Popen[bytes]") -> None:
    path.mkdir(parents=True)
    (path / "run.yaml").write_text("max_steps: 3\n")
    for role in ("trainer", "orchestrator", "inference"):
        (path / "logs" / "attempt_1" / role).mkdir(parents=True)
        (path / "logs" / "attempt_1" / role / f"{role}.log").write_text(f"a line of the {role}\n")
    row: dict[str, Any] = {"attempt": 1, "began": time.time() + 1, "ended": None, "job_id": None}
    row |= {"host": os.uname().nodename, "pid": process.pid}
    (path / "attempts.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.slow
def test_panes_wait_for_the_run_and_follow_it(tmux: Tmux) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "tmux attach -t prime-hpc-demo" in tmux.tool("demo", "--detach")
        assert sorted(tmux.panes("prime-hpc-demo")) == sorted(ROLES)
        wait_for(lambda: "rl @ FILE --name demo" in tmux.panes("prime-hpc-demo")["Trainer"], "a hint in the free pane")
        make_run(tmux.outputs / "demo", process)
        for title in ("Orchestrator", "Inference"):
            line = f"a line of the {title.lower()}"
            wait_for(lambda t=title, x=line: x in tmux.panes("prime-hpc-demo")[t], line)  # type: ignore[misc]
        wait_for(lambda: "demo  starting" in tmux.panes("prime-hpc-demo")["Status"], "the status pane")
        tmux.tool("demo", "--detach")  # a second time: the same session
        assert tmux.sessions() == ["prime-hpc-demo"] and len(tmux.panes("prime-hpc-demo")) == 4
        tmux.tool("kill", "demo")
        assert tmux.sessions() == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_experiments_side_by_side_and_only_ours_are_killed(tmux: Tmux) -> None:
    for name in ("exp.1", "exp_1"):  # tmux would call both of them the same
        assert tmux.tool(name, "--detach").endswith(f"it ends with: tools/tmux kill {name}\n")
    tmux.tmux("new-session", "-d", "-s", "prime-hpc-mine")
    assert len(set(tmux.sessions())) == 3
    assert "not of tools/tmux" in tmux.tool("kill", "mine", code=1)
    assert "no session prime-hpc-absent" in tmux.tool("kill", "absent", code=1)
    tmux.tool("kill", "exp.1")
    assert set(tmux.sessions()) == {"prime-hpc-exp_1", "prime-hpc-mine"}


@pytest.mark.slow
def test_roles_by_hand(tmux: Tmux) -> None:
    """Each pane runs its role's entrypoint on the config; here a wrong one, so that each says so and leaves a shell.
    The checkout has no .venv: its environment is elsewhere."""
    tmux.program = tmux.folder / "checkout" / "tools" / "tmux"
    tmux.program.parent.mkdir(parents=True)
    shutil.copy(TOOL, tmux.program)
    tmux.env["PRIME_HPC_VENV"] = str(TOOL.parents[1] / ".venv")
    (tmux.folder / "my exp.yaml").write_text("no_such_key: 1\n")
    tmux.tool("hand", "--config", "my exp.yaml", "--max-steps", "5", "--detach")
    for role in ("Trainer", "Orchestrator", "Inference"):
        wait_for(lambda t=role: "no_such_key" in tmux.panes("prime-hpc-hand")[t], role)  # type: ignore[misc]


def test_dry_run_needs_no_tmux(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").touch()
    command = [str(TOOL), "a b", "--config", "exp.yaml", "--seed", "3", "--dry-run"]
    env = {**os.environ, "TRAINER_GPUS": "2,3", "WANDB_API_KEY": "hush-hush", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    trainer, _, _, orchestrator, *_ = result.stdout.splitlines()
    assert trainer.endswith(r"pane run env CUDA_VISIBLE_DEVICES=2\,3 trainer @ exp.yaml --name a\ b --seed 3")
    assert orchestrator.endswith(r"orchestrator @ exp.yaml --name a\ b --seed 3 --client.port PORT")
    assert "hush-hush" not in result.stdout and "HF_HUB_OFFLINE=1" in trainer


def test_without_tmux_it_says_so(tmp_path: Path) -> None:
    for name in ("bash", "env", "sed", "cut", "dirname", "tr", "cksum"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        [str(tmp_path / "bash"), str(TOOL), "x y"], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 1
    assert "there is no tmux here" in result.stderr and "prime-hpc logs x\\ y -f" in result.stderr


@pytest.mark.parametrize("arguments", [["a", "b"], ["--frob"], ["--config", "x.yaml"], ["a", "--config", "no.yaml"]])
def test_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    result = subprocess.run(
        [str(TOOL), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 2 and result.stderr.startswith("tools/tmux: error:")
