"""The environment `rows`: data as TRL, verl and people have it, and reward functions as each of them calls them."""

import asyncio
import datetime
import gc
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.env_files import REWARDS
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import as_json
from prime_hpc.envs.math_answers import speaks_of
from prime_hpc.envs.rows.scoring import NAMED, Reply, exact_score, find_functions, math_score
from prime_hpc.envs.rows.taskset import RowData
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.envs.workers.fingerprint import differences, fingerprint
from prime_hpc.launch.checks import check
from prime_hpc.launch.fetch.needs import needs_of
from prime_hpc.launch.lint.lint import lint
from prime_hpc.slurm.containers import stated_paths

FUNCTIONS = """
import functools
import threading

import beside
import numpy as np

def own(completion, answer, level, row, messages, prompt):
    assert (level, row["level"], prompt, messages) == (3, 3, "2 + 2?", [{"role": "user", "content": "2 + 2?"}])
    return completion == answer

async def waits(response):
    return len(response)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("sums", {"index": 1})
    return {"score": float(solution_str == ground_truth), "acc": 1, "said": solution_str}

def of_trl(prompts, completions, level, **kwargs):
    assert len(prompts) == len(completions) == len(level) == len(kwargs["answer"]) == 1
    return [float(c == a) for c, a in zip(completions, kwargs["answer"])]

def of_trl_chat(completions, **kwargs):
    return [len(c[0]["content"]) for c in completions]

def of_openrlhf(queries, prompts, labels):
    assert (queries, prompts, labels) == (["2 + 2?4"], ["2 + 2?"], ["4"])
    return {"rewards": np.array([0.5], np.float32), "extra_logs": {"length": np.float32(1)}}

def of_openrlhf_images(queries):
    return float(queries == ["be brief\\nwhat?4"])

def none(completions):
    return [None]

def needs(tests):
    return 1.0

def nothing(completion):
    return float("nan")

def unnamed(completion):
    return {"points": 1}

def stops(completion):
    return next(iter(()))

def formed(completion):
    return completion.startswith("<think>\\nhm\\n</think>\\n\\n4")

def waits_long(completion):
    assert GATE.wait(30)
    return 1.0

def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

hidden, told = decorated(of_trl), functools.wraps(of_trl)(decorated(of_trl))

GATE = threading.Event()
A_CLASS = dict

def raises(completion):
    raise KeyError("mine")
"""
SUM = {"prompt": "2 + 2?", "answer": "4", "level": 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def data_of(**args: Any) -> list[Any]:
    made = EnvSource(EnvConfig(id="rows", args=args), "eval", 0, beside=[])
    return [made.task(index).data for index in range(made.num_tasks or 0)]


def value(name: str, text: str, row: dict[str, Any] = SUM, prompt: Any = "2 + 2?") -> tuple[float, dict[str, float]]:
    (function,) = find_functions([f"mine.py:{name}"], [1.0])
    function.check(row)
    answer = row.get("answer", row.get("reward_model", {}).get("ground_truth"))
    asked = [{"role": "user", "content": "2 + 2?"}]
    return asyncio.run(asyncio.wait_for(function.value(Reply(text, prompt, asked, answer, row)), 200))


def test_rows_of_all_forms_are_tasks(folder: Path) -> None:
    verl = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 1},
    }
    parquet.write_table(pa.Table.from_pylist([verl]), folder / "verl.parquet")
    (of_verl,) = data_of(files=["verl.parquet"], reward="mine.py:compute_score")
    assert (of_verl.prompt[0].content, of_verl.answer, of_verl.row["extra_info"]) == ("2 + 2?", "4", {"index": 1})
    path = jsonl(folder / "a.jsonl", {"question": "6 * 7?", "solution": "so #### 42", "n": 1})
    (own,) = data_of(files=[path], question="Q: {}", instructions="Be short.")
    assert (own.prompt, own.system_prompt, own.answer) == ("Q: 6 * 7?", "Be short.", "so #### 42")
    assert own.row == {"solution": "so #### 42", "n": 1}
    (stated,) = data_of(files=[path], prompt="solution", answer="n")
    assert (stated.prompt, stated.answer) == ("so #### 42", 1)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(SUM).encode()))
    assert data_of(files="c.jsonl.gz")[0].row == {"answer": "4", "level": 3}
    of_sft = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]
    (whole,) = data_of(files=[jsonl(folder / "d.jsonl", {"messages": of_sft, "problem": "6 * 7?", "answer": "42"})])
    assert whole.prompt == "6 * 7?"
    asked = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "6 * 7?"}]
    rows = ({"prompt": asked, "answer": 1}, {"prompt": asked[1:], "answer": 1})
    found = data_of(files=[jsonl(folder / "e.jsonl", *rows)], instructions="Be short.")
    assert [data.system_prompt for data in found] == [None, "Be short."]
    talk = [{"from": "human", "value": "6 * 7?"}, {"from": "gpt", "value": "43"}, {"from": "human", "value": "Sure?"}]
    shared = {"conversations": talk, "answer": "42"}
    as_text = {"prompt": json.dumps([{"role": "user", "content": "Sure?"}]), "answer": "42"}
    plain = {"prompt": '[{"a": 1}]', "answer": "a list"}
    first, second, third = data_of(files=[jsonl(folder / "g.jsonl", shared, as_text, plain)], reward="exact")
    assert [(m.role, m.content) for m in first.prompt] == [("user", "6 * 7?"), ("assistant", "43"), ("user", "Sure?")]
    assert (second.prompt[0].content, third.prompt) == ("Sure?", '[{"a": 1}]')
    assert first.row == {"answer": "42"}
    told = EnvSource(
        EnvConfig(id="prompts", args={"files": [jsonl(folder / "h.jsonl", {"messages": talk})]}), "eval", 0
    )
    assert told.task(0).data.prompt == first.prompt
    alpaca = {"instruction": "Add.", "input": "6 7", "output": "13", "system": "Be quick."}
    others = alpaca | {"input": "", "system": None}, alpaca | {"history": [["Add 1 2.", "3"]]}
    one, other, led = data_of(files=[jsonl(folder / "f.jsonl", alpaca, *others)], reward="exact")
    assert (one.prompt, one.answer, one.system_prompt) == ("Add.\n\n6 7", "13", "Be quick.")
    assert (other.prompt, other.system_prompt) == ("Add.", None)
    assert [message.content for message in led.prompt] == ["Add 1 2.", "3", "Add.\n\n6 7"]


