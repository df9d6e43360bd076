"""The last word on a config: pydantic's errors in our own words, and what each entrypoint cannot do without."""

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prime_hpc.config.errors import ConfigError, Origin, Problem, nearest_path
from prime_hpc.config.experiment import NO_ROOM, Experiment
from prime_hpc.config.named_code import ALGORITHMS, NETWORK_TRANSPORTS
from prime_hpc.config.schema import all_paths, resolve, schema_path, type_text
from prime_hpc.config.secret import masked, names_secret, secrets_of
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.inference import ENGINE_GPU_IDS
from prime_hpc.config.sections.orchestrator import ClientConfig, check_labels
from prime_hpc.config.sections.teacher import TeacherConfig
from prime_hpc.config.sources.other_names import instead_of

_WRONG_TYPE = re.compile(r"(_type|_parsing|_from_float|_error|_size|too_short|too_long)$")
_MAX_SHOWN = 80


def validate(values: dict[str, Any], provenance: dict[str, Origin], problems: list[Problem]) -> Experiment | None:
    """Check a merged tree. Adds what is wrong to `problems`; returns None when there is anything."""
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        known = {problem.key for problem in problems}  # that it is empty is said already
        found = _explain_all(error.errors(include_url=False), provenance, bool(problems))
        problems += [problem for problem in found if problem.key is None or problem.key not in known]
        return None
    return None if problems else experiment


def _explain_all(details: list[ErrorDetails], provenance: dict[str, Origin], others: bool) -> list[Problem]:
    problems: dict[tuple[str, ...], Problem] = {}
    branches = set()
    for detail in details:
        is_unknown = detail["type"] == "extra_forbidden"
        path = tuple(str(part) for part in detail["loc"]) if is_unknown else schema_path(detail["loc"])
        # A relation between keys that does not hold may be the consequence of another problem: report that one.
        if path == () and (others or len(details) > 1):
            continue
        if path not in problems:  # one problem a key: each branch of a union reports its own
            problems[path] = _explain(detail, path, provenance)
            branches |= {path} if detail["type"] == "literal_error" else set()
    meant = {path[:length] for path in problems for length in range(len(path))}  # a list was, whose rows are wrong
    return [problem for path, problem in problems.items() if path not in branches & meant]


def _explain(detail: ErrorDetails, path: tuple[str, ...], provenance: dict[str, Origin]) -> Problem:
    kind, message = detail["type"], detail["msg"]
    if kind in ("value_error", "assertion_error"):
        message = message.split(", ", 1)[-1]
        message += _stated_at(message, provenance, path)
    elif kind == "extra_forbidden":
        instead = instead_of(path, is_flag=False)
        near = nearest_path(".".join(path), all_paths())
        message = f"unknown key; did you mean {near}?" if near else "unknown key"
        message = message if instead is None else f"there is no such key: {instead}"
    elif kind == "missing":
        message = "must be stated: it has no default"
    elif (node := resolve(path)) is not None and _WRONG_TYPE.search(kind):
        message = f"expected {type_text(node.annotation)}, got {_shown(detail['input'], path)}"
        is_number = kind == "string_type" and isinstance(detail["input"], int | float)
        message += " (in quotes it is text)" if is_number else ""
        message += _of_items(detail["input"], path)
    else:
        message = f"{message.replace('Input should', 'must')}, got {_shown(detail['input'], path)}"
    return Problem(message, ".".join(path) or None, origin_of(path, provenance))


def _of_items(value: Any, path: tuple[str, ...]) -> str:
    """Say where a key that was given a list of values takes one for each environment; empty: nowhere."""
    several = isinstance(value, list) or (isinstance(value, str) and ("," in value or value.startswith("[")))
    of_item = (*path[:-1], "env", "0", path[-1])
    return f"; one for each environment: {'.'.join(of_item)}, ..." if several and resolve(of_item) else ""


