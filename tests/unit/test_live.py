"""`status --watch`: pages of the live view as text, on terminals of any size, over directories in any state."""

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prime_hpc import cli
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.monitor.live.facts import (
    TAIL_BYTES,
    TRAINER_PHASES,
    LiveRun,
    LiveRuns,
    RunGoneError,
    read_run,
    read_runs,
    series,
    shares,
)
from prime_hpc.launch.monitor.live.screen import Reader, View, page_of
from prime_hpc.launch.monitor.live.watch import draw, watch_run_or_folder
from prime_hpc.launch.monitor.run_facts import Queue
from prime_hpc.launch.monitor.status import Ask
from prime_hpc.observe.console import sparkline
from prime_hpc.slurm.jobs import JobInfo
from tests.support.metric_rows import write_rows

WAIT_S = 280
STEERS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
"""What a terminal does not show."""


def nobody(wanted: set[str], by_token: bool) -> Queue:
    return Queue()


def slurm(**fields: Any) -> Ask:
    info = JobInfo(job_id="12", state=fields.pop("state", "RUNNING"), comment="prime-hpc:tok", **fields)
    return lambda wanted, by_token: Queue({"12": info})


def trainer_row(step: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "time": time.time(), "time/step": 10.0, "time/wait": 4.0, "time/forward_backward": 4.0}
    row |= {"time/optim": 1.0, "time/publish": 0.5, "loss": 0.1 * step, "kl": 1e-4, "entropy": 1.5 - step / 100}
    return row | more


def sampled_row(step: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "time": time.time(), "reward/mean": step / 40, "time/step": 10.0, "time/wait_weights": 1.0}
    return row | {"completion/tokens_mean": 300.0 + step, "queue/idle_share": 0.25, "lag/mean": 0.5} | more


def make_run(path: Path, **word: Any) -> Path:
    """A run as it lies there while it is in its second attempt, at step 20 of 40."""
    now = time.time()
    path.mkdir(parents=True)
    (path / "run.yaml").write_text("kind: rl\nname: x\nmax_steps: 40\nckpt:\n  interval: 5\n  path: null\n")
    (path / "submit.json").write_text(json.dumps({"token": "tok", "state": "sent", "job_id": "12", "time": now - 9000}))
    first = {"attempt": 1, "began": now - 8000, "ended": now - 5000, "outcome": "requeued", "job_id": "12"}
    second = {"attempt": 2, "began": now - 500, "why": "resumed", "host": "n1", "pid": 1, "job_id": "12"}
    write_rows(path / "attempts.jsonl", [first | {"cause": "preempted"}, second | {"ended": None}])
    roles = {"trainer": "ready", "orchestrator": "ready", "inference[0]": "ready", "inference[1]": "starting"}
    waits = {"phase": "wait", "awaits": "batch 21", "since": now - 12, "count": 8}
    status = {
        **{"time": now, "state": "running", "step": 20, "max_steps": 40, "attempt": 2, "roles": roles},
        "nodes": {"trainer": ["n1", "n2"], "inference[0]": ["n3"]},
        "servers": {"inference[0]": {"running": 31, "waiting": 5, "kv_use": 0.415, "sampled_per_s": 1234.0}},
        "doing": {"trainer": [waits], "orchestrator": [{"phase": "collect rollouts", "awaits": "", "count": 1}]},
        "alarms": ["12:20 kl: trainer.kl is 0.3 at step 19"],
    }
    (path / "status.json").write_text(json.dumps(status | word))
    write_rows(path / "metrics" / "trainer.jsonl", [trainer_row(n) for n in range(1, 21)])
    write_rows(path / "metrics" / "orchestrator.jsonl", [sampled_row(n) for n in range(1, 22)])
    return path


def text_of(live: LiveRun | LiveRuns, width: int = 100, height: int = 60, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, color_system=None, force_terminal=False)
    console.print(draw(live, width, height, not encoding.startswith("utf")))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_one_run_tells_what_a_user_asks(tmp_path: Path) -> None:
    live = read_run(make_run(tmp_path / "demo"), slurm(reason="", time_left_s=3600.0))
    text = text_of(live)
    for words in (
        *(
            "demo  running  step 20/40",
            "50%",
            "Slurm says RUNNING",
            "attempt 2 (resumed)",
            "about 3:20 to the last step",
        ),
        *("1:00:00 of the job's walltime left", "kl: trainer.kl is 0.3 at step 19"),
        *("10 s/step: ░ wait 40%  █ train 50%  ▓ publish 5%", "wait for weights 10%"),
        *("trainer 40%, engines 25% of the last 10 steps", "0.525 ", " 321 "),
        *("wait, waits for batch 21 for 12 s (8 processes)", "n[1-2]"),
        *("31", "5", "42%", "1.2k", "1: ", "requeued: preempted", " free of "),
    ):
        assert words in text, f"{words!r} is not in\n{text}"
    assert "\x1b" not in text


