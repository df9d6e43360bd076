"""The table of what a run tells Prometheus: names, kinds, labels and meanings, and which metric of a row becomes which.

Names and units as Prometheus' conventions have them: base units (seconds, bytes, ratios of 0 to 1), `_total` for what
only grows. Every sample has the label `run`; the others are named here. `slurm/MONITORING.md` shows this table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "prime_hpc_"
GIB = 2.0**30
Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Family:
    """One metric of Prometheus."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


def _gauge(text: str, *labels: str) -> Family:
    return Family("gauge", text, labels)


def _counter(text: str, *labels: str) -> Family:
    return Family("counter", text, labels)


RUN = {
    "run_info": _gauge("Facts of the run that do not change within an attempt; always 1.", "kind", "attempt", "job_id"),
    "run_state": _gauge("1 for the state that the supervisor is in.", "state"),
    "run_step": _gauge("Last step of the trainer; of a run that trains nothing its last episode."),
    "run_max_steps": _gauge("Step at which the run is complete."),
    "run_stall_seconds": _gauge("How long the present step has stood still; 0: it does not."),
    "run_walltime_left_seconds": _gauge("Time to the job's end."),
    "run_attempts_ended_total": _counter("Attempts that have ended.", "outcome"),
    "run_alarms_total": _counter("Alarms that fired in this attempt.", "rule"),
    "run_collected_timestamp_seconds": _gauge("When these figures were collected: an old one means files hang."),
    "filesystem_free_bytes": _gauge("Space that is left for the user where the run directory is."),
    "filesystem_size_bytes": _gauge("Size of the file system of the run directory."),
    "role_state": _gauge("1 for the state that a role is in.", "role", "state"),
    "role_restarts_total": _counter("How often a role was started again in place.", "role"),
    "process_info": _gauge("A role's process that has spoken; always 1.", "role", "index", "host", "pid"),
    "process_step": _gauge(
        "Last step that a role's process has told of: a rank but the first every 5 s.", "role", "index"
    ),
    "process_last_word_timestamp_seconds": _gauge("When a role's process spoke last.", "role", "index"),
    "process_resident_memory_bytes": _gauge("Memory that a role's process holds.", "role", "index"),
    "process_cpu_seconds_total": _counter("CPU time that a role's process has used.", "role", "index"),
    "server_up": _gauge("1: a server has answered with its own figures, which are handed on.", "server"),
}
TRAINER = {
    "trainer_steps_total": _counter("Steps."),
    "trainer_tokens_total": _counter("Tokens trained on."),
    "trainer_sequences_total": _counter("Samples trained on."),
    "trainer_flops_total": _counter("Floating point operations of the model."),
    "trainer_phase_seconds_total": _counter("Time of rank 0 by what it did; wait: for a batch.", "phase"),
    "trainer_step_seconds": _gauge("Length of the last step."),
    "trainer_loss": _gauge("Loss of the last step."),
    "trainer_eval_loss": _gauge("Held-out loss."),
    "trainer_part_loss": _gauge("Parts of the loss by name.", "part"),
    "trainer_gradient_norm": _gauge("Norm of the gradients before clipping."),
    "trainer_learning_rate": _gauge("Learning rate."),
    "trainer_reward": _gauge("Mean reward of the batch as the trainer saw it."),
    "trainer_entropy_nats": _gauge("Mean entropy of a token."),
    "trainer_kl_nats": _gauge("Divergence between trainer and engine on the same tokens."),
    "trainer_probability_ratio": _gauge("Probability under the trainer over that under the engine.", "stat"),
    "trainer_logprob_difference_nats": _gauge("Absolute difference of the two log-probabilities.", "stat"),
    "trainer_clipped_ratio": _gauge("Share of tokens whose ratio is outside of the objective's bounds."),
    "trainer_mismatch": _gauge("1: trainer and engine disagree more than they should."),
    "trainer_lag_versions": _gauge("How many versions older than the policy the batch's tokens are.", "stat"),
    "trainer_tokens_per_second": _gauge(
        "Tokens trained on; computing: while it computes, overall: waits included.", "of"
    ),
    "trainer_flops_utilization_ratio": _gauge("Model FLOPs utilization (MFU)."),
    "trainer_shared_tokens": _gauge("Prompt tokens of the last batch that were computed once for several samples."),
    "trainer_target_tokens": _gauge("Tokens of the last batch that bear a loss."),
    "trainer_memory_bytes": _gauge("Memory of rank 0's device.", "kind"),
    "trainer_checkpoint_bytes": _gauge("Size of the last checkpoint."),
    "trainer_checkpoint_seconds": _gauge("Time of the last checkpoint; stall: while the step waited.", "kind"),
    "trainer_other": _gauge("What else the trainer writes into its rows, by its name there.", "name"),
}
ORCHESTRATOR = {
    "orchestrator_steps_total": _counter("Batches."),
    "orchestrator_episodes_total": _counter("Episodes that ended, by how.", "state"),
    "orchestrator_groups_total": _counter("Groups of rollouts, by what became of them.", "fate"),
    "orchestrator_tokens_total": _counter("Tokens of ended episodes.", "kind"),
    "orchestrator_server_retries_total": _counter("Requests that were sent again to a server."),
    "orchestrator_wait_seconds_total": _counter("Time in which it could only wait.", "awaits"),
    "orchestrator_step_seconds": _gauge("Time between the last two batches."),
    "orchestrator_reward": _gauge("Reward of the last batch's rollouts.", "stat"),
    "orchestrator_batch_groups": _gauge("Groups of the last batch, by what is true of them.", "kind"),
    "orchestrator_group_reward_spread": _gauge("Mean difference between a group's greatest and least reward."),
    "orchestrator_masked_rollouts": _gauge("Rollouts of the last batch that bear no loss."),
    "orchestrator_completion_tokens": _gauge("Tokens sampled for a rollout of the last batch.", "stat"),
    "orchestrator_lag_versions": _gauge("How many versions older than the policy the batch's tokens are.", "stat"),
    "orchestrator_episodes_per_second": _gauge("Episodes that ended."),
    "orchestrator_sampled_tokens_per_second": _gauge("Tokens sampled."),
    "orchestrator_usable_episodes": _gauge("Episodes since the last batch that may be trained on."),
    "orchestrator_truncated_episodes": _gauge("Episodes since the last batch that were cut at a limit."),
    "orchestrator_failed_ratio": _gauge("Share of the last episodes that failed."),
    "orchestrator_batch_tokens": _gauge("Tokens of the last batch; loss: those that bear one.", "kind"),
    "orchestrator_batch_sequences": _gauge("Sequences of the last batch."),
    "orchestrator_batch_micro_batches": _gauge("Micro-batches of the last batch."),
    "orchestrator_episodes_in_flight": _gauge(
        "Episodes that are played now, in the mean over the step, at most.", "stat"
    ),
    "orchestrator_kv_cache_ratio": _gauge("Share in use of the fullest KV cache, highest since the last batch."),
    "orchestrator_waiting_requests": _gauge("Requests in a server's queue, mean over the step and all servers."),
    "orchestrator_preempted_requests_total": _counter("Requests that an engine threw out for want of room."),
    "orchestrator_queued_groups": _gauge("Whole groups that wait for a batch."),
    "orchestrator_sent_back_prompts": _gauge("Prompts that were sent back to be drawn again."),
    "orchestrator_engines_idle_ratio": _gauge("Share of the step, over servers, in which one had no episode at all."),
    "orchestrator_seats": _gauge("Episodes in flight at once at the fullest moment of the last 16 steps."),
    "orchestrator_empty_seats_ratio": _gauge(
        "Share of the seats that was empty over the step, by what kept them so; all: the sum.", "cause"
    ),
    "orchestrator_served_version": _gauge("Version that the engines sample from."),
    "orchestrator_weight_update_seconds": _gauge("Time until the last version was in all engines."),
    "orchestrator_weight_pause_seconds": _gauge("Time in which sampling paused for the last version."),
    "orchestrator_run_samples": _gauge("Samples of the whole run, over all attempts."),
    "orchestrator_run_tokens": _gauge("Tokens of the whole run, over all attempts."),
    "orchestrator_other": _gauge("What else the orchestrator writes into its rows, by its name there.", "name"),
    "env_reward": _gauge("Reward of an environment's rollouts in the last batch.", "env", "stat"),
    "env_metric": _gauge("Mean of an environment's own metric in the last batch.", "env", "metric"),
    "env_eval": _gauge("Result of the last evaluation of an environment.", "env", "metric"),
    "env_workers": _gauge("Processes of an environment that play episodes.", "env"),
    "env_worker_busy_ratio": _gauge("Share of an environment's processes that are busy.", "env"),
    "env_worker_memory_bytes": _gauge("Memory of the largest process of an environment.", "env"),
    "env_worker_episodes": _gauge("Episodes at an environment's processes now.", "env", "state"),
    "env_worker_events_total": _counter(
        "What an environment's processes have done, and what befell them.", "env", "event"
    ),
}
FAMILIES: dict[str, Family] = {PREFIX + name: family for name, family in (RUN | TRAINER | ORCHESTRATOR).items()}


