"""Models on disk: where they lie, what their config and tensors say, and what tells one from another."""
