"""The checkpoint from which an attempt goes on, its own or another run's.

What the config asks for (`ckpt.resume_step`) is obeyed once per submission: the attempts that Slurm gives the job after
that go on from the newest whole checkpoint, or a requeued job would fall back to the same step for ever.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store.artifact import move_aside
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo, resolve_resume
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.checkpoint.import_checkpoint import adopt_checkpoint, adopt_weights, find_checkpoint, run_of
from prime_hpc.store.checkpoint.newest import SMALL, Choice, choose_newest, require
from prime_hpc.store.errors import ArtifactError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.model.fingerprint import (
    adapter_conflicts,
    conflicts,
    critic_conflicts,
    head_conflicts,
    model_identity,
)
from prime_hpc.store.run_paths import RunPaths, incarnation_starts, list_steps, why_late
from prime_hpc.store.weights import read_chain

KEY = "ckpt.resume_step"
READ_DEADLINE_S = 1.0
"""How long a small file may be what a network file system shows while names change."""


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from."""

    info: CheckpointInfo
    is_foreign: bool
    """It lies with another run."""
    was_asked: bool
    """The config names it; otherwise it is just the newest one."""
    passed_over: bool = False
    """There are newer ones, from which the run does not go on."""


@dataclass(frozen=True)
class Reading:
    """Facts of a run when one of its attempts begins."""

    again: bool
    """It has lived before."""
    expected: int
    """It must have a checkpoint of this step or a newer one (`newest.expected_step`)."""
    incarnation: int
    """Its newest attempt."""


def choose_start(experiment: Experiment, paths: RunPaths, reading: Reading, failed_reads: FailedReads) -> Start | None:
    """Return the checkpoint that this attempt goes on from; None: from the beginning.

    Args:
        failed_reads: first readings of what was not as it should be.

    Raises:
        ConfigError: the checkpoint asked for does not exist, is broken, or is not of this model or kind of run.
        StoreError: all that there was is proved broken; the run does not start over by itself.
        Unreadable, OSError: it cannot be told now.
    """
    asked = experiment.ckpt.resume_step if experiment.ckpt is not None else None
    answered_at = _answered_at(paths, asked)
    if asked is not None and answered_at is None:
        return _asked(experiment, paths, asked, reading, failed_reads)
    if not reading.again and answered_at is None:
        return None
    choice = _newest(experiment, paths, reading, failed_reads)
    if choice.info is not None:
        return Start(choice.info, is_foreign=False, was_asked=False, passed_over=bool(choice.passed_over))
    return _asked(experiment, paths, asked, reading, failed_reads) if asked is not None else None


def _newest(experiment: Experiment, paths: RunPaths, reading: Reading, failed_reads: FailedReads) -> Choice:
    def unfit(info: CheckpointInfo) -> str | None:
        lacks_half = experiment.kind == "rl" and info.orchestrator_state is None
        return "it holds no orchestrator state" if lacks_half else None

    return choose_newest(paths, failed_reads, expected=reading.expected, incarnation=reading.incarnation, unfit=unfit)


def _asked(
    experiment: Experiment, paths: RunPaths, asked: int | str | Path, reading: Reading, failed_reads: FailedReads
) -> Start:
    try:
        passed_over = False
        if isinstance(asked, Path):
            info = find_checkpoint(asked)
        elif isinstance(asked, int):
            info = _in_this_run(paths, asked, failed_reads)
        else:
            info, passed_over = _latest(experiment, paths, reading, failed_reads)
    except Unreadable:
        raise
    except StoreError as error:
        raise ConfigError(f"{KEY} = {asked}: {error}") from error
    is_foreign = info.path.parent.resolve() != paths.checkpoints.resolve()
    last = experiment.num_steps
    over = last is not None and info.step >= last
    if over and asked == "latest" and info.step == last:
        # Whoever says "latest" after every crash means: go on if there is anything left.
        logger.warning(f"step {info.step} is the last one (max_steps): nothing is left to train; raise --max-steps")
    elif over:
        raise ConfigError(
            f"{KEY} = {asked} is step {info.step}, but max_steps = {last}: nothing is left to do; raise --max-steps"
        )
    wrong = mismatches(experiment, info)
    if wrong:
        raise ConfigError(f"{KEY} = {asked}: {info.path} cannot be resumed from: {'; '.join(wrong)}")
    passed_over = passed_over or any(step > info.step for step in list_steps(paths.checkpoints, digits=0))
    return Start(info, is_foreign, was_asked=True, passed_over=passed_over)


