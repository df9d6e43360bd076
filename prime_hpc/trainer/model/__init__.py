"""The policy's modules and weights: load from Hugging Face, convert, wrap, test at start."""
