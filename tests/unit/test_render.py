"""The batch script: golden files, quoting, and what bash and shellcheck say to it.

`PRIMEHPC_UPDATE_GOLDEN=1 pytest tests/unit/test_render.py` writes tests/golden anew: read the difference before it is
committed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import GENERIC, parse_site
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.script import ArrayPart, directive, escape_pattern, render_job, restart_mode

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
PYTHON = "/opt/prime-hpc/.venv/bin/python"
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "sizes")  # laid over others
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))

SITE: dict[str, Any] = {
    "name": "golden",
    "partitions": {
        "h100": {"gpus_per_node": 8, "preempt": "off"},
        "a100": {"gpus_per_node": 4, "preempt": "cancel"},
        "cpu": {},
    },
}
RL: dict[str, Any] = {
    "name": "math-rl",
    "output_dir": "/shared/runs",
    "orchestrator": {"env": [{"id": "reverse-text"}]},
    "inference": {"data_parallel_size": 16},
    "trainer": {"num_ranks": 16},
}
OPD: dict[str, Any] = {**RL["orchestrator"], "advantage": {"type": "opd"}, "teacher": {"model": "owner/teacher"}}
EVERYTHING: dict[str, Any] = {
    "partition": "h100",
    "account": "proj-1",
    "qos": "high",
    "constraint": "h100&ib",
    "gpus_per_node": 8,
    "gpu_type": "h100",
    "mem": "1500G",
    "cpus_per_task": 96,
    "time": "1-12:00:00",
    "time_min": "6:00:00",
    "exclude": "node[7,9]",
    "nodelist": "node[1-2]",
    "reservation": "big run",
    "switches": "1@10:00",
    "exclusive": True,
    "mail_user": "a@b.org",
    "mail_type": "END,FAIL",
    "comment": 'it\'s "mine" #1',
    "dependency": "afterok:123",
    "licenses": "matlab:2",
    "job_name": "50% done",
    "extra": {"wckey": "rl", "spread-job": True, "nice": 100},
    "setup": ["ulimit -n 65536"],
    "env": {"NCCL_DEBUG": "INFO", "GREETING": 'it\'s $HOME `x` "y" é'},
    "restart": {"how": "successor", "signal_lead_s": 300},
}
SITE_OF_EVERYTHING: dict[str, Any] = {
    **SITE,
    "setup": ["module load cuda/12.8"],
    "env": {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"},
    "node_local": "/local/$USER/${SLURM_JOB_ID}",
    "network_interface": "ib0",
}
CONTAINER = {"runtime": "pyxis", "image": "/shared/images/prime.sqsh", "mounts": ["/shared:/shared"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "het": (
        {
            **RL,
            "slurm": {
                "time": "12:00:00",
                "exclude": "bad1",
                "trainer": {"partition": "h100", "mem": "0"},
                "inference": {"partition": "a100", "mem": "0", "time": "24:00:00"},
                "orchestrator": {"partition": "cpu", "cpus_per_task": 8, "mem": "32G", "reservation": "front"},
                "dependency": "singleton",
                "licenses": "x:1",
            },
        },
        SITE,
    ),
    "packed": ({**RL, "slurm": {"partition": "h100", "time": "12:00:00", "spare_nodes": 1}}, SITE),
    "single_node": (
        {
            **RL,
            "inference": {"data_parallel_size": 4},
            "trainer": {"num_ranks": 4},
            "slurm": {"partition": "h100", "time": "60"},
        },
        SITE,
    ),
    "sft": (
        {
            "kind": "sft",
            "name": "math-sft",
            "output_dir": "/shared/runs",
            "sft": {"data": {"type": "fake"}},
            "trainer": {"num_ranks": 32},
            "slurm": {"partition": "h100", "time": "4:00:00"},
        },
        SITE,
    ),
    "teacher": (
        {
            **RL,
            "orchestrator": OPD,
            "teacher_inference": {"num_replicas": 2, "tensor_parallel_size": 4},
            "slurm": {
                "time": "12:00:00",
                "trainer": {"partition": "h100"},
                "inference": {"partition": "h100"},
                "teacher": {"partition": "a100", "mem": "0"},
            },
        },
        SITE,
    ),
    "container": (
        {**RL, "slurm": {"partition": "a100", "time": "12:00:00"}},
        {**SITE, "container": CONTAINER, "setup": ["module load enroot"]},
    ),
    "everything": (
        {**RL, "name": "été 50% #1", "output_dir": '/shared/a b\'s "runs" $HOME', "slurm": EVERYTHING},
        SITE_OF_EVERYTHING,
    ),
}

ATTEMPT = """
import os, pathlib, signal, sys
os.kill(os.getpid(), signal.SIGUSR1)
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.supervisor.stop_requests import Controls
controls = Controls(pathlib.Path(sys.argv[1]), Allocation("1", (("n1",),), "n1", 0, ("1",), None), 120.0)
controls._limit = None
controls.install()
os.kill(os.getpid(), signal.SIGUSR1)
print(controls.poll().reason)
controls.restore()
os.kill(os.getpid(), signal.SIGUSR1)
print("requeued")
"""


def render(tree: dict[str, Any], site: dict[str, Any], **more: Any) -> str:
    one, profile = Experiment.model_validate(tree), SiteConfig.model_validate(site)
    more = {"python": PYTHON, "command_tail": ["/home/me/exp.yaml", "--max-steps", "10"], **more}
    return render_job(place_slurm(one, profile), one, profile, **more)


def check_shell(script: str, tmp_path: Path) -> None:
    """bash parses it, and shellcheck (where it is installed) finds nothing."""
    path = tmp_path / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    parsed = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=280, check=False)
    assert parsed.returncode == 0, parsed.stderr
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=280, check=False)
        assert found.returncode == 0, found.stdout
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len(script.splitlines()) - len(directives) <= 40


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, tmp_path: Path) -> None:
    script = render(*CASES[name], token="0123456789abcdef")
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("PRIMEHPC_UPDATE_GOLDEN"):
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")
    check_shell(script, tmp_path)


def test_shellcheck_is_here() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: the scripts were only parsed by bash -n")


def test_golden_files_have_a_case() -> None:
    own = {path.stem for path in GOLDEN.glob("*.sbatch") if not path.stem.startswith("recipe_")}  # of configs/
    assert own == set(CASES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_renders(path: Path, tmp_path: Path) -> None:
    one = load_experiment(["@", str(path)], "plan", environ={}).experiment
    for site in (GENERIC, parse_site(ROOT / "slurm" / "sites" / "devcluster.yaml")):
        script = render_job(place_slurm(one, site), one, site, python=PYTHON, command_tail=[str(path)])
        check_shell(script, tmp_path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.name)
def test_every_sweep_renders_as_an_array(path: Path, tmp_path: Path) -> None:
    base = path.parent / yaml.safe_load(path.read_text(encoding="utf-8"))["experiment"]
    one = load_experiment(["@", str(base)], "plan", environ={}).experiment
    if one.slurm.layout == "het":
        with pytest.raises(ConfigError, match="lanes"):
            render_job(
                place_slurm(one, GENERIC),
                one,
                GENERIC,
                python=PYTHON,
                command_tail=[],
                array=ArrayPart(tmp_path, [0], 1, "x"),
            )
        return
    array = ArrayPart(tmp_path, [0, 1], 1, f"{escape_pattern(str(tmp_path))}/slurm-%A_%a.out")
    check_shell(
        render_job(place_slurm(one, GENERIC), one, GENERIC, python=PYTHON, command_tail=[], array=array), tmp_path
    )


@pytest.mark.parametrize("layout", ["packed", "het"])
def test_a_script_starts_where_relative_paths_count_from(layout: str) -> None:
    """Wherever sbatch is called."""
    tree, site = CASES["het" if layout == "het" else "single_node"]
    script = render(tree, site, cwd=Path("/home/me/my runs"))
    assert script.splitlines().count('#SBATCH --chdir="/home/me/my runs"') == 1
    assert script.index("--chdir") < script.index("hetjob" if layout == "het" else "set -euo")


def test_the_example_site_is_a_site() -> None:
    site = parse_site(ROOT / "slurm" / "sites" / "example.yaml")
    assert site.partitions["h100"].gpus_per_node == 8


def test_rendered_twice_is_the_same() -> None:
    assert render(*CASES["het"]) == render(*CASES["het"])


def test_array() -> None:
    array = ArrayPart(Path("/shared/it's 5%"), [7, 0, 1, 2], 2, "/shared/5%%/slurm-%A_%a.out")
    script = render(*CASES["packed"], array=array)
    assert "#SBATCH --array=0-2,7%2\n" in script
    assert "#SBATCH --output=/shared/5%%/slurm-%A_%a.out\n" in script
    assert script.endswith(
        f"""exec {PYTHON} -P -m prime_hpc.launch.job --point '/shared/it'"'"'s 5%' "$SLURM_ARRAY_TASK_ID"\n"""
    )
    with pytest.raises(ConfigError, match="refuses arrays of het jobs"):
        render(*CASES["het"], array=array)


def test_how_a_job_comes_back_is_in_the_script() -> None:
    def flags(site: dict[str, Any], **slurm: Any) -> set[str]:
        script = render({**RL, "slurm": {"partition": "h100", **slurm}}, {**SITE, **site})
        return set(re.findall(r"--(?:no-)?requeue$|--no-kill$", script, re.MULTILINE))

    assert flags({}) == {"--requeue", "--no-kill"}
    assert flags({"requeue": False}) == {"--no-requeue", "--no-kill"}
    assert flags({}, partition="a100") == {"--no-requeue", "--no-kill"}  # preemption cancels there
    assert flags({}, restart={"how": "off"}) == {"--no-requeue", "--no-kill"}
    assert flags({}, layout="het") == {"--requeue"}
    one = Experiment.model_validate({**RL, "slurm": {"restart": {"how": "successor"}}})
    assert restart_mode(one, GENERIC, place_slurm(one, GENERIC)) == "successor"


def test_slurms_warning_ends_no_job_that_does_not_listen(tmp_path: Path) -> None:
    """While its modules load, before the supervisor listens, and after its attempt: it is to be requeued yet."""
    supervisor = tmp_path / "python"
    supervisor.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{ATTEMPT}' {tmp_path}\n")
    supervisor.chmod(0o755)
    warn = "kill -USR1 $$; sleep 0.1"  # bash takes note of it after a command
    script = render({**RL, "slurm": {"partition": "h100"}}, {**SITE, "setup": [warn]}, python=str(supervisor))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, "warned by SIGUSR1\nrequeued\n"), done.stderr


def test_a_component_states_what_slurm_would_hand_on() -> None:
    parts = render(*CASES["het"]).split("#SBATCH hetjob\n")
    assert len(parts) == 3
    front, trainer, inference = parts
    assert "--reservation=front" in front
    assert "--dependency=singleton" in front
    assert all("--dependency=\n" in part and "--licenses" not in part for part in (trainer, inference))
    assert all("--reservation=\n" in part for part in (trainer, inference)), "the leader's reservation is taken back"
    assert "--time=12:00:00" in trainer
    assert "--time=24:00:00" in inference


def test_the_comment_holds_the_token() -> None:
    tree = {**RL, "slurm": {"partition": "h100", "comment": "mine"}}
    assert '--comment="prime-hpc:abc mine"' in render(tree, SITE, token="abc")
    assert '--comment="prime-hpc mine"' in render(tree, SITE)
    assert "--comment=prime-hpc:abc\n" in render({**RL, "slurm": {"partition": "h100"}}, SITE, token="abc")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"slurm": {"job_name": "a\nb"}}, "line break"),
        ({"output_dir": "/shared/a\nb"}, "line break"),
        ({"output_dir": "/shared/a\\b"}, "output_dir: .*backslash"),
        ({"slurm": {"env": {"A B": "x"}}}, "slurm.env.*no name of an environment variable"),
        ({"slurm": {"env": {"A": "x\0"}}}, "NUL"),
        ({"slurm": {"comment": "x" * 9000}}, "sbatch reads at most"),
    ],
)
def test_what_no_script_can_say_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render({**RL, **values}, SITE)


def read_directive(text: str) -> str:
    """One argument as sbatch takes it from a script: written after `_get_argument` in Slurm's src/sbatch/opt.c."""
    taken, quote, escaped = [], "", False
    for character in text:
        if escaped:
            taken.append(character)
            escaped = False
        elif character == "\\":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                taken.append(character)
        elif character in "\"'":
            quote = character
        elif character == "#" or character.isspace():
            break
        else:
            taken.append(character)
    return "".join(taken)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_sbatch_reads_back_every_value(value: str) -> None:
    assert read_directive(directive("comment", value)) == f"--comment={value}"


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z][A-Z0-9_]{2,8}", fullmatch=True),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        max_size=3,
    )
)
def test_bash_reads_back_every_variable(values: dict[str, str]) -> None:
    values = {f"PH_{name}": value for name, value in values.items()}
    script = render({**RL, "slurm": {"partition": "h100", "env": values}}, SITE)
    body = script[script.index("set -euo") : script.index("exec ")]
    shown = "\n".join(f'printf "%s\\0" "${name}"' for name in values)
    result = subprocess.run(["bash", "-c", f"{body}\n{shown}"], capture_output=True, timeout=280, check=False)
    assert result.returncode == 0
    assert result.stdout.split(b"\0")[:-1] == [value.encode() for value in values.values()]


def test_the_command_survives_any_path() -> None:
    tree = {**RL, "output_dir": "/shared/a 'b' \"c\" $d é", "slurm": {"partition": "h100"}}
    script = render(tree, SITE, python="/opt/my env/python", command_tail=["/x y/exp.yaml", "--name", "it's"])
    line = script.splitlines()[-1].replace("exec ", "printf '%s\\n' ", 1)
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=280, check=False)
    assert shown.stdout.splitlines() == [
        *("/opt/my env/python", "-P", "-m", "prime_hpc.launch.job", "/shared/a 'b' \"c\" $d é/math-rl", "--"),
        *("/x y/exp.yaml", "--name", "it's"),
    ]


@pytest.mark.parametrize(
    ("indices", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 0, 1, 3], "0-1,3,5"), ([2, 2], "2")]
)
def test_index_ranges(indices: list[int], text: str) -> None:
    assert index_ranges(indices) == text