@pytest.mark.parametrize(
    ("row", "args", "said"),
    [
        ({"text": "a"}, {}, r"line 1: it has no prompt \(state its column"),
        ({"prompt": "a", "answer": 1}, {"prompt": "question"}, "line 1: it has no `question`; its columns are: prompt"),
        ({"prompt": "a"}, {}, "line 1: no answer for reward 'math': state its column"),
        ({"prompt": "a"}, {"answer": "b.c"}, "line 1: it has no answer `b.c`"),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": 1}, {"question": "Q {}"}, "`prompt` holds messages"),
        ({"prompt": [{"role": "nobody"}], "answer": 1}, {}, "line 1: "),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "answer": 1},
            {},
            "`messages` ends with the assistant's",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "answer": 1},
            {},
            "`conversations` ends with the assistant's",
        ),
        (SUM, {"reward": "mine.py:A_CLASS"}, "is a type, no function"),
        (SUM, {"question": "no place"}, "needs one {}"),
        (SUM, {"reward": "maths"}, "no reward is called 'maths': math, exact, contains"),
        (SUM, {"reward": "mine.py:absent"}, "mine.py:absent' cannot be imported: AttributeError"),
        (SUM, {"reward": "gone.py:own"}, "gone.py is no file"),
        (SUM, {"reward": "mine.py:needs"}, "takes tests, which no reply has; there are: answer, completion"),
        (SUM, {"reward": "mine.py:hidden"}, r"'hidden' takes \*args and \*\*kwargs, .*functools.wraps"),
        (SUM, {"reward": ["math", "exact"], "weights": [1]}, "2 rewards and 1 weights"),
        (SUM, {"reward": ["mine.py:own", "mine.py:own"]}, "two rewards have one name"),
        (SUM, {"rewards": "math"}, "did you mean 'reward'"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, row: dict[str, Any], args: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvError, match=said):
        data_of(files=[jsonl(folder / "a.jsonl", row)], **args)


