"""The trainer of a rank: what it holds for its whole life, and what RL and SFT loops do alike around a step."""

import os
import time
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.monitors import open_metrics
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import Status
from prime_hpc.runtime.role_context import RoleContext, this_node
from prime_hpc.store.artifact import if_removable
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch_archive import RolloutArchiver
from prime_hpc.store.batches import prune_batches
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo
from prime_hpc.store.errors import NoRoom
from prime_hpc.store.io.room import RoomWait
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.messaging.file_transfer import Handover
from prime_hpc.store.messaging.run_bus import Bus
from prime_hpc.store.model.fingerprint import model_identity
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import list_versions, prune_weights
from prime_hpc.trainer.checkpointing.checkpointer import CRITIC, Checkpointer
from prime_hpc.trainer.checkpointing.resume import checkpoint_to_resume, go_back_by_hand
from prime_hpc.trainer.checkpointing.save_interval import SaveSchedule, build_schedule
from prime_hpc.trainer.checkpointing.saver import Saver
from prime_hpc.trainer.critic import ActorCriticStep, load_critic
from prime_hpc.trainer.model.load_policy import compute_dtype, load_policy, resolve_source
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.reference import load_reference
from prime_hpc.trainer.model.score_head import head_seed
from prime_hpc.trainer.objectives import MicroBatchLoss, normalization
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.optim.schedule import check_schedule
from prime_hpc.trainer.out_of_memory import explain, held_bytes, peak_bytes
from prime_hpc.trainer.parallel import Parallel, build_parallel
from prime_hpc.trainer.perf import peak_flops
from prime_hpc.trainer.profiling import StepProfiler
from prime_hpc.trainer.rank_group import OF_FILES, RankGroup
from prime_hpc.trainer.ranks import control_group
from prime_hpc.trainer.slow_ranks import SlowRanks
from prime_hpc.trainer.token_log import TokenLog, open_token_log, watching
from prime_hpc.trainer.train_step import StepRefused, TrainStep
from prime_hpc.trainer.until_room import until_room
from prime_hpc.trainer.weights.lora_files import adapter_identity
from prime_hpc.trainer.weights.publish import VersionPublisher, build_publisher, kept_versions
from prime_hpc.trainer.weights.publish_async import BesidePublisher, build_beside

BENCH_STEPS = 5
"""Steps of a `bench` run; the first warms up and is left out of its table."""


class Signal(IntEnum):
    """A decision of rank 0; the others are told by a broadcast."""

    WAIT = 0
    GO = 1
    STOP = 2
    STOP_AND_SAVE = 3
    SAVE = 4
    """Save what is done and go on."""


