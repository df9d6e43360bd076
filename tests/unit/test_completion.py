"""Shell completion: what is offered, and the scripts as real shells run them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prime_hpc import cli
from prime_hpc.cli.common import parse
from prime_hpc.cli.complete import complete, split_line
from prime_hpc.cli.verbs.completion import SCRIPTS
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.help import walk

BIN = Path(sys.executable).parent


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs with names that shells find hard, and a folder of configs to stand in."""
    for name in ("alpha", "alpine", "lr sweep/p1", "x=1,y=2", "ünï"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "run.yaml").touch()
    (tmp_path / "outputs" / "lr sweep" / "points.jsonl").touch()
    for number in (1, 2):
        (tmp_path / "outputs" / "alpha" / "logs" / f"attempt_{number}").mkdir(parents=True)
    for name in ("configs/a.yaml", "configs/b.toml", "configs/notes.txt", "configs/more/c.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str) -> tuple[str, list[str]]:
    directives, *words = complete(split_line(line)).splitlines()
    return directives, [word.partition("\t")[0] for word in words]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_program_is_completed(shell: str) -> None:
    programs = {verb for verb, spec in cli.VERBS.items() if spec.is_entrypoint} - {"eval"}  # a builtin of the shells
    line = next(
        line for line in SCRIPTS[shell].splitlines() if line.startswith(("complete -F", "#compdef", "for prog"))
    )
    assert programs <= set(line.split())


def test_flags_are_taken_apart_as_the_table_states_them() -> None:
    by_name = {name: flag for flag in cli.VERBS["logs"].flags for name in flag.names}
    assert {name for name, flag in by_name.items() if flag.takes_value} == {
        "--role",
        "--rank",
        "--attempt",
        "-n",
        "--lines",
    }
    given = parse("logs", ["demo", "-n", "3", "-f", "--rank=1", "--lines", "5", "--frob", "--json=x"])
    assert given.flags == {"--lines": "5", "--follow": "", "--rank": "1"}
    assert given.words == ["demo", "--frob", "--json=x"] and "-n|--lines N" in given.usage
    assert parse("submit", ["a.yaml", "--no-follow"]).flags == {"--no-follow": ""}
    assert parse("eval", ["--compare", "a", "b"]).words == ["a", "b"]
    assert "--now" in parse("sweep", ["lr", "--now"], "status").words  # cancel's
    with pytest.raises(ConfigError, match="--rank needs a value"):
        parse("logs", ["demo", "--rank"])
    for flag, call in (("--rank", lambda g: g.whole("--rank", 2)), ("--rank", lambda g: g.positive("--rank"))):
        for value in ("-1", "x", "nan"):
            with pytest.raises(ConfigError, match=f"{flag} {value}: must be a"):
                call(parse("logs", ["demo", flag, value]))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prime-hpc a b", ["prime-hpc", "a", "b"]),
        ("prime-hpc ", ["prime-hpc", ""]),
        ("prime-hpc 'a b", ["prime-hpc", "a b"]),
        ('prime-hpc "a b" ', ["prime-hpc", "a b", ""]),
        ("prime-hpc a\\ ", ["prime-hpc", "a "]),
        ("prime-hpc a\\", ["prime-hpc", "a"]),
        ("", [""]),
    ],
)
def test_lines_are_split_as_a_shell_does(line: str, words: list[str]) -> None:
    assert split_line(line) == words


@pytest.mark.parametrize(
    ("line", "directives", "words"),
    [
        ("prime-hpc st", "", ["status"]),
        ("prime-hpc nonsense x", "", []),
        ("prime-hpc status al", "dirs", ["alpha", "alpine"]),
        ("prime-hpc diff alpha x", "dirs", ["x=1,y=2"]),
        ("prime-hpc logs alpha --role tr", "", ["trainer"]),
        ("prime-hpc logs alpha --attempt ", "", ["1", "2"]),
        ("prime-hpc logs --fol", "", ["--follow"]),
        ("prime-hpc submit a.yaml --dry", "", ["--dry-run"]),
        ("prime-hpc submit a.yaml --trainer.opt", "nospace", ["--trainer.optim."]),
        ("prime-hpc submit a.yaml --max-st", "", ["--max-steps"]),
        ("prime-hpc submit a.yaml --max_st", "", ["--max_steps"]),
        ("prime-hpc submit a.yaml --launch s", "", ["slurm"]),
        ("prime-hpc submit a.yaml --launch=s", "", ["--launch=slurm"]),
        ("prime-hpc plan --clean ", "files", ["@"]),
        ("prime-hpc doctor --path ", "dirs", []),
        ("prime-hpc site sh", "", ["show"]),
        ("prime-hpc sweep status ", "dirs", ["lr sweep"]),
        ("prime-hpc completion ", "", ["bash", "fish", "zsh"]),
        ("/opt/venv/bin/rl @ ", "files", []),
        ("trainer --opt", "nospace", ["--optim."]),
        ("elsewhere", "", []),
    ],
)
def test_what_is_offered(outputs: Path, line: str, directives: str, words: list[str]) -> None:
    assert offered(line) == (directives, words)


def test_every_key_can_be_reached(outputs: Path) -> None:
    """A section at a time, from its dot on."""
    leaves = {path.replace("_", "-") for path, _, inner in walk() if not inner and ".0." not in path}
    reached: set[str] = set()
    todo = ["--"]
    while todo:
        _, words = offered(f"prime-hpc plan {todo.pop()}")
        todo += [word for word in words if word.endswith(".")]
        reached |= {word.lstrip("-") for word in words}
    assert leaves <= reached


