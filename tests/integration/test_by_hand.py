"""Trainers by hand on two machines (two network namespaces): torchrun on each, killed, started again, as on one."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.runtime.process_tree import family, send
from prime_hpc.store.batches import list_batches
from prime_hpc.store.run_paths import RunPaths
from tests.faults.fork import NETWORK
from tests.integration.test_trainer import KEEP_ALL, environment, weights, write_batches
from tests.support.forked import TalkingProcess
from tests.support.orchestrator_world import varied_reply
from tests.support.runs import free_port
from tests.support.scripted_server import AdminServer
from tests.support.tiny_model import make_tiny_model
from tests.support.two_machines import Machine, two_machines

pytestmark = pytest.mark.slow
STEPS = 24
THIS = Machine("", "")
OURS = ["tests.faults.entry", "sft"]
TRAINER = ["tests.faults.entry", "trainer"]
ORCHESTRATOR = ["tests.faults.entry", "orchestrator"]
TORCHRUN = ["torch.distributed.run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("hand") / "model").parent
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    rows = [{"prompt": f"reverse {w} {i % 3}", "completion": w[::-1]} for i, w in enumerate(words * 8)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    tree = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "seq_len": 64,
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "orchestrator": {"sampling": {"max_tokens": 16}},
        "trainer": KEEP_ALL | {"batch_timeout_s": 30, "backend": "gloo"},
        "ckpt": {"interval": 4},
    }
    (folder / "rl.yaml").write_text(json.dumps({"kind": "rl", **tree}))
    data = {"path": str(folder / "data.jsonl"), "batch_size": 8}
    (folder / "sft.yaml").write_text(json.dumps({**tree, "sft": {"data": data}}))
    return folder


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def start(machine: Machine, command: list[str], **extra: str) -> TalkingProcess:
    environ = environment(**extra) | ({NETWORK: machine.network} if machine.network else {})
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        if name not in extra:
            environ.pop(name, None)
    return TalkingProcess(command, environ)


def ended(*processes: TalkingProcess) -> list[str]:
    """Wait for all; returns what each said. Where one does not end, it is shown where in its code each waits."""
    try:
        return [process.communicate(280)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError("after 280 s not all have ended" + "".join(map(stuck, processes))) from None
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def stuck(process: TalkingProcess) -> str:
    """End it; what it and its ranks have said, their stacks last."""
    code = process.poll()
    folder = Path(process.args[process.args.index("@") + 1]).parent
    if code is None:
        send(family(process.pid), signal.SIGABRT)  # faulthandler writes the stacks (`tests.faults.fork`)
        time.sleep(2)
    ranks = sorted(folder.glob(f"{process.args[process.args.index('--name') + 1]}/logs/*/trainer/*"))
    files = "".join(f"\n{path}:\n{path.read_text(errors='replace')[-9000:]}" for path in ranks)
    return f"\n--- {' '.join(process.args)}\n--- returned {code}, said:\n{process.said()[-9000:]}{files}"


def kill_when(path: Path, process: TalkingProcess) -> None:
    """SIGKILL a torchrun with its ranks as soon as `path` is there."""
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)


def losses(paths: RunPaths) -> dict[int, float]:
    """Of each step; a step that was taken again, as it was taken last."""
    return {row["step"]: row["loss"] for row in read_metrics(paths.metrics("trainer"))}


@pytest.mark.exhaustive
def test_supervised_on_two_machines_killed_and_started_again(folder: Path, machines: tuple[Machine, Machine]) -> None:
    """First as `sft` with torchrun's flags, then as torchrun itself: to the last bit one machine's run of two ranks."""
    words = ["@", str(folder / "sft.yaml"), "--name"]
    alone = start(THIS, [*OURS, "--nproc-per-node", "2", *words, "alone"])
    said = ended(alone)
    assert alone.returncode == 0, said[0][-3000:]
    port, paths = free_port(), RunPaths(folder / "both")
    where = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(port)}
    each = [
        start(m, [*OURS, "--nnodes", "2", "--node-rank", str(n), "--nproc_per_node=1", *words, "both"], **where)
        for n, m in enumerate(machines)
    ]
    kill_when(paths.checkpoints / "step_4", each[1])
    said = ended(*each)
    assert each[0].returncode == 1, said[0][-3000:]
    assert "resume it with --ckpt.resume-step latest" in ended(start(machines[0], [*OURS, *words, "both"]))[0]
    meets = ["--nnodes=2", "--nproc-per-node", "1", f"--rdzv_endpoint={machines[0].address}:{port}"]
    program = ["-m", "prime_hpc.trainer.main", "sft", *words, "both", "--ckpt.resume-step", "latest"]
    meets += ["--local-ranks-filter", "0", "--redirects", "3", "--tee", "3"]  # torchrun's own: console and files
    each = [
        start(m, [*TORCHRUN, *meets, "--log-dir", str(folder / f"torchrun_{n}"), "--node-rank", str(n), *program])
        for n, m in enumerate(machines)
    ]
    said = ended(*each)
    assert [process.returncode for process in each] == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert losses(paths) == losses(RunPaths(folder / "alone")) and len(losses(paths)) == STEPS
    a, b = weights(RunPaths(folder / "alone"), STEPS), weights(paths, STEPS)
    assert all(torch.equal(a[name], b[name]) for name in a)
    log = (paths.logs(1, "trainer") / "rank_0.log").read_text()
    assert "resumed from" in log and (paths.logs(1, "trainer") / "rank_1.log").is_file()
    for n in (0, 1):
        own = sorted((folder / f"torchrun_{n}").glob("*/attempt_0/0/*.log"))
        assert [path.name for path in own] == ["stderr.log", "stdout.log"]
    console = "".join(path.read_text() for path in (folder / "torchrun_0").glob("*/attempt_0/0/*.log"))
    assert "resumed from" in console and "resumed from" in said[0]


def test_another_rate_from_an_earlier_step_on_makes_later_versions_anew(folder: Path) -> None:
    """Nobody but the trainer itself takes those of before out of the way: kept where a later checkpoint is of them."""
    paths = RunPaths(folder / "rates")
    words = ["prime_hpc.trainer.main", "sft", "@", str(folder / "sft.yaml"), "--name", "rates"]
    words += ["--sft.save-interval", "1", "--max-steps", "6"]
    found = []
    for more in ([], ["--ckpt.resume-step", "4", "--trainer.optim.lr", "0.01"]):
        one = start(THIS, [*words, *more])
        said = ended(one)
        assert one.returncode == 0, said[0][-3000:]
        found.append([weights(paths, step) for step in (4, 5, 6)])
    before, after = found
    for step, (then, now) in enumerate(zip(before, after, strict=True), 4):
        assert all(torch.equal(then[name], now[name]) for name in then) == (step == 4)
    kept = sorted(path.name[:22] for path in paths.weights.iterdir() if path.name.startswith("set-aside"))
    assert kept == ["set-aside-step_000005-", "set-aside-step_000006-"]


def test_reinforced_on_two_machines_from_batches_in_files(folder: Path, machines: tuple[Machine, Machine]) -> None:
    words = ["@", str(folder / "rl.yaml"), "--max-steps", "3", "--name"]
    alone, both = RunPaths(folder / "rl_alone"), RunPaths(folder / "rl_both")
    for paths in (alone, both):
        write_batches(paths, range(1, 4), 2)
    one = start(THIS, [*TRAINER, "--nproc-per-node", "2", *words, "rl_alone"])
    meets = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint", f"{machines[0].address}:{free_port()}"]
    each = [start(m, [*TRAINER, *meets, f"--node-rank={n}", *words, "rl_both"]) for n, m in enumerate(machines)]
    said = ended(one, *each)
    assert [process.returncode for process in (one, *each)] == [0, 0, 0], "".join(text[-3000:] for text in said)
    assert losses(alone) == losses(both) and len(losses(both)) == 3


def test_machines_that_were_told_differently_end_with_the_key(folder: Path, machines: tuple[Machine, Machine]) -> None:
    words = ["@", str(folder / "sft.yaml"), "--name", "unlike"]
    meets = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint", f"{machines[0].address}:{free_port()}"]
    other = [[], ["--trainer.optim.lr", "0.5"]]
    each = [start(m, [*OURS, *meets, f"--node-rank={n}", *words, *other[n]]) for n, m in enumerate(machines)]
    said = ended(*each)
    assert [process.returncode for process in each] == [1, 1]
    assert (
        "trainer.optim.lr differ from rank 0's"
        in said[1] + (RunPaths(folder / "unlike").logs(1, "trainer") / "rank_1.log").read_text()
    )
    assert not (folder / "unlike" / "checkpoints").exists()


@pytest.mark.exhaustive
def test_two_programs_that_share_files_alone_and_are_started_again(folder: Path) -> None:
    """One makes batches with a server, the other trains on them and leaves versions: configs/OTHER_COMMANDS.md."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    paths = RunPaths(folder / "two")
    with AdminServer(tokenizer, varied_reply(1)) as server:
        words = ["@", str(folder / "rl.yaml"), "--name", "two", "--ckpt.interval", "2", "--async-level", "1"]
        generates = ["--orchestrator.env", "[{'id': 'reverse-text'}]", "--orchestrator.batch-size", "8"]
        generates += ["--rollouts-per-example", "4", "--client.base-url", server.url]
        for last, more in ((2, []), (4, ["--ckpt.resume-step", "latest"])):
            steps = ["--max-steps", str(last), *more]
            each = [
                start(THIS, [*ORCHESTRATOR, *words, *generates, *steps]),
                start(THIS, [*TRAINER, *words, *steps]),
            ]
            said = ended(*each)
            assert [process.returncode for process in each] == [0, 0], "".join(text[-3000:] for text in said)
            assert server.version == last
    assert sorted(losses(paths)) == [1, 2, 3, 4] and list_batches(paths) == [1, 2, 3, 4]
    assert (paths.checkpoints / "step_4" / "orchestrator").is_dir()
