"""`prime-hpc logs`: which file, its last lines, and following over growth, replacement and a new attempt."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError
from prime_hpc.launch.monitor.logs import Follower, Source, Watch, find_source, follow, last_lines, parse_role
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.early_end import write_early_end
from prime_hpc.supervisor.stop_requests import StopRequest


def write(path: Path, text: str, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)
    return path


def add_attempt(run: Path, number: int, **fields: Any) -> None:
    row = {"attempt": number, "began": time.time() - 5, "ended": None, "host": "elsewhere", "pid": 1, "job_id": None}
    write(run / "attempts.jsonl", json.dumps(row | fields) + "\n", "a")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # noqa: PTH120 - no Slurm here
    write(tmp_path / "demo" / "run.yaml", "max_steps: 3\n")
    return tmp_path / "demo"


@pytest.fixture
def two_lives(run: Path) -> Path:
    add_attempt(run, 1, job_id="12", ended=time.time(), outcome="failed", cause="OOM")
    add_attempt(run, 2, job_id="12", ended=time.time(), outcome="completed")
    begins = "10:00:00 INFO    supervisor run {}: attempt {}, incarnation {} (why); roles\n"
    text = begins.format(run, 1, 1) + "one\n" + begins.format(run, 2, 3) + "two\nthree\n"
    write(run / "logs" / "supervisor.log", text)
    write(run / "logs" / "slurm-12.out", "module load\n")
    for number in (1, 2):
        folder = run / "logs" / f"attempt_{number}"
        lines = f"10:00 INFO trainer[0] a{number}\n10:00 INFO trainer[1] b{number}\n[rank1]: c{number}\nplain\n"
        write(folder / "trainer" / "trainer.log", lines)
        write(folder / "inference" / "inference.log", f"server 0 of {number}\n")
        write(folder / "inference" / "inference_1.log", f"server 1 of {number}\n")
    write(run / "logs" / "attempt_2" / "trainer" / "rank_0.log", "its own file\n")
    return run


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.main(["logs", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_which_file(two_lives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "demo")[-2:] == ["two", "three"]
    assert printed(capsys, "demo", "--attempt", "1")[1:] == ["one"]
    assert printed(capsys, "demo", "--attempt", "2", "-n", "2") == ["two", "three"]
    assert printed(capsys, "demo", "--role", "slurm") == ["module load"]
    assert printed(capsys, "demo", "--role", "slurm", "--attempt", "1") == ["module load"]
    assert printed(capsys, "demo", "--role", "trainer", "-n", "1") == ["plain"]
    assert printed(capsys, "demo", "--role", "inference") == ["server 0 of 2"]
    assert printed(capsys, "demo", "--role=inference", "--rank=1", "--attempt=1") == ["server 1 of 1"]
    assert printed(capsys, "demo", "--role", "inference[1]") == ["server 1 of 2"]
    assert printed(capsys, "12", "--role", "slurm") == ["module load"]


def test_one_rank(two_lives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "demo", "--role", "trainer", "--rank", "0") == ["its own file"]
    assert printed(capsys, "demo", "--role", "trainer", "--rank", "1") == ["10:00 INFO trainer[1] b2", "[rank1]: c2"]
    assert printed(capsys, "demo", "--role", "trainer_1", "-n", "1") == ["[rank1]: c2"]


def test_a_rank_that_has_written_nothing_and_one_that_never_was(
    two_lives: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(two_lives / "run.yaml", "max_steps: 3\ntrainer:\n  num_ranks: 4\n")
    assert cli.main(["logs", "demo", "--role", "trainer", "--rank", "3"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "" and "trainer rank 3 has written nothing" in streams.err
    for more in ([], ["-f"], ["--attempt", "1"]):
        assert cli.main(["logs", "demo", "--role", "trainer", "--rank", "4", *more]) == 2
        assert "no line of trainer rank 4" in capsys.readouterr().err
    write(two_lives / "logs" / "attempt_1" / "trainer" / "rank_2.log", "of an attempt with more ranks\n")
    (two_lives / "logs" / "attempt_2" / "trainer" / "trainer.log").unlink()
    assert cli.main(["logs", "demo", "--role", "trainer", "--rank", "2"]) == 2
    assert "no log of trainer 2" in capsys.readouterr().err


def test_a_log_that_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "logs" / "supervisor.log").mkdir(parents=True)
    for more in ([], ["-f"], ["--attempt", "1"]):
        assert cli.main(["logs", "demo", *more]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_json_lines(two_lives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(capsys, "demo", "--role", "inference", "--json")
    row = json.loads(line)
    assert (row["role"], row["attempt"], row["line"]) == ("inference", 2, "server 0 of 2")
    assert row["file"].endswith("inference.log")


def test_colors_are_for_terminals(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "logs" / "supervisor.log", "\x1b[2m10:00\x1b[0m \x1b[1mINFO\x1b[0m step 1\n")
    assert printed(capsys, "demo") == ["10:00 INFO step 1"]


def test_before_the_supervisor_the_jobs_own_output_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "logs" / "slurm-7.out", "old\n")
    os.utime(run / "logs" / "slurm-7.out", (1, 1))
    write(run / "logs" / "slurm-9.out", "module: command not found\n")
    assert printed(capsys, "demo") == ["module: command not found"]
    write(run / "logs" / "supervisor.log", "earlier attempt\n")
    os.utime(run / "logs" / "supervisor.log", (1, 1))
    assert cli.main(["logs", "demo"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "earlier attempt\n" and "slurm-9.out (--role slurm)" in streams.err


def test_a_run_that_never_started_says_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "submit.json", json.dumps({"state": "failed", "error": "Invalid account", "time": 1}))
    assert cli.main(["logs", "demo"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "" and "failed: Invalid account" in streams.err
    assert cli.main(["logs", "demo", "-f", "--role", "trainer"]) == 0  # nothing will come: it does not wait
    assert "failed: Invalid account" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["dmo"], "did you mean demo"),
        ([], "an argument is missing"),
        (["demo", "x"], "too many arguments"),
        (["demo", "--role", "trianer"], "no role 'trianer'; there are supervisor, trainer"),
        (["demo", "--rank", "1"], "--rank goes with"),
        (["demo", "--role", "orchestrator"], "no log of orchestrator; there is attempt 1: inference"),
        (["demo", "--role", "inference", "--rank", "7"], "no log of inference 7"),
        (["demo", "--role", "trainer", "--rank", "9"], "has no line of trainer rank 9"),
        (["demo", "--attempt", "3"], "no attempt 3; the newest is 2"),
        (["demo", "-n", "x"], "--lines x: must be a whole number"),
        (["demo", "--frob"], "unknown option --frob"),
    ],
)
def test_wrong_questions(two_lives: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", *argv]) == 2
    assert says in capsys.readouterr().err


def test_roles_by_label() -> None:
    assert parse_role("inference[12]", None) == ("inference", 12)
    assert parse_role("trainer", 3) == ("trainer", 3)
    with pytest.raises(ConfigError):
        parse_role("orchestrator[1]", None)


@pytest.mark.parametrize("count", [1, 2, 3, 999, 1000, 1001, 0])
@pytest.mark.parametrize("end", ["", "\n"])
def test_last_lines_of_a_long_file(tmp_path: Path, count: int, end: str) -> None:
    lines = [f"{i} " + "x" * (i % 700) for i in range(1000)]  # several blocks
    path = write(tmp_path / "a.log", "\n".join(lines) + end)
    got, offset = last_lines(Source(path, "supervisor"), count)
    assert got == (lines[-count:] if count else lines)
    assert offset == path.stat().st_size


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("half", ["INFO trainer[3] half of", "INFO trai"])
def test_following_from_the_middle_of_a_line_shows_it_whole_and_once(
    tmp_path: Path, half: str, rank: int | None
) -> None:
    line = "INFO trainer[3] half of a line"
    path = write(tmp_path / "a.log", f"INFO trainer[3] before\n{half}")
    source = Source(path, "trainer", 1, rank=rank)
    assert last_lines(source, 1)[0] == ([half] if rank is None or "[3]" in half else ["INFO trainer[3] before"])
    lines, offset = last_lines(source, 1, whole=True)
    follower = Follower(source, offset)
    assert lines == ["INFO trainer[3] before"] and list(follower.lines()) == []
    write(path, line.removeprefix(half) + "\nINFO trainer[3] half", "a")
    assert list(follower.lines()) == [line] and list(follower.close()) == ["INFO trainer[3] half"]


def test_last_lines_of_an_empty_file_and_of_bad_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "")
    assert last_lines(Source(path, "supervisor"), 5) == ([], 0)
    path.write_bytes(b"ok\n\xff\xfe\r\n\n")
    assert last_lines(Source(path, "supervisor"), 5)[0] == ["ok", "\ufffd\ufffd", ""]


def test_growth_half_lines_replacement_and_cutting(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "one\ntw")
    follower = Follower(Source(path, "supervisor"))
    assert list(follower.lines()) == ["one"]
    write(path, "o\nthree\n", "a")
    assert list(follower.lines()) == ["two", "three"]
    write(path, "last of the old\n", "a")
    path.rename(tmp_path / "a.log.1")
    write(path, "first of the new\n")
    assert list(follower.lines()) == ["last of the old", "first of the new"]
    write(path, "cut\n")
    assert list(follower.lines()) == ["cut"]
    path.unlink()
    assert list(follower.lines()) == []
    write(path, "again\nno end")
    assert list(follower.lines()) == ["again"]
    assert list(follower.close()) == ["no end"]


def test_following_goes_over_to_the_next_attempt_and_ends_with_the_run(run: Path) -> None:
    """Each pause is one thing that happens to the run."""
    logs = run / "logs"
    said: list[str] = []
    over: list[str] = []

    def trainer(number: int) -> Path:
        return logs / f"attempt_{number}" / "trainer" / "trainer.log"

    def die_in_the_middle_of_a_line() -> None:
        write(trainer(1), "half a li", "a")
        write(trainer(2), "second attempt\n")

    def end() -> None:
        write(trainer(2), "bye", "a")
        over.append("the run is completed")

    events: list[Callable[[], object]] = [
        lambda: None,
        lambda: write(trainer(1), "first attempt\n"),
        die_in_the_middle_of_a_line,
        lambda: write(trainer(2), "more\n", "a"),
        end,
    ]

    def pause() -> None:
        events.pop(0)()

    watch = Watch(newest=lambda: find_source(run, "trainer"), is_over=lambda: over[0] if over else None, pause=pause)
    got = [(source.attempt, line) for source, line in follow(None, watch, said.append)]
    assert got == [(1, "first attempt"), (1, "half a li"), (2, "second attempt"), (2, "more"), (2, "bye")]
    assert said == [f"goes on in attempt 2: {trainer(2)}", "the run is completed"]


def test_the_command_follows_a_real_process(run: Path) -> None:
    """As a user: started before the log exists, told why it waits, ended by the end of the run."""
    writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    command = [sys.executable, "-m", "prime_hpc.cli", "logs", "demo", "-f", "--role", "orchestrator"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stderr is not None
    try:
        assert "the run is not started" in follower.stderr.readline()
        add_attempt(run, 1, host=os.uname().nodename, pid=writer.pid, began=time.time() + 1)
        log = write(run / "logs" / "attempt_1" / "orchestrator" / "orchestrator.log", "batch 1\n")
        assert follower.stdout.readline() == "batch 1\n"
        write(log, "batch 2\n", "a")
        assert follower.stdout.readline() == "batch 2\n"
        write(log, "done", "a")
        add_attempt(run, 1, ended=time.time(), outcome="completed")
        assert follower.stdout.readline() == "done\n"
        assert follower.wait(timeout=280) == 0
        assert "the run is completed" in follower.stderr.read()
    finally:
        for process in (writer, follower):
            process.kill()
            process.wait()


def test_what_libraries_say_is_apart_and_what_python_says_stays(tmp_path: Path) -> None:
    """Of two processes that share a log, as ranks do."""
    program = (
        "import ctypes, os, sys; from pathlib import Path; from prime_hpc.observe.logs import separate_native_stderr\n"
        "separate_native_stderr(Path(sys.argv[1]) / f'rank_{sys.argv[2]}.stderr.log')\n"
        "os.write(2, b'NCCL WARN from ' + sys.argv[2].encode() + b'\\n')\n"
        "print('python says', sys.argv[2], file=sys.stderr)\n"
        "ctypes.CDLL(None).perror(b'native') if sys.argv[2] == '0' else 1 / 0"
    )
    with (tmp_path / "shared.log").open("wb") as shared:
        for rank in ("0", "1"):
            # from standard input: Python 3.13 shows the lines of a program on the command line in its tracebacks
            subprocess.run([sys.executable, "-", str(tmp_path), rank], input=program.encode(), stderr=shared)
    common = (tmp_path / "shared.log").read_text()
    assert "python says 0" in common and "python says 1" in common and "ZeroDivisionError" in common
    assert "NCCL" not in common and "native" not in common
    assert "NCCL WARN from 0\nnative: " in (tmp_path / "rank_0.stderr.log").read_text()
    assert (tmp_path / "rank_1.stderr.log").read_text() == "NCCL WARN from 1\n"


def test_a_log_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = (
        "import os, sys; from pathlib import Path; from prime_hpc.observe.logs import separate_native_stderr\n"
        "separate_native_stderr(Path(sys.argv[1])); os.write(2, b'still here')"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file" / "x.log")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "still here" in done.stderr and "cannot be written" in done.stderr


@pytest.mark.parametrize(("wish", "is_plain"), [({}, False), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True)])
def test_a_terminal_gets_colors_unless_it_wants_none(wish: dict[str, str], is_plain: bool) -> None:
    ours, theirs = os.openpty()
    code = "from prime_hpc.observe.logs import setup_logger; setup_logger('r').info('hello')"
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | wish
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environ, check=True)
    os.close(theirs)
    said = rest_of(ours)
    os.close(ours)
    assert b"hello" in said and (b"\x1b[" not in said) == is_plain


def rest_of(terminal: int) -> bytes:
    """All that a terminal got which nobody writes to any more: one read may end in the middle of a character."""
    said = b""
    with contextlib.suppress(OSError):  # EIO: it is over
        while part := os.read(terminal, 4096):
            said += part
    return said


def seen_on(terminal: bytes) -> list[str]:
    """Lines that stay on a terminal, of what rich sends to it: line feeds, returns, and erasing lines upwards."""
    rows, row = [""], 0
    for part in re.findall(rb"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", terminal):
        if part == b"\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part == b"\x1b[2K":
            rows[row] = ""
        elif part == b"\x1b[1A":
            row -= 1
        elif not part.startswith((b"\x1b", b"\r")):
            rows[row] += part.decode()
    return rows


def test_what_is_said_while_roles_start_stays_on_the_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    code = (
        "from pathlib import Path; from prime_hpc.observe.console import Console\n"
        "from prime_hpc.observe.logs import setup_logger\n"
        f"run = Path({str(tmp_path)!r}); log = setup_logger('supervisor', file=run / 'log')\n"
        "console = Console(run, 3, kind='rl')\n"
        "console.tick({'trainer': 1.0, 'inference[0]': 1.0}); log.warning('mind this')\n"
        "console.tick({'trainer': 2.0}); log.info('and this'); console.tick({})"
    )
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environ, check=True)
    os.close(theirs)
    lines = seen_on(rest_of(ours))
    os.close(ours)
    assert [line.split()[-2:] for line in lines if "this" in line] == [["mind", "this"], ["and", "this"]]
    assert not any("starts" in line for line in lines)


def test_an_attempt_that_ended_before_it_began_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "logs" / "supervisor.log", "x: attempt 1, incarnation 1 (new)\nhello\n")
    write(run / "logs" / "attempt_1" / "trainer" / "trainer.log", "of the first\n")
    add_attempt(run, 1, ended=time.time(), outcome="requeued", next="slurm")
    write_early_end(RunPaths(run), StopRequest("run.yaml cannot be read", "failed", 74, False, 0.0), None)
    for role in ("supervisor", "trainer"):
        assert cli.main(["logs", str(run), "--role", role, "--attempt", "2"]) == 2
        said = capsys.readouterr().err
        assert f"no log of {role} in attempt 2, which ended before it began: run.yaml cannot be read; there is" in said
    assert cli.main(["logs", str(run), "--attempt", "1"]) == 0
