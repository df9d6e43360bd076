"""`synthesize`: filters and their counts, conversations on disk, rows that appear whole, prompts, pipelines' GPUs."""

import gzip
import json
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.synthesize import SynthesizeConfig
from prime_hpc.envs.conversations.plain import conversations_of
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.evals.episodes import COMPLETED, FAILED, TIMEOUT, Key, Record
from prime_hpc.evals.settings import record, refuse_others
from prime_hpc.evals.synthesis.report import report, table, words
from prime_hpc.evals.synthesis.rows import withdraw_rows, write_rows
from prime_hpc.evals.synthesis.sampled import Sampled, SampledLog, digest, is_parsed, sampled
from prime_hpc.evals.synthesis.select import REASONS, num_passing, select
from prime_hpc.launch.checks import check
from prime_hpc.launch.lint.lint import lint
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.errors import StoreError
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.trainer.data.messages import Conversation, parse_row


def experiment(*argv: str) -> Experiment:
    base = ["--model.name", "m", "--environment-ids", "reverse-text", "--client.base-url", "http://127.0.0.1:9/v1"]
    return load_experiment([*base, *argv], "synthesize", {}).experiment


def said(reply: str | None, *more: dict[str, Any], **message: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply} | message, *more]


def episode(task: int, rollout: int = 0, reward: float | None = 1.0, **more: Any) -> Sampled:
    """One whose reply names task and rollout, unless `reply` says otherwise."""
    reply, tokens = more.pop("reply", f"{task} {rollout}"), more.pop("tokens", 10)
    key = {"step": 0, "env": more.pop("env", "reverse-text"), "task": task, "rollout": rollout}
    ended = Record(**key, **{"state": COMPLETED, "reward": reward, "completion_tokens": tokens} | more)
    row = {"messages": said(reply), "reward": reward, "agent": "agent", "completion_tokens": tokens}
    went_well = ended.state == COMPLETED
    result = EpisodeResult(EpisodeState.COMPLETED, usable=False, conversations=[row] if went_well else [])
    return sampled(ended, result, SimpleNamespace(data=SimpleNamespace(handed_on={"id": task})))


def test_each_conversation_that_is_dropped_is_counted_once_under_its_first_reason() -> None:
    config = SynthesizeConfig(
        rollouts_per_example=9, min_reward=0.3, min_metrics={"exact": 1}, min_completion_tokens=5,
        max_completion_tokens=20, n_best=2,
    )  # fmt: skip
    good: dict[str, Any] = {"metrics": {"exact": 1.0}}
    records = [
        episode(0, 0, reward=0.1 + 0.2, **good),
        episode(0, 1, reward=0.9, tokens=12, **good),
        episode(0, 2, reward=0.9, tokens=11, **good),
        episode(1, 0, reply="0 1", **good),
        episode(1, 1, state=FAILED, reward=None, error="ProviderError"),
        episode(1, 2, state=TIMEOUT, reward=0.0),
        episode(1, 3, truncated=True, **good),
        episode(1, 4, reply="", **good),
        episode(1, 5, reward=0.2, **good),
        episode(1, 6, metrics={"exact": 0.5}),
        episode(1, 7, tokens=4, **good),
        episode(1, 8, tokens=21, **good),
    ]
    found = select(records, config)
    assert [(key.task, key.rollout) for key, _ in found.kept] == [(0, 1), (0, 2)]
    assert found.dropped["reverse-text"] == dict.fromkeys(REASONS, 1)
    assert sum(num_passing(record, config) for record in records) == 4  # duplicates and the best come later
    summary = report(records, found, experiment().synthesize, {}, "m")
    env = summary["environments"]["reverse-text"]
    assert env["num_conversations"] == env["num_rows"] + sum(env["dropped"].values()) == len(records)
    assert env["num_tasks_with_rows"] == 1 and env["failures"] == {"ProviderError": 1}
    lines = "\n".join(table(summary))
    assert all(f"1 of reverse-text: {why}" in lines for why in REASONS.values()) and "1 reward below" in words(summary)
    assert len(select(records, SynthesizeConfig(finished=False, parsed=False, drop_duplicates=False)).kept) == 10


