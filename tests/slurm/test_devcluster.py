"""The dev cluster: what Slurm does on it, what each drill does, and that it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_hpc.config.site import parse_site
from tests.support.slurm import DEVCLUSTER, DONE, Cluster, ClusterError


def devcluster(*argv: str | Path, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([DEVCLUSTER, *argv], capture_output=True, text=True, timeout=timeout)


# ---- jobs


@pytest.mark.exhaustive
def test_x_is_a_command_on_the_head_node(cluster: Cluster) -> None:
    folder = cluster.shared / "with space é"
    folder.mkdir()
    script = 'import os, sys; print(os.getcwd(), sys.argv[1:], sys.stdin.read()); sys.stderr.write("!"); sys.exit(7)'
    done = cluster.x(["python3", "-c", script, "a b", "$HOME", ""], cwd=folder, input="hello")
    assert (done.returncode, done.stderr) == (7, "!")
    assert done.stdout == f"{folder} ['a b', '$HOME', ''] hello\n"
    child = subprocess.Popen(cluster.command(["sleep", "100"]), env=cluster.env)
    child.terminate()
    assert child.wait(timeout=60) == -signal.SIGTERM, "signals reach the command"


def test_a_job_runs_and_its_output_comes_back(cluster: Cluster) -> None:
    job = cluster.sbatch("echo on $SLURMD_NODENAME; exit 3", "-p", "cpu")
    assert cluster.wait_state(job, DONE) == "FAILED"
    assert cluster.output(job) in ("on n5\n", "on n6\n")
    assert cluster.job(job)["ExitCode"] == "3:0"


def test_a_het_job_spans_gpu_and_cpu_nodes(cluster: Cluster) -> None:
    job = cluster.sbatch(
        "unset CUDA_VISIBLE_DEVICES  # the batch host's: it would go to the nodes without GPUs too\n"
        "srun --het-group=0 sh -c 'echo group 0: $SLURMD_NODENAME gpus=$CUDA_VISIBLE_DEVICES' &\n"
        "srun --het-group=1 sh -c 'echo group 1: $SLURMD_NODENAME gpus=$CUDA_VISIBLE_DEVICES' &\nwait",
        *("-p", "gpu", "-N2", "--gres=gpu:2", ":", "-p", "cpu", "-N2"),
    )
    assert cluster.wait_state(job, DONE) == "COMPLETED", cluster.output(job)
    gpu = [f"group 0: {node} gpus=0,1" for node in ("n1", "n2")]
    assert sorted(cluster.output(job).splitlines()) == [*gpu, "group 1: n5 gpus=", "group 1: n6 gpus="]


def test_gpus_are_counted_and_cpu_nodes_have_none(cluster: Cluster) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert cluster.ask("srun", "-p", "gpu", "--gres=gpu:8", *show) == "0,1,2,3,4,5,6,7"
    assert sorted(cluster.ask("srun", "-p", "gpu", "-n2", "-N1", "--gpus-per-task=1", *show).split()) == ["0", "1"]
    for refused in (["-p", "gpu", "--gres=gpu:9"], ["-p", "cpu", "--gres=gpu:1"]):
        assert cluster.x(["sbatch", *refused, "--wrap", "true"]).returncode != 0
    assert "gpu" not in cluster.ask("sinfo", "-h", "-p", "cpu", "-o", "%G")


@pytest.mark.netns
def test_nodes_have_names_addresses_and_shared_memory_of_their_own(cluster: Cluster) -> None:
    script = "hostname; hostname -i; touch /dev/shm/$(hostname); sleep 1; ls /dev/shm; ls -d /proc/[0-9]* | wc -l"
    nodes = [cluster.ask("srun", "-p", "all", "-w", f"n{i}", "sh", "-c", script).split() for i in (1, 5)]
    assert [node[0] for node in nodes] == ["n1", "n5"]
    assert nodes[0][1].startswith("10.") and nodes[0][1] != nodes[1][1]
    assert [node[2:-1] for node in nodes] == [["n1"], ["n5"]]
    assert int(nodes[0][-1]) < 30, "and processes"


def test_the_site_profile_is_this_cluster(cluster: Cluster) -> None:
    site = parse_site(DEVCLUSTER.parent / "sites" / "devcluster.yaml")
    assert f"ClusterName             = {site.cluster}" in cluster.ask("scontrol", "show", "config").splitlines()
    found = {}
    for line in cluster.ask("scontrol", "--oneliner", "show", "partition").splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[fields["PartitionName"]] = (int(fields["TotalNodes"]), fields["PreemptMode"].lower())
    assert found == {name: (part.nodes, part.preempt) for name, part in site.partitions.items()}
    node = dict(
        word.split("=", 1) for word in cluster.ask("scontrol", "-o", "show", "node", "n1").split() if "=" in word
    )
    gpu = site.partitions["gpu"]
    assert (node["Gres"], node["CPUTot"]) == (f"gpu:{gpu.gpus_per_node}", str(gpu.cpus_per_node))
    assert gpu.mem_gib is not None and 0 <= int(node["RealMemory"]) / 1024 - gpu.mem_gib < 1
    assert (site.options.partition, site.het_jobs, site.requeue) == ("gpu", True, True)


# ---- drills


def test_a_job_in_high_preempts_one_is_requeued_and_one_cancelled(cluster: Cluster) -> None:
    again = cluster.sbatch(
        "echo life ${SLURM_RESTART_COUNT:-0}\nexec sleep ${SLURM_RESTART_COUNT:-100}", "-p", "scavenge"
    )
    gone = cluster.sbatch("exec sleep 100", "-p", "scavcancel")
    for job in (again, gone):
        cluster.wait_state(job, "RUNNING")
    cluster.wait_until(lambda: "life 0" in cluster.output(again), "the job's output")
    high = cluster.drill("preempt", "1")
    assert cluster.wait_state(gone, DONE) == "PREEMPTED"
    assert cluster.wait_state(again, DONE) == "COMPLETED"
    assert cluster.job(again)["Restarts"] == "1"
    assert cluster.output(again).splitlines()[-1] == "life 1"
    assert "DUE TO PREEMPTION" in cluster.output(again)
    assert cluster.wait_state(high, DONE) == "COMPLETED"


@pytest.mark.exhaustive
def test_power_off_ends_the_tasks_and_slurm_finds_out(cluster: Cluster) -> None:
    beat = "echo life ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME\n[ ${SLURM_RESTART_COUNT:-0} = 1 ] && exit\n"
    beat += 'while :; do date +%s.%N >"beat.$SLURM_JOB_ID"; sleep 0.1; done'
    again = cluster.sbatch(beat, "--requeue", "-p", "cpu")
    lost = cluster.sbatch(beat, "--no-requeue", "-p", "cpu")
    for job in (again, lost):
        cluster.wait_state(job, "RUNNING")
    node = cluster.job(again)["NodeList"]
    assert cluster.job(lost)["NodeList"] == node
    beats = [cluster.shared / f"beat.{job}" for job in (again, lost)]
    cluster.wait_until(lambda: all(path.exists() for path in beats), "the tasks' first beat")
    cluster.drill("power-off", node)
    last = [path.read_text() for path in beats]
    time.sleep(0.5)
    assert [path.read_text() for path in beats] == last, "nothing of the node lives"
    assert cluster.wait_state(lost, DONE) == "NODE_FAIL"
    assert cluster.wait_state(again, DONE) == "COMPLETED"
    other = {"n5": "n6", "n6": "n5"}[node]
    assert [line for line in cluster.output(again).splitlines() if "life" in line] == [
        f"life 0 on {node}",
        f"life 1 on {other}",
    ]
    cluster.drill("power-on", node)
    cluster.wait_idle()


@pytest.mark.exhaustive
def test_the_controller_restarts_under_a_running_job(cluster: Cluster) -> None:
    job = cluster.sbatch("until [ -e end ]; do sleep 0.1; done; echo lived")
    cluster.wait_state(job, "RUNNING")
    before = cluster.job(job)
    cluster.drill("restart-controller")
    assert cluster.job(job)["StartTime"] == before["StartTime"]
    time.sleep(6)  # slurmctld saves its state every 5 s: what a SIGKILL may make it forget
    cluster.drill("kill-controller")
    assert cluster.x(["timeout", "3", "squeue"]).returncode != 0
    assert devcluster("--dir", cluster.state, "status").returncode == 3
    (cluster.shared / "end").touch()
    cluster.drill("start-controller")
    assert cluster.wait_state(job, DONE) == "COMPLETED"
    assert (cluster.job(job)["Restarts"], cluster.output(job)) == ("0", "lived\n")


def test_slurmd_killed_and_back_leaves_its_tasks_alone(cluster: Cluster) -> None:
    job = cluster.sbatch("until [ -e back ]; do sleep 0.1; done; echo lived", "-w", "n4")
    cluster.wait_state(job, "RUNNING")
    cluster.drill("kill-slurmd", "n4")
    with pytest.raises(ClusterError, match="n4 has no slurmd that runs"):
        cluster.drill("kill-slurmd", "n4")
    cluster.drill("power-on", "n4")
    (cluster.shared / "back").touch()
    assert cluster.wait_state(job, DONE) == "COMPLETED"
    assert cluster.output(job) == "lived\n"


def test_a_drained_node_takes_no_job(cluster: Cluster) -> None:
    cluster.drill("drain", "n6", "bad", "disk")
    assert cluster.ask("sinfo", "-h", "-n", "n6", "-p", "cpu", "-o", "%T %E") == "drained bad disk"
    assert cluster.ask("srun", "-p", "cpu", "sh", "-c", "echo $SLURMD_NODENAME") == "n5"
    cluster.drill("undrain", "n6")
    cluster.wait_idle()


@pytest.mark.netns
def test_a_cut_cable_and_the_cable_back(cluster: Cluster) -> None:
    conf = (cluster.state / "etc" / "slurm.conf").read_text()
    port = next(w for w in conf.split("NodeName=n1 ")[1].split() if w.startswith("Port=")).removeprefix("Port=")
    reach = ["timeout", "2", "bash", "-c", f"</dev/tcp/n1/{port}"]
    assert cluster.x(reach).returncode == 0
    cluster.drill("cut", "n1")
    assert cluster.x(reach).returncode != 0
    cluster.drill("join", "n1")
    deadline = time.monotonic() + 60
    while cluster.x(reach).returncode != 0:  # a daemon that was cut off may hang up on the first to come
        assert time.monotonic() < deadline


# ---- up and down


@pytest.fixture
def folder(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for another cluster, side by side with the session's."""
    path = cluster.state.parent / f"d{abs(hash(request.node.name)) % 10**6}"
    yield path
    devcluster("--dir", path, "down", "--clean")


