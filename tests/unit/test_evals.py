"""An evaluation's files and tables: episodes that survive, scores, comparisons."""

import asyncio
import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import verifiers.v1 as vf

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.standalone_eval import StandaloneEvalConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.samples import UNANSWERED, UNSCORED, EpisodeResult, EpisodeState, one_line
from prime_hpc.evals import summary
from prime_hpc.evals.compare import compare, lines, read_side
from prime_hpc.evals.connect import _subscribe_to_servers
from prime_hpc.evals.episodes import (
    COMPLETED,
    FAILED,
    RESULTS,
    TIMEOUT,
    EpisodeLog,
    Key,
    Record,
    read_records,
    replaces,
)
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.play import Player, _judge
from prime_hpc.evals.servers import Servers
from prime_hpc.evals.settings import record
from prime_hpc.evals.summary import (
    SUMMARY,
    draw,
    summarize,
    summarize_environment,
    table,
    too_many_failed,
    write_summary,
)
from prime_hpc.evals.synthesis.sampled import SampledLog, sampled
from prime_hpc.evals.versions import Version
from prime_hpc.launch.checks import check
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.plan.plan import slurm_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.launch.prepare import for_evaluation
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.store.errors import FencedError
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from tests.support import policy_servers


def episode(task: int, rollout: int = 0, reward: float | None = 1.0, state: str = COMPLETED, **more: object) -> Record:
    fields = {"step": 0, "env": "e", "task_id": f"t{task}", "completion_tokens": 10} | more
    return Record(task=task, rollout=rollout, reward=reward, state=state, **fields)  # type: ignore[arg-type]


def experiment(*argv: str) -> Experiment:
    return load_experiment(["--model.name", "m", "--environment-ids", "reverse-text", *argv], "eval", {}).experiment


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    assert claim_incarnation(found) == 1
    return found


class EndsEarly:
    """A pool whose environment says that it is endless, and has one task."""

    def __init__(self, failed: int = 1) -> None:
        self.sources, self.name, self.num_tasks, self.failed = [self], "e", None, failed

    def task(self, index: int) -> Any:
        if index:
            raise EnvError("ends after 1 tasks")
        return vf.Task(vf.TaskData(idx=0, prompt="say so"), vf.TaskConfig())

    async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
        if task_index < self.failed:
            return EpisodeResult(EpisodeState.COMPLETED, True, reward=1.0, conversations=[])
        return EpisodeResult(EpisodeState.FAILED, False, "ends after 1 tasks", "EnvError")


@pytest.mark.parametrize(("make_log", "make"), [(EpisodeLog, lambda kept, result, task: kept), (SampledLog, sampled)])
def test_a_task_that_cannot_be_made_fails_its_episode_alone(paths: RunPaths, make_log: Any, make: Any) -> None:
    log, servers = make_log(paths, 1), Servers([None], ["http://host:1/v1"], 1.0)
    keys = [Key(0, "e", task, 0) for task in range(3)]

    async def play(pool: Any) -> None:
        await servers.load(Version(0))
        await Player(pool, servers, log, max_concurrent=2, is_api=True, make_record=make).play(Version(0), keys)

    asyncio.run(play(EndsEarly()))
    found = [log.records[key] for key in keys]
    assert [record.state for record in found] == [COMPLETED, FAILED, FAILED]
    assert [bool(record.task_id) for record in found] == [True, False, False] and found[
        1
    ].reason == "ends after 1 tasks"
    assert found[1].reason == "ends after 1 tasks"
    with pytest.raises(EnvError, match="ends after"):  # one that was played is of a task
        asyncio.run(play(EndsEarly(failed=3)))


