"""One trainer, many runs, as processes: what is wrong with one is its own, a killed trainer goes on exactly, and the
whole thing with orchestrators, typed as a user types it."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from prime_hpc.store.child_runs import ChildState, read_state
from prime_hpc.store.run_paths import RunPaths
from tests.support import forked
from tests.support.many_runs import (
    Feeder,
    batch_of,
    broken,
    largest_difference,
    log_of,
    make_child,
    make_parent,
    order_of,
    put_batch,
    put_batches,
    run_trainer,
    start_trainer,
    versions,
)
from tests.support.named_server import NamedServer
from tests.support.runs import ENVIRONMENT, command, rows, wait_until
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def state_of(paths: RunPaths) -> ChildState:
    state = read_state(paths.root)
    assert state is not None, f"{paths.root} has no state"
    return state


def test_what_is_wrong_with_one_run_ends_that_run_alone(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "parent"
    parent = make_parent(directory, model, trainer={"profile": {"first_step": 2, "last_step": 3}})
    names = ("good", "late", "infinite", "torn", "foreign", "own")
    runs = {name: make_child(parent, directory, f"run_{name}", seed=i) for i, name in enumerate(names)}
    for i, (name, paths) in enumerate(runs.items()):
        put_batches(paths, i, range(1, 2 if name in ("infinite", "late") else 4))
    put_batch(runs["infinite"], 2, broken(batch_of(2, 2)), 1)
    shutil.copytree(runs["good"].root, directory / "run_copy")  # the same run twice
    rank_file = runs["torn"].rollouts_step(1) / "rank_0000.safetensors"
    rank_file = rank_file if rank_file.exists() else next(runs["torn"].rollouts_step(1).glob("*0*"))
    content = bytearray(rank_file.read_bytes())
    content[-1] ^= 1
    rank_file.write_bytes(content)
    for name, old, new in (
        ("foreign", "rank: 4", "rank: 8"),
        ("late", "batch_timeout_s: 60", "batch_timeout_s: 3"),
        ("own", "type: aipo", "type: no_such_module:loss"),
    ):
        text = runs[name].run_yaml.read_text()
        assert old in text
        runs[name].run_yaml.write_text(text.replace(old, new))
    (directory / "run_half" / "configs").mkdir(parents=True)
    assert run_trainer(directory) == 0, log_of(directory)
    phases = {name: state_of(paths).phase for name, paths in runs.items()}
    assert phases == dict.fromkeys(names, "failed") | {"good": "done"}
    reasons = {name: state_of(paths).reason or "" for name, paths in runs.items()}
    assert "batch_timeout_s" in reasons["late"] and "inf" in reasons["infinite"] and "xxh3" in reasons["torn"]
    assert "model.lora.rank" in reasons["foreign"] and "cannot import 'no_such_module:loss'" in reasons["own"]
    assert sorted(versions(runs["good"])) == [1, 2, 3] and sorted(versions(runs["infinite"])) == [1]
    assert (runs["infinite"].failed_step(2) / "run.yaml").exists()  # kept for a replay
    assert len(list((runs["good"].root / "profile" / "attempt_1").iterdir())) == 2  # a trace a step
    assert "run_half is passed over" in log_of(directory)
    copy = read_state(directory / "run_copy")
    assert copy is None or copy.phase == "failed"  # a trainer that ends before it has settled says nothing
    assert not (directory / "run_half" / "state.json").exists()


def is_deleted(run_dir: Path) -> bool:
    """Delete it; the trainer writes there meanwhile, so that this may have to be done twice."""
    shutil.rmtree(run_dir, ignore_errors=True)
    return not run_dir.exists()


def test_a_killed_trainer_goes_on_exactly_and_a_deleted_run_is_left_out(tmp_path: Path, model: Path) -> None:
    seeds = {"run_a": 0, "run_b": 1, "run_c": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for directory in (whole, cut):
        parent = make_parent(directory, model, slots=3 if directory == cut else 2)
        for name, seed in seeds.items():
            if name != "run_c" or directory == cut:
                make_child(parent, directory, name, seed=seed, max_steps=6, ckpt={"interval": 2, "keep_last": 1})
    with Feeder(whole, seeds):
        assert run_trainer(whole) == 0, log_of(whole)
    with Feeder(cut, seeds, last={"run_a": 5, "run_c": 2}) as feeder:
        process = start_trainer(cut, PRIMEHPC_INCARNATION="1")
        wait_until(lambda: len(versions(RunPaths(cut / "run_c"))) == 2, 200, "run_c took two steps")
        wait_until(partial(is_deleted, cut / "run_c"), 200, "run_c is deleted")
        wait_until(lambda: "run_c: removed" in log_of(cut), 200, "that it is gone was noticed")
        wait_until(lambda: len(versions(RunPaths(cut / "run_a"))) >= 3, 200, "run_a took three steps")
        process.send_signal(signal.SIGKILL)
        process.wait(200)
        feeder.release("run_a")
        assert run_trainer(cut, PRIMEHPC_INCARNATION="2", PRIMEHPC_ATTEMPT="2") == 0, log_of(cut)
    rows = [json.loads(line) for line in (whole / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert sorted({row["run"] for row in rows}) == ["run_a", "run_b"] and len(rows) == 12
    assert all(0 < row["time/forward_backward"] <= row["time/step"] for row in rows), "for the parent's report"
    for name in ("run_a", "run_b"):
        state = state_of(RunPaths(cut / name))
        assert (state.phase, state.step) == ("done", 6)
        assert state.parent_incarnation == 2 or name == "run_b"  # which the first attempt may have finished
        saved = [p.name for p in (cut / name / "checkpoints").iterdir() if p.name.startswith("step")]
        assert saved == ["step_6"]
        mine, expected = versions(RunPaths(cut / name)), versions(RunPaths(whole / name))
        assert largest_difference({k: mine[k] for k in expected if k in mine}, expected) == 0.0
    assert state_of(RunPaths(cut / "run_a")).resume_step in (2, 4)
    assert not (cut / "run_c").exists()
    assert set(order_of(cut)) == set(seeds)


def experiment_files(folder: Path, model: Path, url: str) -> dict[str, Path]:
    """A parent's file and those of its runs, as a user would write them."""
    parent = {
        "output_dir": str(folder),
        "name": "many",
        "seq_len": 128,
        "model": {"name": str(model), "dtype": "float32", "lora": {"rank": 4}},
        "trainer": {"max_concurrent_runs": 2, "runs_idle_timeout_s": 15, "threads_per_rank": 1},
        "orchestrator": {
            "batch_size": 4,
            "rollouts_per_example": 2,
            "sampling": {"max_tokens": 24},
            "client": {"base_url": url},
            "advantage": {"type": "none", "zero": "keep"},
        },
    }
    runs = {
        "a": {"max_steps": 3, "trainer": {"optim": {"lr": 1e-3}}, "orchestrator": {"env": [{"id": "reverse-text"}]}},
        "b": {"max_steps": 2, "seed": 7, "orchestrator": {"env": [{"id": "reverse-text"}]}},
        "nan": {"max_steps": 2, "orchestrator": {"env": [NAN_REWARDS]}},
    }
    files = {}
    for name, tree in {"many": parent, **runs}.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(tree))
    return files