def test_an_evaluation_shows_each_environment(tmp_path: Path) -> None:
    path = make_run(tmp_path / "demo")
    (path / "run.yaml").write_text("kind: eval\nname: x\n")
    row = {"step": 3, "total": 8, "version": "base", "episodes_per_s": 2.0, "eta_s": None}
    write_rows(path / "metrics" / "eval.jsonl", [row | {"reward/lab/one": 0.25, "reward/lab/two": 0.75}])
    assert "base: 3/8, lab/one 0.25, lab/two 0.75, 2 episodes/s" in text_of(read_run(path, slurm()))


def test_walltime_that_is_too_short_is_said(tmp_path: Path) -> None:
    live = read_run(make_run(tmp_path / "demo"), slurm(time_left_s=60.0))
    assert "1:00 of the job's walltime left: not enough" in text_of(live)


@pytest.mark.parametrize("width", [20, 40, 80, 132, 250])
def test_every_width_holds_the_pages(tmp_path: Path, width: int) -> None:
    path = make_run(tmp_path / "runs" / ("a-long-name-of-a-run-" * 3))
    make_run(tmp_path / "runs" / "sweep" / "p1", stall={"step": 20, "seconds": 900, "headline": "rank 3 is stopped"})
    for live in (read_run(path, nobody), read_runs(tmp_path / "runs", slurm(), None)):
        for line in text_of(live, width).splitlines():
            assert len(line.rstrip()) <= width


def test_eighty_columns_show_every_part(tmp_path: Path) -> None:
    text = text_of(read_run(make_run(tmp_path / "demo"), slurm(time_left_s=3600.0)), 80)
    for words in ("reward", "KL", "entropy", "length", "batch 21", "42%", "preempted", "free of"):
        assert words in text


def test_a_terminal_that_knows_ascii_alone(tmp_path: Path) -> None:
    live = read_run(make_run(tmp_path / "demo"), slurm())
    assert "wait 40%" in text_of(live, encoding="ascii")
    assert "running" in text_of(read_runs(tmp_path, slurm(), None), encoding="ascii")


def test_all_runs_are_a_line_each(tmp_path: Path) -> None:
    for name in ("sweep/p1", "sweep/p2", "alone"):
        make_run(tmp_path / name)
    (tmp_path / "sweep" / "p2" / "status.json").unlink()
    live = read_runs(tmp_path, slurm(time_left_s=7200.0), None)
    lines = text_of(live, 140).splitlines()
    assert "3 running" in lines[0] and "2 with alarms" in lines[0]
    assert {line.split()[0] for line in lines[3:]} == {"sweep/p1", "sweep/p2", "alone"}
    assert all("20/40" in line and "40%" in line and "2:00:00" in line for line in lines[3:])
    assert "and 2 more" in text_of(live, 140, height=5)
    assert "no runs" in text_of(read_runs(tmp_path / "nowhere", nobody, None))