def test_episodes_of_a_lost_node_are_played_elsewhere_and_the_next_version_waits_for_none(paths: RunPaths) -> None:
    """Nobody would ever answer them: each counted as a timeout, which scores 0, though no reply was sampled."""
    log, keys = EpisodeLog(paths, 1), [Key(0, "e", task, 0) for task in range(4)]
    clients, bus, there = [policy_servers.Server(), policy_servers.Server()], policy_servers.Bus(), Version(0)

    class Hangs(EndsEarly):
        """A pool whose first server is silent while it is `silent`."""

        silent, asked = True, 0

        def task(self, index: int) -> Any:
            return super().task(0)

        async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
            self.asked += 1
            if url_index == 0 and self.silent:
                await asyncio.Event().wait()
            return await super().run_episode(source_index, 0)

    async def run() -> None:
        servers, pool, shared = Servers(cast(Any, clients), ["a", "b"], 30.0), Hangs(), cast(Any, bus)
        _subscribe_to_servers(shared, servers)
        await servers.load(there)
        playing = asyncio.create_task(
            Player(cast(Any, pool), servers, log, max_concurrent=2, is_api=False).play(there, keys[:3])
        )
        while pool.asked < 3:
            await asyncio.sleep(0)
        clients[0].is_up = False
        bus.say("server", role="inference", index=0, state="lost", url="a")
        await playing
        await servers.load(Version(7, Path("/weights/step_000007")))
        assert [client.version for client in clients] == [0, 7]
        clients[0].is_up, pool.silent = True, False
        bus.say("server", role="inference", index=0, state="starting", url="elsewhere")
        while not servers._servers[0].ready:
            await asyncio.sleep(0)
        assert (clients[0].version, clients[0].base_url) == (7, "elsewhere")

    asyncio.run(asyncio.wait_for(run(), 200))
    assert [log.records[key].state for key in keys[:3]] == [COMPLETED] * 3


def test_a_server_that_is_lost_while_a_version_is_loaded_is_waited_for_no_longer() -> None:
    clients, bus = [policy_servers.Server(), policy_servers.Server()], policy_servers.Bus()

    async def run() -> None:
        servers = Servers(cast(Any, clients), ["a", "b"], 3600.0)
        _subscribe_to_servers(cast(Any, bus), servers)
        await servers.load(Version(0))
        clients[0].held = asyncio.Event()
        loading = asyncio.create_task(servers.load(Version(7, Path("/7"))))
        await clients[0].began.wait()
        bus.say("server", role="inference", index=0, state="lost", url="a")
        await loading
        assert [client.version for client in clients] == [0, 7]
        bus.say("server", role="inference", index=0, state="starting", url="a")
        while not servers._servers[0].ready:
            await asyncio.sleep(0)
        assert clients[0].version == 7

    asyncio.run(asyncio.wait_for(run(), 200))


def test_a_version_that_its_run_removes_meanwhile_is_left_out(tmp_path: Path) -> None:
    """An evaluation of a run that still trains ended with the first of them: nothing after it was evaluated."""
    client = policy_servers.Server()
    versions = [Version(step, tmp_path / str(step)) for step in (1, 2, 3, 4)]
    for version in versions[1:]:
        assert version.path is not None
        version.path.mkdir()

    async def run() -> None:
        servers = Servers(cast(Any, [client]), ["a"], 3600.0)
        await servers.load_first(versions)
        assert client.version == 2, "the first is gone before anything starts"
        client.held, client.refuses = (held := asyncio.Event()), {3}
        loading = asyncio.create_task(servers.load_unless_gone(versions[2]))
        await client.began.wait()
        (tmp_path / "3").rmdir()
        held.set()
        assert await loading is False and await servers.load_unless_gone(versions[3]) and client.version == 4
        client.refuses = {4}
        with pytest.raises(EvalError, match="a cannot serve step 4"):
            await servers.load_unless_gone(versions[3])
        with pytest.raises(EvalError, match="none of 1 versions is there any more"):
            await servers.load_first(versions[:1])

    asyncio.run(asyncio.wait_for(run(), 200))


