"""Mixtures of experts as transformers builds them: what trainer and engines must know alike of their routers."""
