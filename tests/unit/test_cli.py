"""The command line as a user meets it: exit codes, what goes to which stream, what is handed to launch."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.cli.common import parse
from prime_hpc.client.keys import key_file, take_key
from prime_hpc.config import ConfigError, Loaded
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.launch import local, submission
from prime_hpc.store.io.files import write_atomic

CHECKOUT = Path(__file__).resolve().parents[2]
ENV = ["--orchestrator.env", '[{"id": "reverse-text"}]']


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command line hands to launch, which then starts nothing."""
    calls: list[tuple[Any, ...]] = []

    def submit(loaded: Loaded, *, follow: bool | None, dry_run: bool, as_json: bool) -> int:
        calls.append(("submit", loaded, follow, dry_run, as_json))
        return 0

    def run(loaded: Loaded) -> int:
        calls.append(("run", loaded))
        return 1

    def run_role(loaded: Loaded, role: str) -> int:
        calls.append(("run_role", loaded, role))
        return 0

    monkeypatch.setattr(submission, "submit", submit)
    for function in (run, run_role):
        monkeypatch.setattr(local, function.__name__, function)
    return calls


def console(name: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    code = getattr(cli, name)()
    assert isinstance(code, int)
    return code


def test_overview_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {verb}" in page for verb in cli.VERBS)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == page
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("prime-hpc 0.")


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sumbit", "a.yaml"]) == 2
    assert "no verb 'sumbit'; did you mean submit?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "there are submit, plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["submit", *ENV, "--dryrun"], "--dry-run"),
        (["sweep", "submit", "s.yaml", "--dryrun"], "--dry-run"),
        (["sft", "--nnode", "2"], "--nnodes"),
        (["plan", *ENV, "--max-step=3"], "--max-steps"),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_verbs_own(
    words: list[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("orchestrator: {env: [{id: x}]}\n")
    Path("s.yaml").write_text("experiment: e.yaml\naxes: {list: [{seed: 1}]}\n")
    assert cli.main(words) == 2
    assert f"unknown key; did you mean {meant}?" in capsys.readouterr().err


def test_lint_answers_a_mistyped_flag_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", *ENV, "--strikt"]) == 2
    assert "did you mean --strict?" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["submit", "plan", "rl", "sft", "eval", "logs"])
def test_a_verb_without_anything_says_its_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb]) == 2
    assert f"; usage: prime-hpc {verb} " in capsys.readouterr().err


def test_help_of_a_verb_is_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert [cli.main(words) for words in (["status", "--help"], ["help", "status"], ["--help", "status"])] == [0, 0, 0]
    first, *rest = [
        f"usage: prime-hpc status{page}" for page in capsys.readouterr().out.split("usage: prime-hpc status")[1:]
    ]
    assert rest == [first, first]
    assert cli.main(["help", "sumbit"]) == 2
    assert cli.main(["help", "help"]) == 0


