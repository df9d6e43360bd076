"""Lint of what episodes need: environments, keys and models, in every kind of run, and of schedules."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.envs.benchmarks.registry import BENCHMARKS
from prime_hpc.envs.bundled_arguments import argument_names, env_argument_names, task_fields
from prime_hpc.envs.env_config import BENCHMARK_TASKSETS, BUNDLED, resolve_taskset
from prime_hpc.launch.checks import check, starts_elsewhere
from prime_hpc.launch.lint import env_rules
from prime_hpc.launch.lint.lint import lint

MODEL = {"name": "owner/model"}


def missing(tree: dict[str, Any], site: str = "laptop") -> list[tuple[str, str | None]]:
    """Severity and key of what is said to be not installed."""
    found = lint(Experiment.model_validate({"name": "x", "model": MODEL, **tree}), SiteConfig(name=site))
    return [(f.severity, f.key) for f in found if f.code == "PH232"]


def test_those_that_are_evaluated_are_looked_for_too() -> None:
    held_out = {
        "orchestrator": {"env": [{"id": "reverse-text"}], "eval": {"env": [{"id": "gsm8k"}, {"id": "no-such"}]}}
    }
    assert missing(held_out) == [("error", "orchestrator.eval.env.1.id")]
    evaluated = {"environment_ids": ["math500", "math50"], "env": [{"id": "calculator"}, {"id": "no-such"}]}
    assert missing({"kind": "eval", "eval": evaluated}) == [
        ("error", "eval.environment_ids.1"),
        ("error", "eval.env.1.id"),
    ]
    assert missing({"kind": "synthesize", "synthesize": {"environment_ids": ["no-such"]}}) == [
        ("error", "synthesize.environment_ids.0")
    ]


def test_benchmarks_that_nobody_fetches_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role that plays one fetches it, but not into a place that is stated, and not where it is kept off the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def said(launch: str, **args: str) -> list[str]:
        tree = {"orchestrator": {"env": [{"id": "gsm8k", "args": args}]}, "launch": launch}
        found = lint(Experiment.model_validate({"name": "x", "model": MODEL, **tree}), SiteConfig(name="x"))
        return [f.message for f in found if f.code == "PH207"]

    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        assert bool(said("local")) is (offline == "1") and said("slurm") == []
        (message,) = said("slurm", data=str(tmp_path / "own.jsonl"))
        assert f"is not in {tmp_path}/own.jsonl, and no role fetches it" in message


def test_a_file_of_rows_that_is_one_json_array_is_told(tmp_path: Path) -> None:
    """Alpaca's form, which `datasets` reads: the run ended once its engines were up."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": "a b", "output": "b a"}], indent=2))
    tree = {"orchestrator": {"env": [{"id": "rows", "args": {"files": [str(path)]}}]}}
    found = lint(Experiment.model_validate({"name": "x", "model": MODEL, **tree}), SiteConfig(name="x"))
    (one,) = [f for f in found if f.code == "PH207"]
    assert one.message == f"{path} is one JSON array; rows are one object a line: jq -c '.[]' rows.json > rows.jsonl"
    assert (one.severity, one.remedy) == ("error", ""), "it says itself what to do, and waiting does not help"
    path.unlink()
    found = lint(Experiment.model_validate({"name": "x", "model": MODEL, **tree}), SiteConfig(name="x"))
    assert [(f.severity, f.remedy) for f in found if f.code == "PH207"] == [
        ("warning", "make it before submit, or mend the path")
    ]


