"""The connection of a run without a trainer to what its episodes need: its own servers or an API, and environments."""

import asyncio
import importlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.client import judge
from prime_hpc.client.http import HttpClient, NoAnswerError
from prime_hpc.client.inference import POLICY, InferenceClient, InferenceError
from prime_hpc.client.judge import open_judge
from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import Experiment
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.standalone_eval import StandaloneClientConfig
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.pool_settings import ChatOptions, PoolSettings
from prime_hpc.evals.episodes import EpisodeLog
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.play import Player
from prime_hpc.evals.servers import Servers
from prime_hpc.evals.versions import Version, version_template
from prime_hpc.runtime.event_loops import in_loop
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient

PROBE_TIMEOUT_S = 30.0
PATIENCE_S = 120.0
"""For so long a server that was attached to may not answer."""


@dataclass(frozen=True)
class Connected:
    """Environments and the servers that they ask, open until the stack ends."""

    pool: EnvPool
    servers: Servers
    urls: list[str]
    is_api: bool
    max_concurrent: int
    kind: str
    """Of the run: its section of the config."""

    def player(self, log: EpisodeLog, **more: Any) -> Player:
        """Return what plays episodes here, into `log`; `more`: as `Player` has it."""
        most, is_api, kind = self.max_concurrent, self.is_api, self.kind
        return Player(self.pool, self.servers, log, max_concurrent=most, is_api=is_api, kind=kind, **more)


async def connect(
    stack: AsyncExitStack,
    experiment: Experiment,
    context: RoleContext,
    bus: BusClient,
    versions: Sequence[Version],
) -> Connected:
    """Reach the servers, load the first version into them, open the environments.

    Args:
        bus: news of servers come over it.
        versions: those that will be served, one after another, if they are still there then.

    Raises:
        EvalError: no server is known or answers, or it refuses us.
        InferenceError: the judge was not ready in time.
        EnvError: an environment is not as configured.
    """
    config, kind = experiment.episodes, experiment.kind
    urls = list(context.inference_urls) or (config.client.urls if config.client is not None else [])
    if not urls:
        advice = f"state {kind}.client.base_url, or start the run with `{kind}`"
        if experiment.inference is not None:
            advice = (
                "all was played when this attempt began, and more is asked for now (a new version?): start it again"
            )
        raise EvalError(f"no server is known: {advice}")
    await open_judge(stack, experiment, context, bus, config.env_servers.addresses)
    key = _key(experiment)
    is_api = config.client is not None and await _is_api(config.client, urls, key, len(versions) > 1, kind)
    clients = [None if is_api else _client(experiment, url, key) for url in urls]
    started = experiment.inference
    patience_s = started.ready_timeout_s if started is not None else PATIENCE_S
    servers = Servers(clients, urls, patience_s, are_attached=started is None)
    stack.push_async_callback(servers.close)
    # verifiers takes seconds to import: meanwhile the servers start
    warm = asyncio.to_thread(importlib.import_module, "prime_hpc.envs.episode_runner")
    await asyncio.gather(servers.load_first(versions), warm)
    made = await _make_pool(experiment, urls, key, clients, context.log_dir)
    pool = await stack.enter_async_context(made)
    servers.on_move = pool.move_server
    _subscribe_to_servers(bus, servers)
    return Connected(pool, servers, urls, is_api, config.max_concurrent, kind)


def _key(experiment: Experiment) -> str | None:
    """Return the servers' key: the supervisor's for those of this run, else the one in the client's variable."""
    if experiment.episodes.client is not None:
        return os.environ.get(experiment.episodes.client.api_key_var)
    return os.environ.get(KEY_VARIABLES["inference"]) or revealed(experiment.inference and experiment.inference.api_key)


def _client(experiment: Experiment, url: str, key: str | None) -> InferenceClient:
    stated = experiment.episodes.client
    timeout_s = stated.timeout_s if stated is not None else 120.0
    return InferenceClient(url, key, timeout_s, experiment.orchestrator.weights_timeout_s)


