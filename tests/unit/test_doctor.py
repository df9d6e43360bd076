"""`doctor`: its lines about a machine, and a directory really measured; figures of other file systems are judged."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from prime_hpc.cli.verbs.cluster import doctor as verb
from prime_hpc.config import ConfigError
from prime_hpc.launch.doctor import doctor, filesystem, gpu_checks
from prime_hpc.launch.doctor.advice import advise
from prime_hpc.launch.doctor.doctor import check_caches, check_shared_memory, check_slurm, check_wandb, unmet
from prime_hpc.launch.doctor.filesystem import GIB, Measured, Visibility, measure
from prime_hpc.launch.doctor.finding import Finding
from prime_hpc.launch.doctor.fs_view import FolderView, RemoteView, ViewLost
from prime_hpc.runtime import gpus
from prime_hpc.store.io.lustre import mount_of, parse_lfs_df

LFS_DF = """UUID                   1K-blocks        Used   Available Use% Mounted on
scratch-MDT0000_UUID  3147746816   250000000  2600000000   9% /scratch[MDT:0]
scratch-OST0000_UUID 10000000000  9600000000   400000000  96% /scratch[OST:0]
scratch-OST0001_UUID 10000000000  5000000000  5000000000  50% /scratch[OST:1]
OST0002             : inactive device