@dataclass(frozen=True)
class Target:
    """The place of a row's metric: a family, values of its labels, and what it is multiplied with."""

    name: str
    labels: tuple[str, ...] = ()
    scale: float = 1.0


def _stats(metric: str, name: str, *stats: str) -> dict[str, Target]:
    """`lag/mean`, `lag/max` as one family with the label `stat`."""
    return {metric + stat: Target(name, (stat.strip("/_") or "mean",)) for stat in stats}


TRAINER_ROWS: dict[str, Target] = {
    "num_tokens": Target("trainer_tokens_total"),
    "num_sequences": Target("trainer_sequences_total"),
    "step_flops": Target("trainer_flops_total"),
    "time/step": Target("trainer_step_seconds"),
    "loss": Target("trainer_loss"),
    "eval_loss": Target("trainer_eval_loss"),
    "echo_loss": Target("trainer_part_loss", ("echo",)),
    "grad_norm": Target("trainer_gradient_norm"),
    "lr": Target("trainer_learning_rate"),
    "reward": Target("trainer_reward"),
    "entropy": Target("trainer_entropy_nats"),
    "kl": Target("trainer_kl_nats"),
    **_stats("ratio", "trainer_probability_ratio", "", "_max"),
    **_stats("logprob_diff", "trainer_logprob_difference_nats", "", "_max"),
    **_stats("lag", "trainer_lag_versions", "_mean", "_max"),
    "clipped": Target("trainer_clipped_ratio"),
    "mismatch_alarm": Target("trainer_mismatch"),
    "tokens_per_s": Target("trainer_tokens_per_second", ("computing",)),
    "tokens_per_s_overall": Target("trainer_tokens_per_second", ("overall",)),
    "mfu": Target("trainer_flops_utilization_ratio"),
    "shared_tokens": Target("trainer_shared_tokens"),
    "num_targets": Target("trainer_target_tokens"),
    "ckpt/gib": Target("trainer_checkpoint_bytes", (), GIB),
    "ckpt/seconds": Target("trainer_checkpoint_seconds", ("whole",)),
    "ckpt/write_s": Target("trainer_checkpoint_seconds", ("write",)),
    "ckpt/stall_s": Target("trainer_checkpoint_seconds", ("stall",)),
}
ORCHESTRATOR_ROWS: dict[str, Target] = {
    **{
        f"episodes/{state}": Target("orchestrator_episodes_total", (state,))
        for state in ("completed", "failed", "timeout", "cancelled")
    },
    **{
        f"groups/{fate}": Target("orchestrator_groups_total", (fate,))
        for fate in ("opened", "completed", "dropped", "rejected", "stale")
    },
    **{
        f"groups/{kind}": Target("orchestrator_batch_groups", (kind,))
        for kind in ("in_batch", "trained", "zero_signal", "unscorable")
    },
    **{f"tokens/{kind}": Target("orchestrator_tokens_total", (kind,)) for kind in ("prompt", "sampled")},
    **{
        f"time/wait_{whom}": Target("orchestrator_wait_seconds_total", (whom,))
        for whom in ("rollouts", "weights", "servers")
    },
    **_stats("reward", "orchestrator_reward", "/mean", "/std", "/shaped_mean"),
    **_stats("completion/tokens", "orchestrator_completion_tokens", "_mean", "_max"),
    **_stats("lag", "orchestrator_lag_versions", "/mean", "/max"),
    "queue/in_flight": Target("orchestrator_episodes_in_flight", ("now",)),
    "queue/in_flight_mean": Target("orchestrator_episodes_in_flight", ("mean",)),
    "queue/limit": Target("orchestrator_episodes_in_flight", ("limit",)),
    "engines/kv_use": Target("orchestrator_kv_cache_ratio"),
    "engines/waiting": Target("orchestrator_waiting_requests"),
    "engines/preempted": Target("orchestrator_preempted_requests_total"),
    "episodes/server_retries": Target("orchestrator_server_retries_total"),
    "time/step": Target("orchestrator_step_seconds"),
    "groups/reward_spread": Target("orchestrator_group_reward_spread"),
    "rollouts/masked": Target("orchestrator_masked_rollouts"),
    "episodes/per_second": Target("orchestrator_episodes_per_second"),
    "tokens/sampled_per_second": Target("orchestrator_sampled_tokens_per_second"),
    "episodes/usable": Target("orchestrator_usable_episodes"),
    "episodes/truncated": Target("orchestrator_truncated_episodes"),
    "failed/share": Target("orchestrator_failed_ratio"),
    "batch/tokens": Target("orchestrator_batch_tokens", ("all",)),
    "batch/loss_tokens": Target("orchestrator_batch_tokens", ("loss",)),
    "batch/sequences": Target("orchestrator_batch_sequences"),
    "batch/micro_batches": Target("orchestrator_batch_micro_batches"),
    "queue/complete_groups": Target("orchestrator_queued_groups"),
    "queue/sent_back": Target("orchestrator_sent_back_prompts"),
    "queue/idle_share": Target("orchestrator_engines_idle_ratio"),
    "queue/seats": Target("orchestrator_seats"),
    "queue/empty_seats": Target("orchestrator_empty_seats_ratio", ("all",)),
    **{
        f"queue/empty_{cause}": Target("orchestrator_empty_seats_ratio", (cause,))
        for cause in ("tail", "gate", "weights", "servers", "end")
    },
    "policy/served_version": Target("orchestrator_served_version"),
    "time/weight_update": Target("orchestrator_weight_update_seconds"),
    "time/weight_pause": Target("orchestrator_weight_pause_seconds"),
    "total/samples": Target("orchestrator_run_samples"),
    "total/tokens": Target("orchestrator_run_tokens"),
}
_WORKER = {
    "workers": Target("env_workers"),
    "busy": Target("env_worker_busy_ratio"),
    "memory_gib": Target("env_worker_memory_bytes", (), GIB),
    "in_flight": Target("env_worker_episodes", ("in_flight",)),
    "queued": Target("env_worker_episodes", ("queued",)),
}
_ENV_REWARD = re.compile(r"reward/(.+)/(mean|std)")
_ENV = re.compile(r"(env|eval)/([^/]+)/(.+)")
_ENV_WORKERS = re.compile(r"env_workers/(.+)/([^/]+)")
_NO_METRICS = ("step", "time")


