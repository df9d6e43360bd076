"""Rubrics of the older verifiers interface: reward functions with weights, each given the arguments that it names.

A function may take `prompt`, `completion`, `answer`, `state`, `task`, `info`, `parser`, further columns of its row, and
whatever the rubric's `class_objects` hold. One that raises scores 0, as it did there; the log says so once, the metric
`reward_errors` how many did. One whose judge does not answer fails its episode.
"""

import inspect
import re
import sys
import threading
from asyncio import wrap_future
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from json import JSONDecodeError
from typing import Any

from loguru import logger

from prime_hpc.config.named_code import signature_of
from prime_hpc.envs.bounded.calls import CallBroken
from prime_hpc.envs.errors import NO_SIGNAL, EnvError
from prime_hpc.envs.legacy.failures import EmptyModelResponseError, InvalidModelResponseError, ModelError
from prime_hpc.envs.legacy.messages import Messages, RewardFunc, State, accepted, marked, maybe_await
from prime_hpc.envs.legacy.parsers import MaybeThinkParser, Parser, extract_boxed_answer, text_of
from prime_hpc.envs.loop_thread import LoopThread

OFFERED = ("prompt", "completion", "answer", "task", "info")
"""Arguments of every function that the rollout's state holds."""
OF_GROUPS = frozenset({"prompts", "completions", "answers", "states", "tasks", "infos"})
"""Parameters of a function that scores all rollouts of a group at once."""
OWN_SCORING = ("score_rollout", "score_rollouts", "score_group", "call_reward_func")
"""Methods with which a class of the older interface scores otherwise than by the weighted sum of its functions."""

_OTHER_LOOP = re.compile("(bound|attached) to a different (event )?loop")
"""Python's words."""
REFUSED = (400, 413, 422)
"""HTTP statuses that are about the request, not about the server."""
_MOST_CHARACTERS = 300
"""Of an answer that cannot be read."""


class Rubric:
    """A weighted sum of reward functions; those of weight 0 are metrics."""

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **kwargs: Any,
    ) -> None:
        self.funcs: list[RewardFunc] = list(funcs or [])
        self.weights: list[float] = list(weights or [1.0] * len(self.funcs))
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"Rubric has {len(self.funcs)} functions and {len(self.weights)} weights")
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self._told: set[str] = set()
        for name, value in kwargs.items():
            setattr(self, name, value)

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """One more function."""
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """One more function that is recorded and not summed."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        """Something that functions may ask for by this name."""
        self.class_objects[name] = obj

    def weighted(self) -> list[tuple["Rubric", RewardFunc, float]]:
        """Every function with the rubric whose objects it sees and its weight."""
        return [(self, func, weight) for func, weight in zip(self.funcs, self.weights, strict=True)]

    def check(self) -> None:
        """Raise EnvError for what would score otherwise than it means to: its own scoring, functions of groups."""
        self._check_class()
        for _, func, _ in self.weighted():
            plural = OF_GROUPS & set(signature_of(func).parameters)
            if plural:
                raise EnvError(
                    f"reward function {name_of(func)!r} compares all rollouts of a group (it takes "
                    f"{', '.join(sorted(plural))}), which verifiers v1 does not score together"
                )

    def check_arguments(self, columns: Iterable[str]) -> None:
        """Raise EnvError for a function with a weight that takes what no rollout has: it would score 0 for ever.
        `columns`: of all the environment's rows; a function may take any."""
        for rubric, func, weight in self.weighted():
            known = {*OFFERED, "state", "example_id", *columns, *rubric.class_objects}
            missing = _missing(signature_of(func), known)
            # A decorator may give what the function that it wraps takes: then its own signature has all it needs.
            if weight and missing and _missing(signature_of(func, follow_wrapped=False), known):
                raise EnvError(
                    f"reward function {name_of(func)!r} takes {', '.join(missing)}, which no rollout has, so that it "
                    f"could never score; there are: {', '.join(sorted(known))}, and what `add_class_object` adds"
                )

    def _check_class(self) -> None:
        for name in OWN_SCORING:
            if hasattr(type(self), name):
                raise EnvError(
                    f"class {type(self).__name__} has a {name}() of its own, which is not called here: its rewards "
                    "would be others. Write the score as a reward function (`funcs`)"
                )

    async def value(self, func: RewardFunc, state: State, weight: float = 1.0) -> float:
        """Compute what one function gives for a finished rollout; `state["reward_errors"]` counts those that raise.

        Raises:
            openai.APIError: what the reward follows from cannot be asked: a 0 would be learned from.
            ModelError: likewise, its judge answers, and no verdict.
            RuntimeError: likewise, something of the package's is of an event loop that was left behind.
            EnvError: it asks for a signal, a deadline's: all its values would be 0.
        """
        try:
            return float(await maybe_await(func, **accepted(func, self._offered(state))))
        except CallBroken:  # not the function's fault, nor the answer's
            raise
        except Exception as error:  # the interface's own rule: the function scores 0
            if weight and (_is_api_failure(error) or _OTHER_LOOP.search(str(error))):
                raise
            if weight and NO_SIGNAL in str(error):
                raise EnvError(
                    f"reward function {name_of(func)!r} asks for a signal (signal.alarm, as a deadline), which works "
                    "on a process's main thread alone, and rewards run on another: bound it in another way"
                ) from error
            state["reward_errors"] = state.get("reward_errors", 0) + 1
            if name_of(func) not in self._told:
                self._told.add(name_of(func))
                logger.warning(
                    "reward function {!r} raised {}: {}; it scores 0 wherever it does (said once; the metric "
                    "reward_errors counts)",
                    name_of(func),
                    type(error).__name__,
                    error,
                )
            return 0.0

    def _offered(self, state: State) -> dict[str, Any]:
        """Return what a function may ask for by name."""
        row = state.get("input")  # unless a package keeps something of its own there: releases to 0.1.6 had no such key
        offered = {**(row if isinstance(row, Mapping) else {}), **{name: state.get(name) for name in OFFERED}}
        return {**offered, "state": state, **self.class_objects}


