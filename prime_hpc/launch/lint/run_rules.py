"""Lint of the run itself: batch, groups, concurrency, curriculum, evaluation, data, checkpoints, alarms."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.config.child_config import is_parent
from prime_hpc.config.sections.orchestrator import OrchestratorConfig, SandboxConfig
from prime_hpc.envs.benchmarks.registry import find_benchmark
from prime_hpc.envs.env_config import NEED_SANDBOX
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.sandbox.makers import MAKERS
from prime_hpc.launch.checks import stated_environments
from prime_hpc.launch.fetch.fetch import OFFLINE
from prime_hpc.launch.fetch.hub import ask
from prime_hpc.launch.fetch.presence import missing_of
from prime_hpc.launch.lint.lint_finding import EVERY, TRAINING, Finding, Severity, Subject, rule
from prime_hpc.observe.metric_names import is_known, near, split_metric
from prime_hpc.slurm.containers import stated_paths
from prime_hpc.store.child_runs import list_children
from prime_hpc.store.model.config import is_on


@rule("rl")
def groups(subject: Subject) -> Iterator[Finding]:
    """Report groups too small for a baseline that is the group's own mean."""
    orchestrator = subject.experiment.orchestrator
    each = [
        (
            orchestrator.advantage_of(i),
            orchestrator.group_size(i),
            "" if env.rollouts_per_example is None else f".env.{i}",
        )
        for i, env in enumerate(orchestrator.env)
    ] or [(orchestrator.advantage, orchestrator.rollouts_per_example, "")]
    for advantage, size, where in each:
        is_own = ":" in advantage.type and not advantage.has_greedy  # nobody but the user knows
        if size == 1 and (advantage.compares_rollouts or is_own):
            yield Finding(
                "PH201",
                "warning" if is_own else "error",
                f"orchestrator{where}.rollouts_per_example",
                f"advantage.type = {advantage.type} {'may compare' if is_own else 'compares'} the rollouts of one "
                f"prompt, and there is one: every advantage {'would be' if is_own else 'is'} 0 and nothing is learned",
                "at least 2 rollouts_per_example, or advantage.type = none",
            )
            return


@rule("rl")
def sampling(subject: Subject) -> Iterator[Finding]:
    """Greedy rollouts of one prompt are all the same, and no sample of the policy's distribution."""
    orchestrator = subject.experiment.orchestrator
    own = {f"orchestrator.env.{index}": env.sampling.temperature for index, env in enumerate(orchestrator.env)}
    if None in own.values() or not own:  # some take the common one
        own["orchestrator"] = orchestrator.sampling.temperature
    for key in [key for key, temperature in own.items() if temperature == 0 and not orchestrator.advantage.imitates]:
        yield Finding.error(
            "PH211",
            f"{key}.sampling.temperature",
            "0 is greedy: every rollout of a prompt is the same reply, so that there is nothing to compare, and a "
            "policy gradient needs samples of the policy",
            "1, or what the model's makers recommend; orchestrator.eval.sampling is greedy as it is",
        )


@rule("rl")
def stale(subject: Subject) -> Iterator[Finding]:
    """Tokens grow old beside younger ones only in a reply that goes on over an update of the weights."""
    experiment = subject.experiment
    if experiment.orchestrator.stale != "mask":
        return
    if experiment.async_level == 0:
        why, remedy = "with async_level = 0 no token is older than the batch's own version", "async_level of at least 1"
    elif experiment.model.lora is not None:
        why = "a request keeps the adapter that it began with: a reply that is too old has no younger tokens"
        remedy = "stale = resample, which is what happens"
    else:
        return
    yield Finding.warning("PH213", "orchestrator.stale", f"mask has no effect: {why}", remedy)


@rule(*TRAINING)
def batch(subject: Subject) -> Iterator[Finding]:
    """Ranks without a sample compute on padding."""
    experiment = subject.experiment
    ranks = experiment.trainer.parallel_dims.num_data_ranks
    if subject.is_rl:
        key, size = "orchestrator.batch_size", experiment.orchestrator.batch_size
    else:
        key, size = "sft.data.batch_size", experiment.sft.data.batch_size
        if experiment.sft.data.batch_tokens is not None:
            return  # no step counts samples
    if size < ranks:
        yield Finding.warning(
            "PH202",
            key,
            f"a batch of {size} samples leaves {ranks - size} of {ranks} data ranks without work in every step",
            f"a batch of at least {ranks}, or fewer trainer.num_ranks",
        )
    elif size % ranks and size < 4 * ranks:
        yield Finding.warning(
            "PH202",
            key,
            f"{size} samples do not divide over {ranks} data ranks: some train {-(-size // ranks)} and the others wait",
            f"a multiple of {ranks}",
        )


