"""Verbs of the cluster and its nodes."""
