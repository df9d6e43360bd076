"""Compilers' caches are on the node, one directory a user and set of versions; what the user sets wins."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.supervisor.roles import caches
from prime_hpc.supervisor.roles.caches import CACHES, NODE_LOCAL, PRECOMPILES, node_caches
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec


@pytest.fixture(autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this node's programs, with an openssl."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "openssl").touch(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_a_node_without_openssl_compiles_without_precompiled_headers(programs: Path, tmp_path: Path) -> None:
    """torch starts it for their checksum: engines on a CPU died at their first request."""
    own = {NODE_LOCAL: str(tmp_path), "PATH": str(programs)}
    assert PRECOMPILES not in node_caches(own)
    (programs / "openssl").unlink()
    assert node_caches(own)[PRECOMPILES] == "0" and node_caches(own).keys() == {*CACHES, PRECOMPILES}
    assert PRECOMPILES not in node_caches({**own, PRECOMPILES: "1"}), "the user knows better"


def test_the_users_own_settings_win(tmp_path: Path) -> None:
    found = node_caches({NODE_LOCAL: str(tmp_path), "TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": ""})
    assert found.keys() == CACHES.keys() - {"TRITON_CACHE_DIR"} and "HF_HOME" not in found
    (root,) = tmp_path.iterdir()
    assert root.name == f"prime-hpc-{os.getuid()}" and stat.S_IMODE(root.stat().st_mode) == 0o700
    assert all(root in Path(path).parents for path in found.values())
    assert "python3" in found["VLLM_CACHE_ROOT"] and "torch" in found["VLLM_CACHE_ROOT"]
    assert node_caches(dict.fromkeys(CACHES, "/mine")) == {}


def test_variables_expand_on_the_node_and_nothing_else(tmp_path: Path) -> None:
    environ = {NODE_LOCAL: f"{tmp_path}/$USER/${{SLURM_JOB_ID}}/$(x)/`id`/$UNKNOWN", "USER": "me", "SLURM_JOB_ID": "12"}
    found = node_caches(environ)["TRITON_CACHE_DIR"]
    assert found.startswith(f"{tmp_path}/me/12/$(x)/`id`/$UNKNOWN/prime-hpc-")


def test_a_node_whose_tmp_is_mounted_noexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is loaded from there: vLLM's engines died of it on a CPU."""
    folders = [tmp_path / name for name in ("missing", "noexec", "other")]
    for folder in folders[1:]:
        folder.mkdir()
    real = os.statvfs

    def statvfs(path: Path) -> object:
        return SimpleNamespace(f_flag=os.ST_NOEXEC) if path == folders[1] else real(path)

    monkeypatch.setattr(caches, "NODE_LOCALS", tuple(map(str, folders)))
    monkeypatch.setattr(caches.os, "statvfs", statvfs)
    assert caches.node_local({}) == folders[2]
    assert caches.node_local({NODE_LOCAL: str(folders[1])}) == folders[1], "the site knows better"
    folders[2].rmdir()
    assert caches.node_local({}) == folders[0]


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / f"prime-hpc-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    assert node_caches({NODE_LOCAL: str(tmp_path)}) == {}
    root.rmdir()
    root.symlink_to(tmp_path)
    assert node_caches({NODE_LOCAL: str(tmp_path)}) == {}
    (tmp_path / "file").touch()
    assert node_caches({NODE_LOCAL: str(tmp_path / "file")}) == {}


def test_roles_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the supervisor starts: the ones that the user left open, and the user's own."""
    out = tmp_path / "out.json"
    code = f"import json, os, pathlib; pathlib.Path({str(out)!r}).write_text(json.dumps(dict(os.environ)))"
    environment = {"PATH": os.environ["PATH"], NODE_LOCAL: str(tmp_path / "local"), "CUDA_CACHE_PATH": "/mine"}
    spec = RoleSpec("trainer", [sys.executable, "-c", code], 10, environment={"NUMBA_CACHE_DIR": "/role"})
    role = Role(spec, tmp_path / "logs", environment, {})
    role.start()
    end = time.monotonic() + 200
    while not (out.exists() and out.read_text().endswith("}")) and time.monotonic() < end:
        time.sleep(0.02)
    seen = json.loads(out.read_text())
    assert seen["CUDA_CACHE_PATH"] == "/mine" and seen["NUMBA_CACHE_DIR"] == "/role"
    assert Path(seen["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "local")


def test_by_hand_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trainer @ ...` becomes the role's process: with the caches, and on the GPUs that the config names."""
    from prime_hpc.config import load_experiment
    from prime_hpc.launch import local

    visible = {NODE_LOCAL: str(tmp_path / "local"), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}  # there is no model here
    plain = {key: value for key, value in os.environ.items() if key not in CACHES} | visible | online
    seen: dict[str, str] = {}
    monkeypatch.setattr(local.os, "execv", lambda *_: seen.update(os.environ))
    monkeypatch.setattr(local.os, "environ", dict(plain))
    flags = ["--output-dir", str(tmp_path), "--trainer.num-ranks", "2"]
    local.run_role(load_experiment([*flags, "--trainer-gpu-ids", "[3, 1]"], "trainer"), "trainer")
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert Path(seen["TRITON_CACHE_DIR"]).is_relative_to(tmp_path / "local")
    monkeypatch.setattr(local.os, "environ", dict(plain))
    local.run_role(load_experiment([*flags, "--inference-gpu-ids", "[0]"], "trainer"), "trainer")
    assert seen["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_versions_are_in_the_name() -> None:
    assert f"torch{caches.importlib.metadata.version('torch')}" in caches._versions()
    python = subprocess.run([sys.executable, "--version"], capture_output=True, check=True).stdout.decode().split()[1]
    assert python in caches._versions()
