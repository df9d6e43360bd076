"""Stripes and room on Lustre, against an `lfs` on the PATH that answers in the words of the real one."""

import json
import sys
from pathlib import Path

import pytest

from prime_hpc.store.artifact import prepare_stage
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import lustre
from prime_hpc.store.io.lustre import GIB, MIB, Ost, full_osts, lack_of_room, osts, set_stripes, stripe_count
from prime_hpc.store.run_paths import RunPaths

LFS = f"""#!{sys.executable}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
with (here / "calls.jsonl").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
mode = (here / "mode").read_text() if (here / "mode").exists() else ""
verb = sys.argv[1]
if mode == "hangs":
    time.sleep(60)
if mode == "refuses" or (mode == "old" and "-E" in sys.argv):
    print(f"error: {{verb}}: invalid option -- 'E'" if mode == "old" else
          f"lfs {{verb}}: setstripe error for '{{sys.argv[-1]}}': Operation not permitted", file=sys.stderr)
    sys.exit(1)
if verb == "df":
    print('''UUID                   1K-blocks        Used   Available Use% Mounted on
scratch-MDT0000_UUID   3147746816   250000000  2600000000   9% {{at}}[MDT:0]
scratch-OST0000_UUID     10485760     9437184     1048576  90% {{at}}[OST:0]
scratch-OST0001_UUID     10485760    10275840      209920  98% {{at}}[OST:1]
scratch-OST0002_UUID     10485760     1048576     9437184  10% {{at}}[OST:2]
OST0003             : inactive device

filesystem_summary:      31457280    20761600    10695680  67% {{at}}'''.replace("{{at}}", sys.argv[-1]))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `lfs` before all others on the PATH; every path is on Lustre."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "lfs").write_text(LFS.replace("{{", "{").replace("}}", "}"))
    (folder / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(lustre, "mount_of", lambda path: ("lustre", "mds@o2ib:/scratch", "rw"))
    monkeypatch.setattr(lustre, "_given_up", set())
    return folder


def calls(fake: Path) -> list[list[str]]:
    path = fake / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_stripes_follow_the_size_and_come_before_the_files(fake: Path, tmp_path: Path) -> None:
    assert [stripe_count(size) for size in (0, 511 * MIB, 512 * MIB, 39 * GIB, 40 * GIB)] == [1, 1, 4, 4, -1]
    run = RunPaths(tmp_path / "run")
    stages = [
        prepare_stage(run.checkpoint_step(step), run=run, file_bytes=size)
        for step, size in ((1, MIB), (2, GIB), (3, 400 * GIB))
    ]
    assert all(stage.is_dir() and not list(stage.iterdir()) for stage in stages)
    prepare_stage(run.weights_step(1), run=run)  # nobody says how large
    small, large, huge = calls(fake)
    assert small == ["setstripe", "-c", "1", str(stages[0])]
    assert large == ["setstripe", "-E", "64M", "-c", "1", "-E", "-1", "-c", "4", str(stages[1])]
    assert huge[-3:] == ["-c", "-1", str(stages[2])]


def test_servers_without_progressive_layouts_get_a_plain_one(fake: Path, tmp_path: Path) -> None:
    (fake / "mode").write_text("old")
    set_stripes(tmp_path, GIB)
    assert [call[1] for call in calls(fake)] == ["-E", "-c"] and "setstripe" not in lustre._given_up


@pytest.mark.parametrize("mode", ["refuses", "hangs"])
def test_what_fails_is_said_once_and_not_tried_again(
    fake: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loguru import logger

    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING")
    monkeypatch.setattr(lustre, "TIMEOUT_S", 0.5 if mode == "hangs" else 15.0)
    (fake / "mode").write_text(mode)
    try:
        for _ in range(3):
            set_stripes(tmp_path, MIB)
            assert osts(tmp_path) == [] and lack_of_room(tmp_path, 2, GIB) is None and full_osts(tmp_path) is None
    finally:
        logger.remove(sink)
    words = {"refuses": "Operation not permitted", "hangs": "no answer within"}[mode]
    assert len(said) == 2 and all(words in line for line in said), said


def test_room_is_that_of_single_osts(fake: Path, tmp_path: Path) -> None:
    assert [(ost.name, ost.available // MIB) for ost in osts(tmp_path / "not" / "yet")] == [
        ("scratch-OST0000", 1024),
        ("scratch-OST0001", 205),
        ("scratch-OST0002", 9216),
    ]
    assert lack_of_room(tmp_path, 9, 400 * MIB) is None
    told = lack_of_room(tmp_path, 2, 6 * GIB)  # 2 GiB on each of the three: two of them cannot
    assert (
        told is not None and "do not fit the single OSTs, though 10.20 GiB are free" in told and "OST0001, 98%" in told
    )
    assert lack_of_room(tmp_path, 2, 300 * MIB, ask=lambda _: [Ost("one", GIB, 599 * MIB)]) is not None
    told = full_osts(tmp_path)
    assert told is not None and told.startswith("1 of 3 OSTs") and "scratch-OST0001: 98%" in told


def test_elsewhere_nothing_is_asked(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lustre, "mount_of", lambda path: ("ext4", "/dev/vda", "rw"))
    set_stripes(tmp_path, GIB)
    assert osts(tmp_path) == [] and lack_of_room(tmp_path, 10**6, 10**15) is None and calls(fake) == []


def test_a_save_that_fits_no_ost_is_refused_before_it_begins(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer, _Save
    from prime_hpc.trainer.rank_group import RankGroup

    run = RunPaths(tmp_path / "run")
    saver = Checkpointer.__new__(Checkpointer)
    saver._ranks, saver._incarnation, saver._paths = RankGroup(), 0, run
    saver._ranks.world_size = 2
    save = _Save(1, {}, None, tmp_path / "stage", run.checkpoint_step(1), 0.0)
    monkeypatch.setattr("prime_hpc.trainer.checkpointing.checkpointer.free_bytes", lambda path: 10**15)
    with pytest.raises(StoreError, match="do not fit the single OSTs.*choose another ckpt.path"):
        saver._open_stage(save, 6 * GIB)
    assert not run.checkpoints.exists()


def test_preflight_and_submit_look_too(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_hpc.config import Experiment
    from prime_hpc.launch import storage
    from prime_hpc.supervisor.preflight.node import node_facts

    facts = node_facts({"gpus_asked": 0, "ports": []}, tmp_path, 0.0, ask_osts=True)
    assert any("OSTs" in warning for warning in facts["warnings"]) and facts["problems"] == []
    assert not any("OSTs" in w for w in node_facts({"gpus_asked": 0, "ports": []}, tmp_path, 0.0)["warnings"])
    monkeypatch.setattr(storage, "weights_bytes", lambda _: 2 * GIB)
    exp = Experiment.model_validate({"output_dir": str(tmp_path), "ckpt": {}, "trainer": {"num_ranks": 2}})
    (problem,) = storage.storage_problems(exp, None, False)
    assert problem.key == "output_dir" and "do not fit the single OSTs" in str(problem)