filesystem_summary:  20000000000 14600000000  5400000000  73% /scratch
"""
OSTS = {ost.name: ost.used_share for ost in parse_lfs_df(LFS_DF)}


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


# ---- the machine


def test_this_machine_is_examined_and_every_line_has_a_remedy_where_it_needs_one() -> None:
    findings = doctor.examine()
    names = states(findings)
    assert {"python", "prime-hpc", "login node's packages", "torch", "shared memory", "open files"} <= set(names)
    assert names["python"] == names["prime-hpc"] == "ok"
    assert all(finding.remedy for finding in findings if finding.state != "ok")


def test_nothing_heavy_is_imported() -> None:
    code = "from prime_hpc.launch.doctor.doctor import examine; examine(); import sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
    assert not {"torch", "vllm", "transformers", "wandb"} & set(eval(done.stdout))


@pytest.mark.parametrize(("hard", "state"), [(8192, "ok"), (2048, "warn")])
def test_of_open_files_the_limit_counts_that_roles_raise_themselves_to(hard: int, state: str) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this user's hard limit is lower")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, {hard})); "
    code = limited + "from prime_hpc.launch.doctor.doctor import check_limits; print(next(check_limits()).line())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.startswith(f"{state:<4}  open files: limit {hard}")


def test_packages_of_the_user_that_hide_the_environments_are_named(tmp_path: Path) -> None:
    def install(folder: str, *names: str) -> str:
        for name in names:
            (made := tmp_path / folder / f"{name}-1.0.dist-info").mkdir(parents=True)
            (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        return str(tmp_path / folder)

    user, own = install("user", "torch", "Typing_Extensions", "cowsay"), install("own", "torch", "typing-extensions")
    [found] = doctor.check_user_packages(user, own)
    assert found.state == "warn" and "hides this environment's torch, typing-extensions" in found.detail
    assert not [*doctor.check_user_packages(install("other", "cowsay"), own)]
    assert not [*doctor.check_user_packages()], "a virtual environment does not look there"


def test_packages_that_are_missing_or_of_another_version() -> None:
    assert unmet(["numpy>=2.1", "prime-hpc[roles]"]) == []
    wrong = unmet(["numpy>=999", "no-such-package-here>=1"])
    assert "installed is" in wrong[0] and wrong[1].endswith("(not installed)")


def fake_command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def slurm_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if any(folder.iterdir()) else str(folder))
    environ = {"PATH": str(folder), "HOME": str(folder)}
    return states(list(check_slurm(environ)))


def test_slurm_absent_broken_old_silent_and_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_states(tmp_path, monkeypatch) == {"slurm": "ok"}
    fake_command(tmp_path, "sbatch", "echo slurm 24.05.1")
    assert slurm_states(tmp_path, monkeypatch) == {"slurm": "fail"}, "srun and others are missing"
    for name in ("srun", "squeue", "scancel"):
        fake_command(tmp_path, name, "exit 0")
    fake_command(tmp_path, "scontrol", "echo 'Slurmctld(primary) at head is UP'")
    assert slurm_states(tmp_path, monkeypatch) == {"slurm": "ok", "slurm controller": "ok", "site profile": "warn"}
    fake_command(tmp_path, "scontrol", "echo 'Slurmctld(primary) at head is DOWN'; exit 1")
    assert slurm_states(tmp_path, monkeypatch)["slurm controller"] == "fail"
    fake_command(tmp_path, "scontrol", "exec sleep 60")
    monkeypatch.setattr(doctor, "COMMAND_TIMEOUT_S", 0.5)
    assert slurm_states(tmp_path, monkeypatch)["slurm controller"] == "fail"
    fake_command(tmp_path, "sbatch", "echo slurm 19.05.2")
    assert slurm_states(tmp_path, monkeypatch)["slurm"] == "fail"
    fake_command(tmp_path, "sbatch", "echo slurm 31.11.0")
    assert slurm_states(tmp_path, monkeypatch)["slurm"] == "warn", "newer than any that was tried"
    fake_command(tmp_path, "sbatch", "echo 'sbatch: fatal: Could not establish a configuration source'; exit 1")
    assert slurm_states(tmp_path, monkeypatch) == {"slurm": "warn"}, "commands of Debian without a cluster: as `submit`"
    fake_command(tmp_path, "sbatch", "echo 'sbatch: error while loading shared libraries'; exit 127")
    assert slurm_states(tmp_path, monkeypatch) == {"slurm": "fail"}


def test_shared_memory_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(list(check_shared_memory(tmp_path / "none"))) == {"shared memory": "warn"}
    assert states(list(check_shared_memory(tmp_path))) == {"shared memory": "ok"}
    monkeypatch.setattr(doctor, "MIN_SHM", 1 << 60)
    monkeypatch.setattr(doctor, "GOOD_SHM", 1 << 60)
    assert states(list(check_shared_memory(tmp_path))) == {"shared memory": "fail"}
    environ = {"HF_HOME": str(tmp_path / "models"), "TMPDIR": str(tmp_path)}
    found = {finding.name: finding for finding in check_caches(environ)}
    assert str(tmp_path / "models" / "hub") in found["model cache"].detail
    monkeypatch.setattr(doctor, "MODEL_CACHE_GIB", 1e9)
    assert states(list(check_caches(environ)))["model cache"] == "warn"


def test_a_node_where_nothing_that_is_compiled_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(list(check_caches({"PRIMEHPC_NODE_LOCAL": "/proc/none"})))["compiled code"] == "warn"
    monkeypatch.setattr(doctor, "may_execute", lambda _: True)
    assert states(list(check_caches({})))["compiled code"] == "ok"


def test_the_wandb_key_is_never_shown() -> None:
    (finding,) = check_wandb({"WANDB_API_KEY": "hush"})
    assert "hush" not in finding.line()


# ---- a directory


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measured, list[Path]]:
    folder = tmp_path_factory.mktemp("measured")
    found = measure(folder, lambda name: FolderView(folder / name), budget=0.0)
    return found, list(folder.iterdir())


def test_a_directory_is_measured_and_left_as_it_was(measured: tuple[Measured, list[Path]]) -> None:
    found, left = measured
    assert left == []
    assert found.write_rate > 0 and found.read_rate > 0 and found.written >= filesystem.BLOCK
    assert found.metadata_rate > 0 and found.fsync_s > 0 and found.fsync_worst_s >= found.fsync_s
    assert found.exclusive and found.mmap and found.renames > 0 and found.rename_torn == 0
    assert found.fs_type != "unknown" and found.free > 0
    json.dumps(found.as_json())


def test_a_directory_whose_locks_hang_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object) -> bool:
        raise subprocess.TimeoutExpired(["python"], 30)

    monkeypatch.setattr(filesystem, "_lock_works", hangs)
    with pytest.raises(ConfigError, match=r"could not be measured: .*timed out after 30 seconds"):
        filesystem.measure(tmp_path, budget=0.01)
    assert not list(tmp_path.iterdir())


def test_the_same_mount_sees_everything_at_once(measured: tuple[Measured, list[Path]]) -> None:
    seen = measured[0].visibility
    assert seen is not None and seen.problem == "" and seen.exclusive
    assert None not in (seen.new_name_s, seen.missed_name_s, seen.grown_s, seen.replaced_s)
    assert seen.locks == {"flock": True, "fcntl": None} or seen.locks["flock"], "fcntl knows processes, not views"


def test_another_directory_is_no_second_view(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = measure(tmp_path / "a", lambda name: FolderView(tmp_path / "b" / name), budget=0.05, watch_s=0.4)
    assert found.visibility is not None and "another directory" in found.visibility.problem
    assert states(advise(found))[f"seen from {found.visibility.other}"] == "fail"


def test_a_process_elsewhere_answers_for_its_view(tmp_path: Path) -> None:
    """What srun starts on another node, started here: its own process, its own locks."""
    command = [sys.executable, "-m", "prime_hpc.launch.doctor.fs_view"]
    found = measure(tmp_path, lambda name: RemoteView(command, tmp_path / name), budget=0.1)
    seen = found.visibility
    assert seen is not None and seen.problem == "" and seen.exclusive and seen.locks == {"flock": True, "fcntl": True}


def test_a_process_elsewhere_that_dies(tmp_path: Path) -> None:
    view = RemoteView([sys.executable, "-c", "import sys; sys.exit('no such node')"], tmp_path)
    with pytest.raises(ViewLost, match="no such node"):
        view.ask("hello")
    view.close()


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a directory"):
        measure(tmp_path / "none")
    with pytest.raises(ValueError, match="could not be measured"):
        measure(Path("/proc"))


@pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs is not installed")
def test_two_mounts_with_cached_misses(tmp_path: Path) -> None:
    """A real kernel's negative entries: a name asked for too early stays away, while the listing shows it."""
    back, one, two = (tmp_path / name for name in ("back", "one", "two"))
    for folder in (back, one, two):
        folder.mkdir()
    options = "attr_timeout=3,entry_timeout=3,negative_timeout=3"
    mounted = []
    try:
        for folder in (one, two):
            done = subprocess.run(["bindfs", "-o", options, back, folder], capture_output=True, timeout=280)
            if done.returncode != 0:
                pytest.skip(f"FUSE cannot be had here: {done.stderr.decode().strip()}")
            mounted.append(folder)
        seen = measure(one, lambda name: FolderView(two / name), budget=0.1).visibility
    finally:
        for folder in mounted:
            subprocess.run(["umount", folder], timeout=280, check=True)
    assert seen is not None and seen.problem == "" and seen.exclusive
    assert seen.missed_name_s is not None and seen.missed_name_s > 1
    assert seen.grown_s is not None and seen.grown_s > 1
    assert seen.new_name_s is not None and seen.new_name_s < seen.missed_name_s
    assert not seen.locks["flock"]


