"""What trades time for device memory: recomputed and offloaded activations, optimizer state in host memory."""
