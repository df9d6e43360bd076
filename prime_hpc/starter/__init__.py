"""Starter models and warm-up data for machines without a model hub; called by `tools/make-starter` alone."""
