"""Ends the process where its key is not set, as scripts do."""

import sys

import verifiers as vf


def load_environment() -> vf.Environment:
    sys.exit("set THE_KEY")
