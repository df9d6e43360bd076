"""Traces of chosen steps, and what is written where a collective hangs or memory runs out."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from prime_hpc.config.sections.trainer import ProfileConfig
from prime_hpc.trainer.profiling import StepProfiler, record_collectives, snapshot_when_out_of_memory


def steps(profiler: StepProfiler, last: int) -> None:
    """A loop of `last` steps, each of which multiplies matrices of its own width."""
    for step in range(1, last + 1):
        profiler.begin(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(4, step) @ torch.ones(step, 4)
        profiler.end(step)
    profiler.close()


def names(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    steps(StepProfiler(ProfileConfig(first_step=2, last_step=3, ranks=[0, 5]), tmp_path / "new", 5), 5)
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "steps_2-3_rank_5.json.gz"
    found = names(path)
    assert {"step 2", "step 3", "aten::mm"} <= found and not {"step 1", "step 4"} & found


def test_a_loop_that_ends_early_leaves_what_it_has(tmp_path: Path) -> None:
    steps(StepProfiler(ProfileConfig(first_step=2, last_step=9), tmp_path, 0), 3)
    [path] = tmp_path.iterdir()
    assert {"step 2", "step 3"} <= names(path)


def test_runs_that_take_turns_trace_each_step_apart(tmp_path: Path) -> None:
    """One profiler that began beside another's ended the process, and with it all runs of the trainer."""
    config = ProfileConfig(first_step=1, last_step=2)
    profilers = [StepProfiler(config, tmp_path / name, 0, apart=True) for name in ("run_a", "run_b")]
    for step in (1, 2, 3):
        for number, profiler in enumerate(profilers):
            profiler.begin(step)
            with torch.profiler.record_function(f"step {step} of {number}"):
                torch.ones(4, step) @ torch.ones(step, 4)
            profiler.end(step)
    for number, name in enumerate(("run_a", "run_b")):
        first, second = sorted((tmp_path / name).iterdir())
        assert (first.name, second.name) == ("steps_1-1_rank_0.json.gz", "steps_2-2_rank_0.json.gz")
        assert f"step 1 of {number}" in names(first) and f"step 1 of {1 - number}" not in names(first)


@pytest.mark.parametrize("config", [None, ProfileConfig(first_step=1, last_step=2, ranks=[1])])
def test_others_trace_nothing(config: ProfileConfig | None, tmp_path: Path) -> None:
    steps(StepProfiler(config, tmp_path, 0), 3)
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    steps(StepProfiler(ProfileConfig(first_step=1, last_step=1), tmp_path / "file", 0), 2)


def test_steps_in_order() -> None:
    with pytest.raises(ValidationError, match=r"last_step \(2\) comes before first_step \(3\)"):
        ProfileConfig(first_step=3, last_step=2)


def test_the_flight_recorder_writes_into_the_run(tmp_path: Path) -> None:
    environ = {"TORCH_FR_BUFFER_SIZE": "7"}
    record_collectives(tmp_path, environ)
    assert environ == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl_trace_rank_"),
    }


def test_memory_is_written_once_when_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def dump(filename: str) -> None:
        asked.append(filename)
        Path(filename).touch()

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    observe = snapshot_when_out_of_memory(tmp_path, 3)
    observe(0, 10, 20, 5)
    observe(0, 10, 20, 5)
    assert asked == [str(tmp_path / "memory_rank_3.pickle")]
