"""RL as Slurm jobs: real vLLM servers and trainers on different nodes, het and packed, and what they survive."""

import json
from pathlib import Path

import psutil
import pytest
import yaml

from prime_hpc.slurm.submission_record import SUBMISSION_VARIABLE
from tests.support.runs import BIN, rows, starter_tree, used_prompts
from tests.support.slurm import Cluster
from tests.support.small_jobs import attempts, last_step

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

START_S = 240


@pytest.fixture(scope="session")
def experiment(cluster: Cluster) -> Path:
    """Reverse-text with a starter model: one trainer node, two servers of one engine each."""
    folder = Path(cluster.shared) / "rl"
    folder.mkdir()
    tree = starter_tree(
        folder,
        output_dir=str(folder / "out"),
        ckpt={"interval": 5},
        trainer={"optim": {"lr": 1e-4}},
        inference={"cpu_kv_cache_gib": 0.25, "data_parallel_size": 2, "server": {"port": 0}},
        slurm={
            "site": "devcluster",
            "gpus_per_node": 1,
            "cpus_per_task": 2,
            "inference": {"nodes": 2},
            "restart": {"node_timeout_s": 12, "fence_s": 20, "replica_retry_s": 5},
        },
    )
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def submit(cluster: Cluster, experiment: Path, name: str, *flags: object) -> tuple[str, Path]:
    words = [str(BIN / "prime-hpc"), "submit", str(experiment), "--name", name, "--json", *map(str, flags)]
    done = cluster.x(words, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job_id"], experiment.parent / "out" / name


def processes_of(run_dir: Path, *words: str) -> dict[int, psutil.Process]:
    """Processes of this run alone whose command line has these words: another run's on this machine have them, too."""
    found = {}
    for process in psutil.process_iter():
        try:
            line, submission = process.cmdline(), process.environ().get(SUBMISSION_VARIABLE, "")
        except psutil.Error:
            continue  # it has just ended, or is another user's
        if set(words) <= set(line) and submission.partition(" ")[2] == str(run_dir):
            found[process.pid] = process
    return found


def test_het_the_batch_host_lost_the_second_life_is_alone(cluster: Cluster, experiment: Path) -> None:
    flags = ("--slurm.layout", "het", "--slurm.trainer.partition", "cpu", "--slurm.trainer.gpus-per-node", 0)
    job, run_dir = submit(cluster, experiment, "het", *flags, "--max-steps", 60)
    cluster.wait_until(lambda: last_step(run_dir) >= 6, "the first steps", timeout=START_S)
    components = cluster.ask("squeue", "-h", "-o", "%i %P %N").splitlines()
    assert sorted(line.split()[:2] for line in components) == [[f"{job}+0", "cpu"], [f"{job}+1", "gpu"]]
    assert json.loads((run_dir / "submit.json").read_text())["layout"] == "het"

    first = attempts(run_dir)[0]
    (host,) = first["nodes"]["trainer"]
    cluster.drill("power-off", host)
    cluster.wait_state(job, "COMPLETED", timeout=START_S + 60)

    first, second = attempts(run_dir)
    assert (first["outcome"], first["lost_nodes"]) == ("node_lost", [host])
    assert second["outcome"] == "completed"
    assert second["incarnation"] > first["incarnation"]
    assert second["nodes"]["trainer"] != first["nodes"]["trainer"]
    # what the second attempt stands on was written before the cut; all that follows is its own, each prompt used once
    assert second["resume_step"] in (5, 10, 15, 20, 25)
    for step in range(second["resume_step"] + 1, 61):
        manifest = json.loads((run_dir / "rollouts" / f"step_{step:06d}" / "manifest.json").read_text())
        assert manifest["incarnation"] == second["incarnation"]
    prompts = [position for step in range(1, 61) for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))


def test_het_episodes_are_played_on_nodes_of_their_own(cluster: Cluster, experiment: Path) -> None:
    nodes = ("--slurm.orchestrator.partition", "cpu", "--slurm.orchestrator.nodes", 2)
    engines = ("--inference.data-parallel-size", 1, "--slurm.inference.nodes", 1)
    workers = ("--orchestrator.env-servers.workers", 2)
    job, run_dir = submit(cluster, experiment, "players", *nodes, *engines, *workers, "--max-steps", 60)
    cluster.wait_until(lambda: last_step(run_dir) >= 6, "the first steps", timeout=START_S)
    first = attempts(run_dir)[0]
    own, player = first["nodes"]["orchestrator"]
    logs = run_dir / "logs" / "attempt_1" / "orchestrator"
    said = "".join(path.read_text() for path in logs.glob("*.log"))
    assert "listens on" in said and f"[{player}] $" in said
    assert not list(logs.rglob("env_*host.log")), "none is started beside the orchestrator"
    row = rows(run_dir, "orchestrator")[-1]
    assert row["env_workers/reverse-text/workers"] == 2 and row["env_workers/reverse-text/episodes"] > 0
    family = processes_of(run_dir, "prime_hpc.envs.workers.host", "--of-a-job")  # the host and the workers it forked
    (host,) = [process for process in family.values() if process.ppid() not in family]
    key = host.environ()["PRIMEHPC_ENV_SERVER_KEY"].encode()
    assert len(key) > 20
    assert not [path for path in run_dir.rglob("*") if path.is_file() and key in path.read_bytes()], "it is in no file"
    host.kill()
    supervisor = run_dir / "logs" / "supervisor.log"
    cluster.wait_until(lambda: "it alone is started again" in supervisor.read_text(), "another host", timeout=30)
    assert len(attempts(run_dir)) == 1
    (orchestrator,) = processes_of(run_dir, "prime_hpc.orchestrator.main").values()
    orchestrator.kill()  # that is a crash: it and its hosts begin anew, beside the engine
    cluster.wait_state(job, "COMPLETED", timeout=START_S + 60)
    first, second = attempts(run_dir)
    assert (first["outcome"], first["next"], second["outcome"]) == ("failed", "in_place", "completed")
    assert second["nodes"]["orchestrator"] == [own, player]
    prompts = [position for step in range(1, 61) for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))


