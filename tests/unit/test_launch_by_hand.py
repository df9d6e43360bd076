"""One role by hand: how its process starts, and where it goes on."""

import os
import socket
from pathlib import Path

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError
from prime_hpc.launch import local
from prime_hpc.runtime.role_context import RESUME_STEP
from prime_hpc.store.run_paths import RunPaths
from tests.support.checkpoints import make_checkpoint
from tests.support.launch import loaded, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_an_orchestrator_by_hand_goes_on_where_its_trainer_does(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: started.append(os.environ.get(RESUME_STEP)))
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def by_hand(**ckpt: object) -> str | None:
        os.environ.pop(RESUME_STEP, None)
        local.run_role(loaded(tmp_path, model, ckpt=ckpt), "orchestrator")
        return started.pop()

    assert by_hand() is None
    with pytest.raises(ConfigError, match=r"ckpt.resume_step: "):
        by_hand(resume_step=4)
    paths = RunPaths(tmp_path / "out" / "x")
    for step in (2, 4):
        make_checkpoint(paths, step)
    assert by_hand(resume_step=2) == "2"
    assert by_hand(resume_step="latest") == "4"
    with pytest.raises(ConfigError, match="by hand goes on in its own run's directory alone"):
        by_hand(resume_step=str(paths.checkpoints))


@pytest.mark.parametrize(
    "words", [["trainer"], ["trainer", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h:1"], ["inference"]]
)
def test_a_role_by_hand_says_before_it_starts_that_its_model_is_out_of_reach(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(os, "environ", os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--model.name", "nobody/model"]) == 2
    assert "(--model.name): model.name: nobody/model is not on this disk, and HF_HUB_OFFLINE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "module"), [("trainer", "prime_hpc.trainer.torchrun"), ("orchestrator", "prime_hpc.orchestrator.main")]
)
def test_a_role_by_hand_becomes_its_process(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, role: str, module: str
) -> None:
    """The console scripts with a config that is right, up to the exec."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(
        f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\n"
        "orchestrator: {env: [{id: reverse-text}]}\n"
    )
    monkeypatch.setattr("sys.argv", [role, "@", str(config)])
    getattr(cli, role)()
    assert len(started) == 1
    assert module in started[0] and str(tmp_path / "out" / "x") in started[0]
    own = tmp_path / "out" / "x" / "roles" / role / "run.yaml"
    assert os.environ["PRIMEHPC_RUN_YAML"] == str(own) and own.exists()


@pytest.mark.parametrize(
    ("more", "is_said"),
    [(["--api-key", "K"], True), (["--api-key", "K", "--server.host", "0.0.0.0"], False), ([], False)],
)
def test_a_server_with_a_key_on_the_loopback_address_says_who_cannot_reach_it(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    is_said: bool,
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\ninference: {{}}\n")
    monkeypatch.setattr("sys.argv", ["inference", "@", str(config), "--server.port", "0", *more])
    cli.inference()
    line = "note: listens on 127.0.0.1: other nodes cannot reach it; --server.host 0.0.0.0"
    assert (line in capsys.readouterr().err) is is_said


def test_engines_of_a_further_node_leave_their_heads_config_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin at once and see the same files: each reads what it was told itself, as do servers side by side."""
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\ninference: {{}}\n")
    words = ["inference", "@", str(config), "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    monkeypatch.setenv("DATA_PARALLEL_ADDRESS", "127.0.0.1")
    found = []
    taken = socket.create_server(("127.0.0.1", 0))  # the further node listens to nobody
    headless = ["--server.port", str(taken.getsockname()[1]), "--data-parallel-start-rank", "1", "--headless"]
    for more in (["--server.port", "0"], headless, ["--server.port", "0"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        cli.inference()
        found.append(Path(os.environ["PRIMEHPC_RUN_YAML"]))
    assert len(set(found)) == 3 and {path.parent.parent for path in found} == {
        tmp_path / "out" / "x" / "roles" / "inference"
    }
    assert found[1].parent.name == "rank_1"
    assert ["headless: true" in path.read_text() for path in found] == [False, True, False]
    taken.close()