def _in_this_run(paths: RunPaths, step: int, failed_reads: FailedReads) -> CheckpointInfo:
    """Return the checkpoint of this run that is meant.

    Raises:
        StoreError: there is none, it is broken (read twice), or a fenced attempt wrote it.
        Unreadable, OSError: that cannot be told now.
    """
    try:
        info = resolve_resume(paths.checkpoints, step, deep=False, small=SMALL)
        failed_reads.read_again(paths, step, info.path, info.manifest)
    except ArtifactError as error:
        failed_reads.confirm(error)
        raise
    except StoreError as error:
        if isinstance(error.__cause__, ArtifactError):
            failed_reads.confirm(error.__cause__)
        raise
    why = why_late(step, info.manifest.incarnation, incarnation_starts(paths))
    if why is not None:
        raise StoreError(f"checkpoint of step {info.step}: {why}")
    return info


def _latest(
    experiment: Experiment, paths: RunPaths, reading: Reading, failed_reads: FailedReads
) -> tuple[CheckpointInfo, bool]:
    """Return the newest whole one, and whether there are newer ones that are not."""
    choice = _newest(experiment, paths, reading, failed_reads)
    return require(paths, choice), bool(choice.passed_over)


def mismatches(experiment: Experiment, info: CheckpointInfo) -> list[str]:
    """Why a checkpoint is not one of this experiment, as far as its manifest and small files tell; [] where it is.

    Other numbers of ranks, nodes, rollouts of a prompt or prompts of a batch are no reason.
    """
    meta = info.manifest.meta
    found = []
    if meta.get("kind", experiment.kind) != experiment.kind:
        cure = "start from its weights instead: --model.name RUN/weights/step_<n>"
        found.append(f"it is of a run of kind {meta['kind']}, this is {experiment.kind} ({cure})")
    elif experiment.kind == "rl" and info.orchestrator_state is None:
        found.append("it holds no orchestrator state, so it is not of an RL run")
    model = Path(experiment.model.name).expanduser()
    if model.is_dir():  # a hub name is resolved by the trainer, which checks again
        wrong = conflicts(meta.get("identity") or {}, model_identity(model))
        found += [f"it is of another model than {experiment.model.name}: {', '.join(wrong)}"] if wrong else []
    lora, optimizer = experiment.model.lora, experiment.trainer.optim.state
    found += adapter_conflicts(meta.get("adapter"), None if lora is None else lora.model_dump(mode="json"))
    found += head_conflicts(meta, experiment.trains_reward_model)
    found += critic_conflicts(meta, experiment.kind == "rl" and experiment.trainer.critic is not None)
    saved = meta.get("optimizer", optimizer)  # 0.1.0 did not say
    if saved != optimizer:
        found.append(f"its optimizer's state is of {saved}, this run's is {optimizer}: state trainer.optim as then")
    if not found and info.orchestrator_state is not None:
        prompts = _prompts_of(info.orchestrator_state)
        envs = [env.label for env in experiment.orchestrator.env]
        sources = [name for name, _ in prompts.get("sources", [])]
        for key, then, now in (
            ("seed", prompts.get("seed"), experiment.seed),
            ("orchestrator.env", sources or None, envs),
        ):
            if then is not None and then != now:
                found.append(f"{key} was {then} and is {now}: prompts would be skipped or repeated")
    return found


