"""A package with `load_environment` as a verifiers v1 taskset, and the harness that plays its rollouts.

`prime_hpc.envs.env_config` names the package in `LegacyConfig.module`. The harness runs the older interface's rollout:
state, the conversation so far, a reply, the environment's answer, until a stop condition holds. The task scores the
finished state with the rubric: each function of a weight is a reward, of weight 0 a metric.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, ClassVar, Literal

import verifiers.v1 as vf
from verifiers.v1.dialects import parse_message
from verifiers.v1.harness import HarnessSession, ProgramResult
from verifiers.v1.types import Message, Request

from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.harness import DONE, InProcessHarness
from prime_hpc.envs.interception import TurnRefused, interception_of
from prime_hpc.envs.legacy.environments import Environment, MultiTurnEnv
from prime_hpc.envs.legacy.loading import hold, key_for, let_go, made
from prime_hpc.envs.legacy.messages import State, assistant_message, chat_messages, marked, maybe_await, v1_tool, wire
from prime_hpc.envs.legacy.rubrics import MathRubric, clean_up, name_of
from prime_hpc.envs.math_answers import open_comparison

__all__ = ["LegacyHarness", "LegacyTaskset"]

MODULE = __name__

_STATES: dict[str, State] = {}
"""State of each rollout between its last reply and its score, by trace id."""


class LegacyData(vf.TaskData):
    """One row of the environment's data."""

    no_content: ClassVar[frozenset[str]] = frozenset({"environment"})  # a row is the same whatever the arguments

    environment: str
    """Key of the environment in `loading`."""
    example: dict[str, Any]
    """The rollout's input, as `Environment.example` makes it."""


class LegacyTask(vf.Task[LegacyData]):
    """Scores with the environment's rubric."""

    @vf.reward
    async def rubric(self, trace: vf.Trace) -> dict[str, float]:
        """Record every function's value: rewards with their weights, metrics without.
        Raises RuntimeError: the rollout never began."""
        state = _STATES.pop(trace.id, None)
        if state is None:
            raise RuntimeError("the rollout has no state to score")
        env = made(self.data.environment).member(self.data.example)
        rewards: dict[str, float] = {}
        try:
            values = [
                (func, weight, await rubric.value(func, state, weight))
                for rubric, func, weight in env.rubric.weighted()
            ]
        finally:
            await clean_up(env.rubric, state)
        for func, weight, value in values:
            name = _free(name_of(func), {**rewards, **trace.metrics})
            if weight:
                trace.record_reward(name, value, weight)
                rewards[name] = value
            else:
                trace.record_metric(name, value)
        if not rewards:
            trace.record_reward("none", 0.0, 1.0)
        trace.record_metric(_free("reward_errors", {**rewards, **trace.metrics}), float(state.get("reward_errors", 0)))
        return {}


def _free(name: str, taken: Iterable[str]) -> str:
    """Return a name that is not taken: of two functions of one name the second is counted apart."""
    known, number, found = set(taken), 2, name
    while found in known:
        found, number = f"{name}_{number}", number + 1
    return found


class LegacyConfig(vf.TasksetConfig):
    """Made by `prime_hpc.envs.env_config`."""

    module: str = ""
    """Module with `load_environment`."""
    environment: str = ""
    """Key of what it made."""
    split: Literal["train", "eval"] = "train"
    """One of its data sets."""
    played_as: Literal["train", "eval"] = "train"
    """The split whose episodes are played, whatever data set they are of: see `key_for`."""


class LegacyTaskset(vf.Taskset[LegacyTask, LegacyConfig]):
    """The environment's rows."""

    @property
    def _key(self) -> str:
        return key_for(self.config.played_as, self.config.environment)

    async def open_scorer(self) -> None:
        """Start what compares answers, for an environment whose rubric does.
        Raises EnvError: math-verify cannot be imported."""
        env = made(self._key)
        rubrics = [member.rubric for member in (env, *getattr(env, "envs", ()))]
        if any(isinstance(part, MathRubric) for rubric in rubrics for part, _, _ in rubric.weighted()):
            await open_comparison()

    def hold(self) -> None:
        """Say that the environment is played until `let_go`."""
        hold(self._key)

    async def let_go(self) -> None:
        """Have what the environment holds freed, once nobody plays it."""
        await let_go(self._key)

    def load(self) -> Iterable[LegacyTask]:
        """One task a row. Raises EnvError: a row has no prompt, or holds what is no JSON; a reward function takes what
        the rows do not have."""
        config = self.config
        env = made(self._key)
        rows = env.dataset if config.split == "train" else env.eval_dataset
        seen: dict[int, tuple[Environment, set[str]]] = {}
        for number, row in enumerate(rows):
            try:
                example = _example(env, row, number)
            except EnvError as error:
                raise EnvError(f"environment {config.module!r}: {error}") from error
            member = env.member(example)
            seen.setdefault(id(member), (member, set()))[1].update(example)
            prompt = [parse_message(message) for message in example["prompt"]]
            data = LegacyData(prompt=prompt, environment=self._key, example=example)
            _check_json(data, config.module, number)
            yield LegacyTask(data, config.task)
        for member, columns in seen.values():  # at the end: rows that are no table may have columns of their own
            try:
                member.rubric.check_arguments(columns)
            except EnvError as error:
                raise EnvError(f"environment {config.module!r}: {error}") from error


