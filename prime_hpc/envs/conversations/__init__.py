"""What was said in an episode, as plain JSON: rows of supervised data, prompts for a teacher with its own template."""
