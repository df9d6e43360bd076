"""What an evaluation does while its disk makes it wait."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import verifiers.v1 as vf

from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.evals import episodes
from prime_hpc.evals.episodes import EpisodeLog, Key
from prime_hpc.evals.play import Player
from prime_hpc.evals.servers import Servers
from prime_hpc.evals.versions import Version
from prime_hpc.store.run_paths import RunPaths, claim_incarnation

NUM = 8


class Counting:
    """A pool of episodes that end at once; `most_played` is set by the last one."""

    def __init__(self) -> None:
        self.sources, self.name, self.num_tasks = [self], "e", NUM
        self.most_played, self.num_played = threading.Event(), 0

    def task(self, index: int) -> Any:
        return vf.Task(vf.TaskData(idx=index, prompt="say so"), vf.TaskConfig())

    async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
        self.num_played += 1
        if self.num_played == NUM:
            self.most_played.set()
        return EpisodeResult(EpisodeState.COMPLETED, True, reward=1.0)


def test_episodes_go_on_while_the_disk_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fsync of half a minute, once a second, held up everything."""
    paths, pool = RunPaths(tmp_path), Counting()
    waited: list[bool] = []
    claim_incarnation(paths)
    log, fsync = EpisodeLog(paths, 1), os.fsync

    def slow(descriptor: int) -> None:
        if not waited:
            waited.append(pool.most_played.wait(10))
        fsync(descriptor)

    monkeypatch.setattr(episodes, "SYNC_S", 0.0)
    log.sync()
    monkeypatch.setattr(os, "fsync", slow)

    async def play() -> None:
        servers = Servers([None], ["http://host:1/v1"], 1.0)
        await servers.load(Version(0))
        player = Player(cast(Any, pool), servers, log, max_concurrent=2, is_api=True)
        await player.play(Version(0), [Key(0, "e", task, 0) for task in range(NUM)])

    asyncio.run(play())
    log.close()
    assert waited == [True] and len(log.records) == NUM