def test_arguments_of_bundled_ones_are_known_before_the_queue() -> None:
    trained = {"id": "reverse_text", "args": {"max_char": 9, "seed": 3, "num_tasks": 8}}
    tree = {"env": [trained], "eval": {"env": [{"id": "aime24", "args": {"instruction": "x"}}]}}
    experiment = Experiment.model_validate({"name": "x", "model": MODEL, "orchestrator": tree})
    found = [f for f in lint(experiment, SiteConfig(name="x")) if f.code == "PH236"]
    assert [(f.severity, f.key) for f in found] == [
        ("error", "orchestrator.env.0.args.max_char"),
        ("error", "orchestrator.eval.env.0.args.instruction"),
    ]
    assert "did you mean max_chars?" in found[0].message and "did you mean instructions?" in found[1].message
    assert argument_names("no-such") is None
    words = ["--model.name", "owner/model", "--orchestrator.env", json.dumps([trained])]
    with pytest.raises(ConfigError, match="env.0.args.max_char: reverse_text has no such argument; did you mean"):
        check(load_experiment(words, "rl", {}))  # what runs in the foreground


def test_arguments_of_packages_and_of_seats_are_known_before_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an import: what a package does then is anybody's guess."""
    for name in [name for name in sys.modules if name.startswith("legacy_shop")]:  # other tests' import
        monkeypatch.delitem(sys.modules, name)
    hub = Path(__file__).parents[1] / "support" / "hub"
    monkeypatch.syspath_prepend(str(hub))
    monkeypatch.syspath_prepend(str(hub / "legacy_shop"))
    envs = [
        {"id": "owner/legacy-shop@1.0", "args": {"kind": "tools", "max_turn": 3}},
        {"id": "tic-tac-toe", "env_args": {"x": {}, "agent": {}}},
        {"id": "gsm8k", "env_args": {"agents": {}}},
        {"id": "gsm8k", "name": "own", "env_args": {"id": "some-env", "judges": {}}},
    ]
    tree = {"orchestrator": {"env": envs}}
    found = lint(Experiment.model_validate({"name": "x", "model": MODEL, **tree}), SiteConfig(name="x"))
    assert [(f.key, f.message.partition(";")[2]) for f in found if f.code == "PH236"] == [
        ("orchestrator.env.0.args.max_turn", " did you mean max_turns? it has kind, max_turns"),
        (
            "orchestrator.env.1.env_args.agent",
            " it has id, interception, max_concurrent_agents, o, opponent, retries, timeout, x",
        ),
        (
            "orchestrator.env.2.env_args.agents",
            " did you mean agent? it has agent, id, interception, max_concurrent_agents, retries, timeout",
        ),
    ]
    assert not [name for name in sys.modules if name.startswith("legacy_shop")]
    assert argument_names("legacy_late") == ()


def test_arguments_of_a_package_that_may_be_a_taskset_of_its_own_are_anybodys_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers looks for its class in `__all__` before it asks for `load_environment`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, exports in (("of_both", "['Reversals', 'load_environment']"), ("of_old", "['load_environment']")):
        (tmp_path / name).mkdir()
        loads = "from .rows import Reversals\nfrom .old import load_environment\n"
        (tmp_path / name / "__init__.py").write_text(f"{loads}__all__ = {exports}\n")
        (tmp_path / name / "old.py").write_text("def load_environment(length=1):\n    ...\n")
    assert (argument_names("of-both"), argument_names("of-old")) == (None, ("length",))


@pytest.mark.parametrize("name", [*BUNDLED, "math500", "gpqa", "humaneval"])
def test_they_are_those_that_verifiers_takes(name: str) -> None:
    from verifiers.v1.utils.loaders import env_config_type, taskset_config_type

    known = argument_names(name)
    ident = resolve_taskset(name).ident
    assert known is not None and set(known) == set(taskset_config_type(ident).model_fields)
    of_env = env_argument_names(name)
    assert of_env is not None and {*of_env, "taskset"} == set(env_config_type(ident, "").model_fields)


