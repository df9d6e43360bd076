"""`prime-hpc env pack`: packed, entered on a node by a plain shell, and what happens where that cannot be."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.config import ConfigError
from prime_hpc.launch import env_pack
from prime_hpc.launch.env_pack import LEFT_AFTER_S, PROGRAMS, pack_environment
from prime_hpc.slurm.packed_env.facts import ENTER, PackFacts, environment_hash

LIMIT_S = 280.0
NEEDED: tuple[str, ...] = (
    "sh",
    "date",
    "uname",
    "stat",
    "id",
    "mkdir",
    "cat",
    "rm",
    "rmdir",
    "mv",
    "sleep",
    "cp",
    "b2sum",
    "cut",
)
NEEDED += ("tar", "gzip", "df", "awk")
SHOW = "import json, sys, answer; print(json.dumps([sys.prefix, answer.VALUE]))"


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small virtual environment, as if it were the one in which this runs."""
    path = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    site = next(path.glob("lib/python3*/site-packages"))
    (site / "answer.py").write_text("VALUE = 42\n")
    (site / "answer-1.0.dist-info").mkdir()
    (site / "answer-1.0.dist-info" / "RECORD").write_text("answer.py,sha256=x,11\n")
    monkeypatch.setattr(sys, "prefix", str(path))
    return path


def packed(venv: Path, kind: str) -> Path:
    if shutil.which(PROGRAMS[kind]) is None:
        pytest.skip(f"there is no {PROGRAMS[kind]} here")
    return pack_environment(venv, None, kind, lambda _: None)[0]


def enter(pack: Path, base: str, shared: Path, **environ: str) -> tuple[str, int, str]:
    """The environment that Python finds itself in, what its module says, and what was said."""
    words = ["sh", str(ENTER), str(pack), base, str(shared / "bin" / "python"), "-P", "-c", SHOW]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    prefix, value = json.loads(done.stdout)
    return prefix, value, done.stderr


def bare_path(folder: Path, *more: str) -> str:
    """A PATH with no more than a shell, coreutils, tar and gzip."""
    folder.mkdir()
    for name in (*NEEDED, *more):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return str(folder)


def unmount(base: Path) -> None:
    for path in base.glob("prime-hpc-*/mnt-*"):
        subprocess.run(["umount", "--lazy", str(path)], check=False)


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_a_node_is_given_the_environment_once(venv: Path, tmp_path: Path, kind: str) -> None:
    pack = packed(venv, kind)
    before = pack.stat().st_mtime_ns
    assert packed(venv, kind).stat().st_mtime_ns == before, "it has not changed: nothing is packed"
    try:
        prefix, value, said = enter(pack, f"{tmp_path}/$NODE", venv, NODE="n1")
        assert prefix.startswith(f"{tmp_path}/n1/prime-hpc-{os.getuid()}/") and value == 42
        assert f"brought {pack} to " in said
        (venv / "pyvenv.cfg").rename(venv / "gone")  # nothing is read from there any more
        again, value, said = enter(pack, f"{tmp_path}/$NODE", venv, NODE="n1")
        assert value == 42 and "brought" not in said
        assert Path(again).parent == Path(prefix).parent
    finally:
        unmount(tmp_path / "n1")


def test_several_steps_at_once_unpack_it_once(venv: Path, tmp_path: Path) -> None:
    pack = packed(venv, "tar.gz")
    words = ["sh", str(ENTER), str(pack), str(tmp_path / "n1"), str(venv / "bin" / "python"), "-P", "-c", SHOW]
    steps = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [step.communicate(timeout=LIMIT_S) for step in steps]
    assert [step.returncode for step in steps] == [0, 0, 0]
    assert len({out for out, _ in told}) == 1
    assert sum("brought" in err for _, err in told) == 1
    root = tmp_path / "n1" / f"prime-hpc-{os.getuid()}"
    assert [path.name for path in root.iterdir()] == [f"env-{PackFacts.read(pack).hash}"]