def test_a_run_of_which_little_is_there(tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.mkdir()
    (path / "run.yaml").write_text("")
    assert "not started" in text_of(read_run(path, nobody))
    (path / "metrics").mkdir()
    (path / "metrics" / "trainer.jsonl").write_bytes(b'{"step": 1, "time/st\n\xff\xfe{"step')
    (path / "attempts.jsonl").write_text('{"attempt": 1}\n{"att')
    (path / "status.json").write_text('{"time": 1')
    assert "half" in text_of(read_run(path, nobody))


@pytest.mark.parametrize(
    "word",
    [
        {"servers": ["a"], "doing": [1], "alarms": 3, "roles": 5, "nodes": "n1", "stall": {"step": "x"}},
        {"servers": {"inference[0]": {"running": "many", "error": ["x"]}}, "doing": {"trainer": [{"phase": None}, 3]}},
        {"step": "20", "max_steps": 0, "time": "now", "attempt": 2, "runs": {"a": 3}},
        {
            "doing": {"trainer": [{"phase": "wait", "awaits": "x", "since": "y", "count": "z"}]},
            "stall": {"seconds": None},
        },
        {"stall": {"step": 3, "seconds": 1e300, "headline": "\x1b[2J\x1b]0;title\x07\nrm"}, "alarms": ["\x1b[31mred"]},
    ],
)
def test_words_of_another_version(tmp_path: Path, word: dict[str, Any]) -> None:
    make_run(tmp_path / "demo", **word)
    for live in (read_run(tmp_path / "demo", slurm()), read_runs(tmp_path, slurm(), None)):
        text = text_of(live)
        assert "demo" in text and "\x1b" not in text and "\x07" not in text


def test_metrics_with_gaps_and_no_numbers(tmp_path: Path) -> None:
    path = make_run(tmp_path / "demo")
    file = path / "metrics" / "trainer.jsonl"
    write_rows(
        file, [trainer_row(21, loss="nan", kl="inf"), {"step": 24, "time/step": "nan"}, trainer_row(25, kl=None)]
    )
    with file.open("a") as out:
        out.write('{"step": 26, "time/step": NaN, "loss": NaN, "kl": -Infinity}\n[]\n\n{"step": "x", "time/step": 1}\n')
    live = read_run(path, slurm())
    text = text_of(live)
    assert "nan" in text and "step 26/40" in text
    kl = series(live.trained, "kl")
    assert math.isnan(kl[-1]) and kl[0] == 1e-4 and len(kl) == len(live.trained)
    assert series(live.trained, "absent") == []
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == "▁ █ "
    found = shares(live.trained, TRAINER_PHASES, "rest")
    assert found is not None and found[0] == 10.0 and sum(found[1].values()) == pytest.approx(1)


def test_a_refresh_reads_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "demo")
    row = json.dumps(trainer_row(1)).encode() + b"\n"
    with (path / "metrics" / "trainer.jsonl").open("ab") as file:
        file.truncate(3_000_000_000)  # a hole, as long as ten million rows
        file.seek(0, os.SEEK_END)
        file.write(
            b"\n" + b"".join(row.replace(b'"step": 1,', b'"step": %d,' % n) for n in range(9_999_000, 9_999_040))
        )
    read = 0
    original = io.BufferedReader.read

    class Counting(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal read
            data = super().read(-1 if size is None else size)
            read += len(data)
            return data

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Counting(self, "r") if mode == "rb" else open(self, mode, *args, **kwargs)  # noqa: PTH123

    monkeypatch.setattr(Path, "open", opened)
    live = read_run(path, slurm())
    assert live.trained[-1]["step"] == 9_999_039 and original is not None
    assert 0 < read <= 4 * TAIL_BYTES


# ------------------------------------------------------------------------------------------------ the loop


def view_of(read: Any) -> View[Any]:
    return View(read, draw, lambda live: isinstance(live, LiveRun) and live.status.is_final)


def screen_text(reader: Reader[Any], view: View[Any], width: int = 80, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(page_of(reader, view, console))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_file_system_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_hpc.launch.monitor.live.screen.SILENT_S", 0.0)
    monkeypatch.setattr("prime_hpc.launch.monitor.live.screen.REFRESH_S", 0.0)
    path, hangs, reading = make_run(tmp_path / "demo"), threading.Event(), threading.Semaphore(0)
    looks = []

    def read(ask: Ask) -> LiveRun:
        looks.append(1)
        if len(looks) > 1:
            reading.release()
            hangs.wait(WAIT_S)
        return read_run(path, ask)

    view = view_of(read)
    reader: Reader[Any] = Reader(view, slurm())
    reader.start()
    try:
        assert reading.acquire(timeout=WAIT_S)
        text = screen_text(reader, view)
        assert "no answer from the file system for 0 s; this is of" in text and "demo  running" in text
    finally:
        hangs.set()
        reader.end()
        reader.join(WAIT_S)
    assert not reader.is_alive()


def test_slurm_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_hpc.launch.monitor.live.screen.SILENT_S", 0.0)
    path, hangs, asked = make_run(tmp_path / "demo"), threading.Event(), threading.Event()

    def ask(wanted: set[str], by_token: bool) -> Queue:
        asked.set()
        hangs.wait(WAIT_S)
        return Queue()

    view = view_of(lambda ask: read_run(path, ask))
    reader: Reader[Any] = Reader(view, ask)
    reader.start()
    try:
        assert asked.wait(WAIT_S)
        assert "no answer from Slurm for" in screen_text(reader, view)
    finally:
        hangs.set()
        reader.end()
        reader.join(WAIT_S)


def test_a_read_that_fails_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_hpc.launch.monitor.live.screen.REFRESH_S", 0.0)
    path, failed = make_run(tmp_path / "demo"), threading.Event()
    looks = []

    def read(ask: Ask) -> LiveRun:
        looks.append(1)
        if len(looks) == 2:
            failed.set()
        if len(looks) > 1:
            raise ValueError("half a file\x1b[2J")
        return read_run(path, ask)

    view = view_of(read)
    reader: Reader[Any] = Reader(view, slurm())
    reader.start()
    assert failed.wait(WAIT_S)
    reader.end()
    reader.join(WAIT_S)
    text = screen_text(reader, view)
    assert "cannot be read now (ValueError: half a file [2J)" in text and "demo  running" in text


def test_small_windows_are_cut_with_a_word(tmp_path: Path) -> None:
    path = make_run(tmp_path / "demo")
    view = view_of(lambda ask: read_run(path, ask))
    reader: Reader[Any] = Reader(view, slurm())
    reader.facts = read_run(path, slurm())
    for height in (3, 8, 20):
        lines = screen_text(reader, view, 80, height).splitlines()
        assert len(lines) == height and "more lines: make the window taller" in lines[-1]


def test_watch_ends_with_the_run_and_leaves_its_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "demo")
    ended = {"attempt": 2, "began": 1.0, "ended": time.time(), "outcome": "completed", "job_id": "12"}
    write_rows(path / "attempts.jsonl", [ended])
    console = Console(file=io.StringIO(), width=80, color_system=None)
    assert watch_run_or_folder(lambda: (path, tmp_path), nobody, None, console) == 0
    assert "demo  completed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_is_deleted_while_it_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_hpc.launch.monitor.live.screen.REFRESH_S", 0.0)
    path = make_run(tmp_path / "demo")
    asks = []

    def ask(wanted: set[str], by_token: bool) -> Queue:
        asks.append(1)
        if len(asks) == 3:
            path.rename(tmp_path / "elsewhere")
        return Queue({"12": JobInfo(job_id="12", state="RUNNING", comment="prime-hpc:tok")})

    console = Console(file=io.StringIO(), width=200, color_system=None)
    assert watch_run_or_folder(lambda: (path, tmp_path), ask, None, console) == 2
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the run was deleted or renamed" in text
    with pytest.raises(RunGoneError):
        read_run(path, nobody)


