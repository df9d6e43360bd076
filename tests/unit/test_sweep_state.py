"""A sweep's directory: stable indices, resubmits, array tasks, the state of every point."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, load_run, write_snapshot
from prime_hpc.config.snapshot import share
from prime_hpc.launch.monitor.run_facts import Queue
from prime_hpc.launch.sweep.progress import PointView, counted, look
from prime_hpc.launch.sweep.resolve import Point, load_base, resolve_points
from prime_hpc.launch.sweep.results import unknown_metric
from prime_hpc.launch.sweep.spec import SweepFile
from prime_hpc.launch.sweep.state import Sweep, merge_points, new_submit, point_run_dir, read_sweep
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.slurm.submission_record import write_record
from prime_hpc.store.run_dirs import read_record
from tests.support.sweeps import make_experiment, write_sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    folder = tmp_path / "sweep"
    folder.mkdir()
    return Sweep(folder)


def point(name: str, hash_: str | None = None, reason: str | None = None, **values: object) -> Point:
    return Point(name, values, hash_, None, reason)


def merged(sweep: Sweep, *points: Point) -> list[tuple[int, str]]:
    rows = merge_points(sweep, points)
    sweep.write_points()
    return [(row.index, row.run_dir) for row, _ in rows]


def sent(sweep: Sweep, *indices: int, kind: str = "array", job_id: str = "7", **facts: object) -> None:
    sweep.update(new_submit(kind, indices), state="sent", job_id=job_id, **facts)


def test_points_keep_their_index_and_new_ones_are_appended(sweep: Sweep) -> None:
    assert merged(sweep, point("a", "1" * 32), point("b", "2" * 32)) == [(0, "a"), (1, "b")]
    sent(sweep, 0, 1)
    again = read_sweep(sweep.dir)
    assert merged(again, point("c", "3" * 32), point("b", "2" * 32)) == [(2, "c"), (1, "b")]
    assert [(row.index, row.current) for row in read_sweep(sweep.dir).rows] == [(0, False), (1, True), (2, True)]
    assert merged(read_sweep(sweep.dir), point("new name", "1" * 32)) == [(0, "a")]  # known by its hash


def test_a_name_of_another_experiment_is_not_taken(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    sent(sweep, 0)
    assert merged(sweep, point("a", "2" * 32)) == [(1, "a-22222222")]
    assert merged(sweep, point("a", "2" * 32)) == [(1, "a-22222222")]
    assert merged(sweep, point("a", "1" * 32)) == [(0, "a")]


def test_what_was_never_sent_is_replaced_in_its_place(sweep: Sweep) -> None:
    bad = point("b", None, "wrong")
    assert merged(sweep, point("a", "1" * 32), bad, point("c", "3" * 32)) == [(0, "a"), (1, "b"), (2, "c")]
    sent(sweep, 0, 2)
    assert merged(sweep, point("a", "1" * 32), point("b", "2" * 32), point("c", "3" * 32)) == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert [row.reason for row in read_sweep(sweep.dir).rows] == [None, None, None]


def test_a_point_that_becomes_invalid_keeps_the_earlier_one(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    sent(sweep, 0)
    merged(sweep, point("a", None, "wrong"))
    assert [(row.index, row.hash, row.current) for row in sweep.rows] == [(0, "1" * 32, False), (1, None, True)]
    put_run(sweep, "a", attempts=[{"outcome": "completed"}])
    assert [(view.state, view.note) for view in views(sweep).values()] == [("invalid", "wrong")]
    assert merged(sweep, point("a", None, "wrong")) == [(1, "a-invalid")]
    assert merged(sweep, point("a", "2" * 32)) == [(1, "a-22222222")]
    assert len({row.run_dir for row in sweep.rows}) == 2


def test_two_points_that_swap_names_stay_apart(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32), point("b", "2" * 32))
    assert sorted(merged(sweep, point("b", "1" * 32), point("a", "2" * 32))) == [(0, "a"), (1, "b")]
    assert sorted(index for index, _ in merged(sweep, point("b", "1" * 32), point("a", "3" * 32))) == [0, 2]


def test_task_finds_its_run_directory(sweep: Sweep) -> None:
    merged(sweep, *(point(f"p{i}", f"{i:032d}") for i in range(6)))
    assert point_run_dir(sweep.dir, 4, {}) == sweep.dir / "p4"
    block = sweep.array_of(4)
    assert block != sweep.dir
    assert point_run_dir(block, 1, {}) == sweep.dir / "p5"
    assert sweep.array_of(0) == sweep.dir
    for folder, index in ((sweep.dir, 6), (block, 2), (sweep.dir, -1)):
        with pytest.raises(ConfigError, match="there is no point"):
            point_run_dir(folder, index, {})
    with pytest.raises(ConfigError, match="is it a sweep"):
        point_run_dir(sweep.dir / "p4", 0, {})


def test_log_of_a_task_is_found_in_its_run_directory(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    (sweep.dir / "a").mkdir()
    (sweep.dir / "logs").mkdir()
    (sweep.dir / "logs" / "slurm-7_0.out").write_text("text")
    environ = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    for _ in ("first attempt", "second attempt"):
        assert point_run_dir(sweep.dir, 0, environ) == sweep.dir / "a"
    assert (sweep.dir / "a" / "logs" / "slurm-7_0.out").read_text() == "text"


def test_task_of_a_submission_that_was_given_up_ends(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32), point("b", "2" * 32))
    late = new_submit("array", [0, 1])
    sweep.update(late, state="failed")
    newer = new_submit("array", [0])
    sweep.update(newer, state="sent", job_id="9")
    environ = {"PRIMEHPC_SUBMISSION": f"{late.token} {sweep.dir}"}
    with pytest.raises(ConfigError, match="submitted again, as job 9"):
        point_run_dir(sweep.dir, 0, environ)
    assert point_run_dir(sweep.dir, 1, environ) == sweep.dir / "b"
    assert point_run_dir(sweep.dir, 0, {"PRIMEHPC_SUBMISSION": f"{newer.token} {sweep.dir}"}) == sweep.dir / "a"


def test_what_snapshots_share_changes_no_word_of_them(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("inference: true\nckpt: true\norchestrator: {env: [{id: reverse-text}]}\n")
    path = tmp_path / "s.yaml"
    path.write_text("experiment: exp.yaml\naxes: {product: {trainer.optim.lr: [1.0e-5, 1], ckpt: [true, null]}}\n")
    shared = share([], tmp_path)
    for point in resolve_points(load_base(path, [], {})):
        assert point.loaded is not None
        experiment = point.loaded.experiment
        write_snapshot(experiment, tmp_path / "shared", [], shared)
        write_snapshot(experiment, tmp_path / "alone", [])
        for name in ("run.yaml", "configs/trainer.toml", "configs/orchestrator.toml", "configs/inference.toml"):
            assert (tmp_path / "shared" / name).read_text() == (tmp_path / "alone" / name).read_text()
        assert load_run(tmp_path / "shared") == experiment
    lock = tmp_path / "shared" / "lock.json"
    assert lock.samefile(tmp_path / "lock.json")
    share([], tmp_path)  # a later submit: the earlier points keep theirs
    assert not lock.samefile(tmp_path / "lock.json")
    assert json.loads(lock.read_text())["command"] == []


def test_names_of_any_script_survive(sweep: Sweep) -> None:
    odd = "a\u2028b'ü"
    merged(sweep, point(odd, "1" * 32, text="x\ny"), point("b", "2" * 32))
    assert [row.name for row in read_sweep(sweep.dir).rows] == [odd, "b"]
    assert point_run_dir(sweep.dir, 1, {}) == sweep.dir / "b"


def test_damaged_state_is_told(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32), point("b", "2" * 32))
    path = sweep.dir / "points.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[1]}\n{lines[0]}\n")
    with pytest.raises(ConfigError, match=r"points.jsonl:1: holds point 1"):
        read_sweep(sweep.dir)
    path.write_text(lines[0][:20])
    with pytest.raises(ConfigError, match="damaged"):
        read_sweep(sweep.dir)


def put_run(sweep: Sweep, name: str, *, record: dict | None = None, attempts: list[dict] = []) -> None:  # noqa: B006
    run_dir = sweep.dir / name
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text("max_steps: 4\n")
    if record is not None:
        (run_dir / "submit.json").write_text(json.dumps(record))
    rows = [
        {"attempt": i, "began": 1.0, "host": "h", "pid": 1, "ended": 2.0, **row} for i, row in enumerate(attempts, 1)
    ]
    (run_dir / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def views(sweep: Sweep) -> dict[str, PointView]:
    return {view.row.name: view for view in look(sweep, ask=lambda wanted, by_token: Queue())}


def test_states_of_points(sweep: Sweep) -> None:
    names = ("bad", "new", "done", "crashed", "stopped", "cut", "cancelled", "gone", "refused")
    merged(sweep, *(point(n, f"{i:032d}" if i else None, None if i else "wrong") for i, n in enumerate(names)))
    now = time.time()
    job = {"state": "sent", "job_id": "7_1", "token": "t", "time": now - 5}
    put_run(sweep, "done", record=job, attempts=[{"outcome": "failed"}, {"outcome": "completed", "ended": now}])
    put_run(sweep, "crashed", record=job, attempts=[{"outcome": "failed", "cause": "no space", "ended": now}])
    put_run(sweep, "stopped", record=job, attempts=[{"outcome": "stopped", "ended": now}])
    put_run(sweep, "cut", record=job, attempts=[{"outcome": "interrupted", "ended": now}])
    put_run(sweep, "cancelled", record=job)
    put_run(sweep, "gone", record=job)
    sent(sweep, *range(2, 8))
    sweep.update(new_submit("cancel", [6]), state="sent")
    sweep.update(new_submit("array", [8]), state="failed", error="Invalid qos")
    found = views(sweep)
    assert {name: view.state for name, view in found.items()} == {
        "bad": "invalid",
        "new": "missing",
        "done": "completed",
        "crashed": "failed",
        "stopped": "stopped",
        "cut": "stopped",
        "cancelled": "stopped",
        "gone": "lost",
        "refused": "failed",
    }
    assert found["bad"].note == "wrong"
    assert found["refused"].note == "Invalid qos"
    assert counted(found.values()) == "1 invalid, 1 missing, 1 completed, 3 stopped, 2 failed, 1 lost"


def test_a_submit_without_an_answer_is_not_taken_for_missing(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    submit = new_submit("array", [0])
    sweep.record(submit)
    assert views(read_sweep(sweep.dir))["a"].state == "submitting"
    read = read_sweep(sweep.dir).submits[0]
    assert (read.token, read.state, read.points) == (submit.token, "sending", [0])


def test_a_torn_submit_line_is_left_out_and_the_next_one_stands(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    sent(sweep, 0)
    with (sweep.dir / "submits.jsonl").open("a") as file:
        file.write('{"token": "x", "kin')
    again = read_sweep(sweep.dir)
    assert [s.job_id for s in again.submits] == ["7"]
    sent(again, 0, job_id="8")
    assert [s.job_id for s in read_sweep(sweep.dir).submits] == ["7", "8"]


def test_a_cancel_before_the_last_submit_counts_no_more(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    sent(sweep, 0)
    sweep.update(new_submit("cancel", [0]), state="sent")
    sent(sweep, 0, job_id="8")
    put_run(sweep, "a", record={"state": "sent", "job_id": "8_0", "token": "t", "time": time.time()})
    assert views(sweep)["a"].state == "lost"


def test_whole_way_through_files(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(f"output_dir: {tmp_path}\norchestrator: {{env: [{{id: reverse-text}}]}}\n")
    path = tmp_path / "s.yaml"
    path.write_text("experiment: exp.yaml\nseeds: [0, 1]\n")
    sweep = Sweep(tmp_path / "s")
    sweep.dir.mkdir()
    merge_points(sweep, resolve_points(load_base(path, [], {})))
    sweep.write_points()
    path.write_text("experiment: exp.yaml\nseeds: [2, 1, 0]\n")
    rows = merge_points(again := read_sweep(sweep.dir), resolve_points(load_base(path, [], {})))
    assert [(row.index, row.name) for row, _ in rows] == [(2, "seed2"), (1, "seed1"), (0, "seed0")]
    assert [row.values for row in again.rows] == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


def test_points_that_evaluate_adapters_have_room_for_them_and_the_models_own_context(tmp_path: Path) -> None:
    model = make_experiment(tmp_path) / "model"  # of 512 positions
    for step in (10, 20):
        version = tmp_path / "run" / "weights" / f"step_{step:06d}"
        version.mkdir(parents=True)
        (version / "adapter_config.json").write_text(json.dumps({"r": step}))
        (version / "manifest.json").touch()
    (tmp_path / "exp.yaml").write_text(
        f"kind: eval\nlaunch: local\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\ninference: {{}}\n"
        f"eval: {{environment_ids: [reverse-text], weights_dir: {tmp_path / 'run'}}}\n"
    )
    path = write_sweep(tmp_path, "axes: {product: {eval.steps: [[10], [20], [30]]}}\n")
    report = submit_sweep(load_base(path, [], {}), dry_run=True)
    made = [job.experiment for job in report.jobs]
    assert [(one.model.lora and one.model.lora.rank, one.seq_len) for one in made] == [(10, 512), (20, 512)]
    assert [str(row.reason).partition(";")[0] for row in report.invalid] == [
        f"eval.steps: {tmp_path / 'run' / 'weights'} holds no step 30"
    ]


def test_a_metric_that_no_row_will_have_is_told_at_submission(tmp_path: Path) -> None:
    """`sweep results` said so, when all was over."""
    make_experiment(tmp_path)

    def told(metric: str) -> list[str]:
        path = write_sweep(tmp_path, f"seeds: 2\nmetric: {metric}\noverrides: {{launch: local}}\n")
        found = submit_sweep(load_base(path, [], {}), dry_run=True).warnings
        return [text for text in found if text.startswith("metric: ")]

    assert not any(map(told, ["loss", "time/step", "eval/held/loss", "tokens_per_s"]))
    (text,) = told("token_per_s")
    assert "no run of kind sft is known to write 'token_per_s'" in text and "did you mean tokens_per_s" in text
    assert len(told("reward/mean")) == 1, "SFT plays no episodes"
    names = SweepFile(name="s", experiment="e", metric="reward/men")
    assert "did you mean reward/mean" in str(unknown_metric(names, "rl")) and unknown_metric(names, "eval") is None


def test_the_later_submit_counts_whatever_the_clocks_of_their_hosts_say(sweep: Sweep) -> None:
    """A login node whose clock is five minutes ahead sends a point and cancels it; another one sends it again."""
    merged(sweep, point("a", "1" * 32))
    for kind, job_id in (("array", "7"), ("cancel", None)):
        ahead = replace(new_submit(kind, [0]), time=time.time() + 300)
        sweep.update(ahead, state="sent", job_id=job_id)
    sent(sweep, 0, job_id="8")
    again = read_sweep(sweep.dir)
    assert again.last_submits()[0].job_id == "8"
    put_run(sweep, "a", record={"state": "sent", "job_id": "8_0", "token": "t", "time": time.time()})
    assert views(again)["a"].state == "lost"
    sweep.update(new_submit("cancel", [0]), state="sent")
    assert views(read_sweep(sweep.dir))["a"].state == "stopped"


def test_a_task_opens_its_record_whatever_the_clocks_of_hosts_say(sweep: Sweep) -> None:
    merged(sweep, point("a", "1" * 32))
    ahead = {"state": "sent", "job_id": "7_0", "token": "old", "time": time.time() + 300, "array": str(sweep.dir)}
    put_run(sweep, "a", record=ahead)
    newer = new_submit("array", [0])
    sweep.update(newer, state="sent", job_id="8")
    ids = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "0"}
    environ = {"PRIMEHPC_SUBMISSION": f"{newer.token} {sweep.dir}", **ids}
    run_dir = point_run_dir(sweep.dir, 0, environ)
    assert (read_record(run_dir) or {})["token"] == newer.token
    write_record(run_dir, by_job=True, token="its successor's", job_id="9")
    point_run_dir(sweep.dir, 0, environ)
    assert (read_record(run_dir) or {})["job_id"] == "9", "its successor has the run"
