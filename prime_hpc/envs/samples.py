"""From a finished verifiers episode to training samples and a verdict, without ever re-tokenising.

Episodes and traces are read by attribute (verifiers 0.4 `Episode`, `Trace`, `Branch`, `MessageNode`), so nothing here
imports verifiers.

A trace is a graph of messages; each root-to-leaf path (branch) is one training sample: the exact tokens that the
engine saw, in order. A sampled message that several branches share is trained only in the first of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from prime_hpc.client.versions import VersionSpanError
from prime_hpc.config.secret import without_known
from prime_hpc.envs.conversations.plain import branch_conversation
from prime_hpc.envs.images import ImageError, decode_image, image_urls, in_words
from prime_hpc.envs.routing import RoutingError, RoutingOf, branch_routing
from prime_hpc.store.batch.images import ImageTable

VersionsOf = Callable[[Any], np.ndarray | None]
"""Policy versions (int32 [num sampled tokens]) of a sampled message node, None when the engine's answer is unknown."""

MOST_REWARD = float(np.finfo(np.float32).max)
"""A larger one is infinite in a batch, and the mean of some is nothing in a table of scores."""
TOOL, USER = 1, 2
ROLES = {"tool": TOOL, "user": USER}
"""Values of `Sample.roles`."""
NEVER_ASKED = "the others ended it before the policy's turn"
"""Reason of an episode that has a score, as one in which an opponent wins at once, and nothing to train on."""


class EpisodeState(StrEnum):
    """How an episode ended; every episode ends in exactly one of these."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on; all arrays have length L, the prompt included."""

    token_ids: np.ndarray = field(metadata={"dtype": np.int32})
    """int32 [L], what the engine saw and sampled."""
    loss_mask: np.ndarray = field(metadata={"dtype": np.bool_})
    """bool [L], true where this sample trains a sampled token."""
    logprobs: np.ndarray = field(metadata={"dtype": np.float32})
    """float32 [L], the engine's log-probability of each trained token, 0 elsewhere."""
    versions: np.ndarray = field(metadata={"dtype": np.int32})
    """int32 [L], the policy version that sampled each trained token, -1 elsewhere."""
    num_turns: int
    """Trained model calls in this sequence."""
    reward: float
    """Reward of the trace that this sequence belongs to."""
    truncated: bool = False
    """A limit (tokens, turns) cut the trace short."""
    agent: str = ""
    """The actor: the environment's name of the trace's agent."""
    trace: int = 0
    """Index of this sequence's trace among the episode's trained ones."""
    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of the reward: each function's score and weight, by name; the products add up to it."""
    roles: np.ndarray | None = field(default=None, metadata={"dtype": np.uint8})
    """uint8 [L], `TOOL` or `USER` where a message after the first reply said the token, 0 elsewhere."""

    images: np.ndarray | None = field(default=None, metadata={"dtype": np.int32})
    """int32 [L], number of the image that the token is a part of, 1 for the first of `image_data`, 0 for text; None:
    all of it is text."""
    image_data: tuple[bytes, ...] = ()
    """Encoded images, each once, byte for byte as the engine got them."""

    routed: np.ndarray | None = None
    """uint8 or uint16 [L, layers, k], the experts to which the engine sent each token: see `RankBatch.routed`; None
    where it does not record them."""

    teacher_ids: np.ndarray | None = None
    """int32 [L, k], the teacher's likeliest tokens where this sample trains: see `RankBatch.teacher_ids`. It is asked
    for them once the episode has ended, and again in another attempt."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [L, k], their log-probabilities."""
    teacher_gaps: np.ndarray | None = None
    """float32 [L], of a teacher with a tokenizer of its own: log p_teacher - log p_policy of the segment that the token
    is a part of (`orchestrator.cross_tokenizer`), NaN where it has no word."""
    conversation: Mapping[str, Any] = field(default_factory=dict)
    """The messages that the tokens stand for, where they are asked for: see `branch_conversation`."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask.sum())

    @property
    def min_version(self) -> int:
        """Oldest policy version that sampled a trained token."""
        return int(self.versions[self.loss_mask].min())


ARRAYS: dict[str, type[np.generic]] = {f.name: f.metadata["dtype"] for f in fields(Sample) if f.metadata}
"""Arrays of a `Sample` by name, each with its type: they travel between processes and to the next attempt.
A teacher's do not: where they are wanted it is asked again."""


