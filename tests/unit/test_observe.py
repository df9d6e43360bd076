"""Metrics, status, console and report: what a person and the supervisor read."""

import contextlib
import errno
import math
import os
import pty
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import load_experiment, write_snapshot
from prime_hpc.config.errors import ConfigError
from prime_hpc.envs.errors import EnvError, EnvNodeError
from prime_hpc.observe import line_file, report
from prime_hpc.observe.console import Console, Tail, duration, short, sparkline
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.metrics import MetricsWriter, last_step, read_metrics
from prime_hpc.observe.report import write_report
from prime_hpc.observe.role_status import RoleStatus, read_status
from prime_hpc.orchestrator.metrics import SampleLog
from prime_hpc.runtime.device import DeviceError
from prime_hpc.runtime.failures import is_permanent
from prime_hpc.runtime.role_context import RoleContext, role_environment
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.io.disk import in_words
from prime_hpc.store.messaging.sockets import NoFreePort
from prime_hpc.store.role_process import run_role
from prime_hpc.trainer.data.messages import SFTDataError
from tests.support.metric_rows import trainer_row, write_rows


def test_context_survives_the_environment(tmp_path: Path) -> None:
    env = role_environment(
        bus_address="127.0.0.1:5",
        attempt=3,
        incarnation=4,
        resume_step=0,
        urls={"inference": ["http://a/v1", "http://b/v1"]},
    )
    context = RoleContext.from_env("trainer", tmp_path, index=2, environ=env)
    assert (context.attempt, context.incarnation, context.resume_step, context.index) == (3, 4, 0, 2)
    assert context.inference_urls == ["http://a/v1", "http://b/v1"]
    assert context.bus_address == "127.0.0.1:5"


def test_context_by_hand_has_defaults(tmp_path: Path) -> None:
    context = RoleContext.from_env("trainer", tmp_path, environ={})
    assert (context.resume_step, context.bus_address, context.inference_urls) == (None, None, [])


def test_metrics_round_trip_and_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "trainer.jsonl"
    writer = MetricsWriter(path)
    writer.log(1, loss=0.5, ratio=float("nan"))
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    (row,) = read_metrics(path)
    assert (row["step"], row["loss"], row["ratio"]) == (1, 0.5, "nan")
    tail = Tail(path)
    again = MetricsWriter(path)  # a later life: the half line spoils nothing that follows
    again.log(3, loss=0.25)
    again.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert [row["step"] for row in tail.rows()] == [3]


def test_half_a_surrogate_pair_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "samples.jsonl")
    writer.log(1, completion="\ud83d")
    writer.close()
    assert [row["completion"] for row in read_metrics(tmp_path / "samples.jsonl")] == ["\ud83d"]


def test_a_long_curve_is_drawn_with_its_peaks() -> None:
    values = [0.0] * 100_000
    values[54_321], values[54_322] = 9.0, -9.0
    steps, shown = report.thinned(range(100_000), values)
    assert len(steps) < 2100 and (steps[0], steps[-1]) == (0, 99_999) and steps == sorted(steps)
    assert dict(zip(steps, shown, strict=True)).items() >= {54_321: 9.0, 54_322: -9.0}.items()
    assert report.thinned([3, 5], [1.0, 2.0]) == ([3, 5], [1.0, 2.0]) and report.thinned([], []) == ([], [])


FILLING = """
import resource, sys
from pathlib import Path
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.orchestrator.metrics import SampleLog

def room(size):  # no file may grow beyond it: what a quota does, in the middle of a line
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

folder = Path(sys.argv[1])
metrics, samples = MetricsWriter(folder / "trainer.jsonl"), SampleLog(folder / "samples.jsonl", 2)
for step in range(1, 8):
    room({3: 200, 6: resource.RLIM_INFINITY}.get(step, resource.getrlimit(resource.RLIMIT_FSIZE)[0]))
    metrics.log(step, loss=0.5, name="x" * 60)
    samples.write(step, [{"completion": "x" * 90}])
    print(step, *((folder / f"{name}.jsonl").read_bytes().count(b"\\n") for name in ("trainer", "samples")))
room(1)
metrics.log(8, loss=0.5)
metrics.close()
"""