def _example(env: Environment, row: Any, number: int) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise EnvError(
            f"row {number} of its dataset is no mapping of columns, but {row!r:.60} (of a DatasetDict take one split)"
        )
    return env.example(dict(row), number)


def _check_json(data: LegacyData, module: str, number: int) -> None:
    try:
        data.model_dump_json()
    except ValueError as error:
        kinds = ", ".join(f"{key}: {type(value).__name__}" for key, value in data.example.items())
        what = f"row {number} of its dataset holds what cannot be written as JSON ({kinds})"
        raise EnvError(f"environment {module!r}: {what}") from error


class LegacyHarnessConfig(vf.HarnessConfig):
    """verifiers' own knobs."""

    id: str = MODULE.replace(".", "_")


class LegacyHarness(InProcessHarness, vf.Harness[LegacyHarnessConfig]):
    """Plays the rollout of the task's environment."""

    async def session(self, *args: Any, **kwargs: Any) -> "LegacySession":
        """One rollout's handle."""
        return LegacySession(self, *args, **kwargs)

    async def cleanup(self, trace: Any, runtime: Any) -> None:
        """Forget the rollout, scored or not."""
        _STATES.pop(trace.id, None)


class LegacySession(HarnessSession):
    """One rollout of the older interface."""

    async def _run(self, messages: list[Message] | None) -> ProgramResult:
        """Return the whole conversation: this interface plays the user itself."""
        assert messages is None, "an environment of the older interface speaks for the user by itself"
        data: Any = self.data
        env = made(data.environment).member(data.example)
        assert isinstance(env, MultiTurnEnv), "`loading` refuses others"
        state = self._begin(env, data)
        _STATES[self.trace.id] = state
        try:
            changed = await maybe_await(env.setup_state, state)
            if changed is not None and changed is not state:
                state.update(changed)
            while not await env.is_over(state):
                await self._turn(env, state)
        except TurnRefused:
            state["is_completed"] = True  # the trace's stop condition says why
        finally:
            state["completion"] = _completion(state)
            for handler in marked(env, "cleanup"):
                await maybe_await(handler, state)
        return DONE

    def _begin(self, env: MultiTurnEnv, data: Any) -> State:
        """Return a fresh state: the example, and what the environment's methods may ask for."""
        example = deepcopy(data.example)  # a package may write into it, the row's next rollout begins with the row
        example["prompt"] = chat_messages(example["prompt"])
        example.setdefault("example_id", data.idx)
        own = {  # goes before columns of these names: reward functions find those in `input`
            "input": example,
            "trajectory": [],
            "completion": [],
            "responses": [],
            "turn": 0,
            "is_completed": False,
            "stop_condition": None,
            "model": self.ctx.model,
            "sampling_args": env.sampling_args,
            "oai_tools": (tools := env.oai_tools or []),
            "tool_defs": tools,
            "error": None,
            "timing": {},
            "reward": None,
            "metrics": {},
        }
        return State(example | own)

    async def _turn(self, env: MultiTurnEnv, state: State) -> None:
        """Ask the environment, then the model."""
        prompt = chat_messages(await maybe_await(env.get_prompt_messages, state))
        if state.get("final_env_response") is not None:
            return
        known = env.oai_tools or []
        named = state["oai_tools"] if state["tool_defs"] == known else state["tool_defs"]  # whichever it has changed
        tools = [v1_tool(entry) for entry in named or []] or None
        request = Request.model_construct(messages=[parse_message(wire(m)) for m in prompt], tools=tools)
        response = await interception_of(self.endpoint).complete(self.secret, request)
        reply = assistant_message(response.message)
        step = {"prompt": prompt, "completion": [reply], "response": response, "reward": None, "extras": {}}
        state["trajectory"].append({**step, "is_truncated": response.finish_reason == "length"})
        state["responses"].append(response)
        state["turn"] += 1


def _completion(state: State) -> list[Any]:
    """Everything after the prompt, the environment's last word included."""
    if not state["trajectory"]:
        return []
    last = state["trajectory"][-1]
    whole = [*last["prompt"], *last["completion"]]
    final = state.get("final_env_response")
    return [*whole[len(state["prompt"]) :], *(chat_messages(final) if final is not None else [])]
