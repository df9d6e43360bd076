"""Environments of the older verifiers interface: a data set, a rubric, and what answers the model between its replies.

They only hold and answer; `prime_hpc.envs.legacy.taskset` asks the model and scores. So whoever overrides `rollout` or
`get_model_response` is refused: these would ask it by themselves, past the tokens that training needs.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from loguru import logger

from prime_hpc.config.named_code import signature_of
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.legacy.messages import (
    ChatMessage,
    Messages,
    State,
    chat_messages,
    marked,
    maybe_await,
    tool_declaration,
    whole_characters,
)
from prime_hpc.envs.legacy.parsers import Parser
from prime_hpc.envs.legacy.rubrics import Rubric, RubricGroup

OWN_LOOPS = ("rollout", "get_model_response", "generate", "run_rollout", "run_group")
"""Methods that ask the model; overridden, they would do it without us."""
NOT_CALLED = ("init_state", "add_trajectory_step", "add_model_response", "render_completion")
"""Hooks of some releases around a turn, which have no place in the rollout here."""


def stop(method: Callable[..., Any] | None = None, priority: int = 0) -> Any:
    """Mark a method that ends the rollout when it is true."""
    return _marked("stop", method, priority)


def cleanup(method: Callable[..., Any] | None = None, priority: int = 0) -> Any:
    """Mark a method to be called with the state after a rollout."""
    return _marked("cleanup", method, priority)


def teardown(method: Callable[..., Any] | None = None, priority: int = 0) -> Any:
    """Mark a method to be called when nobody plays the environment any more."""
    return _marked("teardown", method, priority)


def _marked(mark: str, method: Callable[..., Any] | None, priority: int) -> Any:
    def decorate(function: Any) -> Any:
        setattr(function, mark, True)
        setattr(function, f"{mark}_priority", priority)
        return function

    return decorate if method is None else decorate(method)


def ensure_keys(keys: Iterable[str]) -> None:
    """Check that variables are set, as packages do before all else. Raises EnvError: names those that are not."""
    if missing := [key for key in keys if not os.environ.get(key)]:
        raise EnvError(f"it needs variables that are not set: {', '.join(missing)} (in a job: slurm.env)")


class Environment:
    """Tasks (`dataset`, `eval_dataset`: rows with `prompt` or `question`), a rubric, a parser."""

    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Any] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: dict[str, Any] | None = None,
        message_type: str = "chat",
        oai_tools: list[Any] | None = None,
        tool_defs: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take data sets as lists of rows, `datasets.Dataset`s or functions that make one.
        Raises EnvError: it completes text instead of chatting, or has no tasks at all."""
        if message_type != "chat":
            raise EnvError(f"message_type = {message_type!r}: only chat environments are played")
        self._sources = {"train": dataset, "eval": eval_dataset}
        self.system_prompt, self.few_shot = system_prompt, list(few_shot or [])
        self.rubric = rubric or Rubric()
        self.parser = parser or self.rubric.parser
        self.sampling_args, self.message_type = sampling_args or {}, message_type
        self.oai_tools = oai_tools or tool_defs
        self.env_id = ""
        self.env_args: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        if dataset is None and eval_dataset is None:
            raise EnvError("it has neither a dataset nor an eval_dataset")

    @property
    def dataset(self) -> Any:
        """The tasks to train on; None without."""
        return self._made("train")

    @property
    def eval_dataset(self) -> Any:
        """The tasks to evaluate on; None without."""
        return self._made("eval")

    def has(self, split: str) -> bool:
        """Return whether it has tasks of a split of their own."""
        return self._sources[split] is not None

    def _made(self, split: str) -> Any:
        source = self._sources[split]
        if callable(source):
            source = self._sources[split] = source()
        return source

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """Return the training tasks, or the first n of them. Raises ValueError: there are none."""
        return _first(self._made("train"), n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """Return the evaluation tasks, or those for training where there are no others."""
        return _first(self._made("eval" if self.has("eval") else "train"), n, seed)

    @property
    def tool_defs(self) -> Any:
        """The last releases' name of `oai_tools`."""
        return self.oai_tools

    @tool_defs.setter
    def tool_defs(self, value: Any) -> None:
        self.oai_tools = value

    def add_rubric(self, rubric: Rubric) -> None:
        """One more rubric."""
        self.rubric = RubricGroup([self.rubric, rubric], parser=self.rubric.parser)

    def set_kwargs(self, **values: Any) -> None:
        """Set attributes by name."""
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def turn_limit(self) -> int:
        """Replies of one rollout at most; 0: it states no limit."""
        return 0

    def example(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a row as the rollout's input: `prompt` as messages, `answer`, `task`, `info`."""
        prompt = row.get("prompt")
        if prompt is None:
            if "question" not in row:
                raise EnvError(f"row {number} has neither a prompt nor a question, but {', '.join(row)}")
            prompt = [*self.few_shot, {"role": "user", "content": str(row["question"])}]
        prompt = chat_messages(prompt)
        if self.system_prompt and prompt and prompt[0].get("role") != "system":
            prompt = [ChatMessage(role="system", content=self.system_prompt), *prompt]
        info = row.get("info") or {}
        try:
            info = json.loads(info) if isinstance(info, str) else info
        except ValueError as error:
            raise EnvError(f"row {number}: its info is a text, but no JSON: {error}") from error
        return {
            **row,
            "prompt": [{k: v for k, v in m.items() if v is not None} for m in prompt],
            "answer": row.get("answer", ""),
            "task": row.get("task") or self.env_id or "default",
            "info": info,
        }

    def member(self, example: dict[str, Any]) -> "Environment":
        """Return the environment that plays an example: this environment, or one of a group."""
        return self

    def refuse_own_loop(self) -> None:
        """Raise EnvError where it asks the model by itself."""
        for name in OWN_LOOPS:
            if hasattr(type(self), name):
                raise EnvError(
                    f"class {type(self).__name__} has a {name}() of its own, which would ask the model without the "
                    "tokens, log-probabilities and versions that training needs"
                )

    def check(self) -> None:
        """Raise EnvError where it cannot be played here: says what and why."""
        self.refuse_own_loop()
        self.rubric.check()
        if limit := getattr(self, "timeout_seconds", None):
            logger.warning("{}: its timeout_seconds = {} is not kept: state timeout_s", type(self).__name__, limit)
        unused = [name for name in NOT_CALLED if hasattr(type(self), name)]
        if unused:
            logger.warning("{}: these of its methods are not called here: {}", type(self).__name__, ", ".join(unused))
        if not any(weight for _, _, weight in self.rubric.weighted()):
            logger.warning("{} has no reward function with a weight: all its rewards are 0", type(self).__name__)


class MultiTurnEnv(Environment):
    """A conversation: `env_response` answers the model until a stop condition holds."""

    def __init__(self, max_turns: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns

    @property
    def turn_limit(self) -> int:
        """Most turns of an episode; 0: no limit."""
        return max(0, self.max_turns)

    async def setup_state(self, state: State) -> State | None:
        """Prepare a rollout's state."""
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return the environment's messages after a reply."""
        raise NotImplementedError(f"{type(self).__name__} has no env_response")

    async def get_prompt_messages(self, state: State) -> Messages:
        """Return the whole conversation that the model is shown next."""
        if not state["trajectory"]:
            return chat_messages(state["prompt"])
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        answer = await maybe_await(self.env_response, messages, state)
        if isinstance(answer, tuple):  # releases before 0.1.7 return the state too
            answer, changed = answer
            if changed is not state:
                state.update(changed)
        return [*messages, *chat_messages(answer or [])]

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        """As many replies as there may be."""
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop
    async def has_final_env_response(self, state: State) -> bool:
        """Return whether the environment has said its last word."""
        return state.get("final_env_response") is not None

    async def is_completed(self, state: State, **kwargs: Any) -> bool:
        """Return whether a stop condition holds; its name is kept in the state."""
        for condition in marked(self, "stop"):
            if await maybe_await(condition, state):
                state["is_completed"], state["stop_condition"] = True, condition.__name__
                return True
        return False

    async def is_over(self, state: State) -> bool:
        """`is_completed` of any release: the first ones take the messages too."""
        if "messages" not in signature_of(self.is_completed).parameters:
            return bool(await maybe_await(self.is_completed, state))
        if not state["trajectory"]:
            return False
        last = state["trajectory"][-1]
        over = await maybe_await(self.is_completed, [*last["prompt"], *last["completion"]], state)
        return bool(over) or await self.max_turns_reached(state)


class SingleTurnEnv(MultiTurnEnv):
    """One question, one reply."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "max_turns": 1})


class ToolEnv(MultiTurnEnv):
    """The model may call Python functions, until it answers without a call."""

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        stop_errors: Iterable[type[Exception]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        self.tools: list[Callable[..., Any]] = []
        self.tool_map: dict[str, Callable[..., Any]] = {}
        self.oai_tools = list(self.oai_tools or [])
        self.error_formatter, self.stop_errors = error_formatter, tuple(stop_errors or ())
        for tool in tools or []:
            ToolEnv.add_tool(self, tool)

    def add_tool(self, tool: Callable[..., Any]) -> None:
        """One more function."""
        self._add(tool, tool_declaration(tool))

    def _add(self, tool: Callable[..., Any], declaration: dict[str, Any]) -> None:
        self.tools.append(tool)
        self.tool_map[declaration["function"]["name"]] = tool
        assert self.oai_tools is not None
        self.oai_tools.append(declaration)

    def remove_tool(self, tool: Callable[..., Any]) -> None:
        """One function less."""
        name = tool_declaration(tool)["function"]["name"]
        self.tools.remove(tool)
        self.tool_map.pop(name)
        self.oai_tools = [entry for entry in self.oai_tools or [] if entry["function"]["name"] != name]

    @stop
    async def no_tools_called(self, state: State) -> bool:
        """Return the last reply calls nothing."""
        return bool(state["trajectory"]) and not state["trajectory"][-1]["completion"][-1].get("tool_calls")

    async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any) -> Any:
        """One call's result, or what went wrong, as a message. Raises Exception: one of `stop_errors`."""
        try:
            content = str(await maybe_await(self.tool_map[tool_name], **tool_args))
        except Exception as error:  # the model is told, whatever it is
            if isinstance(error, self.stop_errors):
                raise
            unknown = tool_name not in self.tool_map
            content = f"there is no tool {tool_name!r}" if unknown else self.error_formatter(error)
        return ChatMessage(role="tool", content=whole_characters(content), tool_call_id=tool_call_id)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return the results of the last reply's calls."""
        return [await self._result_of(call, messages, state) for call in messages[-1].get("tool_calls") or []]

    async def _result_of(self, call: dict[str, Any], messages: Messages, state: State) -> Any:
        name, told = call["function"]["name"], {"role": "tool", "tool_call_id": call["id"]}
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("the arguments must be a JSON object")
        except (RecursionError, ValueError) as error:
            if isinstance(error, self.stop_errors):
                raise
            return ChatMessage(told, content=self.error_formatter(error))
        arguments = self.update_tool_args(name, arguments, messages, state)
        try:
            return await maybe_await(self.call_tool, name, arguments, call["id"])
        except Exception as error:  # of a package's own `call_tool`; the model is told, as of a tool's
            if isinstance(error, self.stop_errors):
                raise
            return ChatMessage(told, content=whole_characters(self.error_formatter(error)))

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of a call as the function gets them."""
        return tool_args


class StatefulToolEnv(ToolEnv):
    """Tools with arguments that the model does not see: `update_tool_args` fills them in."""

    def add_tool(self, tool: Callable[..., Any], args_to_skip: Sequence[str] = ()) -> None:
        """One more function, without the arguments that the model is not shown."""
        self._add(tool, tool_declaration(tool, args_to_skip))


class EnvGroup(Environment):
    """Several environments as one; a row's `task` says whose it is."""

    def __init__(self, envs: Sequence[Environment], env_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        if not envs:
            raise ValueError("EnvGroup needs at least one environment")
        names = list(env_names or [f"env_{number}" for number in range(len(envs))])
        if len(names) != len(envs):
            raise ValueError(f"EnvGroup has {len(envs)} environments and {len(names)} names")
        if len(set(names)) != len(names):
            raise ValueError(f"EnvGroup has two environments of one name ({', '.join(names)}): whose is a row?")
        if any(isinstance(env, EnvGroup) for env in envs):
            raise EnvError("an EnvGroup holds another one: name all the environments in one group")
        self.envs, self.env_names = list(envs), names
        self.env_map = dict(zip(names, self.envs, strict=True))
        has = {split: any(env.has(split) for env in envs) for split in ("train", "eval")}
        rows = {split: partial(self._rows, split) if has[split] else None for split in has}
        super().__init__(dataset=rows["train"], eval_dataset=rows["eval"], **kwargs)

    def _rows(self, split: str) -> list[dict[str, Any]]:
        return [
            {**env.example(dict(row), number), "task": name}
            for name, env in self.env_map.items()
            if env.has(split)
            for number, row in enumerate(env._made(split))
        ]

    @property
    def turn_limit(self) -> int:
        """Largest limit of the environments; 0 where one has none."""
        limits = [env.turn_limit for env in self.envs]
        return max(limits) if all(limits) else 0

    def member(self, example: dict[str, Any]) -> Environment:
        """Return the environment to which a row of the joint data set belongs."""
        return self.env_map[example["task"]]

    def check(self) -> None:
        """Check every environment of the group, and the group: no row is played by a method of its own."""
        self.refuse_own_loop()
        for env in self.envs:
            env.check()


def _first(dataset: Any, n: int, seed: int | None) -> Any:
    if dataset is None:
        raise ValueError("there is no such dataset")
    if seed is not None and hasattr(dataset, "shuffle"):
        dataset = dataset.shuffle(seed=seed)
    if n <= 0:
        return dataset
    return dataset.select(range(min(n, len(dataset)))) if hasattr(dataset, "select") else dataset[:n]
