"""`tools/bench flight`: the orchestrator alone, at the scale of a cluster: 64 servers, 8,192 episodes in flight.

The real orchestrator process with a scripted trainer behind the real message bus and store (it publishes a version for
each batch, which all servers load), and servers that answer from a script: 16 in each of four processes. Prompts of
about 220 tokens, replies of 64 to 512. A reply takes 26 s on average, so that 315 episodes end in a second: engines
would take fewer, but two cores carry orchestrator and servers no quicker. Batches of 8,192 samples are packed for 256
trainer ranks. Twice: the environment in the orchestrator's process, and played by two workers.

- `cpu_ms`: CPU milliseconds a sample (user and system), by where they are spent: the orchestrator's loop, the
  environments' thread, other threads (packing, writing), worker processes.
- `longest_pause_s`: the longest time for which the orchestrator's event loop ran no callback that was due, from the
  first batch on; `start_pause_s`: before that, when all 8,192 start at once; `idle_pause_s`: of a loop with nothing to
  do, in a process beside. `longest_busy_s` and `start_busy_s`: for how long the loop's thread computed between two
  callbacks, which other work on the machine does not lengthen. `in_pause_own_s`, `in_pause_all_s`: what the loop's
  thread, and all of the process, computed in the longest pause. The rest of it they got no core.
- `longest_gc_s`: CPU seconds of the longest collection of garbage in the orchestrator's process, during which none of
  its threads does anything.
- `rss_gib` at the end, `rss_mib_by_minute` from the first batch on, and `rss_growth_mib_per_minute`: a line through the
  resident memory of the second half of the run, of the orchestrator's process and of all its workers. `held_by_minute`:
  episodes that have ended and wait for their group, batch or version. All begin at once, so it takes the time of about
  four replies until as many end as begin and groups are as incomplete as they stay; memory grows until then.
- `seat_delay_s`: from a reply's departure until the next request arrives that takes its place, as the servers see it:
  the n-th reply's place is taken by request n + 8,192.

`PRIME_HPC_BENCH_STEPS` (4) is the number of batches, the first of which is not counted, `PRIME_HPC_BENCH_ONLY`
(in_process, workers) one of the two, `PRIME_HPC_BENCH_IN_FLIGHT` (8192) the episodes. On a machine with much other
work, where 315 episodes a second are too many, `PRIME_HPC_BENCH_REPLY_S` makes replies slower and
`PRIME_HPC_BENCH_BATCH` the batches smaller.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
NUM_SERVERS, SERVER_PROCESSES = 64, 4
IN_FLIGHT, GROUP, RANKS = int(os.environ.get("PRIME_HPC_BENCH_IN_FLIGHT", "8192")), 8, 256
BATCH = int(os.environ.get("PRIME_HPC_BENCH_BATCH", "8192"))
DELAY_S = float(os.environ.get("PRIME_HPC_BENCH_REPLY_S", "26"))
LEAST_TOKENS, MOST_TOKENS, LETTERS = 64, 512, 200
SEQ_LEN = 1024
WARM = 1
"""Batches that are not counted."""
RUN_S = 1500.0
"""Least time that a run gets; a longer one gets twice what its replies take."""
MODES = {"in_process": 0, "workers": 2}


def experiment(model: Path, run_dir: Path, workers: int, steps: int) -> Any:
    """The run's tree."""
    from prime_hpc.config import Experiment

    return Experiment.model_validate(
        {
            "name": run_dir.name,
            "output_dir": str(run_dir.parent),
            "max_steps": steps,
            "async_level": max(1, 3 * IN_FLIGHT // BATCH),  # no group grows stale
            "seq_len": SEQ_LEN,
            "model": {"name": str(model), "renderer": "qwen3"},
            "trainer": {"num_ranks": RANKS, "micro_batch_tokens": 4 * SEQ_LEN},
            "orchestrator": {
                "batch_size": BATCH,
                "rollouts_per_example": GROUP,
                "max_concurrent": IN_FLIGHT,
                "sampling": {"max_tokens": MOST_TOKENS},
                "advantage": {"zero": "keep"},
                "env": [{"id": "_long_prompt_env", "args": {"letters": LETTERS}, "timeout_s": 600}],
                "env_servers": {"workers": workers},
            },
        }
    )


def start_servers(stack: ExitStack, folder: Path, model: Path) -> list[Any]:
    """Their URLs."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    urls = []
    for number in range(SERVER_PROCESSES):
        settings = {
            "seed": number,
            "delay_s": DELAY_S,
            "max_model_len": SEQ_LEN,
            "least_tokens": LEAST_TOKENS,
            "most_tokens": MOST_TOKENS,
            "letters": letters,
            "eos": tokenizer.eos_token_id,
            "num_servers": NUM_SERVERS // SERVER_PROCESSES,
            "log": str(folder / f"servers-{number}.npz"),
        }
        path = folder / f"servers-{number}.json"
        path.write_text(json.dumps(settings))
        process = subprocess.Popen(
            [sys.executable, str(HERE / "_flight_servers.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        stack.callback(process.communicate, timeout=60)
        assert process.stdout is not None
        urls += [SimpleNamespace(url=f"http://127.0.0.1:{p}/v1") for p in json.loads(process.stdout.readline())]
    return urls


def play(folder: Path, model: Path, workers: int, steps: int) -> dict[str, Any]:
    """One orchestrator, to its last batch.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    from tests.support.orchestrator_world import World

    folder.mkdir()
    log = os.environ["FLIGHT_LOG"] = str(folder / "watch.json")
    beyond = -(-IN_FLIGHT // BATCH) + 1  # so that new episodes follow until the end
    with ExitStack() as stack:
        servers = start_servers(stack, folder, model)
        idle = subprocess.Popen(
            [sys.executable, str(HERE / "_idle_loop.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        exp = experiment(model, folder / "run", workers, steps + beyond)
        with World(folder / "run", exp, servers) as world:
            world.start(in_shell=True, module="_flight_process")
            code = stop_after(world, steps)
            said = world.log.read_text()
        idle_pause_s = float(idle.communicate("")[0])
        if code:
            raise RuntimeError(f"the orchestrator failed ({code}):\n{said[-3000:]}")
        rows = world.metrics()
    return summary(json.loads(Path(log).read_text()), rows, folder) | {"idle_pause_s": idle_pause_s}


def stop_after(world: Any, steps: int) -> int:
    """End the orchestrator once it has reported so many batches; returns its exit code."""
    world.wait_for_batch(steps, max(RUN_S, 2 * steps * BATCH * DELAY_S / IN_FLIGHT))
    while world.process.poll() is None and not (world.metrics() and world.metrics()[-1]["step"] >= steps):
        time.sleep(0.5)
    time.sleep(1.0)
    world.process.terminate()
    code: int = world.wait(120.0)
    return code


def summary(watched: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    first, last = watched["marks"][WARM - 1], watched["marks"][-1]
    counted = [row for row in rows if "reward/mean" in row][WARM:]
    episodes = sum(row["episodes/completed"] for row in counted)
    seconds = last["time"] - first["time"]
    before = [row for row in watched["pauses"] if row[0] < first["time"]]
    within = [row for row in watched["pauses"] if first["time"] <= row[0] <= last["time"]]
    longest = {
        "start_pause_s": [row[1] for row in before],
        "start_busy_s": [row[2] for row in before],
        "longest_pause_s": [row[1] for row in within],
        "longest_busy_s": [row[2] for row in within],
        "longest_gc_s": [took for when, took in watched["collections"] if first["time"] <= when <= last["time"]],
    }
    _, _, in_pause_own_s, in_pause_all_s = max(within, key=lambda row: row[1], default=(0.0, 0.0, 0.0, 0.0))
    cpu_s = {where: last["cpu"][where] - first["cpu"][where] for where in last["cpu"]}
    return {
        "episodes": episodes,
        "episodes_per_s": episodes / seconds,
        "in_flight_mean": float(np.mean([row["queue/in_flight_mean"] for row in counted])),
        "stale_groups": sum(row["groups/stale"] for row in counted),
        "failed": sum(row["episodes/failed"] + row["episodes/timeout"] for row in counted),
        "batch_tokens": counted[-1]["batch/tokens"],
        "cpu_ms": {where: 1e3 * used / episodes for where, used in cpu_s.items()},
        "cpu_ms_all": 1e3 * sum(cpu_s.values()) / episodes,
        "cores": sum(cpu_s.values()) / seconds,
        **{name: max(values, default=0.0) for name, values in longest.items()},
        "in_pause_own_s": in_pause_own_s,
        "in_pause_all_s": in_pause_all_s,
        **memory(watched["memory"], first["time"]),
        **{f"seat_delay_{name}": value for name, value in seat_delays(folder, first["time"], last["time"]).items()},
    }


def memory(rows: list[tuple[float, int, int, int]], begin: float) -> dict[str, Any]:
    """Resident memory at the end, minute by minute from `begin` on, and its growth over the second half."""
    whole = np.array(rows)
    half, minutes = whole[len(whole) // 2 :], ((whole[:, 0] - begin) // 60).astype(int)
    starts = [int(np.argmax(minutes == n)) for n in range(minutes[-1] + 1) if n in minutes]
    found: dict[str, Any] = {"held_by_minute": whole[starts, 3].astype(int).tolist()}
    for name, column in (("rss", 1), ("rss_workers", 2)):
        slope = np.polyfit(half[:, 0] - half[0, 0], half[:, column], 1)[0]
        found[f"{name}_gib"] = half[-1, column] / 2**30
        found[f"{name}_mib_by_minute"] = np.round(whole[starts, column] / 2**20).astype(int).tolist()
        found[f"{name}_growth_mib_per_minute"] = 60 * slope / 2**20
    return found


def seat_delays(folder: Path, begin: float, end: float) -> dict[str, float]:
    """Seconds from a reply until the request that takes its place, of replies between two times."""
    logs = [np.load(path) for path in sorted(folder.glob("servers-*.npz"))]
    came, left = (np.sort(np.concatenate([log[name] for log in logs])) for name in ("came", "left"))
    taken = min(len(left), len(came) - IN_FLIGHT)
    delays = came[IN_FLIGHT : IN_FLIGHT + taken] - left[:taken]
    delays = delays[(left[:taken] >= begin) & (left[:taken] < end - 1.0)]
    p50_s, p99_s, max_s = np.quantile(delays, [0.5, 0.99, 1.0]).tolist()
    return {"p50_s": p50_s, "p99_s": p99_s, "max_s": max_s}


def run() -> dict[str, Any]:
    """Both ways."""
    from tests.support.tiny_tokenizer import make_tokenizer

    paths = [str(TOP), str(HERE), os.environ.get("PYTHONPATH", "")]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= quiet | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    steps, only = int(os.environ.get("PRIME_HPC_BENCH_STEPS", "4")), os.environ.get("PRIME_HPC_BENCH_ONLY", "")
    with tempfile.TemporaryDirectory(prefix="bench-flight-") as made:
        model = Path(made) / "model"
        make_tokenizer(model)
        sides = {
            name: play(Path(made) / name, model, workers, steps) for name, workers in MODES.items() if only in name
        }
    shape = {"servers": NUM_SERVERS, "in_flight": IN_FLIGHT, "reply_s": DELAY_S}
    shape |= {"ranks": RANKS, "batch": BATCH, "steps": steps}
    return {"shape": shape, "sides": sides, "load": os.getloadavg()[0]}


def render(figures: dict[str, Any]) -> str:
    """A paragraph for each side."""
    shape = figures["shape"]
    lines = [
        f"{shape['servers']} servers, {shape['in_flight']} episodes in flight, replies of {shape['reply_s']:.0f} s, "
        f"{shape['steps']} batches of {shape['batch']} for {shape['ranks']} ranks"
    ]
    for name, row in figures["sides"].items():

        def by_minute(key: str, row: dict[str, Any] = row) -> str:
            return " ".join(map(str, row[f"{key}_mib_by_minute"]))

        parts = ", ".join(f"{where} {used:.2f}" for where, used in row["cpu_ms"].items())
        lines += [
            f"{name}: {row['episodes_per_s']:.0f} episodes/s, {row['in_flight_mean']:.0f} in flight on average, "
            f"{row['stale_groups']:.0f} groups stale, {row['failed']:.0f} episodes failed",
            f"  {row['cpu_ms_all']:.2f} ms of CPU a sample ({parts}); {row['cores']:.2f} cores",
            f"  longest pause {row['longest_pause_s']:.3f} s (the loop computed {row['in_pause_own_s']:.3f} s, all "
            f"threads {row['in_pause_all_s']:.3f} s), at the start {row['start_pause_s']:.3f} s "
            f"(an idle loop beside: {row['idle_pause_s']:.3f} s); computing {row['longest_busy_s']:.3f} s, at the "
            f"start {row['start_busy_s']:.3f} s, collecting garbage {row['longest_gc_s']:.3f} s",
            f"  a free seat is taken after {row['seat_delay_p50_s']:.3f} s, p99 {row['seat_delay_p99_s']:.3f} s, "
            f"at most {row['seat_delay_max_s']:.3f} s",
            f"  memory {row['rss_gib']:.2f} GiB, {row['rss_growth_mib_per_minute']:+.1f} MiB a minute at the end; "
            f"workers {row['rss_workers_gib']:.2f} GiB ({row['rss_workers_growth_mib_per_minute']:+.1f})",
            f"  by minute: MiB {by_minute('rss')}; workers {by_minute('rss_workers')}; ended episodes held "
            f"{' '.join(map(str, row['held_by_minute']))}",
        ]
    return "\n".join(lines)
