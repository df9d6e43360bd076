"""Traces: bounded, rotated, and never the run's problem."""

import json
from pathlib import Path

from prime_hpc.config.sections.orchestrator import TracesConfig
from prime_hpc.orchestrator.metrics import SampleLog
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.orchestrator.trace_log import TraceLog
from prime_hpc.store.run_paths import RunPaths
from tests.support.episodes import failed_episode, make_episode


def make_group(position: int) -> Group:
    return Group(Prompt(position, 0, position, position), 0, 0, [None, None])


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fates_are_told_and_files_rotated(tmp_path: Path) -> None:
    log = TraceLog(TracesConfig(keep_steps=2), RunPaths(tmp_path), ["a"], 7)
    for step in (1, 2, 3):
        log.rollout(step, make_group(step), 0, make_episode([0, 1]))
        log.rollout(step, make_group(step), 1, failed_episode())
        log.group(step, make_group(step), "stale")
    log.close()
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["step_000002.jsonl", "step_000003.jsonl"]
    good, failed, group = rows_of(files[-1])
    assert (good["usable"], failed["usable"], group["fate"]) == (True, False, "stale")
    assert good["versions"] == [0, 1] and good["incarnation"] == 7 and "samples" not in good


def test_an_attempt_that_resumes_below_the_newest_files_keeps_what_it_writes(tmp_path: Path) -> None:
    """The file of its own step was the oldest one, and removed as soon as it was opened."""
    for life, steps in ((1, (5, 6, 7)), (2, (4, 5))):
        log = TraceLog(TracesConfig(keep_steps=2), RunPaths(tmp_path), ["a"], life)
        for step in steps:
            log.group(step, make_group(step), "stale")
        log.close()
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == [f"step_00000{step}.jsonl" for step in (4, 5, 6, 7)]
    assert [[row["incarnation"] for row in rows_of(file)] for file in files] == [[2], [2], [1], [1]]


def test_a_step_s_file_is_bounded_also_over_lives(tmp_path: Path) -> None:
    config = TracesConfig(max_mib_per_step=0.002)
    for life in (1, 2):
        log = TraceLog(config, RunPaths(tmp_path), ["a"], life)
        for number in range(40):
            log.group(1, make_group(number), "dropped")
        assert log.num_left_out >= 20
        log.close()
    assert (tmp_path / "traces" / "step_000001.jsonl").stat().st_size <= 2098


def test_half_a_line_of_a_killed_attempt_costs_no_whole_one(tmp_path: Path) -> None:
    traces, samples = tmp_path / "traces" / "step_000001.jsonl", tmp_path / "samples.jsonl"
    traces.parent.mkdir()
    for path in (traces, samples):
        path.write_text('{"step": 1}\n{"step": 1, "promp')
    for _ in range(2):
        log = TraceLog(TracesConfig(), RunPaths(tmp_path), ["a"], 2)
        log.group(1, make_group(0), "dropped")
        log.close()
        rows = SampleLog(samples, 9)
        rows.write(1, [{"kind": "train"}])
        rows.close()
    for path in (traces, samples):
        _, torn, *whole = path.read_text().splitlines()
        assert torn == '{"step": 1, "promp' and len(whole) == 2
        assert [json.loads(line)["step"] for line in whole] == [1, 1]


def test_what_cannot_be_written_costs_traces_alone(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    log = TraceLog(TracesConfig(), RunPaths(tmp_path), ["a"], 1)
    log.group(1, make_group(0), "dropped")
    log.group(1, make_group(1), "dropped")
    assert log.num_left_out == 2
    log.close()
    (tmp_path / "traces").unlink()
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "step_000002.jsonl").symlink_to("/dev/full")
    log.group(2, make_group(0), "dropped")
    log.close()  # which writes it: at the end of a run too