def test_a_usage_names_every_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve"], ["eval", "--compare", "a"]):
        assert cli.main(words) == 2
        usage = capsys.readouterr().err.partition("usage: ")[2]
        assert usage.count("--tinker") + usage.count("--compare") == 1, usage


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_and_starts_nothing(
    verb: str, handed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, "--seed", "x", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: prime-hpc {verb}")
    assert not handed


def test_submit_flags_are_its_own(handed: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("seed: 4\norchestrator: {env: [{id: x}]}\n")
    assert cli.main(["submit", str(path)]) == 0
    assert cli.main(["submit", "--no-follow", "@", str(path), "--dry-run", "--max-steps", "3"]) == 0
    assert cli.main(["submit", str(path), "--follow", "--json"]) == 0
    (_, first, follow, dry_run, as_json), (_, second, second_follow, second_dry_run, _) = handed[:2]
    assert (follow, dry_run, as_json, first.experiment.seed) == (None, False, False, 4)
    assert handed[2][2:] == (True, False, True)
    assert (second_follow, second_dry_run, second.experiment.max_steps) == (False, True, 3)
    assert second.files == [str(path)]


def test_a_dry_run_of_an_entrypoint_says_what_would_run(
    handed: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    played = ["--environment-ids", "reverse-text", "--model.name", "/nowhere", "--dry-run"]
    for verb, words in {"rl": ENV, "sft": ["--data.type", "fake"]}.items():
        assert console(verb, [*words, "--model.name", "/nowhere", "--dry-run"], monkeypatch) == 0
        assert f"({verb})\n" in capsys.readouterr().out
    for verb in ("eval", "synthesize"):
        assert cli.main([verb, *played, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["kind"] == verb
    assert not handed and not list(tmp_path.iterdir())


def test_plan_prints_and_entrypoints_return_the_launchers_code(
    handed: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["plan", *ENV, "--name", "n", "--launch", "local"]) == 0
    assert capsys.readouterr().out.startswith("experiment   n (rl)\nlaunch       submitit's LocalExecutor")
    assert console("rl", ENV, monkeypatch) == 1
    assert console("sft", ["--data.type", "fake"], monkeypatch) == 1
    assert [call[1].experiment.kind for call in handed] == ["rl", "sft"]


@pytest.mark.parametrize("role", cli.ROLES)
def test_roles_alone(role: str, handed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ENV if role == "orchestrator" else []
    assert console(role, argv, monkeypatch) == 0
    assert cli.main([role, *argv]) == 0
    assert [(call[0], call[2]) for call in handed] == [("run_role", role)] * 2


def test_a_wrong_config_is_exit_code_2_and_starts_nothing(
    handed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rl", "--sead", "1", "@", "no-such.yaml"]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and "Traceback" not in streams.err
    assert streams.err.startswith("prime-hpc rl: error: 2 problems")
    assert not handed


def test_what_launch_finds_wrong_with_the_config_is_exit_code_2(
    handed: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(loaded: Loaded) -> int:
        raise ConfigError("model.name: no weights there")

    monkeypatch.setattr(local, "run", run)
    assert cli.main(["rl", *ENV]) == 2
    assert capsys.readouterr().err == "prime-hpc rl: error: model.name: no weights there\n"


def test_ctrl_c_is_130(handed: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(loaded: Loaded) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "run", run)
    assert cli.main(["rl", *ENV]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_warnings_go_to_standard_error(
    handed: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_MAX_STEP", "3")
    assert cli.main(["plan", *ENV]) == 0
    assert "warning: environment variable PRIME_MAX_STEP" in capsys.readouterr().err


def test_help_into_a_closed_pipe_is_quiet() -> None:
    code = "import sys; from prime_hpc.cli import rl; sys.argv = ['rl', '--help']; sys.exit(rl())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=280) == 0
    assert error == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirection", "code", "said"), [(">/dev/full", 1, "No space left on device"), (">&-", 0, ""), (">&- 2>&-", 0, "")]
)
def test_output_that_cannot_be_written(unbuffered: str, redirection: str, code: int, said: str) -> None:
    program = "import sys; from prime_hpc.cli import main; sys.exit(main(['rl', '--help']))"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = f"prime-hpc: error: its output cannot be written: {said}\n" if said else ""
    assert (done.returncode, done.stderr) == (code, expected)


def prime_hpc(*words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    code = "import sys; from prime_hpc.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environ, capture_output=True, timeout=280, check=False)


def test_a_home_directory_that_nobody_knows(tmp_path: Path) -> None:
    nobody = "~no-such-user-here"
    for words in (("lint", f"{nobody}/exp.yaml"), ("status", f"{nobody}/run"), ("plan", "--output-dir", f"{nobody}/o")):
        done = prime_hpc(*words, PYTHONPATH=str(CHECKOUT), HOME=str(tmp_path))
        assert done.returncode == 2 and b"a path begins with ~NAME" in done.stderr, done.stderr
    code = "import sys, pwd; pwd.getpwuid = lambda uid: {}[uid]; from prime_hpc.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "plan", *ENV]
    done = subprocess.run(command, env={"PYTHONPATH": str(CHECKOUT)}, capture_output=True, timeout=280, check=False)
    assert done.returncode == 2 and b"HOME is not set" in done.stderr, done.stderr
    # a job that was sent with plain sbatch reads its experiment on such a node; its roles may be the first that ask
    job = code.replace("cli import main; sys.exit(main())", "launch.job import main; main()")
    command = [
        sys.executable,
        "-c",
        job,
        str(tmp_path / "out" / "run"),
        "--",
        "--output-dir",
        str(tmp_path / "out"),
        *ENV,
    ]
    done = subprocess.run(command, env={"PYTHONPATH": str(CHECKOUT)}, capture_output=True, timeout=280, check=False)
    assert done.returncode == 2 and b"error: HOME is not set" in done.stderr, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("status shut", 2, "shut cannot be read: Permission denied"),
        ("logs shut", 2, "shut cannot be read: Permission denied"),
        ("usage shut", 2, "shut cannot be read: Permission denied"),
        ("status shut/run", 2, "shut/run: Permission denied"),
        ("lint shut/exp.yaml", 2, "shut/exp.yaml: Permission denied"),
        ("export run", 2, "run/rollouts: Permission denied"),
        ("status run", 0, "run/logs cannot be read: Permission denied"),
        ("why run", 3, "run/logs cannot be read: Permission denied"),
        ("status .", 0, "directories that cannot be read, and may be runs: 1 (shut)"),
        ("usage .", 0, "shut left out: this directory cannot be read, and may be a run"),
        ("logs run --role trainer", 2, "run/logs"),
        ("logs run --role slurm", 2, "run/logs"),
        ("preflight run", 2, "run/logs"),
        ("replay run --steps 2", 74, "step_1/manifest.json: cannot be read now: Permission denied"),
        ("site list", 0, "in force here: generic"),
    ],
)
def test_what_others_may_not_read_is_said(tmp_path: Path, words: str, code: int, says: str) -> None:
    (tmp_path / "run" / "metrics").mkdir(parents=True)
    (tmp_path / "run" / "metrics" / "trainer.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    (tmp_path / "run" / "run.yaml").write_text("name: run\n")
    ended = {"attempt": 1, "incarnation": 1, "began": 1.0, "ended": 2.0, "outcome": "completed", "cause": "done"}
    (tmp_path / "run" / "attempts.jsonl").write_text(json.dumps(ended) + "\n")
    for name in ("shut", "run/logs", "run/rollouts", "run/checkpoints/step_1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(0)
    argv = [sys.executable, "-m", "prime_hpc.cli.entrypoints", *words.split()]
    if os.geteuid() == 0:  # which may read everything
        argv = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *argv]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HOME": str(tmp_path / "shut")}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code and says in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"])  # the second as Python has it in locale C
def test_a_locale_without_utf_8(tmp_path: Path, encoding: str) -> None:
    named = (tmp_path / "fr\u00fch").as_posix()
    words = (*ENV, "--inference", "none", "--launch", "local", "--output-dir")
    done = prime_hpc("plan", *words, named, HOME="/", PYTHONPATH=str(CHECKOUT), PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and b"fr\\xfch" in done.stdout, done.stderr


def test_names_in_the_locale_c_are_written_as_they_were_typed(tmp_path: Path) -> None:
    folder = tmp_path / "fr\u00fch"
    folder.mkdir()
    c = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = prime_hpc("status", folder.as_posix(), HOME="/", PYTHONPATH=str(CHECKOUT), **c)
    assert done.stdout == f"no runs under {folder}\n".encode(), done.stderr


def test_a_folder_whose_name_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"fr\xfch")
    (folder / "model").mkdir(parents=True)
    monkeypatch.chdir(folder)

    def run(loaded: Loaded) -> int:
        write_snapshot(loaded.experiment, tmp_path / "run", ["rl"])
        return 0

    monkeypatch.setattr(local, "run", run)
    assert cli.main(["rl", *ENV, "--model.name", "model"]) == 2
    assert "fr\\udcfch/model' holds bytes that are no text in this locale (utf-8)" in capsys.readouterr().err


def test_a_directory_that_was_deleted_under_the_shell(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = config.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["render", str(config)]) == 2
    assert capsys.readouterr().err == (
        "prime-hpc render: error: the directory in which this was typed is gone: change to one that is there\n"
    )


@pytest.mark.parametrize("verb", ["eval", "synthesize"])
def test_json_is_what_this_command_found(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [verb, "--environment-ids", "a", "--client.base-url", "http://a/v1", "--output-dir", str(tmp_path), "--json"]
    summary = tmp_path / verb / "results" / "summary.json"
    summary.parent.mkdir(parents=True)

    def run(loaded: Loaded) -> int:
        print("what is said meanwhile")
        if codes[0] == 0:
            write_atomic(summary, b'{"of": "now"}')
        return codes.pop(0)

    monkeypatch.setattr(local, "run", run)
    codes = [1, 0, 1, 0]
    for code, said in ((1, ""), (0, '{\n  "of": "now"\n}\n')) * 2:  # at last over an earlier one's
        assert cli.main(argv) == code
        assert capsys.readouterr().out == said


def test_a_server_by_hand_is_found_by_a_path_from_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handed: list[tuple[Any, ...]]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_user = self.path == "/v1/models" and self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if is_user else 403)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "policy"}, {"id": str(tmp_path / "model")}]}).encode())

        def log_message(self, *words: object) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = take_key(key_file())
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr("prime_hpc.config.sections.inference.DEFAULT_PORT", server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        for name in ("model", str(tmp_path / "model"), "other"):
            cli.main(["eval", "--environment-ids", "a", "--model.name", name, "--json"])
            client = handed.pop()[1].experiment.eval.client
            assert (client and client.base_url) == (None if name == "other" else url)
            said = capsys.readouterr()
            assert said.out == "" and (url in said.err) == (name != "other"), "standard output is the JSON's alone"
        server.shutdown()


def test_a_flags_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("render", ["--output=~/job.sbatch"]).path("--output") == Path("/home/me/job.sbatch")
    assert parse("render", []).path("--output") is None
    both = ["--target", "kubernetes", "--chart", "a", "--output", "b"]
    assert cli.main(["render", *ENV, "--kubernetes.image", "i", *both]) == 2
    assert "--output: a chart is a folder" in capsys.readouterr().err


def test_bench_tool_refuses_an_unknown_benchmark() -> None:
    command = [sys.executable, str(CHECKOUT / "tools" / "bench"), "no-such"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 2 and "cli" in result.stderr


def test_bench_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_cli", CHECKOUT / "tools" / "benchmarks" / "cli.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    figures = json.loads(json.dumps(benchmark.run()))
    assert figures["heavy_imports"] == {name: [] for name in figures["seconds"]}
    assert figures["exit_codes"]["rl --help"] == 0
    assert all(name in benchmark.render(figures) for name in figures["seconds"])
