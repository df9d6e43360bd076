"""Running episodes: the environments' serving resources and the policy clients, on one event loop.

Made by `prime_hpc.envs.pool` inside its worker's loop. All coroutines here belong to that loop.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import verifiers.v1 as vf
from verifiers.v1.agent import Agent
from verifiers.v1.configs.agent import agent_config_fields, resolve_agent
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import harness_class, load_environment

from prime_hpc.config.sections.sampling import of_distribution
from prime_hpc.envs.chat_client import ChatClient
from prime_hpc.envs.conversations.plain import conversations_of
from prime_hpc.envs.env_config import harness_is_in_process
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.interception import PolicyInterception
from prime_hpc.envs.lazy_runtime import LazyBox
from prime_hpc.envs.math_answers import begin_boxed, speaks_of
from prime_hpc.envs.model_client import PolicyClient
from prime_hpc.envs.patches.lookups import patch_verifiers
from prime_hpc.envs.patches.math_deadlines import use_on_threads
from prime_hpc.envs.pool_settings import PoolSettings
from prime_hpc.envs.rendering import PromptRenderer
from prime_hpc.envs.samples import UNANSWERED, UNSCORED, EpisodeResult, EpisodeState, episode_result, is_being_scored
from prime_hpc.envs.sandbox.sandbox_runtime import open_pool, sandbox_box
from prime_hpc.envs.sandbox.warm_pool import WarmPool
from prime_hpc.envs.task_sources import EnvSource


@dataclass
class _Solo:
    """The one trace of a single-agent run, in an episode's shape."""

    traces: list[Any]
    errors: list[Any] = field(default_factory=list)
    is_timeout: bool = False

    @property
    def ok(self) -> bool:
        return bool(self.traces[0].ok)


class _PlainAgent(Agent):
    """An agent without retries: verifiers' way to count them costs as much as a look at the reply."""

    async def run_once(self, task: Any, box: Any, tools: Mapping[str, Any], on_trace: Any) -> Any:
        """`Agent.run`, of which nothing but the first attempt is left."""
        return await self._run_once(task, box, tools, on_trace, False)


@runtime_checkable
class OpensScorer(Protocol):
    """A taskset whose answers are judged by something that has to be started, and may be broken."""

    async def open_scorer(self) -> None:
        """Start it. Raises EnvError."""