@rule("rl")
def concurrency(subject: Subject) -> Iterator[Finding]:
    """Too few episodes in flight starve the engines, too many only grow stale."""
    experiment, orchestrator = subject.experiment, subject.experiment.orchestrator
    sizes = map(orchestrator.num_rollouts, range(len(orchestrator.env)))
    group = max(sizes, default=orchestrator.rollouts_per_example)
    adaptive, flight = orchestrator.adaptive_concurrency is not None, orchestrator.most_in_flight
    key = "orchestrator.adaptive_concurrency.most" if adaptive else "orchestrator.max_concurrent"
    if flight < group:
        yield Finding.warning(
            "PH203",
            key,
            f"{flight} episodes in flight are fewer than the {group} of one prompt: its rollouts may be sampled by "
            "different versions and the engines idle",
            f"at least {group}",
        )
    elastic, servers = experiment.slurm.elastic, experiment.inference
    if elastic is not None and servers is not None and not adaptive:
        yield Finding.info(
            "PH203",
            key,
            f"{flight} episodes in flight are all that {servers.num_replicas} to "
            f"{servers.num_replicas + elastic.servers} servers share",
            "orchestrator.adaptive_concurrency: {}, which asks for as many as they take",
        )
    usable = experiment.episodes_per_step * (experiment.async_level + 1)
    is_chosen = flight != OrchestratorConfig.model_fields["max_concurrent"].default
    if flight > usable and is_chosen and not adaptive:  # of the default the gate holds the rest back
        yield Finding.warning(
            "PH203",
            key,
            f"{flight} episodes in flight are more than the {usable} that async_level = {experiment.async_level} lets "
            "a batch use: the rest grow stale or wait",
            f"at most {usable}",
        )
    inference = experiment.inference
    if inference is None:
        return
    engines = inference.num_replicas * inference.data_parallel_size
    if flight < engines:
        yield Finding.warning(
            "PH203",
            key,
            f"{flight} episodes in flight leave {engines - flight} of {engines} engines without a request",
            f"some tens for each engine: {engines * 32}",
        )


@rule(*TRAINING)
def learning_rate(subject: Subject) -> Iterator[Finding]:
    """Report a learning rate that does not become what was asked for within the run."""
    experiment = subject.experiment
    schedule, num_steps = experiment.trainer.scheduler, experiment.max_steps
    warmup, decay, key = schedule.warmup_steps, schedule.decay_steps, "trainer.scheduler.decay_steps"
    if schedule.type == "wsd" and decay is not None and warmup + decay > num_steps:
        yield Finding.error(
            "PH220",
            key,
            f"warmup_steps ({warmup}) and decay_steps ({decay}) together exceed max_steps ({num_steps})",
            "leave decay_steps out, or fewer steps of either",
        )
    elif warmup > num_steps:
        yield Finding.warning(
            "PH220",
            "trainer.scheduler.warmup_steps",
            f"the warm-up takes all {num_steps} steps: the last one has {num_steps / warmup:.3g} of the peak learning "
            f"rate{'' if schedule.type == 'constant' else ', and none decays'}",
            f"some hundredths of the run: {max(1, num_steps // 20)}",
        )
    elif schedule.type in ("linear", "cosine") and decay is not None and schedule.min_lr_ratio == 0:
        left = num_steps - warmup - decay
        if left > 0 and num_steps < sys.maxsize:  # the number of steps is known
            yield Finding.warning(
                "PH220",
                key,
                f"the decay ends at step {num_steps - left}: the last {left} steps have learning rate 0",
                "leave decay_steps out, or a min_lr_ratio above 0",
            )


