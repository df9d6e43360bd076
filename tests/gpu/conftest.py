"""Tests of what only a GPU can show. Without one they are collected and skipped, and say so; torch is not even loaded.

pytest tests/gpu        (or `pytest -m gpu`; tools/gpu-check runs most of the same checks and writes a table)
"""

from pathlib import Path

import pytest

from prime_hpc.runtime.gpus import visible_gpus

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip those that ask for more GPUs than there are."""
    count = len(visible_gpus())
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(900))
        own = item.get_closest_marker("gpu_count")
        wanted = own.args[0] if own is not None else 1
        if count < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} NVIDIA GPU(s), {count} to be seen here"))