def test_rows_with_half_a_surrogate_pair_can_be_told_apart(folder: Path) -> None:
    """An evaluation names each of its tasks by its content: one row of a million ended it."""
    rows = [SUM | {"source": f"cut \ud83d{n}"} for n in range(2)]
    first, other, again = data_of(files=[jsonl(folder / "a.jsonl", *rows, rows[0])])
    assert as_json(first, {"idx"}) == as_json(again, {"idx"}) != as_json(other, {"idx"})


def test_files_that_cannot_be_read_are_named_with_the_line(folder: Path) -> None:
    (folder / "cut.jsonl").write_text(json.dumps(SUM) + '\n{"prompt": "a')
    with pytest.raises(EnvError, match=r"cut.jsonl, line 2: no row can be read"):
        data_of(files=["cut.jsonl"])
    (folder / "deep.jsonl").write_text(json.dumps(SUM) + "\n" + "[" * 20000)
    with pytest.raises(EnvError, match=r"deep.jsonl, line 2: no row can be read"):
        data_of(files=["deep.jsonl"])
    (folder / "array.json").write_text(json.dumps([SUM, SUM], indent=2))
    with pytest.raises(EnvError, match=r"array.json is one JSON array; rows are one object a line: jq -c"):
        data_of(files=["array.json"])
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(EnvError, match=r"cut.parquet, row 1: no row can be read"):
        data_of(files=["cut.parquet"])
    picture = pa.Table.from_pylist([{"prompt": "a", "answer": 1, "picture": {"bytes": b"x"}}])
    parquet.write_table(picture, folder / "pictures.parquet")
    with pytest.raises(EnvError, match=r"pictures.parquet, row 1: column 'picture' holds bytes, such"):
        data_of(files=["pictures.parquet"])
    with pytest.raises(EnvError, match="one of them"):
        data_of()


PICTURE, AS_URL = b"\x89PNG\r\n\x1a\n", "data:image/png;base64,iVBORw0KGgo="
ASKED = {"type": "text", "text": "What?"}


def shown(data: RowData) -> list[Any]:
    """Addresses of images and texts of a prompt, in their order."""
    assert not isinstance(data.prompt, str) and data.prompt is not None
    [message] = data.prompt
    assert isinstance(message.content, list)
    parts = [part.model_dump() for part in message.content]
    return [part["text"] if part["type"] == "text" else part["image_url"]["url"] for part in parts]


def test_prompts_with_images_in_every_form(folder: Path) -> None:
    part = lambda **more: {"prompt": [{"role": "user", "content": [{"type": "image", **more}, ASKED]}]}  # noqa: E731
    rows: list[dict[str, Any]] = [
        part(image="a.png"),
        part() | {"images": ["a.png"]},
        part() | {"image": {"bytes": None, "path": "a.png"}},
        {"prompt": "<image>What?", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, ASKED]}]},
    ]
    (folder / "d").mkdir()
    found = data_of(files=[jsonl(folder / "d" / "a.jsonl", *({**row, "answer": "1"} for row in rows))])
    assert [shown(data) for data in found] == [[str(folder / "d" / "a.png"), "What?"]] * len(rows)
    assert [data.row for data in found] == [{"answer": "1"}] * len(rows), "what is shown is not the row's, too"
    (web,) = data_of(files=[jsonl(folder / "a.jsonl", part(image="https://x/a.png") | {"answer": "1"})])
    assert shown(web)[0] == "https://x/a.png"
    bare: dict[str, Any] = {"prompt": "What?", "image": "a.png", "answer": "1"}
    (asked,) = data_of(files=[jsonl(folder / "a.jsonl", bare)], question="<image>{}")
    assert shown(asked) == [str(folder / "a.png"), "What?"]
    (text,) = data_of(files=[jsonl(folder / "a.jsonl", bare)])
    assert text.prompt == "What?" and text.row["image"] == "a.png"
    for row, args in ((bare, {"images": "image"}), ({**rows[3], "images": ["a.png"] * 2, "answer": "1"}, {})):
        with pytest.raises(EnvError, match=r"a.jsonl, line 1: the column of images holds ., and 1 of them"):
            data_of(files=[jsonl(folder / "a.jsonl", row)], **args)
    film = {"type": "video_url", "video_url": {"url": "a.mp4"}}
    for row in ({"prompt": [{"role": "user", "content": [film]}]}, {"prompt": "<video>What?", "videos": ["a.mp4"]}):
        with pytest.raises(EnvError, match="<?video.*in a message: only text and images can be shown"):
            data_of(files=[jsonl(folder / "a.jsonl", {**row, "answer": "1"})])
    with pytest.raises(EnvError, match="more places for images than the 0"):
        data_of(files=[jsonl(folder / "a.jsonl", part() | {"answer": "1"})])


