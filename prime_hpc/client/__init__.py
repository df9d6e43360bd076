"""The HTTP side of the inference service: async client, admin calls, per-token policy versions."""
