"""A run's figures for Prometheus: the table of names, the text, how a run is served and found."""

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from prime_hpc import cli
from prime_hpc.config import Experiment
from prime_hpc.launch.monitor.live.run_page import RL_CURVES, SFT_CURVES
from prime_hpc.observe import metric_names
from prime_hpc.supervisor.prometheus import exporter as exporters
from prime_hpc.supervisor.prometheus import families
from prime_hpc.supervisor.prometheus.exporter import Exporter
from prime_hpc.supervisor.prometheus.families import FAMILIES, PREFIX, target_of
from prime_hpc.supervisor.prometheus.figures import Figures
from prime_hpc.supervisor.prometheus.folder import FOLDER, TOKEN, read_target, read_token, take_token
from prime_hpc.supervisor.prometheus.servers import merge
from prime_hpc.supervisor.server_loads import ServerLoads
from tests.support.metric_rows import write_rows
from tests.unit.test_live import make_run, sampled_row, trainer_row
from tests.unit.test_prometheus_endpoint import ask, serve

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 280
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Samples by name and labels, `run` aside, as Prometheus' own parser reads them."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "run"))
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[PREFIX + name, tuple(sorted(labels.items()))]


# ------------------------------------------------------------------------------------------------ names


def test_the_document_shows_the_table() -> None:
    document = (ROOT / "slurm" / "MONITORING.md").read_text().splitlines()
    missing = [line for line in families.table() if line not in document]
    assert not missing, "paste into slurm/MONITORING.md:\n" + "\n".join(families.table())
    assert [line for line in document if line.startswith(f"| `{PREFIX}")] == families.table()[2:]


def test_names_are_as_prometheus_wants_them() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"prime_hpc_[a-z][a-z0-9_]*[a-z0-9]", name)
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not re.search(r"(_gib|_ms|_share|_percent|_count|_s)$", name), name
        assert "run" not in family.labels and family.text.endswith(".")


def test_every_metric_of_the_product_has_a_family() -> None:
    for role, names in (("trainer", metric_names.TRAINER), ("orchestrator", metric_names.ORCHESTRATOR)):
        for name in names:
            if name == "idle_share":  # made of others by the alarms
                continue
            target = target_of(role, name)
            assert target is not None and not target.name.endswith("_other"), (role, name)
            family = FAMILIES[PREFIX + target.name]
            assert len(target.labels) == len(family.labels) and target.scale == 1, (role, name)


def test_every_metric_of_the_tables_is_written_by_a_role() -> None:
    rooms = [ROOT / "prime_hpc" / room for room in ("trainer", "orchestrator", "envs")]
    text = "".join(path.read_text() for room in rooms for path in room.rglob("*.py"))

    def is_written(metric: str) -> bool:
        return f'"{metric}"' in text or ("/" in metric and f'f"{metric.partition("/")[0]}/' in text)

    tables = [*families.TRAINER.values(), *families.ORCHESTRATOR.values()]
    drawn = [metric for _, _, metric in (*RL_CURVES, *SFT_CURVES)]
    assert [metric for family in tables for metric in family.metrics if not is_written(metric)] == []
    assert [metric for metric in drawn if not is_written(metric)] == []


@pytest.mark.parametrize(
    ("role", "metric", "name", "labels"),
    [
        ("trainer", "time/forward_backward", "trainer_phase_seconds_total", ("forward_backward",)),
        ("trainer", "eval/loss", "trainer_eval_loss", ()),
        ("trainer", "loss/value", "trainer_part_loss", ("value",)),
        ("trainer", "new", "trainer_other", ("new",)),
        ("orchestrator", "reward/a/b/mean", "env_reward", ("a/b", "mean")),
        ("orchestrator", "groups/a/b/solved_all", "env_groups", ("a/b", "solved_all")),
        ("orchestrator", "env/maze/won", "env_metric", ("maze", "won")),
        ("orchestrator", "eval/maze/mean_reward", "env_eval", ("maze", "mean_reward")),
        ("orchestrator", "env_workers/maze/busy", "env_worker_busy_ratio", ("maze",)),
        ("orchestrator", "env_workers/eval/maze/restarts", "env_worker_events_total", ("eval/maze", "restarts")),
        ("orchestrator", "teacher/reverse_kl", "orchestrator_other", ("teacher/reverse_kl",)),
    ],
)
def test_open_names(role: str, metric: str, name: str, labels: tuple[str, ...]) -> None:
    target = target_of(role, metric)
    assert target is not None and (target.name, target.labels) == (name, labels)
    assert len(FAMILIES[PREFIX + name].labels) == len(labels)