def test_images_of_parquet_and_the_hub_are_their_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "<image>What?", "images": [{"bytes": PICTURE, "path": "x.png"}], "answer": "1"}
    parquet.write_table(pa.Table.from_pylist([row]), folder / "a.parquet")
    (found,) = data_of(files=["a.parquet"])
    assert shown(found) == [AS_URL, "What?"] and found.row == {"answer": "1"}
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string")}
        | {"images": datasets.List(datasets.Image())}
    )
    saved = datasets.Dataset.from_list([row], features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: saved)
    (found,) = data_of(dataset="o/d")
    assert shown(found) == [AS_URL, "What?"]
    with pytest.raises(EnvError, match="holds 1, and 1 of them have no place"):
        data_of(dataset="o/d", prompt="answer", answer="prompt")


def test_prompts_without_a_score_may_hold_images(folder: Path) -> None:
    name = jsonl(folder / "a.jsonl", {"prompt": "<image>What?", "image": "a.png", "id": 3})
    (task,) = EnvSource(EnvConfig(id="prompts", args={"files": [name]}), "train", 0).env.taskset
    assert shown(task.data)[0] == str(folder / "a.png") and task.data.handed_on == {"id": 3}


def test_prompts_end_with_no_reply(folder: Path) -> None:
    """As data of SFT has it: the teacher would be asked what comes after the answer, and would have seen it."""

    def prompt_of(**row: Any) -> Any:
        name = jsonl(folder / "a.jsonl", row)
        (task,) = EnvSource(EnvConfig(id="prompts", args={"files": [name]}), "train", 0).env.taskset
        return task.data.prompt

    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(EnvError, match="line 1: no prompt can be read .`messages` ends with the assistant's reply"):
        prompt_of(messages=talk)
    assert prompt_of(messages=talk, question="2 + 3?") == "2 + 3?"


def test_no_number_in_a_table_is_no_answer(folder: Path) -> None:
    """Parquet can hold it, and JSON cannot: what a prompt hands on becomes a line."""
    nan, at = float("nan"), folder / "a.parquet"
    rows = [{"prompt": "a", "answer": nan, "label": 3.0}, {"prompt": "b", "answer": nan, "label": nan}]
    parquet.write_table(pa.Table.from_pylist(rows), at)
    with pytest.raises(EnvError, match="row 2: no answer for reward 'math'"):
        data_of(files=[str(at)])
    assert [data.answer for data in data_of(files=[str(at)], reward="mine.py:formed")] == [3.0, None]
    tasks = list(EnvSource(EnvConfig(id="prompts", args={"files": [str(at)]}), "train", 0).env.taskset)
    assert [task.data.handed_on for task in tasks] == [{"answer": None, "label": 3.0}, {"answer": None, "label": None}]


def test_a_row_is_an_object_only_while_it_is_played(folder: Path) -> None:
    texts = [f"{n} \ud83c + {2**70}?" for n in range(100)]  # half a character, as JSON can write it, and a long number
    rows = [{"prompt": [{"role": "user", "content": t}], "answer": 2**70, "info": {"n": [t]}} for t in texts]
    config = EnvConfig(id="rows", args={"files": [jsonl(folder / "a.jsonl", *rows)], "reward": "exact"})
    made = EnvSource(config, "train", 0, beside=[config])
    every = list(made.env.taskset)
    assert (made.num_tasks, len(every)) == (90, 100)
    numbers = [n for n in range(100) if n % 10 != 9]
    for index in (89, 0, 31, 32, 40):  # of several blocks, forth and back
        task, whole = made.task(index), every[numbers[index]]
        assert (task.data, task.config) == (whole.data, whole.config) and task.config.functions
    with pytest.raises(IndexError):
        made.task_number(100)
    del every, task, whole
    gc.collect()
    assert sum(type(each) is RowData for each in gc.get_objects()) == 1  # for the fields that all have


