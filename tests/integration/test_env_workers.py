"""Environments in processes of their own: the same episodes token for token, whatever else an environment does."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig, EnvServersConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import leave_out_trained
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.workers.host_link import key_of_hosts
from tests.support.env_world import World
from tests.support.sampled import sampled
from tests.support.scripted_server import Reply

pytestmark = pytest.mark.slow

WAIT_S = 200.0


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the tests' own environments, wherever pytest was started."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def misbehaving(kind: str, every: int = 1, **options: Any) -> EnvConfig:
    args = {"kind": kind, "every": every}
    return EnvConfig(**{"id": "tests.support.misbehaving", "name": kind, "args": args, "workers": 1} | options)


async def play(pool: EnvPool, source: int, numbers: range) -> list[EpisodeResult]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*(pool.run_episode(source, number) for number in numbers))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


def figure(pool: EnvPool, name: str) -> float:
    return pool.metrics()[f"env_workers/{name}"]


def same(one: EpisodeResult, other: EpisodeResult) -> bool:
    """All but the time that it took, bit for bit."""
    plain = [{k: v for k, v in vars(r).items() if k not in ("samples", "duration_s", "seconds")} for r in (one, other)]
    assert len(one.samples) == len(other.samples)
    for left, right in zip(one.samples, other.samples, strict=True):
        for name, value in vars(left).items():
            found = vars(right)[name]
            assert type(found) is type(value) and np.array_equal(found, value)
            assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    return plain[0] == plain[1]


async def check_same_tokens(pool: EnvPool) -> None:
    """Sources 0 and 1 are one environment, played here and by two workers."""
    here, there = await play(pool, 0, range(12)), await play(pool, 1, range(12))
    assert all(map(same, here, there))
    assert all(r.usable and r.samples[0].num_turns > 1 for r in here)
    for result in (*here, *there):
        parts = result.seconds
        assert sum(parts.values()) == pytest.approx(result.duration_s) and min(parts.values()) >= 0
        assert parts["engine"] > 0 < parts["environment"]
    assert {figure(pool, f"theirs/episodes_{slot}") for slot in (0, 1)} == {6}


async def check_exits(pool: EnvPool, source: int) -> None:
    """Two of ten episodes end their worker: they have failed, all others are played, none twice."""
    results = await play(pool, source, range(10))
    dead = [r for r in results if r.error_type == "WorkerDied"]
    assert [r.usable for r in results] == [(number + 1) % 5 != 0 for number in range(10)]
    assert len(dead) == 2 and all("exit code 3" in r.reason for r in dead)
    assert figure(pool, "exits/restarts") == 2 and figure(pool, "exits/episodes") == 8


async def check_system_exit(pool: EnvPool, source: int) -> None:
    """Fails like any other error: in a worker and in this process."""
    for number in (source, source + 1):
        results = await play(pool, number, range(4))
        assert [(r.usable, r.error_type) for r in results] == [(True, ""), (False, "SystemExit")] * 2
    assert figure(pool, "system_exit/restarts") == 0


async def check_blocks(pool: EnvPool, source: int) -> None:
    """The blocked worker is ended, the blocker has failed, its neighbours are played again."""
    results = await play(pool, source, range(3))
    assert [r.usable for r in results] == [True, True, False]
    assert "blocked the event loop" in results[2].reason and results[2].error_type == "WorkerDied"


async def check_leaks(pool: EnvPool, source: int) -> None:
    """A worker that grew too large is replaced, and no episode fails for it."""
    first = await play(pool, source, range(4))
    await until(lambda: figure(pool, "leaks/recycled") == 1 and figure(pool, "leaks/workers") == 1)
    assert all(r.usable for r in [*first, *await play(pool, source, range(4, 5))])
    assert figure(pool, "leaks/restarts") == 0


@pytest.mark.exhaustive
def test_workers_play_the_same_and_keep_trouble_to_themselves(world: World) -> None:
    world.script = lambda prompt, number: "guess 50" if prompt.count("<|im_start|>user") < 3 else "guess 7"
    guess: dict[str, Any] = {"id": "guess-number", "args": {"max_guesses": 3}}
    envs = [
        EnvConfig(**guess, name="ours", workers=0),
        EnvConfig(**guess, name="theirs", workers=2),
        misbehaving("exits", every=5),
        misbehaving("system_exit", every=2),
        misbehaving("system_exit", every=2, workers=0, name="system_exit here"),
        misbehaving("blocks_in_c", every=3),
        misbehaving("leaks"),
    ]
    servers = EnvServersConfig(stall_s=1.0, memory_gib=1.0)

    async def run() -> None:
        async with world.pool(*envs, servers=servers) as pool:
            await asyncio.gather(
                check_same_tokens(pool),
                check_exits(pool, 2),
                check_system_exit(pool, 3),
                check_blocks(pool, 5),
                check_leaks(pool, 6),
            )
            names = ("theirs", "exits", "system_exit", "blocks_in_c", "leaks")
            await until(lambda: sum(figure(pool, f"{name}/workers") for name in names) == 6)
            host = psutil.Process(pool._host.pid)
            family = [host, *host.children()]
            assert len(family) >= 7  # one that was replaced may not be gone yet
        assert not [process for process in family if process.is_running()]

    asyncio.run(run())


@pytest.mark.parametrize("kept", sampled([True, False], 2))
def test_torch_is_imported_where_the_tokenizer_takes_it_alone_and_once_for_all_workers(
    world: World, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # in which nothing can be noted
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("cache" if kept else "file")))
    world.script = lambda prompt, number: "fine"

    async def run() -> None:
        async with world.pool(misbehaving("none", workers=2)) as pool:
            assert all(result.usable for result in await play(pool, 0, range(4)))
            host = psutil.Process(pool._host.pid)
            for process in (host, *host.children()):
                assert ("libtorch" in Path(f"/proc/{process.pid}/maps").read_text()) == (not kept), process

    asyncio.run(run())


@pytest.mark.exhaustive
def test_a_worker_that_stands_still_and_a_host_that_is_killed_lose_nothing(world: World) -> None:
    world.script = lambda prompt, number: Reply("fine", delay_s=2.0)
    world.server.requests.clear()

    async def run() -> None:
        servers = EnvServersConfig(silence_s=2.0)
        async with world.pool(misbehaving("none", workers=2), servers=servers) as pool:
            host = psutil.Process(pool._host.pid)
            playing = asyncio.create_task(play(pool, 0, range(20)))
            await until(lambda: len(world.server.requests) == 20)  # no worker runs an episode's code: all wait
            host.children()[0].suspend()
            assert all(result.usable for result in await playing)
            assert figure(pool, "none/restarts") == 1 and figure(pool, "none/replayed") == 10
            await until(lambda: figure(pool, "none/workers") == 2)
            world.server.requests.clear()
            playing = asyncio.create_task(play(pool, 0, range(20)))
            await until(lambda: len(world.server.requests) == 20)
            workers = host.children()
            host.kill()
            assert all(result.usable for result in await playing)
            assert not psutil.wait_procs([host, *workers], timeout=WAIT_S)[1]
            assert figure(pool, "none/episodes") == 40

    asyncio.run(run())


@pytest.mark.exhaustive
def test_deaths_that_nobody_explains_and_memory_that_is_taken_at_once(world: World) -> None:
    world.script = lambda prompt, number: "fine"
    envs = [misbehaving("exits_on_a_thread", every=3), misbehaving("swallows", every=3)]

    async def run() -> None:
        async with world.pool(*envs, servers=EnvServersConfig(memory_gib=1.0)) as pool:
            first, second = await asyncio.gather(play(pool, 0, range(3)), play(pool, 1, range(3)))
        assert [r.usable for r in first] == [True, True, False] and first[2].error_type == "WorkerLost"
        assert [r.usable for r in second] == [True, True, False] and second[2].error_type == "WorkerDied"
        assert "GiB of memory" in second[2].reason

    asyncio.run(run())


@pytest.mark.exhaustive
def test_a_worker_that_finds_other_files_plays_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parents[1] / "support" / "misbehaving.py"
    copy = tmp_path / "changing_env.py"
    copy.write_text(source.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, Path(__file__).parents[2]))))
    world.script = lambda prompt, number: "fine"
    env = EnvConfig(id="changing_env", args={"kind": "exits", "every": 2}, workers=1)

    async def run() -> None:
        async with world.pool(env) as pool:
            assert (await pool.run_episode(0, 0)).usable
            copy.write_text(source.read_text() + "\n# another version\n")
            assert (await pool.run_episode(0, 1)).error_type == "WorkerDied"
            result = await pool.run_episode(0, 2)
            assert result.state is EpisodeState.FAILED and "the environment's code" in result.reason

    asyncio.run(run())


@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_task_is_made_where_it_is_played_and_fails_its_episode_where_it_cannot_be(
    world: World, tmp_path: Path, workers: int
) -> None:
    log, world.script = tmp_path / "made", lambda prompt, number: "fine"
    log.touch()
    env = EnvConfig(id="tests.support.running_dry", args={"log": str(log)}, workers=workers)

    def made_here() -> int:
        return log.read_text().split().count(str(os.getpid()))

    async def run() -> None:
        async with world.pool(env) as pool:
            before = made_here()  # some, to compare them with a worker's
            (good, bad, far) = [await pool.run_episode(0, number) for number in (18, 20, 400)]
            assert made_here() - before == (0 if workers else 20)
        assert good.usable
        for result in (bad, far):
            assert result.state is EpisodeState.FAILED and "cannot be made" in result.reason, result.reason
        assert "the well is dry" in bad.reason

    asyncio.run(run())


def test_a_task_that_takes_long_to_make_keeps_nobody_else(world: World, tmp_path: Path) -> None:
    """It is made where episodes are played: the caller's loop goes on, which opens the gate."""
    log, gate, world.script = tmp_path / "made", tmp_path / "gate", lambda prompt, number: "fine"
    log.touch()
    env = EnvConfig(id="tests.support.running_dry", args={"log": str(log), "gate": str(gate)})

    async def run() -> None:
        async with world.pool(env) as pool:
            playing = asyncio.create_task(pool.run_episode(0, 7))
            await until(lambda: len(log.read_text().split()) == 5)
            gate.touch()
            assert (await playing).usable

    asyncio.run(run())


