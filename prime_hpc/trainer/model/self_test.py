"""Return whether a loaded policy keeps samples apart: asked at every start, of the real model, kernel and ranks.

Three short samples, two of which begin alike, go through the forward pass alone, behind each other in one row, and with
their common beginning computed once (or, for families that train one sample a row, as rows of one padded batch). A
sample's log-probabilities must be the same in all of these, up to rounding, and must not move when the tokens of its
neighbours change: not by a bit in a dense model, as all shapes stay. On ranks that neither split rows nor matrices,
they must also be those of the model's own code with its own attention and output head. Where they are not, training
ends before it begins: gradients would be wrong in silence, with nothing to see in supervised training.

Rounding is measured, not assumed: each transformer block's output is disturbed by one rounding error of the compute
dtype, and the log-probabilities' answer to that is the unit of the bounds. Where one disturbance does not explain what
a model with experts shows, others may: a token near the border of two experts goes to the other one in some of them.

It leaves no trace: no gradients, no random numbers drawn, no module's mode changed. Collective.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.image_inputs import ImageInputs, random_image
from prime_hpc.trainer.batching.micro_batches import MicroBatch, build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.kernel_test import check_kernels, recorded_calls
from prime_hpc.trainer.model.policy import Policy

LENGTHS = (12, 15, 19)
"""Tokens of the three samples."""
COMMON = 9
"""Tokens that the last two begin with."""
AFTER = 3
"""Tokens before a sample's image, of a model that sees them."""
FACTOR = 8.0
"""Bound of a difference between two ways of computing one sample, in units of the measured rounding."""
NEIGHBOUR_FACTOR = 4.0
"""The same where only neighbours' tokens change, in models with experts, which may then multiply in other groups."""
DISTURBANCES = 32
"""Most disturbances of a model with experts: one rounding error may give a token to another expert, or may not."""
UPSTREAM_FACTOR = 64.0
"""The same against the model's own code: other kernels round at other places."""


class SelfTestError(ValueError):
    """The model's log-probabilities depend on how samples are laid out, or are not its own code's."""


@dataclass(frozen=True)
class Found:
    """Largest differences of log-probabilities, in nats, over all ranks."""

    rounding: float
    """The answer to one rounding error a block."""
    widest: float
    """The widest answer to any that was tried: of a model with experts several, where one does not explain enough."""
    together: float
    """Between a sample alone and with others."""
    shared: float
    """Between a sample alone and with its beginning shared."""
    neighbour: float
    """When only the neighbours' tokens change."""
    again: float
    """When nothing changes: 0 where kernels repeat themselves exactly."""
    upstream: float | None
    """To the model's own code; None: not compared in this layout."""


def _batch(vocab_size: int, neighbours: int, shown: "_Shown | None") -> RankBatch:
    """Three micro-batches: all three samples, then the second and the third alone.

    The first sample, and what the second has after the common beginning, are drawn from the seed `neighbours`.

    Args:
        neighbours: seed of what changes.
        shown: shows an image in the first sample, and one in the common beginning of the others; None: none is.
    """
    fixed, drawn = np.random.default_rng(0), np.random.default_rng([1, neighbours])

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.integers(min(3, vocab_size - 1), vocab_size, count).astype(np.int32)

    common, last = draw(fixed, COMMON), draw(fixed, LENGTHS[2] - COMMON)
    middle = draw(drawn, LENGTHS[1] - COMMON)
    middle[0] = last[0] - 1 if last[0] > 0 else 1  # the samples part here, whatever is drawn
    first = draw(drawn, LENGTHS[0])
    ids = [first, np.concatenate([common, middle]), np.concatenate([common, last])]
    images = None
    if shown is not None:
        with_image = [shown.insert(ids[0], 1 + neighbours), *(shown.insert(tokens, 0) for tokens in ids[1:])]
        ids = [tokens for tokens, _, _ in with_image]
        images = [(numbers, [image]) for _, numbers, image in with_image]
    batch = build_rank_batch([[0, 1, 2], [1], [2]], ids, [np.ones(len(i), bool) for i in ids], images=images)
    return replace(batch, group_ids=np.array([0, 1, 1, 1, 1]))