@dataclass(frozen=True)
class EpisodeResult:
    """One episode's end: state, verdict, samples, scores."""

    state: EpisodeState
    usable: bool
    """True if it may train: completed, scored with finite numbers, and every sampled token accounted for."""
    reason: str = ""
    """One line: why it is not usable."""
    error_type: str = ""
    """Class of the failure, e.g. `TaskError` (the environment), `ProviderError` (the inference server)."""
    samples: list[Sample] = field(default_factory=list)
    """Empty unless usable."""
    versions: list[int] = field(default_factory=list)
    """Oldest and newest policy version of its sampled tokens, where nobody makes samples of them; else empty."""
    reward: float = 0.0
    """Mean over the trained traces (there is one in single-agent environments)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's finite metrics, each named reward as `reward/<name>`, and `num_turns`; where several agents
    train, also of each, with its `reward`, behind its name and a slash."""
    truncated: bool = False
    """A limit cut it short; it still counts as completed and is scored."""
    prompt_text: str = ""
    """For logs: the messages before the first reply."""
    completion_text: str = ""
    """For logs: everything from the first reply on."""
    duration_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of these, by what they were for: `engine` (waiting for the model's replies), `reward` (scoring), `environment`
    (all else: its own code, tools, sandboxes); empty where nothing ended by itself."""
    num_prompt_tokens: int = 0
    """Sum over the model calls of what the server counted."""
    num_completion_tokens: int = 0
    """Likewise."""
    conversations: list[dict[str, Any]] = field(default_factory=list)
    """Kept where they are asked for: see `conversations_of`."""


@dataclass(frozen=True)
class Problem:
    """Why an episode must not train."""

    state: EpisodeState
    reason: str
    error_type: str = ""


UNANSWERED = "Unanswered"
"""Class of a timeout before an API's first reply: the model may be slow, or the API hang."""
UNSCORED = "Unscored"
"""Class of a timeout while the reward was computed: the model had played, and a judge hangs, say."""
EMPTY = Problem(EpisodeState.FAILED, "no sampled tokens", "EmptyEpisode")


def find_problem(episode: Any) -> Problem | None:
    """Return the first reason why a finished verifiers episode must not train; None when it may.

    `episode.ok` is not enough: deadlines, unscored rewards and generations that the engine aborted all leave it true.
    Errors of earlier, retried attempts stay listed on a good episode and do not count.
    """
    timed_out = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if timed_out:
        stops = [trace.stop_condition for trace in episode.traces if trace.is_timeout]
        stop = stops[0] if stops else "episode_timeout"
        kind = UNSCORED if stop == "scoring_timeout" else "Timeout"
        return Problem(EpisodeState.TIMEOUT, f"deadline reached ({stop})", kind)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if not errors:
            return Problem(EpisodeState.FAILED, "failed without an error record", "Unknown")
        last = errors[-1]
        return Problem(EpisodeState.FAILED, f"{last.type}: {one_line(last.message)}", last.type)
    if not episode.traces:
        return Problem(EpisodeState.FAILED, "the environment ran no agent", "EnvError")
    for trace in episode.traces:
        problem = _find_trace_problem(trace)
        if problem is not None:
            return problem
    if not any(trace.rewards for trace in episode.traces if trace.agent.trainable):
        return Problem(
            EpisodeState.FAILED, "the environment gave no reward (a @reward method must not be named `score`)"
        )
    return None


def is_being_scored(traces: Sequence[Any]) -> bool:
    """Return whether an episode that has not ended has been played, by all its agents, and waits for a reward alone."""
    spans = [trace.timing for trace in traces]
    return all(s.agent.end for s in spans) and any(s.scoring.start and not s.scoring.end for s in spans)


def _find_trace_problem(trace: Any) -> Problem | None:
    """`find_problem` for one trace of an episode that reports success."""
    if not trace.ok:
        last = trace.errors[-1] if trace.errors else None
        text = f"{last.type}: {one_line(last.message)}" if last else "an agent's run failed without an error record"
        return Problem(EpisodeState.FAILED, text, last.type if last else "Unknown")
    for name, reward in trace.rewards.items():
        if reward is None:
            return Problem(EpisodeState.FAILED, f"reward {name!r} was not computed", "TaskError")
        if not math.isfinite(reward.value):
            return Problem(EpisodeState.FAILED, f"reward {name!r} is {reward.value}", "TaskError")
    if not abs(trace.reward) <= MOST_REWARD:  # NaN is not, either
        return Problem(EpisodeState.FAILED, f"the rewards add up to {trace.reward}", "TaskError")
    for call in trace.calls:
        if call.error is None and call.finish_reason is None:
            return Problem(EpisodeState.FAILED, "the engine aborted a generation", "AbortedGeneration")
    return None


def trace_samples(
    trace: Any,
    versions_of: VersionsOf,
    number: int = 0,
    routing_of: RoutingOf | None = None,
    with_messages: bool = False,
) -> list[Sample]:
    """Training samples of one trace, one per branch that has something to train.

    Args:
        trace: a finished verifiers trace with tokens (any renderer, any number of branches).
        routing_of: recorded experts of a sampled node; None: nobody records them.
        with_messages: each sample brings its conversation.

    Raises:
        VersionSpanError: a sampled node's versions are unknown or of the wrong number.
        RoutingError: its recorded experts are of other tokens.
        ImageError: its tokens do not stand for its images.
    """
    if not trace.agent.trainable:
        return []
    trained: set[int] = set()
    said: set[int] = set()
    samples: list[Sample] = []
    for branch in trace.branches:
        if not branch.trainable:  # a rejected compaction attempt must not claim the nodes it shares
            continue
        first_time = [node.sampled and any(node.mask) and id(node) not in trained for node in branch.nodes]
        if not any(first_time):
            continue
        trained.update(id(node) for node, first in zip(branch.nodes, first_time, strict=True) if first)
        sample = _branch_sample(branch.nodes, first_time, trace, versions_of, number, said)
        sample = _with_images(sample, branch.nodes, trace.mm_token_type_id_map)
        routed = None if routing_of is None else branch_routing(branch.nodes, routing_of)
        sample = sample if routed is None else replace(sample, routed=routed)
        talk = branch_conversation(branch.nodes, trace.tools) if with_messages else {}
        samples.append(replace(sample, conversation=talk) if talk else sample)
    return samples


def _branch_sample(
    nodes: Sequence[Any], trains: Sequence[bool], trace: Any, versions_of: VersionsOf, number: int, said: set[int]
) -> Sample:
    """Concatenate a branch's nodes; only nodes marked in `trains` keep mask, log-probabilities and versions."""
    lengths = [len(node.token_ids) for node in nodes]
    total = sum(lengths)
    token_ids = np.fromiter((t for node in nodes for t in node.token_ids), dtype=np.int32, count=total)
    loss_mask = np.zeros(total, dtype=bool)
    logprobs = np.zeros(total, dtype=np.float32)
    versions = np.full(total, -1, dtype=np.int32)
    roles = np.zeros(total, dtype=np.uint8)
    offset, replied = 0, False
    for node, length, train in zip(nodes, lengths, trains, strict=True):
        if train:
            positions = offset + np.flatnonzero(np.asarray(node.mask, dtype=bool))
            node_versions = versions_of(node)
            if node_versions is None:
                raise VersionSpanError("the engine did not say which policy version sampled a reply")
            if not len(positions) == len(node.logprobs) == len(node_versions):
                raise VersionSpanError(
                    f"a reply has {len(positions)} sampled tokens, {len(node.logprobs)} log-probabilities and "
                    f"{len(node_versions)} policy versions"
                )
            loss_mask[positions] = True
            logprobs[positions] = node.logprobs
            versions[positions] = node_versions
        if replied and not node.sampled and id(node) not in said:
            said.add(id(node))
            roles[offset : offset + length] = ROLES.get(node.message.role, 0)
        replied = replied or node.sampled
        offset += length
    return Sample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        num_turns=sum(trains),
        reward=float(trace.reward),
        truncated=bool(trace.is_truncated),
        agent=trace.agent.name,
        trace=number,
        rewards={name: [reward.score, reward.weight] for name, reward in trace.rewards.items()},
        roles=roles,
    )


