"""The HTTP server of the service: a thread of rank 0 with an event loop of its own, and its key.

The key lies in `<run>/tinker.key`, which its user alone can read, and stays the same when the service is started again;
a user may write one of his own into it. The client insists that it begins with `tml-`.
"""

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from aiohttp import web
from loguru import logger

from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import Experiment
from prime_hpc.config.run_files import TINKER_KEY
from prime_hpc.config.secret import revealed
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.io.private import open_private
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths, check_incarnation
from prime_hpc.trainer.threads import rank_thread
from prime_hpc.trainer.tinker import address
from prime_hpc.trainer.tinker.app import build_app
from prime_hpc.trainer.tinker.board import Board
from prime_hpc.trainer.tinker.engines import Engines
from prime_hpc.trainer.tinker.paths import Shelf
from prime_hpc.trainer.tinker.service import Service

PREFIX = "tml-"
START_S = 30.0
STOP_S = 3.0


class Server:
    """Listens from `start` on."""

    def __init__(
        self,
        experiment: Experiment,
        context: RoleContext,
        bus: BusClient,
        shelf: Shelf,
        source: Path,
        vocab_size: int,
    ) -> None:
        """Take the port and the key; `shelf` is the one that the ranks' loop writes on.
        Raises ValueError: the address cannot be listened on, or the key's file is not the user's alone."""
        config = experiment.trainer.tinker
        assert config is not None
        self._run_dir, self._incarnation = context.run_dir.absolute(), context.incarnation
        self.key_file = self._run_dir / TINKER_KEY
        self._key = own_key(self.key_file)
        address.forget(self._run_dir)
        self._sock, self._url = address.listen(config, self._run_dir)
        self._urls = EngineUrls(experiment, context, bus)
        engines = None
        if self._urls.expected:
            key = os.environ.get(KEY_VARIABLES["inference"]) or os.environ.get(
                experiment.orchestrator.client.api_key_var
            )
            stated = revealed(experiment.inference.api_key) if experiment.inference is not None else None
            wait_s = experiment.inference.ready_timeout_s if experiment.inference is not None else START_S
            room = experiment.trainer.max_concurrent_runs
            engines = Engines(self._urls.known, key or stated, room, experiment.max_model_len, wait_s, shelf.has)
        self._engines = engines
        self._service = Service(experiment, shelf, engines, str(source.absolute()), vocab_size)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started, self._stopping = threading.Event(), asyncio.Event()
        self._thread = rank_thread(self._run, name="tinker-http")
        self._error: BaseException | None = None

    @property
    def board(self) -> Board:
        """Operations for the ranks."""
        return self._service.board

    def start(self) -> str:
        """Begin to answer, and say where; returns the URL for clients.

        Raises:
            RuntimeError: it could not begin.
            FencedError: a newer attempt has begun, whose address stands.
        """
        self._thread.start()
        if not self._started.wait(START_S) or self._error is not None:
            raise RuntimeError(f"the tinker service could not begin to listen: {self._error}")
        check_incarnation(RunPaths(self._run_dir), self._incarnation)
        address.announce(self._run_dir, self._url)
        return self._url

    def stop(self) -> None:
        """Hang up. Clients ask again until the service is back."""
        with contextlib.suppress(OSError):
            address.forget(self._run_dir, self._url)
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - said in the main thread, which waits for the start
            self._error = error
            logger.opt(exception=True).error("the tinker service's HTTP thread ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(build_app(self._service, self._key), access_log=None, handle_signals=False)
        await runner.setup()
        watching = asyncio.create_task(self._service.watch())
        try:
            await web.SockSite(runner, self._sock, shutdown_timeout=1.0).start()
            self._started.set()
            await self._stopping.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)  # whatever it ended with
            await runner.cleanup()
            if self._engines is not None:
                await self._engines.close()


def own_key(path: Path) -> str:
    """Return the service's key: the one in the file, else a new one, which is written there.
    Raises ValueError: the file is not the user's alone, or holds something else."""
    try:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ValueError(f"the service's key cannot be kept in {path}: {error}") from error
    with os.fdopen(descriptor, "r+") as file:
        key = file.read().strip()
        if not key:
            key = PREFIX + new_secret()
            file.write(key)
    if not key.startswith(PREFIX) or len(key) < len(PREFIX) + 16 or not key.isascii():
        raise ValueError(f"{path} holds no key that the client takes: {PREFIX} and at least 16 characters; remove it")
    return key


class EngineUrls:
    """The engines' servers: those that the supervisor starts, wherever it says on the bus that they are, else the
    config's."""

    def __init__(self, experiment: Experiment, context: RoleContext, bus: BusClient) -> None:
        client = experiment.orchestrator.client
        attached = client.urls if client.base_url is not None else []
        self._urls = dict(enumerate(context.inference_urls or attached))
        self.expected = experiment.inference is not None or bool(attached)
        """True if there are to be any."""
        bus.subscribe("server", self._on_news)

    def known(self) -> list[str]:
        """Return the URLs of those that are not lost."""
        return [url for _, url in sorted(self._urls.copy().items())]

    def _on_news(self, row: dict[str, Any]) -> None:
        if row.get("role") != "inference":
            return
        if row.get("state") == "lost":
            self._urls.pop(row["index"], None)
        elif row.get("url"):
            self._urls[row["index"]] = row["url"]
