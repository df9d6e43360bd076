"""A run as Kubernetes objects: valid by Kubernetes' own schemas, the chart the same as the manifests, no secret in
sight; and the process of a pod, which starts agents for those who know the run's key."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import kubernetes_validate
import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.kubernetes import connection, pod, start
from prime_hpc.kubernetes.manifests import FINAL_CODES, Manifest, manifests
from prime_hpc.kubernetes.placement import PODS, read_nodes
from prime_hpc.kubernetes.text import write_chart, yaml_stream
from prime_hpc.launch import pods, prepare
from prime_hpc.runtime.role_context import NODE
from prime_hpc.store.errors import StoreError, Unreadable
from tests.support.lint import LLAMA_8B

VERSIONS = ("1.31.0", kubernetes_validate.latest_version())
TREE: dict[str, Any] = {
    "name": "Math_RL",
    "orchestrator": {"env": [{"id": "reverse-text"}]},
    "trainer": {"num_ranks": 16},
    "inference": {"data_parallel_size": 6, "tensor_parallel_size": 4},
    "slurm": {"gpus_per_node": 8},
    "ckpt": {"interval": 5},
    "kubernetes": {
        "image": "registry.example/prime-hpc:1",
        "requests": {"cpu": "32", "rdma/ib": "1", "hugepages-2Mi": "1Gi"},
        "security_context": {"runAsUser": 1000, "fsGroup": 1000},
        "container_security_context": {"capabilities": {"add": ["IPC_LOCK"]}},
        "env_from": ["tokens"],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate({**TREE, **changes})


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [found for found in objects if found["kind"] == kind]


CASES: dict[str, dict[str, Any]] = {
    "rl": {},
    "on one node": {"trainer": {"num_ranks": 4}, "inference": {"data_parallel_size": 4}},
    "claim": {"kubernetes": {**TREE["kubernetes"], "claim": "runs", "namespace": "ml", "image_pull_secrets": ["pull"]}},
    "sft": {"kind": "sft", "orchestrator": {}, "inference": None, "sft": {"data": {"type": "fake"}}},
    "eval": {"kind": "eval", "trainer": {}, "orchestrator": {}, "eval": {"env": [{"id": "reverse-text"}]}},
}


@pytest.mark.parametrize("case", CASES)
def test_objects_are_valid_by_kubernetes_own_schemas(case: str, tmp_path: Path) -> None:
    tree = experiment(**CASES[case])
    written = list(yaml.safe_load_all(yaml_stream(manifests(tree))))
    assert len(of_kind(written, "Job")) >= 2
    versions = VERSIONS if case == "rl" else VERSIONS[-1:]
    if case == "rl":
        write_chart(tree, tmp_path / "chart")
        written += rendered(tmp_path / "chart")
    for found in written:
        for version in versions:
            kubernetes_validate.validate(found, version, strict=True)


def test_the_schemas_would_notice(tmp_path: Path) -> None:
    (job, *_) = of_kind(manifests(experiment()), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def rendered(chart: Path) -> list[Manifest]:
    """What helm makes of the two expressions that our templates use: a value as JSON, and a random text as JSON."""
    values = yaml.safe_load((chart / "values.yaml").read_text())

    def put_in(match: re.Match[str]) -> str:
        words = match[1].strip()
        if words == "randAlphaNum 40 | toJson":
            return json.dumps("a" * 40)
        path, _, function = words.partition(" | ")
        assert function == "toJson" and path.startswith(".Values.")
        value = values
        for name in path.removeprefix(".Values.").split("."):
            value = value[name]
        return json.dumps(value)

    texts = [path.read_text() for path in sorted((chart / "templates").iterdir())]
    return [yaml.safe_load(re.sub(r"\{\{([^}]*)\}\}", put_in, text)) for text in texts]


def without_key(objects: list[Manifest]) -> dict[str, Manifest]:
    found = {f"{o['kind']}/{o['metadata']['name']}": o for o in objects}
    for secret in of_kind(objects, "Secret"):
        assert len(secret.pop("stringData")["key"]) >= 32
    return found


def test_the_chart_is_the_manifests_and_takes_other_values(tmp_path: Path) -> None:
    tree = experiment(kubernetes={**TREE["kubernetes"], "storage_class": "nfs"})
    files = write_chart(tree, tmp_path / "chart")
    assert {path.name for path in files} >= {"Chart.yaml", "values.yaml", "job-supervisor.yaml", "job-trainer.yaml"}
    assert without_key(rendered(tmp_path / "chart")) == without_key(manifests(tree))
    values = tmp_path / "chart" / "values.yaml"
    values.write_text(values.read_text().replace("registry.example/prime-hpc:1", "other:2"))
    jobs = of_kind(rendered(tmp_path / "chart"), "Job")
    assert {job["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs} == {"other:2"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="something else than a chart"):
        write_chart(tree, tmp_path / "mine")


def test_pods_gpus_and_names_are_the_placements() -> None:
    objects = manifests(experiment())
    jobs = {job["metadata"]["name"]: job["spec"] for job in of_kind(objects, "Job")}
    assert set(jobs) == {"math-rl-supervisor", "math-rl-trainer", "math-rl-inference"}
    assert (jobs["math-rl-trainer"]["completions"], jobs["math-rl-inference"]["completions"]) == (2, 3)
    for name in ("math-rl-trainer", "math-rl-inference"):
        (container,) = jobs[name]["template"]["spec"]["containers"]
        whole = {"rdma/ib": "1", "hugepages-2Mi": "1Gi", "nvidia.com/gpu": "8"}  # the API server wants limits of these
        assert container["resources"] == {"requests": {"cpu": "32", **whole}, "limits": whole}
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert jobs[name]["template"]["spec"]["securityContext"] == {"runAsUser": 1000, "fsGroup": 1000}
    (supervisor,) = jobs["math-rl-supervisor"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "") for entry in supervisor["env"]}
    nodes = read_nodes(environment)
    assert nodes is not None and not nodes.by_slurm
    assert nodes.hosts == (
        ("math-rl-supervisor.math-rl",),
        ("math-rl-trainer-0.math-rl", "math-rl-trainer-1.math-rl"),
        ("math-rl-inference-0.math-rl", "math-rl-inference-1.math-rl", "math-rl-inference-2.math-rl"),
    )
    assert (nodes.batch_host, nodes.notice_s) == ("math-rl-supervisor.math-rl", 600.0)
    one = manifests(experiment(kubernetes={**TREE["kubernetes"], "gpu_resource": "amd.com/gpu"}))
    assert "amd.com/gpu" in json.dumps(of_kind(one, "Job")) and "nvidia" not in json.dumps(one)


def test_the_pods_read_the_experiment_that_was_rendered(tmp_path: Path) -> None:
    tree = experiment()
    (config,) = of_kind(manifests(tree), "ConfigMap")
    file = tmp_path / "experiment.yaml"
    file.write_text(config["data"]["experiment.yaml"])
    read = load_experiment([str(file)], "submit").experiment
    assert read.slurm.layout == "het"
    assert read.model_copy(update={"slurm": tree.slurm}) == tree


def test_the_key_is_in_the_secret_alone() -> None:
    objects = manifests(experiment())
    (secret,) = of_kind(objects, "Secret")
    key = secret["stringData"]["key"]
    assert key not in json.dumps([found for found in objects if found is not secret])
    assert manifests(experiment())[0]["stringData"]["key"] != key
    (config,) = of_kind(objects, "ConfigMap")
    for found in (secret, config):
        assert found["immutable"], "another rendering that is sent to a run which goes on must not change it"
    for job in of_kind(objects, "Job"):
        (mode,) = [v["secret"]["defaultMode"] for v in job["spec"]["template"]["spec"]["volumes"] if "secret" in v]
        assert mode & 0o004, "without an fsGroup the file is root's, and an image's user may be another"


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exp.yaml"

    def said(tree: dict[str, Any], *flags: str) -> str:
        file.write_text(yaml.safe_dump(tree))
        assert main(["render", str(file), *flags]) == 2
        return capsys.readouterr().err

    on_pods = ("--target", "kubernetes")
    assert "kubernetes.image" in said({k: v for k, v in TREE.items() if k != "kubernetes"}, *on_pods)
    assert "'nomad' is none of slurm, kubernetes" in said(TREE, "--target", "nomad")
    assert "arrays are Slurm's" in said(TREE, *on_pods, "--array", "3")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "model_type": "llama"}))
    dense = {**TREE, "model": {"name": str(tmp_path)}, "trainer": {"num_ranks": 16, "parallel": {"ep": 2}}}
    assert "experts of a dense model" in said(dense, *on_pods)
    engines = {**TREE, "inference": {**TREE["inference"], "vllm": {"enforce_eager": True}}}
    assert "the tree states this as inference.enforce_eager" in said(engines, *on_pods, "--chart", str(tmp_path / "c"))
    assert "--target kubernetes" in said(TREE, "--chart", str(tmp_path / "c"))
    assert "name" in said({**TREE, "name": "7" * 3}, *on_pods)
    secret = {**TREE, "inference": {**TREE["inference"], "api_key": "sk-very-secret-indeed"}}
    words = said(secret, *on_pods)
    assert "kubernetes.env_from" in words and "very-secret" not in words
    assert main(["render", str(file), "--slurm.gpus-per-node", "2", *on_pods]) == 2
    file.write_text(yaml.safe_dump({**TREE, "inference": None}))
    assert main(["render", str(file), *on_pods]) == 0
    assert "warning: PH312 orchestrator.client.base_url" in capsys.readouterr().err
    output = tmp_path / "out.yaml"
    file.write_text(yaml.safe_dump(TREE))
    assert main(["render", str(file), *on_pods, "--output", str(output)]) == 0
    assert output.stat().st_mode & 0o077 == 0, "it holds the run's key"


KEY = "k" * 32
PATHS = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[str]"]:
    """A pod's process on an address of its own."""
    host = f"127.0.79.{os.getpid() % 250 + 1}"
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv(connection.KEY_FILE, str(tmp_path / "key"))
    environment = {**os.environ, connection.ADDRESS: host, NODE: host}
    command = [sys.executable, "-P", "-m", "prime_hpc.kubernetes.pod"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "waits for its supervisor" in process.stdout.readline()
    process.args = [host]
    yield process
    process.kill()
    process.wait()


def reach(host: str) -> socket.socket:
    found = connection.connect(host, KEY)
    found.settimeout(20.0)
    return found


def order(tmp_path: Path, incarnation: int, *arguments: str, tasks: int = 1) -> dict[str, Any]:
    path = tmp_path / f"env-{incarnation}.json"
    path.write_text(json.dumps({"GIVEN": "yes", NODE: "the supervisor's", **PATHS}))
    return {
        "what": "start",
        "label": "trainer",
        "incarnation": incarnation,
        "tasks": tasks,
        "arguments": list(arguments),
        "environment_file": str(path),
    }


def test_a_pod_starts_what_the_run_asks_for_and_nothing_else(served: Any, tmp_path: Path) -> None:
    (host,) = served.args
    with pytest.raises(OSError):
        connection.connect(host, "w" * 32)
    (tmp_path / "shown.py").write_text(
        "import os\nfound = os.environ\n"
        "said = found['GIVEN'] + ' ' + found['PRIMEHPC_NODE'] + ' ' + found['PRIMEHPC_LOCAL_TASK']\n"
        "os.write(1, (said + '\\n').encode())\n"  # in one piece: two tasks share the pipe
    )
    with reach(host) as talk:
        connection.say(
            talk, order(tmp_path, 1, "timeit", "-n1", "-r1", f"exec(open('{tmp_path}/shown.py').read())", tasks=2)
        )
        heard = list(connection.messages(talk))
    text = "".join(message.get("out", "") for message in heard)
    assert f"yes {host} 0" in text and f"yes {host} 1" in text, "its own name stays, the rest is the supervisor's"
    assert heard[-1] == {"code": 0}


def test_a_newer_attempt_ends_the_older_ones_agents_and_over_ends_the_pod(served: Any, tmp_path: Path) -> None:
    (host,) = served.args
    sleep = ("timeit", "-n1", "-r1", "import time; time.sleep(600)")
    with reach(host) as old, reach(host) as new:
        connection.say(old, order(tmp_path, 1, *sleep))
        time.sleep(0.5)
        connection.say(new, order(tmp_path, 2, "timeit", "-n1", "-r1", "pass"))
        assert list(connection.messages(new))[-1] == {"code": 0}
        assert [m["code"] for m in connection.messages(old) if "code" in m] != [0]
    with reach(host) as late:
        connection.say(late, order(tmp_path, 1, *sleep))
        assert [m["code"] for m in connection.messages(late)] == [76]
    with reach(host) as end:
        connection.say(end, {"what": "over"})
        assert next(connection.messages(end)) == {"over": True}
    assert served.wait(timeout=280) == 0


def test_a_start_whose_environment_comes_after_a_newer_attempt_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, comes = threading.Event(), threading.Event()

    def read_environment(path: Path) -> dict[str, str]:
        if path.name == "env-1.json":
            waits.set()
            assert comes.wait(20.0)
        return dict(PATHS)

    monkeypatch.setattr(pod, "_read_environment", read_environment)
    ours, theirs = socket.socketpair()
    new_ours, new_theirs = socket.socketpair()
    one, mark = pod.Pod(KEY, os.environ), tmp_path / "started"
    touch = ("timeit", "-n1", "-r1", f"open('{mark}', 'w')")
    with ours, theirs, new_ours, new_theirs:
        arguments = (ours, order(tmp_path, 1, *touch), iter(()))
        old = threading.Thread(target=one._run, args=arguments, daemon=True)
        old.start()
        assert waits.wait(20.0)
        one._run(new_ours, order(tmp_path, 2, "timeit", "-n1", "-r1", "pass"), iter(()))
        comes.set()
        old.join(20.0)
        theirs.settimeout(20.0)
        assert next(connection.messages(theirs))["code"] == 76 and not mark.exists()


def test_an_end_that_comes_while_a_pod_is_reached_reaches_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    steps = start.Steps("key", {"what": "start"})

    def connect(_host: str, _key: str) -> socket.socket:
        steps.end(signal.SIGTERM, None)
        theirs.settimeout(10.0)
        return ours

    monkeypatch.setattr(start, "connect", connect)
    with theirs, ours:
        thread = threading.Thread(target=steps.run, args=(["a"],), daemon=True)
        thread.start()
        orders = connection.messages(theirs)
        assert [next(orders)["what"] for _ in range(2)] == ["start", "end"]
        connection.say(theirs, {"code": 0})
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_pod_that_nobody_comes_to_gives_its_gpus_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert pod.Pod(KEY, {}).serve(listener, 0.1) == 0


def test_no_key_no_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(connection.KEY_FILE, raising=False)
    with pytest.raises(ConfigError, match=connection.KEY_FILE):
        connection.read_key()
    (tmp_path / "key").write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        connection.read_key({connection.KEY_FILE: str(tmp_path / "key")})
    assert read_nodes({}) is None and PODS not in os.environ


@dataclass
class FirstPod:
    """The supervisor's pod over a run that has a checkpoint, whose file system fails as it is told to."""

    file: Path
    run_dir: Path
    told_over: list[str]

    @property
    def checkpoint(self) -> Path:
        return self.run_dir / "checkpoints" / "step_4"

    def write(self, *, clean: bool, rendered: bytes | None = None) -> None:
        """The run's directory as an earlier pod of the same rendering left it, or of another."""
        tree = {"output_dir": str(self.run_dir.parent), "name": self.run_dir.name, "clean": clean}
        self.file.write_text(yaml.safe_dump({**TREE, **tree}))
        self.checkpoint.mkdir(parents=True)
        (self.run_dir / "run.yaml").write_text(self.file.read_text())
        (self.run_dir / "attempts.jsonl").write_text("")
        (self.run_dir / pods.RENDERED).write_bytes(self.file.read_bytes() if rendered is None else rendered)

    def run(self) -> int:
        return pods.run_in_pods(self.file)


@pytest.fixture
def first_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FirstPod:
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv(connection.KEY_FILE, str(tmp_path / "key"))
    monkeypatch.setenv(PODS, json.dumps({"name": "run", "hosts": [["a"], ["b"]], "notice_s": 30}))
    monkeypatch.setenv(NODE, "a")
    one = FirstPod(tmp_path / "exp.yaml", tmp_path / "out" / "run", [])
    monkeypatch.setattr(pods, "_say_over", lambda hosts, key: one.told_over.extend(hosts))
    monkeypatch.setattr(pods, "_await_pods", lambda *arguments: None)
    monkeypatch.setattr(pods, "subprocess", MagicMock(TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr("prime_hpc.supervisor.main.supervise", lambda run_dir, in_job: 0)
    monkeypatch.setattr(pods, "LOAD_S", 0.0)
    return one


def fail_reading(monkeypatch: pytest.MonkeyPatch, error: OSError, times: int) -> None:
    """Have the first `times` readings of what was rendered fail."""
    left, read_text = [error] * times, Path.read_text

    def flaky(self: Path, *arguments: Any, **options: Any) -> str:
        if self.name == pods.RENDERED and left:
            raise left.pop()
        return read_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", flaky)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT])
def test_a_run_that_cannot_be_read_is_the_same_run_and_its_pod_comes_back(
    first_pod: FirstPod, monkeypatch: pytest.MonkeyPatch, clean: bool, number: int
) -> None:
    first_pod.write(clean=clean)
    fail_reading(monkeypatch, OSError(number, os.strerror(number), str(first_pod.run_dir / pods.RENDERED)), 1)
    assert first_pod.run() in pods.COMES_BACK
    assert first_pod.checkpoint.exists() and first_pod.told_over == []
    assert first_pod.run() == 0 and first_pod.checkpoint.exists()
    assert first_pod.told_over == ["b"]


def test_a_passing_error_is_waited_for(first_pod: FirstPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "LOAD_S", 60.0)
    first_pod.write(clean=True)
    fail_reading(monkeypatch, OSError(errno.ESTALE, "Stale file handle"), 2)
    assert first_pod.run() == 0 and first_pod.checkpoint.exists()


@pytest.mark.parametrize("rendered", [b"", b"name: \xff"])
def test_what_is_no_rendering_is_none_to_start_over_from(first_pod: FirstPod, rendered: bytes) -> None:
    first_pod.write(clean=True, rendered=rendered)
    assert first_pod.run() in pods.COMES_BACK and first_pod.checkpoint.exists()


def test_another_rendering_that_asks_for_it_starts_over(first_pod: FirstPod) -> None:
    first_pod.write(clean=True, rendered=b"name: as it was before\n")
    assert first_pod.run() == 0 and not first_pod.checkpoint.exists()
    assert (first_pod.run_dir / pods.RENDERED).read_text() == first_pod.file.read_text()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (Unreadable("attempts.jsonl", "Input/output error", errno.EIO), 74, []),
        (OSError(errno.ESTALE, "Stale file handle"), 74, []),
        (StoreError("disk full"), 1, ["b"]),
        (OSError(errno.ENOTDIR, "Not a directory"), 1, ["b"]),
    ],
)
def test_errors_of_the_volume_end_the_run_only_where_they_stay(
    first_pod: FirstPod, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, told: list[str]
) -> None:
    first_pod.write(clean=False, rendered=b"another")
    monkeypatch.setattr(prepare, "read_attempts", raising(error))
    assert (first_pod.run(), first_pod.told_over) == (code, told)
    assert first_pod.checkpoint.exists()


def test_an_error_that_nobody_thought_of_leaves_no_pod_waiting(
    first_pod: FirstPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_pod.write(clean=False)
    monkeypatch.setattr("prime_hpc.supervisor.main.supervise", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        first_pod.run()
    assert first_pod.told_over == ["b"]


def test_a_pod_that_a_signal_ended_and_whose_run_does_not_come_back_is_not_made_again(
    first_pod: FirstPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_pod.write(clean=False)
    monkeypatch.setattr("prime_hpc.supervisor.main.supervise", lambda run_dir, in_job: 128 + signal.SIGTERM)
    assert first_pod.run() in FINAL_CODES and first_pod.told_over == ["b"]


def test_pods_are_asked_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Barrier(20)

    def reach(host: str, key: str) -> socket.socket:
        asked.wait(60.0)  # one after another they would never be all there
        raise OSError("no route to host")

    monkeypatch.setattr(pods, "connect", reach)
    with pytest.raises(ConfigError, match=r"did not come within .* a0 \(no route to host\); a1 "):
        pods._await_pods([f"a{i}" for i in range(20)], KEY, 0.0)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail
