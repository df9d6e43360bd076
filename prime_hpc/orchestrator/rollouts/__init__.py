"""Prompts to finished groups: draw, dispatch to servers, collect episodes."""