def test_completion_of_the_line_under_the_cursor_is_the_verbs_answer(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "--line", "prime-hpc logs --help alp"]) == 0  # no help page in between
    assert capsys.readouterr().out.splitlines() == ["dirs", "alpha", "alpine"]
    assert cli.main(["completion", "--words", "prime-hpc\x1fstatus\x1f"]) == 0
    assert "lr sweep/p1" in capsys.readouterr().out.splitlines()
    assert cli.main(["completion", "tcsh"]) == 2
    assert cli.main(["completion"]) == 2


def test_nothing_heavy_is_imported(outputs: Path) -> None:
    code = (
        "import sys; from prime_hpc.cli.complete import complete\n"
        "assert 'status' in complete(['prime-hpc', 'st'])\n"
        "assert '--trainer.optim.' in complete(['prime-hpc', 'submit', '--trainer.o'])\n"
        "assert 'alpha' in complete(['prime-hpc', 'status', 'al'])\n"
        "assert not {'pydantic', 'yaml', 'torch'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr


# --- real shells ------------------------------------------------------------------------------------------------


def shell(name: str, script: str, *arguments: str, cwd: Path) -> list[str]:
    """Lines that a script prints, with the product's commands on PATH."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    quiet = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    result = subprocess.run(
        [program, *quiet, "-c", script, *arguments],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return sorted(result.stdout.splitlines())


BASH_TAB = """
eval "$(prime-hpc completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_prime_hpc
[ ${#COMPREPLY[@]} -eq 0 ] || printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (["prime-hpc", "comp"], ["completion"]),
        (["prime-hpc", "status", "al"], ["alpha", "alpine"]),
        ([f"{BIN}/prime-hpc", "logs", "alpha", "--attempt", ""], ["1", "2"]),
        (["prime-hpc", "submit", "configs/"], ["configs/a.yaml", "configs/b.toml", "configs/more"]),
        (["rl", "@", "configs/a"], ["configs/a.yaml"]),
        (["prime-hpc", "site", "probe", "--output", "configs/no"], ["configs/notes.txt"]),
        (["prime-hpc", "frob", ""], []),
    ],
)
def test_bash(outputs: Path, words: list[str], offers: list[str]) -> None:
    assert shell("bash", BASH_TAB, "tab", " ".join(words), *words, cwd=outputs) == offers


@pytest.mark.parametrize(
    ("line", "words", "offers"),
    [
        # bash breaks words at = and :, and replaces only what comes after the break
        ("prime-hpc logs x=1", ["prime-hpc", "logs", "x", "=", "1"], ["1,y=2"]),
        ("prime-hpc submit --launch=", ["prime-hpc", "submit", "--launch", "="], ["auto", "local", "slurm"]),
        ("prime-hpc submit --launch=lo", ["prime-hpc", "submit", "--launch", "=", "lo"], ["local"]),
        ("prime-hpc logs 'lr s", ["prime-hpc", "logs", "'lr s"], ["lr sweep/p1"]),
    ],
)
def test_bash_breaks_words(outputs: Path, line: str, words: list[str], offers: list[str]) -> None:
    assert shell("bash", BASH_TAB, "tab", line, *words, cwd=outputs) == offers


def test_bash_without_the_line(outputs: Path) -> None:
    script = BASH_TAB.replace("COMP_LINE=$1 COMP_POINT=${#1} ", "")
    assert shell("bash", script, "tab", "", "prime-hpc", "status", "alph", cwd=outputs) == ["alpha"]


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("prime-hpc comp", ["completion"]),
        ("prime-hpc logs 'lr s", ["lr sweep/p1"]),
        ("prime-hpc logs alpha --attempt ", ["1", "2"]),
        ("prime-hpc submit configs/", ["configs/a.yaml", "configs/b.toml", "configs/more/"]),
        ("rl @ configs/a", ["configs/a.yaml"]),
    ],
)
def test_fish(outputs: Path, line: str, offers: list[str]) -> None:
    script = "prime-hpc completion fish | source; complete -C $argv[1]"
    assert [row.partition("\t")[0] for row in shell("fish", script, line, cwd=outputs)] == offers


ZSH_TAB = """
autoload -Uz compinit && compinit -u -D
eval "$(prime-hpc completion zsh)"
compadd() {  # outside a completion there is none: print the words of the array that it is given
    local array
    while (( $# )); do case $1 in (-a) array=$2; shift 2;; (-d|-S) shift 2;; (*) shift;; esac; done
    print -rl -- "${(@P)array}"
}
_files() { print -r -- "files $*" }
words=("$@") CURRENT=$#
_prime_hpc
true
"""


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (["prime-hpc", "comp"], ["completion"]),
        (["prime-hpc", "status", "al"], ["alpha", "alpine", "files -/"]),
        (["prime-hpc", "logs", "lr\\ s"], ["files -/", "lr sweep/p1"]),
        (["prime-hpc", "logs", "'lr s"], ["files -/", "lr sweep/p1"]),
        (["prime-hpc", "logs", "alpha", "--attempt", ""], ["1", "2"]),
        (["prime-hpc", "submit", "--trainer.opt"], ["--trainer.optim."]),
        (["rl", "@", ""], ["files -g *.(yaml|yml|toml)"]),
    ],
)
def test_zsh(outputs: Path, words: list[str], offers: list[str]) -> None:
    assert shell("zsh", ZSH_TAB, "tab", *words, cwd=outputs) == offers


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_parse(name: str, tmp_path: Path) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "script").write_text(SCRIPTS[name])
    result = subprocess.run(
        [program, "-n", tmp_path / "script"], capture_output=True, text=True, timeout=280, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