@dataclass
class Trainer:
    """One rank of the trainer."""

    experiment: Experiment
    context: RoleContext
    paths: RunPaths
    rank: int
    world_size: int
    parallel: Parallel
    """The ranks' layout: `data_rank` of `layout.num_data_ranks` parts of the batch is this rank's."""
    device: torch.device
    bus: Bus
    handover: Handover
    """Batches straight from the orchestrator."""
    status: Status
    metrics: MetricsWriter | None
    """Rank 0 only."""
    train_step: TrainStep
    publisher: VersionPublisher
    saver: Saver
    vocab_size: int
    source: Path
    """Directory of the model that training began with."""
    profiler: StepProfiler
    control: RankGroup
    """See `ranks.control_group`."""
    slow_ranks: SlowRanks
    token_log: TokenLog | None = None
    """Rank 0 only, with `trainer.log_tokens`."""
    packer: RolloutArchiver | None = None
    """Rank 0 only, with `orchestrator.compress_rollouts`."""
    given: set[int] = field(default_factory=set)
    """Batches that no attempt wrote, as far as `prune_rollouts` has met them."""
    bench_rows: list[dict[str, float]] = field(default_factory=list)
    """Of a `bench` run: every step's figures."""
    bench_setting: dict[str, str] = field(default_factory=dict)
    """Of a `bench` run: what it trains on."""
    beside: BesidePublisher | None = None
    """With `trainer.publish_beside`, from the first version on."""

    @property
    def part(self) -> tuple[int, int]:
        """The part of the batch that this rank reads, and how many there are."""
        return self.parallel.data_rank, self.parallel.dims.num_data_ranks

    @property
    def last_step(self) -> int:
        """Step after which the loop ends."""
        limit = self.experiment.max_steps
        return min(limit, BENCH_STEPS) if self.experiment.trainer.bench else limit

    def agree(self, signal: Signal) -> Signal:
        """Rank 0's signal on every rank; a save or version that failed meanwhile raises its StoreError. Collective."""
        is_out = self.beside is not None and self.beside.has_ended
        signal, has_ended, is_out = self.control.broadcast((signal, self.saver.checkpointer.has_ended, is_out))
        if has_ended:
            self.saver.wait_for_save()
        if is_out:
            self.finish_publishing()
        return signal

    def requested(self) -> Signal | None:
        """On rank 0: what the supervisor asks for now, if anything. A request to save is taken up by this."""
        message = self.bus.latest("stop")
        if message is not None:
            return Signal.STOP_AND_SAVE if message.get("save") else Signal.STOP
        if not self.saver.is_asked:
            return None
        self.saver.take_up()
        return Signal.SAVE

    @property
    def has_news(self) -> bool:
        """On rank 0: whether a wait should end: a stop, a request to save, a save or a version that has ended."""
        asked = self._is_stopped() or self.saver.is_asked
        return asked or self.saver.checkpointer.has_ended or (self.beside is not None and self.beside.has_ended)

    def chosen_checkpoint(self) -> CheckpointInfo | None:
        """Return the checkpoint that this attempt resumes from; None: a fresh start. Collective. Errors as of
        `resume`."""
        choose = partial(checkpoint_to_resume, self.experiment, self.paths, self.context.resume_step)
        return self.control.from_first(choose, OF_FILES)

    def resume(self) -> tuple[int, dict[str, int]]:
        """Load the checkpoint that this attempt resumes from. Collective.
        Returns the step it holds (0 for a fresh start) and its progress.
        Raises StoreError: it does not exist or is damaged (lists those that are), or what comes after it cannot be
        moved. Raises ConfigError: it is beyond the last step, as whose version its weights would be published."""
        chosen, info = self.context.resume_step, self.chosen_checkpoint()
        if info is None:
            return 0, {}
        last = self.experiment.num_steps
        if last is not None and info.step > last:
            raise ConfigError(
                f"{info.path} is of step {info.step}, beyond max_steps = {last}: raise max_steps", "max_steps"
            )
        progress = self.saver.checkpointer.load(info)
        if chosen is None and not self.experiment.trainer.bench:
            self.control.from_first(partial(go_back_by_hand, self.paths, info.step, self.context.incarnation))
        self.saver.saved_step = info.step
        if self.rank == 0:
            logger.info(f"resumed from {info.path}: step {info.step}")
        self.control.from_first(self.saver.checkpointer.prune)
        if self.experiment.kind == "rl" and self.lacks_version(info.step):
            logger.info(f"weights version {info.step} is not on disk: publishing it again")
            self.publish(info.step)
        return info.step, progress

    def lacks_version(self, version: int) -> bool:
        """Return whether a weight version is not on disk. Collective: one rank lists the versions."""
        return self.control.from_first(lambda: version not in list_versions(self.paths))

    def publish(self, version: int, *, prune: bool = True) -> None:
        """Publish a weight version, announce it, remove old ones that nobody needs. Collective. One for which there is
        no room is left to the next attempt when this one is to end."""
        wait = RoomWait(f"weights version {version}", self.paths.weights, self.experiment.supervisor.write_timeout_s)
        with self.train_step.timer("publish"):
            publish, holds_up_others = partial(self.publisher.publish, version), bool(self.context.run)
            manifest = publish() if holds_up_others else until_room(publish, self.control, wait, self._is_stopped)
        if manifest is not None:
            self._announce(manifest, prune=prune)

    def _is_stopped(self) -> bool:
        return self.bus.latest("stop") is not None

    def require_version(self, version: int) -> None:
        """Raise NoRoom unless the run's last weight version is there: it is not complete without. Collective."""
        if self.lacks_version(version):
            raise NoRoom(f"weights version {version} had no room until the attempt was to end; the next one writes it")

    def publish_beside(self, version: int) -> None:
        """As `publish`, or beside the next step, as `trainer.publish_beside` has it; raises for the one before."""
        if self.beside is None:
            how = self.experiment.trainer.publish_beside
            room_s = self.experiment.supervisor.write_timeout_s
            self.beside = build_beside(self.publisher, how, self.device, self._announce, room_s, self._is_stopped)
        if self.beside is None:
            return self.publish(version)
        with self.train_step.timer("publish"):
            return self.beside.begin(version)

    def finish_publishing(self) -> None:
        """Wait until no weight version is being written; raises a StoreError if it failed. Collective."""
        if self.beside is not None:
            self.beside.finish()

    def _announce(self, manifest: Manifest, *, prune: bool = True) -> None:
        """On rank 0: a version has its name."""
        assert manifest.version is not None
        path = self.paths.weights_step(manifest.version)
        self.bus.publish("weights", version=manifest.version, path=str(path), digest=manifest.digest)
        if prune:
            keep = self.experiment.trainer.keep_weights
            with if_removable("weight versions"):
                prune_weights(self.paths, keep, self.context.incarnation, keep=self.saver.steps_in_flight)

    def train(self, step: int, batch: RankBatch, objective: MicroBatchLoss) -> dict[str, float]:
        """Do one train step; a save in flight is not lost when it refuses. Collective.

        Raises:
            StepRefused: on every rank.
            torch.OutOfMemoryError: says what the memory held, and which keys help.
        """
        self.profiler.begin(step)
        try:
            with watching(self.token_log, step) as watch:
                return self.train_step.run(step, batch, objective, watch)
        except StepRefused:
            self.finish_saves()
            raise
        except torch.OutOfMemoryError as error:
            held = held_bytes(self.train_step, self.device)
            words = explain(error, self.experiment, held, peak_bytes(self.device, held), rank=self.rank, step=step)
            raise torch.OutOfMemoryError(words) from error

    def prune_rollouts(self, step: int) -> None:
        """Rank 0: delete batches as `orchestrator.keep_rollouts` says, compress the rest; all ranks took `step`."""
        if self.rank != 0:
            return
        config, keep = self.experiment.orchestrator, self.saver.steps_in_flight
        if config.keep_rollouts is not None:
            with if_removable("batches"):
                last, incarnation = config.keep_rollouts, self.context.incarnation
                prune_batches(self.paths, last, step, incarnation, keep=keep, given=self.given)
        if config.compress_rollouts and self.packer is None:
            self.packer = RolloutArchiver(self.paths, self.context.incarnation)
        if self.packer is not None:
            self.packer.up_to(step, keep)

    def save(self, step: int, *, progress: dict[str, int], batch_dir: Path | None, is_last: bool = False) -> None:
        """Save a checkpoint, or begin to, unless this step's exists; its weight version is there. Collective.
        `is_last`: see `Saver.save`."""
        self.finish_publishing()
        with self.train_step.timer("checkpoint"):
            self.saver.save(step, progress=progress, batch_dir=batch_dir, is_last=is_last)

    def save_is_due(self, step: int) -> bool:
        """Return whether the config wants a checkpoint after `step`. Collective."""
        self.saver.prepare()
        return self.saver.is_due(step, lambda yes: self.agree(Signal.SAVE if yes else Signal.GO) is Signal.SAVE)

    def finish_saves(self) -> None:
        """Wait until nothing is being written any more. Collective."""
        try:
            self.finish_publishing()
        finally:
            self.saver.finish()

    def report(self, step: int, metrics: dict[str, float], started: float) -> dict[str, float]:
        """Write one step's metrics, status and console line. `started`: `time.perf_counter()` when the step began.
        Returns what was written: the metrics, times by phase, throughput."""
        self.profiler.end(step)
        times = self.train_step.timer.take()
        training = times.get("time/forward_backward", 0.0) + times.get("time/optim", 0.0)
        elapsed = time.perf_counter() - started
        values = {**metrics, **self.train_step.throughput(metrics, training), "time/step": round(elapsed, 4), **times}
        values["tokens_per_s_overall"] = metrics["num_tokens"] / max(elapsed, 1e-9)
        values |= self.saver.take_figures() | self.slow_ranks.figures
        if self.experiment.trainer.bench:
            self.bench_rows.append(values)
        if self.metrics is None:
            self.status.note(step)
            return values
        self.metrics.log(step, **values)
        keys: tuple[str, ...] = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")
        if self.experiment.kind == "rl":
            keys += ("reward", "ratio", "logprob_diff", "kl", "lag_mean", "lag_max", "time/wait")
        keys += ("rewards/margins", "rewards/accuracies", "critic/loss", "critic/explained_variance")
        shown = {k: values[k] for k in keys if k in values}
        self.status.beat(step=step, **shown)
        line = " ".join(f"{k.removeprefix('time/')} {v:.4g}" for k, v in shown.items())
        name = f"{self.context.run} " if self.context.run else ""
        logger.info(f"{name}step {step}/{self.experiment.max_steps} {line}")
        return values

    def close(self) -> None:
        """Flush the metrics and hang up."""
        self.profiler.close()
        if self.packer is not None:
            self.packer.close()
        for log in (self.metrics, self.token_log):
            if log is not None:
                log.close()


