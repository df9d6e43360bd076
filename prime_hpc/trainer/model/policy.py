"""The policy under FSDP2: any Hugging Face causal LM, sharded, with packed attention and chunked log-probabilities.

Master parameters and optimizer state are float32; the forward and backward pass run in `model.dtype`; gradients are
reduced in float32. `load_policy` makes it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from prime_hpc.config.sections.trainer import SMALL_LOGITS
from prime_hpc.moe import replay
from prime_hpc.trainer.batching.image_inputs import ImageInputs
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.lora import Adapters
from prime_hpc.trainer.model import score_head
from prime_hpc.trainer.model.conversions import WeightMap
from prime_hpc.trainer.model.vision import forward_with_images, nothing_of_images
from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.ops.context_parallel import gather_targets
from prime_hpc.trainer.ops.logprobs import VocabShard, token_logprobs
from prime_hpc.trainer.ops.truncation import Truncation
from prime_hpc.trainer.parallel import Parallel
from prime_hpc.trainer.parallel.tensor import local


class Policy(nn.Module):
    """An HF causal LM that answers with log-probabilities of a micro-batch's targets instead of logits."""

    exact_logits: bool = False
    """True if a half-precision head's logits stay in float32 (`model.head_dtype`)."""
    fused_head: bool = True
    """True if a GPU's kernels may take the head (`model.fused_head`)."""
    pads_rows: bool = True
    """True if attention goes through padded buckets, which a micro-batch then must plan."""
    adapters: Adapters | None = None
    """With `model.lora`: what is trained instead of the model's own parameters. They are none of this module's."""

    replays_routers: bool = False
    """True if tokens go to the experts that a micro-batch names (`trainer.router_replay`)."""

    image_inputs: ImageInputs | None = None
    """How it takes images, with `model.vision`."""
    trains_vision: bool = False
    """True if what makes embeddings of images is trained, too (`model.vision: trained`)."""

    is_critic: bool = False
    """True of a critic: its scores are values, read where the policy predicts a target (`trainer.critic`)."""

    weights: WeightMap | None = None
    """Sources of its tensors in the checkpoint that they come from, and how they are published."""

    reward_config: dict[str, Any] | None = None
    """Of a reward model (`score_head`): its config.json."""

    def __init__(self, hf: Any, attn: str, chunk_tokens: int, parallel: Parallel, *, single_rows: bool = False) -> None:
        super().__init__()
        self.hf = hf
        self.single_rows = single_rows
        """Whether each sample takes a row of its own, see `config.families`."""
        self.parallel = parallel
        self.partly_used: list[nn.Module] = []
        """Modules whose parameters' gradients are to be summed over tensor-parallel ranks."""
        self.attn = attn
        self._chunk_tokens = max(chunk_tokens, SMALL_LOGITS // hf.get_output_embeddings().weight.shape[0])
        config = hf.config.get_text_config()
        # The three ways in which transformers' causal LMs post-process their logits.
        caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
        self._softcap: float | None = next((cap for cap in caps if cap), None)
        divisor = getattr(config, "logits_scaling", None) or 1.0
        self._logit_scale = float(getattr(config, "logit_scale", None) or 1.0) / float(divisor)

    @property
    def scores(self) -> bool:
        """True of a reward model: it answers with the scores of tokens, which a scalar head gives."""
        return self.reward_config is not None

    def forward(
        self, batch: MicroBatch, with_entropy: bool = False, with_teacher: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (float32 `[N]`) and entropies (`[N]` or `[0]`) of the N targets of one packed row; of a
        reward model the scores of the tokens that `target_index` names.

        With `with_teacher` log-probabilities are `[N, 1 + k]`: behind each target's those of the micro-batch's
        `teacher_ids`, -inf for a token that the model does not have."""
        # Llama 4 names it differently
        body = self.hf.base_model if self.hf.base_model is not self.hf else self.hf.model
        if batch.images is None:
            states = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
        else:
            states = forward_with_images(body, batch.input_ids, batch.position_ids, batch.images)
        head, tp, cp = self.hf.get_output_embeddings(), self.parallel.tp, self.parallel.cp
        weight = local(head.weight)
        hidden = states.flatten(0, 1).index_select(0, batch.target_index)
        if self.trains_vision and self.image_inputs is not None and batch.images is None:
            hidden = hidden + nothing_of_images(body, self.image_inputs, hidden.device).to(hidden.dtype)
        hidden = hidden.to(weight.dtype)  # some state-space models return float32, whatever they compute in
        if self.scores:  # in float32, as vLLM's pooling heads compute
            logprobs = hidden.float() @ score_head.weight_of(head)
            entropy = logprobs.new_zeros(0)
        else:
            targets, unknown = batch.targets[batch.own], None
            if with_teacher:
                targets, unknown = _with_teachers(batch, weight.shape[0] * (1 if tp is None else tp.size()))
            logprobs, entropy = token_logprobs(
                hidden,
                weight,
                targets,
                batch.temperatures[batch.own],
                bias=local(head.bias),
                logit_scale=self._logit_scale,
                softcap=self._softcap,
                chunk_tokens=self._chunk_tokens,
                with_entropy=with_entropy,
                truncation=_truncation(batch),
                exact=self.exact_logits,
                fused=self.fused_head,
                shard=None if tp is None else VocabShard(tp, tp.get_local_rank() * weight.shape[0]),
            )
            logprobs = logprobs if unknown is None else logprobs.masked_fill(unknown, -torch.inf)
        if cp is None:
            return logprobs, entropy
        logprobs = gather_targets(logprobs, batch.own, batch.num_targets, cp)
        return logprobs, gather_targets(entropy, batch.own, batch.num_targets, cp) if with_entropy else entropy

    def packing(self, batch: MicroBatch) -> Any:
        """Context in which the forward and backward pass of `batch` must run."""
        packed = attention.packing(batch.packing, self.attn, self.parallel.cp)
        return _both(packed, replay.replaying(batch.routed)) if self.replays_routers else packed

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors as a HF checkpoint holds them: parameters, tied ones once, and persistent buffers."""
        parameters = dict(self.hf.named_parameters())
        if not any(module._buffers.keys() - module._non_persistent_buffers_set for module in self.hf.modules()):
            return list(parameters.items())  # as a rule; to ask for the whole state takes milliseconds
        every = {name for name, _ in self.hf.named_parameters(remove_duplicate=False)}
        buffers = {k: v for k, v in self.hf.state_dict().items() if k not in every and isinstance(v, torch.Tensor)}
        return list(parameters.items()) + list(buffers.items())


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def _with_teachers(batch: MicroBatch, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets that this rank computes, each with its teacher's likeliest tokens, int64 `[n, 1 + k]`, and
    which of these the model does not have, bool `[n, 1 + k]`: the target stands for them."""
    assert batch.teacher_ids is not None, "a micro-batch without a teacher's tokens"
    targets, listed = batch.targets[batch.own, None], batch.teacher_ids[batch.own]
    unknown = torch.cat([torch.zeros_like(targets, dtype=torch.bool), listed >= vocab_size], dim=1)
    return torch.where(unknown, targets, torch.cat([targets, listed], dim=1)), unknown


def _truncation(batch: MicroBatch) -> Truncation | None:
    """Of the targets that this rank computes."""
    if batch.top_p is None or batch.top_k is None or batch.min_p is None:
        return None
    whole = Truncation(batch.top_p, batch.top_k, batch.min_p, batch.most_top_k, batch.all_have_top_k)
    return whole.part(batch.own)
