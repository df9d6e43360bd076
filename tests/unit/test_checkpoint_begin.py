"""Where an attempt goes on: asked for, newest, another run's; and every bad checkpoint is refused with its reason."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint import import_checkpoint
from prime_hpc.store.checkpoint.checkpoints import note_saved, resolve_resume
from prime_hpc.store.checkpoint.newest import read_pointer
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.supervisor.attempt.start import begin_attempt
from tests.support.checkpoints import SHARD, damage, make_checkpoint, make_weights

MODEL = {"architectures": ["TinyForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}


def model_dir(folder: Path, tokenizer: str = "a", **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {tokenizer: 0}}, "added_tokens": []}))
    return folder


def experiment(tmp_path: Path, name: str = "x", **values: object) -> Experiment:
    model = tmp_path / "model"
    if not model.exists():
        model_dir(model)
    base = {
        "output_dir": str(tmp_path),
        "name": name,
        "max_steps": 40,
        "model": {"name": str(model)},
        "supervisor": {"recheck_s": 0.05, "read_timeout_s": 0.3},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    exp = Experiment.model_validate({**base, **values})
    exp.run_dir.mkdir(exist_ok=True)
    return exp


def life(exp: Experiment) -> int | None:
    """One attempt that ends at once; the step that it went on from."""
    attempt = begin_attempt(exp, exp.run_dir)
    path = exp.run_dir / "attempts.jsonl"
    path.write_text(path.read_text().replace('"ended": null', '"ended": 1.0'))
    return attempt.resume_step


def train(exp: Experiment, *steps: int, incarnation: int = 1) -> RunPaths:
    """What an attempt that saved after these steps leaves behind."""
    from prime_hpc.store.model.fingerprint import model_identity

    paths = RunPaths(exp.run_dir, exp.ckpt.path if exp.ckpt else None)
    for step in steps:
        if exp.kind == "rl":
            make_weights(paths, step, incarnation)
        meta: dict[str, object] = {"identity": model_identity(Path(exp.model.name))}
        meta["optimizer"] = exp.trainer.optim.state
        if exp.model.lora is not None:
            meta["adapter"] = exp.model.lora.model_dump(mode="json") | {"base weights": "a sum"}
        make_checkpoint(paths, step, kind=exp.kind, incarnation=incarnation, meta=meta)
    return paths


def no_links(number: int = errno.EXDEV) -> None:
    raise OSError(number, os.strerror(number))


def checkpoints(exp: Experiment) -> list[int]:
    return list_steps(exp.run_dir / "checkpoints", digits=0)


def test_a_later_life_takes_the_newest_whole_one(tmp_path: Path) -> None:
    exp = experiment(tmp_path, ckpt={})
    assert life(exp) is None
    paths = train(exp, 10, 20, 30)
    damage(paths.checkpoint_step(30), "flip")  # sizes are right: only the sums tell
    assert life(exp) == 20
    assert checkpoints(exp) == [10, 20]
    damage(paths.checkpoint_step(20), "flip")
    assert life(exp) == 10


def test_weights_that_are_lost_are_no_loss(tmp_path: Path) -> None:
    """The checkpoint holds the parameters: the trainer publishes the version again."""
    exp = experiment(tmp_path, ckpt={})
    assert life(exp) is None
    paths = train(exp, 10, 20)
    shutil.rmtree(paths.weights_step(20))
    assert life(exp) == 20 and not paths.weights_step(20).exists()
    make_weights(paths, 20, 2)
    (paths.weights_step(20) / "model.safetensors").write_bytes(b"half")
    assert life(exp) == 20 and not paths.weights_step(20).exists()  # half of one would be in the way


def test_a_checkpoint_saved_on_a_signal_is_found_though_checkpoints_are_off(tmp_path: Path) -> None:
    exp = experiment(tmp_path)
    assert life(exp) is None
    train(exp, 7)
    assert life(exp) == 7


def test_a_request_is_obeyed_once_a_submission(tmp_path: Path) -> None:
    exp = experiment(tmp_path, ckpt={"resume_step": 10})
    train(experiment(tmp_path), 10, 20)
    assert life(exp) == 10
    assert checkpoints(exp) == [10]
    train(exp, 15, 25)
    assert life(exp) == 25  # the same job, requeued
    (exp.run_dir / "lock.json").write_text('{"time": "later"}')  # submitted again
    assert life(exp) == 10
    assert checkpoints(exp) == [10]
    damage(RunPaths(exp.run_dir).checkpoint_step(10), "truncate")
    with pytest.raises(ConfigError, match="no checkpoint is left to go on from .*read twice.*start over with --clean"):
        life(exp)


def test_latest_and_minus_one(tmp_path: Path) -> None:
    train(experiment(tmp_path), 10, 20)
    assert life(experiment(tmp_path, ckpt={"resume_step": "latest"})) == 20
    config = Experiment.model_validate({"ckpt": {"resume_step": -1}}).ckpt
    assert config is not None and config.resume_step == "latest"


def test_nothing_left_to_do_and_steps_that_do_not_exist(tmp_path: Path) -> None:
    train(experiment(tmp_path), 10, 20)
    with pytest.raises(ConfigError, match=r"ckpt.resume_step = 7: .*no checkpoint of step 7 \(steps there: 10, 20\)"):
        life(experiment(tmp_path, ckpt={"resume_step": 7}))
    # by number it is a mistake, said before anything is written; "latest" goes on if there is anything left
    with pytest.raises(ValueError, match=r"ckpt.resume_step \(20\) .* max_steps \(20\): .*raise --max-steps"):
        experiment(tmp_path, max_steps=20, ckpt={"resume_step": 20})
    assert life(experiment(tmp_path, max_steps=20, ckpt={"resume_step": "latest"})) == 20
    with pytest.raises(ConfigError, match="nothing is left to do; raise --max-steps"):
        life(experiment(tmp_path, "y", max_steps=15, ckpt={"resume_step": tmp_path / "x"}))
    assert checkpoints(experiment(tmp_path)) == [10, 20]


@pytest.mark.parametrize("kind", ["truncate", "flip", "manifest", "missing", "format"])
def test_bad_checkpoints_are_refused_or_skipped(tmp_path: Path, kind: str) -> None:
    paths = train(experiment(tmp_path), 10, 20)
    damage(paths.checkpoint_step(20), kind)
    words = {"format": "manifest format 1, found format 99", "manifest": "a manifest, found No such file"}
    with pytest.raises(
        ConfigError, match=rf"step 20 is damaged: .*{words.get(kind, 'expected')}.*other whole ones: 10"
    ):
        life(experiment(tmp_path, ckpt={"resume_step": 20}))
    assert life(experiment(tmp_path, ckpt={"resume_step": "latest"})) == 10


@pytest.mark.parametrize("place", ["run", "checkpoints", "step"])
def test_starts_from_another_run(tmp_path: Path, place: str) -> None:
    other = experiment(tmp_path, "other")
    source = train(other, 10, 20)
    path = {"run": source.root, "checkpoints": source.checkpoints, "step": source.checkpoint_step(10)}[place]
    step = 10 if place == "step" else 20
    exp = experiment(tmp_path, "mine", ckpt={"resume_step": str(path)})
    assert life(exp) == step
    mine = RunPaths(exp.run_dir)
    info = resolve_resume(mine.checkpoints, step)
    assert info.manifest.incarnation == 1
    assert info.manifest.meta["adopted_from"] == str(source.checkpoint_step(step))
    assert info.orchestrator_state is not None
    assert json.loads(info.orchestrator_state.read_text())["step"] == step
    assert verify_artifact(mine.weights_step(step), deep=True).version == step
    assert (info.path / SHARD).stat().st_ino == (source.checkpoint_step(step) / SHARD).stat().st_ino
    shutil.rmtree(source.root)  # from now on it is this run's own
    assert life(exp) == step
    train(exp, step + 5, incarnation=2)
    assert life(exp) == step + 5


def test_takes_copies_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = train(experiment(tmp_path, "other"), 10)

    monkeypatch.setattr(files.os, "link", lambda *_: no_links())
    exp = experiment(tmp_path, "mine", ckpt={"resume_step": str(source.root)})
    assert life(exp) == 10
    mine = RunPaths(exp.run_dir).checkpoint_step(10) / SHARD
    assert mine.read_bytes() == (source.checkpoint_step(10) / SHARD).read_bytes()
    assert mine.stat().st_ino != (source.checkpoint_step(10) / SHARD).stat().st_ino


def test_a_checkpoint_that_is_pruned_meanwhile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = train(experiment(tmp_path, "other"), 10)
    link = files.os.link

    def prune_first(path: Path, target: Path) -> None:
        if path.name == "__0_0.distcp":
            shutil.rmtree(source.checkpoints)
        link(path, target)

    monkeypatch.setattr(files.os, "link", prune_first)
    exp = experiment(tmp_path, "mine", ckpt={"resume_step": str(source.root)})
    with pytest.raises(ConfigError, match="none any more"):
        life(exp)
    assert checkpoints(exp) == [] and not list((exp.run_dir / "checkpoints").glob(".stage*"))


def test_another_run_that_does_not_fit_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    other = experiment(tmp_path, "other")
    state = {"step": 10, "prompts": {"seed": 0, "sources": [["reverse-text", 8]]}}
    write_batch(RunPaths(other.run_dir), 10, [RankBatch.empty(1)], state=state, incarnation=1)
    source = train(other, 10)
    mine = experiment(tmp_path, "mine")
    train(mine, 5, 30)
    asked = {"resume_step": str(source.root)}

    def refused(match: str, **values: object) -> None:
        with pytest.raises(ConfigError, match=match):
            life(experiment(tmp_path, "mine", ckpt=asked, **values))
        assert checkpoints(mine) == [5, 30]

    wider = model_dir(tmp_path / "wider", hidden_size=64)
    refused("another model than .*hidden_size was 32, is 64", model={"name": str(wider)})
    other_tokenizer = model_dir(tmp_path / "tokenizer", tokenizer="b")
    refused("another tokenizer", model={"name": str(other_tokenizer)})
    smaller = model_dir(tmp_path / "vocab", vocab_size=299)
    refused("vocab_size was 300, is 299", model={"name": str(smaller)})
    refused("seed was 0 and is 1", seed=1)
    envs = [{"id": "reverse-text"}, {"id": "reverse-text", "name": "more"}]
    refused(r"env was \['reverse-text'\] and is \['reverse-text', 'more'\]", orchestrator={"env": envs})
    refused("it is of a run of kind rl, this is sft", kind="sft")
    asked["resume_step"] = str(tmp_path / "nowhere")
    refused("no such directory")
    asked["resume_step"] = str(tmp_path / "model")
    refused("neither a run directory")


@pytest.mark.parametrize("alone", [False, True])
def test_another_runs_checkpoint_without_its_weights(tmp_path: Path, alone: bool) -> None:
    source = train(experiment(tmp_path, "other"), 10)
    mine = train(experiment(tmp_path, "mine"), 10, incarnation=0)  # of its own step 10, which is another's now
    shutil.rmtree(source.weights_step(10))
    path = source.checkpoint_step(10)
    if alone:
        path = Path(shutil.copytree(path, tmp_path / "alone" / "step_10"))
    assert life(experiment(tmp_path, "mine", ckpt={"resume_step": str(path)})) == 10
    adopted = resolve_resume(mine.checkpoints, 10)
    assert adopted.manifest.meta["adopted_from"] == str(path) and not mine.weights_step(10).exists()


def test_other_ranks_and_group_sizes_are_accepted(tmp_path: Path) -> None:
    source = train(experiment(tmp_path, "other"), 10)
    exp = experiment(
        tmp_path,
        "mine",
        ckpt={"resume_step": str(source.root)},
        trainer={"num_ranks": 4},
        orchestrator={"env": [{"id": "reverse-text"}], "rollouts_per_example": 4, "batch_size": 32},
    )
    assert life(exp) == 10


OTHER_STATE = [
    ({"optim": {"type": "muon"}}, None, "state is of adamw, this run's is muon: state trainer.optim as then"),
    ({"optim": {"type": "signsgd", "momentum": 0.9}}, None, "adamw, this run's is signsgd with momentum"),
    ({}, {"rank": 4}, "it holds a whole model, this run trains an adapter"),
]


@pytest.mark.parametrize(("trainer", "lora", "said"), OTHER_STATE)
def test_what_the_trainer_would_refuse_sets_no_checkpoint_aside(
    tmp_path: Path, trainer: dict[str, object], lora: dict[str, object] | None, said: str
) -> None:
    train(experiment(tmp_path), 10, 20)
    model = {"name": str(tmp_path / "model"), "lora": lora}
    with pytest.raises(ConfigError, match=rf"step_10 cannot be resumed from: .*{said}"):
        life(experiment(tmp_path, ckpt={"resume_step": 10}, trainer=trainer, model=model))
    assert checkpoints(experiment(tmp_path)) == [10, 20]
    assert life(experiment(tmp_path, ckpt={"resume_step": 10})) == 10


def test_an_adapters_checkpoint_is_of_its_shape(tmp_path: Path) -> None:
    model = {"name": str(tmp_path / "model"), "lora": {"rank": 4}}
    train(experiment(tmp_path, model=model), 10, 20)
    other = {**model, "lora": {"rank": 8}}
    with pytest.raises(ConfigError, match="model.lora: rank was 4, is 8"):
        life(experiment(tmp_path, ckpt={"resume_step": 10}, model=other))
    assert checkpoints(experiment(tmp_path)) == [10, 20]
    assert life(experiment(tmp_path, ckpt={"resume_step": 10}, model=model)) == 10


def test_sft_needs_no_weights_and_no_orchestrator(tmp_path: Path) -> None:
    source = train(experiment(tmp_path, "other", kind="sft"), 10)
    exp = experiment(tmp_path, "mine", kind="sft", ckpt={"resume_step": str(source.root)})
    assert life(exp) == 10
    with pytest.raises(ConfigError, match="of kind sft, this is rl"):
        life(experiment(tmp_path, "rl", ckpt={"resume_step": str(source.root)}))


def test_a_checkpoint_directory_belongs_to_one_run(tmp_path: Path) -> None:
    shared = tmp_path / "elsewhere"
    first = experiment(tmp_path, "first", ckpt={"path": str(shared)})
    assert life(first) is None
    train(first, 10)
    with pytest.raises(ConfigError, match="another run, .*first: choose another ckpt.path"):
        life(experiment(tmp_path, "second", ckpt={"path": str(shared)}))
    assert list_steps(shared, digits=0) == [10]
    assert life(first) == 10
    second = experiment(tmp_path, "second", ckpt={"resume_step": str(first.run_dir)})  # finds them where they lie
    assert life(second) == 10
    first.run_dir.rename(tmp_path / "moved")
    assert life(experiment(tmp_path, "moved", ckpt={"path": str(shared)})) == 10
    (shared / import_checkpoint.OWNER).unlink()
    with pytest.raises(ConfigError, match="unknown origin"):
        life(experiment(tmp_path, "third", ckpt={"path": str(shared)}))
    with pytest.raises(ConfigError, match="unknown origin"):
        life(experiment(tmp_path, "fourth", ckpt={"path": str(second.run_dir / "checkpoints")}))


def test_a_run_whose_checkpoints_moved_is_found_where_they_are_now(tmp_path: Path) -> None:
    first, shared = experiment(tmp_path, "first"), tmp_path / "elsewhere"
    assert life(first) is None
    inside = train(first, 10)
    asked = {"path": str(shared), "resume_step": str(inside.checkpoints)}
    assert life(experiment(tmp_path, "first", ckpt=asked)) == 10
    train(experiment(tmp_path, "first", ckpt={"path": str(shared)}), 20, incarnation=2)
    assert list_steps(inside.checkpoints, digits=0) == [10]
    assert import_checkpoint.find_checkpoint(first.run_dir).path == shared / "step_20"
    assert life(experiment(tmp_path, "first", ckpt={"resume_step": str(shared)})) == 20  # and inside again
    train(first, 30, incarnation=3)
    assert read_pointer(inside) is None
    assert import_checkpoint.find_checkpoint(first.run_dir).path == inside.checkpoints / "step_30"


def test_checkpoints_that_are_not_mounted_are_not_replaced_by_older_ones(tmp_path: Path) -> None:
    paths = train(experiment(tmp_path, "first"), 10)
    import_checkpoint.point_to_root(RunPaths(paths.root, tmp_path / "mount"))
    note_saved(paths, 20, 2)
    with pytest.raises(ConfigError, match=r"lie in .*mount, which lists none: is its file system mounted here\?"):
        life(experiment(tmp_path, "mine", ckpt={"resume_step": str(paths.root)}))


def test_a_run_that_went_back_inside_and_still_points_elsewhere_is_found_where_it_saved_last(tmp_path: Path) -> None:
    exp = experiment(tmp_path, "first")
    inside, outside = RunPaths(exp.run_dir), RunPaths(exp.run_dir, tmp_path / "elsewhere")
    make_checkpoint(outside, 20, incarnation=1)
    make_checkpoint(inside, 9, incarnation=2)
    import_checkpoint.point_to_root(outside)
    assert import_checkpoint.find_checkpoint(exp.run_dir).path == inside.checkpoint_step(9)  # the later attempt's
    shutil.rmtree(outside.checkpoints)
    assert import_checkpoint.find_checkpoint(exp.run_dir).path == inside.checkpoint_step(9)
    note_saved(inside, 12, 3)  # and that is nowhere
    with pytest.raises(StoreError, match="which lists none"):
        import_checkpoint.find_checkpoint(exp.run_dir)


@pytest.mark.parametrize(("age_s", "is_taken"), [(0.0, False), (60.0, True)])
def test_an_owner_that_was_never_written_is_made_up_for_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, is_taken: bool
) -> None:
    paths = RunPaths(experiment(tmp_path, "first").run_dir, tmp_path / "elsewhere")
    paths.checkpoints.mkdir()
    owner = paths.checkpoints / import_checkpoint.OWNER
    owner.touch()
    monkeypatch.setattr(files.os, "link", lambda *_: no_links())
    monkeypatch.setattr(import_checkpoint, "file_age_s", lambda path: age_s)
    if is_taken:
        import_checkpoint.claim_root(paths)
        assert json.loads(owner.read_text()) == {"run_dir": str(paths.root.resolve())}
    else:  # another run may just be writing it
        with pytest.raises(Unreadable, match="does not say whose"):
            import_checkpoint.claim_root(paths)
    assert [path.name for path in paths.checkpoints.iterdir()] == [import_checkpoint.OWNER]


@pytest.mark.parametrize("links", [True, False])
def test_of_two_runs_that_want_one_directory_at_once_the_first_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    shared, looked = tmp_path / "elsewhere", import_checkpoint._read_owner
    first, second = (RunPaths(experiment(tmp_path, name).run_dir, shared) for name in ("first", "second"))

    def look_and_stall(root: Path) -> Path | None:
        owner = looked(root)
        monkeypatch.setattr(import_checkpoint, "_read_owner", looked)
        import_checkpoint.claim_root(second)
        return owner

    if not links:
        monkeypatch.setattr(files.os, "link", lambda *_: no_links())
    monkeypatch.setattr(import_checkpoint, "_read_owner", look_and_stall)
    with pytest.raises(StoreError, match=r"another run, .*second: choose another ckpt\.path"):
        import_checkpoint.claim_root(first)
    import_checkpoint.claim_root(second)
    assert [path.name for path in shared.iterdir()] == [import_checkpoint.OWNER]


def test_what_is_broken_makes_room_for_a_whole_one_of_another_run(tmp_path: Path) -> None:
    source = train(experiment(tmp_path, "other"), 10)
    exp = experiment(tmp_path, "mine")
    assert life(exp) is None
    mine = train(exp, 10)
    damage(mine.checkpoint_step(10), "manifest")
    assert life(experiment(tmp_path, "mine", ckpt={"resume_step": str(source.root)})) == 10
    assert resolve_resume(mine.checkpoints, 10).manifest.meta["adopted_from"] == str(source.checkpoint_step(10))
    assert len(list(mine.checkpoints.glob("set-aside-step_10-*"))) == 1


def test_a_quota_that_refuses_a_link_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = train(experiment(tmp_path, "other"), 10)
    monkeypatch.setattr(files.os, "link", lambda *_: no_links(errno.EDQUOT))
    with pytest.raises(NoRoom, match="quota exceeded"):
        life(experiment(tmp_path, "mine", ckpt={"resume_step": str(source.root)}))