@dataclass(frozen=True)
class Base:
    """The part that sessions share: the loaded model, and facts of this rank."""

    policy: Policy
    source: Path
    """Directory of the model that training began with."""
    device: torch.device
    peak_flops: float
    control: RankGroup
    """See `ranks.control_group`."""
    slow_ranks: SlowRanks


def load_base(experiment: Experiment, device: torch.device, num_slots: int = 1) -> Base:
    """Load the model. Collective. `num_slots`: adapters at once, with `model.lora`.
    Raises ValueError: model, attention or dtype that cannot work; says which key to change."""
    config, name = experiment.trainer, experiment.model.name
    source = resolve_source(name) if dist.get_rank() == 0 else None  # one download, then everyone finds the files
    dist.barrier()
    source = source or resolve_source(name)
    parallel = build_parallel(config.parallel.dims(dist.get_world_size()), device, config.dist_timeout_s)
    policy = load_policy(
        experiment.model,
        source,
        parallel,
        device,
        reshard_after_forward=config.reshard_after_forward,
        chunk_tokens=config.logits_chunk_tokens,
        num_slots=num_slots,
        context=experiment.context,
        rows=config.rows,
        replays_routers=experiment.replays_routers,
        new_head=head_seed(experiment),
    )
    control = control_group(device, config.dist_timeout_s)
    nodes = control.gather_all(this_node()) if dist.get_backend() != "fake" else []  # a rehearsal's
    peak = peak_flops(device, compute_dtype(experiment.model))
    return Base(policy, source, device, peak, control, SlowRanks(device, nodes))


