"""Reward functions of the environment `rows`: those with a name, and a user's own, as TRL, verl and OpenRLHF call them.

A function is called with those of its parameters that a reply has, by name:

    completion, response, solution_str   the reply's text, as it was sampled: with its reasoning
    answer, ground_truth                 the row's answer (a column `ground_truth` goes before it)
    prompt                               what was asked, as it stands in the row
    messages                             the whole conversation, OpenAI's dictionaries
    row                                  the row's columns; each is there by its own name too

It returns a number, or a dictionary with `score` (or `reward`) whose other numbers become metrics. One that takes
`completions` is called as TRL calls it, one that takes `queries` (prompt and reply) as OpenRLHF does: every argument is
a list, of one.
"""

import asyncio
import contextlib
import contextvars
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prime_hpc.config.named_code import signature_of
from prime_hpc.envs.benchmarks.rows import last_box
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.math_answers import same_answer
from prime_hpc.envs.rows.reward_calls import TEXT, is_plural, wrong_call
from prime_hpc.envs.tasksets.integers import last_number
from prime_hpc.envs.tasksets.math_questions import answer_in

Function = Callable[..., Any]
_SCORE = ("score", "reward", "rewards")
AT_ONCE = 64
"""Functions that run at a time, on threads: most of them wait for somebody, a reward model for instance."""
_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


async def math_score(completion: str, answer: Any) -> float:
    r"""Return 1 where the reply's last box (of a number: else its last number) is the answer, as mathematics.

    The answer may be a worked solution: what its last `\boxed{}` holds, or what follows `####`, counts.
    """
    text = str(answer)
    gold = last_box(text) or text.rpartition("####")[2].strip()
    number = last_number(gold)
    is_number = number is not None and gold.replace(",", "").strip("$ ") == format(number, "f")
    found = answer_in(completion, integer=is_number)
    return float(bool(found) and await same_answer(gold.replace(",", "") if is_number else gold, found))


def exact_score(completion: str, answer: Any) -> float:
    """Return 1 where the reply, without its reasoning, is the answer; white space does not count."""
    return float(_said(completion).split() == str(answer).split())


def contains_score(completion: str, answer: Any) -> float:
    """Return 1 where the reply, without its reasoning, has the answer in it; white space does not count."""
    said, gold = " ".join(_said(completion).split()), " ".join(str(answer).split())
    return float(bool(gold) and gold in said)


def _said(completion: str) -> str:
    return completion.rpartition("</think>")[2]


NAMED: dict[str, Function] = {"math": math_score, "exact": exact_score, "contains": contains_score}


@dataclass(frozen=True)
class Reply:
    """One reply and what it is scored by."""

    text: str
    """Without its reasoning."""
    prompt: Any
    """As it stands in the row: text or messages."""
    messages: list[dict[str, Any]]
    answer: Any
    row: Mapping[str, Any]
    reasoning: str = ""

    @property
    def sampled(self) -> str:
        """The text with its reasoning, as Qwen3 and others write it: rewards for a form look for the tags."""
        if not self.reasoning:
            return self.text
        end = f"\n</think>\n\n{self.text}" if self.text else ""  # cut, perhaps: within it
        return f"<think>\n{self.reasoning.strip()}{end}"