def _with_images(sample: Sample, nodes: Sequence[Any], places: Mapping[int, int]) -> Sample:
    """Return a branch's sample with what its messages show: each image stands for one run of place tokens, in order.
    `places`: tokens that stand for images (1) or videos.
    Raises ImageError: a message has another number of images than of runs."""
    if not places:
        return sample
    kinds = [token for token, kind in places.items() if kind == 1]
    table = ImageTable()
    images = np.zeros(sample.num_tokens, np.int32)
    offset = 0
    for node in nodes:
        end = offset + len(node.token_ids)
        urls = image_urls([node.message]) if node.token_ids else []  # what no turn followed has no tokens
        is_place = np.isin(sample.token_ids[offset:end], kinds) & ~np.asarray(node.mask, bool)
        starts = is_place & ~np.append(False, is_place[:-1])
        if int(starts.sum()) != len(urls):
            raise ImageError(
                f"a {node.message.role} message has {len(urls)} images, and its tokens stand for {int(starts.sum())}"
            )
        if urls:
            numbers = np.array([table.number(decode_image(url)) for url in urls], np.int32)
            images[offset:end] = np.where(is_place, numbers[np.maximum(np.cumsum(starts) - 1, 0)], 0)
        offset = end
    found = table.images()
    return replace(sample, images=images, image_data=found) if found else sample


