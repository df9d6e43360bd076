"""Messages of episodes as plain JSON: rows of supervised data, prompts of a teacher with its own chat template."""