def test_a_word_that_means_no_run_is_an_error() -> None:
    def find() -> tuple[Path | None, Path]:
        raise ConfigError("no run 'demp'")

    with pytest.raises(ConfigError, match="demp"):
        watch_run_or_folder(find, nobody, None, Console(file=io.StringIO()))


class Terminal:
    """`status --watch` in a terminal of its own."""

    def __init__(
        self, outputs: Path, *words: str, term: str = "xterm-256color", columns: int = 80, **more: str
    ) -> None:
        master, slave = pty.openpty()
        self.master = master
        self.resize(24, columns)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment |= {"PRIMEHPC_OUTPUTS": str(outputs), "TERM": term, **more}
        command = [sys.executable, "-m", "prime_hpc.cli", "status", *words, "--watch"]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.text = ""

    def resize(self, lines: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, words: str) -> str:
        """Read until these words are there; returns what was read since the last call, without styles."""
        begin, end = len(self.text), time.monotonic() + WAIT_S
        while words not in STEERS.sub("", self.text[begin:]):
            assert time.monotonic() < end, self.text[-5000:]
            if select.select([self.master], [], [], 1.0)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        return self.text[begin:]

    def end(self) -> int:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        while self.process.poll() is None:
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        os.close(self.master)
        return self.process.wait(WAIT_S)


def test_in_a_real_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    (tmp_path / "demo" / "submit.json").unlink()
    terminal = Terminal(tmp_path, "demo")
    terminal.until("step 20/40")
    assert "\x1b[?1049h" in terminal.text  # a screen of its own, so that the shell's lines come back
    terminal.resize(10, 40)
    terminal.until("make the window taller")
    narrow = terminal.until("make the window taller")  # the first one may have been begun for the wide window
    assert all(len(line) <= 40 for line in STEERS.sub("", narrow.rpartition("\x1b[H")[2]).splitlines())
    assert terminal.end() == 0
    assert STEERS.sub("", terminal.text.rpartition("\x1b[?1049l")[2]).count("step 20/40") == 1


def test_a_table_goes_without_columns_for_which_a_terminal_has_no_room(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    for columns, words in ((200, "TREND  ATT  NODES  LEFT  JOB  NOTE"), (60, "RUN   STATE")):
        terminal = Terminal(tmp_path, term="dumb", columns=columns)
        lines = STEERS.sub("", terminal.until("refreshed by itself")).splitlines()
        assert terminal.end() == 0
        assert words in " ".join(lines).replace("     ", "") and any("20/40" in line for line in lines)
        assert all(len(line) <= columns for line in lines[:-1]), lines


def test_a_dumb_terminal_gets_pages(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    terminal = Terminal(tmp_path, "demo", term="dumb")
    terminal.until("Ctrl-C ends")
    assert terminal.end() == 0
    assert "\x1b" not in terminal.text


def test_no_colour(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    terminal = Terminal(tmp_path, "demo", NO_COLOR="1")
    text = terminal.until("step 20/40")
    assert terminal.end() == 0
    assert "[31m" not in text and "[36m" not in text


def test_a_pipe_gets_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "demo")
    write_rows(path / "attempts.jsonl", [{"attempt": 2, "ended": time.time(), "outcome": "completed", "job_id": None}])
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    assert cli.main(["status", "demo", "--watch"]) == 0
    assert capsys.readouterr().out.startswith("demo  completed")