def episode_result(
    episode: Any,
    versions_of: VersionsOf | None,
    duration_s: float,
    routing_of: RoutingOf | None = None,
    versions: Sequence[int] | None = None,
    with_messages: bool = False,
) -> EpisodeResult:
    """Judge a finished episode and turn it into samples. Never raises for a bad episode: that is what a result says.

    Args:
        versions_of: policy versions of a sampled node; None: nobody trains, or an API replied, which names no tokens:
            there are no samples, and nothing is usable for training.
        routing_of: recorded experts of a sampled node; None: nobody records them.
        versions: oldest and newest of its sampled tokens, empty where it has none; None: they are in the samples, or
            an API replied.
        with_messages: each sample brings its conversation.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    problem = find_problem(episode)
    samples: list[Sample] = []
    asked = any(trace.num_turns for trace in traces) or not any(trace.num_turns for trace in episode.traces)
    if problem is None and versions_of is not None and asked:
        try:
            for number, trace in enumerate(traces):
                samples += trace_samples(trace, versions_of, number, routing_of, with_messages)
        except (VersionSpanError, RoutingError, ImageError) as error:
            problem = Problem(EpisodeState.FAILED, one_line(str(error)), type(error).__name__)
        else:
            problem = _find_sample_problem(samples)
    elif problem is None and versions is not None and not versions and asked:
        problem = EMPTY
    rewards = [float(trace.reward) for trace in traces]
    prompt_text, completion_text = _texts(traces[0]) if traces else ("", "")
    usages = [usage for trace in traces if (usage := trace.usage) is not None]
    return EpisodeResult(
        state=problem.state if problem else EpisodeState.COMPLETED,
        usable=problem is None and versions_of is not None and asked,
        reason=problem.reason if problem else "" if asked else NEVER_ASKED,
        error_type=problem.error_type if problem else "",
        samples=[] if problem else samples,
        versions=list(versions or ()),
        reward=sum(rewards) / len(rewards) if rewards and all(map(math.isfinite, rewards)) else 0.0,
        metrics=_metrics(traces),
        truncated=any(trace.is_truncated for trace in traces),
        prompt_text=prompt_text,
        completion_text=completion_text,
        duration_s=duration_s,
        seconds=_seconds(episode.traces, duration_s),
        num_prompt_tokens=sum(usage.input_tokens for usage in usages),
        num_completion_tokens=sum(usage.completion_tokens for usage in usages),
    )


def _seconds(traces: Sequence[Any], duration_s: float) -> dict[str, float]:
    """Split an episode's time; agents that play side by side wait for the engine together, for no longer than it is."""
    engine = min(duration_s, sum(trace.timing.agent.model.duration for trace in traces))
    reward = min(duration_s - engine, sum(trace.timing.scoring.duration for trace in traces))
    return {"engine": engine, "environment": duration_s - engine - reward, "reward": reward}