@rule("rl")
def learning(subject: Subject) -> Iterator[Finding]:
    """Report samples and groups that are trained for nothing, or not as the objective's paper has it."""
    experiment, loss = subject.experiment, subject.experiment.trainer.loss
    narrowest = min(loss.bounds.low, loss.bounds.high)
    if loss.type == "gspo" and loss.correction is None and experiment.model.dtype != "float32" and narrowest < 3e-3:
        yield Finding.warning(
            "PH221",
            "trainer.loss.correction",
            f"gspo clips a sequence's ratio to the engine's policy at {narrowest:g}, and in {experiment.model.dtype} "
            "engine and trainer differ by more than that: sequences are clipped for their numerics. The paper's ratio "
            "is to the trainer's own policy",
            "trainer.loss.correction = {} (counts the mismatch apart), or clip_low and clip_high of 3e-3 and more",
        )
    if loss.covariance is not None and loss.covariance.type == "kl" and experiment.async_level == 0:
        yield Finding.warning(
            "PH221",
            "trainer.loss.covariance.type",
            "kl penalises the distance to the policy that sampled, which with async_level = 0 is the trained one: what "
            "is left is the sign of what engine and trainer compute differently",
            "async_level of at least 1, or type = clip",
        )
    if experiment.orchestrator.advantage.zero == "drop" and loss.is_of_all_tokens:
        yield Finding.warning(
            "PH222",
            "orchestrator.advantage.zero",
            "a KL penalty, an entropy bonus, imitation and a teacher's distribution are of all groups, also of those "
            "without signal, which zero = drop leaves out of the batch",
            "zero = auto",
        )
    advantage = experiment.orchestrator.advantage
    types = {env.algorithm or advantage.type for env in experiment.orchestrator.env}
    if (divided := sorted(types & {"grpo", "grpo_shuffled", "pass_at_k"})) and advantage.scale == "batch":
        yield Finding.warning(
            "PH226",
            "orchestrator.advantage.scale",
            f"{divided[0]} has divided each group's advantages by a standard deviation: scale = batch divides them "
            "once more, by a figure that tells little but how many groups have no signal",
            "orchestrator.advantage.type = dr_grpo (REINFORCE++-baseline, ScaleRL), or scale = none",
        )
    if loss.objective.imitates and not advantage.imitates and not experiment.orchestrator.curriculum.gates:
        yield Finding.warning(
            "PH227",
            "trainer.loss.type",
            f"{loss.type} looks at no advantage: bad rollouts are imitated as good ones are, and rewards teach nothing",
            "another trainer.loss.type; orchestrator.advantage.type = sft with a teacher; or "
            "orchestrator.curriculum.gates that let good groups alone in",
        )
    if advantage.type in ("opsd", "sdpo") and experiment.max_model_len <= experiment.seq_len:
        fate = "counts as failed" if advantage.type == "opsd" else "has no teacher"
        yield Finding.warning(
            "PH223",
            "inference.max_model_len",
            f"the engines take {experiment.max_model_len} tokens, as many as a sample has: with the demonstration "
            f"before it, a rollout that fills its context cannot be scored and {fate}",
            "seq_len and the longest demonstration together",
        )


@rule("rl")
def curriculum(subject: Subject) -> Iterator[Finding]:
    """Pools that do nothing, or that a task cannot leave; a gate that rejects what the algorithm learns from."""
    orchestrator, key = subject.experiment.orchestrator, "orchestrator.curriculum.sampler"
    each = [orchestrator.advantage_of(i) for i in range(len(orchestrator.env))] or [orchestrator.advantage]
    learns = {a.type: "the greedy rollout's reward is another" for a in each if a.has_greedy}
    learns |= {a.type: "single functions differ" for a in each if a.type == "gdpo"}
    for i, gate in enumerate(orchestrator.curriculum.gates):
        if gate.type == "advantage_range" and learns:
            loser, where = next(iter(learns.items()))
            yield Finding.warning(
                "PH208",
                f"orchestrator.curriculum.gates.{i}",
                "advantage_range looks at the sum of the rewards: it rejects groups whose rewards add up to the same, "
                f"though {loser} has a signal where {where}",
                "leave it out; groups without any signal are told by orchestrator.advantage.zero",
            )
    sampler = orchestrator.curriculum.sampler
    if sampler.type != "difficulty_pool":
        return
    if sampler.easy_probability == 1 and sampler.hard_probability == 1:
        yield Finding.warning(
            "PH208",
            key,
            "difficulty_pool draws easy and hard tasks with probability 1: that is the standard order",
            "a smaller easy_probability or hard_probability, or type = standard",
        )
    for pool in ("easy", "hard"):
        if getattr(sampler, f"{pool}_probability") == 0:
            yield Finding.warning(
                "PH208",
                f"{key}.{pool}_probability",
                f"a task that was {pool} once is never drawn again, whatever the policy learns or forgets",
                "a small probability, such as 0.1",
            )