def build_trainer(
    experiment: Experiment, context: RoleContext, device: torch.device, bus: Bus, status: Status
) -> Trainer:
    """Load the model and everything around it. Collective.
    Raises ValueError: model, attention, schedule or dtype that cannot work; says which key to change."""
    check_schedule(experiment)
    return open_trainer(load_base(experiment, device), experiment, context, bus, status)


def open_trainer(
    base: Base, experiment: Experiment, context: RoleContext, bus: Bus, status: Status, slot: int = 0
) -> Trainer:
    """Everything around a loaded model. Collective where the objective needs another model.
    `slot`: adapter that it trains, with `model.lora`; it begins as the base model.
    Raises ValueError: an objective or optimizer that cannot work."""
    rank, policy, slow_ranks, many = dist.get_rank(), base.policy, base.slow_ranks, bool(context.run)
    paths = RunPaths(context.run_dir, checkpoints_root=experiment.ckpt.path if experiment.ckpt else None)
    train_step = build_train_step(base, experiment, slot, slow_ranks)
    name, incarnation, dtype = experiment.model.name, context.incarnation, compute_dtype(experiment.model)
    publisher = build_publisher(
        policy,
        base.source,
        paths,
        dtype=dtype,
        incarnation=incarnation,
        model_name=name,
        slot=slot,
        weights=experiment.weights,
        is_kept=kept_versions(experiment),
        slow_ranks=slow_ranks,
        chat_template=experiment.own_template,  # of every rank: each says why it ends where it is gone
    )
    return Trainer(
        experiment=experiment,
        context=context,
        paths=paths,
        rank=rank,
        world_size=dist.get_world_size(),
        parallel=policy.parallel,
        device=base.device,
        bus=bus,
        handover=Handover(bus, "batch", "step"),
        status=status,
        metrics=open_metrics(experiment, "trainer", paths.metrics("trainer"), paths.root, beside=many)
        if rank == 0
        else None,
        train_step=train_step,
        publisher=publisher,
        saver=_build_saver(experiment, context, paths, bus, train_step, base.source, slow_ranks),
        vocab_size=policy.hf.config.get_text_config().vocab_size,
        source=base.source,
        token_log=open_token_log(experiment, paths) if rank == 0 else None,
        profiler=StepProfiler(
            experiment.trainer.profile, paths.root / "profile" / f"attempt_{context.attempt}", rank, apart=many
        ),
        control=base.control,
        slow_ranks=slow_ranks,
    )