class SourceRunner:
    """One environment, ready to run."""

    def __init__(
        self,
        source: EnvSource,
        sampling: vf.SamplingConfig,
        settings: PoolSettings,
        policies: Mapping[str, PolicyClient | ChatClient],
    ) -> None:
        self.source = source
        self.settings = settings
        self.policies = policies
        # A fresh environment each time: the resources that it holds belong to this event loop.
        self.env = load_environment(source.env_config)
        samplings = sampling, sampling.model_copy(update={"temperature": 0.0})
        self.contexts, self.greedy_contexts = (
            [
                vf.ModelContext(
                    model=settings.model_name,
                    client=vf.TrainClientConfig(base_url=url, api_key_var=settings.api_key_var),
                    sampling=own,
                )
                for url in settings.urls
            ]
            for own in samplings
        )
        self._distribution, self._greedy_distribution = (of_distribution(own.model_dump()) for own in samplings)
        self._stack = AsyncExitStack()
        self._shared: dict[str, Any] = {}
        self._agents: list[_PlainAgent] = []
        self._greedy_agents: list[_PlainAgent] = []
        self._sandboxes = ""
        """Name of the open pool; empty: none."""

    async def open(self) -> None:
        """Start tool servers and the interception, as `Env.serving()` does, but with our interception in its place."""
        env, stack = self.env, self._stack
        if isinstance(env.taskset, OpensScorer):
            await env.taskset.open_scorer()
        if speaks_of(env.taskset, "verify_boxed_math_answer"):
            begin_boxed()
        if self.source.sandbox is not None:
            (self._sandboxes,) = {seat.runtime.pool for seat in agent_config_fields(self.source.env_config).values()}
            await stack.enter_async_context(open_pool(self._sandboxes, WarmPool(self.source.sandbox)))
        harnesses = [harness_class(config.id) for config in self.source.env_config.agent_harnesses().values()]
        self._shared = await stack.enter_async_context(env.shared_tools())
        tools = [*self._shared, *type(env.taskset).task_type().toolsets(env.taskset.config.task)]
        interception = PolicyInterception(
            self.policies,
            serve_http=bool(tools) or not all(map(harness_is_in_process, harnesses)),
            state_service_secrets=tuple(s.state_secret for s in self._shared.values() if s.state_secret),
        )
        await stack.enter_async_context(interception)
        env._shared_tools, env._interception = self._shared, interception  # what serving() would have set
        stack.push_async_callback(env.stop)
        await env.start()
        if self._is_plain():
            (seat,) = agent_config_fields(self.source.env_config).values()
            self._agents, self._greedy_agents = (
                [self._agent(seat, context, interception) for context in contexts]
                for contexts in (self.contexts, self.greedy_contexts)
            )

    async def close(self) -> None:
        """Free what `open` took."""
        await self._stack.aclose()

    async def run(self, number: int, url_index: int, traces: list[vf.Trace], *, greedy: bool = False) -> EpisodeResult:
        """Play one episode of a task, by its number in the whole split, and turn it into a result. Deadlines are the
        caller's, who sees its traces in `traces`."""
        agents, contexts = (self._greedy_agents, self.greedy_contexts) if greedy else (self._agents, self.contexts)
        started = time.monotonic()
        task = self.source.task_number(number)  # here: an endless taskset's code makes it, and may block
        policy = self.policies[self.settings.urls[url_index]]
        try:
            if agents:
                # One seat and a box that costs nothing: skip what `Env.run_episode` would build for every episode.
                async with sandbox_box(self._sandboxes) if self._sandboxes else LazyBox() as box:
                    trace = await agents[url_index].run_once(task, box, self._shared, traces.append)
                episode: Any = _Solo([trace])
            else:
                (slot,) = self.env.slots(task, 1)
                episode = await self.env.run_slot(slot, contexts[url_index], on_trace=traces.append)
        finally:
            turns = [turn for trace in traces for turn in policy.take_turns(trace.id)]
        duration_s = time.monotonic() - started
        if self.settings.keep_samples and self.settings.chat is None:
            if self.settings.is_policy:
                self._refuse_other_sampling(episode, greedy)
            versions = {id(turn.logprobs): turn.versions for turn in turns}
            routings = {id(turn.logprobs): turn.routed for turn in turns if turn.routed is not None}
            routing_of = (lambda node: routings.get(id(node.logprobs))) if routings else None
            result = episode_result(
                episode,
                lambda node: versions.get(id(node.logprobs)),
                duration_s,
                routing_of,
                with_messages=self.settings.teacher_reads,
            )
        else:
            sampled = [turn.versions for turn in turns if len(turn.versions)]
            lowest, highest = np.minimum.reduce, np.maximum.reduce  # half of what `min()` and `max()` cost
            span = (int(min(map(lowest, sampled))), int(max(map(highest, sampled)))) if sampled else ()
            result = episode_result(episode, None, duration_s, versions=span if self.settings.chat is None else None)
        if self.settings.keep_messages and result.state is EpisodeState.COMPLETED:
            return replace(result, conversations=conversations_of(episode))
        return result

    def _refuse_other_sampling(self, episode: Any, greedy: bool) -> None:
        """Raise EnvError where a seat that trains has drawn its tokens otherwise than the trainer computes, or not
        greedily: by a `sampling` of its own, which `env_args` or the environment itself may state."""
        asked, by = self._distribution, "the trainer computes"
        if greedy:
            asked, by = self._greedy_distribution, "a greedy rollout is drawn"
        for trace in episode.traces:
            own = of_distribution(trace.agent.config.sampling.model_dump())
            if trace.agent.trainable and own != asked:
                raise EnvError(
                    f"agent {trace.agent.name!r} has a sampling of its own: its tokens are drawn with {own}, and {by} "
                    f"with {asked}. State it as the environment's `sampling`, for all its agents that train, and leave "
                    "it out of env_args"
                )

    def _is_plain(self) -> bool:
        """Return whether an episode is nothing but one agent's run, here: no own Env, no retries, no deadlines of its
        own."""
        config = self.source.env_config
        if type(self.env) is not SingleAgentEnv or {"retries", "timeout"} & set(self.source.config.env_args):
            return False
        (seat,) = agent_config_fields(config).values()
        (harness,) = config.agent_harnesses().values()
        return (
            isinstance(seat.runtime, SubprocessConfig)
            and not seat.retries.max_retries
            and not seat.retries.rules
            and harness_is_in_process(harness_class(harness.id))
        )

    def _agent(self, seat: Any, context: Any, interception: PolicyInterception) -> _PlainAgent:
        """Return the reusable agent of a plain environment for one server."""
        (harness,) = self.source.env_config.agent_harnesses().values()
        resolved = resolve_agent(
            seat, model=context.model, client=context.client, sampling=context.sampling, harness=harness
        )
        return _PlainAgent(resolved, interception=interception)