class RubricGroup(Rubric):
    """Several rubrics, whose rewards add up."""

    def __init__(self, rubrics: Sequence[Rubric], **kwargs: Any) -> None:
        if not rubrics:
            raise ValueError("RubricGroup needs at least one rubric")
        super().__init__(**kwargs)
        self.rubrics = list(rubrics)

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """One more function, of the first rubric."""
        self.rubrics[0].add_reward_func(func, weight)

    def weighted(self) -> list[tuple[Rubric, RewardFunc, float]]:
        """Return every member's functions with their weights."""
        return [entry for rubric in self.rubrics for entry in rubric.weighted()]

    def check(self) -> None:
        """Check every member."""
        self._check_class()
        for rubric in self.rubrics:
            rubric.check()


def parts_of(rubric: Rubric) -> list[Rubric]:
    """Return a rubric, and those of a group."""
    members = rubric.rubrics if isinstance(rubric, RubricGroup) else []
    return [rubric, *(part for member in members for part in parts_of(member))]


async def clean_up(rubric: Rubric, state: State) -> None:
    """Call the methods that `vf.cleanup` marks, after a rollout was scored."""
    for part in parts_of(rubric):
        for handler in marked(part, "cleanup"):
            named = accepted(handler, part._offered(state))
            unnamed = (state,) if signature_of(handler).parameters and not named else ()
            await maybe_await(handler, *unnamed, **named)


class MathRubric(Rubric):
    """1 for an answer that math-verify finds equal to the task's."""

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(funcs, weights, parser or MaybeThinkParser(extract_boxed_answer), **kwargs)
        self.add_reward_func(self.correct_answer_reward_func)

    async def correct_answer_reward_func(self, parser: Parser, completion: Messages, answer: str) -> float:
        """Return whether the parser's answer is the task's, as mathematics."""
        from prime_hpc.envs.math_answers import same_answer

        found = parser.parse_answer(completion)
        return float(bool(found) and await same_answer(str(answer), str(found)))