# ------------------------------------------------------------------------------------------------ text


def test_rows_become_counters_and_gauges() -> None:
    figures = Figures('a "run"\\')
    for step in (1, 2, 3):
        more = {"num_tokens": 1000, "ckpt/bytes": 2 * 2**30, "loss": "nan" if step == 3 else 0.5}
        figures.take_row("trainer", trainer_row(step, **more))
        worker = {"env_workers/maze/episodes": 10 * step, "episodes/completed": 4, "tokens/sampled": "inf"}
        figures.take_row("orchestrator", sampled_row(step, **worker))
    figures.take_row("orchestrator", {"step": 2, "eval/maze/mean_reward": 0.75, "episodes/completed": 100})
    text = figures.text(now=5.0)
    assert text.count('run="a \\"run\\"\\\\"') == len([line for line in text.splitlines() if line[0] != "#"])
    found = parsed(text)
    assert value(found, "trainer_steps_total") == 3 and value(found, "trainer_tokens_total") == 3000
    assert value(found, "trainer_phase_seconds_total", phase="wait") == 12.0
    assert value(found, "trainer_checkpoint_bytes") == 2 * 2**30
    assert value(found, "trainer_loss") != value(found, "trainer_loss")  # NaN
    assert value(found, "orchestrator_episodes_total", state="completed") == 12  # an evaluation's row is no step
    assert (PREFIX + "orchestrator_tokens_total", (("kind", "sampled"),)) not in found
    assert value(found, "env_worker_events_total", env="maze", event="episodes") == 30
    assert value(found, "env_eval", env="maze", metric="mean_reward") == 0.75
    assert value(found, "run_collected_timestamp_seconds") == 5.0


def test_environments_are_named_as_on_a_hub() -> None:
    figures = Figures("demo")
    own = {"env/lab/one/won": 0.5, "env/lab/one/parts/form": 0.25, "env/lab/won": 0.125}
    figures.take_row("orchestrator", {"step": 1, "reward/lab/one/mean": 0.5, "reward/lab/mean": 0.5, **own})
    for name, reward in (("one", 0.75), ("two", 0.5)):
        held_out = {f"eval/lab/{name}/mean_reward": reward, f"eval/lab/{name}/num_episodes": 8}
        figures.take_row("orchestrator", {"step": 2, "eval/seconds": 3.0, **held_out})
    found = parsed(figures.text())
    assert value(found, "env_metric", env="lab/one", metric="won") == 0.5
    assert value(found, "env_metric", env="lab/one", metric="parts/form") == 0.25
    assert value(found, "env_metric", env="lab", metric="won") == 0.125
    assert value(found, "env_eval", env="lab/one", metric="mean_reward") == 0.75
    assert value(found, "env_eval", env="lab/two", metric="num_episodes") == 8


def test_the_supervisors_word_and_processes() -> None:
    figures = Figures("demo")
    figures.take_word({"state": "starting", "attempt": 2, "roles": {"trainer": "starting"}, "stall": None}, "rl")
    word = {"state": "running", "attempt": 2, "job_id": "12", "step": 3, "max_steps": 9, "roles": {"trainer": "ready"}}
    figures.take_word(word | {"stall": {"seconds": 70.0}}, "rl")
    figures.take_processes({("trainer", 3): {"step": 3, "time": 7.0, "host": "n1", "pid": 4, "memory_bytes": 2048}})
    figures.take_attempts([{"ended": 1.0, "outcome": "requeued"}, {"ended": None}])
    for row in ({"rule": "kl", "actions": ["warn"]}, {"rule": "kl", "action": "mail"}):
        figures.take_alarm(row)
    found = parsed(figures.text())
    assert (
        value(found, "run_state", state="running") == 1
        and (PREFIX + "run_state", (("state", "starting"),)) not in found
    )
    assert value(found, "run_info", kind="rl", attempt="2", job_id="12") == 1
    assert value(found, "run_stall_seconds") == 70 and value(found, "role_state", role="trainer", state="ready") == 1
    assert value(found, "process_resident_memory_bytes", role="trainer", index="3") == 2048
    assert value(found, "run_attempts_ended_total", outcome="requeued") == 1
    assert value(found, "run_attempts_ended_total", outcome="failed") == 0
    assert value(found, "run_attempts_ended_total", outcome="preempted") == 0, "the first one is an increase, too"
    assert value(found, "run_alarms_total", rule="kl") == 1