def _find_sample_problem(samples: Sequence[Sample]) -> Problem | None:
    """Find what makes samples untrainable although the episode itself went well."""
    if not samples:
        return EMPTY
    if not all(np.isfinite(sample.logprobs).all() for sample in samples):
        return Problem(EpisodeState.FAILED, "a log-probability is not finite", "MalformedResponse")
    return None


def _metrics(traces: Sequence[Any]) -> dict[str, float]:
    """Finite metrics and named rewards, averaged over the traces that have them; where several agents train, those of
    each by itself too, with its reward, as `<agent>/<name>`."""
    has_agents = len({trace.agent.name for trace in traces}) > 1
    values: dict[str, list[float]] = {}
    for trace in traces:
        named = {f"reward/{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
        found = {**trace.metrics, **named, "num_turns": trace.num_turns}
        if has_agents:
            found |= {f"{trace.agent.name}/{name}": value for name, value in (found | {"reward": trace.reward}).items()}
        for name, value in found.items():
            if value is not None and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: sum(items) / len(items) for name, items in values.items()}


def _texts(trace: Any) -> tuple[str, str]:
    """Prompt and completion of a trace's last branch, as text for logs."""
    nodes = trace.nodes if _is_chain(trace.nodes) else trace.branches[-1].nodes
    first = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
    prompt = "\n".join(f"[{node.message.role}] {_content(node.message)}" for node in nodes[:first])
    replies = nodes[first:]
    if len(replies) == 1:
        return prompt, _content(replies[0].message)
    return prompt, "\n".join(f"[{node.message.role}] {_content(node.message)}" for node in replies)


def _is_chain(nodes: Sequence[Any]) -> bool:
    """Return whether a trace never branched: its nodes are its one branch's, which need not be put together then."""
    return all(node.parent == (number - 1 if number else None) for number, node in enumerate(nodes))


def _content(message: Any) -> str:
    """Return a message's text; tool calls as `name(arguments)`, images in short words."""
    content = message.content
    tool_calls = message.tool_calls if message.role == "assistant" else None
    if not tool_calls and isinstance(content, str):
        return content
    if isinstance(content, list):
        shown = (part.text if part.type == "text" else in_words(part.image_url.url) for part in content)
        content = " ".join(filter(None, shown))
    calls = [f"{call.name}({call.arguments})" for call in tool_calls or []]
    return " ".join([*([content] if content else []), *calls])


def one_line(text: str) -> str:
    """Return a reason for logs: without the config's secrets and half surrogate pairs, which no file of UTF-8 can hold,
    white space folded to single blanks, cut to 400 characters."""
    folded = " ".join(without_known(text).split()).encode(errors="replace").decode()
    return folded if len(folded) <= 400 else folded[:399] + "…"
