"""`sweep submit --feed`: more points than the user may have in the queue, sent as slots come free. sbatch, squeue and
sacctmgr are stand-ins that keep a limit; the real ones are in tests/slurm.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_hpc.cli.verbs.experiment.sweep import run
from prime_hpc.config import ConfigError
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.sweep.feed_sweep import feed_sweep
from prime_hpc.launch.sweep.report import Report
from prime_hpc.launch.sweep.resolve import load_base
from prime_hpc.launch.sweep.state import read_sweep
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.slurm import sbatch_errors
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.queue_facts.submit_limits import is_over_limit, num_free, queued_parts, submit_limits
from prime_hpc.slurm.sbatch_errors import NothingQueued, SlurmRefused, job_without_answer
from tests.support.fake_slurm import FakeSlurm
from tests.support.sweeps import make_experiment, write_sweep

FULL = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_site(tmp_path, "sacct: false\nmax_submit_jobs: 3\n")
    return make_experiment(tmp_path, f"site: {tmp_path / 'site.yaml'}, ")


def write_site(folder: Path, text: str) -> None:
    (folder / "site.yaml").write_text(f"name: test\nscratch: /\n{text}")


class Pause:
    """What happens to the queue while the command waits; ends a command that waits for ever."""

    def __init__(self, slurm: FakeSlurm, folder: Path, *then: Callable[[], None], most: int = 3) -> None:
        self.slurm, self.folder, self.then, self.most, self.said = slurm, folder, list(then), most, list[str]()
        self.rounds = 0

    def __call__(self, seconds: float) -> None:
        self.rounds += 1
        assert self.rounds < 40, self.said
        assert self.active() <= self.most, "never more jobs in the queue than the limit"
        if self.then:
            self.then.pop(0)()
        else:
            self.end_all()

    def active(self) -> int:
        return sum(len(points(job["array"])) for job in self.slurm.jobs() if job["state"] == "PENDING")

    def end_all(self, outcome: str = "completed") -> None:
        """Every job of the sweep has run."""
        sweep = read_sweep(self.folder / "out" / "s")
        for submit in sweep.submits:
            job = next((job for job in self.slurm.jobs() if job["id"] == submit.job_id), None)
            if submit.state == "sent" and job is not None and job["state"] == "PENDING":
                self.slurm.change(job["id"], state="COMPLETED")
                for index in submit.points:
                    row = {"attempt": 1, "began": time.time(), "ended": time.time() + 1, "outcome": outcome}
                    row |= {"job_id": f"{job['id']}_{index - submit.first}", "host": "h", "pid": 1, "cause": "test"}
                    path = sweep.run_dir(sweep.rows[index]) / "attempts.jsonl"
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def points(array: str | None) -> list[int]:
    """Ids of an array as Slurm has it; of another job one."""
    ranges = [part.partition("-") for part in (array or "0").partition("%")[0].split(",")]
    return [i for low, _, high in ranges for i in range(int(low), int(high or low) + 1)]


def fed(path: Path, pause: Pause) -> Report:
    return feed_sweep(load_base(path, [], {}), say=pause.said.append, pause=pause)


def sent(folder: Path) -> list[int]:
    """Points in the order in which Slurm took them."""
    return [i for submit in read_sweep(folder / "out" / "s").submits if submit.state == "sent" for i in submit.points]


def test_points_are_sent_as_slots_come_free(slurm: FakeSlurm, folder: Path) -> None:
    slurm.limit(3)
    pause = Pause(slurm, folder)
    report = fed(write_sweep(folder, "seeds: 7\n"), pause)
    assert [job["array"] for job in slurm.jobs()] == ["0-2", "3-5", "6"]
    assert sent(folder) == list(range(7)) and report.code == 0
    assert [job.row.index for job in report.jobs] == list(range(7)) and len(report.parts) == 3
    assert all(job["dependency"] is None for job in slurm.jobs())
    assert pause.said[0].startswith("3 points sent, 4 to come when there is room: ")
    assert "max_submit_jobs of site profile test allows 3" in pause.said[0]


def test_a_throttle_that_holds_points_back_is_named_once(slurm: FakeSlurm, folder: Path) -> None:
    pause = Pause(slurm, folder, lambda: None, lambda: None, lambda: None, most=9)
    fed(write_sweep(folder, "seeds: 4\nthrottle: 2\n"), pause)
    held = "2 points sent, 2 to come when there is room: throttle or lanes of the sweep: 2 at once"
    assert pause.said.count(held) == 1 and pause.said[0] == held


def test_the_users_other_jobs_count(slurm: FakeSlurm, folder: Path) -> None:
    slurm.limit(3)
    other = slurm.add(array="0-1")
    pause = Pause(slurm, folder, lambda: None, lambda: slurm.change(other, state="COMPLETED"), most=3)
    fed(write_sweep(folder, "seeds: 3\n"), pause)
    assert [job["array"] for job in slurm.jobs()] == ["0-1", "0", "1-2"]


def test_a_killed_command_goes_on_and_sends_no_point_twice(slurm: FakeSlurm, folder: Path) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    path = write_sweep(folder, "seeds: 5\n")
    pause = Pause(slurm, folder, killed)
    with pytest.raises(KeyboardInterrupt):
        fed(path, pause)
    assert pause.said[-1] == "interrupted: not sent yet: 2 points; the same command goes on"
    fed(path, Pause(slurm, folder))
    assert sent(folder) == list(range(5))
    assert fed(path, Pause(slurm, folder)).jobs == []


def test_a_killed_sbatch_is_looked_for(slurm: FakeSlurm, folder: Path) -> None:
    path = write_sweep(folder, "seeds: 4\n")
    fed(path, Pause(slurm, folder))
    sweep = read_sweep(folder / "out" / "s")
    lost = next(row for row in sweep.submits if row.points == [3])
    sweep.update(lost, state="sending", job_id=None)  # its answer was never written down
    slurm.change(str(lost.job_id), state="PENDING")
    (sweep.run_dir(sweep.rows[3]) / "attempts.jsonl").unlink(missing_ok=True)
    fed(path, Pause(slurm, folder))
    assert sorted(sent(folder)) == [0, 1, 2, 3] and len(slurm.jobs()) == 2


def test_a_limit_that_changes_in_the_middle(slurm: FakeSlurm, folder: Path) -> None:
    """Read again after a refusal: a smaller one is kept, a larger one used."""
    slurm.limit(3)

    def shrink() -> None:
        slurm.limit(1)  # nobody told us: the profile says 3
        pause.end_all()

    def grow() -> None:
        slurm.limit(4)
        write_site(folder, "sacct: false\nmax_submit_jobs: 4\n")
        pause.end_all()

    pause = Pause(slurm, folder, shrink, lambda: None, grow, most=4)
    report = fed(write_sweep(folder, "seeds: 12\n"), pause)
    assert sent(folder) == list(range(12)) and report.code == 0
    sizes = [len(points(job["array"])) for job in slurm.jobs()]
    assert sizes[:2] == [3, 1] and 1 < max(sizes[2:]) <= 4
    assert not any(part["error"] for part in report.parts), "what was refused for the limit was sent later"


def test_a_limit_that_nobody_states_is_found(slurm: FakeSlurm, folder: Path) -> None:
    write_site(folder, "sacct: false\n")
    slurm.limit(3)
    report = fed(write_sweep(folder, "seeds: 8\n"), pause := Pause(slurm, folder))
    assert sent(folder) == list(range(8)) and report.code == 0
    assert "Slurm refused more at once, 4 are tried next" in pause.said[0]


def test_limits_of_accounts_and_qos_are_read(slurm: FakeSlurm, folder: Path) -> None:
    write_site(folder, "")
    (slurm.bin / "sacctmgr").write_text(
        '#!/bin/sh\ncase "$*" in\n*assoc*) echo "fake|mine|2|fast"; echo "fake|theirs|1|";;\n'
        '*"show user"*) echo mine;;\n*qos*) echo "normal|1"; echo "fast|5";;\nesac\n'
    )
    for job in (slurm.add(account="theirs", qos="normal"), slurm.add(account="mine", qos="fast")):
        assert job
    report = fed(write_sweep(folder, "seeds: 1\n"), Pause(slurm, folder))
    assert len(report.jobs) == 1, "one of two slots of the account was free; jobs of others do not count"
    pause = Pause(slurm, folder, most=4)
    fed(write_sweep(folder, "seeds: 2\n"), pause)
    assert "MaxSubmitJobs of user" in pause.said[0] and "in account mine allows 2" in pause.said[0]


def test_a_point_that_fails_meanwhile_is_not_sent_again(slurm: FakeSlurm, folder: Path) -> None:
    pause = Pause(slurm, folder)
    pause.then.append(lambda: pause.end_all("failed"))
    path = write_sweep(folder, "seeds: 5\n")
    fed(path, pause)
    assert sent(folder) == list(range(5))
    fed(path, Pause(slurm, folder))  # the command once more is a new word
    assert sent(folder) == [*range(5), 0, 1, 2]


@pytest.mark.parametrize("ahead_s", [-300, 0, 300])
def test_cancelled_meanwhile(slurm: FakeSlurm, folder: Path, ahead_s: float) -> None:
    """Perhaps on a host whose clock goes otherwise."""
    path = write_sweep(folder, "seeds: 5\n")

    def cancelled() -> None:
        assert run(["cancel", str(folder / "out" / "s"), "--now"], "sweep") == 0
        log = folder / "out" / "s" / "submits.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        rows = [row | {"time": row["time"] + ahead_s * (row["kind"] == "cancel")} for row in rows]
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    pause = Pause(slurm, folder, cancelled)
    fed(path, pause)
    assert sent(folder)[:3] == [0, 1, 2] and len(slurm.jobs()) == 1
    assert "cancelled meanwhile" in pause.said[-1]
    fed(path, Pause(slurm, folder))
    assert {3, 4} <= set(sent(folder)), "the command once more is a new word"


def test_throttle_and_lanes_hold_without_dependencies(slurm: FakeSlurm, folder: Path) -> None:
    write_site(folder, "sacct: false\n")
    fed(write_sweep(folder, "seeds: 5\nthrottle: 2\n"), Pause(slurm, folder, most=2))
    assert [(job["array"], job["dependency"]) for job in slurm.jobs()] == [("0-1", None), ("2-3", None), ("4", None)]


def test_a_refusal_that_waiting_does_not_mend_ends_it(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", code=1, stderr="sbatch: error: Batch job submission failed: Invalid partition name")
    report = fed(write_sweep(folder, "seeds: 5\n"), Pause(slurm, folder))
    assert report.code == 3 and all("Invalid partition" in part["error"] for part in report.parts)
    slurm.behave("sbatch")
    slurm.limit(0)
    report = fed(write_sweep(folder, "seeds: 5\n"), Pause(slurm, folder))
    assert report.code == 3, "no job of ours is in the queue, and not one is taken: it is not for too many"


def test_a_point_that_can_never_fit(slurm: FakeSlurm, folder: Path) -> None:
    write_site(folder, "sacct: false\nmax_submit_jobs: 1\nrequeue: false\n")
    with pytest.raises(ConfigError, match=r"point seed0 takes 2 of the 1 jobs.*can never be sent"):
        fed(write_sweep(folder, "seeds: 2\n"), Pause(slurm, folder))


def test_room_for_successors_is_kept(slurm: FakeSlurm, folder: Path) -> None:
    """A point that comes back as a job of its own takes two slots, its successor's from the beginning."""
    write_site(folder, "sacct: false\nmax_submit_jobs: 5\nrequeue: false\n")
    slurm.limit(5)
    fed(write_sweep(folder, "seeds: 5\n"), Pause(slurm, folder, lambda: None, most=5))
    assert [job["array"] for job in slurm.jobs()] == ["0-1", "2-3", "4"]