# ---- what figures mean


def good(**changes: object) -> Measured:
    figures = {"fs_type": "lustre", "source": "mds@o2ib:/scratch", "free": 900 * GIB, "total": 1000 * GIB}
    rates = {"write_rate": 2e9, "read_rate": 3e9, "fsync_s": 0.002, "metadata_rate": 2000.0, "renames": 10}
    works = {"exclusive": True, "mmap": True, "locks": {"flock": True, "fcntl": True}, "stripe": "lcm_layout_gen: 0"}
    return Measured("/scratch", **{**figures, **rates, **works, **changes})  # type: ignore[arg-type]


def test_a_good_scratch_has_no_complaint() -> None:
    assert set(states(advise(good())).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "state", "words"),
    [
        ({"fs_type": "tmpfs"}, "file system", "warn", "staging only"),
        ({"free": GIB}, "space", "warn", "keep-last"),
        ({"free_inodes": 10}, "inodes", "warn", "small files"),
        ({"osts": OSTS}, "OSTs", "warn", "setstripe"),
        ({"stripe": "stripe_count: 1"}, "stripes", "warn", "setstripe"),
        ({"stripe": None}, "stripes", "warn", "client tools"),
        ({"write_rate": 1e6}, "throughput", "warn", "save-async"),
        ({"fsync_s": 1.0}, "fsync", "warn", "scratch"),
        ({"metadata_rate": 3.0}, "metadata", "warn", "node-local"),
        ({"rename_torn": 1}, "rename", "fail", "avoid"),
        ({"rename_missing": 1}, "rename", "warn", "try again"),
        ({"exclusive": False}, "exclusive create", "fail", "avoid"),
        ({"mmap": False}, "mmap", "fail", "avoid"),
        ({"locks": {"flock": None, "fcntl": True}}, "locks", "warn", "-o flock"),
    ],
)
def test_what_to_set(changes: dict[str, object], name: str, state: str, words: str) -> None:
    finding = next(finding for finding in advise(good(**changes)) if finding.name == name)
    assert finding.state == state and words in finding.remedy


