"""What is refused before anything starts."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Loaded, load_run, write_snapshot
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.launch import local
from prime_hpc.launch.checks import check
from prime_hpc.launch.fetch.presence import absent_models
from prime_hpc.launch.local import run_role
from prime_hpc.launch.plan.plan import local_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.launch.prepare import for_evaluation, prepare_run
from prime_hpc.launch.storage import weights_bytes
from prime_hpc.store.attempts import begin, write_attempt
from prime_hpc.store.io.disk import disk_error
from prime_hpc.store.model.config import hub_folder
from prime_hpc.supervisor.attempt.start import await_made
from tests.support.launch import loaded, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_a_good_experiment_is_prepared(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    assert load_run(run_dir) == one.experiment
    assert (run_dir / "lock.json").exists()


def test_machines_that_start_together_do_not_take_each_others_trial_files_away(tmp_path: Path, model: Path) -> None:
    """Those of a trainer by hand, one command each."""
    one = loaded(tmp_path, model)
    with ThreadPoolExecutor(4) as machines:
        list(machines.map(lambda _: check(one), range(200)))
    assert not list(one.experiment.output_dir.glob(".write-test-*"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"orchestrator": {"env": [{"id": "revers-text"}]}},
            "orchestrator.env.0.id.*not installed; did you mean reverse-text",
        ),
        ({"orchestrator": {}}, "no environment is named"),
        ({"kind": "sft"}, "sft.data.path: names no file"),
        ({"kind": "sft", "sft": {"data": {"path": "/nowhere/x.jsonl"}}}, "/nowhere/x.jsonl does not exist"),
    ],
)
def test_what_would_fail_later_is_refused(tmp_path: Path, model: Path, values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(loaded(tmp_path, model, **values))


def test_what_lint_calls_an_error_is_refused_in_the_foreground_too(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loaded(tmp_path, model, trainer={"loss": {"type": "no_such_module:loss"}})
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'.*PH233"):
        local.run(one)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match="someone/unheard-of is not all in .*HF_HUB_OFFLINE keeps it from the hub"
    ) as said:
        local.run(loaded(tmp_path, "someone/unheard-of"))
    assert len(said.value.problems) == 1, "that nothing of it was checked is no error of its own"
    with pytest.raises(ConfigError, match="someone/unheard-of is not all in .*HF_HUB_OFFLINE keeps it from the hub"):
        local.submit_local(loaded(tmp_path, "someone/unheard-of"), follow=False, dry_run=False, as_json=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    plays = loaded(tmp_path, model, orchestrator={"env": [{"id": "math500"}], "sampling": {"max_tokens": 8}})
    with pytest.raises(ConfigError, match="benchmark math500 is not in .*, and no role fetches it"):
        local.run(plays)
    with pytest.raises(ConfigError, match="benchmark math500 is not in .*, and no role fetches it"):
        local.submit_local(plays, follow=False, dry_run=False, as_json=False)
    assert local.submit_local(plays, follow=False, dry_run=True, as_json=False) == 0, "it may be brought meanwhile"
    assert not one.experiment.run_dir.exists()
    symbols = loaded(tmp_path / "of%job", model, orchestrator={"env": [{"id": "reverse-text"}]})
    with pytest.raises(ConfigError, match="output_dir: .*of%job.* holds %j, which submitit replaces"):
        local.submit_local(symbols, follow=False, dry_run=False, as_json=False)


def test_a_model_of_the_hub_that_is_there_in_part_may_do(tmp_path: Path) -> None:
    """With a pinned revision, or weights of another format."""
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    experiment = loaded(tmp_path, "someone/unheard-of").experiment
    assert absent_models(experiment, environ) == {"model.name"}
    (hub_folder("someone/unheard-of", tmp_path / "hub") / "snapshots" / "0a1b").mkdir(parents=True)
    assert absent_models(experiment, environ) == set()


def test_what_another_job_may_make_is_not_missed_by_one_that_waits_for_it(tmp_path: Path, model: Path) -> None:
    sft = {"kind": "sft", "sft": {"data": {"path": str(tmp_path / "rows")}}}
    to_come = loaded(tmp_path, tmp_path / "made" / "weights" / "step_4", **sft)
    with pytest.raises(ConfigError, match="is not a directory"):
        check(to_come)
    check(to_come, waits=True)
    (model / "model.safetensors").unlink()
    (tmp_path / "rows").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)no weights.*rows is empty|rows is empty.*no weights"):
        check(loaded(tmp_path, model, **sft), waits=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device": "cpu"}, "flash needs GPUs, and device is cpu"),
        ({"dtype": "float32"}, "flash computes in bfloat16"),
        ({}, "flash-attn is not installed"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, values: dict, words: str
) -> None:
    of_model = {key: value for key, value in values.items() if key == "dtype"}
    one = loaded(tmp_path, model, **{key: value for key, value in values.items() if key == "device"})
    flash = one.experiment.model.model_copy(update={"attn": "flash", "dtype": "bfloat16", **of_model})
    with pytest.raises(ConfigError, match=words):
        prepare_run(replace(one, experiment=one.experiment.model_copy(update={"model": flash})))
    assert not (tmp_path / "out" / "x").exists()


def with_adapter(one: Loaded, rank: int) -> Loaded:
    model = one.experiment.model.model_copy(update={"lora": LoraConfig(rank=rank)})
    return replace(one, experiment=one.experiment.model_copy(update={"model": model}))


def test_what_its_engines_would_refuse_is_said_before_anything_starts(tmp_path: Path, model: Path) -> None:
    one = with_adapter(loaded(tmp_path, model, inference={"backend": "transformers"}), rank=1)
    with pytest.raises(ConfigError, match=r"model.lora: the transformers backend serves no adapters"):
        prepare_run(one)
    with pytest.raises(ConfigError, match="serves no adapters"):
        run_role(one, "inference")
    assert not (tmp_path / "out" / "x").exists()
    check(one)  # of a job, whose nodes may have other devices: lint's
    check(one, "trainer", is_here=True)
    check(loaded(tmp_path, model, inference={"backend": "transformers"}), is_here=True)


def test_versions_that_another_job_makes_are_not_missed_by_an_evaluation_that_waits_for_it(
    tmp_path: Path, model: Path
) -> None:
    run = tmp_path / "made"
    section = {"environment_ids": ["reverse-text"], "weights_dir": str(run / "weights"), "steps": [20]}
    alone: dict[str, Any] = {"kind": "eval", "inference": {}, "orchestrator": {}, "eval": section}
    one = loaded(tmp_path, model, **alone)
    run.mkdir()
    write_snapshot(with_adapter(loaded(tmp_path, model), rank=4).experiment, run, [])
    with pytest.raises(ConfigError, match="is not a directory"):
        for_evaluation(one)
    lora = for_evaluation(one, waits=True).experiment.model.lora
    assert lora is not None and lora.rank == 4, "as the run's own config says"
    with pytest.raises(ConfigError, match=r"eval.weights_dir: .*has not made it"):
        await_made(one.experiment, within_s=0)
    version = run / "weights" / "step_000020"
    version.mkdir(parents=True)
    (version / "adapter_config.json").write_text('{"r": 8}')
    (version / "manifest.json").touch()
    await_made(one.experiment, within_s=0)
    lora = for_evaluation(one, waits=True).experiment.model.lora
    assert lora is not None and lora.rank == 8


@pytest.mark.parametrize("name", ["reverse_text", "Reverse-Text", "hypothesis", "prime_hpc.envs.tasksets.reverse_text"])
def test_every_name_that_the_environments_accept_passes(tmp_path: Path, model: Path, name: str) -> None:
    check(loaded(tmp_path, model, orchestrator={"env": [{"id": name}]}))


def test_a_model_may_be_named_from_home(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check(loaded(tmp_path, "~/model"))
    assert (
        weights_bytes(loaded(tmp_path, "~/model").experiment) == weights_bytes(loaded(tmp_path, model).experiment) > 0
    )
    teacher = {"model": "~/model", "base_url": "http://a:1/v1"}
    taught = {"advantage": {"type": "opd"}, "teacher": teacher, "env": [{"id": "reverse-text"}]}
    check(loaded(tmp_path, model, orchestrator=taught))


def test_model_path_without_weights(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.name.*no weights"):
        check(loaded(tmp_path, model))
    (model / "pytorch_model.bin").write_bytes(b"x")  # which engines read, and the trainer does not
    with pytest.raises(ConfigError, match=r"model.name.*holds pytorch_model.bin and no safetensors"):
        check(loaded(tmp_path, model))


def test_model_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check(loaded(tmp_path, "./no/such/model"))


def test_a_model_that_is_missing_here_is_an_error_and_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = loaded(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        local.run(one)
    with pytest.raises(ConfigError, match="is not a directory"):
        local.submit_local(one, follow=False, dry_run=False, as_json=False)
    assert "PH107" not in capsys.readouterr().err
    assert local.submit_local(one, follow=False, dry_run=True, as_json=False) == 0
    assert "PH107" in capsys.readouterr().err


def test_a_version_that_is_not_there_is_told_with_what_the_run_has(tmp_path: Path) -> None:
    """The warm-up was forgotten, a version was removed, or its number is a typing error."""
    run = tmp_path / "warm-up"
    wanted = loaded(tmp_path, run / "weights" / "step_000400")
    for made, said in (("", "there is no such run: train it first"), ("weights", "has none yet")):
        with pytest.raises(ConfigError, match=rf"is not a directory: a version of the run .*/warm-up, and .*{said}"):
            check(wanted)
        (run / (made or "logs")).mkdir(parents=True)
    (run / "weights" / "step_000200").mkdir()
    with pytest.raises(ConfigError, match="and its newest is step_000200$"):
        check(wanted)


def test_output_directory_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir.*cannot be written"):
        check(loaded(tmp_path, model, output_dir=str(tmp_path / "file" / "out")))


def test_output_directory_too_small(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1000000000000000}}')
    with pytest.raises(ConfigError, match="free, but the run keeps about"):
        check(loaded(tmp_path, model))


@pytest.mark.parametrize("metadata", ["{}", "null", "[]", '{"total_size": "large"}'])
def test_an_index_need_not_say_how_large_the_model_is(tmp_path: Path, model: Path, metadata: str) -> None:
    (model / "model.safetensors.index.json").write_text(f'{{"metadata": {metadata}, "weight_map": {{}}}}')
    check(loaded(tmp_path, model))
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert weights_bytes(loaded(tmp_path, model).experiment) == 1000


@pytest.mark.parametrize("text", ['{"weight_map"', "[]", "{}"])
def test_a_broken_index_is_named(tmp_path: Path, model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="model.safetensors.index.json is no index of safetensors files"):
        check(loaded(tmp_path, model))


def test_a_full_disk_has_no_room_for_what_is_small(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ConfigError, match="has 1.0 MiB free, but logs and results want 64 MiB"):
        check(loaded(tmp_path, model))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))  # over FUSE: nobody knows
    assert str(disk_error(OSError(errno.ENOSPC, "full"), tmp_path)).count("MiB free") == 0
    check(loaded(tmp_path, model))


def test_checkpoints_elsewhere_are_looked_at_where_they_are(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ckpt.path: .*file/own cannot be written"):
        check(loaded(tmp_path, model, ckpt={"path": str(tmp_path / "file" / "own")}))
    check(loaded(tmp_path, model, ckpt={"path": str(tmp_path / "file" / "own")}), role="orchestrator")
    own = Path(f"/dev/shm/prime-hpc-test-{os.getpid()}")  # another file system than the run's
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1073741824}}')
    usage = shutil.disk_usage(tmp_path)
    try:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(1 if path == own else 8) << 30))
        with pytest.raises(ConfigError, match=rf"ckpt.path: .*{own} has 1.00 GiB free, but .* 12.00 GiB") as refused:
            check(loaded(tmp_path, model, ckpt={"path": str(own)}))
        keys = [problem.key for problem in refused.value.problems]
        assert "ckpt.path" in keys and "output_dir" not in keys
    finally:
        shutil.rmtree(own, ignore_errors=True)


def test_a_job_needs_the_room_that_its_preflight_will_ask_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 29))
    check(loaded(tmp_path, model))
    words = r"file system of .*/out has 512.0 MiB free, but .*preflight wants 1 GiB \(slurm.preflight.min_free_gib\)"
    with pytest.raises(ConfigError, match=words):
        check(loaded(tmp_path, model), by_slurm=True)
    check(loaded(tmp_path, model, slurm={"preflight": {"enabled": False}}), by_slurm=True)


@pytest.mark.parametrize(
    ("values", "outcome", "saved", "words"),
    [
        ({"ckpt": {}}, "failed", 40, "go on from step 40: rl exp.yaml --api-key '***' --ckpt.resume-step latest"),
        ({"ckpt": {}}, "stopped", 40, "go on from step 40"),
        ({"ckpt": {}}, "interrupted", None, "nothing was saved. To start over: the same command with --clean"),
        ({}, "failed", None, "checkpoints are off: `--ckpt` switches them on"),
        (
            {"kind": "eval", "orchestrator": {}, "eval": {"environment_ids": ["reverse-text"]}},
            "failed",
            7,
            "the same command goes on",
        ),
        ({"ckpt": {}}, "completed", 40, ""),
    ],
)
def test_what_failed_on_this_machine_says_how_it_goes_on(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    outcome: str,
    saved: int | None,
    words: str,
) -> None:
    def supervise(run_dir: Path) -> int:
        attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
        attempt.outcome, attempt.saved_step = outcome, saved
        write_attempt(run_dir / "attempts.jsonl", attempt)
        return 1

    (model / "tokenizer.model").touch()  # lint finds nothing to say
    monkeypatch.setattr("prime_hpc.supervisor.main.supervise", supervise)
    monkeypatch.setattr("sys.argv", ["/bin/rl", "exp.yaml", "--clean", "--api-key", "sk-secret"])
    assert local.run(loaded(tmp_path, model, **values)) == 1
    said = capsys.readouterr().err
    assert words in said if words else said == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ckpt": {}}, "rl @ exp.yaml --ckpt.resume-step latest --no-clean"),
        (
            {"kind": "eval", "orchestrator": {}, "eval": {"environment_ids": ["reverse-text"]}},
            "the same command with --no-clean goes on",
        ),
    ],
)
def test_what_goes_on_does_not_delete_what_a_file_says_to(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str
) -> None:
    one, row = loaded(tmp_path, model, clean=True, **values), {"attempt": 1, "outcome": "failed", "saved_step": 40}
    monkeypatch.setattr("sys.argv", ["/bin/rl", "@", "exp.yaml", "--clean"])
    (tmp_path / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    assert words in local.how_to_go_on(one.experiment, tmp_path, local._command_again(deletes=one.experiment.clean))


@pytest.mark.parametrize(
    "stated",
    [
        "--ckpt.resume-step 3",
        "--ckpt.resume-step=3",
        "--ckpt.resume_step 3 --clean=true",
        "--no-ckpt.resume-step --clean true",
        "--no-clean --clean",
    ],
)
def test_the_command_that_goes_on_names_one_step(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setattr("sys.argv", ["rl", "@", "e.yaml", *stated.split(), "--max-steps", "5"])
    assert local._command_again(deletes=False) == "rl @ e.yaml --max-steps 5 --ckpt.resume-step latest"


def test_an_attempt_whose_end_could_not_be_written_says_how_it_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    one = loaded(tmp_path, model, ckpt={})
    assert local.how_to_go_on(one.experiment, tmp_path, "X") == "go on from the newest checkpoint: X"
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert local.how_to_go_on(one.experiment, tmp_path, "X") == "", "it is another command's, which runs"


def test_an_attempt_that_ended_before_it_began_names_no_clean(tmp_path: Path, model: Path) -> None:
    rows = [{"attempt": 1, "outcome": "completed", "saved_step": 20}, {"attempt": 2, "outcome": "failed"}]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = loaded(tmp_path, model, ckpt={})
    assert local.how_to_go_on(one.experiment, tmp_path, "X") == "go on from the newest checkpoint: X"


def test_plan_names_roles_and_launcher(tmp_path: Path, model: Path) -> None:
    def planned(**values: Any) -> str:
        one = loaded(tmp_path, model, **values).experiment
        return plan_text(local_plan(one))

    text = planned(inference={"data_parallel_size": 2}, trainer={"num_ranks": 4})
    assert "data parallel 2" in text
    assert "4 FSDP2 ranks" in text
    assert "LocalExecutor" in text
    foreground = plan_text(local_plan(loaded(tmp_path, model).experiment, in_foreground=True))
    assert "LocalExecutor" not in foreground and "submitit" not in foreground and "logs/supervisor.log" in foreground
    saving = planned(ckpt={"interval": "auto"})
    assert "checkpoints  as often as costs least" in saving and "expected loss" in saving
    assert "attached: http://127.0.0.1:8000/v1" in planned()


def test_a_run_without_a_trainer_is_held_to_the_length_of_its_engines(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    alone: dict[str, Any] = {"kind": "eval", "orchestrator": {}, "eval": {"environment_ids": ["reverse-text"]}}
    check(loaded(tmp_path, model, **alone, inference={"max_model_len": 512}))
    with pytest.raises(ConfigError, match="513 tokens are beyond"):
        check(loaded(tmp_path, model, **alone, inference={"max_model_len": 513}))


def test_context_beyond_the_model_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    with pytest.raises(ConfigError, match="seq_len: 2048 tokens are beyond the model's max_position_embeddings = 512"):
        check(loaded(tmp_path, model))
    check(
        loaded(
            tmp_path, model, seq_len=512, orchestrator={"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 64}}
        )
    )


def test_a_second_interrupt_of_a_followed_job_is_passed_on_and_its_end_waited_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SimpleNamespace(job_id="7", paths=SimpleNamespace(stdout=tmp_path / "log"))
    seen: list[str] = []

    def follow(*_: object, from_end: bool = False, **__: object) -> None:
        seen.append("ending" if from_end else "running")
        if len(seen) < 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(local, "_start", lambda run_dir: job)
    monkeypatch.setattr(local, "prepare_run", lambda loaded: None)
    monkeypatch.setattr(local, "end_local", lambda run_dir, controller: seen.append("told"))
    monkeypatch.setattr(local, "_follow", follow)
    assert local.submit_local(loaded(tmp_path, model), follow=True, dry_run=False, as_json=False) == 130
    assert seen == ["running", "told", "ending", "told", "ending"]