class ToolRubric(Rubric):
    """Counts tool calls, all and by tool; of no weight."""

    def __init__(self, tools: Sequence[Callable[..., Any]] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tools = list(tools or [])
        self.tool_names = [name_of(tool) for tool in self.tools]
        self.add_metric(self.total_tool_calls)
        for name in self.tool_names:
            self.add_metric(_count_of(name))

    def total_tool_calls(self, completion: Messages) -> float:
        """Count calls of any tool."""
        return float(len(_called(completion)))


class JudgeRubric(Rubric):
    """Asks another model about an answer; reward functions call `await judge(prompt, completion, answer, state)`."""

    PROMPT = (
        "Compare a response with the reference answer of a question.\n\nQuestion:\n{question}\n\nReference answer:\n"
        "{answer}\n\nResponse:\n{response}\n\nIs the response correct? Reply with yes or no alone."
    )

    def __init__(
        self,
        parser: Parser | None = None,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: dict[str, Any] | None = None,
        judge_prompt: str = PROMPT,
        **kwargs: Any,
    ) -> None:
        super().__init__(parser=parser, **kwargs)
        if judge_client is None:
            from openai import AsyncOpenAI, OpenAIError

            try:
                judge_client = AsyncOpenAI()
            except OpenAIError as error:
                raise EnvError(f"its JudgeRubric asks {judge_model} through OpenAI's API: {error}") from error
        self.judge_client, self.judge_model, self.judge_prompt = judge_client, judge_model, judge_prompt
        self.judge_sampling_args = {k: v for k, v in (judge_sampling_args or {}).items() if v is not None}
        self.class_objects |= {
            "judge": self.judge,
            "judge_client": judge_client,
            "judge_model": judge_model,
            "judge_prompt": judge_prompt,
            "judge_sampling_args": self.judge_sampling_args,
        }

    async def judge(self, prompt: Any, completion: Any, answer: Any, state: State | None = None, **kwargs: Any) -> str:
        """Return the judge's reply; asked once for one question. Functions hand on whatever else they got."""
        question = prompt if isinstance(prompt, str) else text_of(prompt[-1]) if prompt else ""
        response = self.parser.parse_answer(completion)
        text = self.judge_prompt.format(question=question, answer=answer, response=response)
        sampling = {"max_completion_tokens" if k == "max_tokens" else k: v for k, v in self.judge_sampling_args.items()}
        known = state.setdefault("judge_response", {}) if state is not None else {}
        if text not in known:
            try:
                asked = self.judge_client.chat.completions.create(
                    model=self.judge_model,
                    messages=[{"role": "user", "content": text}],
                    **sampling,
                )  # a client that is not async answers here: on the judges' loop it would hold up all others
                reply = await _on_judges_loop(asked) if isinstance(asked, Awaitable) else asked
            except JSONDecodeError as error:  # of half a body; the client raises it as it is
                said = f"judge {self.judge_model} answers what cannot be read: {type(error).__name__}: {error}"
                raise InvalidModelResponseError(said) from error
            known[text] = _said_by(self.judge_model, reply)
        return known[text]


def _said_by(judge: str, reply: Any) -> str:
    """Return what a judge said; empty where a filter kept it from it, which is the fault of what it was asked about.
    Raises ModelError: it said nothing, or answered what is no completion."""
    try:
        choice = reply.choices[0]
        message = choice.message
        content = message.content
    except (AttributeError, IndexError, TypeError) as error:
        shown = (reply if isinstance(reply, str) else repr(reply))[:_MOST_CHARACTERS]
        raise InvalidModelResponseError(f"judge {judge} answers what cannot be read: {shown}") from error
    if content is not None and str(content).strip():
        return str(content)
    reason = getattr(choice, "finish_reason", None)
    if (refusal := getattr(message, "refusal", None)) or reason == "content_filter":
        return str(refusal or "")
    raise EmptyModelResponseError(f"judge {judge} says nothing (finish_reason: {reason})")


async def _on_judges_loop(asked: Awaitable[Any]) -> Any:
    async def answer() -> Any:
        return await asked

    with _STARTING:
        loop = _judges_loop()
    return await wrap_future(loop.submit(answer()))


_STARTING = threading.Lock()


@cache  # which lets two that ask first at once have one each
def _judges_loop() -> LoopThread:
    """Return the loop on which all judges of this process are asked. A client's connections are of one loop, and
    training and evaluation, which share an environment, have one each: some questions failed, others hung."""
    return LoopThread("prime-hpc-judges")


def _is_api_failure(error: Exception) -> bool:
    """Return whether an API failed, a judge's say; what it refuses may be the reply's fault: too long, for one."""
    if isinstance(error, ModelError):
        return True
    openai = sys.modules.get("openai")
    return openai is not None and isinstance(error, openai.APIError) and getattr(error, "status_code", 0) not in REFUSED


def name_of(func: RewardFunc) -> str:
    """Return a function's name, also of a callable object."""
    return str(getattr(func, "__name__", type(func).__name__))


def _missing(signature: inspect.Signature, known: Container[str]) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if _is_missing(parameter, known)]


def _is_missing(parameter: inspect.Parameter, known: Container[str]) -> bool:
    """Return whether a function cannot be called with the arguments that there are, given by name."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default is not parameter.empty:
        return False
    return parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in known


def _called(completion: Messages) -> list[str]:
    return [
        call["function"]["name"]
        for message in completion
        if message["role"] == "assistant"
        for call in message.get("tool_calls") or []
    ]


def _count_of(tool: str) -> RewardFunc:
    def count(completion: Messages) -> float:
        return float(_called(completion).count(tool))

    count.__name__ = f"{tool}_calls"
    return count
