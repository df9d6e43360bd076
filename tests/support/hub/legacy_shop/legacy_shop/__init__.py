"""Environments with several turns as a package of the Environments Hub is written: a folder, `load_environment`."""

from .shop import load_environment

__all__ = ["load_environment"]