@pytest.mark.parametrize("name", [*BUNDLED, "math500", "gpqa", "humaneval"])
def test_the_fields_of_tasks_are_those_of_their_data(name: str) -> None:
    from verifiers.v1.task import TaskData

    importlib.import_module(resolve_taskset(name).ident)
    module = sys.modules[BUNDLED.get(name) or BENCHMARK_TASKSETS[BENCHMARKS[name].kind]]
    named: list[Any] = [one for one in vars(module).values() if isinstance(one, type)]
    fields = {name for one in named if issubclass(one, TaskData) for name in one.model_fields}
    known = task_fields(name)
    assert known is not None
    assert set(known) == fields - set(TaskData.model_fields)
    assert set(env_rules._OF_EVERY_TASK) <= set(TaskData.model_fields)


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_words.py").write_text("raise AssertionError('lint imported it')\n")
    tree = {"orchestrator": {"env": [{"id": "owner/own-words@0.1"}]}}
    assert missing(tree) == [("error", "orchestrator.env.0.id")]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing(tree) == []
    assert "own_words" not in sys.modules


def test_a_machine_without_verifiers_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verifiers" else find_spec(name))
    assert missing({"orchestrator": {"env": [{"id": "no-such"}]}}) == []


def test_plan_says_so_and_submit_refuses_dry_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nmodel: {{name: owner/model}}\norchestrator: {{env: [{{id: reverse-txt}}]}}\n"
    )
    assert cli.main(["lint", str(file)]) == 2
    assert f"{file}:3: orchestrator.env.0.id" in capsys.readouterr().out
    assert cli.main(["plan", str(file), "--launch", "local"]) == 0
    assert "error PH232 orchestrator.env.0.id" in capsys.readouterr().out
    for words in (["submit", "--dry-run"], ["submit"]):
        assert cli.main([*words, str(file), "--launch", "local"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "(PH232)" in said.err and f"{file}:3" in said.err


def test_what_the_jobs_own_environment_may_hold_is_left_to_it(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path), "--model.name", "owner/model", "--orchestrator.env", '[{"id": "no-such"}]']
    loaded = load_experiment(words, "rl", {})
    container = SiteConfig.model_validate({"name": "x", "container": {"image": "/x.sif"}})
    check(loaded, starts_elsewhere=starts_elsewhere(loaded.experiment, container))
    for own in ({"env": {"PYTHONPATH": "/x"}}, {"setup": ["export PYTHONPATH=/x:$PYTHONPATH"]}):
        tree = {"slurm": own, "orchestrator": {"env": [{"id": "no-such"}]}}
        stated, of_site = Experiment.model_validate(tree), SiteConfig.model_validate({"name": "x", **own})
        for experiment, site in ((stated, SiteConfig(name="x")), (loaded.experiment, of_site)):
            assert starts_elsewhere(experiment, site)
            ((found),) = [f for f in lint(experiment, site) if f.code == "PH232"]
            assert found.severity == "warning"
    with pytest.raises(ConfigError, match="'no-such' is not installed"):
        check(loaded, starts_elsewhere=starts_elsewhere(loaded.experiment, SiteConfig(name="x")))


class Editable:
    """Finds one package by a rule of its own, as what `pip install -e` writes does."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Of the package itself alone."""
        if name != self._name:
            return None
        where = [str(self._folder)]
        return importlib.util.spec_from_file_location(
            name, self._folder / "__init__.py", submodule_search_locations=where
        )


def test_code_of_ones_own_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "losses" / "mine.py").write_text("from math import *\ndef loss(): ...\n")
    (tmp_path / "losses" / "other.py").write_text("def loss(): ...\nVALUE = 1\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable("my_losses", tmp_path / "losses")])

    def said(name: str, **more: Any) -> list[tuple[str, str]]:
        tree = {"trainer": {"loss": {"type": name}}, "orchestrator": {"env": [{"id": "reverse-text"}]}, **more}
        found = lint(Experiment.model_validate(tree), SiteConfig.model_validate({"name": "laptop"}))
        return [(f.severity, f.message) for f in found if f.code == "PH233"]

    for name in ("my_losses.mine:loss", "my_losses.mine:sin", "my_losses.other:VALUE"):
        assert said(name, launch="local") == []
    for name, why in {
        "my_losses.other:nothing": "other.py defines no 'nothing'",
        "my_losses.third:loss": "there is no module 'my_losses.third'",
        "nowhere:loss": "there is no module 'nowhere'",
    }.items():
        ((severity, message),) = said(name, launch="local")
        assert severity == "error" and why in message
        # what its script does to PYTHONPATH is not known here
        ((severity, _),) = said(name, slurm={"setup": ["export PYTHONPATH=/x"]})
        assert severity == "warning"


REWARDS = """import functools
from math import *
raise RuntimeError("lint imported it")
def own(completion, level, *, scale=1.0, **kwargs): ...
async def lists(completions, labels, level): ...
def typed(completion, levle): ...
def open_to_all(*args, **kwargs): ...
class Judge: ...
@functools.cache
def decorated(anything): ...
"""


def test_reward_functions_are_read_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name, or a parameter that no row has, ended the run once its engines were up."""
    own, plain, rows = tmp_path / "own.py", tmp_path / "plain_rewards.py", tmp_path / "rows.jsonl"
    own.write_text(REWARDS.replace("from math import *\n", ""))
    plain.write_text(REWARDS)
    rows.write_text(json.dumps({"prompt": "1+1", "answer": "2", "level": 3}) + "\n")
    (tmp_path / "broken.py").write_text("def own(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def said(reward: str, site: dict[str, Any] | None = None, **more: Any) -> list[tuple[str, str, str | None]]:
        env = {"id": "rows", "args": {"files": [str(rows)], "reward": ["math", reward]}}
        tree = {"orchestrator": {"env": [env]}, "launch": "local", **more}
        found = lint(Experiment.model_validate(tree), SiteConfig.model_validate({"name": "x", **(site or {})}))
        assert all(f.key == "orchestrator.env.0.args.reward" for f in found if f.code == "PH233")
        return [(f.severity, f.message, f.remedy) for f in found if f.code == "PH233"]

    for name in ("own", "lists", "decorated"):
        assert said(f"{own}:{name}") == said(f"plain_rewards:{name}") == []
    assert said(f"{plain}:sin") == [], "a star may bring it"
    ((severity, message, _),) = said(f"{own}:type")
    assert severity == "error" and message.endswith("own.py defines no 'type'; did you mean typed?")
    assert [f[0] for f in said(f"{own}:type", launch="slurm")] == ["error"]
    assert [f[0] for f in said(f"{own}:type", {"container": {"image": "/x.sif"}}, launch="slurm")] == ["warning"]
    assert [f[0] for f in said("nowhere:own")] == ["error"]
    assert [f[0] for f in said("nowhere:own", launch="slurm")] == ["warning"]
    assert "broken.py cannot be read as Python" in said(f"{tmp_path}/broken.py:own")[0][1]
    for place in (str(own), "plain_rewards"):
        ((severity, message, _),) = said(f"{place}:typed")
        assert severity == "error" and message.startswith("reward 'typed' takes levle, which no reply has; there are")
        assert "takes *args and **kwargs" in said(f"{place}:open_to_all")[0][1]
        ((severity, message, _),) = said(f"{place}:Judge")
        assert severity == "error" and message == "reward 'Judge' is a class, and is to be a function"
    rows.write_text(rows.read_text() * 50)
    assert [f[0] for f in said(f"{own}:typed")] == ["warning"], "a later row may have it"
    rows.unlink()
    assert said(f"{own}:typed") == [], "the rows are not there yet: nobody knows their columns"


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ({"prompt": "promt"}, "prompt", "the first row has no 'promt'; its columns are: answer, prompt"),
        ({"answer": "answers.text"}, "answer", "the first row has no 'answers.text'"),
        ({"answer": "answer.text"}, None, ""),
        ({"question": "Say it"}, "question", "needs one {}"),
        ({"reward": ["math", "exact"], "weights": [1.0]}, "weights", "1 for 2 rewards"),
    ],
)
def test_arguments_that_do_not_go_with_the_rows_are_refused(
    args: dict[str, Any], key: str | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": {"text": "2"}}) + "\n")
    env = {"id": "rows", "args": {"files": str(tmp_path / "rows.jsonl"), **args}}
    found = lint(Experiment.model_validate({"orchestrator": {"env": [env]}}), SiteConfig(name="x"))
    wrong = [f for f in found if f.code == "PH236"]
    assert [f.key for f in wrong] == ([f"orchestrator.env.0.args.{key}"] if key else [])
    assert all(words in f.message for f in wrong)


@pytest.mark.parametrize(
    ("row", "reward", "words"),
    [
        ({"prompt": "1+1", "answer": 2}, "math", None),
        ({"question": "1+1", "reward_model": {"ground_truth": "2"}}, "exact", None),
        ({"prompt": "1+1"}, "rewards.py:score", None),
        ({"prompt": "1+1"}, "math", "rows.jsonl:2: no answer for reward 'math'"),
        ({"prompt": None, "answer": "2"}, "math", "rows.jsonl:2: it has no prompt"),
        (
            {"messages": [{"role": "assistant", "content": "2"}], "answer": "2"},
            "math",
            "ends with the assistant's reply",
        ),
        ([1], "math", "rows.jsonl:2: no object of columns"),
        ("broken", "math", "rows.jsonl:1: not JSON"),
    ],
)
def test_a_row_that_cannot_be_played_is_told_of_before_the_queue(
    row: Any, reward: str, words: str | None, tmp_path: Path
) -> None:
    """Of those at the beginning of the files; the run ended at its start, once its engines were up."""
    lines = [json.dumps(each) + "\n" for each in ({"prompt": "2+2", "answer": "4"}, row)]
    (tmp_path / "rows.jsonl").write_text("{" * (row == "broken") + "".join(lines))
    env = {"id": "rows", "args": {"files": [str(tmp_path / "rows.jsonl")], "reward": reward}}
    found = lint(Experiment.model_validate({"orchestrator": {"env": [env]}}), SiteConfig(name="x"))
    said = [(f.severity, f.key, f.message) for f in found if f.code == "PH236"]
    assert [one[:2] for one in said] == ([("error", "orchestrator.env.0.args.files")] if words else [])
    assert all((words or "") in message for *_, message in said)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"warmup_steps": 40}, None),
        ({"type": "cosine", "warmup_steps": 40}, None),
        ({"warmup_steps": 80}, "has 0.5 of the peak learning rate"),
        ({"type": "cosine", "warmup_steps": 80}, "has 0.5 of the peak learning rate, and none decays"),
    ],
)
def test_a_warm_up_is_told_of_where_the_peak_is_not_reached(schedule: dict[str, Any], words: str | None) -> None:
    tree = {"name": "x", "model": MODEL, "max_steps": 40, "trainer": {"scheduler": {"type": "constant", **schedule}}}
    found = lint(Experiment.model_validate(tree), SiteConfig(name="laptop"))
    said = [f.message for f in found if f.code == "PH220"]
    assert [message.endswith(words or "") for message in said] == ([True] if words else [])


def test_a_key_that_is_set_or_not_named_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(client: dict[str, Any], **more: Any) -> set[str]:
        tree = {"kind": "eval", "eval": {"environment_ids": ["reverse-text"], "client": client}, "model": {"name": "m"}}
        found = lint(Experiment.model_validate(tree | more), SiteConfig(name="laptop"))
        return {f.key or "" for f in found if f.code == "PH235"}

    api = {"base_url": "https://api.example.org/v1"}
    assert said(api) == set()
    assert said(api | {"api_key_var": "NO_SUCH_KEY"}) == {"eval.client.api_key_var"}
    assert said(api | {"api_key_var": "NO_SUCH_KEY"}, slurm={"env": {"NO_SUCH_KEY": "x"}}) == set()
    monkeypatch.setenv("NO_SUCH_KEY", "x")
    assert said(api | {"api_key_var": "NO_SUCH_KEY"}) == set()


def test_a_model_that_is_not_there_is_told_of_where_nothing_trains() -> None:
    evaluation: dict[str, Any] = {"kind": "eval", "model": {"name": "/nowhere/at/all"}, "launch": "local"}
    evaluation["eval"] = {"environment_ids": ["reverse-text"]}
    here = lint(Experiment.model_validate(evaluation | {"inference": {}}), SiteConfig(name="laptop"))
    assert [(f.code, f.severity) for f in here] == [("PH107", "warning")]
    evaluation["eval"]["client"] = {"base_url": "http://api.invalid/v1"}  # an API's model is nowhere here
    assert lint(Experiment.model_validate(evaluation), SiteConfig(name="laptop")) == []


def test_a_reward_model_is_there_to_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every episode fails, once the job has waited and the engines are up."""
    monkeypatch.delenv("JUDGE_URL", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    for name, kind in (("scorer", "Qwen3ForSequenceClassification"), ("talker", "Qwen3ForCausalLM")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [kind]}))

    def said(reward: str, judge: dict[str, Any] | None, **tree: Any) -> list[tuple[str, str, str | None]]:
        rows = {"files": [str(tmp_path / "rows.jsonl")], "reward": reward}
        if judge is not None:
            tree["judge_inference"] = {**judge, "model": str(tmp_path / judge["model"])}
        tree |= {"name": "x", "model": MODEL, "orchestrator": {"env": [{"id": "rows", "args": rows}]}}
        found = lint(Experiment.model_validate(tree), SiteConfig(name="x"))
        return [(f.code, f.severity, f.key) for f in found if f.code in ("PH131", "PH238")]

    scores = "prime_hpc.envs.rows.reward_model:score"
    scorer, talker = {"model": "scorer", "runner": "pooling"}, {"model": "talker"}
    assert said(scores, scorer) == said("math", talker) == said("math", None) == []
    assert said(scores, None) == [("PH238", "error", "orchestrator.env.0.args.reward")]
    assert said(scores, talker) == [("PH238", "error", "judge_inference.runner")]
    for reward, judge in (("math", {"model": "scorer"}), (scores, {"model": "scorer"}), (scores, scorer | talker)):
        assert said(reward, judge) == [("PH131", "error", "judge_inference.runner")], "it is said once"
    job: dict[str, Any] = {"launch": "slurm", "slurm": {"setup": ["export JUDGE_URL=$(cat judge.url)"]}}
    assert said(scores, None, **job) == []
    monkeypatch.setenv("JUDGE_URL", "http://a/v1")
    assert said(scores, None) == []


def test_what_does_not_fit_a_roles_own_partition_is_the_roles_to_change() -> None:
    parts = {"h100": {"gpus_per_node": 8, "cpus_per_node": 96}, "cpu": {"cpus_per_node": 64, "mem_gib": 200}}
    options = {"partition": "h100", "cpus_per_task": 96, "mem": "900G"}
    site = SiteConfig.model_validate({"name": "x", "partitions": parts, "options": options})
    own = {"orchestrator": {"env": [{"id": "reverse-text"}]}, "slurm": {"orchestrator": {"partition": "cpu"}}}
    tree = {"name": "x", "model": MODEL, "launch": "slurm", "output_dir": "/shared", **own}
    found = lint(Experiment.model_validate(tree), site)
    keys = [f.key for f in found if f.code in ("PH315", "PH316") and f.severity == "error"]
    assert keys == ["slurm.orchestrator.cpus_per_task", "slurm.orchestrator.mem"]