@pytest.mark.parametrize("word", [{}, {"roles": 3, "stall": "x", "step": "7", "attempt": None}, {"max_steps": True}])
def test_words_of_another_version(word: dict[str, Any]) -> None:
    figures = Figures("demo")
    figures.take_word(word, "rl")
    assert parsed(figures.text())


def test_a_gauge_is_that_of_the_newest_row_that_has_it() -> None:
    figures = Figures("demo")
    for step, more in [(1, {"loss": 1.0, "kl": 4.0}), (2, {"loss": 2.0}), (3, {"kl": 5.0, "loss": 3.0}), (4, {})]:
        figures.take_row("trainer", {"step": step, "time/step": 1.0, "num_tokens": 10, **more})
        for number in range(100):  # more sets of metrics than are remembered
            figures.take_row("orchestrator", {"step": step, f"env/e/{number}": step})
    found = parsed(figures.text())
    assert (value(found, "trainer_loss"), value(found, "trainer_kl_nats")) == (3.0, 5.0)
    assert value(found, "trainer_tokens_total") == 40 and value(found, "env_metric", env="e", metric="7") == 4
    figures.take_row("trainer", {"step": 5, "time/step": 1.0, "loss": 0.5})
    assert value(parsed(figures.text()), "trainer_loss") == 0.5


def test_metrics_by_the_thousand_are_bounded() -> None:
    figures = Figures("demo")
    figures.take_row("orchestrator", {"step": 1, **{f"env/e/{number}": number for number in range(10_000)}})
    assert figures.text().count(PREFIX + "env_metric{") == 2000


