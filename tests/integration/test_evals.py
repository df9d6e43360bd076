"""`eval` from the command line against a scripted API: killed and started again, refused, and with every fault."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_hpc.evals.episodes import results_file
from prime_hpc.runtime.process_tree import alive, family
from tests.support.forked import TalkingProcess
from tests.support.scripted_api import Fault, ScriptedApi, noisy_reverse

pytestmark = pytest.mark.slow

KEY = "a-key-for-the-tests"
TASKS, ROLLOUTS = (60 if "PRIMEHPC_TEST_KILLS" in os.environ else 20), 2


def command(api_url: str, out: Path, *more: str) -> list[str]:
    return [
        *("tests.faults.entry", "prime-hpc", "eval", "--model.name", "scripted"),
        *("--client.base-url", api_url, "--client.api-key-var", "SCRIPTED_KEY", "--output-dir", str(out)),
        *("--num-examples", str(TASKS), "--rollouts-per-example", str(ROLLOUTS), "--max-concurrent", "8", *more),
    ]


def start(argv: Sequence[str], key: str = KEY) -> TalkingProcess:
    return TalkingProcess(argv, os.environ | {"SCRIPTED_KEY": key})


def run(argv: Sequence[str], key: str = KEY) -> tuple[int, str]:
    process = start(argv, key)
    said, _ = process.communicate(timeout=240)
    return process.wait(), said


def episodes(run_dir: Path) -> list[dict[str, Any]]:
    path = results_file(run_dir)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def score_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("step", "env", "task", "rollout", "state", "reward", "task_id", "completion"))


def test_killed_at_any_moment_every_episode_is_scored_once(tmp_path: Path) -> None:
    num_kills, rng = int(os.environ.get("PRIMEHPC_TEST_KILLS", "1")), random.Random(7)
    more = ("--environment-ids", "reverse-text,calculator", "--json")
    total = 2 * TASKS * ROLLOUTS
    with ScriptedApi(key=KEY, delay_s=0.25) as api:
        killed, kills = tmp_path / "killed" / "eval", 0
        while kills < num_kills:
            before = num_lines(killed)
            process = start(command(api.url, tmp_path / "killed", *more))
            goal = min(total - 1, before + rng.randrange(1, max(2, 2 * total // (num_kills + 1))))
            while process.poll() is None and num_lines(killed) < goal:
                time.sleep(rng.uniform(0.0, 0.05))
            if process.poll() is not None:
                break  # it was done before the goal was reached
            started = family(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            wait_for_end(started)
            kills += 1
            with results_file(killed).open("ab") as file:
                file.write(b'{"step": 0, "env": "reverse-te')  # as if it had died in a write
        assert kills == num_kills
        code, said = run(command(api.url, tmp_path / "killed", *more))
        assert code == 0, said[-3000:]
    with ScriptedApi(key=KEY) as api:
        code, said = run(command(api.url, tmp_path / "whole", *more))
        assert code == 0, said[-3000:]
    rows, whole = episodes(killed), episodes(tmp_path / "whole" / "eval")
    keys = Counter((row["env"], row["task"], row["rollout"]) for row in rows)
    assert len(rows) == len(keys) == len(whole) == total
    assert sorted(map(score_of, rows)) == sorted(map(score_of, whole))
    one, other = (
        json.loads((d / "results" / "summary.json").read_text()) for d in (killed, tmp_path / "whole" / "eval")
    )
    for name, env in one["versions"][0]["environments"].items():
        assert env["avg"] == other["versions"][0]["environments"][name]["avg"]
        assert env["pass"] == other["versions"][0]["environments"][name]["pass"]
    assert 0.3 < one["versions"][0]["environments"]["reverse-text"]["avg"]["value"] < 1
    assert (killed / "results" / "scores.png").stat().st_size > 1000
    code, said = run([*command("http://127.0.0.1:9/v1", tmp_path / "killed", *more), "--sampling.temperature", "0.5"])
    assert code == 2 and "settings.json" in said and "eval.sampling" in said
    both = [str(killed), str(tmp_path / "whole" / "eval")]
    code, said = run(["tests.faults.entry", "prime-hpc", "eval", "--compare", *both])
    assert code == 0 and "reverse-text" in said and "+0.0000" in said


def num_lines(run_dir: Path) -> int:
    """Whole lines so far."""
    path = results_file(run_dir)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_end(started: list[psutil.Process]) -> None:
    """Until what a killed supervisor had started is gone, as it is meant to."""
    deadline = time.monotonic() + 60
    while alive(started):
        assert time.monotonic() < deadline, "the evaluation's process outlives its supervisor"
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_faults_that_pass_cost_nothing_and_those_that_stay_are_counted_apart(tmp_path: Path) -> None:
    """Every conversation is answered badly at first; some of them always."""
    passing = [
        Fault(429, headers={"Retry-After": "0.1"}),
        Fault(500),
        Fault(half=True),
        Fault(body=b"<html>gateway</html>"),
        Fault(body=b"{}"),
    ]

    def fault(conversation: str, number: int) -> Fault | None:
        if zlib.crc32(conversation.encode()) % 3 == 0:
            return Fault(503)
        return passing[sum(conversation.encode()) % len(passing)] if number == 0 else None

    with ScriptedApi(key=KEY, fault=fault) as api:
        args = ("--environment-ids", "reverse-text", "--client.max-retries", "2", "--max-failed-share", "0.05")
        code, said = run(command(api.url, tmp_path, *args))
    rows = episodes(tmp_path / "eval")
    failed = [row for row in rows if row["state"] == "failed"]
    assert code == 1 and "too many failed episodes" in said and len(rows) == TASKS * ROLLOUTS, said[-3000:]
    assert all(row["reward"] is None and row["error"] == "ProviderError" for row in failed)
    assert all("answered 503 3 times" in row["reason"] for row in failed)
    summary = json.loads((tmp_path / "eval" / "results" / "summary.json").read_text())
    found = summary["versions"][0]["environments"]["reverse-text"]
    assert found["num_failed"] == len(failed) and found["num_scored"] == len(rows) - len(failed)
    with ScriptedApi(key=KEY) as api:  # it has recovered
        code, said = run(command(api.url, tmp_path, *args, "--retry-failed"))
    scored = {(row["task"], row["rollout"]) for row in episodes(tmp_path / "eval") if row["state"] == "completed"}
    assert code == 0 and len(scored) == TASKS * ROLLOUTS, said[-3000:]


def test_a_wrong_key_or_no_server_ends_it_at_once(tmp_path: Path) -> None:
    with ScriptedApi(key=KEY) as api:
        code, said = run(command(api.url, tmp_path, "--environment-ids", "reverse-text"), key="wrong")
        assert code == 1 and "SCRIPTED_KEY" in said and "401" in said, said[-2000:]
        assert api.num_requests == 0 and "CPU" not in said, "nothing that a GPU would be for"
    code, said = run(command(api.url, tmp_path, "--environment-ids", "no-such-environment"))
    assert code == 2 and "no-such-environment" in said and "eval.environment_ids.0" in said


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing may be mounted here")
    replies = itertools.count(1)

    def reply(conversation: list[dict[str, Any]]) -> str:
        if next(replies) == 5:
            api.delay_s = 10.0  # what is asked from now on is answered when nothing more can be written
        return noisy_reverse(conversation)

    try:
        with ScriptedApi(reply, key=KEY, delay_s=0.05) as api:
            process = start(command(api.url, disk, "--environment-ids", "reverse-text"))
            while num_lines(disk / "eval") < 3 and process.poll() is None:
                time.sleep(0.02)
            with contextlib.suppress(OSError), (disk / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(b"x" * 65536)
                    ballast.flush()
            api.delay_s = 0.05
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 74 and "episodes.jsonl: disk full" in said, said[-3000:]
            (disk / "ballast").unlink()
            done = {(row["task"], row["rollout"]) for row in episodes(disk / "eval")}
            code, said = run(command(api.url, disk, "--environment-ids", "reverse-text"))
        assert code == 0, said[-3000:]
        rows = episodes(disk / "eval")
        assert len(rows) == TASKS * ROLLOUTS == len({(row["task"], row["rollout"]) for row in rows})
        assert 3 <= len(done) < TASKS * ROLLOUTS, "some were scored before, and were kept"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