def test_data_sets_of_the_hub_become_what_json_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "a", "answer": 1, "at": datetime.date(2026, 1, 2), "nothing": None}
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: [row])
    (found,) = data_of(dataset="o/d")
    assert found.row == {"answer": 1, "at": "2026-01-02", "nothing": None}
    row["picture"] = {"of": [object()]}  # as `datasets` reads one
    with pytest.raises(EnvError, match="o/d, row 1: column 'picture' holds object, such as a picture"):
        data_of(dataset="o/d")


def test_functions_are_called_as_they_are_written(folder: Path) -> None:
    assert value("own", "4") == (1.0, {}) and value("own", "5") == (0.0, {})
    assert value("waits", "four") == (4.0, {})
    verl = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}}
    assert value("compute_score", "4", verl) == (1.0, {"acc": 1.0})
    assert value("of_trl", "4") == (1.0, {})
    assert value("told", "4") == (1.0, {})
    assert value("of_trl_chat", "four", prompt=[{"role": "user", "content": "2 + 2?"}]) == (4.0, {})
    assert value("of_openrlhf", "4") == (0.5, {"length": 1.0})
    picture = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}},
        {"type": "text", "text": "what?"},
    ]
    shown = [{"role": "system", "content": "be brief"}, {"role": "user", "content": picture}]
    assert value("of_openrlhf_images", "4", prompt=shown) == (1.0, {})
    assert value("none", "4") == (0.0, {})
    for name, error in {
        "nothing": ValueError,
        "unnamed": ValueError,
        "raises": KeyError,
        "stops": RuntimeError,
    }.items():
        with pytest.raises(error):
            value(name, "4")


def test_a_reply_has_its_reasoning_as_it_was_sampled(folder: Path) -> None:
    (formed,) = find_functions(["mine.py:formed"], [1.0])
    reply = Reply("4", "2 + 2?", [], "4", SUM, reasoning="\nhm\n")
    assert asyncio.run(formed.value(reply)) == (1.0, {})
    for named in find_functions(["math", "exact", "contains"], [1.0, 1.0, 1.0]):
        assert asyncio.run(named.value(reply)) == (1.0, {})
        assert asyncio.run(named.value(Reply("", "2 + 2?", [], "4", SUM, reasoning="it is 4"))) == (0.0, {})


def test_columns_of_some_rows_are_none_in_the_others(folder: Path) -> None:
    path = jsonl(folder / "a.jsonl", SUM, {**SUM, "tests": ["a"]})
    assert len(data_of(files=[path], reward="mine.py:needs")) == 2
    (needs,) = find_functions(["mine.py:needs"], [1.0])
    assert asyncio.run(needs.value(Reply("4", "2 + 2?", [], "4", SUM))) == (1.0, {})
    with pytest.raises(EnvError, match="line 2: no answer for reward 'math'"):
        data_of(files=[jsonl(folder / "b.jsonl", SUM, {"prompt": "a", "answer": None})])


def test_functions_that_hang_keep_nothing_else(folder: Path) -> None:
    (waits,) = find_functions(["mine.py:waits_long"], [1.0])
    reply = Reply("4", "2 + 2?", [], "4", SUM)

    async def play() -> list[tuple[float, dict[str, float]]]:
        calls = [asyncio.create_task(waits.value(reply)) for _ in range(40)]  # more than a loop has threads
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(int), 200) == 0
        left = asyncio.create_task(waits.value(reply))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        waits.function.__globals__["GATE"].set()
        return await asyncio.gather(*calls)

    assert asyncio.run(play()) == 40 * [(1.0, {})]


def test_workers_agree_on_the_functions(folder: Path) -> None:
    jsonl(folder / "a.jsonl", SUM)
    made = EnvSource(EnvConfig(id="rows", args={"files": "a.jsonl", "reward": "mine.py:own"}), "eval", 0, beside=[])
    before = fingerprint(made)
    (folder / "mine.py").write_text(f"{FUNCTIONS}# more\n")
    (differs,) = differences(before, fingerprint(made))
    assert differs.startswith("the environment's code")


