"""The SFT loop: the next samples, one train step, checkpoints, and at the end the weights.

Called by `main.py`. Engine, publishing and checkpoints are those of RL.
"""

import time

import torch
from loguru import logger

from prime_hpc.store.weights import list_versions
from prime_hpc.trainer.batches import MicroBatch
from prime_hpc.trainer.objectives import LossStats, sft_loss
from prime_hpc.trainer.session import Session, Signal
from prime_hpc.trainer.sft_data import ChatTokenizer, FakeSFTData, SFTData, load_samples

_RL_ONLY = ("reward", "lag_mean", "lag_max")


def sft_objective(micro: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """Mean negative log-likelihood over the batch's trained tokens."""
    return sft_loss(logprobs, weights)


def build_data(session: Session) -> SFTData | FakeSFTData:
    """The data set of the config, tokenised.

    Raises:
        ValueError: no tokenizer, rows that cannot be trained on, a sequence length above the micro-batch budget.
    """
    experiment = session.experiment
    config = experiment.sft.data
    seq_len = config.seq_len or experiment.seq_len
    if config.type == "fake":
        return FakeSFTData(config, seed=experiment.seed, seq_len=seq_len, vocab_size=session.vocab_size)
    if seq_len > experiment.micro_batch_tokens:
        raise ValueError(
            f"sft.data.seq_len ({seq_len}) exceeds trainer.micro_batch_tokens ({experiment.micro_batch_tokens})"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(session.source, trust_remote_code=experiment.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.name = {experiment.model.name}: no tokenizer in {session.source} ({error})") from error
    chat = ChatTokenizer(tokenizer, enable_thinking=experiment.model.enable_thinking)
    samples = load_samples(config, chat, seq_len)
    if session.rank == 0:
        trained = sum(int(s.loss_mask.sum()) for s in samples)
        total = sum(len(s.token_ids) for s in samples)
        logger.info(f"{config.path}: {len(samples):,} samples, {total:,} tokens, {trained:,} of them trained")
    budget = experiment.micro_batch_tokens
    return SFTData(samples, config, seed=experiment.seed, micro_batch_tokens=budget)


def run_sft(session: Session) -> None:
    """Train until `max_steps`, or until the supervisor rings "stop"; returns when all saves are whole. Collective."""
    experiment = session.experiment
    data = build_data(session)
    start, progress = session.resume()
    position = progress.get("num_samples", 0)
    batch_size = experiment.sft.data.batch_size
    session.status.ready(step=start, world_size=session.world_size)
    for step in range(start + 1, session.last_step + 1):
        started = time.perf_counter()
        if not _goes_on(session, step - 1, position):
            return
        with session.engine.timer("data"):
            batch = data.batch(position, *session.part)
        metrics = session.train_step(step, batch, sft_objective)
        position += batch_size
        interval = experiment.sft.save_interval
        if interval and step % interval == 0 and not experiment.trainer.bench:
            session.publish(step, prune=False)
        if session.save_is_due(step):
            session.save(step, progress={"num_samples": position}, batch_dir=None)
        session.report(step, {k: v for k, v in metrics.items() if k not in _RL_ONLY}, started)
    session.finish_saves()
    _finish(session)


def _goes_on(session: Session, step: int, position: int) -> bool:
    """At the boundary after `step`: do what the supervisor asks for; False: the loop ends here. Collective."""
    while True:
        asked = session.requested() if session.rank == 0 else None
        signal = session.agree(asked or Signal.GO)
        if signal is Signal.GO:
            return True
        if signal is not Signal.STOP:
            session.save(step, progress={"num_samples": position}, batch_dir=None)
        if signal is not Signal.SAVE:
            session.finish_saves()
            if session.rank == 0:
                message = session.doorbell.latest("stop") or {}
                logger.info(f"stopping after step {step}: {message.get('reason', 'asked to')}")
            return False


def _finish(session: Session) -> None:
    """Publish the last version unless it is there; a bench run prints its table instead."""
    if session.experiment.trainer.bench:
        if session.rank == 0:
            logger.info(session.bench_table())
        return
    last = session.experiment.max_steps
    missing = session.rank == 0 and last not in list_versions(session.paths)
    if session.agree(Signal.GO if missing else Signal.STOP) is Signal.GO:
        session.publish(last, prune=False)