def test_a_controller_that_is_away_in_the_middle(slurm: FakeSlurm, folder: Path) -> None:
    def away() -> None:
        pause.end_all()
        slurm.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")

    pause = Pause(slurm, folder, away, lambda: None, lambda: slurm.behave("squeue"))
    path = write_sweep(folder, "seeds: 5\n")
    fed(path, pause)
    assert sent(folder) == list(range(5)) and sum("asked again every" in text for text in pause.said) == 1
    slurm.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(SlurmRefused):  # at the beginning it is said at once
        fed(write_sweep(folder, "seeds: 9\n"), Pause(slurm, folder))


def test_invalid_points_are_named_at_the_beginning_and_stay_so(slurm: FakeSlurm, folder: Path) -> None:
    text = "axes: {product: {slurm.time: ['10:00', '0', '20:00', '30:00', '40:00']}}\n"
    report = fed(write_sweep(folder, text), Pause(slurm, folder))
    assert [row.index for row in report.invalid] == [1] and report.code == 1
    assert sorted(sent(folder)) == [0, 2, 3, 4]
    assert read_sweep(folder / "out" / "s").rows[1].reason is not None


def test_the_verb(slurm: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(folder, "seeds: 3\n")
    assert run(["submit", str(path), "--feed", "--every", "0.1", "--json"], "sweep") == 0
    assert len(json.loads(capsys.readouterr().out)["sent"]) == 3
    with pytest.raises(ConfigError, match="--every belongs to --feed"):
        run(["submit", str(path), "--every", "5"], "sweep")
    assert run(["submit", str(write_sweep(folder, "seeds: 9\n")), "--feed", "--dry-run"], "sweep") == 0
    assert len(slurm.jobs()) == 1
    warnings = submit_sweep(load_base(write_sweep(folder, "seeds: 9\n"), [], {}), dry_run=True).warnings
    assert any(text.startswith("6 points, and a user may have 3 jobs in the queue at once") for text in warnings)


def test_a_cluster_with_as_many_jobs_as_it_keeps_is_waited_for(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", code=1, stderr=FULL)
    pause = Pause(slurm, folder, lambda: None, lambda: slurm.behave("sbatch"))
    report = fed(write_sweep(folder, "lanes: 2\nseeds: 2\noverrides: {slurm.layout: het}\n"), pause)
    assert sorted(sent(folder)) == [0, 1] and report.code == 0, "though none of this user's jobs was in the queue"
    assert len(slurm.calls("sbatch")) == 4, "once a round: what Slurm has no room for now, it has none for the next"
    assert "0 jobs of yours are in the queue; the whole cluster has as many jobs" in pause.said[0]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_sbatch_that_was_ended_before_a_full_queue_had_room(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(sbatch_errors, "QUEUE_ANSWER_S", 0.0)
    error = SlurmError(["sbatch"], None, f"timed out: no answer within 60 s ({FULL})")
    if is_there:
        job = slurm.add(comment="prime-hpc:t")
        assert job_without_answer("t", error, "packed").job_id == job, "its last try got through"
        return
    with pytest.raises(NothingQueued, match="MaxJobCount.*sweep submit SWEEP --feed"):
        job_without_answer("t", error, "packed")
    slurm.behave("squeue", code=1, stderr="squeue: error: Unable to contact slurm controller")
    with pytest.raises(SlurmRefused, match="Whether the job was queued is not known"):
        job_without_answer("t", error, "packed")


def test_what_sbatch_says_after_it_waited_for_a_full_queue_counts() -> None:
    error = SlurmError(["sbatch"], 1, f"{FULL}\nsbatch: error: Batch job submission failed: Invalid qos specification")
    assert not error.is_full and "MaxJobCount" not in str(error) and not is_over_limit(error.stderr)
    with pytest.raises(NothingQueued, match="Slurm refused the job: Invalid qos specification") as caught:
        job_without_answer("t", error, "packed")
    assert not is_over_limit(str(caught.value)), "or a feed would wait for ever"
    last = "sbatch: error: Batch job submission failed: Resource temporarily unavailable"
    assert SlurmError(["sbatch"], 1, f"{FULL}\n{last}").is_full


def test_what_counts_as_a_limit() -> None:
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    assert is_over_limit(f"AssocMaxSubmitJobLimit; {policy}") and is_over_limit(f"QOSMaxSubmitJobPerUserLimit {policy}")
    assert is_over_limit(policy), "an older Slurm names none"
    assert not is_over_limit(f"QOSMaxWallDurationPerJobLimit; {policy}")
    assert not is_over_limit("Invalid partition name specified")


def test_without_a_limit_there_is_always_room(slurm: FakeSlurm, folder: Path) -> None:
    (slurm.bin / "sacctmgr").write_text("#!/bin/sh\necho 'no accounting_storage plugin is in force' >&2\nexit 1\n")
    limits, why = submit_limits(GENERIC, None, None)
    assert limits == [] and "cannot be read" in why
    slurm.add()
    assert num_free(limits, queued_parts()) == (None, None)