def test_lines_that_a_full_disk_refuses_wait_for_room(tmp_path: Path) -> None:
    """A run need not end for want of a few bytes of metrics, and misses none of them once there is room."""
    command = [sys.executable, "-c", FILLING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    counts = [line.split() for line in done.stdout.splitlines()]
    assert [row[1:] for row in counts] == [[str(n)] * 2 for n in (1, 2, 2, 2, 2, 6, 7)]
    assert [row["step"] for row in read_metrics(tmp_path / "trainer.jsonl")] == list(range(1, 8))
    assert [row["step"] for row in read_metrics(tmp_path / "samples.jsonl")] == list(range(1, 8))
    file = re.escape(str(tmp_path / "trainer.jsonl"))
    assert len(re.findall(f"{file}: File too large: lines wait in memory", done.stderr)) == 2, done.stderr
    assert re.search(f"{file} is written again", done.stderr) and re.search(r"\d+ bytes of lines are lost", done.stderr)


def test_a_disk_that_stays_full_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "MOST_HELD", 100)
    full = Path("/dev/full")
    writes = (
        lambda: MetricsWriter(full).log(1, loss=0.5, name="x" * 100),
        lambda: SampleLog(full, 2).write(1, [{"completion": "x" * 100}]),
    )
    for write in writes:
        with pytest.raises(OSError, match="No space left on device: '/dev/full'") as caught:
            write()
        assert str(in_words(caught.value)).startswith("/dev/full: disk full (")

    async def work(*_: Any) -> None:
        writes[0]()

    loaded = load_experiment(
        ["--name", "x", "--output-dir", str(tmp_path), "--eval.environment-ids", '["gsm8k"]'], "eval"
    )
    loaded.experiment.run_dir.mkdir()
    write_snapshot(loaded.experiment, loaded.experiment.run_dir, ["eval"])
    assert run_role("eval", work, (), argv=[str(loaded.experiment.run_dir)]) == 1
    context = RoleContext.from_env("eval", loaded.experiment.run_dir)
    status = read_status(context.log_dir)
    assert status is not None and status["error"].startswith("/dev/full: disk full (") and not status["permanent"]


def test_a_picture_that_a_full_disk_refuses_leaves_the_earlier_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics/trainer.jsonl", [trainer_row(step) for step in (1, 2)])
    write_report(tmp_path, "x", "sft")
    before = (tmp_path / "loss.png").read_bytes()
    words = (
        "import resource, sys; from pathlib import Path; from prime_hpc.observe.report import write_report; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); write_report(Path(sys.argv[1]), 'x', 'sft')"
    )
    done = subprocess.run([sys.executable, "-c", words, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "the picture could not be drawn: " in done.stderr, done.stderr
    assert (tmp_path / "loss.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["loss.png"]


def test_status_is_read_back_and_rung(tmp_path: Path) -> None:
    rung: list[tuple[str, dict]] = []

    class Bus:
        connected = True

        def publish(self, topic: str, /, **payload: object) -> None:
            rung.append((topic, payload))

    context = RoleContext("trainer", tmp_path, index=1, attempt=2)
    status = RoleStatus(context, Bus())
    status.ready(url="x")
    status.beat(step=7)
    status.failed(ValueError("no"))
    row = read_status(context.log_dir, 1)
    assert row is not None
    assert (row["state"], row["step"], row["error"], row["info"]) == ("failed", 7, "ValueError: no", {"url": "x"})
    assert [payload["state"] for _, payload in rung] == ["ready", "ready", "failed"]
    assert read_status(context.log_dir, 0) is None


def raised(error: Exception, *causes: Exception | None) -> Exception:
    """`error` as it is caught after its causes, the nearest first; None: what came before is of no account."""
    for follower, cause in zip([error, *causes], causes, strict=False):
        if follower is not None:
            follower.__cause__, follower.__suppress_context__ = cause, True
    return error


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ConfigError("model.seed: no integer"), True),
        (EnvError("orchestrator.env.0: no such argument: max_term"), True),
        (raised(EnvError("a reward cannot be imported"), NameError("x")), True),
        (SFTDataError("a.jsonl:20: no JSON object"), True),
        (raised(ValueError("no number"), None), True),
        (DeviceError("8 GPUs were planned, 7 are visible"), False),
        (EnvNodeError("there is no bubblewrap on n3"), False),
        (NoFreePort("8000-8010"), False),
        (raised(EnvError("the hub"), ValueError("no rows"), ConnectionResetError()), False),
        (raised(ValueError("/lustre/m"), OSError(errno.ESTALE, "Stale file handle")), False),
        (raised(EnvError("importing it fails"), ImportError("no module x")), False),
        (raised(ConfigError("one that nobody knows"), RuntimeError("whatever")), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ArtifactError(Path("x"), "a", "b"), False),
    ],
)
def test_a_role_says_whether_it_would_fail_so_again(tmp_path: Path, error: Exception, permanent: bool) -> None:
    context = RoleContext("trainer", tmp_path)
    RoleStatus(context).failed(error, "in other words")
    assert (row := read_status(context.log_dir)) is not None
    assert (row["error"], row["permanent"]) == ("in other words", permanent)


