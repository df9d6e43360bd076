"""`prime-hpc runs`: what a child inherits, what is refused, and how it is listed, removed and brought back."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.child_config import check_child
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.launch.prepare import claim_directory
from prime_hpc.launch.prepare import write as write_run
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.child_runs import STATE, ChildState, list_children, read_state, write_state
from prime_hpc.store.run_paths import RunPaths
from tests.support.checkpoints import make_checkpoint


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An experiment file whose run is in `tmp_path/many`."""
    tree = {
        "output_dir": str(tmp_path),
        "name": "many",
        "seq_len": 64,
        "max_steps": 9,
        "model": {"name": "some/model", "lora": {"rank": 8}},
        "trainer": {"max_concurrent_runs": 2, "optim": {"lr": 1e-3}},
        "ckpt": {"interval": 5},
        "orchestrator": {"sampling": {"max_tokens": 8}, "env": [{"id": "reverse-text"}]},
    }
    path = tmp_path / "many.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def write(folder: Path, name: str, **tree: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_child_inherits_and_states_its_own(tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture) -> None:
    child = write(tmp_path, "fast", max_steps=3, trainer={"optim": {"lr": 0.5}})
    assert main(["runs", "add", str(parent), str(child), "--seed", "4", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    made = read_experiment(Path(row["path"]) / "run.yaml")
    assert (row["name"], made.name, made.run_dir) == ("run_fast", "run_fast", tmp_path / "many" / "run_fast")
    assert (made.max_steps, made.seed, made.trainer.optim.lr, made.trainer.max_concurrent_runs) == (3, 4, 0.5, 1)
    assert made.model.lora is not None and made.model.lora.rank == 8
    assert made.ckpt is not None and made.ckpt.interval == 5 and made.orchestrator.env[0].id == "reverse-text"
    assert list_children(tmp_path / "many") == ["run_fast"]
    assert main(["runs", "list", str(tmp_path / "many")]) == 2
    assert "has not been submitted yet" in capsys.readouterr().err
    assert {p.name for p in (tmp_path / "many").iterdir()} == {"run_fast"}  # nothing half-made stays


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"name": "other/model"}}, "model.name"),
        ({"model": {"lora": {"rank": 4}}}, "model.lora.rank"),
        ({"seq_len": 128}, "seq_len"),
        ({"trainer": {"num_ranks": 2}}, "trainer.num_ranks"),
        ({"trainer": {"loss": {"kl": {"model": "a/b"}}}}, "trainer.loss.kl.model"),
        ({"ckpt": {"resume_step": "latest"}}, "ckpt.resume_step"),
        ({"trainer": {"optim": {"lrr": 1}}}, "trainer.optim.lrr"),
    ],
)
def test_what_cannot_share_the_trainer_is_refused(
    tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture, tree: dict, words: str
) -> None:
    child = write(tmp_path, "bad", **tree)
    assert main(["runs", "add", str(parent), str(child)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "many").exists()


def test_ids_are_unique_and_plain(tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture) -> None:
    child = write(tmp_path, "c", max_steps=1)
    assert main(["runs", "add", str(parent), str(child), "--id", "one"]) == 0
    assert main(["runs", "add", str(parent), str(child), "--id", "run_one"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["runs", "add", str(parent), str(child), "--id", "../x"]) == 2
    assert main(["runs", "add", str(parent)]) == 2
    single = write(tmp_path, "single", orchestrator={"env": [{"id": "reverse-text"}]})
    assert main(["runs", "add", str(single), str(child)]) == 2
    assert "trainer.max_concurrent_runs" in capsys.readouterr().err


def test_list_remove_and_resume(tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture) -> None:
    child, many = write(tmp_path, "c", max_steps=4), tmp_path / "many"
    for name in ("new", "failed", "done"):
        assert main(["runs", "add", str(parent), str(child), "--id", name]) == 0
    write_state(many / "run_failed", ChildState("failed", "no batch", step=2, max_steps=4))
    write_state(many / "run_done", ChildState("done", step=4, max_steps=4, num_tokens=1234))
    capsys.readouterr()
    assert main(["runs", "list", str(parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["run_done", "done", "4/4"],
        ["run_failed", "failed", "2/4"],
        ["run_new", "new", "-"],
    ]
    assert lines[2].endswith("no batch")
    assert main(["runs", "resume", str(parent), "failed"]) == 0 and read_state(many / "run_failed") is None
    capsys.readouterr()
    assert main(["runs", "resume", str(parent), "done"]) == 2
    assert f"raise max_steps in {many / 'run_done' / 'run.yaml'}" in capsys.readouterr().err
    assert main(["runs", "resume", str(parent), "new"]) == 2
    assert main(["runs", "remove", str(parent), "nobody"]) == 2
    assert "run_done, run_failed, run_new" in capsys.readouterr().err
    assert main(["runs", "remove", str(parent), "new"]) == 0 and not (many / "run_new").exists()
    assert main(["runs", "remove", str(parent), "done"]) == 0 and (many / "run_done" / STATE).exists()
    assert main(["runs", "remove", str(parent), "done", "--delete"]) == 0
    assert list_children(many) == ["run_failed"]
    write_state(many / "run_failed", ChildState("training", step=2, max_steps=4))
    assert main(["runs", "remove", str(parent), "failed", "--timeout", "0.1"]) == 2  # no trainer is there to obey
    assert not (many / "run_failed" / "STOP").exists()


def test_a_child_whose_trainer_has_ended(tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture) -> None:
    """Nobody obeys now, which is said at once: it trains in no slot, and a STOP waits for the trainer."""
    child, many = write(tmp_path, "c", max_steps=4), tmp_path / "many"
    assert main(["runs", "add", str(parent), str(child)]) == 0
    write_state(many / "run_c", ChildState("training", slot=0, step=2, max_steps=4))
    attempt = Attempt(1, 1, 5.0, "first start")
    write_attempt(many / "attempts.jsonl", attempt)
    assert main(["runs", "remove", str(parent), "c", "--timeout", "0.1"]) == 2
    assert "did not end within" in capsys.readouterr().err
    assert main(["runs", "list", str(parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run_c", "training", "2/4", "0", "0"]
    write_attempt(many / "attempts.jsonl", replace(attempt, ended=6.0, outcome="interrupted"))
    assert main(["runs", "list", str(parent)]) == 0
    assert (
        capsys.readouterr().out.splitlines()[1].startswith("run_c  at rest  2/4   -     0       its trainer does not")
    )
    assert main(["runs", "resume", str(parent), "c"]) == 2
    back = f"(`prime-hpc resume {many}`, if the job does not come back itself)"
    assert f"it is training, but its trainer does not run {back}" in capsys.readouterr().err
    assert main(["runs", "remove", str(parent), "c"]) == 0 and (many / "run_c" / "STOP").exists()
    assert f"it was at step 2 and ends when its trainer is back {back}" in capsys.readouterr().out
    assert main(["runs", "list", str(parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("its trainer does not run, and ends it when it is back")
    assert main(["runs", "resume", str(parent), "c"]) == 0 and not (many / "run_c" / "STOP").exists()
    assert capsys.readouterr().out == f"run_c: it was to end; it is taken up when its trainer is back {back}\n"
    assert main(["runs", "list", str(parent)]) == 0
    assert capsys.readouterr().out.endswith("its trainer does not run, and goes on with it when it is back\n")
    assert main(["runs", "add", str(parent), str(child), "--id", "late"]) == 0
    assert capsys.readouterr().out == f"added {many}/run_late; it is taken up when its trainer is back {back}\n"
    assert main(["runs", "list", str(parent)]) == 0
    assert capsys.readouterr().out.endswith("its trainer does not run, and takes it up when it is back\n")
    assert main(["runs", "remove", str(parent), "c", "--delete"]) == 0 and list_children(many) == ["run_late"]


def test_a_parent_that_starts_otherwise_takes_its_runs_along(tmp_path: Path, parent: Path) -> None:
    """Ranks, engines and the most of a micro-batch are the parent's as it starts; what an adapter is of is refused."""
    child, many = write(tmp_path, "c", max_steps=4, trainer={"micro_batch_tokens": 512}), tmp_path / "many"
    large = ["--trainer.micro-batch-tokens", "512"]
    write_run(load_experiment([str(parent), *large], "submit"), many)
    for name in ("going", "over", "to_end", "broken"):
        assert main(["runs", "add", str(many), str(child), "--id", name, "--seed", "4"]) == 0
    (many / "run_broken" / "run.yaml").write_text("half of a fi")
    write_state(many / "run_over", ChildState("done", step=4, max_steps=4))
    (many / "run_to_end" / "STOP").touch()
    for name in ("going", "over", "to_end"):
        lora = read_experiment(many / f"run_{name}" / "run.yaml").model.lora
        assert lora is not None
        paths = RunPaths(many / f"run_{name}")
        write_batch(paths, 2, [RankBatch.empty(1)], state={"step": 2, "prompts": {"seed": 4}})
        make_checkpoint(paths, 2, meta={"adapter": lora.model_dump(mode="json")})
    single = tmp_path / "single"
    for copy in (single, many / "run_copy"):
        shutil.copytree(many / "run_over", copy)
    (many / "run_link").symlink_to(single)

    loaded = load_experiment([str(parent), "--trainer.num-ranks", "2", "--trainer.micro-batch-tokens", "256"], "submit")
    write_run(loaded, many)
    for name in ("going", "over", "to_end"):
        made = read_experiment(many / f"run_{name}" / "run.yaml")
        check_child(loaded.experiment, made)
        assert (made.trainer.num_ranks, made.trainer.micro_batch_tokens, made.seed, made.max_steps) == (2, 256, 4, 4)
    for path in (single, many / "run_copy"):
        assert read_experiment(path / "run.yaml").trainer.num_ranks == 1, "no run of this parent"
    before = {path: path.read_bytes() for path in many.glob("**/run.yaml")}
    for flags, words in (
        (["--model.lora.rank", "4"], "step_2: model.lora: rank was 8, is 4"),
        (["--seq-len", "32"], "seq_len: run_going: 64 tokens are more than the engines' 32"),
    ):
        with pytest.raises(ConfigError) as refused:
            write_run(load_experiment([str(parent), *flags], "submit"), many)
        assert words in str(refused.value)
        assert {problem.message.partition(":")[0] for problem in refused.value.problems} == {"run_going"}
    assert {path: path.read_bytes() for path in many.glob("**/run.yaml")} == before


def test_one_run_stays_one_and_many_stay_many(
    tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run as a parent would end with nothing trained; many as one would be told to start over, with --clean."""
    monkeypatch.chdir(tmp_path)
    one = ["--name", "one", "--trainer.max-concurrent-runs", "1"]
    for flags, other in ((one, "2"), ([], "1")):
        loaded = load_experiment([str(parent), *flags], "submit")
        run_dir = loaded.experiment.run_dir
        write_run(loaded, run_dir)
        make_checkpoint(RunPaths(run_dir), 2)
        assert main(["resume", str(run_dir), "--trainer.max-concurrent-runs", other]) == 2
        assert f"{run_dir} holds {'one run' if flags else 'many runs'}: start another" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="one holds one run, which is none of many"):
        claim_directory(load_experiment([str(parent), "--name", "one"], "submit").experiment, tmp_path / "one")


def test_another_machine_may_do_the_same_under_the_same_process_id(
    tmp_path: Path, parent: Path, capsys: pytest.CaptureFixture
) -> None:
    child, many = write(tmp_path, "c", max_steps=4), tmp_path / "many"
    theirs = [many / f".{what}-run_c-{os.getpid()}" for what in ("adding", "removed")]
    for folder in theirs:
        (folder / "configs").mkdir(parents=True)
    assert main(["runs", "add", str(parent), str(child)]) == 0, capsys.readouterr().err
    assert main(["runs", "remove", str(parent), "c"]) == 0 and list_children(many) == []
    assert sorted(many.iterdir()) == sorted(theirs)


def test_a_parent_that_cannot_train_many_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for tree, words in (
        ({}, "model.lora"),
        ({"model": {"lora": {}}, "kind": "sft"}, "only RL"),
        ({"model": {"lora": {}}, "trainer": {"max_concurrent_runs": 2, "bench": True}}, "trainer.bench"),
    ):
        file = write(tmp_path, "p", **({"trainer": {"max_concurrent_runs": 2}} | tree))
        assert main(["runs", "list", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_a_flag_in_place_of_the_run_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["runs", "list", "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "usage: prime-hpc runs" in said and "no run" not in said
