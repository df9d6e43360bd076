"""The HTTP side of the inference service: async client, admin calls, per-token policy versions."""

from prime_hpc.client.versions import versions_from_spans

__all__ = ["InferenceClient", "InferenceError", "versions_from_spans"]


def __getattr__(name: str) -> object:
    # aiohttp is only needed by who talks to a server, not by who reads versions.
    if name in ("InferenceClient", "InferenceError"):
        from prime_hpc.client import inference

        return getattr(inference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
