"""PPO's critic (`trainer.critic`): a second model that predicts what reward is still to come; from its values
and the tokens' rewards come their advantages.

`gae.py` has the arithmetic, `step.py` a train step of both models, `load.py` makes the second one.
"""

from prime_hpc.trainer.critic.load import load_critic
from prime_hpc.trainer.critic.step import ActorCriticStep, CriticStep

__all__ = ["ActorCriticStep", "CriticStep", "load_critic"]
