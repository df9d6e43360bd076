"""Sandboxes that a compute node has: processes that see neither host, network nor run, started ahead, with limits."""
