"""Lint of keys that are stated and that nothing reads, as the rest of the experiment is."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import SECTIONS, engine_roles
from prime_hpc.config.experiment import ALONE
from prime_hpc.config.sections.inference import ENGINE_GPU_IDS
from prime_hpc.config.sections.sampling import CHANGES, HARMLESS
from prime_hpc.config.sections.sft import MARGIN
from prime_hpc.evals.versions import adapter_rank, check_published, find_versions
from prime_hpc.inference.backend import stated_samplings
from prime_hpc.launch.lint.lint_finding import EVERY, TRAINING, Finding, Severity, Subject, rule
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo, resolve_resume
from prime_hpc.store.checkpoint.import_checkpoint import find_checkpoint
from prime_hpc.store.errors import StoreError, Unreadable
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.resume import mismatches

Row = tuple[str, bool, str]
"""Key, whether it is used, and what uses it."""


def _of_loss(experiment: Experiment) -> Iterator[Row]:
    loss = experiment.trainer.loss
    is_own = ":" in loss.type
    divisor = loss.objective.normalize if loss.normalize == "auto" else loss.normalize
    yield "trainer.loss.delta", loss.type == "aipo" or is_own, "trainer.loss.type = aipo"
    for key in ("tau_pos", "tau_neg"):
        yield f"trainer.loss.{key}", loss.type == "sapo" or is_own, "trainer.loss.type = sapo"
    for key in ("gamma_pos", "gamma_neg"):
        yield f"trainer.loss.{key}", loss.type == "vespo" or is_own, "trainer.loss.type = vespo"
    for key in ("clip_low", "clip_high"):
        yield f"trainer.loss.{key}", loss.objective.clips, "an objective with a trust region, as ppo_clip and grpo"
    yield "trainer.loss.divergence", loss.type == "dppo" or is_own, "trainer.loss.type = dppo"
    yield "trainer.loss.batch_tokens", divisor == "batch", "trainer.loss.normalize = batch"
    if loss.kl is not None:
        yield "trainer.loss.kl.model", loss.kl.target == "reference", "trainer.loss.kl.target = reference"
        yield "trainer.loss.kl.target_kl", loss.kl.in_rewards, "trainer.loss.kl.in_rewards"
        yield (
            "trainer.loss.kl.horizon",
            loss.kl.in_rewards and loss.kl.target_kl is not None,
            "trainer.loss.kl.target_kl",
        )
    if loss.entropy is not None:
        for key in ("delta", "max_coef"):
            yield f"trainer.loss.entropy.{key}", loss.entropy.target is not None, "trainer.loss.entropy.target"
    if loss.covariance is not None:
        for key, of in (("low", "clip"), ("high", "clip"), ("coef", "kl")):
            used = loss.covariance.type == of
            yield f"trainer.loss.covariance.{key}", used, f"trainer.loss.covariance.type = {of}"
    if loss.distillation is not None:
        used = loss.distillation.divergence == "jsd"
        yield "trainer.loss.distillation.beta", used, "trainer.loss.distillation.divergence = jsd"
    if (critic := experiment.trainer.critic) is not None:
        uses_lam = critic.length_adaptive_alpha is None
        yield "trainer.critic.lam", uses_lam, "runs without trainer.critic.length_adaptive_alpha"
        several = experiment.trainer.num_mini_batches * experiment.trainer.epochs_per_batch > 1
        user = "several updates a batch (trainer.num_mini_batches, trainer.epochs_per_batch)"
        yield "trainer.critic.value_clip", several, user
    if loss.correction is not None:
        yield "trainer.loss.correction.low", loss.correction.type == "mask", "trainer.loss.correction.type = mask"


def _of_advantage(experiment: Experiment) -> Iterator[Row]:
    orchestrator, key = experiment.orchestrator, "orchestrator.advantage"
    advantage = orchestrator.advantage
    types = {advantage.type, *(env.algorithm for env in orchestrator.env if env.algorithm is not None)}
    is_own = any(":" in name for name in types)
    yield f"{key}.overlong_penalty", advantage.overlong == "penalize", f"{key}.overlong = penalize"
    yield f"{key}.timeout_reward", advantage.timeout == "penalize", f"{key}.timeout = penalize"
    for name, users in (
        ("pass_k", {"pass_at_k", "pkpo"}),
        ("decay", {"rae"}),
        ("within", {"hierarchical_grpo"}),
        ("reward_weight", {"opd", "opsd", "sdpo"}),
        ("max_gap", {"opd", "opsd", "sdpo"}),
        ("demonstration", {"opsd"}),
        ("demonstration_text", {"opsd", "sdpo"}),
        ("success_reward", {"sdpo"}),
    ):
        yield f"{key}.{name}", is_own or bool(types & users), f"{key}.type = {' or '.join(sorted(users))}"
    if types & {"opd", "opsd", "sdpo"}:
        compares = experiment.trainer.loss.distillation is not None
        yield f"{key}.max_gap", not compares, "runs without trainer.loss.distillation"


def _of_sft(experiment: Experiment) -> Iterator[Row]:
    data, key = experiment.sft.data, "sft.data"
    for name in (
        "trainer.data.fake",
        "trainer.num_mini_batches",
        "trainer.epochs_per_batch",
        "trainer.loss.type",
        "trainer.critic",
        "trainer.loss.kl",
        "trainer.loss.correction",
        "trainer.loss.off_policy_mask",
        "trainer.loss.second_moment",
        "trainer.loss.entropy",
        "trainer.loss.top_entropy_quantile",
        "trainer.loss.covariance",
    ):
        yield name, False, "kind = rl (SFT has a loss and data of its own: sft.data)"
    yield "inference", experiment.samples, "evaluations by episodes (orchestrator.eval)"
    preference = experiment.sft.preference
    for name, types in (
        ("margin", ("dpo", "bradley_terry")),
        ("label_smoothing", ("dpo", "bradley_terry")),
        ("centering_weight", ("bradley_terry",)),
    ):
        is_read = preference is None or preference.type in types
        yield f"sft.preference.{name}", is_read, f"sft.preference.type = {' or '.join(types)}"
    yield f"{key}.path", data.type != "fake", "sft.data.type other than fake"
    yield f"{key}.name", data.type != "fake", "sft.data.type other than fake"
    yield f"{key}.type", data.name is None or data.type not in ("jsonl", "parquet"), "sft.data.path: name is the hub's"
    yield f"{key}.length", data.type == "fake", "sft.data.type = fake"
    yield f"{key}.stopping_strategy", data.probabilities is not None, "sft.data.probabilities"
    yield f"{key}.batch_size", data.batch_tokens is None, "steps that are not counted in tokens (sft.data.batch_tokens)"


def _of_any(experiment: Experiment) -> Iterator[Row]:
    optim, schedule = experiment.trainer.optim, experiment.trainer.scheduler
    yield "trainer.optim.momentum", optim.type != "adamw", "trainer.optim.type = muon or signsgd"
    yield "trainer.optim.betas", optim.type != "signsgd", "trainer.optim.type = adamw or muon"
    for name in ("decay_steps", "min_lr_ratio"):
        yield f"trainer.scheduler.{name}", schedule.type != "constant", "trainer.scheduler.type other than constant"
    if experiment.ckpt is not None:
        yield "ckpt.staging_dir", experiment.ckpt.save_async, "ckpt.save_async"
    if experiment.trainer.profile is not None:
        ranks, first = experiment.trainer.profile.ranks, experiment.trainer.profile.first_step
        yield (
            "trainer.profile.ranks",
            all(0 <= rank < experiment.trainer.num_ranks for rank in ranks),
            f"ranks that there are (trainer.num_ranks = {experiment.trainer.num_ranks})",
        )
        yield "trainer.profile", first <= experiment.max_steps, f"first_step ({first}) within max_steps"
    for key, section in ENGINE_GPU_IDS.items():
        yield key, getattr(experiment, section) is not None, f"servers that the run starts ({section})"
    if experiment.trainer.tinker is not None:
        for name in ("optim", "scheduler", "loss", "num_mini_batches", "epochs_per_batch"):
            yield f"trainer.{name}", False, "runs of ours: of trainer.tinker each client states its losses and steps"
    transport = experiment.weights.transport
    yield "weights.whole_interval", transport != "files", "weights.transport other than files"


def _of_nodes(experiment: Experiment) -> Iterator[Row]:
    for role, section in SECTIONS.items():
        yield f"slurm.{role}", role in engine_roles(experiment), f"servers that the run starts ({section})"
    yield "slurm.trainer", experiment.trains, "runs that train"
    yield "slurm.orchestrator", experiment.samples, "runs that play episodes"


def _of_episodes_alone(experiment: Experiment) -> Iterator[Row]:
    user = f"runs that train; what {experiment.kind} finds is in results/ and metrics/ of its directory"
    keys = ("ckpt", "wandb", "mlflow", "tensorboard", "trainer", "trainer_gpu_ids", "sft", "max_steps", "async_level")
    yield from ((key, False, user) for key in keys)


def _of_environments(experiment: Experiment) -> Iterator[Row]:
    for key, envs in experiment.environment_lists.items():
        for index in range(len(envs)):
            yield f"{key}.{index}.ratio", key == "orchestrator.env", "environments that are trained on"
    for kind in ALONE:
        beside = "; evaluations beside training are orchestrator.eval.env"
        user = f"kind = {kind}" + (beside if (kind, experiment.kind) == ("eval", "rl") else "")
        yield from ((f"{kind}.{name}", kind == experiment.kind, user) for name in ("environment_ids", "env"))


@rule(*EVERY)
def unused(subject: Subject) -> Iterator[Finding]:
    """Report keys that differ from their defaults, and that nothing reads."""
    experiment = subject.experiment
    rows = [*_of_environments(experiment), *_of_nodes(experiment)]
    rows += (_of_any if experiment.trains else _of_episodes_alone)(experiment)
    if subject.is_rl:
        rows += [*_of_loss(experiment), *_of_advantage(experiment)]
    elif experiment.trains:
        rows += _of_sft(experiment)
    for key, is_used, user in rows:
        if not is_used and _is_stated(experiment, key):
            yield Finding.warning("PH241", key, f"has no effect here: it is for {user}", "leave it out, or state that")


def _is_stated(experiment: Experiment, key: str) -> bool:
    section: Any = experiment
    *above, last = key.split(".")
    for name in above:
        section = section[int(name)] if name.isdecimal() else getattr(section, name)
    return bool(getattr(section, last) != type(section).model_fields[last].get_default(call_default_factory=True))


@rule("sft")
def margins(subject: Subject) -> Iterator[Finding]:
    """Report margins of the rows' own under a loss that takes none."""
    sft = subject.experiment.sft
    for key, source in {"sft.data": sft.data, **sft.eval_sets}.items():
        if MARGIN in source.columns and not subject.experiment.trains_reward_model:
            said = "its margin has no effect here: margins of rows are for sft.preference.type = bradley_terry"
            remedy = "leave it out; one margin for all pairs: sft.preference.margin, of dpo and bradley_terry"
            yield Finding.warning("PH241", f"{key}.columns", said, remedy)


@rule(*EVERY)
def unknown_sampling(subject: Subject) -> Iterator[Finding]:
    """Report sampling parameters that vLLM passes over without a word; in training they are refused."""
    experiment = subject.experiment
    engines, client = experiment.inference, None if experiment.trains else experiment.episodes.client
    if engines is not None and engines.backend != "vllm":  # it says itself what it does not know
        return
    if client is not None and client.api != "tokens":  # an API has parameters of its own, as reasoning_effort
        return
    for key, sampling in stated_samplings(experiment).items():
        for name in sampling.extra or {}:
            if name not in CHANGES and name not in HARMLESS:
                near = get_close_matches(name, [*CHANGES, *HARMLESS], n=1)
                remedy = f"did you mean {near[0]}?" if near else "leave it out"
                yield Finding.warning("PH241", f"{key}.extra.{name}", "has no effect: vLLM knows no such one", remedy)


@rule(*EVERY)
def by_hand(subject: Subject) -> Iterator[Finding]:
    """Keys of servers that are started node by node, in a run that places its servers itself."""
    for group in subject.engines:
        for name in ("headless", "data_parallel_address", "data_parallel_start_rank", "data_parallel_size_local"):
            if not getattr(group.servers, name):
                continue
            where, remedy = "on one machine the run starts all engines there", "leave it out"
            if subject.is_slurm:
                where = "in a Slurm job the placement decides"
                remedy += f"; slurm.{group.role}.nodes and {group.section}.across_nodes spread the engines"
            message = f"is for servers that are started by hand, node by node; {where}"
            yield Finding.warning("PH320", f"{group.section}.{name}", message, remedy)


@rule(*TRAINING)
def resumed(subject: Subject) -> Iterator[Finding]:
    """Report a checkpoint to resume from that is not there, though its folder is, or is of another experiment."""
    experiment, key = subject.experiment, "ckpt.resume_step"
    step = experiment.ckpt.resume_step if experiment.ckpt is not None else None
    folder = step.parent if isinstance(step, Path) else experiment.run_dir.parent
    if step is None or is_parent(experiment) or not os.path.isdir(folder):  # noqa: PTH112 - EACCES
        return
    # a job that it waits for may write it
    severity: Severity = "warning" if subject.is_slurm and experiment.slurm.waits else "error"
    remedy = "a step, latest, or the path of a run or a checkpoint"
    if isinstance(step, Path) and not os.path.exists(step):  # noqa: PTH110 - EACCES
        meant = get_close_matches(step.name.lower(), ["latest"])
        remedy = f"did you mean {meant[0]}?" if meant else remedy
        yield Finding("PH242", severity, key, f"{step} is not there", remedy)
        return
    try:
        info = _checkpoint(experiment, step)
        wrong = mismatches(experiment, info)
        last = experiment.num_steps
        if last is not None and info.step >= last + (step == "latest"):  # "latest": go on if there is anything left
            wrong.append(f"of max_steps = {last} nothing is left to do")
    except (Unreadable, OSError):
        return  # it cannot be told now
    except StoreError as error:
        if step != "latest":  # which a script may say from the first start on
            yield Finding("PH242", severity, key, str(error), remedy)
        return
    if wrong:
        message = f"{info.path} cannot be resumed from: {'; '.join(wrong)}"
        remedy = "these keys as they were then, or another checkpoint"
        yield Finding("PH242", severity, key, message, remedy)


