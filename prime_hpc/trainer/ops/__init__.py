"""Tensor operations: attention, log-probabilities, context parallelism, float8, copies to the device."""