class EpisodeRunner:
    """Environments of a pool on the running event loop."""

    def __init__(
        self, sources: Sequence[EnvSource], settings: PoolSettings, renderer: PromptRenderer | None, own: Sequence[int]
    ) -> None:
        """Make the runners of the environments with the indices `own`.

        `renderer` may be missing where an API is asked, which does that itself.
        """
        patch_verifiers()
        use_on_threads()

        key = settings.api_key or os.environ.get(settings.api_key_var)

        def client(url: str) -> PolicyClient | ChatClient:
            if settings.chat is not None:
                return ChatClient(url, key, settings.chat, settings.patience_s)
            assert renderer is not None
            reach = (settings.max_model_len, settings.patience_s)
            return PolicyClient(url, key, renderer, *reach, with_logprobs=settings.keep_samples)

        self._policies = {url: client(url) for url in settings.urls}
        self._sources = {
            i: SourceRunner(sources[i], vf.SamplingConfig(**settings.samplings[i]), settings, self._policies)
            for i in own
        }
        self._opened: list[SourceRunner] = []

    def move_server(self, index: int, url: str) -> None:
        """Server `index` answers at `url` now; contexts and traces keep its first name."""
        list(self._policies.values())[index].move(url)

    async def open(self) -> None:
        """Start every environment. Raises EnvError."""
        for source in self._sources.values():
            self._opened.append(source)
            try:
                await source.open()
            except EnvError:
                raise
            except (Exception, SystemExit) as error:  # other people's code
                reason = f"{type(error).__name__}: {error}"
                raise EnvError(f"environment {self.opening!r} cannot be started: {reason}") from error

    @property
    def opening(self) -> str:
        """Name of the environment that was begun to start last."""
        return self._opened[-1].source.name if self._opened else ""

    async def run(
        self, source_index: int, number: int, url_index: int, traces: list[vf.Trace], *, greedy: bool = False
    ) -> EpisodeResult:
        """Play one episode; its traces are put into `traces` as they begin."""
        return await self._sources[source_index].run(number, url_index, traces, greedy=greedy)

    def overdue_in(self, url_index: int, traces: Sequence[vf.Trace]) -> tuple[str, str]:
        """Return the class of an overdue episode's timeout, and words of what it waits for. From any thread."""
        policy = list(self._policies.values())[url_index]
        if isinstance(policy, ChatClient) and policy.is_unanswered([trace.id for trace in traces]):
            return UNANSWERED, ", and no reply of the API"
        if is_being_scored(traces):
            return UNSCORED, ", while its reward was computed"
        return "Timeout", ""

    async def close(self) -> None:
        """Free everything, also after a failed `open`."""
        async with AsyncExitStack() as stack:
            for policy in self._policies.values():
                stack.push_async_callback(policy.close)
            for source in self._opened:
                stack.push_async_callback(source.close)