def _checkpoint(experiment: Experiment, step: int | Literal["latest"] | Path) -> CheckpointInfo:
    """Return the one that is meant, by sizes alone. Raises StoreError: there is none that is whole."""
    if isinstance(step, Path):
        return find_checkpoint(step)
    paths = RunPaths(experiment.run_dir, experiment.ckpt.path if experiment.ckpt is not None else None)
    return resolve_resume(paths.checkpoints, step, deep=False)


@rule("eval")
def evaluated(subject: Subject) -> Iterator[Finding]:
    """Report versions to evaluate that are not there, or that no engine can load one after the other."""
    config = subject.experiment.eval
    try:
        check_published(versions := find_versions(config))
        adapter_rank(versions)
    except ConfigError as error:
        # like a model and data, a run may be made yet
        is_there = config.weights_dir is not None and os.path.isdir(config.weights_dir)  # noqa: PTH112 - EACCES
        waits = subject.is_slurm and subject.experiment.slurm.waits
        severity: Severity = "error" if is_there and not waits else "warning"
        remedy = "the job that this one waits for has to make it" if waits else "a run, or its weights, before submit"
        for problem in error.problems:
            yield Finding("PH243", severity, problem.key, problem.message, remedy)
    except OSError as error:
        message = f"{config.weights_dir} cannot be read: {error.strerror}"
        yield Finding.warning("PH243", "eval.weights_dir", message, "a run that you may read")
