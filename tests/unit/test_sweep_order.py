"""What of a sweep waits for what: the throttle of arrays, lanes of het jobs, over several submits."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.launch.resume import load_to_resume
from prime_hpc.launch.submission import submit as submit_run
from prime_hpc.launch.sweep.queue import _lanes
from prime_hpc.launch.sweep.state import SubmitRow, read_sweep
from prime_hpc.slurm.submission_record import check_in
from prime_hpc.store.run_dirs import read_record
from prime_hpc.store.run_paths import RunPaths
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_slurm import FakeSlurm
from tests.support.sweeps import make_experiment, write_sweep
from tests.unit.test_sweep_queue import ended, submit

RL = """
kind: rl
orchestrator: {batch_size: 16, rollouts_per_example: 4, sampling: {max_tokens: 16}, env: [{id: reverse-text}]}
inference: {data_parallel_size: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_experiment(tmp_path)


def make_het(folder: Path, more: str = "") -> None:
    """The experiment is RL in a heterogeneous job, whose points are jobs of their own."""
    (folder / "site.yaml").write_text("name: test\nscratch: /\ndevice: cpu\n")
    het = f"layout: het, {more}site: {folder / 'site.yaml'}"
    text = (folder / "exp.yaml").read_text().replace("kind: sft\n", "").replace("gpus_per_node: 0", het)
    (folder / "exp.yaml").write_text(text + RL)


@pytest.mark.exhaustive
def test_the_throttle_holds_over_submits(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, "seeds: 2\nthrottle: 1\n"))
    first = slurm.jobs()[0]["id"]
    report = submit(write_sweep(folder, "seeds: 4\nthrottle: 1\n"))
    assert [part["after"] for part in report.parts] == [[first]]
    assert slurm.jobs()[1]["dependency"] == f"afterany:{first}"
    submit(write_sweep(folder, "seeds: 5\n"))
    assert slurm.jobs()[2]["dependency"] is None


def test_own_dependency_is_kept(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, "seeds: 1\nthrottle: 1\noverrides: {slurm.dependency: 'afterok:5'}"))
    submit(write_sweep(folder, "seeds: 2\nthrottle: 1\noverrides: {slurm.dependency: 'afterok:5'}"))
    assert [job["dependency"] for job in slurm.jobs()] == ["afterok:5", f"afterok:5,afterany:{slurm.jobs()[0]['id']}"]


def test_a_roles_own_dependency_is_kept_too(slurm: FakeSlurm, folder: Path) -> None:
    for seeds in (1, 2):
        submit(
            write_sweep(folder, f"seeds: {seeds}\nthrottle: 1\noverrides: {{slurm.trainer.dependency: 'afterok:5'}}")
        )
    assert [job["dependency"] for job in slurm.jobs()] == ["afterok:5", f"afterok:5,afterany:{slurm.jobs()[0]['id']}"]


@pytest.mark.parametrize("whose", ["slurm", "slurm.trainer"])
def test_a_point_that_has_begun_waits_no_more_for_what_it_waited_for(
    slurm: FakeSlurm, folder: Path, whose: str
) -> None:
    """Slurm 24.11 and 26.05 refuse `afterok` of a job that they have forgotten."""
    path = write_sweep(folder, f"seeds: 2\noverrides: {{{whose}.dependency: 'afterok:5'}}")

    def again(*flags: str) -> list[tuple[str, str | None]]:
        before, sweep = slurm.jobs(), read_sweep(folder / "out" / "s")
        ended(sweep.run_dir(sweep.rows[0]), "failed", f"{sweep.last_submits()[0].job_id}_0")
        for job in before:
            slurm.change(job["id"], state="FAILED")
        submit(path, *flags)
        return [(job["array"], job["dependency"]) for job in slurm.jobs()[len(before) :]]

    submit(path)
    begun, waits = ("0", None), ("1", "afterok:5")
    assert again() == [begun, waits] == again()
    assert again(f"--{whose}.dependency", "afterok:9") == [("0-1", "afterok:9")]
    assert again(f"--{whose}.dependency", "afterok:9") == [begun, ("1", "afterok:9")]


def test_a_point_that_was_resumed_alone_waits_no_more_either(slurm: FakeSlurm, folder: Path) -> None:
    path = write_sweep(folder, "seeds: 1\noverrides: {slurm.dependency: 'afterok:5', ckpt.interval: 2}")
    submit(path)
    sweep = read_sweep(folder / "out" / "s")
    point = sweep.run_dir(sweep.rows[0])

    def end() -> None:
        slurm.change(slurm.jobs()[-1]["id"], state="FAILED")
        ended(point, "failed", str((read_record(point) or {})["job_id"]))

    end()
    make_checkpoint(RunPaths(point), 2, kind="sft")
    submit_run(load_to_resume(point, []))
    end()
    submit(path)
    assert [job["dependency"] for job in slurm.jobs()] == ["afterok:5", None, None]