def test_what_another_node_does_not_see() -> None:
    seen = Visibility("n2", 8.0, 0.1, None, 3.0, 0.1, exclusive=False, locks={"flock": False, "fcntl": True})
    lines = [finding.line() for finding in advise(good(visibility=seen)) if finding.name == "seen from n2"]
    assert [line[:4].strip() for line in lines] == ["ok", "warn", "warn", "ok", "fail", "warn"]
    assert "not within 8 s" in lines[1]


def test_ost_shares() -> None:
    assert OSTS == {"scratch-OST0000": 0.96, "scratch-OST0001": 0.5}


def test_the_mount_of_a_path(tmp_path: Path) -> None:
    table = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:40 / {tmp_path} rw,nosuid - tmpfs none rw\n"
        f"31 22 0:41 / {tmp_path} rw - nfs4 server:/export rw,vers=4.2\n"
        "short line\n"
    )
    assert mount_of(tmp_path / "run", table) == ("nfs4", "server:/export", "rw,rw,vers=4.2")
    assert mount_of(Path("/elsewhere"), table)[0] == "ext4"


# ---- the verb


def test_the_verb_measures_and_says_it_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(["--path", str(tmp_path), "--json"], "prime-hpc doctor") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["measured"]["path"] == str(tmp_path) and said["findings"]


@pytest.mark.parametrize("words", [["x"], ["--other", "y"], ["--path"], ["--path", ".", "--other", "/dev/null/none"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(ValueError):
        verb.run(words, "prime-hpc doctor")


# ------------------------------------------------------------------------------------------------- GPUs


def put_build(monkeypatch: pytest.MonkeyPatch, made_for: str | None, driver: str | None) -> None:
    monkeypatch.setattr(gpu_checks, "torch_build", lambda: ("2.13.0", made_for))
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: driver)
    monkeypatch.setattr(gpus, "LIBRARY", "libnowhere.so.1")
    monkeypatch.setattr(gpu_checks, "build_problem", lambda: None if made_for else "torch 2.13.0 is a CPU build")


@pytest.mark.parametrize(
    ("made_for", "driver", "state", "words"),
    [
        ("cuda 13.0", "580.65.06", "ok", "580.65.06"),
        ("cuda 13.0", "550.54.14", "fail", "needs a driver of 580"),
        ("cuda 12.8", "550.54.14", "ok", "cuda 12.8"),
        (None, "580.65.06", "fail", "CPU build"),
        (None, None, "ok", "CPU build"),
        ("cuda 13.0", None, "ok", "no NVIDIA driver"),
    ],
)
def test_builds_are_held_against_the_driver(
    made_for: str | None, driver: str | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_build(monkeypatch, made_for, driver)
    (found,) = gpu_checks.check_builds({})
    assert found.state == state and words in found.detail, found


def test_a_login_node_is_told_that_its_clusters_jobs_need_gpu_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_build(monkeypatch, None, None)
    profile = tmp_path / "big.yaml"
    profile.write_text("partitions: {h100: {gpus_per_node: 8}}\n")
    (found,) = gpu_checks.check_builds({"PRIMEHPC_SITE": str(profile)})
    assert found.state == "warn" and "h100 have GPUs" in found.detail and "tools/setup gpu" in found.remedy
    profile.write_text("device: cpu\npartitions: {h100: {gpus_per_node: 8}}\n")
    (found,) = gpu_checks.check_builds({"PRIMEHPC_SITE": str(profile)})
    assert found.state == "ok"


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ((0, "count 2\n"), "ok", "sees all 2"),
        ((0, "count 0\n"), "fail", "torch sees 0 of the 2"),
        ((1, "ImportError: libcudart.so.13"), "fail", "libcudart"),
    ],
)
def test_torch_is_asked_for_the_gpus(
    answer: tuple[int, str], state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_build(monkeypatch, "cuda 13.0", "580.65.06")

    def run(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        if argv[0] == "nvidia-smi":
            raise FileNotFoundError("nvidia-smi")
        return answer if "torch" in argv[-1] else (1, "")

    (found,) = gpu_checks.check_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, run)
    assert found.state == state and words in found.detail, found