@rule("rl")
def echo(subject: Subject) -> Iterator[Finding]:
    """Episodes of one turn hold nothing that the environment said afterwards."""
    orchestrator = subject.experiment.orchestrator
    has_turns = not orchestrator.env or any(env.max_turns != 1 for env in orchestrator.env)
    if orchestrator.advantage.echo is not None and not has_turns:
        yield Finding.warning(
            "PH209",
            "orchestrator.advantage.echo",
            "every environment has max_turns = 1: no token follows a reply, so that echo learns nothing",
            "an environment of several turns, or leave echo out",
        )


@rule("rl")
def evaluation(subject: Subject) -> Iterator[Finding]:
    """Report an evaluation without environments: it takes those of the training, and there are none."""
    orchestrator = subject.experiment.orchestrator
    if is_parent(subject.experiment):
        return  # its runs name them
    if orchestrator.eval is not None and not orchestrator.eval.env and not orchestrator.env:
        yield Finding.error(
            "PH204",
            "orchestrator.eval.env",
            "evaluation is on, but neither it nor the training names an environment",
            "name one, such as `- id: reverse-text`, or leave orchestrator.eval out",
        )


@rule(*EVERY)
def sandboxes(subject: Subject) -> Iterator[Finding]:
    """Code that a model writes needs a sandbox, and a sandbox what makes it."""
    for where, env in stated_environments(subject.experiment):
        by_name = "environment_ids" in where
        key = where if by_name else f"{where}.sandbox"
        benchmark = find_benchmark(env.id)
        runs_code = benchmark is not None and benchmark.kind == "code"
        sandbox = SandboxConfig() if env.sandbox is None and env.id in NEED_SANDBOX else env.sandbox
        if runs_code and sandbox is None and not env.args.get("allow_code_execution"):
            section = f"--{subject.experiment.kind}.env.0"
            yield Finding.error(
                "PH212",
                key,
                f"{env.id} runs the Python that the model writes, and neither a sandbox is stated nor that it may run "
                "without one",
                f"in place of its name alone {section}.id {env.id} {section}.sandbox; or, unprotected, "
                f"{section}.args.allow-code-execution"
                if by_name
                else "sandbox: {}; or, unprotected, args.allow_code_execution = true",
            )
        elif sandbox is not None:
            try:
                MAKERS[sandbox.runtime].find()
            except EnvError as error:
                severity: Severity = "warning" if subject.is_slurm else "error"  # other nodes may have it
                needed = f"{sandbox.runtime} on the orchestrator's node"
                yield Finding("PH212", severity, key, str(error), needed)


@rule(*TRAINING)
def checkpoints(subject: Subject) -> Iterator[Finding]:
    """Report a job that comes back and has nothing to come back to."""
    experiment = subject.experiment
    ckpt = experiment.ckpt
    if experiment.trainer.tinker is not None:
        return  # its clients save
    if ckpt is None:
        if subject.is_slurm and experiment.slurm.restart.how != "off":
            what = "a time limit, a preemption or a crash the job begins"
            if is_parent(experiment):  # Slurm's warning has them saved all the same
                what = "a crash or a lost node a run that does not state its own begins"
            yield Finding.warning(
                "PH205",
                "ckpt",
                f"checkpoints are off: after {what} again at step 1",
                "--ckpt, or slurm.restart.how = off for a job that need not come back",
            )
        return
    if is_parent(experiment):
        return  # steps are its runs' own
    if isinstance(ckpt.interval, int) and ckpt.interval >= experiment.max_steps > 1:
        yield Finding.warning(
            "PH206",
            "ckpt.interval",
            f"every {ckpt.interval} steps of {experiment.max_steps}: only the last step is saved, and what Slurm's "
            "warning or a SAVE file asks for",
            f"well below {experiment.max_steps}",
        )


