"""The bundled tasks' pure parts: texts, splits, scores, parsing."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs import task_sources
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.loop_thread import LoopInterrupt, LoopThread
from prime_hpc.envs.samples import one_line
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.envs.tasksets.reverse_text_data import WORDS, answer_of, build_prompt, make_texts, score, split_of


def test_texts_are_deterministic_and_within_bounds() -> None:
    texts = make_texts("train", 7, 500)
    assert texts == make_texts("train", 7, 500)
    assert texts[:100] == make_texts("train", 7, 100)
    assert texts != make_texts("train", 8, 500)
    assert len(set(texts)) == 500
    assert all(6 <= len(text) <= 16 and 2 <= len(text.split()) <= 3 for text in texts)
    assert all(word in WORDS for text in texts for word in text.split())


def test_texts_do_not_depend_on_the_interpreter_s_hash_seed() -> None:
    code = "from prime_hpc.envs.tasksets.reverse_text_data import make_texts; print(make_texts('eval', 0, 5))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_no_seed_puts_a_text_into_both_splits() -> None:
    train = {text for seed in range(5) for text in make_texts("train", seed, 2000)}
    held_out = {text for seed in range(5) for text in make_texts("eval", seed, 500)}
    assert not train & held_out
    assert all(split_of(text) == "eval" for text in held_out)


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="widen the bounds"):
        make_texts("train", 0, 10, min_chars=1, max_chars=2)
    with pytest.raises(ValueError, match="split"):
        make_texts("test", 0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bounds"):
        make_texts("train", 0, 1, min_words=3, max_words=2)


def test_score_is_one_only_for_the_reversed_text() -> None:
    assert answer_of("red fox") == "xof der"
    assert build_prompt("red fox") == [{"role": "user", "content": "red fox"}]
    assert score(" xof der\n", "red fox") == 1.0
    assert 0.0 < score("red fox", "red fox") < 1.0
    assert score("", "red fox") == 0.0
    # a longer repetition of a popular letter must not be ignored (difflib's `autojunk`)
    assert score("a" * 300, "a" * 300) == 1.0


def test_guess_number_judges_the_last_number() -> None:
    from prime_hpc.envs.tasksets.guess_number import judge

    assert judge("I say 5, no: 40", 40) is None
    assert judge("39", 40) == "higher"
    assert judge("41", 40) == "lower"
    assert judge("no idea", 40) == "Answer with a number."
    assert judge("9" * 5000, 40) == "lower"


def test_reasoning_gym_answer_is_the_last_tagged_one() -> None:
    from prime_hpc.envs.tasksets.reasoning_gym import extract_answer

    assert extract_answer("<answer>1</answer> or <answer> 2\n</answer>") == "2"
    assert extract_answer(" 7 ") == "7"


def test_an_endless_taskset_keeps_a_window_of_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            for n in itertools.count():
                made.append(n)
                yield n

    monkeypatch.setattr(task_sources, "WINDOW", 8)
    tasks = task_sources.EndlessTasks(Numbers(), "numbers")
    assert [tasks[n] for n in (0, 5, 20, 13)] == [0, 5, 20, 13] and len(made) == 21
    assert len(tasks._kept) == 8
    assert tasks[12] == 12 and len(made) == 21 + 13  # older than the window: made again


class Slow:
    """Makes 31 tasks in 1.5 s, the next one when it may."""

    def __init__(self) -> None:
        self.begun, self.stands, self.may_end = threading.Event(), threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        for n in range(31):
            self.begun.set()
            time.sleep(0.05)
            yield n
        self.stands.set()
        self.may_end.wait(60)
        yield 31


def test_a_task_is_waited_for_as_long_as_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation looks at its tasks on several threads: one made all before its own, and the others failed."""
    monkeypatch.setattr(task_sources, "BUSY_S", 1.0)
    slow = Slow()
    tasks = task_sources.EndlessTasks(slow, "slow")
    with ThreadPoolExecutor() as threads:
        last = threads.submit(tasks.__getitem__, 30)
        assert slow.begun.wait(60) and tasks[0] == 0 and last.result(60) == 30
        never = threads.submit(tasks.__getitem__, 31)
        assert slow.stands.wait(60)
        with pytest.raises(EnvError, match="'slow': another task of it was made for more than 1 s"):
            tasks[0]
        slow.may_end.set()
        assert never.result(60) == 31 and tasks[0] == 0


def test_a_loop_that_is_interrupted_as_it_waits_for_a_task_keeps_it_from_nobody() -> None:
    slow = Slow()
    tasks = task_sources.EndlessTasks(slow, "slow")

    async def take() -> Any:
        return tasks[0]

    with ThreadPoolExecutor() as threads:
        never, loop = threads.submit(tasks.__getitem__, 31), LoopThread("loop")
        assert slow.stands.wait(60)
        waiting = loop.submit(take())
        while "in __getitem__" not in loop.busy_with():
            time.sleep(0.001)
        loop.interrupt()
        slow.may_end.set()
        assert never.result(60) == 31 and isinstance(waiting.exception(60), LoopInterrupt)
        loop.abandon()
        assert tasks[0] == 0


TELLS_ALL = """
import verifiers.v1 as vf
from pydantic import model_validator

__all__ = ["TellsAll"]


class TellsAllConfig(vf.TasksetConfig):
    judge_api_key: str = ""
    size: int = 1

    @model_validator(mode="after")
    def _fits(self) -> "TellsAllConfig":
        if self.size == 2:
            raise ValueError("1 is as many as there can be")
        return self


class TellsAll(vf.Taskset[vf.Task, TellsAllConfig]):
    def load(self):
        raise RuntimeError(f"the judge knows no {self.config.judge_api_key}")
"""


def test_no_secret_is_in_what_is_said_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells_all.py").write_text(TELLS_ALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    key = {"judge_api_key": "can4ry-0f-a-judge"}
    for args, said in (({"size": 2}, "1 is as many as there can be"), ({}, "the judge knows no ***")):
        with pytest.raises(EnvError) as refused:
            EnvSource(EnvConfig(id="tells_all", args=key | args), "train", 0)
        assert said in str(refused.value) and "can4ry" not in str(refused.value)
    assert one_line("it knows no can4ry-0f-a-judge") == "it knows no ***"


def test_rows_that_both_splits_take_from_are_read_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'\ufeff{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(40)), encoding="utf-8")
    config = EnvConfig(id="rows", args={"files": [str(file)]})
    trained = EnvSource(config, "train", 0, beside=[config])
    file.unlink()
    held_out = EnvSource(config, "eval", 0, beside=[config])
    asked = [[one.task(n).data.prompt for n in range(one.num_tasks or 0)] for one in (trained, held_out)]
    assert [len(prompts) for prompts in asked] == [36, 4] and asked[1] == ["9?", "19?", "29?", "39?"]
    assert not set(asked[0]) & set(asked[1])
    del trained, held_out  # nobody has them any more
    with pytest.raises(EnvError, match="does not exist"):
        EnvSource(config, "train", 0, beside=[config])