@dataclass(frozen=True)
class RewardFunction:
    """A function with its name among the metrics."""

    name: str
    function: Function
    weight: float
    modules: tuple[str, ...] = ()
    """With its code: where it was named, and where it was written."""

    @cached_property
    def is_plural(self) -> bool:
        """True if it takes lists, as TRL and OpenRLHF have it."""
        return is_plural(signature_of(self.function))

    def check(self, columns: Iterable[str]) -> None:
        """Raise EnvError where it needs what no reply has, or does not say what it needs."""
        if wrong := wrong_call(self.name, signature_of(self.function), columns):
            raise EnvError(f"rows: {wrong}")

    async def value(self, reply: Reply) -> tuple[float, dict[str, float]]:
        """Return the score, and the metrics beside it. Raises TypeError, ValueError: it returned no finite number."""
        call = self._call_plural if self.is_plural else self._call
        if inspect.iscoroutinefunction(self.function):
            found = await call(reply)
        else:
            found = await _on_thread(call, reply)
            found = await found if isinstance(found, Awaitable) else found
        metrics: dict[str, float] = {}
        if isinstance(found, Mapping):
            key = next((name for name in _SCORE if name in found), None)
            if key is None:
                raise ValueError(f"reward {self.name!r} returned a dictionary without `score`: {sorted(found)}")
            others = {**found, **(found.get("extra_logs") or {})}
            numbers = {str(name): _single(value) for name, value in others.items() if name != key}
            metrics = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
            found = found[key]
        found = _single(found)
        score = 0.0 if found is None else float(found)  # TRL: None is "does not apply"
        if not math.isfinite(score):
            raise ValueError(f"reward {self.name!r} returned {score}")
        return score, metrics

    def _call(self, reply: Reply) -> Any:
        text = reply.text if self.function in NAMED.values() else reply.sampled
        offered = {
            **reply.row,
            **dict.fromkeys(TEXT, text),
            **{"answer": reply.answer, "ground_truth": reply.row.get("ground_truth", reply.answer)},
            **{"prompt": reply.prompt, "messages": reply.messages, "row": dict(reply.row)},
        }
        return self.function(**_accepted(self.function, offered))

    def _call_plural(self, reply: Reply) -> Any:
        is_chat = not isinstance(reply.prompt, str)
        completion: Any = [{"role": "assistant", "content": reply.sampled}] if is_chat else reply.sampled
        texts = [_text(message.get("content")) for message in reply.prompt] if is_chat else [reply.prompt]
        offered = {"labels": [reply.answer], **{name: [value] for name, value in reply.row.items()}}
        offered |= {"completions": [completion], "prompts": [reply.prompt]}
        offered |= {"queries": ["\n".join(texts) + reply.sampled]}
        return self.function(**_accepted(self.function, offered, missing=[None]))


def _text(content: Any) -> str:
    """Return a message's text, without its images."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts)


def _single(value: Any) -> Any:
    """Return a number of any library, alone or the only one of a list, as Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _accepted(function: Function, offered: dict[str, Any], missing: Any = None) -> dict[str, Any]:
    """Of what is offered what the function takes; a column that other rows have is `missing`, as `datasets` has it."""
    parameters = signature_of(function).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    offered = {**dict.fromkeys(needed, missing), **offered}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    names = {p.name for p in parameters}
    return {name: value for name, value in offered.items() if name in names}


async def _on_thread(call: Callable[[Reply], Any], reply: Reply) -> Any:
    """Call it on a thread of its own, `AT_ONCE` of them at a time.

    Not on the loop's: prompts are rendered and addresses looked up on those, behind all that a slow or a hanging
    function holds. One that hangs past its episode's deadline is left behind, and keeps nobody's turn nor the process.
    """
    loop = asyncio.get_running_loop()
    ended, context = asyncio.Event(), contextvars.copy_context()
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(context.run(call, reply))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            raised.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    async with _TURNS.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
        threading.Thread(target=run, name="prime-hpc-reward", daemon=True).start()
        await ended.wait()
    if raised:
        raise raised[0]
    return found[0]


def find_functions(names: Iterable[str], weights: Iterable[float]) -> tuple[RewardFunction, ...]:
    """Return the reward functions by their names: one of `NAMED`, `module:function` or `FILE.py:function`.
    Raises EnvError: one is not there, or two have one name; says where it was looked for."""
    found = tuple(
        RewardFunction(name, NAMED[name], weight) if name in NAMED else _imported(name, weight)
        for name, weight in zip(names, weights, strict=True)
    )
    labels = [each.name for each in found]
    if len(set(labels)) < len(labels):
        raise EnvError(f"rows: two rewards have one name, by which the metrics tell them apart: {', '.join(labels)}")
    return found


def _imported(name: str, weight: float) -> RewardFunction:
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise EnvError(f"rows: no reward is called {name!r}: {', '.join(NAMED)}, or your own as FILE.py:function")
    try:
        module = _file_module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, attribute)
    except FileNotFoundError as error:
        raise EnvError(f"rows: reward {name!r}: {Path(place).absolute()} is no file") from error
    except (Exception, SystemExit) as error:  # a user's code
        raise EnvError(f"rows: reward {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function) or isinstance(function, type):
        raise EnvError(f"rows: reward {name!r} is a {type(function).__name__}, no function")
    return RewardFunction(attribute, function, weight, (module.__name__, str(getattr(function, "__module__", ""))))


def _file_module(path: Path) -> Any:
    """Import a file once, under a name that no package has; files beside it can be imported by it."""
    where = path.expanduser().resolve(strict=True)
    name = f"prime_hpc_rewards_{where.stem}_{zlib.crc32(str(where).encode()):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if str(where.parent) not in sys.path:
            sys.path.append(str(where.parent))
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
