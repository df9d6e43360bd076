"""Inference servers: what the servers of all backends share, and the backends (`vllm`, `transformers`)."""