def test_what_led_to_an_error_counts_though_nobody_named_it(tmp_path: Path) -> None:
    try:
        try:
            raise TimeoutError
        except TimeoutError:
            raise ValueError("nothing came")  # noqa: B904 - as careless code does
    except ValueError as error:
        assert not is_permanent(error)
        error.__context__ = error.__cause__ = ValueError()
        error.__cause__.__cause__ = error
        assert not is_permanent(error), "a circle"


def test_the_reason_that_is_known_first_stands(tmp_path: Path) -> None:
    """Between it and the end a role may be stopped, or lose the others."""
    context = RoleContext("trainer", tmp_path)
    status = RoleStatus(context)
    status.ready()
    status.ends_for("step 3 was refused")
    status.beat(step=2)
    assert (row := read_status(context.log_dir)) is not None and row["state"] == "ready"
    status.failed("ended by SIGTERM")
    assert (row := read_status(context.log_dir)) is not None
    assert (row["state"], row["error"]) == ("failed", "step 3 was refused")


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.rows() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.rows() == [{"a": 2}]
    assert Tail(path).rows() == []  # a later attempt shows only what is new


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.6, "1:00"), (61, "1:01"), (3661, "1:01:01"), (-4, "0:00"), (math.inf, "?")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline_and_short() -> None:
    assert sparkline([0, 1, 2]) == "▁▅█" or sparkline([0, 1, 2])[0] == "▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert [short(x) for x in (12, 1234, 2.5e6)] == ["12", "1.2k", "2.5M"]


def test_a_metrics_file_says_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    assert last_step(path) == 0
    write_rows(path, [{"step": n, "text": "x" * 100} for n in range(1, 400)])
    assert last_step(path) == 399
    with path.open("a") as file:
        file.write('{"step": 4')
    assert last_step(path) == 399


def test_what_one_more_step_needs_counts_the_whole_of_a_background_save(tmp_path: Path) -> None:
    console = Console(tmp_path, 40, kind="rl")
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", [])
    rows = [trainer_row(1) | {"time/checkpoint": 0.5}, trainer_row(2) | {"ckpt/write_s": 90.0, "time/checkpoint": 0.1}]
    write_rows(tmp_path / "metrics" / "trainer.jsonl", rows)
    console.tick({})
    assert console.needs_s() >= 90.0


def test_report_names_gain_and_samples(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(s) for s in (1, 2)])
    rows = [
        {"step": 0, "eval/rev/mean_reward": 0.4, "eval/rev/num_failed": 59, "eval/rev/num_episodes": 128},
        {"step": 1, "reward/mean": 0.4, "lag/mean": 0.0},
        {"step": 2, "reward/mean": 0.6, "lag/mean": 1.0},
        {"step": 2, "eval/rev/mean_reward": 0.9},
        {"step": 2, "eval/lab/one/mean_reward": 0.1, "eval/lab/two/mean_reward": 0.2},
    ]
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", rows)
    samples = [
        {"kind": "eval", "step": step, "task": 5, "prompt": "ab", "completion": text, "reward": reward}
        for step, text, reward in ((0, "ab", 0.5), (2, "ba", 1.0))
    ]
    write_rows(tmp_path / "metrics" / "samples.jsonl", samples)
    text = "\n".join(write_report(tmp_path, "x", "rl"))
    assert "held-out mean reward of rev: 0.400 (version 0) -> 0.900 (version 2), gain +0.500\n  version 0" in text
    assert text.count("59 of 128 episodes failed or timed out, and count as 0\n") == text.count("count as 0") == 1
    for name, reward in (("lab/one", "0.100"), ("lab/two", "0.200")):  # an environment may be named as on a hub
        assert f"held-out mean reward of {name}: {reward} (version 2)" in text
    assert "before (reward 0.50): 'ab'" in text
    assert "after  (reward 1.00): 'ba'" in text
    assert (tmp_path / "reward.png").stat().st_size > 5000


