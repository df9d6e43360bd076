"""A scripted token server and environment pools against it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.pool_settings import PoolSettings
from prime_hpc.envs.samples import EpisodeResult
from tests.support.scripted_server import Script, ScriptedServer, reverse_last_user


class World:
    """One scripted server and pools against it."""

    def __init__(self, tokenizer: Any, tokenizer_dir: Path) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_dir = tokenizer_dir
        self.script: Script = reverse_last_user
        self.server = ScriptedServer(tokenizer, lambda prompt, number: self.script(prompt, number))

    @asynccontextmanager
    async def pool(self, *envs: EnvConfig, **options: Any) -> AsyncIterator[EnvPool]:
        defaults: dict[str, Any] = {
            "model_name": "policy",
            "tokenizer_path": str(self.tokenizer_dir),
            "urls": [self.server.url],
            "split": "train",
            "seed": 0,
            "max_model_len": 2048,
        }
        sampling = options.pop("sampling", SamplingConfig(max_tokens=64)).parameters()
        servers = options.pop("servers", None)
        settings = PoolSettings(envs=envs, samplings=[sampling] * len(envs), **(defaults | options))
        async with EnvPool(settings, servers) as pool:
            yield pool

    def play(self, env: EnvConfig, num: int = 1, *, greedy: bool = False, **options: Any) -> list[EpisodeResult]:
        async def run() -> list[EpisodeResult]:
            async with self.pool(env, **options) as pool:
                return await asyncio.gather(*(pool.run_episode(0, i, greedy=greedy) for i in range(num)))

        return asyncio.run(run())