VLLM = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} %d
# HELP vllm:ttft_seconds Time.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.5"} 1.0
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:ttft_seconds_count{engine="0"} 2.0
vllm:ttft_seconds_sum{engine="0"} 1.5
# HELP vllm:ttft_seconds_created Time.
# TYPE vllm:ttft_seconds_created gauge
vllm:ttft_seconds_created{engine="0"} 1.7e+09
# HELP tokens_total Tokens.
# TYPE tokens_total counter
tokens_total 5.0
bare 1
<html>not a metric</html>
stolen{run="other"} 1
"""


def test_servers_are_merged_with_every_family_once() -> None:
    text = merge({"inference[0]": VLLM % 3, "inference[1]": VLLM % 4}, "demo")
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1 and "_created" not in text
    found = parsed(text)
    labels = (("engine", "0"), ("model_name", "policy"), ("server", "inference[1]"))
    assert found["vllm:num_requests_running", labels] == 4
    assert found["vllm:ttft_seconds_bucket", (("engine", "0"), ("le", "+Inf"), ("server", "inference[0]"))] == 2
    assert found["tokens_total", (("server", "inference[0]"),)] == 5
    assert not any(name == "stolen" for name, _ in found)
    assert merge({}, "demo") == ""


# ------------------------------------------------------------------------------------------------ a run


def experiment(**prometheus: Any) -> Experiment:
    tree = {
        "name": "demo",
        "prometheus": {"every_s": 1, **prometheus},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    return Experiment.model_validate(tree)


def start(run: Path, **prometheus: Any) -> Exporter:
    statuses = {("trainer", 0): {"step": 20, "time": 5.0, "host": "n1", "pid": 7, "memory_bytes": 1e9, "cpu_s": 3.5}}
    exporter = Exporter(experiment(**prometheus), run, {}, statuses, [], ServerLoads([], {}), dict, lambda: 90.0)
    exporter.start(on_nodes=False)
    return exporter


def until(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_is_served_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = make_run(tmp_path / "demo"), tmp_path / FOLDER
    exporter = start(run)
    try:
        until(folder / "demo.json")
        (group,) = json.loads((folder / "demo.json").read_text())
        host, _, port = group["targets"][0].rpartition(":")
        assert host == "127.0.0.1" and group["labels"] == {"instance": "demo", "__param_run": "demo"}
        assert ask(int(port))[0] == 401
        write_rows(run / "metrics" / "trainer.jsonl", [trainer_row(21, num_tokens=7)])
        end, found = time.monotonic() + WAIT_S, {}
        while (PREFIX + "trainer_tokens_total", ()) not in found:
            assert time.monotonic() < end
            status, body = ask(int(port), "/metrics?run=demo", Authorization=f"Bearer {read_token(folder)}")
            assert status == 200
            found = parsed(body.decode())
            time.sleep(0.05)
        assert value(found, "trainer_tokens_total") == 7 and value(found, "trainer_steps_total") == 1
        assert value(found, "run_walltime_left_seconds") == 90 and value(found, "run_step") == 20
        assert value(found, "run_alarms_total", rule="kl") == 0
        assert value(found, "process_cpu_seconds_total", role="trainer", index="0") == 3.5
        capsys.readouterr()  # the log, where a test before had it printed
        assert cli.main(["metrics", str(run)]) == 0
        assert value(parsed(capsys.readouterr().out), "trainer_tokens_total") == 7
    finally:
        exporter.close()
    assert [path.name for path in folder.iterdir()] == [TOKEN]
    with pytest.raises(OSError):
        ask(int(port))


def test_a_text_file_where_no_port_may_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "points.jsonl").touch()
    run, file = make_run(tmp_path / "sweep" / "p1"), tmp_path / FOLDER / "sweep__p1.prom"  # as the runs beside it
    file.parent.mkdir()
    file.parent.chmod(0o755)  # for node exporter, which is another user
    exporter = start(run, serve=False, textfile=True)
    try:
        until(file)
        assert file.parent.stat().st_mode & 0o777 == 0o755, "as MONITORING.md says"
        text = file.read_text()
        assert value(parsed(text), "run_max_steps") == 40 and 'run="sweep/p1"' in text
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        assert cli.main(["metrics", str(run)]) == 0
        assert "run_walltime_left_seconds" in capsys.readouterr().out, "what the files do not tell"
    finally:
        exporter.close()
    assert not file.exists()
    file.write_text(text)  # as a supervisor that was killed leaves it
    os.utime(file, (1, 1))
    assert cli.main(["metrics", str(run)]) == 0
    computed = capsys.readouterr().out
    assert "run_walltime_left_seconds" not in computed and value(parsed(computed), "trainer_steps_total") == 20


@pytest.mark.parametrize("where", ["take_token", "write_target"])
def test_what_a_file_system_lets_through_after_the_end_is_taken_back(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate, hangs = getattr(exporters, where), threading.Event(), threading.Event()

    def hang(*given: Any) -> Any:
        hangs.set()
        gate.wait()
        return real(*given)

    monkeypatch.setattr(exporters, where, hang)
    exporter = start(make_run(tmp_path / "demo"))
    assert hangs.wait(WAIT_S)
    exporter.close()
    gate.set()
    assert exporter._thread is not None
    exporter._thread.join(WAIT_S)
    assert not exporter._thread.is_alive()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [TOKEN]
    if exporter._address:
        with pytest.raises(OSError):
            ask(int(exporter._address.rpartition(":")[2]))


def test_an_attempt_that_was_overtaken_leaves_the_newer_ones_address(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path / "demo"), tmp_path / FOLDER
    cut_off = start(run)
    until(folder / "demo.json")
    before = read_target(folder, "demo")
    newer = start(run)
    try:
        end = time.monotonic() + WAIT_S
        while (target := read_target(folder, "demo")) == before:
            assert time.monotonic() < end
            time.sleep(0.02)
        cut_off.close()
        assert read_target(folder, "demo") == target
    finally:
        newer.close()
    assert [path.name for path in folder.iterdir()] == [TOKEN]


def test_another_run_on_the_port_is_not_taken_for_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = make_run(tmp_path / "mine"), tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    (folder / TOKEN).touch(0o600)
    (folder / TOKEN).write_text("secret")
    with serve() as (port, _):
        (folder / "mine.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"]}]))
        assert cli.main(["metrics", str(run)]) == 0
    streams = capsys.readouterr()
    assert "does not answer" in streams.err and value(parsed(streams.out), "trainer_steps_total") == 20


@pytest.mark.parametrize("trouble", ["port", "folder", "token"])
def test_trouble_is_said_and_the_run_goes_on(tmp_path: Path, trouble: str) -> None:
    run, more, taken = make_run(tmp_path / "demo"), {}, socket.create_server(("127.0.0.1", 0))
    if trouble == "port":
        more = {"port": taken.getsockname()[1]}
    elif trouble == "folder":
        (tmp_path / FOLDER).write_text("a file")
    else:
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / TOKEN).touch(0o644)
    said: list[str] = []
    from loguru import logger

    handler = logger.add(lambda message: said.append(str(message)), level="WARNING")
    exporter = start(run, **more)
    try:
        end = time.monotonic() + WAIT_S
        while not said:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        logger.remove(handler)
        exporter.close()
        taken.close()
    assert "prometheus:" in said[0] and "the run goes on without" in said[0]


def test_neither_served_nor_written_is_an_error() -> None:
    with pytest.raises(ValueError, match="textfile"):
        experiment(serve=False)


def test_the_verb_reads_files_of_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    run = make_run(tmp_path / "demo")
    with (run / "metrics" / "trainer.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "ti\n\xff\n[1]\n')
    assert cli.main(["metrics", "demo"]) == 0
    found = parsed(capsys.readouterr().out)
    assert value(found, "trainer_steps_total") == 20 and value(found, "orchestrator_reward", stat="mean") == 21 / 40
    assert value(found, "filesystem_free_bytes") > 0
    assert cli.main(["metrics", "dem"]) == 2 and "did you mean demo" in capsys.readouterr().err
    assert cli.main(["metrics"]) == 2
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.yaml").touch()
    capsys.readouterr()
    assert cli.main(["metrics", "empty"]) == 0 and parsed(capsys.readouterr().out)


def test_a_run_that_does_not_answer_is_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = make_run(tmp_path / "demo"), tmp_path / FOLDER
    take_token(folder)
    (folder / "demo.json").write_text('[{"targets": ["127.0.0.1:1"], "labels": {}}]')
    assert cli.main(["metrics", str(run)]) == 0
    streams = capsys.readouterr()
    assert "does not answer" in streams.err and value(parsed(streams.out), "trainer_steps_total") == 20
    (folder / "demo.json").write_text("[]")
    assert cli.main(["metrics", str(run)]) == 0 and not capsys.readouterr().err


def test_a_killed_run_is_told_as_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "killed")
    attempt = {"attempt": 1, "began": 1.0, "host": socket.gethostname(), "pid": 1, "process": "gone", "ended": None}
    (run / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    word = {"time": 2.0, "attempt": 1, "state": "running", "step": 20, "roles": {"trainer": "ready"}}
    (run / "status.json").write_text(json.dumps(word | {"stall": {"step": 20, "seconds": 70}}))
    assert cli.main(["metrics", str(run)]) == 0
    text = capsys.readouterr().out
    found = parsed(text)
    assert value(found, "run_state", state="lost") == 1 and value(found, "run_step") == 20
    assert value(found, "run_stall_seconds") == 0 and "role_state" not in text and 'state="running"' not in text


def test_the_scrape_config_is_prometheus_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--scrape-config", str(tmp_path)]) == 0
    (job,) = yaml.safe_load(capsys.readouterr().out)["scrape_configs"]
    assert job["authorization"]["credentials_file"] == str(tmp_path / FOLDER / TOKEN)
    assert job["file_sd_configs"][0]["files"] == [str(tmp_path / FOLDER / "*.json")]
    assert read_token(tmp_path / FOLDER)
    run = make_run(tmp_path / "runs" / "demo")
    (run / "run.yaml").write_text(f"kind: rl\nprometheus:\n  serve: true\n  folder: {tmp_path / 'mine'}\n")
    assert cli.main(["metrics", "--scrape-config", str(run)]) == 0
    assert str(tmp_path / "mine" / TOKEN) in capsys.readouterr().out
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "points.jsonl").touch()
    assert cli.main(["metrics", "--scrape-config", str(tmp_path / "sweep")]) == 0
    assert str(tmp_path / FOLDER / TOKEN) in capsys.readouterr().out, "one Prometheus scrapes sweeps' points, too"
    (tmp_path / FOLDER / TOKEN).chmod(0o644)
    assert cli.main(["metrics", "--scrape-config", str(tmp_path)]) == 2
    assert "not this user's alone" in capsys.readouterr().err


def test_a_counter_does_not_begin_anew_where_its_file_cannot_be_read_for_a_moment(tmp_path: Path) -> None:
    """Prometheus takes one that falls for one that was started again, and counts all of it once more."""
    attempts, figures = tmp_path / "attempts.jsonl", Figures("r")
    attempts.write_text('{"attempt": 1, "ended": 2.0, "outcome": "failed"}\n')
    exporters.take_files(figures, tmp_path, "rl")
    attempts.rename(tmp_path / "there")
    attempts.symlink_to(attempts)
    with pytest.raises(OSError, match="symbolic links"):
        exporters.take_files(figures, tmp_path, "rl")
    counted = {labels: value for (name, labels), value in parsed(figures.text()).items() if "attempts_ended" in name}
    assert counted[(("outcome", "failed"),)] == 1.0