def _shown(value: Any, path: tuple[str, ...] = ()) -> str:
    if path and names_secret(path[-1]):
        return "something else"
    text = masked(repr(value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def origin_of(path: tuple[str, ...], provenance: dict[str, Origin]) -> Origin | None:
    """Find where the key, or the nearest key above it, was stated."""
    while path:
        if origin := provenance.get(".".join(path)):
            return origin
        path = path[:-1]
    return None


def _stated_at(message: str, provenance: dict[str, Origin], path: tuple[str, ...]) -> str:
    """` (a.b: exp.yaml:3)` for the keys that a message names, but the one at `path`, of which the place is said first,
    and its sections, whose names are English words."""
    named = dict.fromkeys(re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", message))
    for length in range(1, len(path) + 1):
        named.pop(".".join(path[:length]), None)
    places = [f"{name}: {provenance[name]}" for name in named if name in provenance]
    return f" ({'; '.join(places)})" if places else ""


def check_complete(
    experiment: Experiment, entrypoint: str, provenance: dict[str, Origin], *, is_begun: bool = False
) -> None:
    """Refuse an experiment that lacks what an entrypoint cannot run without, or that cannot be meant.
    `is_begun`: it was taken before, perhaps by an earlier version: it goes on with what nobody can mean.
    Raises ConfigError: says what is wrong."""
    if not is_begun:
        problems = [Problem(text, key, origin_of(tuple(key.split(".")), provenance)) for key, text in _odd(experiment)]
        if problems:
            raise ConfigError(problems)
        if entrypoint in ("rl", "sft", "eval", "synthesize", "submit", "plan"):
            _check_servers(experiment, provenance)
    if experiment.trains and entrypoint in ("rl", "sft", "submit", "plan"):
        _check_stages(experiment, provenance)
        _check_connector(experiment, provenance)
        _check_elastic(experiment, provenance)
    if experiment.kind == "rl" and entrypoint in ("rl", "submit", "plan", "orchestrator"):
        brings_none = experiment.trainer.max_concurrent_runs > 1 and entrypoint != "orchestrator"  # its runs do
        if not experiment.orchestrator.env and not brings_none:
            message = "no environment: state at least one, such as `orchestrator: {env: [{id: reverse-text}]}`"
            raise ConfigError(Problem(message, "orchestrator.env", origin_of(("orchestrator", "env"), provenance)))
    elif not experiment.trains and entrypoint in (experiment.kind, "submit", "plan"):
        if not experiment.episodes.environments:
            message = "no environment: state at least one, such as `--environment-ids reverse-text`"
            message += " (or files of prompts: `--prompts prompts.jsonl`)" if experiment.kind == "synthesize" else ""
            raise ConfigError(message, f"{experiment.kind}.environment_ids")
    elif experiment.kind == "sft" and entrypoint in ("sft", "submit", "plan"):
        data = experiment.sft.data
        if data.type != "fake" and data.path is None and data.name is None:
            message = "no data: state files, or a hub data set (sft.data.name), or `sft.data.type = fake`"
            raise ConfigError(Problem(message, "sft.data.path", origin_of(("sft", "data", "type"), provenance)))


def _odd(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values nobody can mean, and why: runs went on with them, to no good."""
    for key, envs in experiment.environment_lists.items():
        try:
            check_labels(envs)
        except ValueError as error:
            yield key, str(error)
    for key in (*ENGINE_GPU_IDS, "trainer_gpu_ids"):
        ids = getattr(experiment, key)
        if ids and (min(ids) < 0 or len(set(ids)) < len(ids)):
            yield key, f"must be different positions from 0 on, got {ids}"
        engines = getattr(experiment, ENGINE_GPU_IDS[key]) if key in ENGINE_GPU_IDS else None
        need = engines.num_gpus if engines is not None else experiment.trainer.num_ranks
        if ids and len(ids) > need and (engines is not None or (key not in ENGINE_GPU_IDS and experiment.trains)):
            yield (
                key,
                f"names {len(ids)} GPUs, but {ENGINE_GPU_IDS.get(key, 'trainer.num_ranks')} uses {need}: name those, "
                "or leave the counts out (num_ranks, data_parallel_size), which then follow from the ids",
            )
    for section in ENGINE_GPU_IDS.values():
        engines = getattr(experiment, section)
        size = engines.data_parallel_size if engines is not None else 1
        if size == 1:  # of a node by hand the size may be left out
            continue
        local, first = engines.data_parallel_size_local, engines.data_parallel_start_rank
        if local is not None and local > size:
            key = "data_parallel_size_local"
            yield f"{section}.{key}", f"{key} ({local}) is more than data_parallel_size ({size})"
        if first is not None and first >= size:
            key = "data_parallel_start_rank"
            yield f"{section}.{key}", f"{key} ({first}) is no rank of data_parallel_size ({size})"
    if not experiment.trains and experiment.inference is not None:
        for i, env in enumerate(experiment.episodes.env):
            length, most = env.sampling.max_tokens, experiment.max_model_len
            if length is not None and length >= most:
                key = f"{experiment.kind}.env.{i}.sampling.max_tokens"
                yield key, f"{length} cannot fit inference.max_model_len ({most}) {NO_ROOM}"
    yield from _of_critic(experiment) if experiment.kind == "rl" else ()
    for key, url in _addresses(experiment):
        if not _is_address(url):
            yield key, f"{masked(repr(url))} is no address of a server: write http://host:port/v1"
    for key, figure in _compared(experiment):
        if figure is not None and not math.isfinite(figure):
            yield key, f"must be a finite number, got {figure}"


def _addresses(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the addresses of servers that the run is told of, with their keys."""
    clients: dict[str, ClientConfig | TeacherConfig | None] = {
        "orchestrator.client": experiment.orchestrator.client,
        "orchestrator.teacher": experiment.orchestrator.teacher,
        "eval.client": experiment.eval.client,
        "synthesize.client": experiment.synthesize.client,
    }
    for key, client in clients.items():
        if client is not None:
            name = "base_url" if client.base_url else "host"
            yield from ((f"{key}.{name}", url) for url in client.urls)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.split() == [url]
    except ValueError:  # a port that is no number, half of an IPv6 address
        return False


def _compared(experiment: Experiment) -> Iterator[tuple[str, float | None]]:
    """Yield the figures that others are compared with, weighed or counted by, with their keys."""
    orchestrator, kl = experiment.orchestrator, experiment.trainer.loss.kl
    yield "orchestrator.advantage.timeout_reward", orchestrator.advantage.timeout_reward
    yield "trainer.loss.kl.coef", kl.coef if kl is not None else None
    yield "eval.pass_threshold", experiment.eval.pass_threshold
    yield "synthesize.min_reward", experiment.synthesize.min_reward
    for key, envs in experiment.environment_lists.items():
        for index, env in enumerate(envs):
            yield f"{key}.{index}.ratio", env.ratio
    for index, rule in enumerate(experiment.alarms.rules):
        yield f"alarms.rules.{index}.below", rule.below
        yield f"alarms.rules.{index}.above", rule.above
    yield "sft.data.num_epochs", experiment.sft.data.num_epochs
    yield from _times_and_sizes(experiment)


def _times_and_sizes(section: Section, above: str = "") -> Iterator[tuple[str, float]]:
    """Yield lengths of time and sizes of memory: a wait without an end is none that every part of the system can make,
    and no memory is counted in bytes that has none."""
    for name, value in section:
        if isinstance(value, float) and name.endswith(("_s", "_gib")):
            yield f"{above}{name}", value
        elif isinstance(value, Section):
            yield from _times_and_sizes(value, f"{above}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _times_and_sizes(item, f"{above}{name}.{index}.")


def _of_critic(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield what a critic cannot do, what would mislead it, and what needs one; more mini-batches than samples."""
    orchestrator, trainer = experiment.orchestrator, experiment.trainer
    advantages = list(map(orchestrator.advantage_of, range(len(orchestrator.env)))) or [orchestrator.advantage]
    types = dict.fromkeys(advantage.type for advantage in advantages if ":" not in advantage.type)
    of_critic = [name for name in types if ALGORITHMS[name].critic]
    if trainer.num_mini_batches > orchestrator.batch_size:
        message = f"a batch of {orchestrator.batch_size} samples (orchestrator.batch_size) has no so many parts"
        yield "trainer.num_mini_batches", f"{trainer.num_mini_batches}: {message}: state fewer, or a larger batch"
    kl = trainer.loss.kl
    if kl is not None and kl.in_rewards:
        key, remedy = "trainer.loss.kl", "state trainer.critic, or leave in_rewards out: the penalty is in the loss"
        if trainer.critic is None:
            yield f"{key}.in_rewards", f"rewards of tokens are a critic's: {remedy}"
        if kl.target != "reference":
            yield f"{key}.target", "a policy that sampled is at no distance from itself: leave it out with in_rewards"
        if kl.unbiased:
            yield f"{key}.unbiased", "rewards are of the policy that sampled: leave it out with in_rewards"
        if kl.target_kl is not None and kl.coef == 0:
            yield f"{key}.target_kl", f"a weight of 0 ({key}.coef) stays 0, times whatever: state where it begins"
    if trainer.critic is None:
        if of_critic:
            message = "gives tokens rewards, of which a critic makes advantages: state trainer.critic too"
            yield "orchestrator.advantage.type", f"{of_critic[0]} {message}"
        return
    if others := [name for name in types if name not in of_critic]:
        message = f"makes advantages of tokens' rewards, and orchestrator.advantage.type = {others[0]} gives advantages"
        yield "trainer.critic", f"{message}: state gae, in each environment, or leave trainer.critic out"
    if orchestrator.advantage.scale != "none":
        yield "orchestrator.advantage.scale", "gae gives rewards, and no advantages: trainer.critic.whiten scales those"
    if orchestrator.advantage.zero == "drop":
        yield "orchestrator.advantage.zero", "would hide rewards of 0 from the critic: leave it out"
    if (last := experiment.num_steps) is not None and trainer.critic.warmup_steps >= last:
        message = f"the critic would learn alone in all of the run's {last} steps, and the policy never: state fewer"
        yield "trainer.critic.warmup_steps", message
    if trainer.max_concurrent_runs > 1:
        yield "trainer.critic", "cannot be shared by the runs of trainer.max_concurrent_runs > 1: leave one of them out"
    if experiment.model.vision is not None:
        yield "trainer.critic", "reads text alone: leave it or model.vision out"
    if trainer.loss.covariance is not None:
        yield "trainer.loss.covariance", "goes by the batch's advantages, that trainer.critic makes later: leave it out"
    if trainer.loss.objective.imitates:
        yield (
            "trainer.critic",
            f"is not used by trainer.loss.type = {trainer.loss.type}: state ppo_clip, or leave it out",
        )


def _check_servers(experiment: Experiment, provenance: dict[str, Origin]) -> None:
    """Refuse servers that the run starts and cannot reach, and servers that it is told of and does not ask."""
    for section in ENGINE_GPU_IDS.values():
        servers = getattr(experiment, section)
        if servers is not None and servers.headless:
            message = (
                "a run's servers serve HTTP: headless is for `inference` that is started by hand, node by node; a run "
                f"spreads its engines by slurm.{section.removesuffix('_inference')}.nodes and across_nodes"
            )
            key = f"{section}.headless"
            raise ConfigError(Problem(message, key, origin_of(tuple(key.split(".")), provenance)))
    judge, message = experiment.judge_inference, ""
    if judge is not None and not experiment.samples:
        message = "asked by rewards, and this SFT plays no episodes: state orchestrator.eval, or leave it out"
    elif judge is not None and experiment.trainer.max_concurrent_runs > 1:
        message = (
            "cannot be shared by the runs of trainer.max_concurrent_runs > 1: start it by hand, `prime-hpc inference "
            f"--model.name {shlex.quote(judge.model)}`, leave this section out, and set JUDGE_URL=http://HOST:PORT/v1 "
            f"and JUDGE_MODEL={shlex.quote(judge.model)} in the environment (of a job: slurm.env), and where it is on "
            "another machine JUDGE_API_KEY, its inference.api_key"
        )
    elif judge is not None and "JUDGE_URL" in experiment.slurm.env:
        message = "starts a judge, and slurm.env.JUDGE_URL names one that runs: leave one of them out"
    if message:
        raise ConfigError(Problem(message, "judge_inference", origin_of(("judge_inference",), provenance)))
    key = "orchestrator.client.base_url"
    if experiment.trains and experiment.inference is not None and experiment.orchestrator.client.base_url:
        message = "attaches to servers that run, inference starts servers: leave one of them out (`none` states no url)"
        raise ConfigError(Problem(message, key, origin_of(tuple(key.split(".")), provenance)))


def _check_stages(experiment: Experiment, provenance: dict[str, Origin]) -> None:
    stages = experiment.inference.pipeline_parallel_size if experiment.inference is not None else 1
    if stages == 1:
        return
    key = "inference.pipeline_parallel_size"
    message = (
        f"{stages} stages: the policy's engines get new weights while they serve, which is for tensor and data "
        "parallelism alone; set tensor_parallel_size instead"
    )
    raise ConfigError(Problem(message, key, origin_of(tuple(key.split(".")), provenance)))


def _check_elastic(experiment: Experiment, provenance: dict[str, Origin]) -> None:
    """Refuse servers that come and go where the run could not take them in, or not do without them."""
    servers, why = experiment.inference, ""
    if experiment.slurm.elastic is None:
        return
    if experiment.kind != "rl" or servers is None:
        why = "adds to the servers that an RL run starts: state `inference`, or leave it out"
    elif experiment.trainer.max_concurrent_runs > 1:
        why = "is for one run: the runs of trainer.max_concurrent_runs > 1 know the servers that there are at first"
    elif servers.sleep:
        why = "are on GPUs of their own, and inference.sleep is for one that engine and trainer share"
    elif experiment.weights.transport in NETWORK_TRANSPORTS:
        why = (
            f"come and go, and weights.transport = {experiment.weights.transport} goes to the servers that there are "
            "at first: state files or delta"
        )
    if why:
        raise ConfigError(Problem(why, "slurm.elastic", origin_of(("slurm", "elastic"), provenance)))


_CONNECTORS = ("kv_transfer_config", "kv_offloading_backend")
"""Arguments of vLLM that name what keeps or moves keys and values; its own offloading (`native`) is emptied."""


def _check_connector(experiment: Experiment, provenance: dict[str, Origin]) -> None:
    """Refuse what keeps or moves blocks of the KV cache behind vLLM's back, for engines whose weights change."""
    arguments = experiment.inference.vllm if experiment.inference is not None else {}
    name = next((key for key in arguments if key.replace("-", "_") in _CONNECTORS), None)
    if name is None or arguments[name] in (None, "native"):
        return
    key = f"inference.vllm.{name}"
    message = (
        "keys and values that a connector keeps, or another server computed, would be those of older weights after an "
        "update: vLLM 0.32 takes a connector that cannot be emptied (LMCache, NIXL, ...) for an empty one, and cannot "
        "pause while blocks travel. Leave it out; host memory for the cache is inference.kv_offload_gib"
    )
    raise ConfigError(Problem(message, key, origin_of(("inference", "vllm", name), provenance)))


def check_secrets(experiment: Experiment, provenance: dict[str, Origin]) -> list[str]:
    """Warnings about secrets that others can read where they are stated.
    Raises ConfigError: a file that is to hold one cannot be used; says why."""
    problems: list[Problem] = []
    warnings: list[str] = []
    for path, secret in secrets_of(experiment):
        origin, key = origin_of(path, provenance), ".".join(path)
        if secret.problem is not None:
            problems.append(Problem(secret.problem, key, origin))
        elif secret.file is None and origin is not None:
            fix = f"state it as @FILE, a file that only you can read{_mode_fix(origin)}"
            if origin.source == "command line":
                warnings.append(f"{key}: the command line is seen by everybody on this machine (ps); {fix}")
            elif origin.source == "file" and _is_open(Path(origin.where)):
                warnings.append(f"{key}: {origin.where} can be read by others; {fix}")
    if problems:
        raise ConfigError(problems)
    return warnings


def _mode_fix(origin: Origin) -> str:
    return f", or chmod 600 {shlex.quote(origin.where)}" if origin.source == "file" else ""


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False
