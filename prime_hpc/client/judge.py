"""The judge of a run, as rewards find it: one address, the model's name and the key, in environment variables."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from loguru import logger

from prime_hpc.client.balance import Balance
from prime_hpc.client.inference import InferenceClient
from prime_hpc.client.keys import KEY_VARIABLES, find_key
from prime_hpc.config import Experiment
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.messaging.network import Network, past_proxies, route_to

URL, MODEL, KEY = VARIABLES = ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_API_KEY")
"""Environment variables that rewards read: `http://host:port/v1`, the model's name there, the bearer token."""


async def open_judge(
    stack: AsyncExitStack, experiment: Experiment, context: RoleContext, bus: BusClient, elsewhere: Sequence[str] = ()
) -> None:
    """Set `VARIABLES` in this process's environment, before environments are opened, and wait until the judge answers.
    Where the run starts none: the key of a server that this user started on this machine, if `URL` names one.

    Args:
        stack: closes what is opened.
        bus: tells of servers that are lost or move.
        elsewhere: addresses of hosts whose workers play episodes on other machines.

    Raises:
        InferenceError: no server was ready in time.
    """
    servers = experiment.judge_inference
    if servers is None or not context.judge_urls:
        if URL in os.environ and KEY not in os.environ and (key := find_key(os.environ[URL])) is not None:
            os.environ[KEY] = key
        return
    os.environ[KEY] = os.environ.get(KEY_VARIABLES["judge"], "")
    os.environ[MODEL] = servers.model
    network, host = Network.from_env(), sockets.loopback()
    away = [name for name, _ in map(parse_address, elsewhere) if not sockets.is_loopback(name)]
    if away and (place := network.place("serving") or route_to(away[0])) is not None:
        host = place.address
    listener = sockets.listen(host, ports=network.ports)
    balance = Balance(listener, context.judge_urls, servers.ready_timeout_s)
    stack.callback(balance.close)
    set_variables({URL: sockets.http_url(host, listener.getsockname()[1])})

    def hear(news: dict[str, Any]) -> None:
        if news["role"] == "judge":
            balance.move(news["index"], news["url"] if news["state"] != "lost" else None)

    bus.subscribe("server", hear)
    logger.info(f"rewards find the judge {servers.model}, {len(context.judge_urls)} server(s), at {os.environ[URL]}")
    async with InferenceClient(os.environ[URL], os.environ[KEY]) as client:
        await client.wait_ready(servers.ready_timeout_s)


def variables(experiment: Experiment) -> dict[str, str]:
    """Return the variables as they are set here, for workers on other machines. Those of a judge that the run does not
    start are the user's: its key is not sent anywhere, and workers have their own."""
    if experiment.judge_inference is None:
        return {}
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def set_variables(given: Mapping[str, str]) -> None:
    """Set variables in this process's environment, and see to it that no proxy is asked for the judge."""
    os.environ.update(given)
    if host := urlsplit(given.get(URL, "")).hostname:
        os.environ.update(past_proxies(os.environ, host))
