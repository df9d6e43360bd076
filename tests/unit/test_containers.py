"""Steps in the site's container: srun's arguments, mounts, cold images, stand-ins, what lint says.

`PRIMEHPC_UPDATE_GOLDEN=1 pytest tests/unit/test_containers.py` writes tests/golden/steps.*.txt anew.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from prime_hpc.config import Experiment, load_run, write_snapshot
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.lint.lint import lint
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.containers import ENVIRONMENT_FILE, Container, all_mounts, container_of, stated_paths
from prime_hpc.supervisor.preflight.images import start_images
from prime_hpc.supervisor.preflight.plan import HostCheck, Report
from prime_hpc.supervisor.roles.slurm_step import HELLO_TIMEOUT_S, StepContext, StepRole, StepSpec

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RUNTIMES: dict[str, dict[str, Any]] = {
    "pyxis": {"runtime": "pyxis", "image": "/shared/images/prime.sqsh", "args": ["--no-container-entrypoint"]},
    "apptainer": {"runtime": "apptainer", "image": "/shared/images/prime.sif", "args": ["--cleanenv"]},
    "edf": {"runtime": "edf", "image": "prime"},
}


def experiment(tmp_path: Path, **values: Any) -> Experiment:
    base = {"output_dir": tmp_path / "runs", "name": "x", "orchestrator": {"env": [{"id": "reverse-text"}]}}
    return Experiment.model_validate({**base, **values})


def site(**container: Any) -> SiteConfig:
    return SiteConfig.model_validate({"name": "test", "container": {"python": "/venv/bin/python", **container}})


def context(container: Container | None, run_dir: Path) -> StepContext:
    allocation = Allocation("7", (("n1", "n2"), ("n3",)), "n1", 0, component_ids=("7", "8"))
    return StepContext(allocation, run_dir, False, ("--mpi=none",), container)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_commands_of_a_container_site(runtime: str) -> None:
    run_dir = Path("/shared/runs/x")
    config = site(mounts=["/shared:/shared", "/etc/site:/etc/site:ro"], **RUNTIMES[runtime]).container
    assert config is not None
    box = Container(config, run_dir, tuple(all_mounts(config, [run_dir, Path("/scratch/ckpt")])), "prime-hpc-7")
    steps = context(box, run_dir)
    agent = ["prime_hpc.supervisor.agent", str(run_dir), "trainer", "1"]
    commands = {
        "a role": steps.srun(["n1", "n2"], 0, 1, "trainer", agent),
        "preflight of the node": steps.srun(["n3"], 1, 1, "preflight", ["module"], quiet=True, outside=True),
        "a stand-in": steps.substitute_command(
            {"partition": "gpu", "gres": "gpu:8"}, "x-inference", run_dir / "x.log", agent
        ),
    }
    text = "".join(f"# {name}\n{shlex.join(command)}\n" for name, command in commands.items())
    text = text.replace(sys.executable, "/opt/prime-hpc/.venv/bin/python")
    golden = GOLDEN / f"steps.{runtime}.txt"
    if os.environ.get("PRIMEHPC_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_stand_in_is_a_script_that_a_shell_can_run(tmp_path: Path) -> None:
    """What is wrapped is given to sh: the container's options are srun's, never sbatch's or exec's."""
    for runtime, values in RUNTIMES.items():
        box = Container(site(**values).container, tmp_path, ("/a b:/a b",), "prime-hpc-7")  # type: ignore[arg-type]
        command = context(box, tmp_path).substitute_command({}, "x", tmp_path / "log", ["module", "it's"])
        (wrapped,) = [word.removeprefix("--wrap=") for word in command if word.startswith("--wrap=")]
        fake = tmp_path / "srun"
        fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_EXPORT_ENV": "NONE"}
        said = subprocess.run(["sh", "-c", wrapped], env=environ, capture_output=True, text=True, check=True).stdout
        words = said.splitlines()
        assert words[-4:] == ["-P", "-m", "module", "it's"], runtime
        assert "--container-name=prime-hpc-7" not in words, "that name is of the main job's containers"


def test_every_stated_path_is_mounted_where_it_is(tmp_path: Path) -> None:
    data, model, base = tmp_path / "data", tmp_path / "model", tmp_path / "site"
    for folder in (data, model, base, tmp_path / "runs"):
        folder.mkdir()
    one = experiment(
        tmp_path,
        kind="sft",
        model={"name": str(model)},
        ckpt={"path": str(tmp_path / "later" / "ckpt")},
        sft={"data": {"path": f"{data}/part-*.jsonl", "chat_template": f"{data}/own.jinja"}},
    )
    profile = site(**RUNTIMES["pyxis"], mounts=[f"{base}:{base}"]).model_copy(update={"node_local": f"{base}/$USER/x"})
    found = stated_paths(one, profile, one.run_dir)
    assert found["sft.data.path.0"] == data and found["site.node_local"] == base
    assert found["sft.data.chat_template"] == data / "own.jinja"
    one.run_dir.mkdir()
    cache = tmp_path / "hub"
    cache.mkdir()
    box = container_of(one, profile, one.run_dir, "7", {"HF_HOME": str(cache)})
    assert box is not None
    # what does not exist yet is made by a role: the directory above it is mounted, which here holds all the others
    assert box.mounts == (f"{base}:{base}", f"{tmp_path}:{tmp_path}")
    without = one.model_copy(update={"ckpt": None})
    box = container_of(without, profile, one.run_dir, "7", {"HF_HOME": str(cache)})
    assert box is not None
    assert set(box.mounts) == {f"{p}:{p}" for p in (base, data, cache, model, one.run_dir)}
    assert "--container-workdir=" + str(one.run_dir) in box.srun_args()


def test_the_versions_that_are_evaluated_are_mounted(tmp_path: Path) -> None:
    one = experiment(tmp_path, kind="eval", orchestrator={}, eval={"weights_dir": str(tmp_path / "others" / "run")})
    assert stated_paths(one, site(**RUNTIMES["pyxis"]), one.run_dir)["eval.weights_dir"] == tmp_path / "others" / "run"


@pytest.mark.parametrize("vision", [None, "frozen"])
def test_with_images_the_folder_of_rows_is_mounted_too(tmp_path: Path, vision: str | None) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    wanted = rows if vision is None else tmp_path
    tree: dict[str, Any] = {"model": {"name": "o/m", "vision": vision}}
    sft = experiment(tmp_path, kind="sft", sft={"data": {"path": str(rows)}}, **tree)
    assert stated_paths(sft, site(**RUNTIMES["pyxis"]), sft.run_dir)["sft.data.path.0"] == wanted
    envs = {"env": [{"id": "rows", "args": {"files": str(rows)}}]}
    rl = experiment(tmp_path, orchestrator=envs, **tree)
    assert stated_paths(rl, site(**RUNTIMES["pyxis"]), rl.run_dir)["orchestrator.env.0.args.files.0"] == wanted


def test_an_environment_definition_is_built_upon_the_sites(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    one.run_dir.mkdir(parents=True)
    box = container_of(one, site(**RUNTIMES["edf"]), one.run_dir, "7", {"HF_HOME": "/nowhere"})
    assert box is not None and box.srun_args() == [f"--environment={one.run_dir / ENVIRONMENT_FILE}"]
    made = tomlkit.parse((one.run_dir / ENVIRONMENT_FILE).read_text()).unwrap()
    assert made["base_environment"] == ["prime"] and made["workdir"] == str(one.run_dir)
    assert f"{one.run_dir}:{one.run_dir}" in made["mounts"]


@pytest.mark.parametrize(("device", "flag"), [("nvidia0", ["--nv"]), ("kfd", ["--rocm"]), ("null", [])])
def test_apptainer_gets_the_gpus_that_the_node_has(tmp_path: Path, device: str, flag: list[str]) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    fake = tmp_path / "apptainer"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    box = Container(site(**RUNTIMES["apptainer"]).container, tmp_path, ("/a b:/a b",))  # type: ignore[arg-type]
    command = [word.replace("/dev/", f"{tmp_path}/dev/") for word in box.command()]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": "/not/there"}
    said = subprocess.run([*command, "-m", "x"], env=environ, capture_output=True, text=True, check=True).stdout
    own = ["--bind", "/a b:/a b", "--pwd", str(tmp_path), "--cleanenv", "/shared/images/prime.sif"]
    assert said.splitlines() == ["exec", *flag, *own, "/venv/bin/python", "-m", "x"]


@pytest.mark.parametrize(
    ("there", "started"), [(["singularity"], "singularity"), (["singularity", "apptainer"], "apptainer")]
)
def test_singularity_is_started_where_a_node_has_that_alone(tmp_path: Path, there: list[str], started: str) -> None:
    for name in there:
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\necho "$0"\n')
        fake.chmod(0o755)
    box = Container(site(**RUNTIMES["apptainer"]).container, tmp_path, ())  # type: ignore[arg-type]
    command = ["/bin/sh", *box.command()[1:]]
    said = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/{started}\n"


def test_a_cold_image_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    config = site(start_timeout_s=900, **RUNTIMES["pyxis"]).container
    assert config is not None
    spec = StepSpec("trainer", ["true"], 60.0, hosts=("n1",))
    deadlines, missing = {}, {}
    for name, box in (("bare", None), ("box", Container(config, tmp_path, ()))):
        clock = iter([HELLO_TIMEOUT_S + 800.0])
        role = StepRole(spec, tmp_path, {}, {}, context(box, tmp_path), lambda *_, **__: None, 1.0, clock.__next__)
        deadlines[name], missing[name] = role.start_timeout_s, role.missing_hosts()
    assert deadlines == {"bare": 60.0, "box": 60.0 + 900 + HELLO_TIMEOUT_S}
    assert missing == {"bare": ["n1"], "box": []}


def fake_node(words: str) -> Any:
    """`run_step` that starts one process for all hosts, which prints these lines."""

    def run_step(argv: list[str], hosts: list[str], component: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["printf", "%b", words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return run_step


def test_an_image_that_starts_on_no_node_is_no_nodes_fault(tmp_path: Path) -> None:
    checks = [HostCheck("n1"), HostCheck("n2")]
    words = "slurmstepd: error: pyxis: failed to import docker image\\n"
    report = start_images(checks, fake_node(words), 30.0, lambda: False, Report([], 0.0, tmp_path))
    assert not report.ok and report.bad == {}
    assert "started on no node: slurmstepd: error: pyxis: failed to import" in report.problems[0]


def test_why_it_does_not_start_is_said_before_how_its_task_ended(tmp_path: Path) -> None:
    """Apptainer's words name no node, and are red; srun's name it, and no reason; nor do a task's on its CPUs."""
    bound = "cpu-bind=MASK - n1, task  0  0 [26]: mask 0x1 set\\n"
    why = "\\033[31mFATAL:   could not open image /x.sif: permission denied\\033[0m\\n"
    ends = [f"srun: error: {host}: task {rank}: Exited with exit code 255\\n" for host, rank in (("n2", 1), ("n1", 0))]
    report = start_images(
        [HostCheck("n1"), HostCheck("n2")],
        fake_node("".join([bound, why, why, *ends])),
        30.0,
        lambda: False,
        Report([], 0.0, tmp_path),
    )
    said = (
        "FATAL:   could not open image /x.sif: permission denied / srun: error: n1: task 0: Exited with exit code 255"
    )
    assert report.problems == [f"the container started on no node: {said}"]


