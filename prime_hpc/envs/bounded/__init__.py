"""Calls that may never end on what a model writes, made in processes that can be killed."""