def test_what_a_killed_step_left_is_in_nobodys_way(venv: Path, tmp_path: Path) -> None:
    pack = packed(venv, "tar.gz")
    root = tmp_path / "n1" / f"prime-hpc-{os.getuid()}"
    root.mkdir(parents=True, mode=0o700)
    env = root / f"env-{PackFacts.read(pack).hash}"
    (root / f"{env.name}.part").mkdir()
    (root / f"{env.name}.part" / "torn").touch()
    dead = subprocess.Popen(["true"])
    dead.wait()
    (root / f"{env.name}.lock").mkdir()
    (root / f"{env.name}.lock" / "pid").write_text(f"{dead.pid}\n")
    assert enter(pack, str(tmp_path / "n1"), venv)[0] == str(env)
    assert [path.name for path in root.iterdir()] == [env.name] and not (env / "torn").exists()


def change(name: str, value: str) -> Callable[[Path], None]:
    def do(pack: Path) -> None:
        path = pack.with_name(f"{pack.name}.facts")
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{name} {value}\n" if line.startswith(f"{name} ") else f"{line}\n" for line in lines))

    return do


def flip(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)


def cut(pack: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:-1])


def forget(pack: Path) -> None:
    pack.with_name(f"{pack.name}.facts").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("machine", "riscv128"), "was made for riscv128, this node is"),
        (change("python", "2.7.18"), "has Python 2.7.18, but its interpreter here says 'Python 3"),
        (change("format", "9"), "is of format '9'"),
        (change("kind", "zip"), "is of kind 'zip', which this prime-hpc does not know"),
        (flip, "is damaged: its sum is not that of"),
        (cut, "bytes, not"),
        (forget, "facts cannot be read"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused_and_the_shared_one_used(
    venv: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    pack = packed(venv, "tar.gz")
    damage(pack)
    prefix, value, told = enter(pack, str(tmp_path / "n1"), venv)
    assert (prefix, value) == (str(venv), 42)
    assert said in told and f"{venv}/bin/python is used instead" in told


def test_a_node_without_what_unpacks_it(venv: Path, tmp_path: Path) -> None:
    image, zst = packed(venv, "squashfs"), packed(venv, "tar.zst")
    bare = bare_path(tmp_path / "bin")
    prefix, _, told = enter(zst, str(tmp_path / "n1"), venv, PATH=bare)
    assert prefix == str(venv) and "there is no zstd here: pack with --format tar.gz" in told
    prefix, _, told = enter(image, str(tmp_path / "n1"), venv, PATH=bare)
    assert prefix == str(venv) and "no squashfuse" in told and "there is no unsquashfs here" in told
    if shutil.which("squashfuse") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("nothing can be mounted here")
    more = bare_path(tmp_path / "more", "squashfuse", "fusermount")
    try:
        for _ in range(2):
            prefix, value, told = enter(image, str(tmp_path / "n1"), venv, PATH=more, SLURM_STEP_ID="3")
            assert "/mnt-" in prefix and prefix.startswith(str(tmp_path / "n1")) and value == 42
    finally:
        unmount(tmp_path / "n1")


@pytest.mark.parametrize("program", ["squashfuse_ll", "squashfuse"])
def test_a_mounted_environment_outlives_slurm_s_warnings(venv: Path, tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip(f"nothing can be mounted here with {program}")
    image = packed(venv, "squashfs")
    pack_environment(venv, None, "squashfs", lambda _: None, start="mount")
    only = bare_path(tmp_path / "only", program, "fusermount", "unsquashfs")
    base = tmp_path / "n1"
    try:
        prefix, value, told = enter(image, str(base), venv, PATH=only, SLURM_STEP_ID="3")
        assert f"it is mounted at {prefix}" in told and value == 42
        root = base / f"prime-hpc-{os.getuid()}"
        assert {path.name.partition("-")[0] for path in root.iterdir()} == {"env", "mnt"}
        assert not (root / f"env-{PackFacts.read(image).hash}").exists(), "nothing is unpacked"
        (daemon,) = [p for p in psutil.process_iter(["cmdline"]) if prefix in (p.info["cmdline"] or [])]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            daemon.send_signal(number)
        time.sleep(0.5)
        assert next(Path(prefix).glob("lib/python3*/site-packages/answer.py")).read_text() == "VALUE = 42\n"
        daemon.kill()
        daemon.wait(10)
        _, value, told = enter(image, str(base), venv, PATH=only, SLURM_STEP_ID="4")
        left = sorted(path.name for path in root.iterdir())
        assert value == 42 and "brought" not in told and Path(prefix).name not in left
        pack_environment(venv, None, "squashfs", lambda _: None)
        assert "/env-" in enter(image, str(base), venv, PATH=only)[0]
        flip(image)
        assert enter(image, str(tmp_path / "n2"), venv, PATH=only)[0] == str(venv)
    finally:
        unmount(base)


def test_a_pack_that_is_to_be_mounted_is_unpacked_where_it_cannot_be(venv: Path, tmp_path: Path) -> None:
    image = packed(venv, "squashfs")
    pack_environment(venv, None, "squashfs", lambda _: None, start="mount")
    bare = bare_path(tmp_path / "bare", "unsquashfs")
    prefix, value, told = enter(image, str(tmp_path / "n1"), venv, PATH=bare)
    assert "/env-" in prefix and value == 42 and "it cannot be mounted: no squashfuse" in told
    with pytest.raises(ConfigError, match="cannot be mounted"):
        pack_environment(venv, None, "tar.gz", lambda _: None, start="mount")


def test_a_node_without_room_or_a_directory_of_its_own(venv: Path, tmp_path: Path) -> None:
    pack = packed(venv, "tar.gz")
    root = tmp_path / "n1" / f"prime-hpc-{os.getuid()}"
    root.mkdir(parents=True)
    root.chmod(0o777)
    prefix, _, told = enter(pack, str(tmp_path / "n1"), venv)
    assert prefix == str(venv) and "not a directory of this user alone" in told
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    (tmp_path / "small").mkdir()
    words = f"mount -t tmpfs -o size=8k none {tmp_path}/small && exec sh {ENTER} {pack} {tmp_path}/small "
    words += f"{venv}/bin/python -P -c 'import sys; print(sys.prefix)'"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout.strip() == str(venv), done.stderr
    assert "is there room?" in done.stderr and "MiB free" in done.stderr


def test_a_changed_environment_is_packed_again_and_refused_before_the_queue(
    venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pack = packed(venv, "tar.gz")
    first = environment_hash(venv)
    capsys.readouterr()

    def findings() -> list[dict[str, Any]]:
        tree: dict[str, Any] = {"name": "r", "output_dir": str(tmp_path / "out"), "launch": "slurm", "kind": "sft"}
        tree |= {"slurm": {"gpus_per_node": 0, "env_pack": str(pack)}, "sft": {"data": {"type": "fake"}}}
        (tmp_path / "exp.yaml").write_text(yaml.safe_dump(tree))
        main(["lint", str(tmp_path / "exp.yaml"), "--json"])
        found = json.loads(capsys.readouterr().out)
        return [row for row in _rows(found) if row["code"] == "PH333"]

    assert findings() == []
    assert main(["env", "show", str(pack)]) == 0 and "of this environment as it is" in capsys.readouterr().out
    record = next(venv.glob("lib/python3*/site-packages/*.dist-info/RECORD"))
    record.write_text("answer.py,sha256=y,12\n")
    assert environment_hash(venv) != first
    (row,) = findings()
    assert row["severity"] == "error" and "packages were changed since" in row["message"]
    change("venv", "/other/venv")(pack)
    assert "it was made of /other/venv" in findings()[0]["message"]
    assert main(["env", "show", str(pack)]) == 1
    assert "not of" in capsys.readouterr().out
    assert main(["env", "pack", "--format", "tar.gz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == environment_hash(venv)
    assert findings() == []
    change("machine", "riscv128")(pack)
    assert "was made for riscv128" in findings()[0]["message"]
    cut(pack)
    assert "bytes, not" in findings()[0]["message"]
    forget(pack)
    assert "cannot be read" in findings()[0]["message"]


def _rows(found: Any) -> list[dict[str, Any]]:
    """Findings, however deep lint's document has them."""
    if isinstance(found, dict) and "code" in found:
        return [found]
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return [row for one in inner for row in _rows(one)]


def test_what_cannot_be_packed(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refused(*words: str, code: int, said: str) -> None:
        assert main(["env", *words]) == code
        assert said in capsys.readouterr().err

    refused("pack", "--format", "zip", code=2, said="squashfs, tar.zst, tar.gz")
    refused("pack", "--output", str(venv / "x.tar.gz"), "--format", "tar.gz", code=2, said="in the environment itself")
    refused("show", str(tmp_path / "none"), code=2, said="no such file")
    refused("unpack", code=2, said="say env pack")
    (tmp_path / "file").touch()
    refused("pack", "--output", str(tmp_path / "file" / "x"), "--format", "tar.gz", code=1, said="")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", bare_path(tmp_path / "bin"))
        refused("pack", "--format", "squashfs", code=2, said="needs mksquashfs, which is not on PATH; there is tar.gz")
        assert main(["env", "pack"]) == 0, "what there is will do"
    assert (tmp_path / "venv.tar.gz").exists()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    refused("pack", code=2, said="is no virtual environment")


def test_the_batch_script_and_the_steps_begin_with_it(
    venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pack = packed(venv, "tar.gz")
    tree: dict[str, Any] = {"name": "r", "output_dir": str(tmp_path / "out"), "launch": "slurm", "kind": "sft"}
    tree |= {"slurm": {"gpus_per_node": 0, "env_pack": str(pack)}, "sft": {"data": {"type": "fake"}}}
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(tree))
    capsys.readouterr()
    assert main(["render", str(tmp_path / "exp.yaml")]) == 0
    script = capsys.readouterr().out
    assert f"exec sh {ENTER} {pack} '' {sys.executable} -P -m prime_hpc.launch.job" in script


def test_what_a_killed_pack_left_is_removed_and_what_another_makes_is_not(venv: Path) -> None:
    name = f"{venv.name.lstrip('.')}.tar.gz"
    left, its_log, made, other = (
        venv.with_name(f".tmp-{text}") for text in (f"1-{name}", f"1-{name}.log", f"2-{name}", "1-other.tar.gz")
    )
    for path in (left, its_log, made, other):
        path.write_bytes(b"half")
    for path in (left, its_log, other):
        os.utime(path, (0, path.stat().st_mtime - 2 * LEFT_AFTER_S))
    said: list[str] = []
    pack_environment(venv, None, "tar.gz", said.append)
    assert [path.exists() for path in (left, its_log, made, other)] == [False, False, True, True]
    assert sum("removed" in line for line in said) == 2


def test_two_at_once_each_make_a_whole_pack(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second took away what the first had half written, which ended in a traceback."""
    run, turns = env_pack._run, []

    def in_between(kind: str, folder: Path, part: Path) -> None:
        run(kind, folder, part)
        turns.append(part)
        if len(turns) == 1:
            pack_environment(venv, None, kind, lambda _: None)

    monkeypatch.setattr(env_pack, "_run", in_between)
    pack, facts = pack_environment(venv, None, "tar.gz", lambda _: None)
    assert len(turns) == 2 and PackFacts.read(pack) == facts and facts.size == str(pack.stat().st_size)
    assert not [path for path in pack.parent.iterdir() if path in turns]