async def _is_api(config: StandaloneClientConfig, urls: Sequence[str], key: str | None, loads: bool, kind: str) -> bool:
    """Return whether the servers are no own ones; their models are asked for, so that a wrong key shows at once.
    Raises EvalError: a server cannot be reached or refuses the key, or an API is to load versions."""
    kinds = set()
    for url in urls:
        own = config.api == "tokens" or (config.api == "auto" and await _is_own(url, key))
        if not own:
            await _check_api(url, key, config.api_key_var, kind)
            own = config.api == "auto" and await _is_own(url, key)  # one that was just starting is no API
        kinds.add(own)
    if len(kinds) > 1:
        raise EvalError(f"some of {', '.join(urls)} are prime-hpc's own servers and some are not: state one kind")
    if loads and kinds == {False}:
        raise EvalError(
            f"eval.weights_dir: {urls[0]} is no server of prime-hpc's and cannot load a run's versions; attach to one "
            "that `inference` started, or leave eval.client out"
        )
    return kinds == {False}


async def _is_own(url: str, key: str | None) -> bool:
    """Return whether a server is one of prime-hpc's."""
    async with InferenceClient(url, key, PROBE_TIMEOUT_S) as client:
        try:
            await client.policy_version()
        except InferenceError as error:
            logger.debug(f"{url} is no server of prime-hpc's: {error}")
            return False
    return True


async def _check_api(url: str, key: str | None, variable: str, kind: str) -> None:
    """End the run before its first episode at a wrong key or an address where nobody listens."""
    http = HttpClient(url.rstrip("/"), key, proxied=True)
    for attempt in range(4):
        try:
            answer = await http.request("GET", "/models", timeout_s=PROBE_TIMEOUT_S)
        except NoAnswerError as error:
            if attempt == 3:
                raise EvalError(
                    f"{url} does not answer ({error}): check {kind}.client; for a server of `inference` that still "
                    f"loads, {kind}.client.api = tokens waits {PATIENCE_S:.0f} s"
                ) from error
            logger.warning(f"{url} does not answer ({error}): it is asked again")
            await asyncio.sleep(2.0**attempt)
            continue
        finally:
            await http.close()
        if answer.status in (401, 403):
            found = "is not valid there" if key else "is not set"
            raise EvalError(
                f"{url} answered {answer.status}: the key in the environment variable {variable} "
                f"({kind}.client.api_key_var) {found}"
            )
        return


async def _make_pool(
    experiment: Experiment,
    urls: list[str],
    key: str | None,
    clients: Sequence[InferenceClient | None],
    log_dir: Path,
) -> EnvPool:
    config = experiment.episodes
    stated = config.client
    length = await _shortest_context(experiment, [client for client in clients if client is not None])
    is_api = clients[0] is None
    if is_api:
        assert stated is not None
    api_model = (stated.model if stated is not None else None) or experiment.model.name
    settings = PoolSettings(
        envs=config.environments,
        samplings=[config.sampling_of(env).parameters() for env in config.environments],
        split=experiment.synthesize.split if experiment.kind == "synthesize" else "eval",
        seed=experiment.seed,
        urls=urls,
        model_name=api_model if is_api else POLICY,
        api_key=key,
        api_key_var=stated.api_key_var if stated is not None else KEY_VARIABLES["inference"],
        max_model_len=length,
        chat=ChatOptions(stated.timeout_s, stated.max_retries) if is_api and stated is not None else None,
        tokenizer_path=experiment.model.name,
        renderer=experiment.model.renderer,
        enable_thinking=experiment.model.enable_thinking,
        trust_remote_code=experiment.model.trust_remote_code,
        chat_template=version_template(experiment.eval) if experiment.kind == "eval" else None,
        vision=experiment.model.vision is not None,
        environ=judge.variables(experiment),
        keep_messages=experiment.kind == "synthesize",
        keep_samples=False,
    )
    return EnvPool(settings, config.env_servers, log_dir)


async def _shortest_context(experiment: Experiment, clients: Sequence[InferenceClient]) -> int:
    """Return the shortest context that a server has; warn of those that were started with another model."""
    lengths = []
    for client in clients:
        served = await client.model_lengths()
        lengths += [length] if (length := served.pop(POLICY, None)) else []
        if served and experiment.model.name not in served:
            names = ", ".join(served)
            logger.warning(f"{client.base_url} serves {names}, not {experiment.model.name}: that is what replies")
    return min(lengths, default=experiment.max_model_len)


def _subscribe_to_servers(bus: BusClient, servers: Servers) -> None:
    """Follow what the supervisor says of servers: a node is lost, or one is started at another address."""

    def act(news: dict[str, Any]) -> None:
        if news.get("role") != "inference":
            return
        if news.get("state") == "lost":
            servers.lose(news["index"])
        elif news.get("url"):
            servers.move(news["index"], news["url"])

    bus.subscribe("server", in_loop(asyncio.get_running_loop(), act))
