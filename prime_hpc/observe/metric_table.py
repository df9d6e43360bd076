"""The table of what trainer and orchestrator write of a step: one row a family, which is what Prometheus calls it, with
the metrics of `metrics/<role>.jsonl` that it is made of.

Names and units of families as Prometheus' conventions have them: base units (seconds, bytes, ratios of 0 to 1),
`_total` for what only grows. Names that alarms may watch (`metric_names`), the families that are told to Prometheus
(`supervisor.prometheus.families`) and the table of `slurm/MONITORING.md` follow from the rows here. A metric that has
none is written all the same, and told as `trainer_other` or `orchestrator_other`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Family:
    """One metric of Prometheus, and those of the rows that it is made of."""

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name in the rows -> values of the labels."""


def gauge(text: str, *labels: str, of: str | Mapping[str, str] = "") -> Family:
    """Declare what goes up and down.

    Args:
        labels: besides the run.
        of: its metric in the rows; with a label each of them and the label's value.
    """
    return Family("gauge", text, labels, _metrics(of))


def counter(text: str, *labels: str, of: str | Mapping[str, str] = "") -> Family:
    """Declare what only grows: the rows' values are added up. Arguments as for `gauge`."""
    return Family("counter", text, labels, _metrics(of))


def _metrics(of: str | Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    if isinstance(of, str):
        return {of: ()} if of else {}
    return {metric: (value,) for metric, value in of.items()}


def each(prefix: str, names: str) -> dict[str, str]:
    """Return metrics that begin alike, with the rest of their names as the label's value."""
    return {prefix + name: name for name in names.split()}


TRAINER: dict[str, Family] = {
    "trainer_steps_total": counter("Steps."),
    "trainer_tokens_total": counter("Tokens trained on.", of="num_tokens"),
    "trainer_sequences_total": counter("Samples trained on.", of="num_sequences"),
    "trainer_flops_total": counter("Floating point operations of the model.", of="step_flops"),
    "trainer_phase_seconds_total": counter(
        "Time of rank 0 by what it did; wait: for a batch.",
        "phase",
        of=each("time/", "wait forward_backward optim publish checkpoint"),
    ),
    "trainer_step_seconds": gauge("Length of the last step.", of="time/step"),
    "trainer_loss": gauge("Loss of the last step.", of="loss"),
    "trainer_eval_loss": gauge("Held-out loss.", of="eval/loss"),
    "trainer_side_reward": gauge(
        "Mean reward of a side of preference pairs, beta times its log-ratio.",
        "side",
        of={"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    ),
    "trainer_reward_margin": gauge(
        "Mean difference of the sides' rewards.",
        "rows",
        of={"rewards/margins": "trained", "eval/rewards/margins": "held_out"},
    ),
    "trainer_pair_accuracy_ratio": gauge(
        "Share of pairs whose chosen side has the larger reward.",
        "rows",
        of={"rewards/accuracies": "trained", "eval/rewards/accuracies": "held_out"},
    ),
    "trainer_side_logprob_nats": gauge(
        "Mean log-probability of a side's reply.",
        "side",
        of={"logps/chosen": "chosen", "logps/rejected": "rejected"},
    ),
    "trainer_part_loss": gauge("Parts of the loss by name.", "part", of={"echo_loss": "echo"}),
    "trainer_critic_loss": gauge("Half the squared error of the critic's values.", of="critic/loss"),
    "trainer_critic_gradient_norm": gauge("Norm of the critic's gradients before clipping.", of="critic/grad_norm"),
    "trainer_critic_reward": gauge(
        "Mean reward still to come at a token, as the critic has it and as it was.",
        "rows",
        of={"critic/value": "predicted", "critic/return": "returned"},
    ),
    "trainer_critic_explained_variance_ratio": gauge(
        "Share of the returns' variance that the critic knew before it learned from them.",
        of="critic/explained_variance",
    ),
    "trainer_gradient_norm": gauge("Norm of the gradients before clipping.", of="grad_norm"),
    "trainer_learning_rate": gauge("Learning rate.", of="lr"),
    "trainer_reward": gauge("Mean reward of the batch as the trainer saw it.", of="reward"),
    "trainer_entropy_nats": gauge("Mean entropy of a token.", of="entropy"),
    "trainer_entropy_coefficient": gauge("Weight of the entropy bonus in the last step.", of="entropy_coef"),
    "trainer_kl_nats": gauge("Divergence between trainer and engine on the same tokens.", of="kl"),
    "trainer_probability_ratio": gauge(
        "Probability under the trainer over that under the engine.", "stat", of={"ratio": "mean", "ratio_max": "max"}
    ),
    "trainer_logprob_difference_nats": gauge(
        "Absolute difference of the two log-probabilities.",
        "stat",
        of={"logprob_diff": "mean", "logprob_diff_max": "max"},
    ),
    "trainer_clipped_ratio": gauge("Share of tokens whose ratio is outside of the objective's bounds.", of="clipped"),
    "trainer_clipped_side_ratio": gauge(
        "The same by side; high: the ratio is above 1, low: below.",
        "side",
        of={"clipped_high": "high", "clipped_low": "low"},
    ),
    "trainer_left_out_ratio": gauge(
        "Share of tokens that the importance correction bounds or leaves out, off-policy masking, the second moment, "
        "low entropy, and high covariance (KL-Cov: bounds).",
        "by",
        of={
            "corrected": "correction",
            "off_policy_masked": "off_policy_mask",
            "second_moment_masked": "second_moment",
            "low_entropy_masked": "low_entropy",
            "high_covariance": "high_covariance",
        },
    ),
    "trainer_mismatch": gauge("1: trainer and engine disagree more than they should.", of="mismatch_alarm"),
    "trainer_lag_versions": gauge(
        "How many versions older than the policy the batch's tokens are.",
        "stat",
        of={"lag_mean": "mean", "lag_max": "max"},
    ),
    "trainer_tokens_per_second": gauge(
        "Tokens trained on; computing: while it computes, overall: waits included.",
        "of",
        of={"tokens_per_s": "computing", "tokens_per_s_overall": "overall"},
    ),
    "trainer_flops_utilization_ratio": gauge("Model FLOPs utilization (MFU).", of="mfu"),
    "trainer_shared_tokens": gauge(
        "Prompt tokens of the last batch that were computed once for several samples.", of="shared_tokens"
    ),
    "trainer_target_tokens": gauge("Tokens of the last batch that bear a loss.", of="num_targets"),
    "trainer_checkpoint_bytes": gauge("Size of the last checkpoint.", of="ckpt/bytes"),
    "trainer_checkpoint_seconds": gauge(
        "Time of the last checkpoint; stall: while the step waited.",
        "kind",
        of={"ckpt/write_s": "write", "ckpt/stall_s": "stall"},
    ),
    "trainer_slow_ranks": gauge("Ranks that are slower than the others for long.", of="ranks/slow"),
    "trainer_rank_product_ratio": gauge(
        "Time of a fixed matrix product on the slowest rank over the median rank's.", of="ranks/product_ratio"
    ),
    "trainer_rank_excess_seconds": gauge(
        "By how much the slowest rank reads its part of a batch, or writes its files, longer than the median one.",
        "kind",
        of={"ranks/read_excess_s": "read", "ranks/write_excess_s": "write"},
    ),
    "trainer_slowest_rank": gauge(
        "Number of the slowest rank, by what it was timed at.",
        "kind",
        of={f"ranks/{kind}_rank": kind for kind in ("product", "read", "write")},
    ),
    "trainer_other": gauge("What else the trainer writes into its rows, by its name there.", "name"),
}
ORCHESTRATOR: dict[str, Family] = {
    "orchestrator_steps_total": counter("Batches."),
    "orchestrator_episodes_total": counter(
        "Episodes that ended, by how.",
        "state",
        of=each("episodes/", "completed failed timeout cancelled"),
    ),
    "orchestrator_groups_total": counter(
        "Groups of rollouts, by what became of them.",
        "fate",
        of=each("groups/", "opened completed dropped rejected stale"),
    ),
    "orchestrator_tokens_total": counter(
        "Tokens of ended episodes.", "kind", of={"tokens/prompt": "prompt", "tokens/sampled": "sampled"}
    ),
    "orchestrator_stale_tokens_ratio": gauge(
        "Share of a batch's sampled tokens that do not train: too old (`orchestrator.stale: mask`).", of="tokens/stale"
    ),
    "orchestrator_server_retries_total": counter(
        "Requests that were sent again to a server.", of="episodes/server_retries"
    ),
    "orchestrator_wait_seconds_total": counter(
        "Time in which it could only wait.",
        "awaits",
        of={"time/wait_rollouts": "rollouts", "time/wait_weights": "weights", "time/wait_servers": "servers"},
    ),
    "orchestrator_step_seconds": gauge("Time between the last two batches.", of="time/step"),
    "orchestrator_reward": gauge(
        "Reward of the last batch's rollouts.",
        "stat",
        of={"reward/mean": "mean", "reward/std": "std", "reward/shaped_mean": "shaped_mean"},
    ),
    "orchestrator_batch_groups": gauge(
        "Groups of the last batch, by what is true of them.",
        "kind",
        of=each("groups/", "in_batch trained with_signal zero_signal unscorable solved_all solved_none"),
    ),
    "orchestrator_group_reward_spread": gauge(
        "Mean difference between a group's greatest and least reward.", of="groups/reward_spread"
    ),
    "orchestrator_masked_rollouts": gauge("Rollouts of the last batch that bear no loss.", of="rollouts/masked"),
    "orchestrator_completion_tokens": gauge(
        "Tokens sampled for a rollout of the last batch, its percentiles; untruncated: of those that were not cut at a "
        "limit; above, below: those whose reward is so in their group.",
        "stat",
        of=each("completion/tokens_", "mean max p10 p90 mean_untruncated mean_above mean_below"),
    ),
    "orchestrator_prompt_tokens": gauge(
        "Tokens of a rollout of the last batch that were not sampled: its prompt, what tools and users said.",
        "stat",
        of={"prompt/tokens_mean": "mean", "prompt/tokens_max": "max"},
    ),
    "orchestrator_truncated_ratio": gauge(
        "Share of the last batch's rollouts that were cut at a limit.", of="completion/truncated"
    ),
    "orchestrator_lag_versions": gauge(
        "How many versions older than the policy the batch's tokens are.",
        "stat",
        of={"lag/mean": "mean", "lag/max": "max"},
    ),
    "orchestrator_episodes_per_second": gauge("Episodes that ended, greedy ones too.", of="episodes/per_second"),
    "orchestrator_sampled_tokens_per_second": gauge(
        "Tokens sampled, with those of greedy rollouts.", of="tokens/sampled_per_second"
    ),
    "orchestrator_usable_episodes": gauge(
        "Episodes since the last batch that may be trained on.", of="episodes/usable"
    ),
    "orchestrator_truncated_episodes": gauge(
        "Episodes since the last batch that were cut at a limit.", of="episodes/truncated"
    ),
    "orchestrator_failed_ratio": gauge("Share of the last episodes that failed.", of="failed/share"),
    "orchestrator_batch_tokens": gauge(
        "Tokens of the last batch; loss: those that bear one.",
        "kind",
        of={"batch/tokens": "all", "batch/loss_tokens": "loss"},
    ),
    "orchestrator_batch_sequences": gauge("Sequences of the last batch.", of="batch/sequences"),
    "orchestrator_batch_micro_batches": gauge("Micro-batches of the last batch.", of="batch/micro_batches"),
    "orchestrator_episodes_in_flight": gauge(
        "Episodes that are played now, in the mean over the step, at most.",
        "stat",
        of={"queue/in_flight": "now", "queue/in_flight_mean": "mean", "queue/limit": "limit"},
    ),
    "orchestrator_kv_cache_ratio": gauge(
        "Share in use of the fullest KV cache, highest since the last batch.", of="engines/kv_use"
    ),
    "orchestrator_waiting_requests": gauge(
        "Requests in a server's queue, mean over the step and all servers.", of="engines/waiting"
    ),
    "orchestrator_preempted_requests_total": counter(
        "Requests that an engine threw out for want of room.", of="engines/preempted"
    ),
    "orchestrator_draft_acceptance_ratio": gauge(
        "Share of the drafted tokens that engines accepted (speculative decoding).", of="engines/draft_acceptance"
    ),
    "orchestrator_queued_groups": gauge("Whole groups that wait for a batch.", of="queue/complete_groups"),
    "orchestrator_sent_back_prompts": gauge("Prompts that were sent back to be drawn again.", of="queue/sent_back"),
    "orchestrator_engines_idle_ratio": gauge(
        "Share of the step, over servers, in which one had no episode at all.", of="queue/idle_share"
    ),
    "orchestrator_seats": gauge(
        "Episodes in flight at once at the fullest moment of the last 16 steps.", of="queue/seats"
    ),
    "orchestrator_empty_seats_ratio": gauge(
        "Share of the seats that was empty over the step, by what kept them so; all: the sum.",
        "cause",
        of={"queue/empty_seats": "all"} | each("queue/empty_", "tail gate weights servers end"),
    ),
    "orchestrator_served_version": gauge("Version that the engines sample from.", of="policy/served_version"),
    "orchestrator_weight_update_seconds": gauge(
        "Time until the last version was in all engines.", of="time/weight_update"
    ),
    "orchestrator_weight_pause_seconds": gauge(
        "Time in which sampling paused for the last version.", of="time/weight_pause"
    ),
    "orchestrator_run_samples": gauge("Samples of the whole run, over all attempts.", of="total/samples"),
    "orchestrator_run_tokens": gauge("Tokens of the whole run, over all attempts.", of="total/tokens"),
    "orchestrator_other": gauge("What else the orchestrator writes into its rows, by its name there.", "name"),
    "env_reward": gauge("Reward of an environment's rollouts in the last batch.", "env", "stat"),
    "env_groups": gauge(
        "Groups of an environment in the last batch, and those all or none of which solved their task.", "env", "kind"
    ),
    "env_thread_busy_ratio": gauge(
        "Share of a core that the thread of all environments without processes used in the last minute.",
        "pool",
        of={"env_thread/busy": "train", "env_thread/eval/busy": "eval"},
    ),
    "env_thread_late_seconds": gauge(
        "By how much that thread was late at most in the last minute.",
        "pool",
        of={"env_thread/late_s": "train", "env_thread/eval/late_s": "eval"},
    ),
    "env_metric": gauge("Mean of an environment's own metric in the last batch.", "env", "metric"),
    "env_eval": gauge("Result of the last evaluation of an environment.", "env", "metric"),
    "env_workers": gauge("Processes of an environment that play episodes.", "env"),
    "env_worker_busy_ratio": gauge("Share of an environment's processes that are busy.", "env"),
    "env_worker_memory_bytes": gauge("Memory of the largest process of an environment.", "env"),
    "env_worker_episodes": gauge("Episodes at an environment's processes now.", "env", "state"),
    "env_worker_events_total": counter(
        "What an environment's processes have done, and what befell them.", "env", "event"
    ),
}
