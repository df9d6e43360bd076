"""The alarm on the distance between the trainer's and the engine's log-probabilities (`trainer.loss.mismatch`)."""

import torch.distributed as dist
from loguru import logger

from prime_hpc.config.sections.trainer import MismatchConfig


class MismatchAlarm:
    """Looks at the metric `kl` of every batch, before the policy moves."""

    def __init__(self, config: MismatchConfig) -> None:
        self._config, self._alarmed = config, False

    def check(self, step: int, metrics: dict[str, float]) -> str | None:
        """Return why a step is to be refused, None where it is not: then warn when the mismatch has risen above its
        threshold, and add `mismatch_alarm` to the metrics."""
        warn, stop, kl = self._config.warn, self._config.stop, metrics["kl"]
        if stop is not None and kl > stop:
            return (
                f"step {step}: the policy is {kl:.3g} nats a token (KL) from what the engine reported, above "
                f"trainer.loss.mismatch.stop = {stop:g}; stopped before version {step} was made or published. Lower "
                "async_level or trainer.optim.lr, or look for different numerics (dtype, temperature, top_p) in engine "
                "and trainer"
            )
        above = warn is not None and kl > warn
        metrics["mismatch_alarm"] = float(above)
        if above and not self._alarmed and dist.get_rank() == 0:
            logger.warning(
                f"step {step}: the mismatch to the engine, KL = {kl:.3g} nats a token, is above "
                f"trainer.loss.mismatch.warn = {warn:g} (largest log-probability difference "
                f"{metrics['logprob_diff_max']:.3g}, mean lag {metrics['lag_mean']:.2g}); said once until it is below"
            )
        self._alarmed = above
        return None