def test_half_a_last_line_is_cut_off_and_its_episode_played_again(paths: RunPaths) -> None:
    log = EpisodeLog(paths, 1)
    for task in range(3):
        log.add(episode(task))
    log.close()
    whole = log.path.read_bytes()
    for cut in (1, 40, len(whole.splitlines()[-1])):
        log.path.write_bytes(whole[:-cut])
        again = EpisodeLog(paths, 1)
        wanted = [Key(0, "e", task, 0) for task in range(4)]
        assert [key.task for key in again.missing(wanted, retry_failed=False)] == [2, 3]
        again.add(episode(2))
        again.close()
        assert log.path.read_bytes() == whole


def test_every_key_has_one_score(paths: RunPaths) -> None:
    log = EpisodeLog(paths, 1)
    log.add(episode(0, reward=None, state=FAILED))
    wanted = [Key(0, "e", 0, 0)]
    assert not log.missing(wanted, retry_failed=False) and log.missing(wanted, retry_failed=True)
    log.add(episode(0, reward=0.5))
    log.add(episode(0, reward=0.9))  # of another attempt that overlapped: not written
    log.close()
    records, _ = read_records(log.path)
    assert records[wanted[0]].reward == 0.5 and len(log.path.read_text().splitlines()) == 2
    with log.path.open("a") as file:
        file.write('no json\n{"step": 0}\n' + json.dumps({"step": 0, "env": "e", "task": 1, "rollout": 0}) + "\n")
        file.write(
            log.path.read_text().splitlines()[1].replace('"task": 0', '"task": 2').replace("0.5", "1" + 400 * "0")
            + "\n"
        )
    assert read_records(log.path)[0].keys() == records.keys()


def test_the_texts_of_episodes_are_on_the_disk_and_not_in_memory(paths: RunPaths) -> None:
    """Those of a million are tens of gigabytes."""
    log = EpisodeLog(paths, 1)
    log.add(episode(0, prompt="p" * 1000, completion="c" * 1000))
    log.close()
    assert json.loads(log.path.read_text())["completion"] == "c" * 1000
    again = EpisodeLog(paths, 1)
    again.close()
    for held in (log.records, again.records, read_records(log.path)[0]):
        [kept] = held.values()
        assert (kept.prompt, kept.completion, kept.reward) == ("", "", 1.0)


def test_an_episode_with_half_a_surrogate_pair_is_kept(paths: RunPaths) -> None:
    """An environment's message quotes what it read from a model's JSON."""
    log = EpisodeLog(paths, 1)
    log.add(replace(episode(0, reward=None, state=FAILED), reason="unknown word \ud83d"))
    log.close()
    [record] = read_records(log.path)[0].values()
    assert record.reason == "unknown word ?"


def test_nor_does_half_a_surrogate_pair_keep_the_summary_from_being_written(tmp_path: Path) -> None:
    """It ended an evaluation that had played all."""
    assert one_line("unknown word \ud83d") == "unknown word ?"
    one = replace(episode(0), metrics={"half \ud83d": 1.0})
    config = StandaloneEvalConfig(environment_ids=["e"], num_resamples=200)
    found = summarize([(Version(0), [one.key])], {one.key: one}, config, {}, "model")
    (tmp_path / RESULTS).mkdir()
    write_summary(tmp_path, found, table(found))
    [version] = json.loads((tmp_path / RESULTS / SUMMARY).read_text())["versions"]
    assert version["environments"]["e"]["metrics"] == {"half ?": 1.0}