def test_a_node_on_which_the_image_does_not_start_is_named(tmp_path: Path) -> None:
    checks = [HostCheck("n1"), HostCheck("n2")]
    words = 'PREFLIGHT {"host": "n1", "phase": "started"}\\nsrun: error: n2: no space left on device\\n'
    report = start_images(checks, fake_node(words), 30.0, lambda: False, Report([], 0.0, tmp_path))
    assert list(report.bad) == ["n2"] and "no space left on device" in report.bad["n2"]
    assert not report.problems
    both = 'PREFLIGHT {"host": "n1", "phase": "started"}\\nPREFLIGHT {"host": "n2", "phase": "started"}\\n'
    assert start_images(checks, fake_node(both), 30.0, lambda: False, Report([], 0.0, tmp_path)).ok


def test_lint_of_the_container(tmp_path: Path) -> None:
    def said(one: Experiment, **container: Any) -> dict[str, str]:
        found = lint(one.model_copy(update={"launch": "slurm"}), site(**container))
        return {f"{f.code} {f.severity}": f.message for f in found if f.code in ("PH324", "PH325")}

    one = experiment(tmp_path, inference={}, slurm={"trainer": {"nodes": 1}, "inference": {"nodes": 1}})
    image = tmp_path / "x.sif"
    image.touch()
    assert said(one, image=str(image)) == {}
    assert "relative" in said(one, image="./x.sif")["PH324 error"]
    assert "not there" in said(one, image="/nowhere/x.sif")["PH324 warning"]
    assert "each of 2 nodes" in said(one, image="docker://x/y")["PH324 warning"]
    covered = said(one, image=str(image), mounts=[f"/other:{tmp_path}"])
    assert f"{tmp_path} is the host's /other" in covered["PH325 error"]
    assert said(one, image=str(image), mounts=[f"/other:{tmp_path}", f"{tmp_path}:{tmp_path}/runs"]) != {}


def test_a_model_in_a_relative_directory_is_named_from_the_root_in_run_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name, kept in (("model", str(tmp_path / "model")), ("owner/name", "owner/name"), ("./x", f"{tmp_path}/x")):
        one = experiment(tmp_path, model={"name": name}, trainer={"loss": {"kl": {"model": name}}})
        write_snapshot(one, one.run_dir, ["x"])
        read = load_run(one.run_dir)
        assert read.trainer.loss.kl is not None
        assert (read.model.name, read.trainer.loss.kl.model) == (kept, kept)
