"""A real job looked at from the login node: its figures for Prometheus, and who is named by `why` where it hangs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.faults import pairs
from tests.support.runs import BIN, ROOT
from tests.support.slurm import ClusterError

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.exhaustive, pytest.mark.timeout(600)]

LIMIT_S = 150.0
GET = """
import sys, urllib.error, urllib.request
_, url, token = sys.argv
try:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    print("200\\n" + urllib.request.urlopen(asked, timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


class Hanging:
    """A job of which rewards, ranks, the engine and the file system can be made to hang, one after the other."""

    def __init__(self, site: pairs.Site, job: pairs.Job, hang: Path) -> None:
        self.site, self.job, self.hang = site, job, hang
        self.run_dir = site.view / "out" / job.run_dir.name
        """As the nodes see it: whoever looks there hangs with the file system."""

    def why(self, kind: str) -> dict[str, Any]:
        """Ask until somebody is named, as a user would on the login node who sees no step."""
        last: dict[str, Any] = {}

        def is_named() -> bool:
            words = [str(BIN / "prime-hpc"), "why", str(self.run_dir), "--json", "--after", "3"]
            done = self.job.cluster.x(words, cwd=Path("/"), timeout=LIMIT_S)
            assert done.returncode in (0, 1), done.stdout + done.stderr
            last.update(json.loads(done.stdout))
            return last["diagnosis"]["kind"] == kind and bool(last["diagnosis"]["is_hang"])

        try:
            self.job.cluster.wait_until(is_named, f"`why` names a cause of kind {kind}", LIMIT_S)
        except ClusterError as error:
            raise AssertionError(f"{error}\nlast: {json.dumps(last)[:4000]}") from error
        return last

    def process(self, module: str, number: int = 0) -> psutil.Process:
        """One of the run's processes; the nodes are this machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.run_dir) in words and module in words and "prime_hpc.trainer.torchrun" not in words:
                found.append(process)
        return sorted(found, key=lambda p: p.pid)[number]

    @contextmanager
    def stopped(self, process: psutil.Process) -> Iterator[None]:
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def goes_on(self) -> None:
        """In the same attempt."""
        before = self.job.step()
        self.job.cluster.wait_until(lambda: self.job.step() > before + 1, "it goes on", LIMIT_S)
        assert len(self.job.attempts()) == 1


def pid_on_its_node(process: psutil.Process) -> int:
    """Each node has process ids of its own."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


@pytest.fixture(scope="module", params=["packed", "het"])
def run(site: pairs.Site, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    """Two trainer ranks on two nodes, two engines of the transformers backend on two more."""
    path = site.experiment()
    tree = yaml.safe_load((site.back / path.name).read_text())
    hang = site.back.parent / f"hang-{request.param}"
    tree["orchestrator"]["env"] = [
        {"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"hang_while": str(hang)}}
    ]
    tree["inference"] = {"backend": "transformers", "num_replicas": 2, "cpu_kv_cache_gib": 0.1, "server": {"port": 0}}
    tree["prometheus"] = {"every_s": 1}
    tree["supervisor"] = {"grace_s": 2, "heartbeat_timeout_s": 600}
    tree["slurm"]["env"] = {"PYTHONPATH": str(ROOT)}
    tree["slurm"]["restart"] = {"node_timeout_s": 600, "fence_s": 600}  # what hangs here is to be named, not ended
    (site.back / "why.yaml").write_text(yaml.safe_dump(tree))
    job = site.submit(request.param, experiment=site.view / "why.yaml", env=tree["slurm"]["env"])
    one = Hanging(site, job, hang)
    job.cluster.wait_until(lambda: job.step() > 3, f"the first steps of {job.run_dir}", pairs.START_S)
    yield one
    hang.unlink(missing_ok=True)
    job.cluster.ask("scancel", job.job_id)
    job.cluster.wait_state(job.job_id, "CANCELLED", timeout=120)


def test_prometheus_on_the_login_node_reads_all_roles_and_servers(run: Hanging) -> None:
    """By the configuration that is printed for it: the file of targets, and the token."""
    words = [str(BIN / "prime-hpc"), "metrics", "--scrape-config", str(run.run_dir)]
    (job,) = yaml.safe_load(run.job.cluster.ask(*words))["scrape_configs"]
    folder = run.site.back / "out" / ".prometheus"
    (target,) = json.loads((folder / f"{run.job.run_dir.name}.json").read_text())
    (address,) = target["targets"]
    host = run.job.attempts()[0]["nodes"]["trainer"][0]
    assert address.startswith(f"{host}:"), "the supervisor's node"
    assert Path(job["authorization"]["credentials_file"]).name == "token"
    url = f"http://{address}/metrics?run={target['labels']['__param_run']}"
    asked = [sys.executable, "-c", GET, url]
    token = (folder / "token").read_text().strip()
    assert run.job.cluster.ask(*asked, "none") == "401"
    run_label, text = f'run="{run.job.run_dir.name}"', ""

    def is_told() -> bool:
        nonlocal text
        text = run.job.cluster.ask(*asked, token)
        told = (f"run_step{{{run_label}}}", f'process_step{{index="1",role="trainer",{run_label}}}')
        return all(f"\nprime_hpc_{name} " in text for name in told) and f'{run_label},state="running"' in text

    run.job.cluster.wait_until(is_told, f"the supervisor's own figures\n{text}", LIMIT_S)
    for wanted in (
        f'prime_hpc_process_step{{index="0",role="orchestrator",{run_label}}}',
        f'prime_hpc_server_up{{{run_label},server="inference[1]"}} 1.0',
        f'vllm:generation_tokens_total{{{run_label},server="inference[1]"}}',
        "prime_hpc_trainer_loss",
    ):
        assert f"\n{wanted}" in text, f"{wanted}\n{text}"


def test_nobody_hangs_in_a_job_that_goes_on(run: Hanging) -> None:
    words = [str(BIN / "prime-hpc"), "why", str(run.run_dir)]
    done = run.job.cluster.x(words, cwd=Path("/"), timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("nobody hangs") and "trainer rank 1" in done.stdout
    assert f"job {run.job.job_id} is RUNNING" in done.stdout


def test_a_reward_function_that_sleeps_for_ever(run: Hanging) -> None:
    run.hang.touch()
    try:
        found = run.why("environment")["diagnosis"]
        assert "'trouble'" in found["culprit"] and "length (support/trouble_taskset.py:" in found["where"]
    finally:
        run.hang.unlink()
    run.goes_on()


@pytest.mark.parametrize(
    ("module", "number", "named"),
    [
        ("prime_hpc.trainer.main", 0, "trainer rank "),
        ("prime_hpc.trainer.main", 1, "trainer rank "),
        ("prime_hpc.inference.main", 1, "inference server "),
    ],
)
def test_a_stopped_rank_and_a_stopped_engine(run: Hanging, module: str, number: int, named: str) -> None:
    process = run.process(module, number)
    with run.stopped(process):
        found = run.why("stopped")["diagnosis"]
        assert found["culprit"].startswith(named) and found["pid"] == pid_on_its_node(process)
        assert any(node in found["culprit"] for nodes in run.job.attempts()[0]["nodes"].values() for node in nodes)
    run.goes_on()


def test_a_file_system_that_hangs(run: Hanging) -> None:
    run.job.cluster.drill("hang-shared")
    try:
        found = run.why("file system")["diagnosis"]
        assert "does not answer" in found["culprit"]
    finally:
        run.job.cluster.drill("wake-shared")
    run.goes_on()
