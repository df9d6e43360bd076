"""What SFT's keys accept, and what is refused before anything starts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from prime_hpc.config import ConfigError, Experiment, load_experiment, load_run
from prime_hpc.config.sections.common import CkptConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.config.sources.load import Loaded
from prime_hpc.launch.checks import check
from prime_hpc.launch.estimate.epochs import expected_steps
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.plan.words import data_line, steps_line
from prime_hpc.orchestrator.setup import make_pool

FAKE = {"type": "fake"}


def load(argv: list[str], entrypoint: str) -> Loaded:
    return load_experiment(argv, entrypoint, {})


def sft(**data: Any) -> Experiment:
    return Experiment.model_validate({"kind": "sft", "seq_len": 64, "sft": {"data": data}})


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001"])
def test_a_learning_rate_in_any_notation_is_a_number(tmp_path: Path, text: str) -> None:
    quoted = tmp_path / "a.yaml"
    quoted.write_text(f'kind: sft\nsft: {{data: {{type: fake}}}}\ntrainer: {{optim: {{lr: "{text}"}}}}\n')
    bare = tmp_path / "b.yaml"  # YAML 1.1 reads 1e-5 as text
    bare.write_text(quoted.read_text().replace('"', ""))
    toml = tmp_path / "c.toml"
    toml.write_text(f'kind = "sft"\n[sft.data]\ntype = "fake"\n[trainer.optim]\nlr = "{text}"\n')
    for argv in (["@", str(quoted)], ["@", str(bare)], ["@", str(toml)], ["--data.type", "fake", "--optim.lr", text]):
        assert load(argv, "sft").experiment.trainer.optim.lr == 1e-5


def test_a_learning_rate_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("kind: sft\nsft: {data: {type: fake}}\ntrainer: {optim: {lr: fast}}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:3.*trainer\.optim\.lr.*expected a number, got 'fast'"):
        load(["@", str(path)], "sft")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"path": "a.jsonl", "name": "owner/set"}, "two sources"),
        ({"path": "a.jsonl", "pad_multiple": 8}, "set pack = false"),
        ({"path": "a.jsonl", "batch_tokens": 32}, r"sft\.data\.batch_tokens \(32\) is below sft\.data\.seq_len \(64\)"),
        ({"path": "a.jsonl", "columns": {"question": "q"}}, "maps messages, prompt, completion, system, tools"),
        ({"path": "a.jsonl", "loss_turns": "first"}, "all"),
        ({"path": ["a.jsonl", "b.jsonl"], "probabilities": [0.5, 0.4]}, "add up to 1"),
        ({"path": ["a.jsonl", "b.jsonl"], "probabilities": [1.0, 0.0]}, "above 0"),
        ({"path": "a.jsonl", "probabilities": [1.0]}, "states 1 shares, path 1 entries"),
        ({"name": "owner/set", "probabilities": [0.5, 0.5]}, "save it with `datasets`"),
    ],
)
def test_keys_that_contradict_each_other(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sft(**data)


def test_the_budget_follows_the_longest_sample_unless_it_is_stated() -> None:
    assert sft(path="a.jsonl", seq_len=256).micro_batch_tokens == 256
    with pytest.raises(ValueError, match="exceeds trainer.micro_batch_tokens"):
        Experiment.model_validate(
            {"kind": "sft", "sft": {"data": {"path": "a.jsonl", "seq_len": 256}}, "trainer": {"micro_batch_tokens": 99}}
        )


def test_held_out_rows_are_named_and_are_not_those_trained_on() -> None:
    def evaluated(data: dict[str, Any], **evaluation: Any) -> Experiment:
        return Experiment.model_validate({"kind": "sft", "sft": {"data": data, "eval": evaluation}})

    (source,) = evaluated({"name": "owner/set"}, split="test").sft.eval_sources.values()
    assert (source.name, source.split) == ("owner/set", "test")
    with pytest.raises(ValueError, match="names no held-out rows"):
        evaluated({"path": "a.jsonl"})
    with pytest.raises(ValueError, match="is what is trained on"):
        evaluated({"name": "owner/set"}, split="train")
    assert data_line(evaluated(FAKE, path="b.jsonl", interval=7)).endswith("held-out loss every 7 steps")
    sets = [{"id": "code", "path": "c.jsonl"}, {"id": "chat", "split": "test"}]
    several = evaluated({"name": "owner/set"}, sets=sets)
    assert data_line(several).endswith("held-out loss of code, chat every 50 steps")
    assert [*several.sft.sources] == ["sft.data", "sft.eval.sets.0", "sft.eval.sets.1"]
    assert [source.label for source in several.sft.eval_sources.values()] == [
        str(Path("c.jsonl").absolute()),
        "owner/set",
    ]
    assert evaluated({"name": "owner/set"}, **several.sft.eval.model_dump()).sft == several.sft  # type: ignore[union-attr]
    for wrong, words in (
        ({"sets": [*sets, sets[0]]}, "two of eval.sets have the id code"),
        ({"sets": sets, "path": "d.jsonl"}, "eval.path is of one set, and eval.sets states several"),
        ({"sets": [{"id": "chat", "split": "train"}]}, r"eval.sets.0.split = train is what is trained on"),
        ({"sets": [{"id": "", "path": "d.jsonl"}]}, "at least 1 character"),
        ({"sets": [{"path": "d.jsonl"}]}, r"eval.sets.0.id"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluated({"name": "owner/set"}, **wrong)


def test_each_of_several_held_out_sets_is_looked_at(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(GOOD_ROW)
    bad.write_text('{"question": "a", "answer": "b"}')
    sets = [{"id": "good", "path": str(good)}, {"id": "bad", "path": str(bad)}]
    flags = ["--model.name", "owner/model", "--output-dir", str(tmp_path), "--data.path", str(good)]
    with pytest.raises(ConfigError, match=r"sft\.eval\.sets\.1.*needs `messages`.*sft\.eval\.sets\.N\.columns"):
        check(load([*flags, "--eval.sets", json.dumps(sets)], "sft"))
    tree = {"kind": "sft", "seq_len": 64, "sft": {"data": {"path": str(good)}, "eval": {"sets": sets}}}
    found = [f for f in lint(Experiment.model_validate(tree), GENERIC) if f.code == "PH207"]
    assert [(f.severity, f.key) for f in found] == [("error", "sft.eval.sets.1.path")]
    bad.write_text(GOOD_ROW)
    check(load([*flags, "--eval.sets.0.id", "good", "--eval.sets.0.path", str(good)], "sft"))


def test_evaluation_in_environments_needs_one() -> None:
    tree: dict[str, Any] = {"kind": "sft", "sft": {"data": FAKE}, "orchestrator": {"eval": {}}}
    with pytest.raises(ValueError, match="orchestrator.eval.env"):
        Experiment.model_validate(tree)
    tree["orchestrator"]["eval"]["env"] = [{"id": "reverse-text"}]
    assert Experiment.model_validate(tree).samples and not sft(**FAKE).samples


def test_evaluations_beside_use_the_template_that_is_trained(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own")
    for data, expected in ((FAKE | {"chat_template": str(tmp_path / "own.jinja")}, "own"), (FAKE, None)):
        tree = {"kind": "sft", "sft": {"data": data}, "orchestrator": {"eval": {"env": [{"id": "reverse-text"}]}}}
        exp = Experiment.model_validate(tree)
        evaluation = exp.orchestrator.eval
        assert evaluation is not None
        pool = make_pool(exp, ["http://127.0.0.1:9/v1"], evaluation.env, exp.orchestrator.eval_sampling, "eval")
        assert pool._settings.chat_template == expected
    with pytest.raises(ValueError, match=r"sft\.data\.chat_template = .*none\.jinja"):
        _ = sft(chat_template="none.jinja").own_template


def test_data_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    def refusal(*argv: str) -> str:
        loaded = load(["--model.name", "owner/model", "--output-dir", str(tmp_path), *argv], "sft")
        with pytest.raises(ConfigError) as caught:
            check(loaded)
        return str(caught.value)

    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps({"question": "a", "answer": "b"}))
    said = refusal("--data.path", str(path))
    assert "sft.data.columns" in said and "the columns are: answer, question" in said
    columns = ["--data.columns", '{"prompt": "question", "completion": "answer"}']
    check(
        load(["--model.name", "owner/model", "--output-dir", str(tmp_path), "--data.path", str(path), *columns], "sft")
    )
    assert "matches no file" in refusal("--data.path", str(tmp_path / "*.parquet"))
    said = refusal("--data.path", str(path), *columns, "--eval.path", str(tmp_path / "none.jsonl"))
    assert "sft.eval.path" in said and "does not exist" in said
    path.write_text('{"conversations": []}')
    found = lint(sft(path=str(path)), GENERIC)
    assert [(f.severity, f.key) for f in found if f.code == "PH207"] == [("error", "sft.data.path")]
    assert '"messages": "conversations"' in refusal("--data.path", str(path))
    path.write_text("\n" + json.dumps({"question": "a", "answer": "b"}))
    assert str(Path("none.jinja").absolute()) in refusal(
        "--data.path", str(path), *columns, "--data.chat-template", "none.jinja"
    )


GOOD_ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"messages": [{"role": "user"', "rows.jsonl:3: not JSON"),
        ('["a"]', "rows.jsonl:3: expected a JSON object, got list"),
        ('{"text": "a"}'.encode("utf-16-be"), "rows.jsonl:3: "),
        ('{"messages": [{"content": "a"}]}', "rows.jsonl:3: expected a string or a list of messages"),
        ('{"prompt": "a"}', "rows.jsonl:3: needs `messages`"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "rows.jsonl:3: content parts of type image",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_first_rows_are_read_before_anything_starts(
    tmp_path: Path, row: str | bytes, words: str, suffix: str
) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    content = f"{GOOD_ROW}\n\n".encode() + (row if isinstance(row, bytes) else row.encode()) + b"\n"
    path.write_bytes(gzip.compress(content) if suffix else content)
    words = words.replace("rows.jsonl", path.name)
    found = [f for f in lint(sft(path=str(path)), GENERIC) if f.code == "PH207"]
    assert [(f.severity, f.key) for f in found] == [("error", "sft.data.path")]
    assert words in found[0].message and "bad_rows = skip" in found[0].remedy
    flags = ["--model.name", "owner/model", "--output-dir", str(tmp_path), "--data.path", str(path)]
    with pytest.raises(ConfigError, match=words):
        check(load(flags, "sft"))
    check(load(flags, "sft"), waits=True)  # another job may still write it
    check(load([*flags, "--data.bad-rows", "skip"], "sft"))
    assert not [f for f in lint(sft(path=str(path), bad_rows="skip"), GENERIC) if f.code == "PH207"]


def test_what_lint_says_of_rows_before_the_trainer_sees_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def said(text: str, **data: Any) -> list[tuple[str, str]]:
        path.write_text(text)
        return [(f.severity, f.message) for f in lint(sft(path=str(path), **data), GENERIC) if f.code == "PH207"]

    assert said(GOOD_ROW) == []
    assert said(GOOD_ROW.replace("user", "usr")) == [("warning", f"{path}:1: a message of the role 'usr'")]
    assert said(GOOD_ROW.replace("assistant", "critic"), loss_roles=["critic"]) == []
    ((severity, message),) = said(GOOD_ROW, chat_template="none")
    assert severity == "error" and "needs a chat template" in message
    ((severity, message),) = said(f"[{GOOD_ROW}]")
    assert severity == "error" and "one JSON array" in message
    assert said(f"{GOOD_ROW}\n" * 60 + "broken") == []  # only so many are read
    found = [f for f in lint(sft(name=str(path)), GENERIC) if f.code == "PH207"]
    assert [(f.severity, "is a file, and name is of the hub" in f.message) for f in found] == [("error", True)]


def test_rows_of_tokens_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    path, model = tmp_path / "rows.jsonl", tmp_path / "model"
    model.mkdir()
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300, **shape}))

    def said(*rows: dict[str, Any], **data: Any) -> list[tuple[str, str]]:
        path.write_text("\n".join(map(json.dumps, rows)))
        tree = {
            "kind": "sft",
            "seq_len": 64,
            "model": {"name": str(model)},
            "sft": {"data": data | {"path": str(path)}},
        }
        found = lint(Experiment.model_validate(tree), GENERIC)
        return [(f.severity, f.message) for f in found if f.code == "PH207"]

    good = {"input_ids": [5, 6, 299], "loss_mask": [0, 1, 1]}
    assert said(good) == []
    ((severity, message),) = said(good, {"input_ids": [300]})
    assert severity == "error" and f"{path}:2: token 300 is beyond the model's vocabulary of 300" in message
    flags = ["--model.name", str(model), "--output-dir", str(tmp_path), "--data.path", str(path)]
    with pytest.raises(ConfigError, match="token 300 is beyond the model's vocabulary of 300"):
        check(load(flags, "sft"))
    ((severity, message),) = said(good, {"input_ids": [5], "loss_mask": [1, 1]})
    assert severity == "error" and "`loss_mask` has 2 entries" in message
    idle = {"input_ids": [5, 6], "loss_mask": [1, 0]}  # a first token has nothing it could be predicted from
    assert said(idle, idle) == [("warning", f"nothing is trained in the first 2 rows of {path}")]
    assert said(idle, good) == [] and said({"text": "a"}) == []
    talk = json.loads(GOOD_ROW)
    assert said(talk, loss_roles=["asistant"]) == [("warning", f"nothing is trained in the first 1 rows of {path}")]


def test_the_first_rows_of_parquet_are_read_too(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.parquet", tmp_path / "torn.parquet"

    def said(rows: list[dict[str, Any]], **data: Any) -> list[tuple[str, str]]:
        parquet.write_table(pa.Table.from_pylist(rows), path)
        found = lint(sft(**{"path": str(path), **data}), GENERIC)
        return [(f.severity, f.message) for f in found if f.code == "PH207"]

    good, named = json.loads(GOOD_ROW), f"{path}: row 2"
    assert said([good, good]) == []
    assert said([good, {"messages": []}]) == [("error", f"{named}: a list of messages is empty")]
    assert said([good, {"messages": []}], bad_rows="skip") == []
    misspelt = json.loads(GOOD_ROW.replace("user", "usr"))
    assert said([good, misspelt]) == [("warning", f"{named}: a message of the role 'usr'")]
    ((severity, message),) = said([{"question": "a"}])
    assert severity == "error" and "the columns are: question" in message
    assert said([{"q": "a", "answer": "b"}], columns={"prompt": "q", "completion": "answer"}) == []
    other.write_bytes(b"PAR1 and no more")
    for skips in ({}, {"bad_rows": "skip"}):
        ((severity, message),) = said([good], path=[str(path), str(other)], **skips)
        assert severity == "error" and f"{other} cannot be read as Parquet" in message
    flags = ["--model.name", "owner/model", "--output-dir", str(tmp_path), "--data.path", str(other)]
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        check(load(flags, "sft"))


def test_epochs_and_steps_are_two_answers(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl", '{"prompt": "a", "completion": "b"}'
    file.write_text(f"{row}\n\n" * 10 + row, encoding="utf-8")
    tree: dict[str, Any] = {"kind": "sft", "name": "e", "output_dir": str(tmp_path)}
    data = {"path": str(file), "num_epochs": 3, "batch_size": 4}
    with pytest.raises(
        ValueError, match=r"max_steps \(7\) and sft.data.num_epochs \(3\) both say.*--max-steps 100, the"
    ):
        Experiment.model_validate(tree | {"sft": {"data": data}, "max_steps": 7})
    with pytest.raises(ValueError, match="random tokens have no end"):
        sft(type="fake", num_epochs=1)
    experiment = Experiment.model_validate(tree | {"sft": {"data": data}})
    assert experiment.num_steps is None and expected_steps(experiment) == 9
    assert steps_line(experiment) == "at most 9: 3 epochs of 11 rows; the trainer counts"
    write_snapshot(experiment, tmp_path / "e", [])
    assert load_run(tmp_path / "e").num_steps is None  # also after a round through run.yaml
    said = {f.code: f.message for f in lint(experiment, GENERIC)}
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n", encoding="utf-8")
    for name, remedy in (("rows.csv", ""), ("none.jsonl", "make it before submit")):
        lacks = Experiment.model_validate(tree | {"sft": {"data": {"path": str(tmp_path / name)}}})
        assert [f.remedy for f in lint(lacks, GENERIC) if f.code == "PH207"] == [remedy]
    assert "at most 9" in said["PH214"] and "reinforcement learning" in said["PH224"]
    by_tokens = Experiment.model_validate(tree | {"sft": {"data": data | {"batch_tokens": 4096}}})
    assert expected_steps(by_tokens) is None and "the trainer counts" in steps_line(by_tokens)
    seldom = by_tokens.model_copy(update={"ckpt": CkptConfig(interval=500)})
    assert "PH206" not in {f.code for f in lint(seldom, GENERIC)}  # nobody knows that it is too long