NAN_REWARDS = {"id": "tests.support.trouble_taskset", "args": {"nan_every": 1}}


def test_orchestrators_come_and_go_with_their_runs(tmp_path: Path, model: Path) -> None:
    with NamedServer.of_model(model) as server:
        files = experiment_files(tmp_path, model, server.url)
        parent = tmp_path / "many"
        for name in ("a", "nan"):
            added = command("prime-hpc", "runs", "add", files["many"], files[name])
            assert added.returncode == 0, added.stderr
        again = command("prime-hpc", "runs", "add", files["many"], files["a"])
        assert again.returncode == 2 and "exists already" in again.stderr
        log = tmp_path / "rl.log"
        with forked.background("rl", "@", files["many"], log=log, env=ENVIRONMENT) as process:
            wait_until(lambda: rows(parent / "run_a", "trainer") or process.poll() is not None, 240, "run_a trains")
            added = command("prime-hpc", "runs", "add", parent, files["b"], "--id", "second")
            assert added.returncode == 0, added.stderr
            wait_until(lambda: process.poll() is not None, 300, f"the end\n{log.read_text()[-2000:]}")
        output = log.read_text()
    assert process.returncode == 0, output[-5000:]
    a, second = state_of(RunPaths(parent / "run_a")), state_of(RunPaths(parent / "run_second"))
    assert (a.phase, a.step, second.phase, second.step) == ("done", 3, "done", 2)
    nan = state_of(RunPaths(parent / "run_nan"))
    assert nan.phase == "failed" and "orchestrator" in (nan.reason or "")
    assert sorted(versions(RunPaths(parent / "run_a"))) and sorted(versions(RunPaths(parent / "run_second")))
    asked = {request["model"] for request in server.requests}
    assert {"run_a", "run_second"} <= asked and "policy" not in asked
    assert {name for name, _, _ in server.updates} == {"run_a", "run_second"}
    assert not server.versions  # every name was forgotten when its run was over
    listed = json.loads(command("prime-hpc", "runs", "list", parent, "--json").stdout)
    assert {row["name"]: row["phase"] for row in listed} == {"run_a": "done", "run_nan": "failed", "run_second": "done"}
    attempts = [json.loads(line) for line in (parent / "run_a" / "attempts.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in attempts] == ["completed"]
    assert "run_a: done 3/3" in output and "reward.png" not in output
    shown = command("prime-hpc", "status", parent).stdout
    assert "run_a" in shown and "done 3/3" in shown
