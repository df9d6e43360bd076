"""Every target's share of the batch's loss.

The denominators are those of the WHOLE step, over all ranks and micro-batches, so that packing, sharding and splitting
change nothing. With `trainer.loss.denominators = all` they also count the rollouts of groups without signal (all G x N
of them, as the papers write their sums), which add nothing to the loss and need not be computed; and a sequence's
length and weight are those of the rollout that it is a piece of. With `trained` they count the sequences that are in
the batch.
"""

import torch


def target_weights(
    sequence: torch.Tensor,
    targets_of_sequence: torch.Tensor,
    normalize: str,
    num_targets: float,
    num_sequences: float,
    batch_tokens: int = 1,
) -> torch.Tensor:
    """Weight of every target in the batch's loss, float32 `[N]`.

    `token`: every target counts the same; weights sum to 1 (DAPO, arXiv 2503.14476, section 3.3).
    `sequence`: every sequence counts the same, its targets share that evenly; they sum to 1 (GRPO's 1/G sum 1/|o_i|,
    averaged over the prompts).
    `batch`: every target counts 1 / (sequences x `batch_tokens`), a constant that no sequence's length touches (Dr.
    GRPO, arXiv 2503.20783, section 3.2); they sum to the mean number of targets over `batch_tokens`.

    Args:
        sequence: int64 `[N]`, the sequence (of this micro-batch) to which a target belongs.
        targets_of_sequence: int64 `[S]`, number of targets of each sequence; of the whole rollout where it is a piece.
        normalize: `token`, `sequence` or `batch`.
        num_targets, num_sequences: targets, and sequences (or rollouts) that have any, in the WHOLE step: the global
            denominators.
        batch_tokens: `batch`: the constant that stands for a sequence's length.

    Raises:
        ValueError: unknown `normalize`.
    """
    if normalize == "token":
        return torch.full((len(sequence),), 1.0 / max(num_targets, 1), device=sequence.device)
    if normalize == "sequence":
        return 1.0 / (targets_of_sequence[sequence].float() * max(num_sequences, 1))
    if normalize == "batch":
        return torch.full((len(sequence),), 1.0 / (max(num_sequences, 1) * batch_tokens), device=sequence.device)
    raise ValueError(f"trainer.loss.normalize must be token, sequence or batch, got {normalize!r}")