def test_what_is_endless_and_cannot_be_made_is_said_before_anything_is_played(world: World, tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    dry = EnvConfig(id="tests.support.running_dry", args={"log": str(tmp_path / "made")})

    async def run() -> None:
        async with world.pool(dry) as trained, world.pool(EnvConfig(id="reverse-text"), split="eval") as evaluated:
            for _ in range(2):
                with pytest.raises(EnvError, match="running_dry': task 20 cannot be made: ValueError: the well"):
                    leave_out_trained(evaluated.sources, trained.sources, 4)

    asyncio.run(run())


ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.pool_settings import PoolSettings

async def main():
    env = EnvConfig(id="tests.support.misbehaving", args={"kind": sys.argv[3]}, workers=2)
    settings = PoolSettings(envs=[env], samplings=[{"max_tokens": 8}], model_name="policy", tokenizer_path=sys.argv[1],
                            urls=[sys.argv[2]], split="train", seed=0, max_model_len=2048)
    async with EnvPool(settings) as pool:
        playing = [asyncio.create_task(pool.run_episode(0, task)) for task in range(4)]
        await asyncio.sleep(1.0)
        print("plays", flush=True)
        await asyncio.gather(*playing)

asyncio.run(main())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sleeps", "blocks_in_c"])
def test_nothing_is_left_of_an_orchestrator_that_is_killed(world: World, kind: str) -> None:
    world.script = lambda prompt, number: "fine"
    command = [sys.executable, "-c", ORCHESTRATOR, str(world.tokenizer_dir), world.server.url, kind]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        while "plays" not in (line := process.stdout.readline()):
            assert line, "it ended"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 3  # a host and two workers
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(family, timeout=WAIT_S)[1]


def test_the_key_of_hosts_elsewhere_is_kept_from_what_episodes_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes that are played without workers, too."""
    servers = EnvServersConfig(key_var="OUR_KEY")

    async def seen() -> str | None:
        async with world.pool(EnvConfig(id="reverse-text"), servers=servers):
            return os.environ.get("OUR_KEY")

    monkeypatch.setenv("OUR_KEY", "secret")
    for _ in range(2):  # of training, and of evaluation
        assert asyncio.run(seen()) is None
        assert key_of_hosts(servers) == "secret"


@pytest.mark.exhaustive
def test_a_host_elsewhere_takes_those_who_know_its_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.script = lambda prompt, number: "fine"
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-m", "prime_hpc.envs.workers.host", "--listen", "127.0.0.1:0"]
    without = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert without.returncode == 2 and "PRIMEHPC_ENV_SERVER_KEY is not set" in without.stderr
    environment = os.environ | {"PYTHONPATH": root, "PRIMEHPC_ENV_SERVER_KEY": "the-key"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        address = host.stdout.readline().split()[-1]
        servers = EnvServersConfig(addresses=[address])
        envs = [misbehaving("exits", every=5, workers=2), EnvConfig(id="reverse-text")]

        async def run() -> list[EpisodeResult]:
            async with world.pool(*envs, servers=servers) as pool:
                assert pool._host.pid is None  # none is started here
                return await play(pool, 0, range(10))

        async def refused() -> None:
            with pytest.raises(EnvError, match="did not take us in"):
                async with world.pool(*envs, servers=servers.model_copy(update={"max_restarts": 0})):
                    pass

        try:
            monkeypatch.setenv("PRIMEHPC_ENV_SERVER_KEY", "the-key")
            for _ in range(2):  # one orchestrator after another
                results = asyncio.run(run())
                assert [r.usable for r in results] == [(number + 1) % 5 != 0 for number in range(10)]
                assert {r.error_type for r in results} == {"", "WorkerDied"}
            monkeypatch.setenv("PRIMEHPC_ENV_SERVER_KEY", "another-key")
            asyncio.run(refused())
            assert host.poll() is None
        finally:
            host.terminate()
            assert host.wait(WAIT_S) == 0
