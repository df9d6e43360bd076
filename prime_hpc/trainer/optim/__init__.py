"""Optimizers and learning-rate schedules."""

from prime_hpc.trainer.optim.build import build_optimizer
from prime_hpc.trainer.optim.muon import Muon, orthogonalize
from prime_hpc.trainer.optim.schedule import learning_rate_factor, set_learning_rate
from prime_hpc.trainer.optim.signsgd import SignSGD

__all__ = ["Muon", "SignSGD", "build_optimizer", "learning_rate_factor", "orthogonalize", "set_learning_rate"]