@rule("rl")
def runs(subject: Subject) -> Iterator[Finding]:
    """Report a trainer of many runs that has none."""
    experiment = subject.experiment
    if is_parent(experiment) and experiment.trainer.tinker is None and not list_children(experiment.run_dir):
        yield Finding.warning(
            "PH210",
            "trainer.max_concurrent_runs",
            f"no run is below {experiment.run_dir} yet: the trainer and the engines wait for one for "
            f"{experiment.trainer.runs_idle_timeout_s:g} s (trainer.runs_idle_timeout_s), then the job ends",
            "add runs first (`prime-hpc runs add EXPERIMENT.yaml RUN.yaml`), or as soon as it has started",
        )


@rule(*EVERY)
def alarms(subject: Subject) -> Iterator[Finding]:
    """Yield rules whose metric is of no known name: they would never fire."""
    experiment = subject.experiment
    roles = {"trainer": experiment.trains, "orchestrator": experiment.trains and experiment.samples, "run": True}
    written = [file for file, is_there in roles.items() if is_there]
    for number, alarm in enumerate(experiment.alarms.rules):
        key = f"alarms.rules.{number}.metric"
        if not is_known(alarm.metric):
            meant = near(alarm.metric)
            hint = f"did you mean {', '.join(meant)}?" if meant else "see the names in metrics/*.jsonl of a run"
            severity: Severity = "error" if split_metric(alarm.metric)[0] == "run" else "warning"
            text = f"{alarm.metric}: no metric of this name is known, so that the rule may never fire"
            yield Finding("PH240", severity, key, text, hint)
        elif (file := split_metric(alarm.metric)[0]) not in written:
            text = f"{alarm.metric}: this run has no {file}, so that the rule never fires"
            yield Finding.warning("PH240", key, text, f"one of {' and '.join(f'{name}.' for name in written)}")


@rule(*EVERY)
def offline(subject: Subject) -> Iterator[Finding]:
    """Find models that are not on disk, where the environment of this machine keeps its roles off the hub."""
    said = next((name for name in OFFLINE[:2] if is_on(os.environ, name)), None)
    for one in missing_of(subject.experiment, os.environ) if said and not subject.is_slurm else ():
        if one.need.kind == "model" and one.can_fetch:
            lacks = f"{one.need.name} is not all in {one.path} ({', '.join(one.lacks)})"
            message, remedy = f"{lacks}, and {said} keeps it from the hub", f"`prime-hpc fetch FILE`, or unset {said}"
            yield Finding.warning("PH329", one.need.key, message, remedy)


@rule(*EVERY)
def on_the_hub(subject: Subject) -> Iterator[Finding]:
    """Find names of the hub's that it does not know, typing errors above all: a job would end at its start."""
    for one in missing_of(subject.experiment, subject.environ) if subject.asks_hub else ():
        if one.need.kind not in ("model", "dataset") or not one.can_fetch:
            continue
        word = ask(one.need.kind, one.need.name, subject.environ)
        if word is not None and not word.is_there:
            message = f"the hub has no {one.need.kind} {one.need.name}, or none that you may see"
            remedy = "mend the name; for one that is not public export HF_TOKEN, or `hf auth login`"
            yield Finding.warning("PH215", one.need.key, message, remedy)


@rule(*EVERY)
def output(subject: Subject) -> Iterator[Finding]:
    """Find a file where directories would be made."""
    run_dir = subject.experiment.run_dir
    file = next((path for path in (run_dir, *run_dir.parents) if os.path.isfile(path)), None)  # noqa: PTH113 - EACCES: no
    if file is not None:
        key = "name" if file == run_dir else "output_dir"
        yield Finding.error("PH234", key, f"{file} is a file: no directory can be made there", "another directory")


@rule(*EVERY)
def variables(subject: Subject) -> Iterator[Finding]:
    """Find variables of the shell in paths: nobody fills them in, and a directory of that name would be made."""
    experiment = subject.experiment
    paths = stated_paths(experiment, subject.site, experiment.output_dir)
    for key, path in {**paths, "model.name": Path(experiment.model.name)}.items():
        found = re.search(r"\$([A-Za-z_]\w*)", str(path))
        if found and not path.exists():
            text, name = f"{path}: nothing puts a value in place of {found[0]} here", found[1]
            yield Finding.error("PH237", key, text, f"${{oc.env:{name}}} is the value that it has in this shell")