def test_of_the_metrics_of_a_long_run_only_what_is_said_of_them_is_held(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics" / "trainer.jsonl", [trainer_row(1)])
    write_report(tmp_path, "x", "rl")  # what drawing needs is imported
    others = {f"phase/{i}": i / 7 for i in range(100)}
    rows = [trainer_row(step) | others | {"reward/mean": 0.5, "lag/mean": 1.0} for step in range(1, 2001)]
    for role in ("trainer", "orchestrator"):
        write_rows(tmp_path / "metrics" / f"{role}.jsonl", rows)
    del rows
    tracemalloc.start()
    lines = write_report(tmp_path, "x", "rl")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines[0].startswith("x: 2000 steps") and most < 12e6  # all values of either file are 20 MB


def test_the_samples_of_a_long_run_are_not_held_all_at_once(tmp_path: Path) -> None:
    task = {"kind": "eval", "task": 5, "prompt": "ab", "reward": 0.5}
    samples = [{**task, "step": step, "completion": f"{step} {'x' * 10_000}"} for step in range(1000)]
    write_rows(tmp_path / "metrics" / "samples.jsonl", samples)
    del samples
    tracemalloc.start()
    before, after = report._samples(tmp_path)[1:]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "'0 xx" in before and "'999 xx" in after and most < 2e6


def test_a_report_leaves_out_the_steps_that_a_run_went_back_behind(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": s, "time/step": 1.0, "loss": float(s)} for s in (1, 2, 3, 4, 5, 3)]
    rows[5:5] = [{"step": step, "eval/loss": 0.5 + step, "eval/a/b/loss": 0.1 * step} for step in (1, 2, 5)]
    write_rows(tmp_path / "metrics" / "trainer.jsonl", rows)
    later = [{"step": step, "eval/words/mean_reward": 0.1 * step} for step in (0, 3, 2)]  # what was left out before
    write_rows(tmp_path / "metrics" / "orchestrator.jsonl", later)
    lines = write_report(tmp_path, "x", "sft")
    assert lines[0].startswith("x: 3 steps, ") and lines[1] == "loss 1.0000 at step 1 -> 3.0000 at step 3"
    assert lines[2] == "held-out loss 1.5000 (version 1) -> 2.5000 (version 2)"
    assert lines[3] == "  of a/b: 0.1000 -> 0.2000"
    assert "-> 0.300 (version 3)" in lines[4]


def test_the_environments_log_level_overrides_the_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        for level, seen in (("debug", True), ("ERROR", False)):
            monkeypatch.setenv("PRIME_LOG_LEVEL", level)
            log = setup_logger("t", level="INFO", file=tmp_path / f"{level}.log", console=False)
            log.debug("a detail")
            log.error("an error")
            log.complete()
            text = (tmp_path / f"{level}.log").read_text()
            assert ("a detail" in text) is seen and "an error" in text
        monkeypatch.setenv("PRIME_LOG_LEVEL", "verbose")
        setup_logger("t", level="INFO", file=tmp_path / "no.log", console=False).complete()
        assert "PRIME_LOG_LEVEL=VERBOSE is no level" in (tmp_path / "no.log").read_text()
    finally:
        monkeypatch.delenv("PRIME_LOG_LEVEL")
        setup_logger("t")


LOGGER = """
import sys
from loguru import logger
from prime_hpc.observe.logs import kept_logger, setup_logger
setup_logger("role")
with kept_logger():
    {theirs}
    logger.add(sys.stderr, format="theirs {{message}}")
logger.info("one")
with kept_logger():
    pass
logger.info("two")
"""


@pytest.mark.parametrize(("theirs", "said_there"), [("logger.remove()", ""), ("pass", "theirs one\ntheirs two\n")])
def test_a_package_that_takes_the_logger_over_does_not_have_it(theirs: str, said_there: str) -> None:
    """A sink beside ours stays."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGER.format(theirs=theirs)], capture_output=True, text=True, check=True
    )
    assert [line.split()[1:] for line in done.stdout.splitlines()] == [["INFO", "role", "one"], ["INFO", "role", "two"]]
    assert done.stderr == said_there


def test_lines_beside_the_bar_are_broken_by_the_terminal_alone(tmp_path: Path) -> None:
    """Of a terminal that does not say how wide it is rich takes 80 columns."""
    code = """
import sys
from pathlib import Path
from prime_hpc.observe.console import Console
from prime_hpc.observe.logs import setup_logger

folder = Path(sys.argv[1])
log, console = setup_logger("supervisor", file=folder / "log"), Console(folder, 3, kind="eval")
console.tick({"inference[0]": 3.0})
log.info("A" * 150)
console.close()
"""
    reader, writer = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=writer, env=environment)
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # all its ends are closed
        while part := os.read(reader, 65536):
            shown += part
    os.close(reader)
    assert process.wait(timeout=280) == 0
    assert b"starts (loads the model" in shown and b"A" * 150 in shown
