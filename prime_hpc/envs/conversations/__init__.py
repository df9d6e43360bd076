"""Conversations of episodes as plain JSON: rows of supervised data, prompts for a teacher with its own template."""