def build_train_step(
    base: Base, experiment: Experiment, slot: int = 0, slow_ranks: SlowRanks | None = None
) -> TrainStep:
    """Return the train step of a loaded model. Collective where the objective needs another model.
    `slot`: adapter that it trains, with `model.lora`; it begins as the base model.
    Raises ValueError: an objective or optimizer that cannot work."""
    config, policy = experiment.trainer, base.policy
    adapter = None
    if policy.adapters is not None:
        policy.adapters.reset(slot, experiment.seed)
        adapter = policy.adapters.parameters(slot)
    optimizer = build_optimizer(policy, config.optim, adapter)
    is_rl = experiment.kind == "rl"
    is_random = config.bench or config.data.fake is not None  # no engine sampled such batches
    critic = load_critic(experiment, policy, base.device)
    kind = TrainStep if critic is None else partial(ActorCriticStep, critic=critic)
    return kind(
        policy,
        optimizer,
        config,
        max_steps=experiment.max_steps,
        normalize=normalization(config.loss) if is_rl else "token" if experiment.sft.num_sides == 1 else "sequence",
        device=base.device,
        peak_flops=base.peak_flops,
        with_entropy=is_rl,
        batch_tokens=config.loss.batch_tokens or experiment.seq_len,
        mismatch=config.loss.mismatch if is_rl and not is_random and not config.loss.objective.imitates else None,
        reference=load_reference(experiment, policy, base.device),
        slot=slot,
        row_tokens=experiment.micro_batch_tokens,
        slow_ranks=slow_ranks,
        together=1 if is_rl else experiment.sft.num_sides,
        entropy=EntropyBonus(config.loss.entropy) if is_rl and config.loss.entropy is not None else None,
        top_entropy=config.loss.top_entropy_quantile if is_rl else None,
        updates=(config.num_mini_batches, config.epochs_per_batch) if is_rl else (1, 1),
    )


def _build_saver(
    experiment: Experiment,
    context: RoleContext,
    paths: RunPaths,
    bus: Bus,
    train_step: TrainStep,
    source: Path,
    slow_ranks: SlowRanks,
) -> Saver:
    config, policy, critic = experiment.ckpt, train_step.policy, train_step.critic
    others = {} if critic is None else {CRITIC: (critic.policy, critic.optimizer)}
    meta: dict[str, object] = {"model": experiment.model.name, "kind": experiment.kind, "scores": policy.scores}
    meta |= {"identity": model_identity(source), "optimizer": experiment.trainer.optim.state, "critic": bool(critic)}
    if policy.adapters is not None:
        meta["adapter"] = adapter_identity(policy.adapters.config, source)
    checkpointer = Checkpointer(
        policy,
        train_step.optimizer,
        paths,
        incarnation=context.incarnation,
        meta=meta,
        config=config,
        slot=train_step.slot,
        others=others,
        extra=train_step.state,
    )
    schedule: SaveSchedule | None = None
    if dist.get_rank() == 0 and config is not None and config.interval == "auto":
        optimizers = [train_step.optimizer, *(each for _, each in others.values())]
        trained = sum(p.numel() for each in optimizers for group in each.param_groups for p in group["params"])
        num_bytes = 12 * trained // dist.get_world_size()  # with Adam's moments
        schedule = build_schedule(experiment, paths, num_bytes, time.monotonic, os.environ)
    return Saver(
        checkpointer,
        paths,
        bus,
        config=config,
        max_steps=experiment.max_steps,
        schedule=schedule,
        slow_ranks=slow_ranks,
        room_s=None if context.run else experiment.supervisor.write_timeout_s,
    )
