"""Times of the parts of a run: what a calibration says, and all that the model of events knows."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds, each of one thing."""

    rollouts: tuple[tuple[float, float], ...]
    """Episodes as they were measured: sampled tokens, and seconds that sampling does not explain."""
    token_s: float
    """Of a token of each request, however many are in flight (`a`)."""
    shared_token_s: float
    """More of it for every request in flight at the engine (`b`)."""
    trained_per_sampled: float
    """Tokens that the trainer computes for one sampled token of a batch: prompts are computed, too."""
    train_fixed_s: float
    """Of an update, whatever its tokens."""
    train_token_s: float
    """Of a token in one pass over its batch, on one rank; with its share of what a batch computes once (a critic's
    values)."""
    publish_s: float = 0.0
    save_s: float = 0.0
    """By which one save holds training up."""
    other_s: float = 0.0
    """Of a step, after publishing."""
    handover_s: float = 0.0
    """From a whole batch until the trainer can read it."""
    load_s: float = 0.0
    """From a published version until all engines serve it."""
    pause_s: float = 0.0
    """For which of that they sample nothing."""
    dropped_share: float = 0.0
    """Of the groups: those that come to nothing."""

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """Return one of the measured episodes."""
        return self.rollouts[rng.randrange(len(self.rollouts))]

    def train_s(self, tokens: float, ranks: int, epochs: int = 1, updates: int = 1) -> float:
        """Seconds of forward, backward and optimizer of a batch, in so many passes and updates; ranks share the tokens
        evenly."""
        return self.train_fixed_s * updates + self.train_token_s * tokens * epochs / ranks

    def after_s(self, save_interval: int | None) -> float:
        """Seconds of a step after publishing, with its share of a save."""
        return self.other_s + (self.save_s / save_interval if save_interval else 0.0)