def test_packed_an_inference_node_lost_for_good_the_trainer_goes_on(cluster: Cluster, experiment: Path) -> None:
    flags = ("--slurm.layout", "packed", "--max-steps", 100_000, "--ckpt.interval", 50)
    job, run_dir = submit(cluster, experiment, "packed", *flags)
    cluster.wait_until(lambda: last_step(run_dir) >= 3, "the first steps", timeout=START_S)
    (host,) = attempts(run_dir)[0]["nodes"]["inference[1]"]
    cluster.drill("power-off", host)
    before = last_step(run_dir)
    cluster.wait_until(lambda: last_step(run_dir) >= before + 10, "the trainer goes on", timeout=90)
    # another node is free: a job of its own takes the lost server's place
    log = run_dir / "logs" / "supervisor.log"
    cluster.wait_until(
        lambda: "inference[1] is ready" in log.read_text().split("was lost")[-1], "the server is back", timeout=START_S
    )
    assert len(attempts(run_dir)) == 1, "all in one attempt"
    cancelled = cluster.x([str(BIN / "prime-hpc"), "cancel", str(run_dir)], timeout=100)
    assert cancelled.returncode == 0, cancelled.stderr
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "nothing is left in the queue", timeout=30)
    (life,) = attempts(run_dir)
    assert life["outcome"] == "stopped"
    assert life["saved_step"] > before
    assert job


def test_packed_a_trainer_node_lost_a_spare_takes_its_place_and_the_servers_serve_on(
    cluster: Cluster, experiment: Path
) -> None:
    flags = ("--slurm.layout", "packed", "--slurm.spare-nodes", 1, "--max-steps", 40)
    trainer = ("--trainer.num-ranks", 2, "--slurm.trainer.nodes", 2)
    servers = ("--slurm.inference.nodes", 1, "--inference.data-parallel-size", 1)
    job, run_dir = submit(cluster, experiment, "spare", *flags, *trainer, *servers)
    cluster.wait_until(lambda: last_step(run_dir) >= 6, "the first steps", timeout=START_S)
    nodes = attempts(run_dir)[0]["nodes"]
    host = nodes["trainer"][1]  # the first one is the batch host
    cluster.drill("power-off", host)
    cluster.wait_state(job, "COMPLETED", timeout=START_S + 60)

    first, second = attempts(run_dir)
    assert (first["outcome"], first["lost_nodes"], first["next"]) == ("node_lost", [host], "in_place")
    assert (second["outcome"], second["job_id"], second["restarts"]) == ("completed", job, 0)
    assert second["nodes"]["inference[0]"] == nodes["inference[0]"]
    assert second["nodes"]["trainer"][0] == nodes["trainer"][0] and host not in second["nodes"]["trainer"]
    said = (run_dir / "logs" / "supervisor.log").read_text()
    assert said.count("started inference[0]") == 1
    assert "its servers and its orchestrator go on" in said and said.count("started orchestrator") == 1
    for step in range(second["resume_step"] + 1, 41):
        manifest = json.loads((run_dir / "rollouts" / f"step_{step:06d}" / "manifest.json").read_text())
        assert manifest["incarnation"] == second["incarnation"]
    prompts = [position for step in range(1, 41) for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))


def test_packed_the_only_server_lost_a_spare_takes_its_place_in_the_same_attempt(
    cluster: Cluster, experiment: Path
) -> None:
    flags = ("--slurm.layout", "packed", "--slurm.spare-nodes", 1, "--max-steps", 40)
    servers = ("--slurm.inference.nodes", 1, "--inference.data-parallel-size", 1)
    job, run_dir = submit(cluster, experiment, "spare-server", *flags, *servers)
    cluster.wait_until(lambda: last_step(run_dir) >= 6, "the first steps", timeout=START_S)
    (host,) = attempts(run_dir)[0]["nodes"]["inference[0]"]
    cluster.drill("power-off", host)
    cluster.wait_state(job, "COMPLETED", timeout=START_S + 120)
    (only,) = attempts(run_dir)
    assert (only["outcome"], only["lost_nodes"], only["restarts"]) == ("completed", [host], 0)
    said = (run_dir / "logs" / "supervisor.log").read_text()
    assert "its server is started on the spare node" in said and said.count("started trainer") == 1
    prompts = [position for step in range(1, 41) for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))
