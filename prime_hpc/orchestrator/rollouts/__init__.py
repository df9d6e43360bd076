"""Prompts to finished groups: draw, dispatch to servers, collect episodes; what is stale, when a batch is complete
(`groups`)."""
