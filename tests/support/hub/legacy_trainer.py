"""Imports a trainer beside its environment."""

from verifiers import GRPOTrainer, SingleTurnEnv

__all__ = ["GRPOTrainer", "SingleTurnEnv"]