def leftovers(folder: Path) -> list[str]:
    """Processes whose command line or environment names the folder, and mounts from it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        except OSError:
            continue  # ended, or not ours
        if os.fsencode(folder) in words and int(process.name) != os.getpid():
            found.append(f"{process.name}: {words[:200]!r}")
    return found + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("mode", ["default", "--loopback"])
def test_down_leaves_nothing(cluster: Cluster, folder: Path, mode: str) -> None:
    options = [] if mode == "default" else [mode]
    up = devcluster("--dir", folder, "up", "2", "--gpus", "1", *options)
    assert up.returncode == 0, up.stderr
    again = devcluster("--dir", folder, "up", "2")
    assert again.returncode == 0 and "is up already with 2 nodes" in again.stderr
    script = "trap '' TERM; setsid sleep 1000 & sleep 1000"  # deaf, and out of its session
    sent = devcluster("--dir", folder, "x", "sbatch", "--parsable", "-D", "/", "-o", "/dev/null", "--wrap", script)
    assert sent.stdout == "1\n", sent.stderr

    def runs() -> bool:
        return devcluster("--dir", folder, "x", "squeue", "-h", "-j", "1", "-o", "%T").stdout == "RUNNING\n"

    cluster.wait_until(runs, "the other cluster's job")
    assert leftovers(folder) != []
    off = devcluster("--dir", folder, "power-off", "n1")
    assert off.returncode == 0, off.stderr
    assert not any("sleep\\x001000" in process for process in leftovers(folder)), "power-off ends the tasks"
    for _ in range(2):
        down = devcluster("--dir", folder, "down", "--clean")
        assert down.returncode == 0, down.stderr
    assert leftovers(folder) == []
    assert not folder.exists()
    assert devcluster("--dir", folder, "x", "squeue").returncode == 3
    assert cluster.is_idle(), "the session's cluster noticed nothing"


@pytest.mark.exhaustive
def test_stale_pid_files_are_no_obstacle_and_strangers_are_left_alone(cluster: Cluster, folder: Path) -> None:
    assert devcluster("--dir", folder, "up", "1").returncode == 0
    files = {path: path.read_text() for path in (folder / "run").glob("*.id")}
    assert devcluster("--dir", folder, "down").returncode == 0
    stranger = subprocess.Popen(["sleep", "100"])
    for path, text in files.items():  # as after a reboot: the pids are other processes' now
        path.write_text(f"{stranger.pid} {text.split()[1]}\n")
    assert devcluster("--dir", folder, "x", "squeue").returncode == 3
    down = devcluster("--dir", folder, "down")
    assert down.returncode == 0 and "no cluster runs" in down.stderr
    assert devcluster("--dir", folder, "up", "1").returncode == 0
    assert devcluster("--dir", folder, "x", "sinfo", "-h", "-p", "all", "-o", "%D").stdout == "1\n"
    assert devcluster("--dir", folder, "down", "--clean").returncode == 0
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_test_session_that_is_killed_leaves_nothing(cluster: Cluster) -> None:
    script = (
        "import os; from prime_hpc.runtime.process_tree import end_strays; from tests.support.slurm import Cluster\n"
        "cluster = Cluster(num_nodes=1)\n"
        "end_strays(os.getpid(), [], 1.0)\n"  # a supervisor within the session is done: it ends what it did not start
        "print(cluster.state, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=DEVCLUSTER.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    state = Path(child.stdout.readline().strip())
    assert devcluster("--dir", state, "x", "true").returncode == 0
    child.kill()
    child.communicate()
    cluster.wait_until(lambda: not state.parent.exists(), "the guard's down")
    assert leftovers(state) == []


@pytest.mark.netns
def test_a_shared_command_runs_on_every_node_before_its_slurmd(cluster: Cluster, folder: Path) -> None:
    view = cluster.shared / "view"
    view.mkdir()
    command = f"mount -t tmpfs tmpfs {view} && echo %n >{view}/who"
    up = devcluster("--dir", folder, "up", "2", "--shared-cmd", command)
    assert up.returncode == 0, up.stderr
    seen = devcluster("--dir", folder, "x", "srun", "-p", "all", "-N2", "cat", view / "who").stdout
    head = devcluster("--dir", folder, "x", "cat", view / "who").stdout
    assert (sorted(seen.split()), head) == (["n1", "n2"], "head\n")
    assert list(view.iterdir()) == [], "the mounts are the nodes' own"


def test_a_start_that_fails_leaves_nothing(cluster: Cluster, folder: Path) -> None:
    failed = devcluster("--dir", folder, "up", "2", "--conf", "NoSuchKey=1")
    assert failed.returncode == 1
    assert "NoSuchKey" in failed.stderr and "slurmctld did not start" in failed.stderr
    assert leftovers(folder) == []
    assert devcluster("--dir", folder, "up", "1").returncode == 0


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["up", "0"], 2, "the number of nodes takes a number from 1 to 200, not '0'"),
        (["up", "--gpus", "many"], 2, "--gpus takes a number"),
        (["up", "--gpus"], 2, "--gpus needs a value"),
        (["up", "--gpu", "1"], 2, "up has no option --gpu"),
        (["up", "2", "--gpu-nodes=3"], 2, "more than the 2 nodes"),
        (["down", "now"], 2, "down takes --clean only"),
        (["power-off", "n9"], 2, "n1 to n6"),
        (["power-off"], 2, "n1 to n6"),
        (["explode", "n1"], 2, "unknown command explode"),
        (["x"], 2, "x needs a command"),
        (["preempt", "5", "100"], 2, "the number of nodes takes a number from 1 to 4"),
        (["x", "no-such-command"], 127, "no-such-command"),
        ([], 2, "usage: slurm/devcluster"),
    ],
)
def test_wrong_usage_is_said(cluster: Cluster, argv: list[str], code: int, said: str) -> None:
    done = devcluster("--dir", cluster.state, *argv)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("a b", "letters, digits"), ("x" * 80, "too long"), ("", "holds other files and no cluster")]
)
def test_folders_in_which_slurm_cannot_live_are_refused(cluster: Cluster, name: str, said: str) -> None:
    folder = cluster.shared / name
    (cluster.shared / "mine").touch()
    for argv in (["up", "1"], ["down", "--clean"]):
        done = devcluster("--dir", folder, *argv)
        assert done.returncode in (0, 2), "down of what is not there is done"
        assert done.returncode == 0 or said in done.stderr
    assert (cluster.shared / "mine").exists()


def test_a_command_in_a_message_names_the_folder_that_was_named(tmp_path: Path) -> None:
    for words in (["--dir", str(tmp_path)], [f"--dir={tmp_path}"]):
        done = devcluster(*words, "status")
        assert (done.returncode, f"`slurm/devcluster {' '.join(words)} up`" in done.stderr) == (3, True), done.stderr


def test_help_names_every_command_and_option() -> None:
    done = devcluster("--help")
    assert done.returncode == 0
    assert devcluster("up", "--help").stdout == done.stdout != "", "also behind the command"
    source = "".join(path.read_text() for path in (DEVCLUSTER.parent / "devcluster.d").glob("*.sh"))
    source += DEVCLUSTER.read_text()
    words = {word for line in re.findall(r"^ *([a-z-]+(?: \| [a-z-]+)*)\)", source, re.M) for word in line.split(" | ")}
    assert {"x", "up", "kill-slurmd", "power-off", "preempt", "--grace", "--accounting"} <= words
    assert [word for word in sorted(words - {"-h", "--help", "help"}) if word not in done.stdout] == []


def test_scripts_are_clean() -> None:
    scripts = [DEVCLUSTER, *sorted((DEVCLUSTER.parent / "devcluster.d").glob("*.sh"))]
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    try:
        done = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("shellcheck is not installed")
    assert done.returncode == 0, done.stdout
