"""Hostile file systems for tests: `layer` in process, deterministic; `mount` for real, with the kernel's caches."""