@pytest.mark.parametrize(
    ("messages", "good"),
    [
        (said("a"), True),
        (said("<think>hm</think>a"), True),
        (said("<think>hm"), False),
        (said("<think>hm</think> "), False),
        (said("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": 1}'}}]), True),
        (said("", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), False),
        (said("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": 1'}}]), False),
        (said("", tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}]), False),
        (said('<tool_call>\n{"name": "f", "argu'), False),
        (
            said(
                "a\n<\uff5ctool\u2581call\u2581begin\uff5c>f", tool_calls=[{"function": {"name": "f", "arguments": ""}}]
            ),
            False,
        ),
        (said("a", {"role": "user", "content": "q"}, {"role": "assistant", "content": " "}), False),
        (said("", {"role": "assistant", "content": "a"}, train=False), True),
    ],
)
def test_a_reply_is_parsed_where_it_says_something_or_calls_with_an_object(messages: list[Any], good: bool) -> None:
    assert is_parsed(messages) is good


def test_a_message_may_hold_nothing() -> None:
    """One whose list of parts was empty ended the run."""
    assert digest({"messages": [{"role": "user", "content": []}]}) != digest({"messages": []})


def test_conversations_hold_tools_reasoning_and_what_is_trained() -> None:
    def node(role: str, content: Any, *, sampled: bool = False, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(sampled=sampled, message=SimpleNamespace(role=role, content=content, **more))

    call = SimpleNamespace(id="c1", name="add", arguments='{"a": 1}')
    shot = [node("user", "1+1"), node("assistant", "2", reasoning_content=None, tool_calls=None)]
    first = node("assistant", None, sampled=True, reasoning_content="hm", tool_calls=[call])
    answer = node("tool", "2", tool_call_id="c1", name=None)
    last = node("assistant", "two", sampled=True, reasoning_content=None, tool_calls=None)
    branches = [[*shot, node("user", "q"), first, answer, last], [*shot, node("user", "q"), first, node("user", "?")]]
    trace = SimpleNamespace(
        agent=SimpleNamespace(trainable=True, name="a"), reward=0.5, usage=SimpleNamespace(completion_tokens=7),
        branches=[SimpleNamespace(trainable=True, nodes=nodes) for nodes in branches],
        tools=[SimpleNamespace(name="add", description="", parameters={"type": "object"})],
    )  # fmt: skip
    (row,) = conversations_of(SimpleNamespace(traces=[trace]))  # the second branch says nothing new
    assert row["messages"][1] == {"role": "assistant", "content": "2", "train": False}
    assert row["messages"][3]["reasoning_content"] == "hm" and row["messages"][4]["tool_call_id"] == "c1"
    found = parse_row(json.loads(json.dumps(row)), SFTDataConfig(), SFTDataConfig(), has_template=True)
    assert isinstance(found, Conversation) and found.trained == (False, False, False, True, False, True)
    assert found.messages[3]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.tools is not None and found.tools[0]["function"]["name"] == "add"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    assert claim_incarnation(found) == 1
    return found


def keep(paths: RunPaths, exp: Experiment, records: list[Sampled], life: int = 1) -> list[str]:
    """Log the episodes, write the rows of all; the tasks in the files, file by file."""
    log = SampledLog(paths, life)
    for one in records:
        log.add(one)
    found = select([log.records[one.key] for one in records], exp.synthesize)  # type: ignore[misc]
    write_rows(paths, life, exp, found.kept, lambda place: log.read(place[0]), {})
    log.close()
    files = find_data(SFTDataConfig(path=str(paths.root / "data"))).files
    texts = [gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in files]
    return [" ".join(str(json.loads(line)["input"]["id"]) for line in text.splitlines()) for text in texts]


def test_a_selection_of_none_leaves_no_rows_of_another(paths: RunPaths) -> None:
    exp = experiment()
    withdraw_rows(paths, 1)
    keep(paths, exp, [episode(1)])
    assert (paths.root / "data" / "rows").is_dir()
    withdraw_rows(paths, 1)
    assert not (paths.root / "data" / "rows").exists()


def test_rows_appear_whole_and_an_other_selection_takes_their_place(paths: RunPaths) -> None:
    records = [episode(task, reward=task / 10) for task in (3, 1, 2)]
    exp = experiment("--shard-rows", "2")
    assert keep(paths, exp, records) == ["3 1", "2"]
    rows = paths.root / "data" / "rows"
    before = (rows / "manifest.json").read_bytes()
    verify_artifact(rows)
    log = SampledLog(paths, 1)  # conversations are read again from the disk, after half a line too
    assert log.records[Key(0, "reverse-text", 1, 0)].conversations[0].get("messages") is None  # type: ignore[attr-defined]
    log.close()
    assert claim_incarnation(paths) == 2
    (paths.root / "data" / ".stage-rows-i0001-x").mkdir()  # of a life that was killed
    assert keep(paths, exp, records, 2) == ["3 1", "2"] and (rows / "manifest.json").read_bytes() == before
    assert [path.name for path in (paths.root / "data").iterdir()] == ["rows"]
    assert keep(paths, experiment("--min-reward", "0.2", "--compression", "gzip"), records, 2) == ["3 2"]
    found = json.loads((rows / "manifest.json").read_text())
    assert found["incarnation"] == 2 and found["meta"]["rows"] == 2 and list(found["files"]) == ["rows-00000.jsonl.gz"]


def test_a_full_disk_leaves_the_rows_that_were_there(paths: RunPaths) -> None:
    records = [episode(task, reply="long " * 200 + str(task)) for task in range(3)]
    assert keep(paths, experiment("--min-reward", "0.5"), records) == ["0 1 2"]
    before = (paths.root / "data" / "rows" / "manifest.json").read_bytes()
    assert claim_incarnation(paths) == 2
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises((StoreError, OSError)):
            keep(paths, experiment("--shard-rows", "2"), records, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (paths.root / "data" / "rows" / "manifest.json").read_bytes() == before
    assert not list((paths.root / "data").glob(".*"))
    assert keep(paths, experiment("--shard-rows", "2"), records, 2) == ["0 1", "2"]


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for argv, text in (
        (["--n-best", "3", "--rollouts-per-example", "2"], "synthesize.n_best.*raise synthesize.rollouts_per_example"),
        (["--min-completion-tokens", "9", "--max-completion-tokens", "3"], "is above"),
        (["--inference.dtype", "x"], "unknown key"),
    ):
        with pytest.raises(ConfigError, match=text):
            experiment(*argv)
    with pytest.raises(ConfigError, match="no environment.*--prompts"):
        load_experiment(["--model.name", "m"], "synthesize", {})
    record(experiment("--sampling.max-tokens", "20"), tmp_path)
    refuse_others(experiment("--sampling.max-tokens", "20", "--min-reward", "1", "--num-examples", "9"), tmp_path)
    with pytest.raises(ConfigError, match=r"synthesize.sampling.*settings.json"):
        refuse_others(experiment("--sampling.max-tokens", "30"), tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        refuse_others(experiment("--sampling.max-tokens", "20", "--prompts", str(tmp_path / "none.jsonl")), tmp_path)


def test_prompts_are_tasks_and_what_is_none_is_named(tmp_path: Path) -> None:
    from prime_hpc.envs.rows.prompts import Prompts, PromptsConfig

    good = [{"prompt": "a", "id": 7, "system": "s"}, {"messages": [{"role": "user", "content": "b"}]}]
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, good)) + "\n\n")
    tasks = [task.data for task in Prompts(PromptsConfig(files=[str(tmp_path / "good.jsonl")])).load()]
    assert [task.handed_on for task in tasks] == [{"id": 7}, {}] and tasks[0].system_prompt == "s"
    alpaca = {"instruction": "add", "input": "1 2", "output": "3"}
    (tmp_path / "alpaca.jsonl").write_text(f'{json.dumps(alpaca)}\n{{"question": "c", "system": null}}\n')
    tasks = [task.data for task in Prompts(PromptsConfig(files=[str(tmp_path / "alpaca.jsonl")])).load()]
    assert [task.prompt for task in tasks] == ["add\n\n1 2", "c"]
    assert [task.handed_on for task in tasks] == [{"input": "1 2", "output": "3"}, {}]
    for bad in (
        '{"prompt": "a", "score": NaN}',
        '{"answer": "a"}',
        "[1]",
        '{"prompt": "a"',
        '{"prompt": [{"role": "nobody", "content": "x"}]}',
    ):
        (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n' + bad + "\n")
        with pytest.raises(EnvError, match="bad.jsonl, line 2"):
            list(Prompts(PromptsConfig(files=[str(tmp_path / "bad.jsonl")])).load())


def test_prompts_that_are_not_there_are_said_before_the_queue(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.jsonl")
    loaded = load_experiment(
        ["--model.name", "owner/m", "--prompts", gone, "--output-dir", str(tmp_path)], "synthesize", {}
    )
    with pytest.raises(ConfigError, match="gone.jsonl does not exist") as caught:
        check(loaded)
    assert [problem.key for problem in caught.value.problems] == ["synthesize.prompts"]
    found = [f.key for f in lint(loaded.experiment, SiteConfig(name="s")) if f.code == "PH207"]
    assert found == ["synthesize.prompts"]
    check(loaded, waits=True)  # another job makes them


def test_a_prompt_has_one_system_prompt_and_hands_on_what_it_does_not_say(tmp_path: Path) -> None:
    """A template that takes the first message alone raises at the second, and others show the model both."""
    own = [{"role": "system", "content": "inner"}, {"role": "user", "content": "q"}]
    rows = [
        {"messages": own, "system": "outer", "id": 1},
        {"messages": own[1:], "system": "outer"},
        {"prompt": "q", "system": "  ", "messages": own},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EnvConfig(id="prompts", args={"files": [str(tmp_path / "p.jsonl")]})
    first, second, third = (task.data for task in EnvSource(config, "train", 0).env.taskset)
    assert [data.system_prompt for data in (first, second, third)] == [None, "outer", None]
    assert [data.handed_on for data in (first, second, third)] == [{"id": 1}, {}, {"messages": own}]


def test_stages_of_a_pipeline_are_gpus(tmp_path: Path) -> None:
    served = {"dp": 4, "tp": 2, "pp": 2}
    argv = [text for name, value in served.items() for text in (f"--{name}", str(value))]
    argv += ["--model.name", "m", "--environment-ids", "reverse-text", "--slurm.gpus-per-node", "8"]
    exp = load_experiment([*argv, "--device", "cuda"], "synthesize", {}).experiment
    assert exp.inference is not None and exp.inference.num_gpus == 16
    placement = place_slurm(exp, SiteConfig(name="s"))
    assert placement.components[0].num_nodes == 2
    with pytest.raises(ConfigError, match="an engine of 16 GPUs is larger than a node of 8"):
        place_slurm(
            load_experiment([*argv, "--tp", "8", "--device", "cuda"], "synthesize", {}).experiment, SiteConfig(name="s")
        )
    with pytest.raises(ConfigError, match=r"eval.weights_dir"):
        load_experiment([*argv, "--weights-dir", str(tmp_path)], "eval", {})