def test_a_write_that_fails_leaves_no_half_line(paths: RunPaths) -> None:
    log = EpisodeLog(paths, 1)
    log.add(episode(0))
    size = log.path.stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(OSError):
            log.add(episode(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.path.stat().st_size == size
    log.add(episode(1))
    log.close()
    assert len(read_records(log.path)[0]) == 2


def test_a_life_that_is_over_writes_no_more(paths: RunPaths) -> None:
    log = EpisodeLog(paths, 1)
    log.add(episode(0))
    claim_incarnation(paths)
    with pytest.raises(FencedError):
        log.sync()


@pytest.mark.parametrize(
    ("versions", "is_api", "error"),
    [
        ((3, 3), False, ""),
        ((2, 3), False, "OldVersion"),
        ((2, 2), False, "OldVersion"),
        ((), False, ""),  # others ended it before the policy's turn
        ((), True, ""),
    ],
)
def test_an_episode_counts_with_its_versions_tokens_alone(versions: tuple[int, ...], is_api: bool, error: str) -> None:
    result = EpisodeResult(EpisodeState.COMPLETED, usable=False, versions=list(versions))
    found, reason = _judge(result, Version(3, Path("w")), is_api)
    assert found == error and bool(reason) == bool(error)


def test_scores_leave_failed_episodes_out_and_count_timeouts_as_zero() -> None:
    records = [
        *(episode(0, r, reward) for r, reward in enumerate((1.0, 0.0, 1.0, 0.0))),
        *(episode(1, r, 0.0, TIMEOUT) for r in range(2)),
        episode(1, 2, 0.5, truncated=True),
        episode(1, 3, None, FAILED, error="ProviderError"),
        *(episode(2, r, None, FAILED, error="ProviderError") for r in range(4)),
    ]
    found = summarize_environment(records, StandaloneEvalConfig(rollouts_per_example=4), [1, 2, 4])
    assert (found["num_tasks"], found["num_episodes"], found["num_scored"]) == (3, 12, 7)
    assert (found["num_failed"], found["num_timeout"], found["num_truncated"]) == (5, 2, 1)
    assert found["failures"] == {"ProviderError": 5}
    assert found["avg"]["value"] == pytest.approx((0.5 + 0.5 / 3) / 2)
    assert found["pass"]["2"]["value"] == pytest.approx((1 - 1 / 6 + 0) / 2) and found["pass"]["2"]["num_tasks"] == 2
    assert found["pass"]["4"] == {"value": 1.0, "interval": [1.0, 1.0], "num_tasks": 1}  # of task 1 three are left


@pytest.mark.parametrize("kind", [UNANSWERED, UNSCORED])
def test_a_timeout_that_is_not_the_models_counts_as_failed_and_is_asked_again(paths: RunPaths, kind: str) -> None:
    silent = EpisodeResult(EpisodeState.TIMEOUT, False, "no end after 9 s", kind)
    error, reason = _judge(silent, Version(0), is_api=True)
    assert error == kind and "no end after 9 s" in reason
    later = EpisodeResult(EpisodeState.TIMEOUT, False, "no end after 9 s", "Timeout")
    assert _judge(later, Version(0), is_api=True)[0] == "Timeout"  # it has answered, or an own engine was too slow
    records = [episode(task, 0, 0.0, TIMEOUT, error=error if task < 3 else "Timeout") for task in range(8)]
    config = StandaloneEvalConfig(environment_ids=["e"], num_resamples=200)
    found = summarize([(Version(0), [r.key for r in records])], {r.key: r for r in records}, config, {}, "model")
    (env,) = (v["environments"]["e"] for v in found["versions"])
    assert (env["num_failed"], env["num_timeout"], env["avg"]["value"]) == (0, 8, 0.0)
    assert found["too_many_failed"] == [f"base, e: 3 of 8 ({kind} x3)"]
    ended = [episode(8 + n, 0, None, FAILED, error="TaskError", reason=f"{n}: no x.png") for n in range(4)] + records
    found = summarize([(Version(0), [r.key for r in ended])], {r.key: r for r in ended}, config, {}, "model")
    words = f"base, e: 7 of 12 (TaskError x4, {kind} x3), such as: 0: no x.png"
    assert found["too_many_failed"] == [words], "with the words of one"
    better, failed = episode(0, 0, 1.0), episode(0, 0, None, FAILED, error="ProviderError")
    assert replaces(better, records[0]) and replaces(records[0], failed) and replaces(better, failed)
    assert not replaces(records[0], better) and not replaces(failed, records[0]) and not replaces(better, better)
    log = EpisodeLog(paths, 1)
    for one in records:
        log.add(one)
    keys = [one.key for one in records]
    assert log.missing(keys, retry_failed=True) == keys[:3] and not log.missing(keys, retry_failed=False)
    log.close()


def test_summary_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StandaloneEvalConfig(environment_ids=["e"], num_resamples=200)
    keys = {step: [Key(step, "e", task, 0) for task in range(4)] for step in (0, 10)}
    records = {k: episode(k.task, reward=float(k.task < k.step), step=k.step) for step in keys for k in keys[step]}
    versions = [(Version(0), keys[0]), (Version(10, Path("w")), keys[10])]
    found = summarize(versions, records, config, {}, "model")
    first = summarize(versions[:1], records, config, {}, "model")
    assert summarize(versions, records, config, {}, "model", first["versions"]) == found
    monkeypatch.setattr(summary, "summarize_environment", lambda *_: pytest.fail("it is known"))
    assert summarize(versions[:1], {}, config, {}, "model", first["versions"]) == first
    assert [v["environments"]["e"]["avg"]["value"] for v in found["versions"]] == [0.0, 1.0]
    shown = table(found)
    assert "base" in shown[1] and "step 10" in shown[2] and "1.0000" in shown[2]
    (tmp_path / "results").mkdir()
    assert draw(tmp_path, found).read_bytes().startswith(b"\x89PNG")
    assert too_many_failed(found, 0.0) == []
    json.dumps(found, allow_nan=False)


def test_comparison_pairs_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gain in (("a", 0.0), ("b", 0.25)):
        paths = RunPaths(tmp_path / name)
        claim_incarnation(paths)
        log = EpisodeLog(paths, 1)
        for task in range(20 if name == "a" else 18):
            for rollout in range(2):
                log.add(episode(task, rollout, min(1.0, (task % 4) / 4 + gain), step=3))
        log.add(episode(0 if name == "a" else 1, env="drawn", step=3))
        log.close()
    for name, step in (("one", 1), ("one", 3), ("other", 3)):
        (tmp_path / name / "weights" / f"step_{step:06d}").mkdir(parents=True)
        (tmp_path / name / "weights" / f"step_{step:06d}" / "model.safetensors").write_text(name)
    flags = ["--eval.env", '[{"id": "calculator", "name": "other"}]', "--weights-dir"]
    record(experiment(*flags, str(tmp_path / "one")), tmp_path / "a")
    record(experiment("--seed", "4", "--weights-dir", str(tmp_path / "one"), "--steps", "3"), tmp_path / "b")
    found = compare(read_side(str(tmp_path / "a")), read_side(f"{tmp_path / 'b'}@3"))
    row = found["environments"]["e"]
    assert (row["num_tasks"], row["num_unpaired"], row["num_better"], row["num_worse"]) == (18, 2, 18, 0)
    assert row["difference"] == pytest.approx(0.25) and row["interval"] == [pytest.approx(0.25)] * 2
    assert row["p"] < 0.001 and found["settings_that_differ"] == ["seed"]
    assert "+0.2500" in "\n".join(lines(found)) and "no task of both, and left out: drawn" in lines(found)
    record(experiment("--seed", "4", "--weights-dir", str(tmp_path / "other")), tmp_path / "b")
    other = compare(read_side(str(tmp_path / "a")), read_side(f"{tmp_path / 'b'}@3"))["settings_that_differ"]
    assert other == ["seed", "eval.weights_dir", "eval.weights_dir, step 3"], "what was compared, and nothing else"
    with pytest.raises(ConfigError, match="no episodes of step 4; there are 3"):
        read_side(f"{tmp_path / 'a'}@4")
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    (tmp_path / "b" / "run.yaml").touch()
    assert read_side("b@3").tasks == read_side(f"{tmp_path / 'b'}").tasks, "by name, as everywhere"
    with pytest.raises(ConfigError, match="no run 'none'"):
        read_side("none")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "run.yaml").touch()
    with pytest.raises(ConfigError, match="holds no episodes"):
        read_side(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pass-k", "2"], "pass@2 needs at least 2 completions"),
        (["--steps", "3"], "eval.weights_dir, which is not stated"),
        (["--no-eval-base"], "nothing is left to evaluate"),
        (["--weights-dir", "w", "--client.api", "chat"], "needs prime-hpc's own servers"),
        (["--benchmarks", "a,a"], "two environments are called a"),
        (["--client.port", "1", "--inference.num-replicas", "2"], "leave one of them out"),
        (["--sampling.max-tokens", "5000"], "raise seq_len"),
        (
            ["--env", '[{"id": "calculator", "sampling": {"max_tokens": 5000}}]'],
            "eval.env.0.sampling.max_tokens: 5000 cannot fit",
        ),
    ],
)
def test_what_cannot_be_evaluated(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        experiment(*argv)
    assert words in refused.value.render()


def test_an_evaluation_is_a_packed_job_of_engines_and_who_plays() -> None:
    site = SiteConfig(name="s")
    argv = ["--inference.data-parallel-size", "8", "--slurm.gpus-per-node", "4", "--output-dir", "/shared/runs"]
    placement = place_slurm(experiment(*argv), site)
    assert placement.layout == "packed" and placement.num_nodes == 2
    assert [(g.role, g.first_node, g.device) for g in placement.groups] == [
        ("orchestrator", 0, "cpu"),
        ("inference", 0, "cuda"),
        ("inference", 1, "cuda"),
    ]
    attached = place_slurm(experiment("--client.base-url", "http://h:8000/v1"), site)
    assert attached.num_nodes == 1 and [g.role for g in attached.groups] == ["orchestrator"]
    assert attached.components[0].options == {}
    text = plan_text(slurm_plan(experiment(*argv), site))
    assert "eval          on the first node" in text and "trainer" not in text
    assert not [finding for finding in lint(experiment(*argv), site) if finding.severity == "error"]


def test_seq_len_and_adapters_follow_from_the_files(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "weights" / "step_000003"
    model.mkdir()
    adapter.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 12}))
    (adapter / "manifest.json").touch()
    argv = ["--model.name", str(model), "--environment-ids", "e", "--weights-dir", str(tmp_path / "weights")]
    found = for_evaluation(load_experiment(argv, "eval", {})).experiment
    assert found.seq_len == 300 and found.model.lora is not None and found.model.lora.rank == 12
    argv += ["--seq-len", "200", "--steps", "4"]
    with pytest.raises(ConfigError, match="no step 4; there are 3"):
        for_evaluation(load_experiment(argv, "eval", {}))
    assert for_evaluation(load_experiment([*argv, "--steps", "3"], "eval", {})).experiment.seq_len == 200