def target_of(role: str, metric: str) -> Target | None:
    """Return the place of a metric of `metrics/<role>.jsonl`; None for a row's step and time."""
    if metric in _NO_METRICS:
        return None
    rows: Mapping[str, Target] = TRAINER_ROWS if role == "trainer" else ORCHESTRATOR_ROWS
    if metric in rows:
        return rows[metric]
    if role == "trainer":
        group, _, name = metric.partition("/")
        if group == "time":
            return Target("trainer_phase_seconds_total", (name,))
        if group == "memory" and name.endswith("_gib"):
            return Target("trainer_memory_bytes", (name.removesuffix("_gib"),), GIB)
        return Target("trainer_part_loss", (name,)) if group == "loss" and name else Target("trainer_other", (metric,))
    if found := _ENV_REWARD.fullmatch(metric):
        return Target("env_reward", found.groups())
    if found := _ENV_WORKERS.fullmatch(metric):
        env, figure = found.groups()
        known = _WORKER.get(figure)
        if known is None:
            return Target("env_worker_events_total", (env, figure))
        return Target(known.name, (env, *known.labels), known.scale)
    if found := _ENV.fullmatch(metric):
        return Target("env_metric" if found[1] == "env" else "env_eval", found.groups()[1:])
    return Target("orchestrator_other", (metric,))


def table() -> list[str]:
    """Return the lines of the document's table."""
    rows = [
        f"| `{name}` | {f.kind} | {', '.join(f'`{x}`' for x in f.labels)} | {f.text} |" for name, f in FAMILIES.items()
    ]
    return ["| metric | kind | labels besides `run` | meaning |", "|---|---|---|---|", *rows]