def _prompts_of(state: Path) -> dict[str, Any]:
    """Return the state of the prompt stream, as far as it is stated."""
    content = json.loads(files.retry_read(state.read_bytes, deadline_s=READ_DEADLINE_S))
    return content.get("prompts") or {}


def _weights_of(info: CheckpointInfo, home: Path | None, is_foreign: bool) -> Path | None:
    """Return the weights version that belongs to a checkpoint, where it still lies in its run (`home`) and is whole.

    One that holds only what changed counts where its chain is there, and not for another run, which has none.
    Raises Unreadable: that cannot be told now.
    """
    if home is None:
        return None
    weights = RunPaths(home).weights_step(info.step)
    try:
        chain = read_chain(weights, deadline_s=READ_DEADLINE_S)
        if is_foreign and len(chain) > 1:
            raise ArtifactError(weights, "a whole version", "what changed since another of its run")
    except ArtifactError as error:
        logger.warning(f"{info.path}: its weights version cannot be used, the trainer will publish it anew ({error})")
        return None
    return weights


def take_over(start: Start, experiment: Experiment, paths: RunPaths, incarnation: int) -> None:
    """Make another run's checkpoint, and for RL its weights, this run's own.

    Weights that are not beside the checkpoint, or not whole, are no loss: it holds the parameters, and the trainer
    publishes the version again before anybody needs it.
    Raises StoreError: disk full, or a file that is not what its manifest says.
    """
    info, own = start.info, paths.weights_step(start.info.step)
    home = run_of(info) if start.is_foreign else paths.root
    weights = _weights_of(info, home, start.is_foreign) if experiment.kind == "rl" else None
    if experiment.kind == "rl" and weights is None and own.exists():
        # broken, or of the step that this run took itself before it starts from another's
        move_aside(paths, own, incarnation)
    if not start.is_foreign:
        return
    if weights is not None and not (own.exists() and own.samefile(weights)):  # the run's own, of before ckpt.path
        _make_room(paths, own, incarnation)
        adopt_weights(weights, info.step, paths, incarnation)
    _make_room(paths, paths.checkpoint_step(info.step), incarnation)
    adopt_checkpoint(info, paths, incarnation)


def _make_room(paths: RunPaths, own: Path, incarnation: int) -> None:
    """Set aside what an earlier attempt of this run made of the same step, or what is broken."""
    if not own.exists():
        return
    try:
        is_older = read_manifest(own, deadline_s=READ_DEADLINE_S).incarnation < incarnation
    except ArtifactError:
        is_older = True
    if is_older:
        move_aside(paths, own, incarnation)


def record_resume_choice(experiment: Experiment, paths: RunPaths, start: Start | None) -> None:
    """Note that what the config asks for was obeyed. After everything is in place."""
    if start is None or not start.was_asked or experiment.ckpt is None:
        return
    row = {
        "request": _request(paths, experiment.ckpt.resume_step),
        "asked": str(experiment.ckpt.resume_step),
        "step": start.info.step,
        "from": str(start.info.path),
    }
    files.write_atomic(_record(paths), (json.dumps(row) + "\n").encode())


def _answered_at(paths: RunPaths, asked: int | str | Path | None) -> int | None:
    """Return the step that an earlier attempt of this submission began at on request.

    Raises:
        OSError: that cannot be told now; obeyed again, the run would fall back to that step.
        StoreError: the record is not what was written.
    """
    try:
        row = json.loads(_record(paths).read_bytes())
        is_same = asked is not None and row["request"] == _request(paths, asked)
        return int(row["step"]) if is_same else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{_record(paths)} is not what was written there ({error}): restore or delete it") from error


def _record(paths: RunPaths) -> Path:
    return paths.root / "resume.json"


def _request(paths: RunPaths, asked: int | str | Path | None) -> str:
    """Tells one submission from another: each writes its own lock file."""
    lock = paths.lock_json.read_bytes() if paths.lock_json.exists() else b""
    return xxhash.xxh3_64_hexdigest(lock + str(asked).encode())