def test_one_of_several_and_the_jobs_before_is_nothing_that_slurm_can_wait_for(slurm: FakeSlurm, folder: Path) -> None:
    """It takes `a?b,c` for a?b?c: the throttle would be lost without a word."""
    either = "overrides: {slurm.dependency: 'afterok:5?afterok:6'}"
    submit(write_sweep(folder, f"seeds: 1\nthrottle: 1\n{either}"))
    with pytest.raises(ConfigError, match=r"slurm.dependency: afterok:5\?afterok:6: .*--feed"):
        submit(write_sweep(folder, f"seeds: 2\nthrottle: 1\n{either}"))
    assert [job["dependency"] for job in slurm.jobs()] == ["afterok:5?afterok:6"]


def test_het_points_go_into_lanes(slurm: FakeSlurm, folder: Path) -> None:
    make_het(folder)
    report = submit(write_sweep(folder, "seeds: 5\nlanes: 2\n"))
    ids = [job["id"] for job in slurm.jobs()]
    assert [job["dependency"] for job in slurm.jobs()] == [None, None, *(f"afterany:{i}" for i in ids[:3])]
    assert [part["lane"] for part in report.parts] == [0, 1, 0, 1, 0]
    assert all(job["array"] is None and job["size"] == 2 for job in slurm.jobs())
    sweep = read_sweep(folder / "out" / "s")
    assert json.loads((sweep.dir / "seed3" / "submit.json").read_text())["job_id"] == ids[3]
    # one lane is empty, the other's last job waits: a new point goes to the empty one, the next behind the tail
    for index in (0, 1, 2, 4):
        ended(sweep.run_dir(sweep.rows[index]), "completed", ids[index])
        slurm.forget(ids[index])
    submit(write_sweep(folder, "seeds: 7\nlanes: 2\n"))
    assert [job["dependency"] for job in slurm.jobs()[1:]] == [None, f"afterany:{ids[3]}"]


def test_many_points_go_into_many_lanes_by_a_few_calls_each() -> None:
    jobs: list[Any] = [(SimpleNamespace(row=SimpleNamespace(index=n), sent=None), None) for n in range(400)]
    live = [SubmitRow("t", "job", "sent", 0.0, [n], job_id=str(n), lane=n) for n in (0, 1, 1, 3)]
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        parts = _lanes(jobs, live, 200, before=0)
    finally:
        sys.setprofile(None)
    assert [part.lane for part in parts[:198]] == [2, *range(4, 200), 0]  # the empty ones, then the shorter ones
    assert [part.lane for part in parts[198:200]] == [3, 2] and parts[199].after_part == 0
    assert [part.after for part in parts[197:199]] == [["0"], ["3"]]
    assert calls["call"] < 20 * len(jobs)  # with a look at every lane for every job it was 80,000


def test_a_lanes_tail_is_the_job_sent_last_whatever_the_clocks_of_hosts_say(slurm: FakeSlurm, folder: Path) -> None:
    make_het(folder)
    submit(write_sweep(folder, "seeds: 2\nlanes: 1\n"))
    log = folder / "out" / "s" / "submits.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row | {"time": row["time"] + 300 * (row["token"] == rows[0]["token"])} for row in rows]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    submit(write_sweep(folder, "seeds: 3\nlanes: 1\n"))
    _, second, third = slurm.jobs()
    assert third["dependency"] == f"afterany:{second['id']}"


def test_a_lane_waits_for_the_job_in_which_its_point_is_now(slurm: FakeSlurm, folder: Path) -> None:
    """The first one has ended; Slurm takes a job of which it knows nothing any more for no dependency at all."""
    make_het(folder, "restart: {how: successor}, ")
    submit(write_sweep(folder, "seeds: 1\nlanes: 1\n"))
    (first,) = slurm.jobs()
    run_dir = folder / "out" / "s" / "seed0"
    later = slurm.add(state="RUNNING", nodes="n1", comment=first["comment"], size=2)
    check_in(run_dir, {**first["environ"], "SLURM_JOB_ID": later})
    slurm.forget(first["id"])
    submit(write_sweep(folder, "seeds: 2\nlanes: 1\n"))
    assert slurm.jobs()[-1]["dependency"] == f"afterany:{later}"
