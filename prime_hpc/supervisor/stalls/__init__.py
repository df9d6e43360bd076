"""A step that stands still: looked at on every node, and its cause named."""