def test_engines_of_its_own_take_a_free_port() -> None:
    alone = experiment()
    assert alone.inference is not None and alone.inference.server.port == 0
    assert experiment("--client.port", "8001").inference is None
    several = experiment("--inference.num-replicas", "2").inference
    assert several is not None and several.server.port == 0 and several.num_replicas == 2
    stated = experiment("--inference.server.port", "8001").inference
    assert stated is not None and stated.server.port == 8001


def test_benchmarks_are_known_by_name_before_anything_starts(tmp_path: Path) -> None:
    argv = ["--model.name", "owner/m", "--output-dir", str(tmp_path), "--client.port", "1", "--environment-ids"]
    check(load_experiment([*argv, "math500,aime2025,humaneval"], "eval", {}))
    with pytest.raises(ConfigError, match="did you mean math500"):
        check(load_experiment([*argv, "math50"], "eval", {}))


def test_an_environment_may_be_sampled_otherwise() -> None:
    env = '[{"id": "calculator", "sampling": {"temperature": 0.5, "max_tokens": 9}, "num_examples": 3}]'
    config = experiment("--env", env, "--sampling.top-p", "0.9").eval
    plain, own = (config.sampling_of(env).parameters() for env in config.environments)
    assert plain == {"temperature": 0.0, "top_p": 0.9}
    assert own == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9}