@pytest.mark.parametrize(
    ("answer", "reply", "score"),
    [
        ("42", "It is 42.", 1.0),
        (42, "6 * 7 = \\boxed{42}", 1.0),
        ("so 1000 + 1 = 1001\n#### 1,001", "1001", 1.0),
        ("so \\boxed{\\frac{1}{2}}", "\\boxed{0.5}", 1.0),
        ("\\frac{1}{2}", "it is 0.5", 0.0),  # nothing is boxed, and the answer is no number
        ("42", "42 or 43", 0.0),
        ("42", "<think>42</think> I do not know", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(answer: Any, reply: str, score: float) -> None:
    assert asyncio.run(math_score(reply, answer)) == score


def test_answers_are_compared_as_text() -> None:
    assert exact_score("<think>4</think>  the\n sky", "the sky") == 1.0
    assert exact_score("the sky.", "the sky") == 0.0


def experiment(folder: Path, **args: Any) -> Experiment:
    text = json.dumps([{"id": "rows", "args": args}])
    argv = ["--model.name", str(folder), "--orchestrator.env", text, "--output-dir", str(folder / "outputs")]
    return load_experiment(argv, "rl", {}).experiment


def test_its_files_are_absolute_looked_for_and_mounted(folder: Path) -> None:
    jsonl(folder / "a.jsonl", SUM)
    found = experiment(folder, files=["a.jsonl"], reward=["mine.py:own", "math", "some.module:function"])
    args = found.orchestrator.env[0].args
    assert args["files"] == [str(folder / "a.jsonl")]
    assert args["reward"] == [f"{folder / 'mine.py'}:own", "math", "some.module:function"]
    needs = {(need.key, need.name) for need in needs_of(found) if need.kind == "files"}
    assert needs == {
        ("orchestrator.env.0.args.files", str(folder / "a.jsonl")),
        ("orchestrator.env.0.args.reward", str(folder / "mine.py")),
    }
    paths = stated_paths(found, SiteConfig(name="s"), found.run_dir)
    assert {folder / "a.jsonl", folder} <= set(paths.values())  # a function may import what lies beside it
    assert EnvConfig(id="prompts", args={"files": ["a.jsonl"]}).args == {"files": [str(folder / "a.jsonl")]}
    (need,) = [n for n in needs_of(experiment(folder, dataset="o/d", subset="main")) if n.kind == "dataset"]
    assert (need.name, need.subset, need.split) == ("o/d", "main", "train")


def test_files_that_are_not_there_are_said_before_anything_starts(folder: Path) -> None:
    text = json.dumps([{"id": "rows", "args": {"files": ["none.jsonl"], "reward": "gone.py:own"}}])
    loaded = load_experiment(["--model.name", str(folder), "--orchestrator.env", text], "rl", {})
    with pytest.raises(ConfigError) as caught:
        check(loaded)
    said = {problem.key: problem.message for problem in caught.value.problems}
    assert said["orchestrator.env.0.args.files"] == f"{folder / 'none.jsonl'} does not exist"
    assert said["orchestrator.env.0.args.reward"] == f"{folder / 'gone.py'} is no file"
    assert {f.key for f in lint(loaded.experiment, SiteConfig(name="s")) if f.code == "PH207"} == {
        "orchestrator.env.0.args.files",
        "orchestrator.env.0.args.reward",
    }


def test_functions_that_call_math_verify_are_spoken_of(folder: Path) -> None:
    jsonl(folder / "a.jsonl", SUM)
    (folder / "verifies.py").write_text("def score(completion):\n    from math_verify import verify\n    return 1.0\n")
    for name, speaks in {"verifies.py:score": True, "mine.py:own": False, "math": False}.items():
        made = EnvSource(EnvConfig(id="rows", args={"files": ["a.jsonl"], "reward": name}), "eval", 0, beside=[])
        assert speaks_of(made.env.taskset, "math_verify") is speaks
    foreign: Any = SimpleNamespace(functions=["of a package's own"], config=None)
    assert not speaks_of(foreign, "math_verify")


def test_lint_knows_the_rewards_that_have_a_name() -> None:
    assert set(REWARDS) == set(NAMED)
