"""`prime-hpc export`: every token of the stored batches, as another reader sees them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.cli.common import step_range
from prime_hpc.cli.verbs.run import export, replay
from prime_hpc.config import ConfigError, Experiment, write_snapshot
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.run_paths import RunPaths
from tests.support.tiny_model import random_rank_batch

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    tree = {
        "name": "x",
        "output_dir": str(tmp_path),
        "orchestrator": {"env": [{"id": "reverse-text"}, {"id": "calculator", "name": "sums"}]},
    }
    write_snapshot(Experiment.model_validate(tree), tmp_path / "x", ["test"])
    return RunPaths(tmp_path / "x")


def store(paths: RunPaths, step: int, *, echo: bool = False) -> list[RankBatch]:
    first = random_rank_batch([[7, 12], [5]], seed=step, step=step)
    first.env_ids[1] = 1
    first.versions[first.versions != -1][:1] = step - 1
    if echo:
        first = replace(first, ce_weights=np.where(first.loss_mask, 0, 0.25).astype(np.float32))
    ranks = [first, random_rank_batch([[9], []], seed=100 + step, step=step)]
    write_batch(paths, step, ranks, state={"step": step})
    return ranks


def test_every_token_is_there(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    batches = {step: store(run, step, echo=step == 2) for step in (1, 2, 3)}
    assert export.run([str(run.root), "--json"], "prime-hpc export") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["num_steps"], said["num_sequences"], said["num_tokens"]) == (3, 12, 3 * 33)
    table = pq.read_table(said["path"])
    rows = table.to_pylist()
    assert [(r["step"], r["rank"], r["micro_batch"]) for r in rows[:4]] == [(1, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)]
    at = 0
    for step, ranks in batches.items():
        for rank, batch in enumerate(ranks):
            for s in range(batch.num_sequences):
                part, row = slice(*batch.seq_offsets[s : s + 2]), rows[at]
                at += 1
                assert (row["step"], row["policy_version"], row["rank"]) == (step, step - 1, rank)
                assert row["token_ids"] == batch.token_ids[part].tolist()
                assert row["loss_mask"] == batch.loss_mask[part].tolist()
                assert np.float32(row["logprobs"]).tolist() == batch.logprobs[part].tolist()
                assert row["versions"] == batch.versions[part].tolist()
                assert np.float32(row["advantages"]).tolist() == batch.advantages[part].tolist()
                wanted = None if batch.ce_weights is None else batch.ce_weights[part].tolist()
                assert wanted == (None if row["ce_weights"] is None else np.float32(row["ce_weights"]).tolist())
                assert np.float32(row["reward"]) == batch.rewards[s]
                assert row["env"] == ("sums" if batch.env_ids[s] == 1 else "reverse-text")
                assert row["num_tokens"] == part.stop - part.start
                assert row["num_loss_tokens"] == int(batch.loss_mask[part].sum())
                sampled = batch.versions[part][batch.versions[part] != -1]
                assert row["lag_max"] == (step - 1 - sampled.min() if len(sampled) else 0)
    assert at == len(rows)


def test_some_steps_into_a_file_of_choice(run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        store(run, step)
    target = tmp_path / "deep" / "file.parquet"
    command = [str(run.root), "--output", str(target), "--steps", "2:", "--compression", "none"]
    assert export.run(command, "prime-hpc export") == 0
    assert "8 sequences, 66 tokens of 2 steps" in capsys.readouterr().out
    assert set(pq.read_table(target)["step"].to_pylist()) == {2, 3}
    assert [p.name for p in target.parent.iterdir()] == ["file.parquet"]


@pytest.mark.parametrize(
    ("text", "meant"), [(None, (2, 9)), ("3:5", (3, 5)), ("3:", (3, 9)), (":5", (2, 5)), ("4", (4, 4)), ("5:3", (5, 3))]
)
def test_steps_are_read_alike_for_every_verb(text: str | None, meant: tuple[int, int]) -> None:
    assert step_range(text, [2, 3, 5, 9]) == meant


def test_a_replay_is_of_steps_in_a_row() -> None:
    there = [2, 3, 5, 9]
    assert replay._range("2:3", there) == (2, 3) and replay._range(None, there) == (2, 9)
    for wrong in ("3:5", "5:3", "4", "1:99999999999"):
        with pytest.raises(ConfigError, match=r"recorded are steps 2\.\.9"):
            replay._range(wrong, there)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "7:9"], "there are 1..1"),
        (["--steps", "x"], "must be A:B"),
        (["--steps", ":"], "must be A:B"),
        (["--steps", "²"], "must be A:B"),  # a digit to Python, and no number
        (["--compression", "lzma"], "must be one of zstd"),
        (["--frobnicate"], "unknown option --frobnicate; usage"),
        (["--step", "2"], r"unknown option --step \(did you mean --steps\?\)"),
    ],
)
def test_wrong_usage(run: RunPaths, flags: list[str], words: str) -> None:
    store(run, 1)
    with pytest.raises(ConfigError, match=words):
        export.run([str(run.root), *flags], "prime-hpc export")


def test_a_damaged_batch_is_named_and_nothing_is_left(run: RunPaths) -> None:
    store(run, 1)
    file = run.rollouts_step(1) / "rank_0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="rank_0001.safetensors: expected"):
        export.run([str(run.root)], "prime-hpc export")
    assert not list(run.root.glob("*parquet*")) and not list(run.root.glob(".tmp*"))


def test_a_full_disk_is_told_from_a_wrong_command(run: RunPaths, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    store(run, 1)
    mount = tmp_path / "mount"
    mount.mkdir()
    words = f"{sys.executable} -P -m prime_hpc.cli export {run.root} --output"
    script = f"mount -t tmpfs -o size=4k none {mount}; {words} {mount}/a.parquet; echo full $?; ls -A {mount}; "
    script += f"{words} {tmp_path}/b.parquet --steps 7; echo none $?"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked = ["unshare", "-Urm", "sh", "-c", script]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.stdout.splitlines() == ["full 1", "none 2"] and "disk full" in done.stderr, done.stdout + done.stderr