class _Shown:
    """Puts an image into samples, for a model that sees them."""

    def __init__(self, inputs: ImageInputs, config: Any) -> None:
        self._inputs, self._token = inputs, int(config.image_token_id)
        self._around = int(config.vision_start_token_id), int(config.vision_end_token_id)
        self._others = {int(config.video_token_id), *self._around}

    def insert(self, ids: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Return a sample with an image after its third token, the number of each token's image, and the image."""
        image = random_image(seed)
        length = self._inputs.num_tokens(self._inputs.pixels(image))
        plain = np.where(np.isin(ids, [self._token, *self._others]), 1, ids).astype(np.int32)
        middle = [self._around[0], *[self._token] * length, self._around[1]]
        tokens = np.concatenate([plain[:AFTER], middle, plain[AFTER:]]).astype(np.int32)
        numbers = np.zeros(len(tokens), np.int32)
        numbers[AFTER + 1 : AFTER + 1 + length] = 1
        return tokens, numbers, image

    def for_upstream(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        """Return what the model's own forward pass takes beside a sample's tokens."""
        assert micro.images is not None
        kinds = torch.zeros_like(micro.input_ids)
        kinds.view(-1)[micro.images.tokens] = 1
        grid, pixels = micro.images.grid_thw, micro.images.pixel_values
        return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


@contextlib.contextmanager
def _disturbed(blocks: list[nn.Module], unit: float, seed: int) -> Iterator[None]:
    """Multiply what each block returns by 1 + unit * noise, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(_: nn.Module, __: Any, output: Any) -> Any:
        several = isinstance(output, tuple | list)
        hidden = output[0] if several else output
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            return output
        noise = torch.randn(hidden.shape, generator=generator).to(hidden.device)
        moved = (hidden.float() * (1 + unit * noise)).to(hidden.dtype)
        return type(output)((moved, *output[1:])) if several else moved

    handles = [block.register_forward_hook(disturb) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Prober:
    """Runs the policy on the batches of the test."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        vocab_size = policy.hf.config.get_text_config().vocab_size
        self.shown = None if policy.image_inputs is None else _Shown(policy.image_inputs, policy.hf.config)
        self.batches = [_batch(vocab_size, neighbours, self.shown) for neighbours in (0, 1)]
        self.lengths = np.diff(self.batches[0].seq_offsets)[:3].tolist()
        """Tokens of the three samples."""

    def logprobs(self, which: int, index: int, *, share: bool = False) -> torch.Tensor:
        """float64 log-probabilities of micro-batch `index`, one sample behind the other."""
        micro = self._micro_batch(which, index, share=share)
        with self.policy.packing(micro):
            values, _ = self.policy(micro)
        return values.detach().double()

    def _micro_batch(self, which: int, index: int, *, share: bool = False) -> MicroBatch:
        policy = self.policy
        return make_micro_batch(
            self.batches[which],
            index,
            self.device,
            policy.parallel,
            share_prefixes=share,
            single_rows=policy.single_rows,
            image_inputs=policy.image_inputs,
        )

    def upstream(self, index: int) -> torch.Tensor:
        """float64 log-probabilities of a sample by the model's own forward pass, attention and output head."""
        batch, hf = self.batches[0], self.policy.hf
        ids = torch.from_numpy(batch.token_ids[batch.tokens_of(index)].astype(np.int64)).to(self.device)[None]
        more = {} if self.shown is None else self.shown.for_upstream(self._micro_batch(0, index))
        configs = {id(c): c for m in hf.modules() if (c := getattr(m, "config", None)) is not None}
        before = {key: getattr(c, "_attn_implementation", None) for key, c in configs.items()}
        if isinstance(self.policy, FSDPModule):
            self.policy.unshard()
        try:
            for config in configs.values():
                config._attn_implementation = "eager"
            if self.policy.scores:  # its own forward pass reads the last token alone
                states = hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
                return hf.score(states)[0, :-1, 0].double()
            logits = hf(input_ids=ids, use_cache=False, **more).logits[0]
        finally:
            for key, config in configs.items():
                config._attn_implementation = before[key]
        return logits.double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Largest absolute difference; infinite where either is not finite."""
    gap = (one - other).abs()
    return torch.where(gap.isfinite(), gap, torch.inf).max()


def measure(policy: Policy, device: torch.device, unit: float) -> Found:
    """Return the differences that the self-test judges. Collective.
    `unit`: relative rounding error of the compute dtype."""
    from prime_hpc.trainer.parallel.distribute import reshard_all, transformer_blocks

    prober, parallel = _Prober(policy, device), policy.parallel
    alone = [prober.logprobs(0, index) for index in (1, 2)]

    def answer(seed: int) -> torch.Tensor:
        with _disturbed(transformer_blocks(policy.hf), unit, seed):
            moved = [prober.logprobs(0, index) for index in (1, 2)]
        return torch.stack([_difference(a, b) for a, b in zip(alone, moved, strict=True)]).max()

    least = torch.cat(alone).abs().max() * torch.finfo(torch.float32).eps  # a log-probability's own resolution
    together, shared = prober.logprobs(0, 0), prober.logprobs(0, 0, share=True)
    first = prober.lengths[0] - 1
    part = first + prober.lengths[1] - 1  # the last sample's targets begin here
    rows = {
        "rounding": torch.maximum(least, answer(0)),
        "together": _difference(torch.cat(alone), together[first:]),
        "shared": _difference(torch.cat(alone), shared[first:]),
        "neighbour": torch.maximum(
            _difference(together[part:], prober.logprobs(1, 0)[part:]),
            _difference(shared[part:], prober.logprobs(1, 0, share=True)[part:]),
        ),
    }
    rows["again"] = _difference(together, prober.logprobs(0, 0))
    if parallel.tp is None and parallel.cp is None and parallel.ep is None:
        rows["upstream"] = torch.stack([_difference(a, prober.upstream(i)) for i, a in enumerate(alone, 1)]).max()
    values: dict[str, Any] = dict(zip(rows, _of_all_ranks(list(rows.values())), strict=True))
    found = Found(**{"upstream": None, "widest": values["rounding"], **values})
    for seed in range(1, DISTURBANCES if _has_experts(policy) else 1):
        if max(found.together, found.shared) <= FACTOR * found.widest:
            break
        found = replace(found, widest=max(found.widest, *_of_all_ranks([answer(seed)])))
    reshard_all(policy)
    return found


def _of_all_ranks(values: list[torch.Tensor]) -> list[float]:
    """Return the largest of each over all ranks, which so judge alike. Collective."""
    table = torch.stack(values).float()
    if dist.is_initialized():
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
    found: list[float] = table.tolist()
    return found


def _has_experts(policy: Policy) -> bool:
    return any("expert" in name for name, _ in policy.hf.named_modules())


@torch.no_grad()
def self_test(policy: Policy, device: torch.device, unit: float, *, mixes_scales: bool = False) -> Found:
    """End a start whose log-probabilities would be wrong. Collective.

    Args:
        policy: loaded and sharded, in evaluation mode.
        unit: relative rounding error of the compute dtype.
        mixes_scales: whether the scale of a product is that of the whole row (float8).

    Returns:
        what was measured.

    Raises:
        SelfTestError: on every rank; says what differs by how much.
    """
    with torch.compiler.set_stance("force_eager"), recorded_calls() as calls:  # nothing else would use its shapes
        found = measure(policy, device, unit)
    if wrong := check_kernels(policy, calls, device):
        raise SelfTestError(
            f"self-test: the attention kernel that model.attn = {policy.attn} takes here computes something else "
            f"than the layers ask for: {'; '.join(wrong)}. Was flash-attn built without a part of it? Set model.attn = "
            "sdpa, or install it whole"
        )
    config = policy.hf.config.get_text_config()
    name = f"{type(policy.hf).__name__} (model_type {getattr(config, 'model_type', '?')})"
    bound, upstream_bound = FACTOR * found.widest, UPSTREAM_FACTOR * found.rounding
    repeats = found.again == 0 and not mixes_scales and not _has_experts(policy)
    near = 0.0 if repeats else NEIGHBOUR_FACTOR * found.rounding
    placed = "in rows of one batch" if policy.single_rows else "packed behind each other"
    if not math.isfinite(found.rounding):  # nothing would exceed such a bound
        raise SelfTestError(f"self-test: log-probabilities of {name} are not finite: are its weights?")
    problems = []
    if not found.together <= bound:
        problems.append(f"{placed}, samples differ by {found.together:.2g} nats from each alone")
    if not found.shared <= bound and not policy.single_rows:
        problems.append(f"with a shared prompt, they differ by {found.shared:.2g}")
    if not found.neighbour <= near:
        problems.append(f"a sample moves by {found.neighbour:.2g} when only its neighbours' tokens change")
    if found.upstream is not None and not found.upstream <= upstream_bound:
        problems.append(f"the model's own code differs by {found.upstream:.2g} (bound {upstream_bound:.2g})")
    if problems:
        raise SelfTestError(
            f"self-test: {name} cannot be trained like this: {'; '.join(problems)}, where rounding explains "
            f"{bound:.2g}. Its layers mix what must stay apart, or attend in a way that the trainer's kernel does not; "
            "gradients would be wrong"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        largest = max(found.together, found.shared, found.neighbour)
        logger.info(f"self-test: samples differ by at most {largest:.2g} nats however they lie (rounding {bound:.2g})")
    return found
