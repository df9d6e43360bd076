"""A RUN argument: a directory, a name under the outputs folder, or a job id."""

import json
import re
from pathlib import Path

import pytest

import prime_hpc
from prime_hpc.config import ConfigError, run_files
from prime_hpc.store.attempts import read_attempts, rewrite_row
from prime_hpc.store.run_dirs import (
    find_run,
    is_run,
    job_ids,
    list_runs,
    outputs_folder,
    read_json,
    read_rows,
    run_name,
)


def make(path: Path, job_id: str | None = None, *, attempts: list[str] | None = None, mark: str = "run.yaml") -> Path:
    path.mkdir(parents=True)
    (path / mark).write_text("max_steps: 3\n")
    if job_id is not None:
        (path / "submit.json").write_text(json.dumps({"state": "sent", "job_id": job_id, "successor": None}))
    rows = [{"attempt": i, "job_id": job} for i, job in enumerate(attempts or [], 1)]
    (path / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def outputs(tmp_path: Path) -> dict[str, str]:
    make(tmp_path / "outputs" / "reverse-text", "120", attempts=["120", "131"])
    make(tmp_path / "outputs" / "reverse-text-2", "140_3")
    make(tmp_path / "outputs" / "lr sweep" / "lr=0.1,ünï", "7")
    make(tmp_path / "outputs" / "a" / "same")
    make(tmp_path / "outputs" / "b" / "same")
    (tmp_path / "outputs" / "starter" / "model").mkdir(parents=True)
    (tmp_path / "outputs" / "plain.txt").write_text("x")
    return {"PRIMEHPC_OUTPUTS": str(tmp_path / "outputs")}


def test_runs_are_found_below_folders_and_nothing_else(outputs: dict[str, str]) -> None:
    folder = outputs_folder(outputs)
    names = {run_name(path, folder) for path in list_runs(folder)}
    assert names == {"reverse-text", "reverse-text-2", "lr sweep/lr=0.1,ünï", "a/same", "b/same"}
    assert list_runs(folder / "absent") == []
    assert outputs_folder({}) == Path("outputs")


def test_the_inside_of_a_run_and_hidden_folders_are_not_searched(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    make(run / "roles" / "trainer")
    make(tmp_path / ".trash" / "old")
    assert list_runs(tmp_path) == [run]


def test_a_submitted_sweep_is_a_folder_not_a_run(tmp_path: Path) -> None:
    point = make(tmp_path / "sweep" / "p0")
    (tmp_path / "sweep" / "submit.json").write_text("{}")
    assert is_run(tmp_path / "sweep")
    (tmp_path / "sweep" / "points.jsonl").write_text("")
    assert not is_run(tmp_path / "sweep")
    assert list_runs(tmp_path) == [point]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("reverse-text", "reverse-text"),
        ("lr sweep/lr=0.1,ünï", "lr=0.1,ünï"),
        ("lr=0.1,ünï", "lr=0.1,ünï"),
        ("120", "reverse-text"),
        ("131", "reverse-text"),
        ("131+1", "reverse-text"),
        ("140_3", "reverse-text-2"),
        ("7", "lr=0.1,ünï"),
    ],
)
def test_names_and_job_ids(outputs: dict[str, str], word: str, name: str) -> None:
    assert find_run(word, outputs).name == name


def test_a_directory_needs_no_outputs_folder(outputs: dict[str, str], tmp_path: Path) -> None:
    run = make(tmp_path / "elsewhere" / "run", mark="submit.json")
    assert find_run(str(run), outputs) == run


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("revers-text", "no run 'revers-text'; did you mean reverse-text"),
        ("999", "`scontrol show job 999` names the directory of another (StdOut)"),
        ("same", "several runs: a/same, b/same"),
        ("zzz", "holds 5 others"),
    ],
)
def test_what_is_not_there_is_said_with_what_is_near(outputs: dict[str, str], word: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_run(word, outputs)
    assert says in str(error.value)


def test_commands_that_are_named_can_be_pasted_where_paths_have_spaces(tmp_path: Path) -> None:
    (tmp_path / "my outputs" / "run").mkdir(parents=True)
    (tmp_path / "my outputs" / "run" / "run.yaml").write_text("name: run\n")
    with pytest.raises(ConfigError, match=re.escape(f"`prime-hpc status '{tmp_path}/my outputs'` lists them")):
        find_run("zzz", {"PRIMEHPC_OUTPUTS": str(tmp_path / "my outputs")})


def test_a_folder_is_no_run(outputs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run: it holds none of run.yaml"):
        find_run(str(tmp_path / "outputs" / "starter"), outputs)
    with pytest.raises(ConfigError, match="PRIMEHPC_OUTPUTS"):
        find_run("x", {"PRIMEHPC_OUTPUTS": str(tmp_path / "nowhere")})


def test_a_job_id_that_slurm_used_twice_means_the_newest_run(tmp_path: Path) -> None:
    import os

    old, new = make(tmp_path / "old", "16"), make(tmp_path / "new", "16")
    os.utime(old, (1, 1))
    assert find_run("16", {"PRIMEHPC_OUTPUTS": str(tmp_path)}) == new


def test_a_local_jobs_number_is_no_job_id(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "submit.json").write_text(json.dumps({"state": "local", "job_id": "4711"}))
    assert job_ids(run) == set()


def test_torn_and_strange_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert read_json(path) is None and read_rows(path) == []
    for text in ("", "{", "[1]", '"a"', "\x00\xff"):
        path.write_bytes(text.encode("latin-1"))
        assert read_json(path) is None
    path.write_text('{"attempt": 2, "a": 1}\nnull\n{"b": 1}\n{"attempt": 1}\n{"attempt": 2, "a": 3}\n{"attempt": 3, "a')
    assert [(row["attempt"], row.get("a")) for row in read_rows(path)] == [(1, None), (2, 3)]


def test_lines_that_are_no_attempts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / run_files.ATTEMPTS_JSONL
    path.write_text('{}\n[1]\n{"attempt": "x"}\n{"attempt": 1, "job_id": "7"}\n{"attempt": 2, "jo')
    assert read_attempts(path) == read_rows(path)
    assert [(row["attempt"], row["job_id"], row["ended"]) for row in read_rows(path)] == [(1, "7", None)]
    rewrite_row(path, {"attempt": 2})
    assert [row["attempt"] for row in read_rows(path)] == [1, 2]


def test_names_of_a_run_s_files_are_stated_once() -> None:
    stated = {name: value for name, value in vars(run_files).items() if name.isupper() and isinstance(value, str)}
    names = [value for value in stated.values() if value != run_files.STATUS_JSON]
    package = Path(prime_hpc.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py") if path.name != "run_files.py"}
    assert len(names) == 13
    assert not [(path.name, name) for path, text in texts.items() for name in names if f'"{name}"' in text]
